"""Kills at random moments and at chosen ones leave no trace in the result.

`make faults` does it for every method, by the thousand.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kills import AIMS, aims_of

HARNESS = Path(__file__).parents[1] / "kills.py"


METHODS = ("instdisc", "moco", "ncl", "swav", "seed")
"""With a bank; with a queue and a target; with labels and two queues; with phases; with a teacher."""


def share(method: str) -> list[str]:
    """Each method has its share of the aims, the last one those that it alone has."""
    *others, last = METHODS
    if method == last:
        own = sorted(set(aims_of(last)) - set(aims_of(others[0])))
        return [*own, "before pruning"]  # its own all come before the first checkpoint
    return aims_of(method)[METHODS.index(method) :: len(others)]


@pytest.fixture(scope="module")
def harness():
    """Asks a process that has imported everything, once for all methods."""
    command = [sys.executable, str(HARNESS)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes) as process:

        def ask(**request):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask


def test_the_methods_together_are_killed_at_every_aim():
    assert {aim for method in METHODS for aim in share(method)} == AIMS.keys()


@pytest.mark.parametrize("method", METHODS)
def test_kills_and_resumes_end_where_the_unbroken_run_ends(method, harness, tmp_path):
    aims = share(method)
    kills = 2 * len(aims)  # every second one comes at random
    report = harness(method=method, kills=kills, seed=0, folder=str(tmp_path), aims=aims)
    assert "failed" not in report, report["failed"]
    assert report["kills"] == kills
    assert all(report["aims"][aim] == 1 for aim in aims)
    assert report["in_write"] >= sum(AIMS[aim].where == "half" for aim in aims)
    assert report["resumes"] >= 1, "no run went on from a checkpoint, so nothing was tested"
    assert report["differing"] == []
