"""Fifty steps of every method, as they were: whatever changes a number has to say so.

Nothing says that these numbers are right; other tests do. After a change that is meant to alter
them, write them anew, and say in the commit why they moved:

    PYTHONPATH=tests python tests/methods/test_golden_runs.py [METHOD ...]
"""

import sys
from pathlib import Path

import pytest
import torch
from small import as_double, batch_for, run, small

from nearkin.methods import METHODS

FOLDER = Path(__file__).parent / "golden_runs"
STEPS = 50


def losses(name):
    method = small(name).double()
    values, _ = run(
        method,
        name,
        until=STEPS,
        total=STEPS,
        batches=lambda name, step: as_double(batch_for(name, step)),
    )
    return values


@pytest.mark.parametrize("name", METHODS)
def test_every_loss_is_what_it_was(name):
    expected = [float(line) for line in (FOLDER / f"{name}.txt").read_text().split()]
    assert len(expected) == STEPS
    assert losses(name) == pytest.approx(expected, rel=1e-9, abs=0)


def test_there_is_a_run_of_every_method_and_no_other():
    assert {path.stem for path in FOLDER.iterdir()} == set(METHODS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or METHODS:
        lines = "".join(f"{loss:.12g}\n" for loss in losses(name))
        (FOLDER / f"{name}.txt").write_text(lines)
