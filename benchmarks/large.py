"""A training step from photos, beside its lower bound and lightly's own SimCLR example.

    python -m benchmarks large --data PHOTOS [--batch 16] [--size 224]

SimCLR with ResNet-50. These variants take turns, each in a process that is stopped in between:

- nearkin: JPEG files to committed step, as `nearkin train` runs it, with two loader workers.
- decode: the crops of a batch alone, by one process.
- bare: the same network passes, precision and optimizer on random numbers.
- lightly: its transform, head and loss in a plain float32 loop, with a loader worker per CPU core.

The limit is decode and bare one after the other: no CPU core is idle while workers decode.
"""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.shared.apart import apart
from benchmarks.shared.datasets import jpegs_below, photographs
from benchmarks.shared.lightly import simclr, training
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row, compared
from benchmarks.shared.training import CPU, trained
from benchmarks.shared.turns import against_all, turns
from nearkin.data.augmentations import views_of
from nearkin.data.batches import ViewDataset
from nearkin.data.opening import open_images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.distributed import native_precision
from nearkin.distributed.allocation import keep_freed_memory
from nearkin.methods.simclr import SimCLR
from nearkin.networks.backbone import build_backbone
from nearkin.training.optimizer import build_optimizer

MANY = 10_000  # steps, more than are taken
OPTIONS: Final = (
    Option("batch", 16, "images of a step", quick=2),
    Option("size", 224, "side of the views", quick=64),
    Option("backbone", "resnet50", "nearkin's network; lightly's is ResNet-50", quick="small"),
)


def decoded(data: Path, batch: int, size: int) -> Iterator[object]:
    """Yield the crops of each batch."""
    images = open_images(data)
    sampler = RandomBatchSampler(len(images), batch, seed=0)
    photographs = ViewDataset(images, views_of("simclr"), image_size=size, sampler=sampler)
    for step in cycle(range(len(images) // batch)):
        yield photographs[step]


def bare(backbone: str, batch: int, size: int) -> Iterator[None]:
    """Run the network forward and backward, and the optimizer."""
    method = SimCLR(build_backbone(backbone, size)).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(method, name="sgd", lr=0.06, weight_decay=5e-4)
    views = torch.randn(2 * batch, 3, size, size).to(memory_format=torch.channels_last)
    precision = native_precision(CPU)
    with keep_freed_memory():  # nearkin's own steps keep memory too
        while True:
            with torch.autocast("cpu", precision, enabled=precision != torch.float32):
                embedding = method.online(views)
            optimizer.zero_grad()
            embedding.square().mean().backward()
            optimizer.step()
            yield


def run(options: Namespace) -> Iterator[Row]:
    """Measure in turns."""
    batch, size, backbone = options.batch, options.size, options.backbone
    with ExitStack() as stack:
        data = stack.enter_context(photographs(options.data, 4 * batch))
        wired: dict[str, Any] = {"side": size, "augment": "simclr", "data": data, "workers": 2}
        ways = {
            "nearkin": apart(trained, "simclr", backbone, batch, MANY, **wired),
            "decode": apart(decoded, data, batch, size),
            "bare": apart(bare, backbone, batch, size),
        }
        if find_spec("lightly"):
            lightly = {
                "network": "resnet50",
                "batch_size": batch,
                "size": size,
                "lr": 0.06,
                "weight_decay": 5e-4,
            }
            ways["lightly"] = apart(training, simclr, jpegs_below(data), **lightly)
        started = {name: stack.enter_context(way) for name, way in ways.items()}
        laps = turns(started, options.rounds)
    yield from against_all("step", laps)
    limit = [sum(both) for both in zip(laps["decode"], laps["bare"], strict=True)]
    yield compared("step", laps["nearkin"], limit, against="decode + bare")
