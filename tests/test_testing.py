"""Each invariant of `check_method` is broken by a method here, and named."""

# ruff: noqa: ARG002

import copy
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import spawn
from torch import nn

from nearkin import testing
from nearkin.memory import KeyUpdate, Queue, same_image_mask
from nearkin.method import Method
from nearkin.networks.branch import Branch, ema_update, frozen_copy
from nearkin.objectives import info_nce, unit
from nearkin.schema import Dim, QueueSize
from nearkin.testing import InvariantError, check_method
from nearkin.types import Step


class Good(Method[KeyUpdate]):
    """A momentum encoder with a queue.

    Args:
        backbone: The network to train.
        dim: Numbers in an embedding.
        queue_size: Keys in the queue.
    """

    def __init__(self, backbone, *, dim: Dim = 8, queue_size: QueueSize = 65_536):
        super().__init__()
        self.online = Branch(backbone, dim)
        self.target = frozen_copy(self.online)
        self.queue = Queue(queue_size, dim)

    def encode(self, batch) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            key = unit(self.target(batch.views[1]))
        return unit(self.online(batch.views[0])), key

    def compute_loss(self, encoded, batch, progress) -> Step[KeyUpdate]:
        query, key = encoded
        own = same_image_mask(batch.index, self.queue.index)
        loss = info_nce(query, key, self.queue.keys, 0.2, own)
        return Step(loss, KeyUpdate(batch.index, key))

    @torch.no_grad()
    def commit(self, memo, progress):
        ema_update(self.target, self.online, 0.9)
        self.queue.enqueue(memo.keys, memo.images)


BROKEN = []


def breaks(message):
    """Say what `check_method` must answer to a method."""

    def told(cls):
        BROKEN.append((cls, message))
        return cls

    return told


class Changed(Good):  # its options are explained by Good
    def compute_loss(self, encoded, batch, progress):
        return self.changed(super().compute_loss(encoded, batch, progress), encoded, batch)


@breaks("invariant 1 .*: forward changed queue.keys")
class WritesInForward(Changed):
    def changed(self, step, encoded, batch):
        self.queue.enqueue(step.memo.keys, step.memo.images)
        return step


@breaks(r"invariant 1 .*: forward changed target\.")
class MovesTheTargetInForward(Good):
    def encode(self, batch):
        ema_update(self.target, self.online, 0.9)
        return super().encode(batch)


@breaks("invariant 1 .*: commit needs @torch.no_grad")
class CommitsWithGradients(Good):
    def commit(self, memo, progress):
        for target, online in zip(self.target.parameters(), self.online.parameters()):
            online.mul_(1.0)
            target.lerp_(online, 0.1)


@breaks("invariant 1 .*: commit returns KeyUpdate, not None")
class ReturnsFromCommit(Good):
    @torch.no_grad()
    def commit(self, memo, progress):
        super().commit(memo, progress)
        return memo


@breaks("invariant 3 .*: keys holds a tensor that is in no state_dict")
class KeepsTensors(Good):
    def commit(self, memo, progress):
        super().commit(memo, progress)
        self.keys = [*getattr(self, "keys", []), memo.keys]


@breaks("invariant 3 .*: resumed from its state_dict after step 3, it has another loss in s")
class KeepsNumbers(Changed):
    """A Python number is memory as well."""

    __doc__ = Good.__doc__
    count = 0

    def changed(self, step, encoded, batch):
        return replace(step, loss=step.loss * (1 + 0.1 * self.count))

    def commit(self, memo, progress):
        super().commit(memo, progress)
        self.count += 1


@breaks("invariant 3 .*: resumed from its state_dict after step 3, it has another l")
class KeepsABufferToItself(Good):
    def __init__(self, backbone, *, dim: Dim = 8):
        super().__init__(backbone, dim=dim)
        self.register_buffer("center", torch.zeros(dim), persistent=False)

    def compute_loss(self, encoded, batch, progress):
        query, key = encoded
        return super().compute_loss((unit(query - self.center), key), batch, progress)

    def commit(self, memo, progress):
        super().commit(memo, progress)
        self.center.lerp_(memo.keys.mean(dim=0), 0.5)


@breaks("invariant 3 .*: commit changed the shape of queue.keys")
class GrowsItsQueue(Good):
    def commit(self, memo, progress):
        super().commit(memo, progress)
        self.queue.keys = torch.cat([self.queue.keys, memo.keys])


@breaks("invariant 4 .*: a draw other than torch's, which the loop seeds, decides online")
class DrawsFromNumpy(Changed):
    def changed(self, step, encoded, batch):
        return replace(step, loss=step.loss * (1 + np.random.rand()))


@breaks("invariant 8 .*: uses_labels is False, and labels decide online")
class ReadsLabels(Changed):
    def changed(self, step, encoded, batch):
        return replace(step, loss=step.loss * (1 + (batch.label > 0).float().mean()))


@breaks(r"the contract of a step .*: target.* belongs to the target, and requires a gradient")
class TrainsTheTarget(Good):
    def __init__(self, backbone, *, dim: Dim = 8):
        super().__init__(backbone, dim=dim)
        self.target = copy.deepcopy(self.online)


@breaks("the contract of a step .*: no gradient reaches head.weight, which requires one")
class HasAnUnusedHead(Good):
    def __init__(self, backbone, *, dim: Dim = 8):
        super().__init__(backbone, dim=dim)
        self.head = nn.Linear(dim, dim)


@breaks("the contract of a step .*: the memo holds a graph")
class RemembersTheGraph(Changed):
    def changed(self, step, encoded, batch):
        return replace(step, memo=KeyUpdate(batch.index, encoded[0]))


@breaks("the contract of a step .*: the loss is inf, not one finite number")
class HasNoLoss(Changed):
    def changed(self, step, encoded, batch):
        return replace(step, loss=step.loss / 0)


@breaks("the contract of a step .*: metric spread is not a scalar without gradient")
class MeasuresWithAGraph(Changed):
    def changed(self, step, encoded, batch):
        return replace(step, metrics={"spread": encoded[0].std()})


@breaks(r"invariant 2 .*: encode returns \[1\] as tensor 1, not a row per image")
class EncodesOneNumber(Good):
    def encode(self, batch):
        return *super().encode(batch)[:1], batch.views[0].mean()[None]


@breaks("invariant 2 .*: compute_loss runs the batch norm norm; run it in encode")
class NormalizesInTheLoss(Good):
    def __init__(self, backbone, *, dim: Dim = 8):
        super().__init__(backbone, dim=dim)
        self.norm = nn.BatchNorm1d(dim)

    def compute_loss(self, encoded, batch, progress):
        query, key = encoded
        return super().compute_loss((unit(self.norm(query)), key), batch, progress)


@breaks("the contract of number formats .*: in float64 it fails: ")
class ComputesInSingle(Changed):
    def changed(self, step, encoded, batch):
        return replace(step, loss=(encoded[0] @ torch.ones(8, 1)).sum() + step.loss)


@breaks("the contract of number formats .*: with channels_last images it fails: view size")
class FlattensTheImages(Good):
    def encode(self, batch):
        query, key = super().encode(batch)
        pixels = torch.stack([view.view(len(view), -1) for view in batch.views[:1]])
        return query + 0 * pixels.sum(), key


@breaks(
    "the contract of number formats .*: under bfloat16, the memo is torch.bfloat16, not torch.flo"
)
class RemembersInBfloat16(Changed):
    def encode(self, batch):
        query, key = super().encode(batch)
        self.given = F.linear(query, torch.eye(8, dtype=query.dtype)).dtype
        return query, key

    def changed(self, step, encoded, batch):
        return replace(step, memo=KeyUpdate(batch.index, step.memo.keys.to(self.given)))


@breaks("invariant 5 .*: option dim is not keyword-only")
class TakesPositions(Good):
    def __init__(self, backbone, dim: Dim = 8):
        super().__init__(backbone, dim=dim)


@breaks("invariant 5 .*: option dim has no type")
class TakesAnything(Good):
    def __init__(self, backbone, *, dim=8):
        super().__init__(backbone, dim=dim)


@breaks("invariant 5 .*: option dim has no default")
class HasNoDefault(Good):
    def __init__(self, backbone, *, dim: Dim):
        super().__init__(backbone, dim=dim)


@breaks("invariant 5 .*: the docstring of the class does not explain dim under Args")
class ExplainsNothing(Good):
    """A momentum encoder with a queue."""


@breaks("invariant 5 .*: the default of dim does not fit its type: dim 8.5")
class TakesALength(Good):
    def __init__(self, backbone, *, dim: int = 8.5):
        super().__init__(backbone, dim=int(dim))


@breaks("invariant 5 .*: method LacksALoss does not define compute_loss")
class LacksALoss(Method[None]):
    def encode(self, batch):
        return ()


@pytest.mark.parametrize(("cls", "message"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_law_is_named_with_what_differs(cls, message):
    with pytest.raises(InvariantError, match=f"^{cls.__name__} breaks {message}"):
        check_method(cls)


class DrawsInEncode(Good):
    def encode(self, batch):
        query, key = super().encode(batch)
        return unit(query + 0.1 * torch.randn_like(query)), key


def test_two_processes_are_compared_if_requested(monkeypatch):
    by_forks = lambda function, args, nprocs: spawn(function, *args, processes=nprocs)
    monkeypatch.setattr(testing, "spawn", by_forks)  # test_extending.py starts new interpreters
    check_method(DrawsInEncode)
    with pytest.raises(InvariantError, match=r"invariant 2 .*: the loss of step 0 is .*, not "):
        check_method(DrawsInEncode, processes=True)


def test_generators_of_the_caller_are_left_as_they_are():
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    check_method(Good)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


def test_generators_of_the_caller_are_left_as_they_are_by_a_check_that_fails():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with pytest.raises(InvariantError):
        check_method(DrawsFromNumpy)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_what_is_no_method_is_refused():
    with pytest.raises(TypeError, match=r"nearkin\.method\.Method"):
        check_method(nn.Linear)
