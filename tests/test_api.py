"""Arguments of Python reach what they are for."""

import tomllib

import numpy as np
import pytest

import nearkin

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return nearkin.train(
        PIXELS,
        out=tmp_path_factory.mktemp("runs") / "run",
        backbone="tiny",
        epochs=1,
        batch_size=8,
        report=False,
        options={"temperature": 0.3, "dim": 8},
        dim=16,
    ).path


def test_options_by_name_and_in_a_dictionary_are_both_used(run):
    options = tomllib.loads((run / "config.toml").read_text())["options"]
    assert (options["temperature"], options["dim"]) == (0.3, 16)


def test_features_are_of_the_size_that_is_given(run):
    large, own = (nearkin.embed(run, PIXELS, image_size=size, workers=0) for size in (24, "auto"))
    assert np.abs(large.vectors - own.vectors).max() > 1e-3
