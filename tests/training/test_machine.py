"""A run that goes on with something else than it was started with says so, and goes on."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from builders import pixels
from discoveries import bytes_of
from nearkin_command import run

from nearkin.run.data import machine, note_machine

CPU = torch.device("cpu")


def test_every_change_is_named_and_written_down_with_its_step(tmp_path, monkeypatch):
    path = tmp_path / "machine.json"
    assert note_machine(path, CPU, 0) == ""
    assert note_machine(path, CPU, 5) == ""
    (first,) = json.loads(path.read_text())
    assert first == {"after_step": 0, **machine(CPU)}
    names = {"after_step", "nearkin", "torch", "device", "instructions", "processes"}
    assert set(first) == names
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert note_machine(path, CPU, 7) == f"torch {first['torch']} became 9.9"
    assert [entry["after_step"] for entry in json.loads(path.read_text())] == [0, 7]
    assert note_machine(path, CPU, 9) == ""


SETTINGS = "--backbone tiny --batch-size 16 --epochs 2 --optimizer sgd"


def train(folder, *options, program=("-m", "nearkin"), **environment):
    """In a process of its own, with these variables of the environment; returns what it says."""
    command = ["train", folder / "data.npz", "-o", folder / "run", *SETTINGS.split(), *options]
    environment = os.environ | environment
    arguments = [sys.executable, *program, *command]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    return done.stderr


def filled(folder):
    folder.mkdir()
    np.savez(folder / "data.npz", x=pixels(48))
    return folder


def outcome(folder):
    """What was trained, and what was noted on the way."""
    return bytes_of(folder / "run", "encoder.safetensors", "metrics.csv")


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """A run that no test changes."""
    folder = filled(tmp_path_factory.mktemp("machine") / "usual")
    assert run("train", folder / "data.npz", "-o", folder / "run", *SETTINGS.split()) == 0
    return folder


@pytest.mark.slow
def test_another_number_of_threads_is_told(usual, tmp_path):
    folder = shutil.copytree(usual, tmp_path / "copy")
    for file in (folder / "run" / "checkpoints").iterdir():
        file.unlink()
    message = train(folder, "--resume", OMP_NUM_THREADS="2")
    assert "cpu, 1 thread became cpu, 2 threads" in message
    assert "bits" in message


JUMPING = """
import sys, time, itertools
real, n = time.time, itertools.count()
time.time = lambda: real() - next(n) * 10**9
from nearkin.cli import main
sys.exit(main())
"""


AWAY = {"TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "12345", "PYTHONUTF8": "0", "LC_ALL": "C"}
TURKISH = {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "PYTHONOPTIMIZE": "1"}


@pytest.mark.parametrize(
    ("program", "environment"),
    [(("-c", JUMPING), AWAY), pytest.param(("-m", "nearkin"), TURKISH, marks=pytest.mark.slow)],
    ids=["a clock that jumps and no UTF-8", "another language and no assertions"],
)
def test_what_surrounds_a_run_does_not_change_a_bit(program, environment, usual, tmp_path):
    """Seconds since 1970 are for people; what is computed and when it is saved ignores them."""
    folder = filled(tmp_path / "with space ü\nline")
    train(folder, program=program, OMP_NUM_THREADS="1", **environment)
    assert outcome(folder) == outcome(usual)
