"""Of classes with few labels none is held out, in every command that learns from labels."""

from collections import Counter

import numpy as np
import pytest

from nearkin.classification.data import open_labeled_data
from nearkin.config import ClassifyConfig, DiscoverConfig
from nearkin.discovery.data import check_sizes, open_discovery_data
from nearkin.labels.known import FEW


@pytest.fixture
def data(tmp_path):
    """Sixty images of noise, one by one."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=pixels)
    return tmp_path / "data.npz"


def table(data, sizes):
    """A table that labels so many images of each class."""
    names = [f"class {number}" for number, size in enumerate(sizes) for _ in range(size)]
    written = [f"{row:02d},{name}" for row, name in enumerate(names)]
    path = data.with_name("labels.csv")
    path.write_text("\n".join(["path,label", *written, ""]))
    return str(path)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [1, 2, FEW - 1])
def test_each_of_few_labels_is_learned_from_whatever_the_draw(data, size, seed):
    labeled = table(data, [size] * 10)
    config = DiscoverConfig(labeled=labeled, seed=seed, classes=2, val=0.3)
    found = open_discovery_data(str(data), config)
    check_sizes(found, config)
    learned = found.label[found.parts.train_rows]
    assert Counter(learned[learned >= 0].tolist()) == dict.fromkeys(range(10), size)
    assert len(found.parts.test_rows)  # images without a label are held out
    few = ClassifyConfig(labeled=labeled, seed=seed, val=0.3)
    assert len(open_labeled_data(str(data), few).train_rows) == 10 * size


def test_of_more_labels_some_are_held_out(data):
    config = DiscoverConfig(labeled=table(data, [20, 20, 2]), classes=2, val=0.3)
    found = open_discovery_data(str(data), config)
    held_out = found.label[found.parts.test_rows]
    assert set(held_out[held_out >= 0].tolist()) == {0, 1}
