"""Fifty steps of every method, as they were: whatever changes a number has to say so.

Nothing says that these numbers are right; other tests do. After a change that is meant to alter
them, write them anew, and say in the commit why they moved:

    PYTHONPATH=tests python tests/methods/test_golden_runs.py [METHOD ...]
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from small import double_for, run, small

from nearkin.methods import METHODS

FILE = Path(__file__).with_name("golden_runs.json")
"""A line of losses for each method, so that a difference shows which of them moved."""

GOLDEN = json.loads(FILE.read_text())
STEPS = 50


def losses(name):
    return run(small(name).double(), name, until=STEPS, total=STEPS, batches=double_for)[0]


@pytest.mark.parametrize("name", METHODS)
def test_every_loss_is_what_it_was(name):
    assert set(GOLDEN) == set(METHODS)
    assert losses(name) == pytest.approx(GOLDEN[name], rel=1e-9, abs=0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    anew = {name: [float(f"{x:.12g}") for x in losses(name)] for name in sys.argv[1:] or METHODS}
    runs = {name: run for name, run in (GOLDEN | anew).items() if name in METHODS}
    lines = [f' "{name}": {json.dumps(runs[name])}' for name in sorted(runs)]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
