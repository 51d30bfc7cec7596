"""A training is given images that are opened and split, and opens nothing itself."""

import pytest
from builders import pixels

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
    config = TrainConfig(backbone="tiny", image_size=16, batch_size=8, epochs=1, report=False)
    run = train(pixels(32), config, out=tmp_path / "run")
    assert calls == {"open_images": 1, "duplicates": 1}
    assert set(run.summary["measures"]) == {"encoder", "untrained", "pixels"}
