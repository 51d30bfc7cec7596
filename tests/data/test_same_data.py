"""A run goes on with the images it was started with, or says which have changed."""

import os
import shutil

import pytest
from builders import encoded, write_files

from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.errors import CheckpointError
from nearkin.tables import read_csv

CONFIG = TrainConfig(
    backbone="tiny", image_size=16, epochs=1, batch_size=8, workers=0, report=False
)
ODD_NAME = os.fsdecode(b"\xff.bmp")


def bmp(seed, side=12):
    return encoded(seed, (side, side), "BMP")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Twenty images, one of a name that is not UTF-8, and a run of them."""
    root = tmp_path_factory.mktemp("same")
    names = [*(f"{number:02d}.bmp" for number in range(19)), ODD_NAME]
    files = {name: bmp(seed) for seed, name in enumerate(names)}
    train(write_files(root / "data", files), CONFIG, out=root / "run")
    return root


@pytest.fixture
def run(trained, tmp_path):
    """A copy in which anything may change; a run is of wherever its data lie."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def resume(run):
    train(run / "data", CONFIG, out=run / "run", resume=True)
    return (run / "run" / "train.log").read_text()


def hold_out(data):
    (data / "test").mkdir()
    (data / "train").mkdir()
    for path in sorted(data.glob("*.bmp")):
        path.rename(data / ("test" if path.name < "05" else "train") / path.name)


def rename(data):
    (data / "07.bmp").rename(data / "zz.bmp")


CHANGES = {
    r"1 added \('new\.bmp'\)": lambda data: write_files(data, {"new.bmp": bmp(99)}),
    r"1 removed \('07\.bmp'\)": lambda data: (data / "07.bmp").unlink(),
    r"1 added \('zz\.bmp'\), 1 removed \('07\.bmp'\)": rename,
    r"1 of another size \('03\.bmp'\)": lambda data: write_files(data, {"03.bmp": bmp(3, 14)}),
    r"20 added \('test/00\.bmp'\), 20 removed": hold_out,
}
"""What is done to the data, by what is said of it."""


def test_what_has_changed_is_named(trained, tmp_path):
    for number, (says, change) in enumerate(CHANGES.items()):
        run = shutil.copytree(trained, tmp_path / str(number))
        change(run / "data")
        with pytest.raises(CheckpointError, match=f"{says}.*; bring them back") as error:
            resume(run)
        assert "data have changed " in str(error.value)
        assert error.value.exit_code == 5


def test_times_and_the_order_of_a_folder_are_no_change(run):
    for path in sorted((run / "data").iterdir(), reverse=True):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        os.utime(path, (1, 1))
    assert "already complete" in resume(run)


def test_what_a_run_was_started_with_is_noted_by_any_name(run):
    noted = run / "run" / "images.csv"
    assert "\udcff.bmp" in {row["path"] for row in read_csv(noted)}
    (run / "data" / "07.bmp").unlink()
    noted.write_text("path,bytes\na.bmp,many\n")
    with pytest.raises(CheckpointError, match=r"images\.csv cannot be used"):
        resume(run)
