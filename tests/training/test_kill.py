"""Kills at random moments and at chosen ones leave no trace in the result.

`make faults` does it for every method, by the thousand.
"""

import math

import pytest
from kills import AIMS, aims_of, harness

METHODS = ("moco", "ncl", "seed")
"""With a queue and a target; with labels and two queues; with a teacher."""
MORE = ("instdisc", "swav")
"""With a bank; with phases."""
PERIOD = 8
"""One kill of so many comes at random."""


def share(method: str) -> list[str]:
    """The aims are dealt among the methods; the one with a teacher has those that it alone has."""
    if method == "seed":
        own = sorted(set(aims_of(method)) - set(aims_of("moco")))
        return [*own, "before pruning"]  # its own all come before the first checkpoint
    others = MORE if method in MORE else METHODS[:-1]
    return aims_of(method)[others.index(method) :: len(others)]


def test_the_methods_together_are_killed_at_every_aim():
    assert {aim for method in METHODS for aim in share(method)} == AIMS.keys()


@pytest.mark.parametrize(
    "method", [*METHODS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_kills_and_resumes_end_where_the_unbroken_run_ends(method, tmp_path):
    aims = share(method)
    kills = math.ceil(len(aims) * PERIOD / (PERIOD - 1))
    report = harness(method, kills, seed=0, folder=str(tmp_path), aims=aims, period=PERIOD)
    assert report["kills"] == kills
    assert all(report["aims"][aim] == 1 for aim in aims)
    assert report["in_write"] >= sum(AIMS[aim].where == "half" for aim in aims)
    assert report["resumes"] >= 1, "no run went on from a checkpoint, so nothing was tested"
    assert report["differing"] == []
