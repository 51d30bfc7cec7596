"""The job script: stopped by the scheduler, requeued, and at the end the result of one long run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "recipes" / "slurm" / "train.sh"


@pytest.fixture
def job(tmp_path):
    """Starts the script as the scheduler would, with a command beside it that notes requeues."""
    tools = tmp_path / "bin"
    tools.mkdir()
    requeue = tools / "scontrol"
    requeue.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    requeue.chmod(0o755)
    pictures = np.random.default_rng(0).integers(0, 256, (64, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=pictures)

    def start(out):
        settings = "--backbone tiny --batch-size 16 --epochs 60 --evaluate-every 0 --save-every 7"
        command = ["bash", SCRIPT, tmp_path / "data.npz", "-o", out, "-q", *settings.split()]
        path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "17", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    return start


def test_a_job_that_is_stopped_is_requeued_and_goes_on(job, tmp_path):
    stopped = job(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    while not list(checkpoints.glob("*.pt")):
        assert stopped.poll() is None
        time.sleep(0.01)
    stopped.send_signal(signal.SIGTERM)
    said = stopped.communicate(timeout=120)[1]
    assert stopped.returncode == 143, said
    assert "stopped by SIGTERM after step" in said
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    saved = max(checkpoints.glob("*.pt"))
    assert f"after step {int(saved.stem.split('-')[1])}, which is saved" in said

    whole, again = job(tmp_path / "whole"), job(tmp_path / "run")
    for one in (whole, again):
        one.communicate(timeout=300)
        assert one.returncode == 0
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    for name in ("encoder.safetensors", "metrics.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_job_that_fails_is_not_requeued(job, tmp_path):
    failed = job(tmp_path / "data.npz")
    failed.communicate(timeout=120)
    assert failed.returncode == 4
    assert not (tmp_path / "requeued").exists()
