"""When checkpoints are due."""

from dataclasses import replace

import numpy as np
import pytest
from small import small

from nearkin.errors import ResourceError
from nearkin.run.csv_logger import CSVLogger
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logger, Silent
from nearkin.training import checkpoint
from nearkin.training.checkpoint import Checkpointer, Files
from nearkin.training.optimizer import build_optimizer


class Clock:
    """Seconds that pass when the test says so."""

    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A checkpointer that reads this clock, the clock, and how long a checkpoint takes by it."""
    clock, takes = Clock(), [0.0]
    monkeypatch.setattr(checkpoint, "time", clock)
    save = checkpoint.save

    def slow(*arguments, **options):
        clock.now += takes[0]
        return save(*arguments, **options)

    monkeypatch.setattr(checkpoint, "save", slow)
    folder, method = RunFolder(tmp_path), small("simclr")
    optimizer = build_optimizer(method, name="sgd", lr=0.1, weight_decay=0.0)
    journal = CSVLogger(folder.metrics, ("step",), 0)
    with Logger(Silent(), folder.log) as log:
        yield Checkpointer(Files(folder, journal, log), method, optimizer, "auto", 0), clock, takes


def steps_saved(made, seconds, every=1.0):
    """After how many seconds, in a training of a step a second, checkpoints were written."""
    checkpointer, clock, _ = made
    seconds_saved, start = [], clock.now
    folder = checkpointer.files.folder.checkpoints
    while clock.now < start + seconds:
        clock.now += every
        newest = checkpoint.latest(folder)
        checkpointer.after(checkpointer.done + 1, requested=False, last=False)
        if checkpoint.latest(folder) != newest:
            seconds_saved.append(clock.now - start)
    return seconds_saved


def test_a_checkpoint_is_written_once_a_minute_or_at_once_where_somebody_asks(made):
    assert steps_saved(made, 200) == [60, 120, 180]
    checkpointer, folder = made[0], made[0].files.folder.checkpoints
    checkpointer.after(checkpointer.done + 1, requested=True, last=False)
    assert checkpoint.latest(folder).name == f"ckpt-{checkpointer.done:08d}.pt"


def test_a_process_that_writes_nothing_passes_a_request_on(made, monkeypatch):
    told = []
    monkeypatch.setattr(checkpoint, "all_reduce_max", lambda due: told.append(due) or 0)
    worker = replace(made[0], files=None)
    for requested in (False, True):
        worker.after(1, requested=requested, last=False)
    assert told == [0, 1]


def test_checkpoints_that_take_long_take_a_fiftieth_of_the_time(made):
    made[2][0] = 6.0
    steps = steps_saved(made, 1300)
    assert steps[0] == 66  # how long one takes is not known before
    assert np.diff(steps).tolist() == [306] * (len(steps) - 1)
    assert len(steps) > 3


def failing(*_, **__):
    raise ResourceError("no room")


def test_three_failures_in_a_row_are_an_error_and_two_are_not_but_at_the_end(made, monkeypatch):
    checkpointer, _, _ = made
    working = checkpoint.save
    for attempt in (failing, failing, working, failing, failing):
        monkeypatch.setattr(checkpoint, "save", attempt)
        checkpointer.after(checkpointer.done + 1, requested=True, last=False)
    with pytest.raises(ResourceError, match="no room"):
        checkpointer.after(checkpointer.done + 1, requested=True, last=False)
    log = checkpointer.files.folder.log.read_text()
    assert log.count("warning: no room; training goes on") == 4
    monkeypatch.setattr(checkpoint, "save", working)
    checkpointer.after(checkpointer.done + 1, requested=True, last=False)
    monkeypatch.setattr(checkpoint, "save", failing)
    with pytest.raises(ResourceError, match="no room"):
        checkpointer.after(checkpointer.done + 1, requested=False, last=True)
