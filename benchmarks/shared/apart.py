"""Run training steps in a separate process that is stopped while it is not its turn."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.shared.turns import settle


@contextmanager
def apart(make: Callable[..., Iterator[object]], *values: Any, **named: Any) -> Iterator[Any]:
    """Yield a function that takes the next step of an iterator in another process.

    Between its steps that process and its loader workers are stopped: they prepare nothing while
    others are measured, and do not benefit from memory that this process keeps.

    Args:
        make: Makes the iterator; it is pickled with its arguments.
        values: Positional arguments of `make`.
        named: Keyword arguments of `make`.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, make, values, named))
    process.start()
    theirs.close()
    ours.recv()
    group = process.pid or 0

    def step() -> None:
        os.killpg(group, signal.SIGCONT)
        ours.send(True)
        ours.recv()
        os.killpg(group, signal.SIGSTOP)

    try:
        yield step
    finally:
        os.killpg(group, signal.SIGCONT)
        ours.send(False)
        process.join()


def _serve(
    pipe: Connection,
    make: Callable[..., Iterator[object]],
    values: tuple[Any, ...],
    named: dict[str, Any],
) -> None:
    os.setpgrp()
    pipe.send(None)
    steps = make(*values, **named)
    while pipe.recv():
        next(steps)
        settle()  # or the GPU would do the rest of it in the turn of another
        pipe.send(None)
