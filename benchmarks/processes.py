"""A training step shared by several processes, beside the same step in one with the same cores.

    python benchmarks/processes.py [--rounds 5] [--processes 1,2,4] [--method simclr]

The batch is fixed, so each of W processes has a W-th of it, and a W-th of the threads. Variants
take turns, each time in new processes; medians of the steps of each turn are compared. The terms
of the cost model follow: the network alone on such a share, an all-reduce of all gradients, and a
small message between the processes. docs/scale.md has the model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from turns import ratios
from wired import CPU, trained

from nearkin.distributed import (
    all_reduce_max,
    device_name,
    gather,
    is_main_process,
    native_precision,
    training_group,
    world_size,
)
from nearkin.methods import METHODS
from nearkin.networks.backbone import build_backbone

SIZE, WARM, TIMED = 32, 3, 9
Parts = dict[str, float]


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

    def run() -> None:
        with torch.autocast("cpu", native_precision(CPU)):
            network(views).float().square().mean().backward()

    return run


def work(name: str, backbone: str, batch: int) -> None:
    """Measure in each process; the first prints the result."""
    laps, before = [], time.perf_counter()
    for method in trained(name, backbone, batch, WARM + TIMED):  # noqa: B007  (it is measured afterwards)
        laps.append(time.perf_counter() - before)
        before = time.perf_counter()
    weights = torch.zeros(sum(p.numel() for p in method.parameters() if p.requires_grad))
    rows = torch.zeros(2 * batch // world_size(), 128)
    found = {
        "step": statistics.median(laps[WARM:]),
        "bare": timed(bare(backbone, batch), times=5),
        "sum of gradients": timed(lambda: gather_sum(weights)),
        "gather of embeddings": timed(lambda: gather(rows)),
        "message": timed(lambda: all_reduce_max(0)),
        "norms": sum(isinstance(module, _BatchNorm) for module in method.modules()),
    }
    if is_main_process():
        print(json.dumps(found))


def gather_sum(x: torch.Tensor) -> None:
    """Run the all-reduce of the backward pass of a gather."""
    if world_size() > 1:
        torch.distributed.all_reduce(x)


def follow(name: str, backbone: str, batch: int) -> None:
    """Run a process other than the first."""
    with training_group(1, follow):
        work(name, backbone, batch)


def turn(processes: int, options: argparse.Namespace) -> Parts:
    """Measure once, in new processes."""
    command = [sys.executable, __file__, "--work", str(processes), "--method", options.method]
    command += ["--backbone", options.backbone, "--batch", str(options.batch)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: Parts = json.loads(said.splitlines()[-1])
    return found


def main() -> None:
    """Measure in turns and print medians and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--method", default="simclr", choices=METHODS)
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--json", type=Path, help="also write the medians there")
    parser.add_argument("--work", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    asked = options.method, options.backbone, options.batch
    if options.work:
        with training_group(options.work, follow, *asked):
            work(*asked)
        return
    ways = [int(number) for number in options.processes.split(",")]
    found: dict[int, list[Parts]] = {number: [] for number in ways}
    for _ in range(options.rounds):
        for number in ways:
            found[number].append(turn(number, options))
    print(f"torch {torch.__version__}, {device_name(CPU)}, {native_precision(CPU)}, {asked}")
    laps = {str(number): [each["step"] for each in parts] for number, parts in found.items()}
    medians = {
        number: {name: statistics.median(each[name] for each in parts) for name in parts[0]}
        for number, parts in found.items()
    }
    if options.json:
        options.json.write_text(json.dumps(medians, indent=2) + "\n")
    for number in ways:
        share = ratios(laps, str(ways[0]), str(number))
        said = "  ".join(f"{name} {value:.4f}" for name, value in medians[number].items())
        print(
            f"{number} processes: {statistics.median(share):.2f} of the speed of {ways[0]} "
            f"(from {min(share):.2f} to {max(share):.2f})   {said}"
        )


if __name__ == "__main__":
    main()
