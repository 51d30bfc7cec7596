"""Signals make a run stop, save or wait; none of them changes one bit of its result."""

import mmap
import os
import random
import re
import shutil
import signal
import time

import kills
import pytest

from nearkin.files import read_sealed
from nearkin.training.signals import Interrupts

METHOD = "moco"
STOPPING = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129}
STEPS = {"SIGTERM": (2, 8, 14), "SIGINT": (8,), "SIGHUP": (8,)}
"""After which steps a run is stopped by each."""
NOTED = 1_000_000
"""In place of a step: a signal has been noted."""


class Sender:
    """Starts runs and sends them signals at chosen steps, at a random moment of each."""

    def __init__(self, folder):
        self.commit = kills.of(METHOD, kills.COMMIT)
        self.whole, self.broken = folder / "whole", folder / "broken"
        self.data = kills.write_data(folder)
        self.rng = random.Random(0)
        self.shared = mmap.mmap(-1, 8)
        kills.unbroken(self.command(self.whole), self.whole)

    def command(self, out):
        """A run that saves when it is asked to, and at its end."""
        return kills.arguments(METHOD, self.data, out, save_every=100_000)

    @property
    def step(self):
        """The step under way, counted from 1, which is about to be written down by the method."""
        return int.from_bytes(self.shared[:], "big")

    def note(self, hangup=signal.SIG_DFL):
        """Let a run tell the step under way; `nohup` lets it ignore that the terminal is closed."""

        def noting(commit):
            def call(method, memo, progress):
                step = round(progress * kills.TOTAL) + 1
                self.shared[:] = step.to_bytes(8, "big")
                return commit(method, memo, progress)

            return call

        signal.signal(signal.SIGHUP, hangup)
        kills.replace(self.commit, noting)

    def never_end(self):
        """Let the third step last for ever, and tell once a signal has been noted.

        From then on signals do again what they do outside of a training.
        """

        def sleeping(commit):
            def call(method, memo, progress):
                while self.step >= 3:
                    time.sleep(0.01)
                    if getattr(signal.getsignal(signal.SIGTERM), "__name__", "") != "_note":
                        self.shared[:] = NOTED.to_bytes(8, "big")
                return commit(method, memo, progress)

            return call

        kills.replace(self.commit, sleeping)
        self.note()

    def start(self, prepare):
        shutil.rmtree(self.broken, ignore_errors=True)
        return self.go_on(prepare)

    def go_on(self, prepare):
        self.shared[:] = bytes(8)
        return kills.start(self.command(self.broken), prepare)

    def send(self, child, number, step):
        """Send it in or soon after a step; returns between which steps it was."""
        while self.step < step:
            time.sleep(0.001)
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended too early"
        time.sleep(self.rng.uniform(0, 0.02))
        before = self.step
        os.kill(child, number)
        return before, self.step

    def saved(self):
        """Steps of the checkpoints, each of which is sound."""
        paths = sorted((self.broken / "checkpoints").iterdir())
        assert all(read_sealed(path) is not None for path in paths)
        return [int(re.fullmatch(r"ckpt-(\d+)\.pt", path.name)[1]) for path in paths]

    def logged(self, words):
        """The steps that stand in the log after these words."""
        log = (self.broken / "train.log").read_text()
        return [int(step) for step in re.findall(rf"{words} (\d+)", log)]

    def differing(self):
        """Bring what was interrupted to its end, and compare."""
        kills.unbroken(self.command(self.broken), self.broken)
        return kills.differences(self.whole, self.broken)


@pytest.fixture(scope="module")
def sender(tmp_path_factory):
    return Sender(tmp_path_factory.mktemp("signals"))


@pytest.mark.parametrize("name", STOPPING)
def test_a_run_that_is_asked_to_stop_saves_the_step_under_way_or_the_next(name, sender):
    """And ends, when it is resumed, where the unbroken run ends."""
    stopped = []
    for step in STEPS[name]:
        child = sender.go_on(sender.note) if stopped else sender.start(sender.note)
        before, after = sender.send(child, signal.Signals[name], step)
        assert kills.finish(child) == STOPPING[name]
        stopped.append(sender.saved()[-1])
        assert before <= stopped[-1] <= after + 1
    assert sender.logged(f"stopped by {name} after step") == stopped
    assert sender.differing() == []


@pytest.mark.parametrize("name", STOPPING)
def test_a_second_signal_acts_at_once_and_saves_nothing(name, sender):
    """In a step that would not end."""
    child = sender.start(sender.never_end)
    for step in (3, NOTED):
        sender.send(child, signal.Signals[name], step)
    assert kills.finish(child) == STOPPING[name]
    assert sender.saved() == []


def test_a_run_never_says_that_a_step_is_saved_which_is_not(sender):
    """It is stopped in the moment after it has decided that no checkpoint is due."""
    after = "nearkin.training.checkpoint.Checkpointer.after"

    def stop():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)  # which is to be saved anyway

    aim = kills.Aim(after, after, "before")
    child = sender.start(lambda: kills.set_up(aim, METHOD, 5, stop))
    assert kills.finish(child) == STOPPING["SIGTERM"]
    assert len(sender.saved()) == 1
    assert sender.logged("after step") == sender.saved()


@pytest.mark.parametrize("name", ["SIGSTOP", "SIGHUP"])
def test_waiting_and_a_closed_terminal_under_nohup_are_harmless(name, sender):
    child = sender.start(lambda: sender.note(signal.SIG_IGN))
    for step in (3, 9):
        sender.send(child, signal.Signals[name], step)
        if name == "SIGSTOP":
            time.sleep(0.1)
            os.kill(child, signal.SIGCONT)
    assert kills.finish(child) == 0
    assert kills.differences(sender.whole, sender.broken) == []


def test_a_run_that_is_asked_to_save_does_so_and_goes_on(sender):
    """Before its first step and after its last one, there is nothing to save."""

    def prepare():
        sender.note()
        for name in ("settings, before fsync", "evaluation"):
            save = lambda: os.kill(os.getpid(), signal.SIGUSR1)
            kills.set_up(kills.AIMS[name], METHOD, 1, save)

    child = sender.start(prepare)
    times = [sender.send(child, signal.SIGUSR1, step) for step in (3, 12)]
    assert kills.finish(child) == 0
    *middle, last = sender.saved()
    assert len(middle) == len(times)
    assert all(before <= step <= after + 1 for step, (before, after) in zip(middle, times))
    assert last > middle[-1]
    assert kills.differences(sender.whole, sender.broken) == []


def test_a_handler_that_is_not_of_python_stays(monkeypatch):
    """As within other programs that embed Python, which could not put it back."""
    numbers = [signal.Signals[name] for name in (*STOPPING, "SIGUSR1")]
    handler, before = signal.getsignal, [*map(signal.getsignal, numbers)]
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    with Interrupts():
        assert [*map(handler, numbers)] == before
