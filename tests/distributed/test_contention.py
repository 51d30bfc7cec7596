"""A machine that other processes use: how much they slow this one down, and who says so."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import pixels
from nearkin_command import run
from small import Observed
from threadpoolctl import threadpool_info

from nearkin.distributed import CpuTime, threads_for
from nearkin.distributed.contention import others, waited
from nearkin.distributed.devices import LITTLE
from nearkin.metrics.probe import fit_path
from nearkin.training.length import EpochTime

SPINNING = "print(flush=True)\nwhile True: pass"
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what others take")


@pytest.fixture
def crowded():
    """Bound to one CPU, which another process of the same priority uses without a pause."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    spinning = subprocess.Popen([sys.executable, "-c", SPINNING], stdout=subprocess.PIPE)
    spinning.stdout.readline()
    try:
        yield
    finally:
        spinning.kill()
        spinning.communicate()
        os.sched_setaffinity(0, before)


@pytest.fixture
def data(tmp_path):
    np.savez(tmp_path / "data.npz", x=pixels(64))
    return str(tmp_path / "data.npz")


def test_without_other_processes_nothing_is_slower():
    asleep = CpuTime(clock=10.0, computed=1.0, waited=0.0, others=0.0)
    assert (asleep.slowdown, asleep.taken) == (1.0, 0.0)
    # Threads of this process that wait for each other, as loader workers do.
    assert CpuTime(clock=10.0, computed=6.0, waited=12.0, others=0.0).slowdown == 1.0
    # What others take of CPUs that are free anyway.
    assert CpuTime(clock=10.0, computed=9.0, waited=0.0, others=10.0).slowdown == 1.0


def test_the_time_without_others_is_what_is_left_after_waiting_and_never_less_than_computing():
    assert CpuTime(clock=10.0, computed=2.0, waited=6.0, others=12.0).slowdown == 2.5
    # Two threads that wait at once: each counts.
    assert CpuTime(clock=10.0, computed=5.0, waited=10.0, others=10.0).slowdown == 2.0


def test_what_the_system_counts_is_read_as_it_is_written(tmp_path):
    for thread, nanoseconds in (("7", 1_500_000_000), ("8", 500_000_000)):
        folder = tmp_path / "self" / "task" / thread
        folder.mkdir(parents=True)
        (folder / "schedstat").write_text(f"9000000000 {nanoseconds} 12\n")
    (tmp_path / "self" / "task" / "9").mkdir()  # a thread whose time is not counted
    assert waited(tmp_path) == 2.0
    assert others(tmp_path) == 0.0


@linux
def test_only_busy_time_of_the_own_cpus_counts(tmp_path):
    tick = os.sysconf("SC_CLK_TCK")
    busy = "1 2 4 1000 1000 8 16 32 500 500"  # guests are counted as users already
    cpus = sorted(os.sched_getaffinity(0))
    own = [f"cpu{cpu} {busy}" for cpu in cpus]
    (tmp_path / "stat").write_text("\n".join(["cpu 5 5 5", *own, "cpu9999 7 7 7 7", "intr 5"]))
    before = sum(os.times()[:4])
    counted = others(tmp_path)
    after = sum(os.times()[:4])
    assert before <= 63 * len(cpus) / tick - counted <= after


@linux
@pytest.mark.slow
def test_a_process_that_shares_its_cpu_sees_what_the_other_takes(crowded):
    start = CpuTime.now()
    while CpuTime.now().computed < start.computed + 0.3:
        pass
    spent = CpuTime.now() - start
    assert spent.slowdown > 1.2
    assert spent.taken > 0.2


def test_little_work_takes_one_thread_of_every_library():
    def counts():
        return {pool["num_threads"] for pool in threadpool_info()}

    torch.set_num_threads(2)
    usual = counts()
    with threads_for(LITTLE):
        assert counts() == {1}
        assert torch.get_num_threads() == 1
    with threads_for(LITTLE + 1):
        assert counts() == usual
        assert torch.get_num_threads() == 2
    assert counts() == usual


@pytest.mark.parametrize(("dim", "threads"), [(8, 1), (LITTLE // 40 + 1, 2)])
def test_a_probe_of_few_values_multiplies_with_one_thread_and_of_many_with_all(dim, threads):
    torch.set_num_threads(2)
    seen = set()

    def note(operation, *_):
        if operation is torch.ops.aten.mm.default:
            seen.add(torch.get_num_threads())

    with Observed(note):
        fit_path(torch.randn(40, dim), torch.arange(40) % 3, 3, (1e-3,))
    assert seen == {threads}


@linux
@pytest.mark.slow
def test_check_says_that_the_machine_is_busy_and_estimates_the_time_without_others(
    crowded, data, capsys
):
    assert run("check", data, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["hours_alone"] < answer["hours"] / 1.2
    assert "other processes take" in answer["busy"]
    assert run("check", data) == 0
    assert "\n            busy: other processes take" in capsys.readouterr().out


@linux
@pytest.mark.slow
def test_max_time_says_that_the_machine_is_busy(crowded, data, tmp_path):
    out = tmp_path / "run"
    assert run("train", data, "--max-time", "1s", "-o", out, "-q") == 0
    epochs = tomllib.loads((out / "config.toml").read_text())["epochs"]
    log = (out / "train.log").read_text()
    assert "warning: the machine is busy: other processes take" in log
    assert f"--max-time 1s is {epochs} epoch" in log


def test_a_machine_of_little_use_to_others_is_not_busy():
    epoch = EpochTime(seconds=10.0, alone=9.1, taken=0.5)
    assert epoch.busy == ""
    crowded = replace(epoch, alone=2.5)
    assert crowded.busy == "other processes take 50% of the CPUs, steps 4.0 times as long"
