"""`nearkin compare` and `nearkin rank` of runs as they are made."""

import numpy as np
from builders import pixels

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
