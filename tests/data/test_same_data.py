"""A run goes on with the images it was started with, or says which have changed."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.errors import CheckpointError
from nearkin.tables import read_csv

CONFIG = TrainConfig(backbone="tiny", image_size=16, epochs=1, batch_size=8, workers=0)


def image(path, seed, size=12):
    noise = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "data").mkdir()
    for number in range(20):
        image(tmp_path / "data" / f"{number:02d}.bmp", number)
    train(tmp_path / "data", CONFIG, out=tmp_path / "run")
    return tmp_path


def add(data):
    image(data / "new.bmp", 99)


def remove(data):
    (data / "07.bmp").unlink()


def rename(data):
    (data / "07.bmp").rename(data / "zz.bmp")


def enlarge(data):
    image(data / "03.bmp", 3, size=14)


def hold_out(data):
    (data / "test").mkdir()
    (data / "train").mkdir()
    for path in sorted(data.glob("*.bmp")):
        path.rename(data / ("test" if path.name < "05" else "train") / path.name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (add, r"1 added \('new\.bmp'\)"),
        (remove, r"1 removed \('07\.bmp'\)"),
        (rename, r"1 added \('zz\.bmp'\), 1 removed \('07\.bmp'\)"),
        (enlarge, r"1 of another size \('03\.bmp'\)"),
        (hold_out, r"20 added \('test/00\.bmp'\), 20 removed"),
    ],
)
def test_what_has_changed_is_named(run, change, says):
    change(run / "data")
    with pytest.raises(CheckpointError, match=f"data have changed .*{says}") as error:
        train(run / "data", CONFIG, out=run / "run", resume=True)
    assert error.value.exit_code == 5


def test_times_and_the_order_of_a_folder_are_no_change(run):
    for path in sorted((run / "data").iterdir(), reverse=True):
        content = path.read_bytes()
        path.unlink()
        Path(path).write_bytes(content)
        os.utime(path, (1, 1))
    train(run / "data", CONFIG, out=run / "run", resume=True)


def test_names_that_are_not_utf_8_are_noted(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for number in range(19):
        image(data / f"{number:02d}.bmp", number)
    (data / "04.bmp").rename(data / os.fsdecode(b"\xff.bmp"))
    train(data, CONFIG, out=tmp_path / "run")
    noted = tmp_path / "run" / "images.csv"
    assert "\udcff.bmp" in {row["path"] for row in read_csv(noted)}
    train(data, CONFIG, out=tmp_path / "run", resume=True)
    (data / "07.bmp").unlink()
    with pytest.raises(CheckpointError, match=r"1 removed \('07\.bmp'\)"):
        train(data, CONFIG, out=tmp_path / "run", resume=True)
    noted.write_text("path,bytes\na.bmp,many\n")
    with pytest.raises(CheckpointError, match=r"images\.csv cannot be used"):
        train(data, CONFIG, out=tmp_path / "run", resume=True)
