"""A training step shared by several processes, beside the same step in one with the same cores.

    python -m benchmarks processes [--processes 1 2 4] [--method simclr] [--batch 128]

The batch is fixed, so each of W processes has a W-th of it, and a W-th of the threads. Variants
take turns, each time in new processes; medians of the steps of each turn are compared. Beside them
stand the terms of the cost model of docs/scale.md: the network alone on such a share, an
all-reduce of all gradients, a gather of embeddings, and a small message between the processes.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.shared.memory import alone
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row, compared
from benchmarks.shared.training import CPU, trained
from nearkin.distributed import (
    all_reduce_max,
    gather,
    native_precision,
    training_group,
    world_size,
)
from nearkin.networks.backbone import build_backbone

SIZE, WARM, TIMED = 32, 3, 9
Parts = dict[str, float]
OPTIONS: Final = (
    Option("processes", [1, 2, 4], "numbers of them; the first is compared with", quick=[1, 2]),
    Option("method", "simclr", "what is trained"),
    Option("backbone", "resnet18", "its network", quick="small"),
    Option("batch", 256, "images of a step", quick=16),
)


def timed(work: Callable[[], object], times: int = 20) -> float:
    """Return the median time of a call that all processes make together."""
    laps = []
    for _ in range(times):
        all_reduce_max(0)
        start = time.perf_counter()
        work()
        laps.append(time.perf_counter() - start)
    return statistics.median(laps)


def bare(backbone: str, batch: int) -> Callable[[], None]:
    """Run forward and backward on this process's share of the views, without communication."""
    views = torch.randn(2 * batch // world_size(), 3, SIZE, SIZE)
    views = views.to(memory_format=torch.channels_last)
    network = build_backbone(backbone, SIZE).to(memory_format=torch.channels_last)
    precision = native_precision(CPU)

    def run() -> None:
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            network(views).float().square().mean().backward()

    return run


def work(name: str, backbone: str, batch: int) -> Parts:
    """Measure in each process."""
    laps, before = [], time.perf_counter()
    for method in trained(name, backbone, batch, WARM + TIMED):  # noqa: B007  (it is measured afterwards)
        laps.append(time.perf_counter() - before)
        before = time.perf_counter()
    weights = torch.zeros(sum(p.numel() for p in method.parameters() if p.requires_grad))
    rows = torch.zeros(2 * batch // world_size(), 128)
    return {
        "step": statistics.median(laps[WARM:]),
        "bare": timed(bare(backbone, batch), times=5),
        "sum of gradients": timed(lambda: gather_sum(weights)),
        "gather of embeddings": timed(lambda: gather(rows)),
        "message": timed(lambda: all_reduce_max(0)),
        "norms": sum(isinstance(module, _BatchNorm) for module in method.modules()),
    }


def gather_sum(x: torch.Tensor) -> None:
    """Run the all-reduce of the backward pass of a gather."""
    if world_size() > 1:
        torch.distributed.all_reduce(x)


def follow(name: str, backbone: str, batch: int) -> None:
    """Run a process other than the first."""
    with training_group(1, follow):
        work(name, backbone, batch)


def together(threads: int, processes: int, *asked: str | int) -> Parts:
    """Measure in this process and in others that it starts."""
    torch.set_num_threads(threads)
    with training_group(processes, follow, *asked):
        found: Parts = work(*asked)  # type: ignore[arg-type]
        return found


def turn(processes: int, method: str, backbone: str, batch: int) -> Parts:
    """Measure once, in new processes."""
    threads = torch.get_num_threads()
    return alone(together, threads, processes, method, backbone, batch).result


def run(options: Namespace) -> Iterator[Row]:
    """Measure in turns."""
    asked = options.method, options.backbone, options.batch
    ways = {number: partial(turn, number, *asked) for number in options.processes}
    found: dict[int, list[Parts]] = {number: [] for number in ways}
    for _ in range(options.rounds):
        for number, way in ways.items():
            found[number].append(way())
    first, *others = options.processes
    medians: dict[int, dict[str, Any]] = {
        number: {name: statistics.median(each[name] for each in parts) for name in parts[0]}
        for number, parts in found.items()
    }
    yield Row(f"{first} processes", medians[first]["step"], more=medians[first])
    steps = {number: [each["step"] for each in parts] for number, parts in found.items()}
    for number in others:
        case, against = f"{number} processes", f"{first} processes"
        yield compared(case, steps[number], steps[first], against=against, **medians[number])
