"""Processes of the command line, as tests start and watch them."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 300


def environment(**more: str) -> dict[str, str]:
    """That of a process that nobody has started with others."""
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    env = {name: value for name, value in os.environ.items() if name not in ours}
    return {**env, "OMP_NUM_THREADS": "1", **more}


def fork(work: Callable[[], int | None]) -> int:
    """Call it in a copy of this process, which ends with the code that it returns, or with 1."""
    if child := os.fork():
        return child
    code = 1
    try:
        code = work() or 0
    finally:
        os._exit(code)  # or the tests would go on twice


@contextmanager
def small_files(num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Let no file grow beyond so many bytes, as on a full disk; gives what sets another limit."""
    import resource  # Windows has none

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    limit(num_bytes)
    try:
        yield limit
    finally:
        limit(soft)


def srun(rank: int, job: str) -> dict[str, str]:
    """What srun tells each of two processes."""
    here = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_JOB_ID": job}
    return here | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}


def ended(process) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def wait_until(truth: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
    """Wait for it, for as long as the process runs that is to bring it about."""
    limit = time.monotonic() + SECONDS
    while not truth():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.01)


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def children(pid: int) -> list[int]:
    """The other processes of a training: not Python's keeper of shared memory."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(pid) for pid in listed if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
