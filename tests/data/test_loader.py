"""Loader workers that die or hang: replaced once, from the same step, with the same batches."""

import multiprocessing
import os
import signal
import sys
import time
import warnings

import loaders
import pytest
import torch
from loaders import same
from processes import fork
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from nearkin.data import loader
from nearkin.data.batches import CenterCrops, ViewDataset
from nearkin.data.index import BLOCK
from nearkin.data.loader import WorkersLostError, first_sentence, prefetch, workers_that_fit
from nearkin.data.opening import open_images
from nearkin.errors import ResourceError, WorkerError
from nearkin.run.failures import resource_errors

STEPS = 12


def batches(photographs, workers):
    return loaders.batches(open_images(photographs, cache=False), workers=workers)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """torch looks every five seconds whether a worker is still there."""
    receive = _MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(receive, "__defaults__", (0.5,))


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


@pytest.mark.parametrize(("at", "number"), [(1, signal.SIGKILL), (STEPS - 6, signal.SIGTERM)])
def test_workers_that_die_are_replaced_and_nothing_changes(photographs, alone, at, number):
    with pytest.warns(UserWarning, match="workers are replaced at step"):
        loaded = run(batches(photographs, 2), {at: number})
    assert len(loaded) == STEPS
    assert all(map(same, loaded, alone))


def test_workers_that_hang_are_replaced_and_nothing_changes(photographs, alone, monkeypatch):
    monkeypatch.setattr(loader, "PATIENCE", 1)
    with pytest.warns(UserWarning, match="workers are replaced at step"):
        loaded = run(batches(photographs, 1), {4: signal.SIGSTOP})
    assert all(map(same, loaded, alone))
    assert workers_now() == []


@pytest.mark.parametrize("images", [BLOCK, 256, 4096])
def test_a_worker_that_decodes_large_photographs_is_not_hung(images):
    """A PNG of 12 million pixels takes a second."""
    assert loader.patience(images) >= images


class Slow(Dataset):
    """Each item takes a second in which its process runs."""

    def __init__(self, begun):
        self.begun = begun

    def __getitem__(self, number):
        os.write(self.begun, b".")
        for _ in range(10):
            time.sleep(0.1)
        return number


def test_seconds_in_which_a_process_is_stopped_do_not_count(monkeypatch):
    """With its workers: by Ctrl-Z, docker pause, or a scheduler."""
    monkeypatch.setattr(loader, "PATIENCE", 6)
    begun, begins = os.pipe()

    def load():
        os.setpgid(0, 0)
        with warnings.catch_warnings(action="error"):  # such as that workers are replaced
            return list(prefetch(Slow(begins), 0, 1, 1, images=1)) != [0]

    child = fork(load)
    os.close(begins)  # or a child that fails would leave this one reading
    os.read(begun, 1)
    os.killpg(child, signal.SIGSTOP)
    time.sleep(8)
    os.killpg(child, signal.SIGCONT)
    assert os.waitpid(child, 0) == (child, 0)


@pytest.mark.filterwarnings("ignore:.*workers are replaced")
def test_workers_that_die_again_end_the_run_in_one_line(photographs):
    again = dict.fromkeys(range(STEPS), signal.SIGKILL)
    with (
        pytest.raises(WorkerError, match=r"failed twice .*resume=True goes on"),
        resource_errors(4, resumes=True),
    ):
        run(batches(photographs, 1), again)


@pytest.mark.parametrize("kind", [ConnectionError, EOFError])
def test_an_error_of_what_loads_is_no_loss_of_workers_where_there_are_none(kind):
    class Refused(Dataset):
        def __getitem__(self, step):
            raise kind("the camera is off")

    raises = pytest.raises(kind, match=r"^the camera is off$")
    with raises, resource_errors(), warnings.catch_warnings(action="error"):
        next(prefetch(Refused(), 0, 1, 0, images=1))


def test_without_enough_shared_memory_this_process_loads_and_says_so():
    assert [workers_that_fit(workers, 1000) for workers in (0, 2)] == [0, 2]
    with pytest.warns(UserWarning, match=r"2 workers would need 5000000 MB of shared memory.*shm"):
        assert workers_that_fit(2, 10**12) == 0
    error = RuntimeError(
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory. Please try to raise your limit."
    )
    assert "enlarge /dev/shm" in first_sentence(error)


def test_a_daemonic_process_which_may_start_none_loads_by_itself(photographs, alone):

    def load():
        sys.exit(not all(map(same, batches(photographs, 2).load(0, STEPS), alone)))

    worker = multiprocessing.get_context("fork").Process(target=load, daemon=True)
    worker.start()
    worker.join()
    assert worker.exitcode == 0


def test_a_handler_that_is_not_of_python_is_not_put_back(photographs, alone, monkeypatch):
    """As within other programs that embed Python."""
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    assert all(map(same, batches(photographs, 1).load(0, STEPS), alone))


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
    with says, resource_errors(4, resumes=True):  # as torch says it
        raise RuntimeError("Too many open files. Communication with the workers is no longer ...")
    with pytest.raises(WorkerError, match="give the same command again"), resource_errors():
        raise WorkersLostError("loader workers failed twice (DataLoader worker is killed)")
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
