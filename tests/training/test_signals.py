"""Signals make a run stop, save or wait; none of them changes one bit of its result.

As a program, `PYTHONPATH=tests python tests/training/test_signals.py FOLDER`, it sends them to real runs, which it forks.
"""

import json
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

METHOD = "moco"
STOPPING = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129}
STEPS = {"SIGTERM": (2, 8, 14), "SIGINT": (8,), "SIGHUP": (8,)}
"""After which steps a run is stopped by each."""
NOTED = 1_000_000
"""In place of a step: a signal has been noted."""


class Sender:
    """Starts runs and sends them signals at chosen steps, at a random moment of each."""

    def __init__(self, folder: Path) -> None:
        import kills

        self.kills = kills
        self.commit = kills.of(METHOD, kills.COMMIT)
        self.whole, self.broken = folder / "whole", folder / "broken"
        self.data = kills.write_data(folder)
        self.rng = random.Random(0)
        self.shared = mmap.mmap(-1, 8)
        kills.unbroken(self.command(self.whole), self.whole)

    def command(self, out: Path) -> list[str]:
        """A run that saves when it is asked to, and at its end."""
        return self.kills.arguments(METHOD, self.data, out, save_every=100_000)

    @property
    def step(self) -> int:
        """The step under way, counted from 1, which is about to be written down by the method."""
        return int.from_bytes(self.shared[:], "big")

    def note(self) -> None:
        """Let a run tell the step under way."""

        def noting(commit):
            def call(method, memo, progress):
                step = round(progress * self.kills.TOTAL) + 1
                self.shared[:] = step.to_bytes(8, "big")
                return commit(method, memo, progress)

            return call

        self.kills.replace(self.commit, noting)

    def ignore_hangup(self) -> None:
        """What `nohup` does."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.note()

    def never_end(self) -> None:
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

        self.kills.replace(self.commit, sleeping)
        self.note()

    def start(self, prepare) -> int:
        self.shared[:] = bytes(8)
        return self.kills.start(self.command(self.broken), prepare)

    def send(self, child: int, number: signal.Signals, step: int) -> tuple[int, int]:
        """Send it in or soon after a step; returns between which steps it was."""
        while self.step < step:
            time.sleep(0.001)
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended too early"
        time.sleep(self.rng.uniform(0, 0.02))
        before = self.step
        os.kill(child, number)
        return before, self.step

    def saved(self) -> list[int]:
        """Steps of the checkpoints, each of which is sound."""
        paths = sorted((self.broken / "checkpoints").iterdir())
        assert all(self.kills.tables.read_sealed(path) is not None for path in paths)
        return [int(re.fullmatch(r"ckpt-(\d+)\.pt", path.name)[1]) for path in paths]

    def differing(self) -> list[str]:
        """Bring what was interrupted to its end, and compare."""
        self.kills.unbroken(self.command(self.broken), self.broken)
        differences = self.kills.differences(self.whole, self.broken)
        shutil.rmtree(self.broken)
        return differences

    def stopped(self, name: str) -> dict[str, object]:
        """Stop a run, by SIGTERM again and again."""
        stops = []
        for step in STEPS[name]:
            child = self.start(self.note)
            before, after = self.send(child, signal.Signals[name], step)
            code = self.kills.finish(child)
            stops.append([code, before, self.saved()[-1], after + 1])
        log = (self.broken / "train.log").read_text()
        logged = [int(step) for step in re.findall(rf"stopped by {name} after step (\d+)", log)]
        return {"stops": stops, "logged": logged, "differing": self.differing()}

    def stopped_at_once(self, name: str) -> list[object]:
        """The exit code after a second signal during a step that would not end."""
        child = self.start(self.never_end)
        for step in (3, NOTED):
            self.send(child, signal.Signals[name], step)
        code, saved = self.kills.finish(child), self.saved()
        shutil.rmtree(self.broken)
        return [code, saved]

    def stopped_between(self) -> list[object]:
        """Stop a run in the moment after it has decided that no checkpoint is due."""
        kills, after = self.kills, "nearkin.training.checkpoint.Checkpointer.after"
        aim = kills.Aim(after, after, "before")
        stop = lambda: os.kill(os.getpid(), signal.SIGTERM)
        child = self.start(lambda: kills.set_up(aim, METHOD, 5, stop))
        code, saved = kills.finish(child), self.saved()
        log = (self.broken / "train.log").read_text()
        shutil.rmtree(self.broken)
        return [code, saved, int(re.search(r"after step (\d+), which", log)[1])]

    def harmless(self, name: str) -> list[object]:
        """The exit code of a run that goes on, and what differs."""
        child = self.start(self.ignore_hangup)
        for step in (3, 9):
            self.send(child, signal.Signals[name], step)
            if name == "SIGSTOP":
                time.sleep(0.1)
                os.kill(child, signal.SIGCONT)
        return [self.kills.finish(child), self.differing()]

    def asked_to_save(self) -> dict[str, object]:
        """Where checkpoints were asked for, and where they are."""
        child = self.start(self.note)
        times = [self.send(child, signal.SIGUSR1, step) for step in (3, 12)]
        code, saved = self.kills.finish(child), self.saved()
        return {"code": code, "times": times, "saved": saved, "differing": self.differing()}

    def all(self) -> dict[str, object]:
        """What every signal does."""
        return {
            "stopped": {name: self.stopped(name) for name in STOPPING},
            "at once": {name: self.stopped_at_once(name) for name in STOPPING},
            "between": self.stopped_between(),
            "harmless": {name: self.harmless(name) for name in ("SIGSTOP", "SIGHUP")},
            "asked": self.asked_to_save(),
        }


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What happened, in a process that had imported everything and forked for every run."""
    command = [sys.executable, __file__, str(tmp_path_factory.mktemp("signals"))]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", STOPPING)
def test_a_run_that_is_asked_to_stop_saves_the_step_under_way_or_the_next(name, report):
    """And ends, when it is resumed, where the unbroken run ends."""
    result = report["stopped"][name]
    assert len(result["stops"]) == len(STEPS[name])
    for code, before, saved, after in result["stops"]:
        assert code == STOPPING[name]
        assert before <= saved <= after
    assert result["logged"] == [saved for _, _, saved, _ in result["stops"]]
    assert result["differing"] == []


def test_a_second_signal_acts_at_once_and_saves_nothing(report):
    assert report["at once"] == {name: [code, []] for name, code in STOPPING.items()}


def test_a_run_never_says_that_a_step_is_saved_which_is_not(report):
    code, saved, logged = report["between"]
    assert code == 143
    assert saved == [logged]


def test_waiting_and_a_closed_terminal_under_nohup_are_harmless(report):
    assert report["harmless"] == {"SIGSTOP": [0, []], "SIGHUP": [0, []]}


def test_a_run_that_is_asked_to_save_does_so_and_goes_on(report):
    run = report["asked"]
    assert run["code"] == 0
    *middle, last = run["saved"]
    assert len(middle) == 2
    assert all(before <= step <= after + 1 for step, (before, after) in zip(middle, run["times"]))
    assert last > middle[-1]
    assert run["differing"] == []


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or in the background of a script
    json.dump(Sender(Path(sys.argv[1])).all(), sys.stdout)
