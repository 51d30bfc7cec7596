"""nearkin beside lightly: the wiring of lightly's parts, the evaluator, resuming, and the table."""

import importlib
import json
import math
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from nearkin.cli import main
from nearkin.config import TrainConfig
from nearkin.data.split import open_split
from nearkin.data.views import MEAN, STD
from nearkin.evaluation.embeddings import Embeddings

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "reproduce")]
plan, evaluator, theirs, side, pairs, times, table = map(
    importlib.import_module, ("plan", "evaluator", "theirs", "side", "pairs", "times", "table")
)
NAMES = ("train", "test")


@pytest.fixture(scope="session")
def lightly():
    return pytest.importorskip("lightly.loss", reason="lightly is not installed")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """An .npz of 32 random images of 16 px to train on and 40 in the test part."""
    random = np.random.default_rng(0)
    counts = dict(zip(NAMES, (32, 40)))
    arrays = {
        f"x_{part}": random.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
        for part, count in counts.items()
    }
    labels = {f"y_{part}": np.arange(count) % 4 for part, count in counts.items()}
    path = tmp_path_factory.mktemp("data") / "random.npz"
    np.savez(path, **arrays, **labels)
    return path


@pytest.fixture(scope="session")
def split(data):
    return open_split(data, TrainConfig())


def run(side="nearkin", method="simclr", network="small"):
    return plan.Run(side, network, method, "cifar10", 0, 2, "epochs")


def both(method="simclr"):
    return [run(side, method) for side in plan.SIDES]


# The plan


def test_no_two_runs_have_one_name_and_all_pairs_but_the_floors_have_both_sides():
    runs = [each for pair in plan.plan() for each in pair]
    assert len({each.name for each in runs}) == len(runs)
    trained = [pair for pair in plan.plan() if pair[0].side != "floor"]
    assert all(tuple(each.side for each in pair) == plan.SIDES for pair in trained)
    assert all(pair[0] == replace(pair[1], side="nearkin") for pair in trained)


def test_every_method_is_on_both_data_sets_and_three_have_three_seeds():
    counts = {
        (data, method): len(
            [
                pair
                for pair in plan.plan()
                if pair[0].unit == "s"
                and (pair[0].data, pair[0].method, pair[0].network) == (data, method, "small")
            ]
        )
        for data in plan.DATA
        for method in plan.METHODS
    }
    assert counts == {
        (data, method): 3 if data == "cifar10" and method in plan.SEEDED else 1
        for data, method in counts
    }


# lightly's parts


def plain_nt_xent(z0, z1, temperature):
    """Return the cross-entropy of each of 2N embeddings against all others but itself."""
    z = normalize(torch.cat([z0, z1]), dim=1)
    logits = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    n = len(z0)
    return cross_entropy(logits, torch.arange(2 * n).roll(n))


@pytest.fixture
def views():
    torch.manual_seed(1)
    return [torch.randn(16, 3, 16, 16) for _ in range(2)]


def cosine(prediction, target):
    return -(normalize(prediction, dim=1) * normalize(target.detach(), dim=1)).sum(1).mean()


def test_simclr_has_the_loss_of_its_paper_in_its_first_steps(lightly, views):
    torch.manual_seed(0)
    wired = theirs.simclr("small", 16)
    branch = wired.trained[0]
    optimizer = theirs.optimizer_of("simclr", wired)
    for _ in range(3):
        expected = plain_nt_xent(branch(views[0]), branch(views[1]), 0.5)
        loss = wired.loss(views)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        theirs.update(optimizer, loss)


def test_byol_predicts_the_momentum_branch(lightly, views):
    torch.manual_seed(0)
    wired = theirs.byol("small", 16)
    (branch, predictor), (target,) = wired.trained, wired.memory
    p, z = [predictor(branch(view)) for view in views], [target(view) for view in views]
    expected = (cosine(p[0], z[1]) + cosine(p[1], z[0])) / 2
    assert wired.loss(views).item() == pytest.approx(expected.item(), rel=1e-4)
    assert not any(parameter.requires_grad for parameter in target.parameters())


def test_simsiam_predicts_the_other_view(lightly, views):
    torch.manual_seed(0)
    wired = theirs.simsiam("small", 16)
    branch, predictor = wired.trained
    z = [branch(view) for view in views]
    expected = (cosine(predictor(z[0]), z[1]) + cosine(predictor(z[1]), z[0])) / 2
    assert wired.loss(views).item() == pytest.approx(expected.item(), rel=1e-4)


def test_moco_queries_a_queue_in_both_directions(lightly, views):
    torch.manual_seed(0)
    wired = theirs.moco("small", 16)
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
    assert int(criterion.memory_bank.bank_ptr) == 32


def test_both_sides_normalize_images_alike(lightly):
    from lightly.transforms.utils import IMAGENET_NORMALIZE

    assert IMAGENET_NORMALIZE["mean"] == list(MEAN)
    assert IMAGENET_NORMALIZE["std"] == list(STD)


@pytest.mark.parametrize("network", theirs.WIDTH)
@pytest.mark.parametrize("splits", [0, theirs.SPLITS])
def test_a_network_of_theirs_has_the_features_that_heads_expect(lightly, network, splits):
    body = theirs.backbone(network, splits)
    assert body(torch.randn(16, 3, 16, 16)).shape == (16, theirs.WIDTH[network])
    norms = {type(module).__name__ for module in body.modules() if "Norm" in type(module).__name__}
    assert norms == {"SplitBatchNorm" if splits else "BatchNorm2d"}


# Trainings


@pytest.mark.parametrize("method", plan.METHODS)
def test_a_schedule_of_lightly_ends_and_the_weights_have_changed(lightly, split, method):
    trainer = side.trainer_of(run("lightly", method), split, Path())
    before = [p.detach().clone() for p in trainer.encoder().parameters()]
    losses = list(trainer.steps(0, 2))
    assert len(losses) == 2
    assert np.isfinite(losses).all()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(trainer.peak / 2)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.encoder().parameters()))


@pytest.mark.parametrize("method", ["moco", "nnclr", "byol"])
@pytest.mark.parametrize("who", plan.SIDES)
def test_a_restored_training_takes_the_same_next_step(lightly, split, tmp_path, who, method):
    first, other = (side.trainer_of(run(who, method), split, tmp_path) for _ in range(2))
    list(zip(range(2), first.steps(0, 4)))  # two: nearkin's first step has a rate of zero
    place, progress = side.Place(tmp_path, math.inf), side.Progress(4, side.Meter(2.0, 1.0), 2)
    progress.loss = 0.5
    place.save(first, progress)
    assert place.load(other) == progress
    assert list(first.steps(2, 4)) == list(other.steps(2, 4))


@pytest.mark.parametrize("each", both(), ids=plan.SIDES)
def test_a_run_pauses_and_goes_on_to_its_row(lightly, split, tmp_path, each):
    paused = side.work(each, split, side.Place(tmp_path, time.time()), "wall")
    assert paused == side.PAUSED
    assert not (tmp_path / "row.json").exists()
    assert side.work(each, split, side.Place(tmp_path, math.inf), "wall") == 0
    row = json.loads((tmp_path / "row.json").read_text())
    assert {name: row[name] for name in vars(each)} == vars(each)
    assert row["epochs"] == 2
    assert row["pieces"] == 2
    assert row["low"] <= row["knn"] <= row["high"]
    assert row["seconds"] > 0
    assert row["settings"]["image_size"] == 16


def test_time_is_counted_in_steps_alone():
    meter = side.Meter()
    for _ in meter.timed([0.0, 1.0]):
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
    assert meter.cpu < 0.05


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
    assert not side.is_disturbed(timed, alone, "wall")
    assert not side.is_disturbed(timed, shared, "cpu")
    assert not side.is_disturbed(run(), shared, "wall")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a pair takes two cores")
def test_a_pair_is_made_by_two_processes_and_kept_once_both_are_done(data, tmp_path, capsys):
    where = pairs.Where(tmp_path, tmp_path / "rows.jsonl", {"cifar10": data}, "wall", math.inf)
    floors = next(plan.floors("cifar10"))
    assert pairs.finish(floors, sorted(os.sched_getaffinity(0))[:2], where)
    assert [row["name"] for row in pairs.rows(where.results)] == [each.name for each in floors]
    assert capsys.readouterr().out.count("kNN") == 2


# The evaluator


def plain_knn(bank, labels, queries, k, temperature):
    """Return the predictions of the papers' vote, one query at a time."""
    length = lambda vectors: np.sqrt((vectors**2).sum(axis=-1, keepdims=True))
    bank, queries = bank / length(bank), queries / length(queries)
    predicted = []
    for query in queries:
        votes = np.zeros(labels.max() + 1)
        for row in np.argsort(-(bank @ query))[:k]:
            votes[labels[row]] += math.exp(bank[row] @ query / temperature)
        predicted.append(votes.argmax())
    return np.array(predicted)


def test_the_evaluator_is_the_vote_of_the_papers():
    random = np.random.default_rng(0)
    bank, queries = (
        Embeddings(random.normal(size=(n, 5)).astype(np.float32), random.integers(0, 4, n))
        for n in (500, 100)
    )
    plain = plain_knn(bank.vectors, bank.labels, queries.vectors, 200, 0.1)
    measure = evaluator.accuracy(bank, queries)
    assert measure.outcome.correct.tolist() == (plain == queries.labels).tolist()


def test_features_are_those_of_each_image_alone_in_float32(split):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1))
    features = evaluator.features(network.train(), split.test, 16)
    pixels = torch.stack([torch.from_numpy(split.test.read(row).copy()) for row in range(40)])
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    normalized = ((pixels / 255 - mean) / std).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected = network.eval()(normalized).flatten(1)
    assert np.allclose(features.vectors, expected.numpy(), atol=1e-5)
    assert features.vectors.dtype == np.float32


# The table


def made_up(each, knn):
    return {
        **vars(each), "name": each.name, "knn": knn, "low": knn - 0.01, "high": knn + 0.01,
        "epochs": 1.5, "images_per_second": 100.0, "seconds": 600.0, "cpu_seconds": 590.0,
        "cpu_share": 0.98, "clock": "wall", "machine": "a CPU", "versions": {"torch": "2"},
        "commit": "abc",
    }  # fmt: skip


def cells(text, start, heading):
    part = text.split(f"### {heading}")[1]
    line = next(line for line in part.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_cell_says_mean_range_and_seeds_and_what_was_not_run():
    ours = [plan.Run("nearkin", "small", "simclr", "cifar10", seed, 600.0) for seed in range(3)]
    lightlys = [replace(ours[0], side="lightly")]
    rows = [made_up(each, 0.5 + 0.1 * each.seed) for each in ours]
    rows += [made_up(each, 0.4) for each in lightlys]
    text = table.section({row["name"]: row for row in rows})
    heading = "CIFAR-10, 600 seconds of one core each"
    assert cells(text, "simclr, small", heading) == [
        "0.600 (0.500 to 0.700), 3 seeds",
        "0.400 [0.390, 0.410], 1 seed",
        "+0.100",
        "1.5; 1.5",
        "100; 100",
    ]
    assert cells(text, "moco, small", heading)[:2] == ["not run", "not run"]
    assert "4 of 46 trainings are here" in text


def timed(run, knn):
    values = {name: [knn, knn - 0.1, knn + 0.1] for name in plan.MEASURES}
    measures = dict.fromkeys(("encoder", "pixels", "untrained"), values)
    row = {"name": run.name, **asdict(run), "epochs": 9, "cpu_seconds": 120, "measures": measures}
    return row | {"commit": "abc", "machine": "made up", "versions": {"torch": "2"}}


def test_trainings_of_a_given_time_have_different_names_and_the_options_of_their_arm():
    runs = plan.timed_plan()
    assert len({run.name for run in runs}) == len(runs)
    assert plan.Timed("cifar10", "byol", 30, 1, 2).options == [
        "--method", "byol", "--max-time", "30m", "--seed", "2",
    ]  # fmt: skip
    assert plan.Timed("digits", "simclr", 2, 1).options[-2:] == ["--val", "0.2"]
    assert "recipe:cifar10/simclr" in plan.Timed("digits", "simclr", 2, 1, 0, "published").options


def test_a_row_of_a_given_time_says_seeds_mean_and_range_and_what_was_not_run():
    runs = [run for run in plan.timed_plan() if (run.data, run.arm) == ("digits", "auto")]
    text = table.timed_section({run.name: timed(run, 0.5 + 0.1 * run.seed) for run in runs[:2]})
    heading = table.TIMED["digits"]
    assert cells(text, "simclr, 2 min of 1 core", heading) == [
        "2 of 3", "9", "2", *["0.550 (0.500 to 0.600)"] * 3,
    ]  # fmt: skip
    assert cells(text, "published, 2 min of 1 core", heading)[:2] == ["0 of 3", "not run"]
    assert cells(text, "raw pixels (floor)", heading)[-1] == "0.500 [0.400, 0.600]"


def test_a_training_of_a_given_time_becomes_a_row(tmp_path):
    run = plan.Timed("digits", "simclr", 1, 1)
    options = ["--epochs", "1", "--backbone", "tiny", "--val", "0.2", "--no-report"]
    folder = tmp_path / run.name
    assert main(["train", "digits", "-o", str(folder), *options]) == 0
    row = times.row(run, folder, {"cpu_seconds": 3})
    assert row["name"] == run.name
    assert (row["epochs"], row["cpu_seconds"]) == (1, 3)
    assert all(
        low <= value <= high
        for measures in row["measures"].values()
        for value, low, high in measures.values()
    )
    assert set(row["measures"]) == {"encoder", "pixels", "untrained"}


def test_the_committed_page_is_made_from_the_committed_rows():
    committed = (ROOT / table.PAGE).read_text(encoding="utf-8")
    rows = (table.load(ROOT / table.RESULTS / name) for name in ("peers.jsonl", "times.jsonl"))
    assert table.page(committed, *rows) == committed, "run `make docs`"
