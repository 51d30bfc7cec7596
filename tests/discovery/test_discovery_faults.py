"""Faults of discoveries that show in no result, unless one looks for them."""

import numpy as np
import torch

from nearkin.config import DiscoverConfig
from nearkin.discovery.data import open_discovery_data
from nearkin.discovery.pipeline import Pipeline
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logger, Silent
from nearkin.types import UNKNOWN


def test_labels_of_held_out_images_are_kept_from_all_that_learns(tmp_path):
    """The dataset keeps them: they are what known classes are scored by."""
    data, names = tmp_path / "data.npz", np.array(["cat", "dog", "eel", "fox"])
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    np.savez(data, x=pixels, y=names[np.arange(40) % 4])
    config = DiscoverConfig(known="cat,dog", classes=2, val=0.25)
    dataset = open_discovery_data(str(data), config)
    with Logger(Silent(), tmp_path / "log") as log:
        pipeline = Pipeline(str(data), config, RunFolder(tmp_path), torch.device("cpu"), log)
        task = pipeline._task(dataset, None)
    learned, held_out = dataset.parts.train_rows, dataset.parts.test_rows
    assert set(dataset.label[held_out].tolist()) == {0, 1, UNKNOWN}
    assert (task.label[held_out] == UNKNOWN).all()
    assert task.rows.tolist() == learned.tolist()
    assert task.label[learned].tolist() == dataset.label[learned].tolist()
