"""Loader workers that die or hang: replaced once, from the same step, with the same batches."""

import math
import multiprocessing
import os
import signal

import loaders
import pytest
import torch
from builders import write_files
from loaders import same

from nearkin.data import loader
from nearkin.data.batches import CenterCrops, ViewDataset
from nearkin.data.loader import workers_that_fit
from nearkin.data.opening import open_images
from nearkin.distributed import available_cpus, cpus_per_process
from nearkin.distributed.devices import cpu_quota
from nearkin.errors import ResourceError, WorkerError
from nearkin.run.failures import resource_errors

STEPS = 12


def batches(photographs, workers):
    return loaders.batches(open_images(photographs, cache=False), workers=workers)


@pytest.fixture(scope="module")
def alone(photographs):
    return list(batches(photographs, 0).load(0, STEPS))


def workers_now():
    return sorted(child.pid for child in multiprocessing.active_children())


def run(made, signals):
    """The batches, while all workers are sent a signal after some of the steps."""
    loaded = []
    for step, batch in enumerate(made.load(0, STEPS)):
        loaded.append(batch)
        for worker in workers_now() if step in signals else ():
            os.kill(worker, signals[step])
    return loaded


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("at", [1, STEPS - 6])
def test_workers_that_die_are_replaced_and_nothing_changes(photographs, alone, number, at):
    with pytest.warns(UserWarning, match="workers are replaced at step"):
        loaded = run(batches(photographs, 2), {at: number})
    assert len(loaded) == STEPS
    assert all(map(same, loaded, alone))


def test_workers_that_hang_are_replaced_and_nothing_changes(photographs, alone, monkeypatch):
    monkeypatch.setattr(loader, "PATIENCE", 2)
    with pytest.warns(UserWarning, match="workers are replaced at step"):
        loaded = run(batches(photographs, 1), {4: signal.SIGSTOP})
    assert all(map(same, loaded, alone))
    assert workers_now() == []


@pytest.mark.filterwarnings("ignore:.*workers are replaced")
def test_workers_that_die_again_end_the_run_in_one_line(photographs):
    again = dict.fromkeys(range(STEPS), signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"failed twice .*--resume goes on"), resource_errors(4):
        run(batches(photographs, 1), again)


def test_without_enough_shared_memory_this_process_loads_and_says_so():
    assert [workers_that_fit(workers, 1000) for workers in (0, 2)] == [0, 2]
    with pytest.warns(UserWarning, match=r"2 workers would need 5000000 MB of shared memory.*shm"):
        assert workers_that_fit(2, 10**12) == 0
    error = RuntimeError(
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory. Please try to raise your limit."
    )
    with pytest.raises(WorkerError, match="enlarge /dev/shm"), resource_errors(4):
        raise error


def test_only_workers_of_its_own_are_replaced(photographs):
    """Not what another thread of a program has started at the same time."""
    other = multiprocessing.Process(target=signal.pause, daemon=True)
    made = batches(photographs, 1)
    loaded = made.load(0, STEPS)
    other.start()
    next(loaded)
    own = [pid for pid in workers_now() if pid != other.pid]
    os.kill(own[0], signal.SIGKILL)
    with pytest.warns(UserWarning, match="workers are replaced at step"):
        assert len(list(loaded)) == STEPS - 1
    assert other.is_alive()
    other.kill()
    other.join()


def test_without_a_run_the_advice_is_to_give_the_command_again_and_memory_can_be_freed():
    says = pytest.raises(
        ResourceError, match=r"too many open files; .* `ulimit -n 4096`, or .*workers"
    )
    with says, resource_errors(4):  # as torch says it
        raise RuntimeError("Too many open files. Communication with the workers is no longer ...")
    with pytest.raises(WorkerError, match="give the same command again"), resource_errors(None):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    for batch_size, advice in ((4, "give about 2, or a smaller"), (None, "end other programs")):
        says = pytest.raises(ResourceError, match=f"^out of memory.*{advice}")
        with says, resource_errors(batch_size):
            raise MemoryError


def test_a_death_is_never_told_amid_a_step(photographs):
    """torch would raise from a signal handler, in the middle of whatever is being computed."""
    list(CenterCrops(open_images(photographs, cache=False), 32, workers=1))  # installs it
    running = batches(photographs, 1).load(0, STEPS)
    next(running)
    (worker,) = workers_now()
    os.kill(worker, signal.SIGKILL)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    assert sum(range(10**6)) == 499999500000  # Python handles signals between its instructions
    with pytest.warns(UserWarning, match="replaced"):
        assert len(list(running)) == STEPS - 1


def test_workers_that_show_images_to_an_encoder_are_replaced_too(photographs):
    images = open_images(photographs, cache=False)
    expected = torch.cat(list(CenterCrops(images, 32)))
    running = iter(CenterCrops(images, 32, batch_size=1, workers=2))
    first = next(running)
    for worker in workers_now():
        os.kill(worker, signal.SIGKILL)
    with pytest.warns(UserWarning, match="workers are replaced at step"):
        assert torch.equal(torch.cat([first, *running]), expected)


def test_an_error_in_a_worker_is_no_lost_worker(photographs, monkeypatch):
    broken = batches(photographs, 1)
    monkeypatch.setattr(ViewDataset, "sample", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(broken.load(0, STEPS))


def version_1(group, quota):
    """The files of a control group of Linux's first version."""
    return {f"{group}/cpu.cfs_quota_us": f"{quota}\n", f"{group}/cpu.cfs_period_us": "100000\n"}


def test_the_quota_is_that_of_the_tightest_control_group(tmp_path):
    inf = math.inf
    cases = (
        ("0::/\n", {}, inf),
        ("0::/\n", {"cpu.max": "max 100000\n"}, inf),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a\n", {"a/cpu.max": "400000 100000\n", "other/cpu.max": "1 100000\n"}, 4.0),
        ("0::/not/here\n", {"cpu.max": "300000 100000\n"}, 3.0),  # as containers see theirs
        ("5:memory:/m\n3:cpuacct,cpu:/job\n0::/\n", version_1("cpu/job", 250000), 2.5),
        ("1:cpu:/\n", version_1("cpu", -1), inf),
        ("2:cpuset:/job\n", {"cpu/job/cpu.max": "100000 100000\n"}, inf),
        ("0::/odd\n", {"odd/cpu.max": "what\n"}, inf),
    )
    for number, (listed, limits, expected) in enumerate(cases):
        system = tmp_path / str(number)
        write_files(system, {place: text.encode() for place, text in limits.items()})
        (tmp_path / "cgroup").write_text(listed)
        assert cpu_quota(tmp_path / "cgroup", system) == expected, (listed, limits)
    assert cpu_quota(tmp_path / "nothing", tmp_path) == inf


def test_processes_on_one_machine_share_its_processors(monkeypatch):
    cpus = available_cpus()
    assert 1 <= cpus <= len(os.sched_getaffinity(0))
    for count in (1, 2, cpus, cpus + 1):
        assert cpus_per_process(count) == max(1, cpus // count), count
    for name, value in {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": str(cpus)}.items():
        monkeypatch.setenv(name, value)  # as torchrun does on each of several machines
    assert cpus_per_process() == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # as srun does, which gives each its own
    assert cpus_per_process() == cpus
