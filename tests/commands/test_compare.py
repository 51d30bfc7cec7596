"""`nearkin compare` and `nearkin rank` of runs as they are made."""

import numpy as np
from builders import fill, pixels

import nearkin
from nearkin.config import TrainConfig


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
