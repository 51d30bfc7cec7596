"""Measure variants in turns, so that a busy machine slows all of them alike."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.shared.rows import Row, compared

Clock = Callable[[], float]
Laps = Mapping[str, Sequence[float]]


def turns(
    ways: Mapping[str, Callable[[], object]], rounds: int, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of each variant in each round, after an untimed call.

    Every other round goes backward: no way always follows the same one.
    """
    for way in ways.values():
        way()
    settle()

    def timed(way: Callable[[], object]) -> float:
        start = clock()
        way()
        settle()
        return clock() - start

    return alternate({name: partial(timed, way) for name, way in ways.items()}, rounds)


def alternate(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return what each variant says of itself in each round; every other round goes backward."""
    laps: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            laps[name].append(ways[name]())
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


def against_all(case: str, laps: Laps, mine: str = "nearkin", **more: Any) -> Iterator[Row]:
    """Yield a row for each other variant."""
    for name, others in laps.items():
        if name != mine:
            yield compared(case, laps[mine], others, against=name, **more)
