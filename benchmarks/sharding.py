"""Memory of training a sharded network (FSDP2), beside a replicated one (DDP).

    python -m benchmarks sharding [--backbone vit_base_patch16_224] [--size 96] [--processes 2]

SimCLR with AdamW in float32, on two images per process. Rows have the size of the tensors of
weights, gradients and optimizer in the first process after a step, and the rise of its peak memory
during building and training, with freed memory returned to the system at once.
"""

import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.shared.memory import forget_peak, peak
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row, compared
from nearkin.distributed import data_parallel, process_group, shard
from nearkin.methods.simclr import SimCLR
from nearkin.networks.backbone import build_backbone
from nearkin.networks.batch_norm import normalize_in_groups
from nearkin.training.optimizer import build_optimizer
from nearkin.types import UNLABELED, Batch

MEGABYTE = 2**20
STEPS = 3
PARTS = ("weights", "gradients", "optimizer", "peak")
RETURNED = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
OPTIONS: Final = (
    Option("backbone", "vit_base_patch16_224", "what is trained", quick="vit_tiny_patch16_224"),
    Option("size", 96, "side of the images", quick=32),
    Option("processes", 2, "how many share it"),
)


def held(tensors: list[Any]) -> float:
    """Return the size of tensors in this process, in megabytes."""
    own: list[Tensor] = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    return sum(x.nbytes for x in own) / MEGABYTE


def train(
    rank: int, divided: bool, processes: int, backbone: str, size: int, meeting: str
) -> tuple[float, ...]:
    """Run some steps in one of the processes; return the megabytes of each part."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    index = torch.arange(2) + 2 * rank
    views = torch.randn(2, 3, size, size), torch.randn(2, 3, size, size)
    batch = Batch(views, index, torch.full_like(index, UNLABELED))
    init = f"file://{meeting}"
    with process_group("gloo", init_method=init, rank=rank, world_size=processes):
        forget_peak()
        before = peak()
        torch.manual_seed(0)
        method = SimCLR(build_backbone(backbone, size))
        optimizer = build_optimizer(method, name="adamw", lr=1e-4, weight_decay=0.05)
        normalize_in_groups(method, groups=1)
        if divided:
            method = shard(method, optimizer)
        model = data_parallel(method.train())
        for _ in range(STEPS):
            loss = model(batch, 0.0).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        weights = list(method.parameters())
        return (
            held(weights),
            held([weight.grad for weight in weights]),
            held([x for state in optimizer.state.values() for x in state.values()]),
            peak() - before,
        )


def trained(divided: bool, options: Namespace) -> tuple[float, ...]:
    """Train in new processes; return what the first says."""
    spawn, asked = get_context("spawn"), (options.processes, options.backbone, options.size)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.processes, spawn) as pool,
    ):
        ranks = range(options.processes)
        jobs = [pool.submit(train, rank, divided, *asked, f"{folder}/meeting") for rank in ranks]
        first, *_ = [job.result() for job in jobs]
        return first


def run(options: Namespace) -> Iterator[Row]:
    """Compare both ways, part by part."""
    os.environ |= RETURNED
    whole, divided = (trained(way, options) for way in (False, True))
    for part, own, other in zip(PARTS, divided, whole, strict=True):
        yield compared(part, [own], [other], against="whole in each", unit="MB")
