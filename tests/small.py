"""Every method, small enough to test: the same code as at full size, nothing mocked."""

import gc
import math
import multiprocessing
import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from types_checked import unchecked

from nearkin.distributed import launch, process_group
from nearkin.method import Method
from nearkin.methods import METHODS
from nearkin.networks.branch import Backbone
from nearkin.objectives import unit
from nearkin.training import checkpoint
from nearkin.training.loop import steps
from nearkin.training.optimizer import build_optimizer, warmup_cosine
from nearkin.types import UNLABELED, Batch

NUM_IMAGES, BATCH, SIDE = 64, 16, 8

SMALL: dict[str, dict[str, object]] = {
    "barlow_twins": dict(dim=16, scale=0.1),
    "byol": dict(dim=8, hidden_dim=16, momentum=0.9),
    "dino": dict(dim=8, hidden_dim=16, num_prototypes=12, momentum=0.9, freeze_until=0.3),
    "feature_matching": dict(teacher_dim=10, hidden_dim=16),
    "instdisc": dict(dim=8, num_images=NUM_IMAGES, num_noise=32),
    "instdisc_parametric": dict(dim=8, num_images=NUM_IMAGES),
    "moco": dict(dim=8, hidden_dim=16, queue_size=40, momentum=0.9, bn_groups=4),
    "moco_end_to_end": dict(dim=8, hidden_dim=16, bn_groups=4),
    "moco_memory_bank": dict(dim=8, hidden_dim=16, num_images=NUM_IMAGES, num_negatives=32),
    "moco_v3": dict(dim=8, hidden_dim=16, momentum=0.9),
    "ncl": dict(
        num_known_classes=3,
        num_novel_classes=3,
        queue_size=40,
        num_neighbors=5,
        num_easy=6,
        num_mixes=2,
        num_hard=7,
        threshold=0.5,
    ),
    "nnclr": dict(dim=8, hidden_dim=16, predictor_dim=16, support_size=40, num_neighbors=2),
    "rotnet": dict(),
    "seed": dict(teacher_dim=10, hidden_dim=16, queue_size=40),
    "sigreg": dict(dim=8, hidden_dim=16, num_directions=12),
    "simclr": dict(dim=8, hidden_dim=16),
    "simgcd": dict(num_known_classes=3, num_novel_classes=3, dim=8, hidden_dim=16),
    "simsiam": dict(dim=8, num_layers=2, predictor_dim=6),
    "supervised": dict(num_known_classes=3),
    "swav": dict(
        dim=8, hidden_dim=16, num_prototypes=12, queue_size=24, queue_from=0.3, freeze_until=0.3
    ),
    "uno": dict(num_known_classes=3, num_novel_classes=3, dim=8, hidden_dim=16, num_heads=2),
    "vicreg": dict(dim=16),
}

PARTED = ("ncl",)
"""Methods that divide a batch by its labels, and so have to know how many there are of each."""


def small(name: str, **options: object) -> Method:
    torch.manual_seed(1)
    hidden = nn.Linear(3 * SIDE * SIDE, 24, bias=False)
    body = nn.Sequential(nn.Flatten(), hidden, nn.BatchNorm1d(24), nn.ReLU())
    return METHODS[name](Backbone(body, 24), **SMALL[name] | options)


def tiny_vit(**options) -> nn.Module:
    sizes = dict(img_size=SIDE, patch_size=4, embed_dim=16, depth=3, num_heads=2, num_classes=0)
    return VisionTransformer(dynamic_img_size=True, **sizes | options)


def batch_for(name: str, step: int) -> Batch:
    """A batch for a method: with labels of the first classes, if it learns from them."""
    batch = batch_at(step, len(METHODS[name].views))
    if METHODS[name].uses_labels:
        batch.label.copy_(torch.where(batch.index % 6 < 3, batch.index % 6, UNLABELED))
    if METHODS[name].uses_teacher:
        return replace(batch, teacher=tuple(map(taught, batch.views)))
    return batch


def taught(view: torch.Tensor) -> torch.Tensor:
    """Unit features of a view by a teacher: a fixed random network."""
    weight = torch.randn(3 * SIDE * SIDE, 10, generator=torch.Generator().manual_seed(0))
    # In double precision: the order in which a processor adds must not show in golden losses.
    return unit((view.flatten(1).double() @ weight.double()).tanh()).to(view.dtype)


def batch_at(step: int, num_views: int = 2) -> Batch:
    """A batch that depends on the step alone."""
    g = torch.Generator().manual_seed(step)
    index = torch.randperm(NUM_IMAGES, generator=g)[:BATCH]
    images = torch.randn(NUM_IMAGES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    views = tuple(
        images[index] + 0.3 * torch.randn(BATCH, 3, SIDE, SIDE, generator=g)
        for _ in range(num_views)
    )
    return Batch(views, index, torch.full_like(index, UNLABELED))


def as_double(batch: Batch) -> Batch:
    return batch.map(lambda x: x.double() if x.is_floating_point() else x)


def double_for(name: str, step: int = 0) -> Batch:
    return as_double(batch_for(name, step))


def double_at(step: int, num_views: int = 2) -> Batch:
    return as_double(batch_at(step, num_views))


def shard(batch: Batch, rank: int, world: int) -> Batch:
    rows = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    return batch.map(lambda x: x[rows])


def shares(rank: int = 0, world: int = 1):
    """The batches that `run` gives to one of several processes: its rows, in double precision."""
    return lambda name, step: as_double(shard(batch_for(name, step), rank, world))


def begin_elsewhere(method: Method, rank: int) -> None:
    """Let all processes but the first have other numbers: ranks need not start alike."""
    for tensor in method.state_dict().values():
        tensor.add_(int(rank > 0))


PRELOADED = [
    "pytest", "pyarrow.parquet", "sklearn.datasets", "sklearn.manifold", "timm", "torch._dynamo",
    "torchvision", "nearkin.commands.train",
]  # fmt: skip


@torch.no_grad()
def scattered(method):
    """With a target that is not a copy any more."""
    for parameter in method.target.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return method


def spawn(function, *args, processes=2):
    """Call `function(rank, *args)` in real processes, and wait for them.

    They are forks of one process that is started once and has imported what takes seconds.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    start_processes(function, args, processes, start_method="forkserver")


def fork_workers(patch):
    """Let the workers of runs be such forks as well, until the patch is undone."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    patch.setattr(launch, "start_processes", partial(start_processes, start_method="forkserver"))


@contextmanager
def in_group(rank, world, file):
    """Be one of several processes, which meet at a new file, for the length of a `with` block.

    Nothing may be left of the group then: its threads could abort a process that ends.
    """
    torch.set_num_threads(1)
    with process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world):
        group = weakref.ref(dist.group.WORLD)
        yield
    gc.collect()
    assert group() is None


def of_two_processes(function, folder: Path) -> list:
    """What `function(rank)` returns in each of two processes of one group."""
    spawn(_save_result, function, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def _save_result(rank: int, function, folder: str) -> None:
    with in_group(rank, 2, f"{folder}/rendezvous"):
        torch.save(function(rank), f"{folder}/{rank}.pt")


def save(folder, step, method, optimizer, **options):
    """Write a checkpoint of what a method and its optimizer hold, and return its path."""
    return checkpoint.save(folder, checkpoint.state_of(step, method, optimizer), **options)


@unchecked()
def run(method, name, *, until=6, total=6, folder=None, start=(0, None), batches=batch_for):
    """Train and return the losses and the optimizer.

    Continues from a folder of checkpoints, or after so many steps with the optimizer at hand.
    """
    start, optimizer = start
    optimizer = optimizer or build_optimizer(method, name="sgd", lr=0.05, weight_decay=1e-4)
    start = start if folder is None else checkpoint.load(folder, method, optimizer).step
    losses = []
    for done, result in steps(
        method,
        optimizer,
        (batches(name, step) for step in range(start, total)),
        start=start,
        total=total,
        schedule=warmup_cosine(0.1),
        seed=3,
    ):
        losses.append(result.loss.item())
        if done == until:
            break
    return losses, optimizer


def difference(state, expected) -> float:
    """Relative, over all numbers of a method; infinite where what is counted differs."""
    assert state.keys() == expected.keys()
    pairs = [(state[key], expected[key]) for key in expected]
    if any(not torch.equal(a, b) for a, b in pairs if not a.is_floating_point()):
        return math.inf
    a, b = (
        torch.cat([x.flatten() for x in side if x.is_floating_point()]) for side in zip(*pairs)
    )
    return float((a - b).norm() / b.norm())


def same(one: object, other: object) -> bool:
    """Whether two states are equal, all tensors to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def assert_same_state(a, b, **tolerance):
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(
            a[key], b[key], msg=lambda m, key=key: f"{key}: {m}", **tolerance
        )


class Observed(TorchDispatchMode):
    """Tells a function of every operation of torch: which, its arguments and its result."""

    def __init__(self, told):
        super().__init__()
        self.told = told

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.told(func, args, kwargs or {}, result)
        return result


def assert_same_gradient(loss, expected, *modules):
    """Of both, with respect to what these learn; and the same value."""
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)
    )
