"""What goes wrong in one process of a training is known to all of them, and ends them together."""

from functools import partial
from pathlib import Path

import pytest
from small import of_two_processes, small

from nearkin.distributed import failing_together
from nearkin.errors import DivergedError, UnsavedError
from nearkin.run.csv_logger import CSVLogger
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logger, Silent
from nearkin.training.checkpoint import Checkpointer, Files
from nearkin.training.optimizer import build_optimizer


def diverge(rank: int) -> str:
    """The first process finds something, of which all have to know."""
    try:
        with failing_together():
            if rank == 0:
                raise DivergedError("here")
    except DivergedError as error:
        return str(error)
    return ""


def fill_the_disk(rank: int, folder: Path) -> tuple[str, str]:
    """What the first process cannot write is a warning to it, and at last the end of all."""
    method, run = small("simclr"), RunFolder(folder / "full")
    optimizer = build_optimizer(method, name="adamw", lr=1e-3, weight_decay=1e-3)
    with Logger(Silent(), folder / f"{rank}.log") as log:
        written = None
        if rank == 0:
            run.path.mkdir()
            written = Files(run, CSVLogger(run.metrics, ("step",), 0), log)
            run.metrics.rename(run.path / "moved")
        checkpointer = Checkpointer(written, method, optimizer, 1, 0)
        checkpointer.after(1, requested=False, last=False)
        with pytest.raises(UnsavedError) as raised:
            checkpointer.after(2, requested=False, last=True)
    return str(raised.value), (folder / f"{rank}.log").read_text()


def fail_on_rank(rank: int, folder: Path) -> tuple[tuple[str, str], str]:
    return fill_the_disk(rank, folder), diverge(rank)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failing")
    return of_two_processes(partial(fail_on_rank, folder=folder), folder)


def test_all_processes_know_of_a_checkpoint_that_cannot_be_written(both):
    (first, log), (second, nothing) = (full for full, _ in both)
    assert log.count("warning: cannot write") == 1
    assert "metrics.csv (No such file or directory); make room" in first
    assert (second, nothing) == ("another process of this training cannot write checkpoints", "")


def test_all_processes_know_of_numbers_that_are_not_finite(both):
    first, second = (said for _, said in both)
    assert first == "here"
    assert second == "numbers of another process of this training are not finite"
