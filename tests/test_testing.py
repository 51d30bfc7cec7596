"""Each law of `check_method` is broken by a method here, and named."""

# ruff: noqa: ARG002

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nearkin.config import Dim, QueueSize
from nearkin.memory import KeyUpdate, Queue, same_image_mask
from nearkin.method import Method
from nearkin.networks.branch import Branch, ema_update, frozen_copy
from nearkin.objectives import info_nce, unit
from nearkin.testing import LawError, check_method
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


def changed(step, **values):
    """The same step with another loss, memo or metrics."""
    parts = {"loss": step.loss, "memo": step.memo, "metrics": step.metrics}
    return Step(**parts | values)


class WritesInForward(Good):
    def compute_loss(self, encoded, batch, progress):
        step = super().compute_loss(encoded, batch, progress)
        self.queue.enqueue(step.memo.keys, step.memo.images)
        return step


class MovesTheTargetInForward(Good):
    def encode(self, batch):
        ema_update(self.target, self.online, 0.9)
        return super().encode(batch)


class CommitsWithGradients(Good):
    def commit(self, memo, progress):
        for target, online in zip(self.target.parameters(), self.online.parameters()):
            online.mul_(1.0)
            target.lerp_(online, 0.1)


class ReturnsFromCommit(Good):
    @torch.no_grad()
    def commit(self, memo, progress):
        super().commit(memo, progress)
        return memo


class KeepsTensors(Good):
    def commit(self, memo, progress):
        super().commit(memo, progress)
        self.keys = [*getattr(self, "keys", []), memo.keys]


class KeepsNumbers(Good):
    """A Python number is memory as well."""

    __doc__ = Good.__doc__
    count = 0

    def compute_loss(self, encoded, batch, progress):
        step = super().compute_loss(encoded, batch, progress)
        return changed(step, loss=step.loss * (1 + 0.1 * self.count))

    def commit(self, memo, progress):
        super().commit(memo, progress)
        self.count += 1


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


class GrowsItsQueue(Good):
    def commit(self, memo, progress):
        super().commit(memo, progress)
        self.queue.keys = torch.cat([self.queue.keys, memo.keys])


class DrawsFromNumpy(Good):
    def compute_loss(self, encoded, batch, progress):
        step = super().compute_loss(encoded, batch, progress)
        return changed(step, loss=step.loss * (1 + np.random.rand()))


class ReadsLabels(Good):
    def compute_loss(self, encoded, batch, progress):
        step = super().compute_loss(encoded, batch, progress)
        return changed(step, loss=step.loss * (1 + (batch.label > 0).float().mean()))


class TrainsTheTarget(Good):
    def __init__(self, backbone, *, dim: Dim = 8):
        super().__init__(backbone, dim=dim)
        self.target = copy.deepcopy(self.online)


class HasAnUnusedHead(Good):
    def __init__(self, backbone, *, dim: Dim = 8):
        super().__init__(backbone, dim=dim)
        self.head = nn.Linear(dim, dim)


class RemembersTheGraph(Good):
    def compute_loss(self, encoded, batch, progress):
        step = super().compute_loss(encoded, batch, progress)
        return changed(step, memo=KeyUpdate(batch.index, encoded[0]))


class HasNoLoss(Good):
    def compute_loss(self, encoded, batch, progress):
        step = super().compute_loss(encoded, batch, progress)
        return changed(step, loss=step.loss / 0)


class MeasuresWithAGraph(Good):
    def compute_loss(self, encoded, batch, progress):
        step = super().compute_loss(encoded, batch, progress)
        return changed(step, metrics={"spread": encoded[0].std()})


class EncodesOneNumber(Good):
    def encode(self, batch):
        return *super().encode(batch)[:1], batch.views[0].mean()[None]


class NormalizesInTheLoss(Good):
    def __init__(self, backbone, *, dim: Dim = 8):
        super().__init__(backbone, dim=dim)
        self.norm = nn.BatchNorm1d(dim)

    def compute_loss(self, encoded, batch, progress):
        query, key = encoded
        return super().compute_loss((unit(self.norm(query)), key), batch, progress)


class ComputesInSingle(Good):
    def compute_loss(self, encoded, batch, progress):
        step = super().compute_loss(encoded, batch, progress)
        return changed(step, loss=(encoded[0] @ torch.ones(8, 1)).sum() + step.loss)


class FlattensTheImages(Good):
    def encode(self, batch):
        query, key = super().encode(batch)
        pixels = torch.stack([view.view(len(view), -1) for view in batch.views[:1]])
        return query + 0 * pixels.sum(), key


class RemembersInBfloat16(Good):
    def compute_loss(self, encoded, batch, progress):
        step = super().compute_loss(encoded, batch, progress)
        keys = F.linear(step.memo.keys, torch.eye(8, dtype=step.memo.keys.dtype))
        return changed(step, memo=KeyUpdate(batch.index, keys))


class TakesPositions(Good):
    def __init__(self, backbone, dim: Dim = 8):
        super().__init__(backbone, dim=dim)


class TakesAnything(Good):
    def __init__(self, backbone, *, dim=8):
        super().__init__(backbone, dim=dim)


class HasNoDefault(Good):
    def __init__(self, backbone, *, dim: Dim):
        super().__init__(backbone, dim=dim)


class ExplainsNothing(Good):
    """A momentum encoder with a queue."""


class TakesALength(Good):
    def __init__(self, backbone, *, dim: int = 8.5):
        super().__init__(backbone, dim=int(dim))


class LacksALoss(Method[None]):
    def encode(self, batch):
        return ()


BROKEN = [
    (WritesInForward, "law 1 .*: forward changed queue.keys"),
    (MovesTheTargetInForward, r"law 1 .*: forward changed target\."),
    (CommitsWithGradients, "law 1 .*: commit needs @torch.no_grad"),
    (ReturnsFromCommit, "law 1 .*: commit returns KeyUpdate, not None"),
    (KeepsTensors, "law 3 .*: keys holds a tensor that is in no state_dict"),
    (KeepsNumbers, "law 3 .*: resumed from its state_dict after step 3, it has another loss in s"),
    (KeepsABufferToItself, "law 3 .*: resumed from its state_dict after step 3, it has another l"),
    (GrowsItsQueue, "law 3 .*: commit changed the shape of queue.keys"),
    (DrawsFromNumpy, "law 4 .*: a draw other than torch's, which the loop seeds, decides online"),
    (ReadsLabels, "law 8 .*: uses_labels is False, and labels decide online"),
    (
        TrainsTheTarget,
        r"the contract of a step .*: target.* belongs to the target, and requires a gradient",
    ),
    (
        HasAnUnusedHead,
        "the contract of a step .*: no gradient reaches head.weight, which requires one",
    ),
    (RemembersTheGraph, "the contract of a step .*: the memo holds a graph"),
    (HasNoLoss, "the contract of a step .*: the loss is inf, not one finite number"),
    (
        MeasuresWithAGraph,
        "the contract of a step .*: metric spread is not a scalar without gradient",
    ),
    (EncodesOneNumber, r"law 2 .*: encode returns \[1\] as tensor 1, not a row per image"),
    (NormalizesInTheLoss, "law 2 .*: compute_loss runs the batch norm norm; run it in encode"),
    (ComputesInSingle, "the contract of number formats .*: in float64 it fails: "),
    (
        FlattensTheImages,
        "the contract of number formats .*: with channels_last images it fails: view size",
    ),
    (
        RemembersInBfloat16,
        "the contract of number formats .*: under bfloat16, the memo is torch.bfloat16, not torch.flo",
    ),
    (TakesPositions, "law 5 .*: option dim is not keyword-only"),
    (TakesAnything, "law 5 .*: option dim has no type"),
    (HasNoDefault, "law 5 .*: option dim has no default"),
    (ExplainsNothing, "law 5 .*: the docstring of the class does not explain dim under Args"),
    (TakesALength, "law 5 .*: the default of dim does not fit its type: --dim 8.5"),
    (LacksALoss, "law 5 .*: method LacksALoss does not define compute_loss"),
]


@pytest.mark.parametrize(("cls", "message"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_law_is_named_with_what_differs(cls, message):
    with pytest.raises(LawError, match=f"^{cls.__name__} breaks {message}"):
        check_method(cls)


class DrawsInEncode(Good):
    def encode(self, batch):
        query, key = super().encode(batch)
        return unit(query + 0.1 * torch.randn_like(query)), key


def test_two_processes_are_compared_if_requested():
    check_method(DrawsInEncode)
    with pytest.raises(LawError, match=r"law 2 .*: the loss of step 0 is .*, not "):
        check_method(DrawsInEncode, processes=True)


def test_generators_of_the_caller_are_left_as_they_are():
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    check_method(Good)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


def test_what_is_no_method_is_refused():
    with pytest.raises(TypeError, match=r"nearkin\.method\.Method"):
        check_method(nn.Linear)
