"""The papers' ablations: their tables name what exists, and the harness measures and resumes."""

import csv
import importlib
import inspect
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nearkin.errors import DataError
from nearkin.methods import METHODS
from nearkin.networks.branch import as_backbone
from nearkin.objectives import unit
from nearkin.run.settings import checked_options, fitted_options

sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "ablations"))
arms, trial, summary, ablate = map(importlib.import_module, ("arms", "trial", "summary", "ablate"))

TINY = trial.Recipe(steps=3, train=64, queries=32)
ARM = replace(arms.SIMSIAM, batch_size=16)
EVERY_ARM = [
    pytest.param(arm, id=f"{paper}, {name}")
    for paper, panels in arms.PAPERS.items()
    for panel in panels
    for name, arm in panel.arms.items()
]


@pytest.fixture
def data(tmp_path):
    """An .npz of random images, 100 to train on and 20 in the test part."""
    random = np.random.default_rng(0)
    parts = {"train": 100, "test": 20}
    path = tmp_path / "random.npz"
    pixels = {
        f"x_{part}": random.integers(0, 256, (count, 14, 14), dtype=np.uint8)
        for part, count in parts.items()
    }
    labels = {f"y_{part}": np.arange(count) % 4 for part, count in parts.items()}
    np.savez(path, **pixels, **labels)
    return path


def panels(**named):
    return (arms.Panel("options", {"": named}),)


def test_there_is_an_ablation_for_every_paper_of_the_family_that_has_one():
    assert set(arms.PAPERS) == {"simsiam", "byol", "moco", "instdisc", "swav", "nnclr"}


@pytest.mark.parametrize("arm", EVERY_ARM)
def test_an_arm_names_a_method_and_options_that_exist(arm):
    assert arm.method in METHODS
    assert checked_options(arm.method, arm.options) == arm.options
    for size in fitted_options(METHODS[arm.method]):
        default = inspect.signature(METHODS[arm.method].__init__).parameters[size].default
        assert arm.options.get(size, default) <= trial.Recipe().train / 2


@pytest.mark.parametrize("paper", arms.PAPERS)
def test_the_arms_of_a_panel_differ(paper):
    for panel in arms.PAPERS[paper]:
        settings = [repr(arm) for arm in panel.arms.values()]
        assert len(set(settings)) == len(settings) >= 2


def test_groups_of_batch_statistics_have_one_size_in_all_of_moco():
    grouped = [
        arm
        for panel in arms.PAPERS["moco"]
        for arm in panel.arms.values()
        if arm.method != "moco_memory_bank"
    ]
    assert {arm.batch_size / arm.options["bn_groups"] for arm in grouped} == {arms.GROUP}


def test_every_paper_has_the_recipe_of_the_issue():
    assert trial.Recipe().steps >= 1500
    assert trial.Recipe().train == 10_000
    assert len(ablate.SEEDS) == 3


@pytest.mark.parametrize("momentum", [0.5, 0.9, 0.99, 0.999])
def test_after_the_half_life_half_is_left(momentum):
    assert momentum ** arms.half_life(momentum) == pytest.approx(0.5)


def test_the_ends_of_the_half_life():
    assert arms.half_life(0.0) == 0.0
    assert arms.half_life(1.0) == math.inf
    assert arms.with_half_life(0.99) == "0.99 (69)"


def test_an_interrupted_command_does_only_the_rest_and_ends_as_an_unbroken_one(
    data, tmp_path, capsys
):
    good = panels(full=ARM, alone=ARM.but(predictor=False))
    broken = panels(full=ARM, alone=ARM.but(no_such_option=1))
    unbroken, resumed = tmp_path / "unbroken.csv", tmp_path / "resumed.csv"
    table = ablate.ablate(good, TINY, str(data), unbroken, seeds=(0, 1))
    assert len(capsys.readouterr().out.splitlines()) == 6

    with pytest.raises(TypeError, match="no_such_option"):
        ablate.ablate(broken, TINY, str(data), resumed, seeds=(0, 1))
    before = resumed.read_bytes()
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert ablate.ablate(good, TINY, str(data), resumed, seeds=(0, 1)) == table
    assert capsys.readouterr().out.splitlines()[0].startswith("alone, seed 0")
    assert resumed.read_bytes() == unbroken.read_bytes()
    assert resumed.read_bytes().startswith(before)
    assert unbroken.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    assert ablate.ablate(good, TINY, str(data), resumed, seeds=(0, 1)) == table
    assert capsys.readouterr().out == ""
    assert resumed.read_bytes() == unbroken.read_bytes()


def test_a_row_holds_what_an_arm_was_measured_at(data, tmp_path):
    path = tmp_path / "some.csv"
    ablate.ablate(panels(full=ARM), TINY, str(data), path, seeds=(0, 1))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seed"], row["steps"]) for row in rows] == [
        ("untrained", "0", "0"),
        ("full", "0", "3"),
        ("untrained", "1", "0"),
        ("full", "1", "3"),
    ]
    for row in rows:
        assert 0 <= float(row["knn"]) <= 1
        assert 1 <= float(row["effective_rank"]) <= 32
    assert math.isnan(float(rows[0]["loss"]))
    assert -1 <= float(rows[1]["loss"]) <= 1


def test_another_recipe_arm_seed_or_image_is_another_trial(data):
    images = trial.ImageSet(str(data), TINY)
    others = trial.ImageSet(str(data), replace(TINY, queries=31))
    keys = {
        trial.key(ARM, 0, TINY, images),
        trial.key(ARM, 1, TINY, images),
        trial.key(ARM.but(dim=8), 0, TINY, images),
        trial.key(replace(ARM, batch_size=8), 0, TINY, images),
        trial.key(ARM, 0, replace(TINY, lr=0.1), images),
        trial.key(ARM, 0, TINY, others),
    }
    assert len(keys) == 6
    assert trial.key(ARM, 0, TINY, trial.ImageSet(str(data), TINY)) in keys


def test_what_is_scored_is_neither_trained_on_nor_of_the_test_part(data):
    images = trial.ImageSet(str(data), TINY)
    trained, scored = set(images.train.names), set(images.queries.names)
    assert (len(trained), len(scored)) == (64, 32)
    assert not trained & scored
    assert all(name.startswith("train/") for name in trained | scored)


def test_too_few_images_are_refused(data):
    with pytest.raises(DataError, match="100 images to train on; 12000 are needed"):
        trial.ImageSet(str(data), trial.Recipe())


def test_all_arms_of_a_seed_start_from_the_same_weights_and_see_the_same_images(data):
    images = trial.ImageSet(str(data), TINY)
    start = replace(TINY, steps=0)
    knn = [
        trial.trial(arm, 5, start, images)["knn"]
        for arm in (ARM, replace(arms.BYOL, batch_size=16), replace(arms.MOCO, batch_size=16))
    ]
    assert knn[0] == knn[1] == knn[2]


def test_codes_are_the_less_balanced_the_fewer_iterations_made_them(data):
    images = trial.ImageSet(str(data), TINY)
    torch.manual_seed(0)
    queries = unit(torch.randn(200, 64) + 2)
    imbalances = []
    for count in (1, 3, 300):
        torch.manual_seed(0)
        options = arms.SWAV.but(num_iterations=count).options
        swav = METHODS["swav"](as_backbone(trial.network(), 14), **options)
        imbalances.append(trial.imbalance(swav, queries, images))
    assert 1 > imbalances[0] > imbalances[1] > imbalances[2]
    assert imbalances[2] < 1e-3


def test_neighbors_are_counted_by_the_class_of_their_images(data):
    images = trial.ImageSet(str(data), TINY)
    nnclr = METHODS["nnclr"](
        as_backbone(trial.network(), 14), **arms.NNCLR.but(support_size=64).options
    )
    of_class = {label: row for row, label in enumerate(images.train.labels.tolist())}
    queries = torch.eye(64)[: len(images.queries)]
    expected = [of_class[label] for label in images.queries.labels.tolist()]
    expected[0] = next(  # one neighbor of another class
        row for label, row in of_class.items() if label != images.queries.labels[0]
    )
    nnclr.support_set.enqueue(queries, torch.tensor(expected))
    neighbors = trial.neighbors_of_class(nnclr, queries, images)
    assert neighbors == pytest.approx((len(queries) - 1) / len(queries))


def test_a_cell_is_mean_and_sample_deviation_over_the_seeds():
    rows = [{"knn": value} for value in ("0.1", "0.2", "0.3")]
    assert summary.cell(rows, "knn") == "0.200 ± 0.100"
    assert summary.cell([{"loss": "nan"}, {}], "loss") == ""
