"""Memory of training a sharded network (FSDP2), beside a replicated one (DDP).

    python benchmarks/sharding.py [--backbone vit_base_patch16_224] [--size 96] [--processes 2]

SimCLR with AdamW in float32, on two images per process. The table has the size of the tensors of
weights, gradients and optimizer in a process after a step, and the rise of its peak memory during
building and training, with freed memory returned to the system at once.
"""

import argparse
import os
import resource
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from nearkin.distributed import data_parallel, process_group, shard
from nearkin.methods.simclr import SimCLR
from nearkin.networks.backbone import build_backbone
from nearkin.networks.batch_norm import normalize_in_groups
from nearkin.training.optimizer import build_optimizer
from nearkin.types import UNKNOWN, Batch

MEGABYTE = 2**20
STEPS = 3


def most() -> float:
    """Return the peak memory of this process in megabytes."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def held(tensors: list[Any]) -> float:
    """Return the size of tensors in this process, in megabytes."""
    own: list[Tensor] = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    return sum(x.nbytes for x in own) / MEGABYTE


def train(rank: int, way: str, processes: int, backbone: str, size: int, meeting: str) -> None:
    """Run some steps in one of the processes; the first prints a line."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    index = torch.arange(2) + 2 * rank
    views = torch.randn(2, 3, size, size), torch.randn(2, 3, size, size)
    batch = Batch(views, index, torch.full_like(index, UNKNOWN))
    init = f"file://{meeting}"
    with process_group("gloo", init_method=init, rank=rank, world_size=processes):
        before = most()
        torch.manual_seed(0)
        method = SimCLR(build_backbone(backbone, size))
        optimizer = build_optimizer(method, name="adamw", lr=1e-4, weight_decay=0.05)
        normalize_in_groups(method, groups=1)
        if way == "divided":
            method = shard(method, optimizer)
        model = data_parallel(method.train())
        for _ in range(STEPS):
            loss = model(batch, 0.0).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        weights = list(method.parameters())
        parts = (
            held(weights),
            held([weight.grad for weight in weights]),
            held([x for state in optimizer.state.values() for x in state.values()]),
        )
        figures = "  ".join(f"{part:10,.0f}" for part in (*parts, most() - before))
        if rank == 0:
            print(f"{way:8} {figures}  {loss.item():.6f}", flush=True)


def main() -> int:
    """Print a line per variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--backbone", default="vit_base_patch16_224")
    parser.add_argument("--size", type=int, default=96, help="side of the images")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    os.environ |= dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
    print(f"torch {torch.__version__}, {options.processes} processes; MB in the first of them")
    print(f"{'':8} {'weights':>10}  {'gradients':>10}  {'optimizer':>10}  {'peak':>10}  loss")
    for way in ("whole", "divided"):
        with tempfile.TemporaryDirectory() as folder:
            asked = way, options.processes, options.backbone, options.size, f"{folder}/meeting"
            spawn(train, args=asked, nprocs=options.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
