"""nearkin beside lightly: plan, wiring, length of a run, and the sections of docs/results.md."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import results_page as table
import torch
from torch.nn.functional import cross_entropy, normalize

from benchmarks.__main__ import measure
from benchmarks.peers import plan, side
from benchmarks.shared import lightly

ROOT = Path(__file__).parents[1]
needs_lightly = pytest.mark.needs("lightly")


def run(side="nearkin", method="simclr", network="small"):
    return plan.Run(side, network, method, "cifar10", 0, 2, "epochs")


def test_no_two_runs_have_one_name_and_all_pairs_but_the_baselines_have_both_sides():
    runs = [each for pair in plan.plan() for each in pair]
    assert len({each.name for each in runs}) == len(runs)
    trained = [pair for pair in plan.plan() if pair[0].side != "baseline"]
    assert all(tuple(each.side for each in pair) == plan.SIDES for pair in trained)
    assert all(pair[0] == replace(pair[1], side="nearkin") for pair in trained)


@pytest.mark.slow  # two processes import all that a training takes
def test_a_quick_pair_is_made_by_two_processes(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = list(measure("peers", ["--quick", "--most", "1"]))
    assert [row.case.rpartition("-")[2] for row in rows] == ["baseline", "baseline"]
    assert all(0 <= row.value <= 1 for row in rows)


@pytest.fixture
def views():
    torch.manual_seed(1)
    return [torch.randn(16, 3, 16, 16) for _ in range(2)]


@needs_lightly
def test_simclr_has_the_loss_of_its_paper(views):
    torch.manual_seed(0)
    wired = lightly.simclr("small", 16)
    z = normalize(torch.cat([wired.trained[0](view) for view in views]), dim=1)
    logits = (z @ z.T / 0.5).fill_diagonal_(-math.inf)
    expected = cross_entropy(logits, torch.arange(32).roll(16))
    assert wired.loss(views).item() == pytest.approx(expected.item(), rel=1e-5)


@needs_lightly
def test_moco_queries_a_queue_in_both_directions(views):
    torch.manual_seed(0)
    wired = lightly.moco("small", 16)
    branch, (target, criterion) = wired.trained[0], wired.memory
    bank = criterion.memory_bank.bank.clone()
    torch.manual_seed(2)
    loss, expected = wired.loss(views), 0.0
    torch.manual_seed(2)  # for the same shuffles, as batch norms see eighths of a batch
    for query, key in (views, views[::-1]):
        order = torch.randperm(16)
        keys = normalize(target(key[order])[order.argsort()], dim=1)
        queries = normalize(branch(query), dim=1)
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ bank.T], 1) / 0.1
        expected += cross_entropy(logits, torch.zeros(16, dtype=torch.long)).item() / 2
        bank[:16] = keys if query is views[0] else bank[:16]
        # The second direction finds the keys of the first in the queue.
    assert loss.item() == pytest.approx(expected, rel=1e-4)


@needs_lightly
@pytest.mark.parametrize("method", plan.METHODS)
def test_a_training_of_lightly_changes_its_weights_by_its_schedule(method):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 16, 16, 3), dtype=np.uint8)
    trainer = side.Theirs(method, "small", pixels, 0)
    before = [p.detach().clone() for p in trainer.encoder().parameters()]
    losses = list(trainer.steps(0, 2))
    assert np.isfinite(losses).all()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(trainer.peak / 2)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.encoder().parameters()))


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_the_length_is_what_fits_by_the_mean_of_all_phases(monkeypatch, clock):
    now = [0.0]
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(side.time, name, lambda: now[0])

    class Growing:
        phases = 2

        def steps(self, start, total):
            now[0] += 50.0  # the first step is slow, and not timed
            for step in range(start, total):
                now[0] += 1.0 if step < total // 2 else 3.0
                yield 0.0

    assert side.affordable(Growing(), 600.0, clock) == 300


def test_a_run_that_shared_its_core_is_refused_by_the_wall_clock_only():
    timed = replace(run(), unit="s", budget=1.0)
    shared, alone = side.Meter(wall=10.0, cpu=8.0), side.Meter(wall=10.0, cpu=9.5)
    assert side.is_disturbed(timed, shared, "wall")
    for case in ((timed, alone, "wall"), (timed, shared, "cpu"), (run(), shared, "wall")):
        assert not side.is_disturbed(*case), case


def test_the_committed_page_is_made_from_the_committed_rows():
    committed = (ROOT / table.PAGE).read_text(encoding="utf-8")
    assert table.page(committed, table.load(ROOT / table.ROWS)) == committed, "run `make docs`"
