"""The job script: the scheduler stops it, it is requeued, and goes on from the saved step."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import pixels, write_files
from processes import ended, environment, free_port, wait_until

from nearkin.run.folder import RunFolder

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


@pytest.fixture
def number():
    """Of a job, of which its tasks take the port where they meet."""
    return str(int(free_port()) % 10_000)


@pytest.fixture
def submit(tmp_path, number):
    """Starts the script as the scheduler would, with a command beside it that notes requeues."""
    tools = tmp_path / "bin"
    requeue = f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n'
    write_files(tools, {"scontrol": requeue.encode(), "srun": SRUN.encode()})
    for tool in tools.iterdir():
        tool.chmod(0o755)
    np.savez(tmp_path / "data.npz", x=pixels(64))

    def start(out, tasks):
        settings = "--backbone tiny --batch-size 16 --epochs 12 --evaluate-every 0 --save-every 7"
        command = ["bash", SCRIPT, tmp_path / "data.npz", "-o", out, "-q", *settings.split()]
        path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = environment(PATH=path, SLURM_JOB_ID=number, SLURM_NTASKS=tasks)
        return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)

    return start


@pytest.mark.slow
def test_a_job_that_is_stopped_is_requeued_and_goes_on(submit, number, tmp_path):
    stopped = submit(tmp_path / "run", "2")
    checkpoints = tmp_path / "run" / "checkpoints"
    wait_until(lambda: any(checkpoints.glob("*.pt")), stopped)
    stopped.send_signal(signal.SIGTERM)
    code, _, err = ended(stopped)
    assert code == 143, err
    assert "stopped by SIGTERM after step" in err
    assert (tmp_path / "requeued").read_text() == f"requeue {number}\n"
    step = int(max(checkpoints.glob("*.pt")).stem.split("-")[1])
    assert f"after step {step}, which is saved" in err

    code, _, err = ended(submit(tmp_path / "run", "2"))
    assert code == 0, err
    assert (tmp_path / "requeued").read_text() == f"requeue {number}\n"
    run = RunFolder(tmp_path / "run")
    assert f"resuming after step {step}" in run.log.read_text()
    assert run.encoder.exists()


def test_a_job_that_fails_is_not_requeued(submit, tmp_path):
    code, _, err = ended(submit(tmp_path / "data.npz", "1"))
    assert code == 4, err
    assert not (tmp_path / "requeued").exists()
