"""What the machine does to a run: full disks, busy folders, failing files, too little memory."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from builders import pixels
from discoveries import bytes_of
from processes import fork, small_files
from small import save, small, spawn

from nearkin import files
from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.errors import CheckpointError, OutputError, ResourceError, UsageError
from nearkin.run.folder import RunFolder
from nearkin.run.opening import open_run
from nearkin.toml import FREE, continued
from nearkin.training import checkpoint
from nearkin.training.optimizer import build_optimizer

SOAK = Path(__file__).parents[1] / "soak.py"
CONFIG = TrainConfig(
    method="moco", backbone="tiny", image_size=16, batch_size=16, epochs=6, save_every=2, val=0.0,
    evaluate_every=0, workers=0, report=False,
    options={"queue_size": 16, "dim": 8, "hidden_dim": 8},
)  # fmt: skip
"""Four steps an epoch, so twelve checkpoints."""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "data.npz"
    np.savez(path, x=pixels(64))
    return path


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory):
    """The run that nothing happens to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(images, CONFIG, output=out)
    return out


def same(out, whole):
    names = ("encoder.safetensors", "metrics.csv")
    return bytes_of(out, *names) == bytes_of(whole, *names)


class Meddler:
    """Does something to the run when it is told of a step, and keeps what it is told."""

    def __init__(self, **at):
        self.at = {int(step.removeprefix("step_")): act for step, act in at.items()}
        self.lines = []

    def info(self, text):
        self.lines.append(text)

    def progress(self, done, _total, text):
        if text.startswith("epoch"):
            self.at.get(done, lambda: None)()


@pytest.fixture
def disk():
    """What lets files grow no further than so many bytes, as a full disk does."""
    with small_files(resource.RLIM_INFINITY) as limit:
        yield limit


def test_a_disk_that_is_full_for_a_while_costs_warnings_and_nothing_else(
    images, whole, disk, tmp_path
):
    meddler = Meddler(step_6=lambda: disk(200), step_10=lambda: disk(resource.RLIM_INFINITY))
    train(images, CONFIG, output=tmp_path / "run", verbose=meddler)
    warnings = [line for line in meddler.lines if line.startswith("warning: cannot write")]
    assert len(warnings) == 2
    assert all("training goes on" in line for line in warnings)
    assert same(tmp_path / "run", whole)


def test_a_disk_that_stays_full_ends_the_run_and_leaves_the_newest_checkpoint(
    images, whole, disk, tmp_path
):
    out = tmp_path / "run"
    with pytest.raises(ResourceError, match=r"cannot write .*; make room"):
        train(images, CONFIG, output=out, verbose=Meddler(step_9=lambda: disk(200)))
    disk(resource.RLIM_INFINITY)
    assert checkpoint.latest(out / "checkpoints").name == "ckpt-00000008.pt"
    assert not [path for path in out.rglob("*") if ".partial." in path.name]
    train(images, CONFIG, output=out, resume=True)
    assert same(out, whole)


@pytest.fixture
def saved(tmp_path):
    """Saves a checkpoint of a step, all but the newest one of which go; that of step 1 is there."""
    method = small("simclr")
    optimizer = build_optimizer(method, name="sgd", lr=0.1, weight_decay=0.0)
    keep_newest = lambda step: save(tmp_path, step, method, optimizer, keep=1)
    keep_newest(1)
    return keep_newest


def broken(_):
    raise OSError(errno.EIO, "Input/output error")


def test_an_fsync_that_fails_is_a_save_that_failed(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(ResourceError, match="Input/output error"):
        saved(2)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-00000001.pt"]


def test_a_disk_that_reads_other_bytes_than_were_written_is_noticed_at_once(
    saved, tmp_path, monkeypatch
):
    seal, written = files.seal, files.write_sealed
    monkeypatch.setattr(files, "seal", lambda content: seal(content[:-1]))  # as it is written

    def failing(path, content):
        written(path, content)
        monkeypatch.setattr(files, "seal", seal)

    monkeypatch.setattr(files, "write_sealed", failing)
    with pytest.raises(ResourceError, match="not read back as it was written"):
        saved(2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["ckpt-00000001.pt", "ckpt-00000002.pt.corrupt"]


def test_a_disk_that_cannot_be_read_is_an_error_and_no_start_from_zero(
    images, whole, tmp_path, monkeypatch
):
    shutil.copytree(whole, tmp_path / "run")
    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(CheckpointError, match="cannot read the checkpoints"):
        train(images, CONFIG, output=tmp_path / "run", resume=True)


def test_a_folder_or_log_that_cannot_be_written_is_refused_before_the_data_are_opened(tmp_path):
    for out in ("/proc/run", "/sys/run", "x" * 300, "/" + "long/" * 900):
        with pytest.raises(OutputError, match="cannot write "):
            train("no-such-data", CONFIG, output=out)
    (tmp_path / "train.log").mkdir()
    with pytest.raises(OutputError, match=r"cannot write .*train.log.*; choose another output"):
        train("no-such-data", CONFIG, output=tmp_path)


# One folder, one run

STARTS = 50
opened = partial(open_run, config=TrainConfig(), data="data", verbose=False, overwrite=False)


def start(folder, number, ready, go):
    """Open it when all may, and hold it; the exit code of a command that cannot."""
    os.close(go[1])
    os.write(ready[1], b".")
    os.read(go[0], 1)
    try:
        with opened(RunFolder(folder / "run"), resume=False):
            while len(list(folder.glob("*.txt"))) < STARTS - 1:
                time.sleep(0.1)
    except OutputError as error:
        (folder / f"{number}.txt").write_text(str(error))
        return error.exit_code


def race(_, folder):
    """Let many processes open one folder in the same moment."""
    ready, go = os.pipe(), os.pipe()
    children = [fork(partial(start, folder, number, ready, go)) for number in range(STARTS)]
    for _ in children:
        os.read(ready[0], 1)
    os.close(go[1])
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sorted(codes) == [0, *[4] * (STARTS - 1)], codes


def test_of_fifty_runs_that_start_in_one_folder_one_wins(tmp_path):
    spawn(race, tmp_path, processes=1)
    messages = [path.read_text() for path in tmp_path.glob("*.txt")]
    assert len(messages) == STARTS - 1
    assert all("in use by" in text for text in messages)  # who that is may not be written yet


def test_whoever_holds_a_folder_is_named_and_a_copy_of_it_is_free(tmp_path):
    with opened(RunFolder(tmp_path / "run"), resume=False):
        with (
            pytest.raises(OutputError, match=f"in use by process {os.getpid()} on .*, started"),
            opened(RunFolder(tmp_path / "run"), resume=True),
        ):
            pass
        os.system(f"cp -r {tmp_path / 'run'} {tmp_path / 'copy'}")
        with opened(RunFolder(tmp_path / "copy"), resume=True):
            pass


@pytest.mark.slow
def test_too_little_memory_is_one_line_with_advice(images, tmp_path):
    program = (
        "import resource, sys; import nearkin.commands.train; from nearkin.cli import main;"
        "size = int(open('/proc/self/statm').read().split()[0]) * 4096;"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (3 << 29),) * 2);"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [
        sys.executable, "-c", program, "train", str(images), "-o", str(tmp_path / "run"),
        "--backbone", "resnet18", "--image-size", "224", "--batch-size", "56", "--epochs", "1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 8, done.stderr[-2000:]
    assert "error: out of memory with --batch-size 56; give about 28" in done.stderr


@pytest.mark.slow
def test_steps_leave_nothing_behind():
    command = [sys.executable, "-W", "error", str(SOAK), "800"]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert answer["steps"] == 800
    assert answer["files"] <= 2
    assert answer["threads"] <= 2
    # `make faults` takes 50,000 steps; so few cannot tell a small leak from a warm-up.
    assert answer["mb_per_1000_steps"] < 20


# What may change when a run is resumed


def changed(entry):
    """Another value of a setting."""
    other = {
        "epochs": 9, "batch_size": 32, "lr": 0.5, "weight_decay": 0.5, "image_size": 32,
        "evaluate_every": 3, "save_every": 7, "workers": 3, "optimizer": "lars",
        "precision": "bf16", "scan": "full", "lr_milestones": [0.5], "max_time": "3h",
        "on_collapse": "stop", "compile": "on", "devices": 2, "cache": "disk", "chunk_size": 4, "options": {"temperature": 0.7},
        "lora": 4, "layer_decay": 0.5, "freeze_epochs": 2, "anchor": 0.5, "drop_path": 0.2, "teacher_views": 3, "view_sizes": [8], "num_views": 4, "track": ["wandb"], "known": ["cat"],
        "shuffle_window": 512, "seed": 5, "lars_form": "byol", "final_weight_decay": 0.5,
    }  # fmt: skip
    value = getattr(TrainConfig(), entry.name)
    if entry.name in other:
        return other[entry.name]
    if isinstance(value, bool):
        return not value
    return value + "x" if isinstance(value, str) else value + 0.25 if value else 0.5


def test_every_setting_but_the_free_ones_is_named_when_it_contradicts_the_run():
    stored = replace(CONFIG, options={"temperature": 0.1}, encoder="start")
    for entry in fields(TrainConfig):
        new = replace(stored, **{entry.name: changed(entry)})
        if entry.name in FREE:
            continued(new, stored)
            continue
        named = "temperature" if entry.name == "options" else entry.name
        with pytest.raises(UsageError, match=f"{named} .* became"):
            continued(new, stored)


def test_the_documentation_names_the_free_settings():
    documented = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    for name in FREE:
        assert f"`--{name.replace('_', '-')}`" in documented
