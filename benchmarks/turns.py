"""Ways of doing one thing, measured in turns, so that a busy machine slows all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch


def turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds that each way takes in each round, after a call outside of the clock.

    Every other round goes backward: no way always follows the same one.
    """
    for way in ways.values():
        way()
    _settle()
    laps: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            ways[name]()
            _settle()
            laps[name].append(time.perf_counter() - start)
    return laps


def _settle() -> None:
    """A GPU works on after a call has returned."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratios(laps: Mapping[str, Sequence[float]], slow: str, fast: str) -> list[float]:
    """How many times as long as another way one takes, round by round."""
    return [a / b for a, b in zip(laps[slow], laps[fast], strict=True)]


def show(laps: Mapping[str, Sequence[float]], mine: str) -> None:
    """Print a line for each way: its median, and how many times as long as mine it takes."""
    for name, seconds in laps.items():
        times = ratios(laps, name, mine)
        print(
            f"{name:28} {statistics.median(seconds):9.4f} s   / {mine}: "
            f"{statistics.median(times):.2f} (from {min(times):.2f} to {max(times):.2f})"
        )
