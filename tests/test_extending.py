"""docs/extending.md, followed to the letter: a method in a file of one's own."""

import tomllib
from pathlib import Path

import numpy as np
from builders import digits
from nearkin_command import run as call

from nearkin.tables import read_numbers
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


def test_it_is_trained_by_the_command_with_its_own_options(tmp_path, monkeypatch):
    np.savez(tmp_path / "digits.npz", x=digits(16, classes=5)[0])
    settings = "--method examples/ressl.py:ReSSL --temperature 0.2"
    settings += " --epochs 1 --batch-size 16 --backbone tiny --device cpu"
    monkeypatch.chdir(ROOT)
    out = tmp_path / "run"
    assert call("train", tmp_path / "digits.npz", "-o", out, *settings.split()) == 0
    options = tomllib.loads((out / "config.toml").read_text())["options"]
    assert options["temperature"] == 0.2
    assert options["queue_size"] == 32  # fitted to the data
    assert all(0 < row["loss"] < 10 for row in read_numbers(out / "metrics.csv"))
