"""Faults of discoveries that show in no result, unless one looks for them."""

import numpy as np
import pytest
import torch
from builders import write_network

from nearkin.config import DiscoverConfig
from nearkin.discovery.data import open_discovery_data
from nearkin.discovery.features import NUM_VIEWS
from nearkin.discovery.pipeline import Pipeline
from nearkin.errors import ResourceError
from nearkin.run import failures
from nearkin.run.folder import RunFolder
from nearkin.run.opening import OpenRun
from nearkin.run.reporter import Logger, Silent
from nearkin.types import UNLABELED

CPU = torch.device("cpu")


@pytest.fixture
def data(tmp_path):
    """Ten images of each of four classes."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    names = np.array(["cat", "dog", "eel", "fox"])[np.arange(40) % 4]
    np.savez(tmp_path / "data.npz", x=pixels, y=names)
    return str(tmp_path / "data.npz")


@pytest.fixture
def config(tmp_path):
    """Settings of a discovery, with an encoder at hand."""
    path = write_network(tmp_path / "encoder.safetensors")
    return DiscoverConfig(
        encoder=str(path), known=["cat", "dog"], classes=2, workers=0, augment="simclr",
        train_layers="top", val=0.25,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    return folder


def test_labels_of_held_out_images_are_kept_from_all_that_learns(data, config, folder):
    """The dataset keeps them: they are what known classes are scored by."""
    dataset = open_discovery_data(data, config)
    with Logger(Silent(), folder.log) as log:
        task = Pipeline(data, OpenRun(folder, config, CPU, log)).prepare(dataset).task
    learned, held_out = dataset.parts.train_rows, dataset.parts.test_rows
    assert set(dataset.label[held_out].tolist()) == {0, 1, UNLABELED}
    assert (task.label[held_out] == UNLABELED).all()
    assert task.rows.tolist() == learned.tolist()
    assert task.label[learned].tolist() == dataset.label[learned].tolist()


@pytest.mark.slow
def test_a_discovery_says_what_it_holds_in_memory_before_it_does(
    data, config, folder, monkeypatch
):
    dataset = open_discovery_data(data, config)
    size = 4 * 40 * 128 * (1 + 2 * NUM_VIEWS)  # float32; those of views also in pieces
    monkeypatch.setattr(failures, "STATED", 8 * 4 * 64 * 40)  # k-means, in double precision
    with Logger(Silent(), folder.log) as log:
        pipeline = Pipeline(data, OpenRun(folder, config, CPU, log))
        monkeypatch.setattr(failures, "free_memory", lambda: size - 1)
        with pytest.raises(ResourceError, match="features: 0 MB in memory"):
            pipeline.prepare(dataset)
        monkeypatch.setattr(failures, "free_memory", lambda: 2**30)
        state = pipeline.prepare(dataset)
    lines = folder.log.read_text(encoding="utf-8")
    assert "features: " in lines
    assert "k-means of all images: " in lines
    assert "probabilities of all images" not in lines  # those of four classes are few
    assert len(state.stages.encoder.cached.center) == 40
