"""`--chunk-size`, from the configuration to the last step: networks/test_chunks.py has the details."""

import csv

import pytest
from builders import pixels

from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.errors import UsageError


def losses(run):
    with run.folder.metrics.open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def test_a_batch_goes_through_in_chunks(tmp_path):
    images = pixels(32)
    settings = {"backbone": "tiny", "image_size": 16, "batch_size": 8, "epochs": 2, "val": 0.0}
    settings |= {"method": "moco", "options": {"queue_size": 16, "bn_groups": 4}}
    settings |= {"precision": "fp32", "evaluate_every": 0, "report": False}
    whole = train(images, TrainConfig(**settings), out=tmp_path / "whole")
    chunks = train(images, TrainConfig(**settings, chunk_size=2), out=tmp_path / "chunks")
    assert losses(chunks) == pytest.approx(losses(whole), rel=1e-4)
    for size, says in (
        (3, "chunks of 3 images do not divide a batch of 8"),
        (4, "cannot have 4 groups of batch"),
    ):
        with pytest.raises(UsageError, match=says):
            train(images, TrainConfig(**settings, chunk_size=size), out=tmp_path / str(size))
