"""A training by several real processes, however they were started, and what becomes of it."""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
import torch
from builders import pixels
from nearkin_command import run
from processes import SECONDS, children, ended, environment, fork, free_port, srun, wait_until
from safetensors.torch import load_file
from small import fork_workers

from nearkin import files
from nearkin.distributed import all_reduce_max, available_cpus, choose_device, training_group
from nearkin.distributed.devices import cpus_per_process
from nearkin.distributed.launch import process_group
from nearkin.distributed.ranks import RankInfo, num_processes, rank_info, slurm_env
from nearkin.errors import UsageError
from nearkin.run.folder import RunFolder
from nearkin.tables import read_numbers
from nearkin.training import checkpoint, session

SETTINGS = [
    "--method", "moco", "--queue-size", "32", "--bn-groups", "4", "--backbone", "tiny",
    "--batch-size", "16", "--epochs", "3", "--precision", "fp32", "--val", "0",
    "--evaluate-every", "0", "--save-every", "1", "--device", "cpu", "--optimizer", "sgd",
]  # fmt: skip


@pytest.fixture
def forks(monkeypatch):
    """Let the workers of runs be forks, which start sooner than anew."""
    fork_workers(monkeypatch)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "images.npz"
    np.savez(path, x=pixels(64, 12), y=np.arange(64) % 4)
    return path


def start(data, out, *more, program=("-m", "nearkin"), settings=SETTINGS, **env):
    command = [sys.executable, *program, "train", str(data), *settings, "-o", str(out), *more]
    return subprocess.Popen(
        command, env=environment(**env), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def train(data, out, *more, settings=SETTINGS) -> int:
    """The exit code of a training whose main process is that of the tests."""
    return run("train", data, *settings, "-o", out, *more)


def torchrun(rank, port):
    own = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    return own | {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}


LAUNCHERS = {"torchrun": torchrun, "srun": lambda rank, port: srun(rank, str(int(port) % 10_000))}
"""What launchers tell each of two processes."""


def launched(launcher, data, out, *more) -> list[int]:
    """The exit codes of two forks, which have been told what a launcher tells processes."""
    import kills  # here, since workers that are started anew import this file

    port = free_port()
    command = ["train", str(data), *SETTINGS, "-o", str(out), *more]
    told = [LAUNCHERS[launcher](rank, port) for rank in (1, 0)]
    forks = [kills.start(command, lambda env=env: os.environ.update(env)) for env in told]
    return [kills.finish(fork) for fork in forks]


def trained(data, out, *more, **options) -> RunFolder:
    assert train(data, out, *more, **options) == 0
    return RunFolder(out)


def saved_steps(out: Path) -> int:
    """Of the newest checkpoint."""
    return int((checkpoint.latest(out / "checkpoints") or Path("ckpt-0")).stem[5:])


@contextmanager
def signal_to_worker(number: signal.Signals, out: Path, steps: int) -> Iterator[list[int]]:
    """Send a signal to the worker of this process once a checkpoint of so many steps is written."""
    workers, ended = [], Event()

    def send() -> None:
        while saved_steps(out) < steps:
            if ended.wait(0.01):
                return
        workers.extend(child.pid for child in active_children())
        os.kill(workers[0], number)

    thread = Thread(target=send)
    thread.start()
    try:
        yield workers
    finally:
        ended.set()
        thread.join()


def losses(run: RunFolder) -> list[float]:
    return [row["loss"] for row in read_numbers(run.metrics)]


def same_bits(a: RunFolder, b: RunFolder) -> bool:
    files = ((run.metrics.read_bytes(), run.encoder.read_bytes()) for run in (a, b))
    return next(files) == next(files)


def difference(a: RunFolder, b: RunFolder) -> float:
    """Relative, over all weights of the encoder and the projector."""
    ours, theirs = (load_file(run.encoder) | load_file(run.projector) for run in (a, b))
    x, y = (torch.cat([side[name].flatten().double() for name in ours]) for side in (ours, theirs))
    return float((x - y).norm() / y.norm())


def after_steps(process, out: Path, steps: int) -> None:
    """Wait until a checkpoint of that many steps, or of more, is written."""
    wait_until(lambda: saved_steps(out) >= steps, process)


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    return trained(data, tmp_path_factory.mktemp("runs") / "alone")


@pytest.fixture(scope="module")
def both(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "both"
    assert launched("torchrun", data, out) == [0, 0]
    return RunFolder(out)


def test_two_processes_train_what_one_trains(alone, both):
    assert losses(both) == pytest.approx(losses(alone), rel=1e-3)
    assert difference(both, alone) < 1e-3
    assert '"processes": 2' in both.machine.read_text()


@pytest.mark.slow
def test_torchrun_starts_the_same_training(data, both, tmp_path):
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", free_port()]
    process = start(data, tmp_path / "run", program=(*command, "-m", "nearkin"))
    code, out, err = ended(process)
    assert code == 0, err
    assert same_bits(RunFolder(tmp_path / "run"), both)
    assert out.count("effective rank") == err.count("writing") == 1  # only the first speaks


def test_a_program_that_torchrun_starts_may_train_twice(data, tmp_path):
    """The launcher's store still has the keys of the first training."""
    program = tmp_path / "twice.py"
    program.write_text(
        "import sys, nearkin\n"
        "for name in 'ab':\n"
        "    nearkin.train(sys.argv[1], output=f'{sys.argv[2]}/{name}', backbone='tiny', epochs=1,\n"
        "                  batch_size=32, image_size=8, evaluate_every=0, report=False,\n"
        "                  workers=0, device='cpu', verbose=False)\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", free_port()]
    command = [sys.executable, *torchrun, str(program), str(data), str(tmp_path)]
    subprocess.run(command, env=environment(), check=True, timeout=SECONDS)
    first, second = (RunFolder(tmp_path / name) for name in "ab")
    assert same_bits(first, second)


def test_processes_that_see_other_images_are_refused(tmp_path, capfd):
    """Rows, queues and labels of all are gathered as if they were of the same images."""
    source = tmp_path / "source.py"
    source.write_text(
        "import os\nimport numpy as np\n"
        "def images():\n"
        "    own = np.random.default_rng(int(os.environ['RANK']))\n"
        "    return own.integers(0, 256, (64, 12, 12, 3), np.uint8)\n"
    )
    worker, first = launched("torchrun", f"{source}:images", tmp_path / "run")
    assert (worker, first) == (3, 9)
    assert "a process of this training has other images than the first" in capfd.readouterr().err


def test_srun_starts_the_same_training(data, both, tmp_path):
    assert launched("srun", data, tmp_path / "run") == [0, 0]
    assert same_bits(RunFolder(tmp_path / "run"), both)


@pytest.mark.usefixtures("forks")
def test_a_signal_to_one_process_stops_all_after_the_same_step(data, both, tmp_path, capsys):
    """To the second: the first has to hear of it."""
    out = tmp_path / "run"
    with signal_to_worker(signal.SIGTERM, out, 3) as workers:
        assert train(data, out, "--devices", "2") == 143
    assert "stopped by SIGTERM after step" in capsys.readouterr().err
    assert not Path(f"/proc/{workers[0]}").exists()
    stopped = RunFolder(out)
    assert launched("torchrun", data, out, "--resume") == [0, 0]
    (step,) = re.findall(r"resuming after step (\d+)", stopped.log.read_text())
    assert int(step) >= 3
    assert same_bits(stopped, both)


@pytest.mark.slow
def test_another_number_of_processes_goes_on_from_the_same_step(data, alone, tmp_path):
    out = tmp_path / "run"
    process = start(data, out, "--devices", "2")
    after_steps(process, out, 4)
    process.terminate()
    assert ended(process)[0] == 143
    code, _, err = ended(start(data, out, "--resume"))
    assert code == 0
    assert "processes 2 became 1" in err
    assert difference(RunFolder(out), alone) < 1e-3


@pytest.mark.usefixtures("forks")
def test_a_killed_process_ends_the_run_in_one_line_and_nothing_is_lost(data, tmp_path, capsys):
    out = tmp_path / "run"
    with signal_to_worker(signal.SIGKILL, out, 5):
        assert train(data, out, "--devices", "2") == 9
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: process 1 of this training was ended by SIGKILL; " in last
    newest = checkpoint.latest(out / "checkpoints")
    assert newest is not None
    assert files.read_sealed(newest) is not None  # the tests above go on from such a one


@pytest.mark.slow
def test_a_process_that_cannot_start_is_told(data, tmp_path):
    """As in a program that starts others when it is imported, which they do."""
    program = tmp_path / "program.py"
    options = (
        f"{str(data)!r}, devices=2, epochs=1, batch_size=16, output={str(tmp_path / 'run')!r}"
    )
    program.write_text(f"import nearkin\nnearkin.train({options}, backbone='tiny', device='cpu')")
    how = dict(capture_output=True, text=True, check=False, timeout=SECONDS)
    done = subprocess.run([sys.executable, program], env=environment(), **how)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "WorkerError: process 1 of this training was ended by exit code 1" in last
    assert "train is called while a process of an earlier call imports this script" in done.stderr
    assert not (tmp_path / "run-2").exists()


@pytest.mark.slow
def test_others_end_when_the_first_is_killed(data, tmp_path):
    out = tmp_path / "run"
    process = start(data, out, "--devices", "2")
    after_steps(process, out, 5)
    (helper,) = children(process.pid)
    process.kill()
    process.communicate(timeout=SECONDS)
    wait_until(lambda: not Path(f"/proc/{helper}").exists())


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_run(data, tmp_path):
    impatient = (
        "import sys; from datetime import timedelta; import nearkin.distributed.launch as launch;"
        "launch.TIMEOUT = timedelta(seconds=20); from nearkin.cli import main; sys.exit(main())"
    )
    out = tmp_path / "run"
    process = start(data, out, "--devices", "2", program=("-c", impatient))
    after_steps(process, out, 5)
    (helper,) = children(process.pid)
    os.kill(helper, signal.SIGSTOP)
    code, _, err = ended(process)
    assert code == 9
    assert "error: another process of this training was lost, or hangs; " in err.splitlines()[-1]
    assert not Path(f"/proc/{helper}").exists()


@pytest.mark.usefixtures("forks")
def test_a_failure_of_another_process_is_told(data, tmp_path, monkeypatch, capsys):
    """The first has read its images before they vanish."""
    copy = Path(shutil.copy(data, tmp_path / "images.npz"))
    without_images = lambda *args: copy.unlink() or training_group(*args)
    monkeypatch.setattr(session, "training_group", without_images)
    assert train(copy, tmp_path / "run", "--devices", "2") == 9
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: process 1 of this training failed (" in last
    assert "no such file" in last


@pytest.mark.usefixtures("forks")
def test_what_diverges_in_all_processes_is_one_error(data, tmp_path, capfd):
    too_fast = ["--lr", "1e9", "--warmup", "0"]
    assert train(data, tmp_path / "run", "--devices", "2", *too_fast) == 6
    assert capfd.readouterr().err.count("error:") == 1
    assert launched("torchrun", data, tmp_path / "launched", *too_fast) == [6, 6]
    assert capfd.readouterr().err.count("error:") == 1


def test_a_fork_does_not_wait_for_the_threads_of_an_earlier_group():
    """What a training that failed leaves in a cycle, until it is collected."""

    def collect() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        gc.collect()

    gc.disable()
    try:
        with process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1):
            cycle = [torch.distributed.group.WORLD]
            cycle.append(cycle)
        del cycle
        assert os.waitpid(fork(collect), 0)[1] == 0
    finally:
        gc.enable()
        gc.collect()


def test_what_cannot_be_shared_is_refused(data, tmp_path, refusal):
    for settings, error in (
        (["--devices", 3], "--batch-size 16 cannot be divided evenly among 3 process"),
        (["--fsdp"], "--fsdp divides networks among processes; give --devices 2 or mor"),
    ):
        refused = refusal(2, "train", data, *SETTINGS, *settings, "-o", tmp_path / "run")
        assert error in refused, settings


def test_what_started_a_process_is_read_off_its_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert rank_info() is None
    with monkeypatch.context() as patched:
        patched.setenv("LOCAL_RANK", "a")
        with pytest.raises(UsageError, match="LOCAL_RANK is 'a'"):
            choose_device("cpu")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # `sbatch` without `srun`
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert rank_info() is None
    assert num_processes(4) == 4
    told = {"STEP_NUM_TASKS": "16", "PROCID": "9", "LOCALID": "1", "JOB_ID": "123456"}
    for name, value in (told | {"STEP_NODELIST": "gpu[007-008,12],cpu3"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert rank_info() == RankInfo(rank=9, world_size=16, local_rank=1)
    assert num_processes(1) == 16
    with pytest.raises(UsageError, match="leave devices out"):
        num_processes(2)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert rank_info() == RankInfo(rank=3, world_size=8, local_rank=3)
    assert slurm_env(os.environ) == {}  # srun has started torchrun, which has started this
    for name, find in {"LOCAL_WORLD_SIZE": cpus_per_process, "LOCAL_RANK": rank_info}.items():
        with monkeypatch.context() as patched:
            patched.setenv(name, "a")
            with pytest.raises(UsageError, match=f"{name} is 'a'"):
                find()


@pytest.mark.parametrize("env", [{}, {"RANK": "", "WORLD_SIZE": ""}, {"RANK": "0"}])
def test_empty_variables_name_no_processes_and_one_process_is_alone(env, data, tmp_path):
    """As `srun -n 1` and a shell leave them: nobody has set where processes meet."""
    env = {"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "", **env}
    code, _, err = ended(start(data, tmp_path / "run", **env))
    assert code == 0, err


def test_what_is_waited_for_is_said_before_it_comes(data, tmp_path, monkeypatch, refusal, caplog):
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    given = ["train", data, *SETTINGS, "-o", tmp_path / "run"]
    refused = refusal(2, *given)
    assert "MASTER_ADDR expected" in refused
    assert "unset RANK and WORLD_SIZE" in refused
    assert "process 0 waits for all 8 (WORLD_SIZE) at None:1" in caplog.text
    monkeypatch.setenv("RANK", "a")
    assert "unset RANK and WORLD_SIZE" in refusal(2, *given)


def test_processes_meet_on_the_first_machine():
    nodes = {"n1": "n1", "n[001-004,7],m2": "n001", "a-b,c[1-2]": "a-b", "r[3,9]-ib": "r3-ib"}
    for listed, first in nodes.items():
        meeting = slurm_env(srun(0, "7") | {"SLURM_STEP_NODELIST": listed})
        assert meeting["MASTER_ADDR"] == first, listed
    steps = [srun(0, job) | {"SLURM_STEP_ID": step} for job in "78" for step in "01"]
    assert len({slurm_env(step)["MASTER_PORT"] for step in steps}) == 4


def processors() -> list[tuple[int, ...]]:
    """Which of them the threads of this process may use."""
    threads = [int(thread.name) for thread in Path("/proc/self/task").iterdir()]
    return sorted({tuple(sorted(os.sched_getaffinity(thread))) for thread in threads})


def note(folder: str) -> None:
    all_reduce_max(0)  # there are threads for messages now
    report = [torch.get_num_threads(), processors()]
    Path(folder, f"{torch.distributed.get_rank()}.json").write_text(json.dumps(report))


def follow_and_note(folder: str) -> None:
    with training_group(1, follow_and_note, folder):
        note(folder)


@pytest.mark.skipif(
    sys.platform != "linux" or available_cpus() < 2 or torch.cuda.is_available(),
    reason="processes keep to their own processors where there are two or more, and no GPU",
)
def test_processes_that_were_started_here_keep_to_their_share_of_the_processors(tmp_path):
    before = torch.get_num_threads(), processors()
    ((*cpus,),) = before[1]
    with training_group(2, follow_and_note, str(tmp_path)):
        note(str(tmp_path))
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    half = len(cpus) // 2
    assert [shares for _, shares in reports] == [[cpus[:half]], [cpus[half:]]]
    assert {threads for threads, _ in reports} == {max(1, before[0] // 2)}
    assert (torch.get_num_threads(), processors()) == before


SHARDED = ("--devices", "2", "--fsdp")
LOOKS = SETTINGS.copy()
LOOKS[LOOKS.index("--evaluate-every") + 1] = "2"
LOOKS[LOOKS.index("--optimizer") + 1] = "adamw"
"""Not Muon: it amplifies its own rounding, which is another for divided matrices, where a batch has
fewer images than a matrix has rows."""


@pytest.mark.slow
def test_a_divided_training_is_looked_at_stopped_and_resumed(data, tmp_path):
    settings = [*LOOKS, "--lr", "0.002"]
    whole = trained(data, tmp_path / "whole", "--devices", "2", settings=settings)
    out = tmp_path / "run"
    process = start(data, out, *SHARDED, settings=settings)
    after_steps(process, out, 3)
    process.terminate()
    assert ended(process)[0] == 143
    run = trained(data, out, "--resume", *SHARDED, settings=settings)
    assert losses(run) == pytest.approx(losses(whole), rel=1e-3)
    assert difference(run, whole) < 1e-3
    health, expected = (json.loads(each.summary.read_text())["health"] for each in (run, whole))
    assert health == pytest.approx(expected, rel=1e-2)


@pytest.mark.slow
def test_a_divided_training_that_diverges_is_one_error_and_kept_for_a_replay(data, tmp_path):
    process = start(data, tmp_path / "run", *SHARDED, "--lr", "1e9", "--warmup", "0")
    code, _, err = ended(process)
    assert code == 6, err
    assert err.count("error:") == 1
    assert checkpoint.latest(RunFolder(tmp_path / "run").diverged)
