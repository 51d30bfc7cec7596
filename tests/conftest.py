"""Settings of all tests: a home of their own, their seed and threads, and what some of them need."""

import os
import random
import shutil
import tempfile
from pathlib import Path
from zlib import crc32

import builders
import needs
import numpy as np
import pytest
import torch
import types_checked
from hypothesis import settings
from nearkin_command import run

settings.register_profile("nearkin", deadline=None, derandomize=True)  # no test is timed
settings.load_profile("nearkin")

collect_ignore = ["mutation.py"]  # a program, of a package that tests do without
HOMES = pytest.StashKey[Path]()


def pytest_addoption(parser):
    parser.addoption("--types", action="store_true", help="check types in whole runs as well")


def pytest_configure(config):
    """Begin with an empty home and without a developer's settings, also in processes of tests.

    No report is written where NEARKIN_REPORT is not set again, by the fixture `reports`. Processes
    have one thread, as the tests: a fork of one that has had two may wait for the other for ever.
    """
    types_checked.EVERYWHERE = config.getoption("types")
    config.stash[HOMES] = home = Path(tempfile.mkdtemp(prefix="nearkin-home-"))
    # rich keeps the width that xdist sets; a process that may keep no bytecode compiles nearkin anew.
    left = ("NEARKIN_", "XDG_", "COLUMNS", "LINES", "PYTHONDONTWRITEBYTECODE")
    for name in [name for name in os.environ if name.startswith(left)]:
        del os.environ[name]
    os.environ.update(HOME=str(home), NEARKIN_REPORT="false", OMP_NUM_THREADS="1")
    # The first backward pass starts a thread per accelerator, after which no fork can train. An
    # export pretends that there is one, so the first pass is before any test.
    torch.ones((), requires_grad=True).backward()


def pytest_unconfigure(config):
    shutil.rmtree(config.stash[HOMES], ignore_errors=True)


def repeatable(name: str) -> None:
    """Let what follows draw the same, whatever ran before it in this process."""
    torch.set_num_threads(1)  # the networks are tiny, and results must not depend on the machine
    seed = crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    repeatable(fixturedef.argname)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    types_checked.choose(item.path)
    for mark in item.iter_markers("needs"):
        for thing in mark.args:
            needs.need(thing)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    repeatable(item.nodeid)


QUICK_PROBES = {"CHOICE_STEPS": 20, "ENOUGH": 1}


@pytest.fixture(scope="session", autouse=True)
def usual_probes():
    """Let probes choose their regularization in few steps and by one fold; gives the usual values.

    That is otherwise most of what a run computes of few images. Tests of probes have the usual.
    """
    from nearkin.metrics import probe  # see nearkin_command.py

    with pytest.MonkeyPatch.context() as patch:
        usual = {name: getattr(probe, name) for name in QUICK_PROBES}
        for name, quick in QUICK_PROBES.items():
            patch.setattr(probe, name, quick)
        yield usual


@pytest.fixture(scope="session", autouse=True)
def short_known_stage():
    """Let a discovery learn the known classes for 40 epochs of few images, where it takes 200."""
    from nearkin.discovery import stages  # see nearkin_command.py

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "MAX_EPOCHS", 40)
        yield


class Lines:
    """Keeps log lines."""

    def __init__(self):
        self.texts = []

    def info(self, text):
        self.texts.append(text)

    def progress(self, done, total, text):
        pass


@pytest.fixture
def log():
    return Lines()


@pytest.fixture
def reports(monkeypatch):
    """Let commands write their pages, as they do for users."""
    monkeypatch.delenv("NEARKIN_REPORT")


@pytest.fixture
def refusal(capsys):
    """Call a command that refuses, and return the one line that it prints."""

    def refuse(code, *arguments):
        capsys.readouterr()
        assert run(*arguments) == code
        printed = capsys.readouterr()
        lines = [line for line in printed.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, printed.err
        assert "a bug in nearkin" not in lines[0]
        assert printed.out == ""
        return lines[0]

    return refuse


@pytest.fixture
def refuses(refusal):
    """Give each command of a table, whose words in capitals stand for others, and see what is said."""

    def check(table, **names):
        for line, code, says in table:
            words = [word.partition("/") for word in line.split()]
            typed = [f"{names.get(head, head)}{slash}{rest}" for head, slash, rest in words]
            assert says in refusal(code, *typed), line

    return check


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    """A folder of twelve JPEGs of noise that no test changes."""
    folder = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(0)
    for number in range(12):
        noise = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        builders.Image.fromarray(noise).resize((160, 120)).save(folder / f"{number:02d}.jpg")
    return folder


@pytest.fixture(scope="session")
def digits_file(tmp_path_factory):
    """An .npz of 200 labeled digits, 40 of them for tests, that no test changes."""
    return builders.save_digits(tmp_path_factory.mktemp("digits") / "digits.npz", 160, 40)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory, digits_file):
    """The folder of a short training of `digits_file`, with its page; no test changes it."""
    out = tmp_path_factory.mktemp("trained") / "run"
    settings = "--method simclr --backbone tiny --epochs 2 --batch-size 32 --device cpu -q"
    assert run("train", digits_file, *settings.split(), "--report", "-o", out) == 0
    return out


@pytest.fixture(scope="module")
def browser():
    """Chromium, for all tests of a module: while it is open, others cannot run an event loop."""
    needs.need("chromium")
    needs.need("playwright")
    from browser import chromium  # which imports nearkin

    with chromium() as opened:
        yield opened
