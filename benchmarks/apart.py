"""A way of training in a process of its own, which stands still whenever it is not its turn."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any


@contextmanager
def apart(make: Callable[..., Iterator[object]], *values: Any, **named: Any) -> Iterator[Any]:
    """A function that takes the next step of an iterator which another process has made.

    Between its steps that process and its loader workers are stopped: they prepare nothing while
    others are measured, and what this process does with its memory does not reach them.

    Args:
        make: Makes the iterator; it and what it is given go to the other process.
        values: What it is given.
        named: And by name.
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
        pipe.send(None)
