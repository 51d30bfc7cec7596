"""Settings that trade memory for time, from the configuration to the last step."""

import csv

import numpy as np
import pytest

from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.errors import UsageError

SMALL = {"backbone": "tiny", "image_size": 16, "batch_size": 8, "epochs": 2, "val": 0.0}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_photographs_are_kept_where_it_was_asked_for_and_give_the_same_bits(photographs, tmp_path):
    settings = SMALL | {"batch_size": 4}
    runs = {
        name: train(
            photographs, TrainConfig(**settings, cache=name, workers=workers), out=tmp_path / name
        )
        for name, workers in (("ram", 0), ("disk", 2), ("auto", 0))
    }
    encoders = {run.folder.encoder.read_bytes() for run in runs.values()}
    assert len(encoders) == 1
    assert list((tmp_path / "cache" / "nearkin" / "images").iterdir())
    resolved, _ = runs["auto"].folder.settings()
    assert resolved.cache == "ram"  # these are far larger than what is kept of them
    fresh = train(photographs, TrainConfig(**settings, cache="off"), out=tmp_path / "off")
    assert fresh.folder.encoder.read_bytes() not in encoders


def losses(run):
    with run.folder.metrics.open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def test_a_batch_goes_through_in_chunks(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (32, 16, 16, 3), dtype=np.uint8)
    moco = {"method": "moco", "options": {"queue_size": 16, "bn_groups": 4}, "precision": "fp32"}
    whole = train(images, TrainConfig(**SMALL, **moco), out=tmp_path / "whole")
    chunks = train(images, TrainConfig(**SMALL, **moco, chunk_size=2), out=tmp_path / "chunks")
    assert losses(chunks) == pytest.approx(losses(whole), rel=1e-4)
    with pytest.raises(UsageError, match="chunks of 3 images do not divide a batch of 8"):
        train(images, TrainConfig(**SMALL, **moco, chunk_size=3), out=tmp_path / "misfit")
    with pytest.raises(UsageError, match="cannot have 4 groups of batch"):
        train(images, TrainConfig(**SMALL, **moco, chunk_size=4), out=tmp_path / "other")
