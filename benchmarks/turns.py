"""Measure variants in turns, so that a busy machine slows all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch


def turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each variant in each round, after an untimed call.

    Every other round goes backward: no way always follows the same one.
    """
    for way in ways.values():
        way()
    settle()
    laps: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            ways[name]()
            settle()
            laps[name].append(time.perf_counter() - start)
    return laps


def settle() -> None:
    """Wait for the GPU of this process, if it has one: it may still work when a call returns."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def repeated(way: Callable[[], object], times: int) -> Callable[[], None]:
    """Return a function that makes so many calls: a lap that is long enough to be timed."""

    def lap() -> None:
        for _ in range(times):
            way()

    return lap


def ratios(laps: Mapping[str, Sequence[float]], slow: str, fast: str) -> list[float]:
    """Return the ratio of two variants, round by round."""
    return [a / b for a, b in zip(laps[slow], laps[fast], strict=True)]


def show(laps: Mapping[str, Sequence[float]], mine: str) -> None:
    """Print a line per variant: its median, and its ratio to the first."""
    for name, seconds in laps.items():
        times = ratios(laps, name, mine)
        print(
            f"{name:28} {statistics.median(seconds):9.4f} s   / {mine}: "
            f"{statistics.median(times):.2f} (from {min(times):.2f} to {max(times):.2f})"
        )
