"""A backbone's step on a CPU, with the gradients of small maps' weights as matrix products.

    python -m benchmarks convolutions [--cases resnet18:32:64 small:24:512] [--threads 1]

Forward and backward in bfloat16, as nearkin trains on CPUs with AMX, beside the same network as
torch computes it.
"""

import copy
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Final

import torch
from torch import nn

from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from benchmarks.shared.turns import against_all, turns
from nearkin.networks.backbone import build_backbone
from nearkin.networks.convolution import multiply_small_maps

OPTIONS: Final = (
    Option(
        "cases",
        ["small:24:512", "resnet18:24:128", "resnet18:32:64", "resnet50:32:32", "resnet18:224:8"],
        "backbone, side in pixels, and images of a step",
        quick=["tiny:8:4"],
    ),
)


def _step(network: nn.Module, images: torch.Tensor) -> None:
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        features = network(images)
    features.float().square().mean().backward()


def run(options: Namespace) -> Iterator[Row]:
    """Measure each case."""
    for case in options.cases:
        name, side, count = case.split(":")
        plain = build_backbone(name, int(side)).train().to(memory_format=torch.channels_last)
        ours = copy.deepcopy(plain)
        multiply_small_maps(ours)
        images = torch.randn(int(count), 3, int(side), int(side))
        images = images.contiguous(memory_format=torch.channels_last)
        ways = {"torch": partial(_step, plain, images), "nearkin": partial(_step, ours, images)}
        yield from against_all(case, turns(ways, options.rounds))
