"""`nearkin compare` and `nearkin rank` of runs as they are made."""

import numpy as np
import pytest
from builders import fill, pixels

import nearkin
from nearkin.config import TrainConfig
from nearkin.report.comparison import _duration


def test_runs_of_data_with_a_validation_part_are_ranked(tmp_path):
    """Which is neither trained on nor scored, so it is among the images of no run."""
    parts = {"train": pixels(32), "val": pixels(8, seed=1), "test": pixels(8, seed=2)}
    np.savez(tmp_path / "data.npz", **{f"x_{part}": x for part, x in parts.items()})
    config = TrainConfig(backbone="tiny", epochs=1, batch_size=8, report=False)
    data, runs = tmp_path / "data.npz", [tmp_path / "a", tmp_path / "b"]
    for seed, run in enumerate(runs):
        nearkin.train(data, config, output=run, seed=seed, verbose=False)
    ranking = nearkin.rank(runs, workers=0, verbose=False)
    assert sorted(ranking.order) == ["a", "b"]
    assert "40 of 40 images" in ranking.protocol


def test_runs_whose_table_of_labels_names_a_validation_part_are_ranked(tmp_path):
    names, parts = [f"{row:02}.png" for row in range(32)], ["train"] * 24 + ["val"] * 4
    fill(tmp_path / "images", *names, size=(8, 8))
    cells = zip(names, "ab" * 16, [*parts, *["test"] * 4], strict=True)
    lines = ["path,label,split", *(",".join(row) for row in cells)]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    config = TrainConfig(backbone="tiny", epochs=1, batch_size=8, report=False)
    data, runs = tmp_path / "images", [tmp_path / "a", tmp_path / "b"]
    for seed, run in enumerate(runs):
        how = {"labels": tmp_path / "labels.csv", "seed": seed, "verbose": False}
        nearkin.train(data, config, output=run, **how)
    ranking = nearkin.rank(runs, workers=0, verbose=False)
    assert sorted(ranking.order) == ["a", "b"]
    assert "28 of 28 images" in ranking.protocol


DONE = ["10:01:05 done   x"]
SESSIONS = {
    "done": DONE,
    "resumed": ["10:00:01 resuming after step 3", *DONE],
    "complete": ["10:00:01 already complete", "10:00:02 done   x"],
    "refused": ["12:00:00 Traceback (most recent call last):"],
}


@pytest.mark.parametrize(
    ("sessions", "seconds"),
    [
        (["done"], 65),
        (["done", "refused"], 65),
        (["refused", "done"], 65),
        (["done", "complete", "refused"], 65),
        (["refused"], None),
        (["refused", "resumed"], None),
    ],
)
def test_the_time_of_a_run_is_that_of_the_session_that_made_it(tmp_path, sessions, seconds):
    """And not of one that was refused, whose traceback may be days later."""
    log = []
    for day, session in enumerate(sessions, start=1):
        lines = ["10:00:00 nearkin 1.0 | writing x", *SESSIONS[session]]
        log += [f"2026-11-0{day} {line}" for line in lines]
        log += ["nearkin.errors.UsageError: no"] * (session == "refused")
    (tmp_path / "train.log").write_text("\n".join(log))
    assert _duration(tmp_path / "train.log") == seconds
