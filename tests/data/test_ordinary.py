"""Folders as people have them are read right, and no command ends in a traceback on one."""

from collections import Counter

import ordinary
import pytest
from builders import write_network
from nearkin_command import run

from nearkin.config import TrainConfig
from nearkin.data.split import has_test_split
from nearkin.run.data import open_usable

TINY = [
    "--backbone",
    "tiny",
    "--image-size",
    "16",
    "--batch-size",
    "2",
    "--epochs",
    "1",
    "--no-report",
    "-q",
]


@pytest.mark.parametrize("name", ordinary.FOLDERS)
def test_an_ordinary_folder_is_read_right(name, tmp_path):
    build, expected = ordinary.FOLDERS[name]
    images = open_usable(build(tmp_path / name), TrainConfig())
    assert (len(images), images.classes) == (expected.images, expected.classes), images.notes
    assert images.bad == ()
    test = int((images.splits == "test").sum()) if has_test_split(images) else 0
    assert test == expected.test
    labeled = int((images.labels >= 0).sum())
    everything = expected.images if expected.classes else 0
    assert labeled == (everything if expected.labeled is None else expected.labeled)
    decisions = Counter(note.decision for note in images.notes)
    assert set(decisions) >= expected.decisions, images.notes


@pytest.mark.slow
@pytest.mark.parametrize("name", ordinary.FOLDERS)
def test_commands_end_as_documented_on_an_ordinary_folder(name, tmp_path, capsys):
    build, _ = ordinary.FOLDERS[name]
    data, encoder = build(tmp_path / name), write_network(tmp_path / "encoder.safetensors")
    assert run("check", data) == 0
    assert run("train", data, *TINY, "-o", tmp_path / "run") == 0
    assert run("embed", encoder, data, "-o", tmp_path / "features.npz") == 0
    assert "a bug in nearkin" not in capsys.readouterr().err
