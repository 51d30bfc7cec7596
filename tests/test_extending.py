"""docs/extending.md, followed to the letter: a method in a file of one's own."""

import csv
import tomllib
from pathlib import Path

import numpy as np
import pytest
from builders import digits
from nearkin_command import run as call

from nearkin.testing import check_method

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILE = ROOT / "examples" / "ressl.py"


def test_the_code_on_the_page_is_the_file():
    assert f"```python\n{FILE.read_text(encoding='utf-8')}```" in PAGE


def test_the_method_keeps_the_laws(monkeypatch):
    monkeypatch.syspath_prepend(str(FILE.parent))
    from ressl import ReSSL

    check_method(ReSSL, dim=8, hidden_dim=16, queue_size=40, momentum=0.9, processes=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Five digits, 16 images of each."""
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    np.savez(path, **dict(zip("xy", digits(16, classes=5), strict=True)))
    return path


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run of the command on the page, which no test changes."""
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert call(*command(data, out)) == 0
    return out


def command(data, out, *more):
    settings = "--epochs 1 --batch-size 16 --backbone tiny --temperature 0.2 --device cpu"
    reference = ["--method", "examples/ressl.py:ReSSL"]
    return ["train", str(data), *reference, "-o", str(out), *settings.split(), *more]


def test_it_is_trained_with_its_own_options(run):
    settings = tomllib.loads((run / "config.toml").read_text())
    assert settings["options"]["temperature"] == 0.2
    assert settings["options"]["queue_size"] == 32  # fitted to the data
    with (run / "metrics.csv").open(newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert all(0 < loss < 10 for loss in losses)
