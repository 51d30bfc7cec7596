"""Two real processes train the encoder of a discovery: as one does, whatever becomes of the other."""

import os
import signal
import sys
import time
from importlib import import_module
from subprocess import PIPE, Popen
from types import SimpleNamespace

import builders
import numpy as np
import pytest
import torch
from discoveries import rows, words
from nearkin_command import run
from PIL import Image
from processes import SECONDS, children, ended, environment, free_port
from safetensors.torch import load_file
from small import fork_workers

from nearkin.run import auto as build
from nearkin.run.folder import RunFolder

SETTINGS = words(
    "--known 0,1,2 --val 0 --batch-size 16 --epochs 1 --classes 2 --entropy-weight 1 --device cpu"
)
SHORT = """
import sys
import torch
import nearkin.run.auto as build
from nearkin.discovery import stages
stages.MAX_EPOCHS = 40
build.native_precision = lambda device: torch.float32
build.MOST_EPOCHS = 2
build.usable_optimizer = lambda *facts: "sgd"
from nearkin.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""
"""What `short` and conftest.py do, in a process of its own."""


@pytest.fixture(scope="module")
def short():
    """In float32 whatever the processor, and not long enough for rounding to grow into chaos.

    By SGD: steps of Muon, and of AdamW where gradients are tiny, enlarge rounding.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "native_precision", lambda _: torch.float32)
        patch.setattr(build, "MOST_EPOCHS", 2)
        patch.setattr(build, "usable_optimizer", lambda *_: "sgd")
        fork_workers(patch)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Five digits, 16 of each, in noise.

    A weight that sees nothing but black has a gradient of rounding, of which AdamW makes a step.
    """
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    pixels, labels = builders.digits(16, 5)
    noise = np.random.default_rng(0).uniform(0, 55, pixels.shape)
    np.savez(path, x=np.rint(pixels * (200 / 255) + noise).astype(np.uint8), y=labels)
    path.with_name("short.py").write_text(SHORT)
    return path


def start(data, out, *more, launcher=(), **env):
    program = [*launcher, str(data.with_name("short.py")), "discover", str(data)]
    command = [sys.executable, *program, *SETTINGS, "-o", str(out), *more]
    return Popen(command, env=environment(**env), text=True, stdout=PIPE, stderr=PIPE)


def torchrun():
    return "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", free_port()


def srun():
    """The environments of two processes."""
    job = str(int(free_port()) % 10_000)
    env = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": job}
    return [env | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]


@pytest.fixture(scope="module")
def both(data, short, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "both"
    assert run("discover", data, *SETTINGS, "-o", out, "--devices", 2) == 0
    return RunFolder(out)


def test_two_processes_discover_what_one_discovers(data, both, tmp_path):
    assert run("discover", data, *SETTINGS, "-o", tmp_path / "alone") == 0
    alone = RunFolder(tmp_path / "alone")
    theirs, ours = (rows(each.stage("features").metrics) for each in (alone, both))
    for column in ("loss", "feature_std"):
        expected = [float(row[column] or 0) for row in theirs]
        # Kernels round otherwise for half a batch, which grows from step to step: to 2e-3 of the
        # fourth loss on a CPU with AVX-512 and without bf16, to less than 1e-3 on others.
        assert [float(row[column] or 0) for row in ours] == pytest.approx(expected, rel=5e-3)
    assert '"processes": 2' in both.stage("features").machine.read_text()
    assert '"processes": 1' in both.stage("known").machine.read_text()
    ours, theirs = load_file(both.encoder), load_file(alone.encoder)
    x, y = (torch.cat([side[name].flatten().double() for name in ours]) for side in (ours, theirs))
    assert float((x - y).norm() / y.norm()) < 1e-2  # 4e-3 on such a CPU
    # What comes after the encoder is of one process. Clusters amplify how the encoders differ, so
    # it is compared from the same one.
    again = tmp_path / "again"
    settings = [*SETTINGS, "--encoder", both.stage("features").path]
    assert run("discover", data, *settings, "-o", again) == 0
    result, expected = (rows(path / "assignments.csv") for path in (both.path, again))
    assert [row["cluster"] for row in result] == [row["cluster"] for row in expected]
    for column in ("score", "margin", "entropy"):
        scores = [float(row[column]) for row in expected]
        assert [float(row[column]) for row in result] == pytest.approx(scores, abs=1e-5)
    assert len(result) == 32


@pytest.mark.usefixtures("short")
def test_processes_train_on_what_a_table_of_labels_leaves(data, tmp_path):
    """Its validation part is neither trained on nor scored, which the data alone do not say."""
    with np.load(data) as arrays:
        pixels, labels = arrays["x"], arrays["y"]
    folder, table = tmp_path / "images", tmp_path / "labels.csv"
    folder.mkdir()
    lines = ["path,label,split"]
    for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        path, known = folder / f"{number:02}.png", str(label) if label < 3 else ""
        Image.fromarray(image).save(path)
        lines.append(f"{path.name},{known},{('train', 'val', 'test', 'train')[number % 4]}")
    table.write_text("\n".join(lines))
    settings = [word for word in SETTINGS if word not in ("--known", "0,1,2", "--val", "0")]
    given = ["--labeled", table, *settings, "-o", tmp_path / "run", "--devices", 2]
    assert run("discover", folder, *given) == 0
    stage = RunFolder(tmp_path / "run").stage("features")
    assert '"processes": 2' in stage.machine.read_text()
    noted = {row["path"]: row["split"] for row in rows(stage.images)}
    assert len(noted) == 60
    assert sum(part == "train" for part in noted.values()) == 40


@pytest.mark.slow
def test_a_killed_process_ends_a_discovery_and_torchrun_completes_it(data, both, tmp_path):
    out = tmp_path / "run"
    process = start(data, out, "--devices", "2")
    limit, metrics = time.monotonic() + SECONDS, RunFolder(out).stage("features").metrics
    while not metrics.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < limit
        time.sleep(0.01)
    (helper,) = children(process.pid)
    os.kill(helper, signal.SIGKILL)
    code, _, err = ended(process)
    assert code == 9
    assert "error: process 1 of this training was ended by SIGKILL; " in err.splitlines()[-1]
    code, output, err = ended(start(data, out, "--resume", launcher=torchrun()))
    assert code == 0, err
    assert output.count("novel classes of") == err.count("writing") == 1  # only the first speaks
    for name in ("features", "known", "simgcd-0"):
        ours, theirs = RunFolder(out).stage(name), both.stage(name)
        assert ours.metrics.read_bytes() == theirs.metrics.read_bytes()
    for name in ("assignments.csv", "encoder.safetensors", "classifier.safetensors"):
        assert (out / name).read_bytes() == (both.path / name).read_bytes()
    others = [start(data, out, "--resume", **slurm) for slurm in srun()]
    done = [ended(process) for process in others]
    assert [code for code, _, _ in done] == [0, 0], done
    assert [err.count("already complete") for _, _, err in done] == [1, 0]


def test_what_takes_one_process_is_left_to_the_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command in ("evaluate RUN", "embed RUN DATA -o vectors.npz", "predict RUN DATA"):
        assert run(*command.split()) == 0
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("this command takes one process")) == ("", 1)
    assert not any(tmp_path.iterdir())


def test_every_process_takes_part_in_a_demo(tmp_path, monkeypatch):
    """Its training waits for all of them."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    demo = import_module("nearkin.commands.demo")
    calls = list[str]()
    for name in ("train", "discover"):
        note = lambda *_, name=name, **__: calls.append(name) or SimpleNamespace(path=tmp_path)
        monkeypatch.setattr(demo, name, note)
    assert run("demo", "-o", tmp_path) == 0
    assert calls == ["train", "discover"]
