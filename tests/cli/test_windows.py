"""What Windows lacks is done without; elsewhere, it is taken away first."""

import os
import signal
import subprocess
import sys
import zipfile

import filelock  # noqa: F401 (by the system's name it takes the lock that is there)
import numpy as np
import pytest
from builders import write_network
from processes import environment
from torch.utils.data._utils import signal_handling

from nearkin.cli import main
from nearkin.run.folder import RunFolder

MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")
SIGNALS = ("SIGCHLD", "SIGHUP", "SIGUSR1", "SIGUSR2")
CALLS = (
    "O_DIRECTORY", "killpg", "memfd_create", "posix_fallocate", "pread", "pwrite",
)  # fmt: skip
"""Of `os`. Left are those that nearkin asks for on Linux only, and those of Python's own modules."""


@pytest.fixture
def windows(monkeypatch):
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    for module, names in ((signal, SIGNALS), (os, CALLS)):
        for name in names:
            monkeypatch.delattr(module, name, raising=False)
    monkeypatch.setattr(signal_handling, "IS_WINDOWS", True)  # torch asks for the system's name


@pytest.fixture(scope="module")
def archive(tmp_path_factory, photographs):
    path = tmp_path_factory.mktemp("archives") / "photographs.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for photograph in sorted(photographs.iterdir()):
            file.write(photograph, photograph.name)
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_network(tmp_path_factory.mktemp("encoders") / "encoder.safetensors")


def test_the_command_line_starts_without_the_modules_of_unix():
    absent = dict.fromkeys(MODULES)
    code = f"import sys; sys.modules.update({absent}); import nearkin.cli as c; c.main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment())
    assert done.returncode == 0, done.stderr
    for said in ("Self-supervised contrastive learning", "demo", "check", "train", "doctor"):
        assert said.encode() in done.stdout


def test_what_needs_no_run_folder_works(windows, digits_file, capsys):
    for words in ("doctor", f"check {digits_file}", "list recipes cifar10/moco"):
        assert main(words.split()) == 0
        assert capsys.readouterr().out, words


def test_features_are_computed_by_workers_from_an_archive(
    windows, archive, photographs, encoder, tmp_path
):
    tables = []
    for name, data in (("a.npz", archive), ("b.npz", photographs)):
        typed = ["embed", encoder, data, "-o", tmp_path / name, "--workers", 1, "--quiet"]
        assert main([str(word) for word in typed]) == 0
        tables.append(np.load(tmp_path / name))
    first, second = tables
    assert [*first["path"]] == [*second["path"]]
    assert np.array_equal(first["vector"], second["vector"])


def test_a_run_folder_is_written_by_one_at_a_time(windows, digits_file, tmp_path, refusal):
    run = RunFolder(tmp_path / "run")
    settings = "--labels none --epochs 1 --batch-size 32 --backbone tiny -q -o"
    train = ["train", str(digits_file), *settings.split(), str(run.path)]
    run.path.mkdir()
    with run.locked():
        assert "is in use by process" in refusal(4, *train)
    assert main(train) == 0
    assert main(["evaluate", str(run.path), "--protocol", "labelfree"]) == 0
    assert run.evaluation.exists()
