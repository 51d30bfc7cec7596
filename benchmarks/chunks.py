"""Memory and time of a training step in chunks, beside the whole batch at once.

    python -m benchmarks chunks [--batch 1024] [--size 64] [--precision fp32]

SimCLR with ResNet-18 on 32 px images, each variant in a separate process. Memory is the rise of
the process's peak memory during the step. Gradients are compared with those of the whole batch
with batch statistics over as many groups as there are chunks.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from jaxtyping import Float32

from benchmarks.shared.memory import Cost, alone, measured
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row, compared
from nearkin.distributed import native_precision
from nearkin.methods.simclr import SimCLR
from nearkin.networks.backbone import build_backbone
from nearkin.networks.batch_norm import normalize_in_groups
from nearkin.networks.branch import set_chunk_size
from nearkin.types import UNLABELED, Batch

Gradient = Float32[np.ndarray, " weights"]
PRECISIONS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "auto": native_precision(torch.device("cpu")),
}
OPTIONS: Final = (
    Option("batch", 1024, "images of a step", quick=8),
    Option("size", 64, "images in a chunk", quick=4),
    Option("precision", "auto", "of the step", choices=[*PRECISIONS]),
)


def step(way: str, options: Namespace) -> Cost[Gradient]:
    """Run forward and backward once; return what that took, and the gradient."""
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    method = SimCLR(build_backbone("resnet18", 32)).to(memory_format=torch.channels_last).train()
    if way == "chunks":
        set_chunk_size(method, options.size, options.batch)
    if way == "groups":
        normalize_in_groups(method.online, 2 * options.batch // options.size)
    first, second = (torch.randn(options.batch, 3, 32, 32) for _ in range(2))
    index = torch.arange(options.batch)
    batch = Batch((first, second), index, torch.full_like(index, UNLABELED))
    precision = PRECISIONS[options.precision]

    def both() -> Gradient:
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss = method(batch, 0.0).loss
        loss.backward()
        gradients = [p.grad.flatten() for p in method.parameters() if p.grad is not None]
        return torch.cat(gradients).numpy()

    return measured(both)


def run(options: Namespace) -> Iterator[Row]:
    """Compare chunks with the whole batch and with groups."""
    whole, groups, chunks = (
        alone(step, way, options).result for way in ("whole", "groups", "chunks")
    )
    for against, cost in (("whole", whole), ("groups", groups)):
        yield compared("memory", [chunks.megabytes], [cost.megabytes], against=against, unit="MB")
        yield compared("time", [chunks.seconds], [cost.seconds], against=against)
    difference = np.linalg.norm(chunks.result - groups.result) / np.linalg.norm(groups.result)
    yield Row("gradient, from groups", float(difference), "relative")
