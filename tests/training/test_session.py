"""A training is given images that are opened and split, and opens nothing itself."""

import pytest
import torch
from builders import pixels
from safetensors.torch import load_file
from torch import nn

from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.data import split as splitting
from nearkin.encoders.encoder import load
from nearkin.run import data as opening


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
    run = train(pixels(32), config, out=tmp_path / "run")
    assert calls == {"open_images": 1, "duplicates": 1}
    assert set(run.summary["metrics"]) == {"encoder", "untrained", "pixels"}


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
    run = train(pixels(32), config, out=tmp_path / "run", backbone=Tied())
    encoder = load(run.path, backbone=Tied())
    state = load_file(run.folder.encoder)
    assert torch.equal(state["second.weight"], state["third.weight"])
    assert torch.equal(encoder.backbone.body.third.weight, state["second.weight"])
    assert encoder.backbone.body.second is encoder.backbone.body.third
    assert encoder(torch.zeros(1, 3, 16, 16)).shape == (1, 16)
    train(pixels(32), config, out=tmp_path / "run", backbone=Tied(), resume=True)
