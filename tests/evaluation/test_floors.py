"""Measures of floors that are stored: the same numbers, and never those of anything else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import contents
from colors import colors, tiny

from nearkin.encoders.encoder import CUSTOM
from nearkin.evaluation import evaluate, floors
from nearkin.metrics import probe

CPU = torch.device("cpu")


def seen(encoder):
    return encoder.backbone.body.seen


@pytest.fixture
def split():
    return colors()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The cache, in which floors of any number of images are stored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(evaluate, "FEWEST", 0)
    monkeypatch.setattr(probe, "STEPS", 30)
    return tmp_path / "nearkin" / "floors"


def evaluated(split, untrained=None, seed=0, **settings):
    floor = {"untrained": untrained or tiny(1)}
    how = {"seed": seed, "workers": 0, "augment": "simclr_cifar", "device": CPU}
    how |= {"protocol": ["knn"], **settings}
    return evaluate.evaluate_split(tiny(0), split, floors=floor, **how)[0].to_dict()


def without_files(split, monkeypatch, **settings):
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "FEWEST", 10**9)
        return evaluated(split, **settings)


def stored(folder):
    """How many floors have a file."""
    return len(list(folder.iterdir()))


def test_numbers_are_the_same_measured_stored_and_read(split, folder, monkeypatch):
    fresh = without_files(split, monkeypatch, protocol=["quick"])
    assert not folder.exists()
    first, second = tiny(1), tiny(1)
    assert evaluated(split, first, protocol=["quick"]) == fresh
    assert stored(folder) == 2  # the untrained network and raw pixels
    assert evaluated(split, second, protocol=["quick"]) == fresh
    assert seen(first) > 36
    assert seen(second) == 0


def test_further_measures_are_added_to_the_file(split, folder, monkeypatch):
    evaluated(split)
    more = evaluated(split, protocol=["knn", "retrieval"])
    assert more == without_files(split, monkeypatch, protocol=["knn", "retrieval"])
    again = tiny(1)
    tables = evaluated(split, again, protocol=["retrieval"])["metrics"]
    assert tables.keys() == {"encoder", "untrained", "pixels"}
    assert seen(again) == 0
    assert stored(folder) == 2


def test_what_could_not_be_measured_is_stored_with_its_reason(split):
    unlabeled = replace(split, images=replace(split.images, labels=np.full(36, -1)))
    first, again = evaluated(unlabeled, protocol=["quick"]), tiny(1)
    assert {"kNN top-1", "linear probe", "clusters"} <= first["left_out"].keys()
    assert evaluated(unlabeled, again, protocol=["quick"]) == first
    assert seen(again) == 0


def test_with_another_setting_floors_are_measured_again(split, folder, monkeypatch):
    evaluated(split)
    more = ({"seed": 1}, 4), ({"augment": "characters"}, 6), ({"untrained": tiny(2)}, 7)
    for settings, files in more:
        assert evaluated(split, **settings) == without_files(split, monkeypatch, **settings)
        assert stored(folder) == files, settings


def others(split):
    """The same images with other labels, groups, parts or pixels."""
    images, rows = split.images, np.arange(36)
    pixels = np.random.default_rng(1).permutation(images.source.pixels)
    yield replace(split, images=replace(images, labels=(images.labels + 1) % 2))
    yield replace(split, train_rows=rows[:20], test_rows=rows[20:])
    source, contents = replace(images.source, pixels=pixels), images.contents[::-1]
    yield replace(split, images=replace(images, source=source, contents=contents))
    yield replace(split, images=replace(images, groups=rows // 2))  # by which no neighbor differs


def test_of_other_images_floors_are_measured_again(split, folder, monkeypatch):
    before, files = evaluated(split), 2
    for other in others(split):
        after, files = evaluated(other), files + 2
        assert after == without_files(other, monkeypatch)
        assert stored(folder) == files
        differs = after["metrics"]["pixels"] != before["metrics"]["pixels"]
        assert differs == (other.images.groups is split.images.groups)


def test_with_another_source_of_the_package_floors_are_measured_again(split, monkeypatch):
    settings = {"seed": 0, "augment": "simclr_cifar", "device": CPU}
    rows = {"train": split.train_rows, "test": split.test_rows}
    now = floors.conditions(split.images, rows, **settings)
    assert now == floors.conditions(split.images, rows, **settings)
    package = floors.package_digest(floors.PACKAGE)
    assert len(package) == 64
    monkeypatch.setattr(floors, "PACKAGE", floors.PACKAGE / "evaluation")
    assert floors.conditions(split.images, rows, **settings) != now


def test_a_damaged_file_is_measured_and_written_again(split, folder):
    fresh, sound = evaluated(split), contents(folder)
    for damage in ("cut", "flipped", "empty"):
        for name, whole in sound.items():
            half, middle = whole[: len(whole) // 2], bytes([whole[len(whole) // 2] ^ 1])
            flipped = half + middle + whole[len(half) + 1 :]
            damaged = {"cut": half, "flipped": flipped, "empty": b""}[damage]
            (folder / name).write_bytes(damaged)
        assert (evaluated(split), contents(folder)) == (fresh, sound), damage


def test_with_another_number_of_threads_or_nowhere_to_write_floors_are_measured_again(
    split, tmp_path, monkeypatch, folder
):
    fresh = evaluated(split)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        evaluated(split)
    finally:
        torch.set_num_threads(before)
    assert stored(folder) == 4
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
    assert stored(folder) == 1  # raw pixels
