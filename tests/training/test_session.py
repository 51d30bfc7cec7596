"""A training as a whole: images that are opened once, networks of any kind, batches in chunks."""

import numpy as np
import pytest
import torch
from builders import pixels
from safetensors.torch import load_file
from torch import nn

from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.data import split as splitting
from nearkin.encoders.encoder import load
from nearkin.errors import CheckpointError, UsageError
from nearkin.methods.simgcd import SimGCD
from nearkin.run import data as opening
from nearkin.tables import read_numbers


@pytest.fixture
def calls(monkeypatch):
    """How often the data are opened and compared for duplicates."""
    counts = {"open_images": 0, "duplicates": 0}

    def count(module, name):
        original = getattr(module, name)

        def counted(*arguments, **options):
            counts[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, counted)

    count(opening, "open_images")
    count(splitting, "duplicates")
    return counts


def test_a_run_opens_and_splits_its_data_once(tmp_path, calls):
    config = TrainConfig(backbone="tiny", image_size=16, batch_size=8, epochs=1, report=False)
    run = train(pixels(32), config, output=tmp_path / "run")
    assert calls == {"open_images": 1, "duplicates": 1}
    assert set(run.summary["metrics"]) == {"encoder", "untrained", "pixels"}


def test_the_terms_of_a_method_are_columns_of_its_metrics(tmp_path):
    np.savez(tmp_path / "images.npz", x=pixels(32), y=np.arange(32) % 4)
    small = dict(backbone="tiny", image_size=16, batch_size=8, epochs=1, evaluate_every=0)
    config = TrainConfig(method="simgcd", known=["0", "1"], val=0.0, report=False, **small)
    run = train(tmp_path / "images.npz", config, output=tmp_path / "run")
    rows = read_numbers(run.folder.metrics)
    assert all(np.isfinite(row[name]) for row in rows for name in SimGCD.metrics)


def test_a_run_that_learned_from_labels_goes_on_with_the_same_ones(tmp_path):
    """What learns from none may have others, which only score."""
    data, known = tmp_path / "images.npz", ["0", "1", "2", "3"]
    small = dict(backbone="tiny", image_size=16, batch_size=8, epochs=1, evaluate_every=0)
    supervised = TrainConfig(method="supervised", known=known, report=False, **small)
    simclr = TrainConfig(report=False, **small)
    for labels in (np.arange(32) % 4, np.arange(32) // 8):
        resume = data.exists()
        np.savez(data, x=pixels(32), y=labels)
        train(data, simclr, output=tmp_path / "simclr", resume=resume)
        if not resume:
            for again in (False, True):
                train(data, supervised, output=tmp_path / "supervised", resume=again)
    with pytest.raises(CheckpointError, match="the labels have changed since the run was") as no:
        train(data, supervised, output=tmp_path / "supervised", resume=True)
    assert no.value.exit_code == 5


class Tied(nn.Module):
    """A network that uses one layer twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1)
        self.third = self.second

    def forward(self, x):
        return self.third(self.second(self.first(x).relu()).relu()).mean((2, 3))


def test_a_network_with_a_layer_used_twice_is_trained_stored_and_loaded(tmp_path):
    config = TrainConfig(image_size=16, batch_size=8, epochs=1, report=False)
    run = train(pixels(32), config, output=tmp_path / "run", backbone=Tied())
    encoder = load(run.path, backbone=Tied())
    state = load_file(run.folder.encoder)
    assert torch.equal(state["second.weight"], state["third.weight"])
    assert torch.equal(encoder.backbone.body.third.weight, state["second.weight"])
    assert encoder.backbone.body.second is encoder.backbone.body.third
    assert encoder(torch.zeros(1, 3, 16, 16)).shape == (1, 16)
    train(pixels(32), config, output=tmp_path / "run", backbone=Tied(), resume=True)


def test_a_batch_goes_through_in_chunks(tmp_path):
    images = pixels(32)
    settings = {"backbone": "tiny", "image_size": 16, "batch_size": 8, "epochs": 2, "val": 0.0}
    settings |= {"method": "moco", "options": {"queue_size": 16, "bn_groups": 4}}
    settings |= {"precision": "fp32", "evaluate_every": 0, "report": False}
    whole = train(images, TrainConfig(**settings), output=tmp_path / "whole")
    chunks = train(images, TrainConfig(**settings, chunk_size=2), output=tmp_path / "chunks")
    losses, expected = (
        [row["loss"] for row in read_numbers(run.folder.metrics)] for run in (chunks, whole)
    )
    assert losses == pytest.approx(expected, rel=1e-4)
    with pytest.raises(UsageError, match="chunks of 3 images do not divide a batch of 8"):
        train(images, TrainConfig(**settings, chunk_size=3), output=tmp_path / "odd")
