"""Measures of floors that are stored: the same numbers, and never those of anything else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from nearkin.data.opening import open_images
from nearkin.data.split import Split
from nearkin.encoders.encoder import CUSTOM, Encoder
from nearkin.evaluation import evaluate, floors
from nearkin.networks.branch import as_backbone

CPU = torch.device("cpu")


class Tiny(nn.Module):
    """A network of 8 features that notes how many images it has seen."""

    def __init__(self, seed):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, stride=4)
        weights = np.random.default_rng(seed).normal(0, 0.2, self.conv.weight.shape)
        self.conv.weight.data = torch.from_numpy(weights).float()
        nn.init.zeros_(self.conv.bias)
        self.seen = 0

    def forward(self, x):
        self.seen += len(x)
        return self.conv(x).mean(dim=(2, 3))


def tiny(seed=0, name="tiny"):
    encoder = Encoder(as_backbone(Tiny(seed), 16), 16, {"backbone": name})
    encoder.backbone.body.seen = 0  # but for the trial that tells the number of features
    return encoder


def seen(encoder):
    return encoder.backbone.body.seen


@pytest.fixture
def split():
    """36 images of three colors, with noise; the last twelve are the test."""
    rng = np.random.default_rng(0)
    labels = np.arange(36) % 3
    colors = np.array([[200, 40, 40], [40, 200, 40], [40, 40, 200]])[labels]
    pixels = colors[:, None, None] + rng.normal(0, 30, (36, 16, 16, 3))
    images = open_images((pixels.clip(0, 255).astype(np.uint8), labels))
    return Split(images, np.arange(24), np.arange(24, 36))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The cache, in which floors of any number of images are stored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(evaluate, "FEWEST", 0)
    return tmp_path / "nearkin" / "floors"


def evaluated(split, untrained=None, seed=0, **settings):
    floor = {"untrained": untrained or tiny(1)}
    how = {"seed": seed, "workers": 0, "augment": "simclr_cifar", "device": CPU, **settings}
    return evaluate.evaluate_split(tiny(0), split, floors=floor, **how)[0].to_dict()


def without_files(split, monkeypatch, **settings):
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "FEWEST", 10**9)
        return evaluated(split, **settings)


def test_numbers_are_the_same_measured_stored_and_read(split, folder, monkeypatch):
    fresh = without_files(split, monkeypatch)
    assert not folder.exists()
    first, second = tiny(1), tiny(1)
    assert evaluated(split, first) == fresh
    assert len(list(folder.iterdir())) == 2  # the untrained network and raw pixels
    assert evaluated(split, second) == fresh
    assert seen(first) > 36
    assert seen(second) == 0


def test_further_measures_are_added_to_the_file(split, folder, monkeypatch):
    evaluated(split)
    more = evaluated(split, protocol="quick,retrieval,labelfree")
    assert more == without_files(split, monkeypatch, protocol="quick,retrieval,labelfree")
    again = tiny(1)
    assert evaluated(split, again, protocol="retrieval,linear")["measures"].keys() == {
        *("encoder", "untrained", "pixels")
    }
    assert seen(again) == 0
    assert len(list(folder.iterdir())) == 2


def test_what_could_not_be_measured_is_stored_with_its_reason(split):
    unlabeled = replace(split, images=replace(split.images, labels=np.full(36, -1)))
    first, again = evaluated(unlabeled), tiny(1)
    assert {"kNN top-1", "linear probe", "clusters"} <= first["left_out"].keys()
    assert evaluated(unlabeled, again) == first
    assert seen(again) == 0


@pytest.mark.parametrize(
    "settings",
    [{"seed": 1}, {"augment": "characters"}, {"untrained": tiny(2)}],
    ids=lambda settings: next(iter(settings)),
)
def test_with_another_setting_floors_are_measured_again(split, monkeypatch, settings):
    evaluated(split)
    assert evaluated(split, **settings) == without_files(split, monkeypatch, **settings)


def changed(split, kind):
    images = split.images
    if kind == "labels":
        return replace(split, images=replace(images, labels=(images.labels + 1) % 2))
    if kind == "groups":
        return replace(split, images=replace(images, groups=np.arange(36) // 2))
    if kind == "split":
        return replace(split, train_rows=np.arange(20), test_rows=np.arange(20, 36))
    pixels = 255 - images.source.pixels
    return replace(split, images=replace(images, source=replace(images.source, pixels=pixels)))


@pytest.mark.parametrize("kind", ["labels", "groups", "split", "pixels"])
def test_of_other_images_floors_are_measured_again(split, folder, monkeypatch, kind):
    before = evaluated(split)
    other = changed(split, kind)
    after = evaluated(other)
    assert after == without_files(other, monkeypatch)
    assert len(list(folder.iterdir())) == 4
    if kind != "groups":  # by which only the probe's choice could differ here
        assert after["measures"]["pixels"] != before["measures"]["pixels"]


def test_with_another_number_of_threads_floors_are_measured_again(split, folder):
    evaluated(split)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        evaluated(split)
    finally:
        torch.set_num_threads(before)
    assert len(list(folder.iterdir())) == 4


def test_with_another_source_of_the_package_floors_are_measured_again(split, monkeypatch):
    settings = {"seed": 0, "augment": "simclr_cifar", "device": CPU}
    rows = {"train": split.train_rows, "test": split.test_rows}
    now = floors.conditions(split.images, rows, **settings)
    assert now == floors.conditions(split.images, rows, **settings)
    package = floors.package_digest(floors.PACKAGE)
    assert len(package) == 64
    monkeypatch.setattr(floors, "PACKAGE", floors.PACKAGE / "evaluation")
    assert floors.conditions(split.images, rows, **settings) != now


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_file_is_measured_and_written_again(split, folder, damage):
    fresh = evaluated(split)
    contents = {path: path.read_bytes() for path in folder.iterdir()}
    for path, content in contents.items():
        middle = len(content) // 2
        damaged = {
            "cut": content[:middle],
            "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "empty": b"",
        }
        path.write_bytes(damaged[damage])
    assert evaluated(split) == fresh
    assert {path: path.read_bytes() for path in folder.iterdir()} == contents


def test_where_nothing_can_be_written_floors_are_measured_each_time(split, tmp_path, monkeypatch):
    fresh = evaluated(split)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert evaluated(split) == evaluated(split) == fresh


@pytest.mark.parametrize("name", [CUSTOM, "my_file.py:Tiny"])
def test_a_network_of_the_users_own_is_not_stored(split, folder, name, tmp_path, monkeypatch):
    (tmp_path / "my_file.py").write_text("Tiny = object\n")
    monkeypatch.chdir(tmp_path)
    evaluated(split, tiny(1, name))
    again = tiny(1, name)
    evaluated(split, again)
    assert seen(again) > 36
    assert len(list(folder.iterdir())) == 1  # raw pixels
