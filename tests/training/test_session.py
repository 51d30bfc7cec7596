"""A training is given images that are opened and split, and opens nothing itself."""

import numpy as np
import pytest

from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.data import split as splitting


@pytest.fixture
def calls(monkeypatch):
    """How often the data are opened and compared for duplicates."""
    counts = dict.fromkeys(("open_images", "duplicates"), 0)

    def count(name):
        original = getattr(splitting, name)

        def counted(*arguments, **options):
            counts[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(splitting, name, counted)

    for name in counts:
        count(name)
    return counts


def test_a_run_opens_and_splits_its_data_once(tmp_path, calls):
    images = np.random.default_rng(0).integers(0, 256, (32, 16, 16, 3), dtype=np.uint8)
    config = TrainConfig(backbone="tiny", image_size=16, batch_size=8, epochs=1)
    run = train(images, config, out=tmp_path / "run")
    assert calls == {"open_images": 1, "duplicates": 1}
    assert set(run.summary["measures"]) == {"encoder", "untrained", "pixels"}
