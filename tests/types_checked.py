"""Where the types and shapes of calls are checked: nearly everywhere but in whole runs.

A check takes as long as a call of a tiny network. A run makes the same calls thousands of times,
and most of them are checked in tests of their own. `pytest --types` checks all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jaxtyping

EVERYWHERE = False
"""Whether `--types` is given."""
RUNS = {
    "classification", "cli", "commands", "distributed", "run", "tests", "training",
    "test_assign", "test_discover", "test_discover_data", "test_discover_processes",
    "test_discover_refused", "test_discover_resumed", "test_rounds", "test_explore", "test_report",
}  # fmt: skip
"""Folders and files of tests that mostly make runs, of code that states few shapes; mypy has seen
the rest."""


def choose(path: Path) -> None:
    """Check what the tests of this file call, or not."""
    _check(RUNS.isdisjoint((path.parent.name, path.stem)))


@contextmanager
def unchecked() -> Iterator[None]:
    """Do not check the calls of a `with` block, or of a function that this decorates."""
    before = jaxtyping.config.jaxtyping_disable
    _check(False)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def _check(wanted: bool) -> None:
    jaxtyping.config.update("jaxtyping_disable", not (wanted or EVERYWHERE))
