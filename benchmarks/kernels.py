"""What a device can do at most, and what it does in a training step.

    python -m benchmarks kernels [--methods simclr moco] [--batch 512] [--device cuda]

First its ceilings: bytes per second of a copy (read and written), and operations per second of a
bfloat16 matrix product of random numbers. Then, of each method, over `--steps` steps of nearkin's
loop: time per step by the clock; and over `AT_ONCE` more, by the profiler: kernels that were
launched, the share of the time in which the GPU computes, and the kernels that take longest. On a
CPU, operations of torch stand for kernels.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.shared.datasets import pixels
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from benchmarks.shared.turns import settle
from benchmarks.steps import SIZE, ours, setting_of

AT_ONCE, LONGEST = 8, 12
"""Steps whose views a GPU makes at once, of which it times a multiple; kernels that are named."""

OPTIONS: Final = (
    Option("methods", ["simclr", "moco"], "those to profile", quick=["simclr"]),
    Option("batch", 512, "images of a step", quick=2),
    Option("steps", 3 * AT_ONCE, "that are timed", quick=1),
    Option("precision", "auto", "of nearkin", choices=("auto", "fp32", "bf16")),
    Option("device", "cuda", "what is measured", quick="cpu"),
    Option("optimizer", "sgd", "of each step", choices=("sgd", "muon")),
    Option("compile", "off", "compile the networks", choices=("off", "on", "graphs")),
    Option("bn_groups", 0, "of methods that have them; 0 is their own default"),
)


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


def ceilings(device: torch.device) -> Iterator[Row]:
    """Measure the device with sizes that fill it."""
    large = device.type != "cpu"
    source = torch.randn(2**30 if large else 2**22, device=device)
    target = torch.empty_like(source)
    bandwidth = per_second(lambda: target.copy_(source), 2 * source.nbytes)
    yield Row("copy", bandwidth / 1e9, "GB/s")
    side = 8192 if large else 256
    a, b = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
    yield Row("bfloat16 product", per_second(lambda: a @ b, 2 * side**3) / 1e12, "TFLOP/s")


def profiled(
    case: str, steps: Iterator[object], device: torch.device, count: int
) -> Iterator[Row]:
    """Profile some steps, after some that warm up."""
    few = min(count, AT_ONCE)
    for _ in range(few):
        next(steps)
    seconds = 1 / per_second(lambda: next(steps), 1, count)  # without the profiler, which slows it
    on_gpu = device.type == "cuda"
    kind = "CUDA" if on_gpu else "CPU"
    with profile(activities=[getattr(ProfilerActivity, kind)], acc_events=True) as taken:
        for _ in range(few):
            next(steps)
        settle()
    events = [event for event in taken.key_averages() if event.device_type.name == kind]
    spent = {e.key: e.self_device_time_total if on_gpu else e.self_cpu_time_total for e in events}
    busy = sum(spent.values()) / few / 1e6
    launches = sum(event.count for event in events) / few
    yield Row(case, seconds, more={"kernels": launches, "busy": busy / seconds})
    for name in sorted(spent, key=lambda name: -spent[name])[:LONGEST]:
        yield Row(f"{case}: {name[:60]}", spent[name] / few / 1e3, "ms")


def run(options: Namespace) -> Iterator[Row]:
    """Measure the ceilings, then each method."""
    setting = setting_of(options)
    yield from ceilings(setting.device)
    samples = pixels(options.data, 10_000, SIZE)
    for name in options.methods:
        steps = iter(ours(name, samples, setting))
        yield from profiled(name, steps, setting.device, options.steps)
