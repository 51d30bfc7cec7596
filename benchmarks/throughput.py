"""Images per second of a whole training step, beside its limit and beside lightly's parts.

    python benchmarks/throughput.py [--rounds 7] [--images CIFAR.npz]

Three ways to train SimCLR with ResNet-18 on 32 px pictures, batch 256, take turns in one
process, so that a busy machine slows all of them alike; medians and their ratios are printed.

- nearkin: pictures in memory to committed step, as `nearkin train` runs it.
- bare: the same network passes, precision and optimizer on random data, in plain PyTorch, with
  no views and no contrastive loss. The limit.
- lightly: transform, projection head and loss wired as in lightly's own SimCLR example, float32,
  two loader workers. Left out where lightly is not installed.

An image counts once, however many views it has.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.images import open_images
from nearkin.data.order import Order
from nearkin.distributed import device_name, native_precision
from nearkin.methods.simclr import SimCLR
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import Branch, mlp
from nearkin.training.loop import steps
from nearkin.training.optimizer import build_optimizer
from nearkin.training.schedules import warmup_cosine

BATCH, SIZE = 256, 32
CPU = torch.device("cpu")


def ours(pictures: np.ndarray) -> Iterator[None]:
    """Whole steps of nearkin's loop."""
    method = SimCLR(build_backbone("resnet18", SIZE)).to(memory_format=torch.channels_last)
    images = open_images(pictures)
    batches = Batches(
        images,
        views_of("simclr_cifar", 2),
        image_size=SIZE,
        order=Order(len(images), BATCH, seed=0),
        device=CPU,
    )
    total = 1000
    for _ in steps(
        method,
        build_optimizer(method, name="sgd", lr=0.06, weight_decay=5e-4),
        batches.between(0, total),
        start=0,
        total=total,
        schedule=warmup_cosine(),
        seed=0,
        precision=native_precision(CPU),
    ):
        yield


def bare() -> Iterator[None]:
    """The network, forward and backward, and the optimizer: nothing else."""
    backbone = build_backbone("resnet18", SIZE)
    branch = Branch(backbone, mlp(512, 512, 128)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(branch.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
    views = torch.randn(2 * BATCH, 3, SIZE, SIZE).to(memory_format=torch.channels_last)
    precision = native_precision(CPU)
    while True:
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            embedding: Tensor = branch(views)
        optimizer.zero_grad()
        embedding.square().mean().backward()
        optimizer.step()
        yield


class Pictures(torch.utils.data.Dataset[Any]):
    """Pictures through lightly's transform, one by one."""

    def __init__(self, pictures: np.ndarray) -> None:
        from lightly.transforms.simclr_transform import SimCLRTransform

        self.pictures = pictures
        self.transform = SimCLRTransform(input_size=SIZE, gaussian_blur=0.0)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, row: int) -> Any:
        from PIL import Image

        return self.transform(Image.fromarray(self.pictures[row]))


def lightly(pictures: np.ndarray) -> Iterator[None]:
    """Lightly's parts in the loop its documentation shows."""
    import torchvision
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    network: Any = torchvision.models.resnet18()
    network.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    network.maxpool, network.fc = nn.Identity(), nn.Identity()
    head, criterion = SimCLRProjectionHead(512, 512, 128), NTXentLoss(temperature=0.5)
    parameters = [*network.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.06, momentum=0.9, weight_decay=5e-4)
    loader = torch.utils.data.DataLoader(
        Pictures(pictures), BATCH, shuffle=True, drop_last=True, num_workers=2
    )
    while True:
        for first, second in loader:
            loss = criterion(head(network(first)), head(network(second)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield


def seconds(run: Callable[[], None]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Measure in turns and print medians and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=Path, help="an .npz; random pictures otherwise")
    options = parser.parse_args()
    random = np.random.default_rng(0).integers(0, 256, (10_000, SIZE, SIZE, 3), dtype=np.uint8)
    pictures = np.load(options.images)["x_train"] if options.images else random
    ways: dict[str, Iterator[None]] = {"nearkin": ours(pictures), "bare": bare()}
    try:
        import lightly as _

        ways["lightly"] = lightly(pictures)
    except ImportError:
        print("lightly is not installed: left out")
    laps: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        next(way)  # kernels are chosen and workers started outside of the clock
    for _ in range(options.rounds):
        for name, way in ways.items():
            laps[name].append(seconds(lambda way=way: next(way)))  # type: ignore[misc]
    print(f"torch {torch.__version__}, {device_name(CPU)}, {native_precision(CPU)}, batch {BATCH}")
    rate = {name: BATCH / statistics.median(times) for name, times in laps.items()}
    for name, images in rate.items():
        ratios = [other / mine for other, mine in zip(laps[name], laps["nearkin"], strict=True)]
        print(
            f"{name:8} {images:7.1f} images/s   nearkin / {name}: "
            f"{statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
