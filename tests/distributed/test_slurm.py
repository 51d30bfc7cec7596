"""The job script: the scheduler stops it, it is requeued, and goes on from the saved step."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"


SRUN = """#!/bin/sh
# Two tasks on this machine, as the scheduler would start them.
[ "$1" = --kill-on-bad-exit=1 ] && shift
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
trap 'kill -TERM $first $second' TERM
wait $first; code=$?
while kill -0 $first 2>/dev/null; do wait $first; code=$?; done
[ $code -ne 0 ] && kill -KILL $second 2>/dev/null
wait $second
exit $code
"""


@pytest.fixture(params=["2"])
def job(request, tmp_path):
    """Starts the script as the scheduler would, with a command beside it that notes requeues."""
    tools = tmp_path / "bin"
    tools.mkdir()
    requeue = tools / "scontrol"
    requeue.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    requeue.chmod(0o755)
    srun = tools / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        number = str(listener.getsockname()[1] % 10_000)
    images = np.random.default_rng(0).integers(0, 256, (64, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=images)

    def start(out):
        settings = "--backbone tiny --batch-size 16 --epochs 12 --evaluate-every 0 --save-every 7"
        command = ["bash", SCRIPT, tmp_path / "data.npz", "-o", out, "-q", *settings.split()]
        path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": number, "OMP_NUM_THREADS": "1"}
        environment["SLURM_NTASKS"] = request.param
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    return start, number


@pytest.mark.slow
def test_a_job_that_is_stopped_is_requeued_and_goes_on(job, tmp_path):
    job, number = job
    stopped = job(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    while not list(checkpoints.glob("*.pt")):
        assert stopped.poll() is None
        time.sleep(0.01)
    stopped.send_signal(signal.SIGTERM)
    err = stopped.communicate(timeout=120)[1]
    assert stopped.returncode == 143, err
    assert "stopped by SIGTERM after step" in err
    assert (tmp_path / "requeued").read_text() == f"requeue {number}\n"
    saved = max(checkpoints.glob("*.pt"))
    assert f"after step {int(saved.stem.split('-')[1])}, which is saved" in err

    again = job(tmp_path / "run")
    err = again.communicate(timeout=300)[1]
    assert again.returncode == 0, err
    assert (tmp_path / "requeued").read_text() == f"requeue {number}\n"
    log = (tmp_path / "run" / "train.log").read_text()
    assert f"resuming after step {int(saved.stem.split('-')[1])}" in log
    assert (tmp_path / "run" / "encoder.safetensors").exists()


@pytest.mark.parametrize("job", ["1"], indirect=True)
def test_a_job_that_fails_is_not_requeued(job, tmp_path):
    job, _ = job
    failed = job(tmp_path / "data.npz")
    failed.communicate(timeout=120)
    assert failed.returncode == 4
    assert not (tmp_path / "requeued").exists()
