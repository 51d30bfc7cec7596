"""Memory and time of a training step in chunks, beside the whole batch at once.

    python benchmarks/chunks.py [--batch 1024] [--size 64] [--precision fp32]

SimCLR with ResNet-18 on 32 px images, each variant in a separate process. Memory is the rise of
the process's peak memory during the step. Gradients are compared with those of the whole batch
with batch statistics over as many groups as there are chunks.
"""

import argparse
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import torch
from jaxtyping import Float32

from nearkin.distributed import device_name, native_precision
from nearkin.methods.simclr import SimCLR
from nearkin.networks.backbone import build_backbone
from nearkin.networks.batch_norm import normalize_in_groups
from nearkin.networks.branch import set_chunk_size
from nearkin.types import UNKNOWN, Batch

CPU = torch.device("cpu")
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "auto": native_precision(CPU)}
ALLOWED = 0.15
"""Share of the whole batch's memory that a step in sixteen chunks or more may take."""


@dataclass(frozen=True)
class Cost:
    """Memory and time of a step."""

    megabytes: float
    seconds: float
    gradient: Float32[np.ndarray, " weights"]


def most() -> float:
    """Return the peak memory of this process in megabytes."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def cost(way: str, batch_size: int, size: int, precision: torch.dtype) -> Cost:
    """Run forward and backward once."""
    torch.manual_seed(0)
    method = SimCLR(build_backbone("resnet18", 32)).to(memory_format=torch.channels_last).train()
    if way == "chunks":
        set_chunk_size(method, size, batch_size)
    if way == "groups":
        normalize_in_groups(method.online, 2 * batch_size // size)
    first, second = (torch.randn(batch_size, 3, 32, 32) for _ in range(2))
    index = torch.arange(batch_size)
    batch = Batch((first, second), index, torch.full_like(index, UNKNOWN))
    before, started = most(), time.perf_counter()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        loss = method(batch, 0.0).loss
    loss.backward()
    seconds = time.perf_counter() - started
    gradient = torch.cat([p.grad.flatten() for p in method.parameters() if p.grad is not None])
    return Cost(most() - before, seconds, gradient.numpy())


def main() -> int:
    """Print a line per variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--size", type=int, default=64, help="images in a chunk")
    parser.add_argument("--precision", choices=PRECISIONS, default="auto")
    options = parser.parse_args()
    precision = PRECISIONS[options.precision]
    print(f"torch {torch.__version__}, {device_name(CPU)}, {precision}, batch {options.batch}")
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        costs = {
            way: pool.submit(cost, way, options.batch, options.size, precision).result()
            for way in ("whole", "groups", "chunks")
        }
    whole, groups, chunks = costs.values()
    for way, found in costs.items():
        print(
            f"{way:7} {found.megabytes:7.0f} MB ({found.megabytes / whole.megabytes:4.0%})   "
            f"{found.seconds:6.1f} s"
        )
    difference = np.linalg.norm(chunks.gradient - groups.gradient) / np.linalg.norm(
        groups.gradient
    )
    print(f"gradients of chunks and of groups differ by {difference:.1e}")
    return int(chunks.megabytes > ALLOWED * whole.megabytes)


if __name__ == "__main__":
    sys.exit(main())
