"""A run that goes on with something else than it was started with says so, and goes on."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from nearkin.cli import main
from nearkin.run.data import machine, note_machine

CPU = torch.device("cpu")


def test_every_change_is_named_and_written_down_with_its_step(tmp_path, monkeypatch):
    path = tmp_path / "machine.json"
    assert note_machine(path, CPU, 0) == ""
    assert note_machine(path, CPU, 5) == ""
    (first,) = json.loads(path.read_text())
    assert first == {"after_step": 0, **machine(CPU)}
    assert set(first) == {
        "after_step", "nearkin", "torch", "device", "instructions", "processes"
    }  # fmt: skip
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert note_machine(path, CPU, 7) == f"torch {first['torch']} became 9.9"
    assert [entry["after_step"] for entry in json.loads(path.read_text())] == [0, 7]
    assert note_machine(path, CPU, 9) == ""


def command(folder, *options):
    return [
        "train", str(folder / "data.npz"), "-o", str(folder / "run"), "--backbone", "tiny",
        "--batch-size", "16", "--epochs", "2", *options,
    ]  # fmt: skip


def run(folder, *options, program=("-m", "nearkin"), **environment):
    """In a process of its own, with these variables of the environment."""
    arguments = [sys.executable, *program, *command(folder, *options)]
    environment = {**os.environ, **environment}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)


# A run has no other clock than its steps, and no other order than that of bytes


def filled(folder):
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (48, 16, 16, 3), dtype=np.uint8)
    np.savez(folder / "data.npz", x=images)
    return folder


def outcome(folder):
    """What was trained, and what was noted on the way."""
    return [
        (folder / "run" / name).read_bytes() for name in ("encoder.safetensors", "metrics.csv")
    ]


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """A run that no test changes."""
    folder = filled(tmp_path_factory.mktemp("machine") / "usual")
    assert main(command(folder)) == 0
    return folder


@pytest.mark.slow
def test_another_number_of_threads_is_told(usual, tmp_path):
    folder = shutil.copytree(usual, tmp_path / "copy")
    for file in (folder / "run" / "checkpoints").iterdir():
        file.unlink()
    message = run(folder, "--resume", OMP_NUM_THREADS="2").stderr
    assert "cpu, 1 thread became cpu, 2 threads" in message
    assert "bits" in message


@pytest.mark.slow
def test_another_language_and_no_assertions_do_not_change_a_bit(usual, tmp_path):
    folder = filled(tmp_path / "with space ü\nline")
    far_away = {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "PYTHONOPTIMIZE": "1"}
    run(folder, OMP_NUM_THREADS="1", **far_away)
    assert outcome(folder) == outcome(usual)


JUMPING = """
import sys, time, itertools
real, n = time.time, itertools.count()
time.time = lambda: real() - next(n) * 10**9
from nearkin.cli import main
sys.exit(main())
"""


def test_neither_a_clock_that_jumps_nor_a_system_without_utf_8_changes_a_bit(usual, tmp_path):
    """Seconds since 1970 are for people; what is computed and when it is saved ignores them."""
    folder = filled(tmp_path / "with space ü\nline")
    bare = {"PYTHONUTF8": "0", "LC_ALL": "C"}
    far_away = {"TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "12345"}
    run(folder, program=("-c", JUMPING), OMP_NUM_THREADS="1", **bare, **far_away)
    assert outcome(folder) == outcome(usual)
