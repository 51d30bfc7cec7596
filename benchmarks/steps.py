"""A whole training step of every method, beside the bare model step and lightly.

    python -m benchmarks steps [--methods simclr moco ...] [--batch 256] [--precision fp32]

ResNet-18 on 32 px images, of CIFAR-10 with `--data FOLDER`. These variants take turns:

- nearkin: images in memory to committed step, as `nearkin train` runs it.
- bare: the same passes through the same networks, momentum branches too, with the same precision
  and optimizer, on random numbers: no views, no loss, no memories, no commit. The limit.
- lightly: transform, heads and loss wired as in lightly's own CIFAR-10 benchmark, in float32, with
  a loader worker per CPU core, in a separate process that is stopped while others are measured.
  Left out if that does not have the method, or lightly is not installed.

Heads and memories have the sizes of that benchmark, and MoCo both directions. A turn
is one step or, on a GPU, which works while the next step is prepared, `AT_ONCE` steps.
"""

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import repeat
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.shared.apart import apart
from benchmarks.shared.datasets import pixels
from benchmarks.shared.lightly import WIRES, training
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from benchmarks.shared.turns import against_all, repeated, turns
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.opening import open_images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.distributed import choose_device, native_precision
from nearkin.method import Method, half_cosine
from nearkin.methods import METHODS
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import Branch, compile_branches
from nearkin.networks.heads import Heads
from nearkin.training.loop import steps
from nearkin.training.optimizer import build_optimizer
from nearkin.types import UNLABELED, Batch

SIZE, LR, MUON_LR, DECAY = 32, 0.06, 4e-3, 5e-4
CPU = torch.device("cpu")
AT_ONCE = 20
OPTIONS: Final = (
    Option("methods", [*WIRES], "those to measure; `all`", quick=["simclr"]),
    Option("batch", 256, "images of a step", quick=4),
    Option("precision", "auto", "of nearkin", choices=("auto", "fp32", "bf16")),
    Option("device", "cpu", "where steps are taken"),
    Option("optimizer", "sgd", "of nearkin and of the bare step", choices=("sgd", "muon")),
    Option("compile", "off", "compile the networks", choices=("off", "on", "graphs")),
    Option("bn_groups", 0, "of methods that have them; 0 is their own default"),
)
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES: dict[str, dict[str, Any]] = {
    "barlow_twins": {"dim": 1024},
    "byol": {"dim": 256, "hidden_dim": 1024},
    "dino": {"hidden_dim": 512, "num_prototypes": 2048},
    "instdisc": {"loss": "softmax"},
    "moco": {"hidden_dim": 512, "queue_size": 4096, "symmetric": True},
    "moco_memory_bank": {"num_negatives": 4096},
    "moco_v3": {"hidden_dim": 1024},
    "nnclr": {"dim": 256, "hidden_dim": 2048, "predictor_dim": 4096, "support_size": 4096},
    "sigreg": {"dim": 128, "hidden_dim": 512, "num_directions": 256},
    "simclr": {"dim": 128, "hidden_dim": 512},
    "simgcd": {"hidden_dim": 512},
    "simsiam": {"dim": 2048, "predictor_dim": 512},
    "swav": {"dim": 128, "hidden_dim": 512, "num_prototypes": 512},
    "vicreg": {"dim": 1024},
}
"""Options that differ from the papers'."""


@dataclass(frozen=True)
class Setting:
    """Settings shared by all variants."""

    batch: int
    precision: torch.dtype
    device: torch.device
    compiled: str
    bn_groups: int = 0  # of methods that have them; 0 is their own default
    optimizer: Literal["sgd", "muon"] = "sgd"


def build(
    name: str, num_images: int, setting: Setting
) -> tuple[Method[Any], torch.optim.Optimizer]:
    """Build a method and its optimizer."""
    if METHODS[name].uses_teacher:
        raise SystemExit(
            f"{name} learns from a teacher, whose features this benchmark does not have"
        )
    torch.manual_seed(0)
    wanted = inspect.signature(METHODS[name].__init__).parameters
    facts = {"num_images": num_images, "num_known_classes": 5}
    facts |= {"bn_groups": setting.bn_groups} if setting.bn_groups else {}
    options = {key: fact for key, fact in facts.items() if key in wanted} | SIZES.get(name, {})
    method = METHODS[name](build_backbone("resnet18", SIZE), **options)
    method = method.to(setting.device).to(memory_format=torch.channels_last).train()
    if setting.compiled != "off":
        compile_branches(method, graphs=setting.compiled == "graphs")
    lr = LR if setting.optimizer == "sgd" else MUON_LR
    return method, build_optimizer(method, name=setting.optimizer, lr=lr, weight_decay=DECAY)


def ours(name: str, samples: np.ndarray, setting: Setting) -> Iterator[object]:
    """Yield whole steps of nearkin's loop."""
    method, optimizer = build(name, len(samples), setting)
    images = open_images(samples)
    classes = np.arange(len(samples)) % 10
    batches = Batches.of(
        images,
        views_of(METHODS[name].defaults.augment_small, method.views, more=method.more_views),
        image_size=SIZE,
        sampler=RandomBatchSampler(len(images), setting.batch, seed=0),
        device=setting.device,
        labels=np.where(classes < 5, classes, UNLABELED) if method.uses_labels else None,
    )
    total = 1_000_000  # more than are ever taken
    return steps(
        method,
        optimizer,
        batches.load(0, total),
        start=0,
        total=total,
        schedule=half_cosine(1.0, 1.0),
        seed=0,
        precision=setting.precision,
    )


@dataclass(frozen=True)
class Pass:
    """Rows that go through a network, and whether gradients flow back."""

    network: nn.Module
    shape: tuple[int, ...]
    learns: bool


def passes(method: Method[Any], batch: int, device: torch.device) -> list[Pass]:
    """Return the passes of a method through its networks."""
    found: list[Pass] = []

    def note(network: nn.Module, shown: tuple[Tensor, ...]) -> None:
        found.append(Pass(network, tuple(shown[0].shape), torch.is_grad_enabled()))

    outer = [child for child in method.children() if not isinstance(child, Branch | Heads)]
    inner = [m for child in method.children() if child not in outer for m in child.children()]
    hooks = [m.register_forward_pre_hook(note) for m in dict.fromkeys(outer + inner)]
    views = tuple(
        torch.randn(batch, 3, SIZE, SIZE, device=device) for _ in range(len(method.views))
    )
    index = torch.arange(batch, device=device)
    method(Batch(views, index, torch.where(index % 10 < 5, index % 10, UNLABELED)), 0.5)
    for hook in hooks:
        hook.remove()
    return found


def bare(name: str, num_images: int, setting: Setting) -> Iterator[object]:
    """Run only the networks, forward and backward, and the optimizer."""
    method, optimizer = build(name, num_images, setting)
    shown = [
        (
            each,
            torch.randn(
                each.shape,
                device=setting.device,
                requires_grad=each.learns and len(each.shape) == 2,
            ),
        )
        for each in passes(method, setting.batch, setting.device)
    ]
    precision = setting.precision
    for _ in repeat(None):
        losses = []
        with torch.autocast(setting.device.type, precision, enabled=precision != torch.float32):
            for each, rows in shown:
                with torch.set_grad_enabled(each.learns):
                    losses.append(each.network(rows).float().square().mean())
        optimizer.zero_grad()
        torch.stack([loss for loss in losses if loss.requires_grad]).sum().backward()
        optimizer.step()
        yield None


def compare(name: str, samples: np.ndarray, rounds: int, setting: Setting) -> Iterator[Row]:
    """Measure one method in turns."""
    ways: dict[str, Callable[[], object]] = {
        "nearkin": partial(next, ours(name, samples, setting)),
        "bare": partial(next, bare(name, len(samples), setting)),
    }
    at_once = 1 if setting.device == CPU else AT_ONCE
    with ExitStack() as stack:
        if name in WIRES and find_spec("lightly"):
            wired = {"batch_size": setting.batch, "size": SIZE, "lr": LR, "weight_decay": DECAY}
            where = {"network": "resnet18", "device": str(setting.device)}
            lightly = apart(training, WIRES[name], samples, **wired, **where)
            ways["lightly"] = stack.enter_context(lightly)
        laps = turns({way: repeated(step, at_once) for way, step in ways.items()}, rounds)
    precision = str(setting.precision).removeprefix("torch.")
    yield from against_all(name, laps, steps=at_once, precision=precision)


def setting_of(options: Namespace) -> Setting:
    """Return the settings that a command line asks for."""
    device = choose_device(options.device)
    precision = PRECISIONS.get(options.precision) or native_precision(device)
    return Setting(
        options.batch, precision, device, options.compile, options.bn_groups, options.optimizer
    )


def run(options: Namespace) -> Iterator[Row]:
    """Measure method after method."""
    every = [name for name in METHODS if not METHODS[name].uses_teacher]
    names = every if options.methods == ["all"] else options.methods
    if unknown := set(names) - set(METHODS):
        raise SystemExit(f"no such method: {', '.join(unknown)}")
    samples = pixels(options.data, 10_000, SIZE)
    for name in names:
        yield from compare(name, samples, options.rounds, setting_of(options))
