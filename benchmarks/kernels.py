"""What a device can do at most, and what it does in a training step.

    python benchmarks/kernels.py [simclr moco ...] [--batch 512] [--device cuda] [--compile on]

First its ceilings: bytes per second of a copy (read and written), and operations per second of a
bfloat16 matrix product of random numbers. Then, of each method, over `STEPS` steps of nearkin's
loop: time per step by the clock; and over `PROFILED` more, by the profiler: kernels that were
launched, the share of the time in which the GPU computes, and the kernels that take longest. On a
CPU, operations of torch stand for kernels.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from steps import SIZE, Setting, ours
from torch.profiler import ProfilerActivity, profile
from turns import settle

from nearkin.distributed import choose_device, device_name, native_precision

STEPS, PROFILED, LONGEST = 24, 8, 12
"""Steps that are timed and profiled, multiples of those whose views are made at once; kernels."""


def per_second(way: Callable[[], object], amount: float, calls: int = 10) -> float:
    """Return how much of `amount`, which one call takes, is done in a second."""
    for _ in range(3):
        way()
    settle()
    start = time.perf_counter()
    for _ in range(calls):
        way()
    settle()
    return amount * calls / (time.perf_counter() - start)


def ceilings(device: torch.device) -> str:
    """Measure the device with sizes that fill it."""
    large = device.type != "cpu"
    source = torch.randn(2**30 if large else 2**22, device=device)
    target = torch.empty_like(source)
    bandwidth = per_second(lambda: target.copy_(source), 2 * source.nbytes)
    side = 8192 if large else 256
    a, b = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
    rate = per_second(lambda: a @ b, 2 * side**3)
    return f"copy {bandwidth / 1e9:.0f} GB/s, bfloat16 product {rate / 1e12:.2f} TFLOP/s"


def profiled(steps: Iterator[object], device: torch.device) -> list[str]:
    """Profile some steps, after some that warm up."""
    for _ in range(8):
        next(steps)
    settle()
    start = time.perf_counter()
    for _ in range(STEPS):
        next(steps)
    settle()
    seconds = (time.perf_counter() - start) / STEPS  # without the profiler, which slows it
    on_gpu = device.type == "cuda"
    kind = "CUDA" if on_gpu else "CPU"
    with profile(activities=[getattr(ProfilerActivity, kind)]) as taken:
        for _ in range(PROFILED):
            next(steps)
        settle()
    events = [event for event in taken.key_averages() if event.device_type.name == kind]
    spent = {e.key: e.self_device_time_total if on_gpu else e.self_cpu_time_total for e in events}
    busy = sum(spent.values()) / PROFILED / 1e6
    launches = sum(event.count for event in events) / PROFILED
    lines = [
        f"{1e3 * seconds:.1f} ms a step; {launches:.0f} kernels, "
        f"busy {1e3 * busy:.1f} ms ({busy / seconds:.0%})"
    ]
    longest = sorted(spent, key=lambda name: -spent[name])[:LONGEST]
    return lines + [f"  {spent[name] / PROFILED / 1e3:8.3f} ms  {name[:90]}" for name in longest]


def main() -> None:
    """Print the ceilings, and a table per method."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", choices=("off", "on", "graphs"), default="off")
    options = parser.parse_args()
    device = choose_device(options.device)
    print(f"torch {torch.__version__}, {device_name(device)}: {ceilings(device)}", flush=True)
    setting = Setting(options.batch, native_precision(device), device, options.compile)
    samples = np.random.default_rng(0).integers(0, 256, (10_000, SIZE, SIZE, 3), dtype=np.uint8)
    for name in options.methods:
        lines = profiled(iter(ours(name, samples, setting)), device)
        print(f"\n{name}, {setting}", *lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
