"""A training step from photos, beside its lower bound and lightly's own SimCLR example.

    python benchmarks/large.py PHOTOS [--rounds 5] [--batch 16] [--size 224]

SimCLR with ResNet-50. These variants take turns, each in a process that is stopped in between:

- nearkin: JPEG files to committed step, as `nearkin train` runs it, with two loader workers.
- decode: the crops of a batch alone, by one process.
- bare: the same network passes, precision and optimizer on random numbers.
- lightly: its transform, head and loss in a plain float32 loop, with two loader workers.

The limit is decode and bare one after the other: no CPU core is idle while workers decode.
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from statistics import median

import torch
from apart import apart
from peers import large_simclr, training
from turns import ratios, show, turns
from wired import CPU, trained

from nearkin.data.augmentations import views_of
from nearkin.data.batches import ViewSampler
from nearkin.data.opening import open_images
from nearkin.data.order import Order
from nearkin.distributed import device_name, native_precision
from nearkin.methods.simclr import SimCLR
from nearkin.networks.backbone import build_backbone
from nearkin.training.loop import keep_freed_memory
from nearkin.training.optimizer import build_optimizer

MANY = 10_000


def decoded(data: Path, batch: int, size: int) -> Iterator[object]:
    """Yield the crops of each batch."""
    images = open_images(data)
    order = Order(len(images), batch, seed=0)
    photographs = ViewSampler(images, views_of("simclr"), image_size=size, order=order)
    for step in cycle(range(len(images) // batch)):
        yield photographs[step]


def bare(batch: int, size: int) -> Iterator[None]:
    """Run the network forward and backward, and the optimizer."""
    method = SimCLR(build_backbone("resnet50", size)).to(memory_format=torch.channels_last)
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


def main() -> None:
    """Measure in turns and print medians and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("photographs", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224)
    options = parser.parse_args()
    data, batch, size = options.photographs, options.batch, options.size
    paths = [path for path in data.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")]
    wired = {"side": size, "augment": "simclr", "data": data, "workers": 2}
    lightly = {"batch_size": batch, "size": size, "lr": 0.06, "weight_decay": 5e-4}
    ways = {
        "nearkin": apart(trained, "simclr", "resnet50", batch, MANY, **wired),
        "decode": apart(decoded, data, batch, size),
        "bare": apart(bare, batch, size),
        "lightly": apart(training, large_simclr, paths, **lightly),
    }
    with ExitStack() as stack:
        started = {name: stack.enter_context(way) for name, way in ways.items()}
        laps = turns(started, options.rounds)
    print(f"torch {torch.__version__}, {device_name(CPU)}, {native_precision(CPU)}, batch {batch}")
    show(laps, "nearkin")
    laps["limit"] = [sum(both) for both in zip(laps["decode"], laps["bare"], strict=True)]
    print(f"limit / nearkin: {median(ratios(laps, 'limit', 'nearkin')):.2f}")


if __name__ == "__main__":
    main()
