"""Trackers, each with its real library: nothing here needs a network."""

import json
import os
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest
from builders import pixels
from needs import need
from typing_extensions import override

import nearkin
from nearkin.choices import Tracker
from nearkin.config import TrainConfig
from nearkin.errors import StoppedError
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Silent
from nearkin.run.tracking import TRACKERS, Tracking
from nearkin.schema import choices
from nearkin.tables import read_numbers

PIXELS = pixels(24, 8)
STEPS = 6  # of which the run is stopped after the second, and resumed
QUICK = {"backbone": "tiny", "batch_size": 8, "epochs": 2, "val": 0.0}
SETTINGS = QUICK | {"temperature": 0.3, "report": False}


@pytest.fixture(autouse=True)
def local(monkeypatch):
    """Trackers write here, and call nobody."""
    monkeypatch.setenv("WANDB_MODE", "offline")


class Listener(Silent):
    """Remembers log lines, and stops the run once."""

    def __init__(self, stop_after=None):
        self.lines, self.stop_after = [], stop_after

    def info(self, text):
        self.lines.append(text)

    @override
    def progress(self, done, total, text):
        if done == self.stop_after and "loss" in text:
            self.stop_after = None
            os.kill(os.getpid(), signal.SIGTERM)


def train(folder, tracker):
    log = Listener(stop_after=2)
    with pytest.raises(StoppedError):
        nearkin.train(PIXELS, output=folder, track=[tracker], verbose=log, **SETTINGS)
    nearkin.train(PIXELS, output=folder, track=[tracker], verbose=log, resume=True, **SETTINGS)
    assert [line for line in log.lines if line.startswith(f"warning: {tracker}")] == []


def written(folder):
    """The columns of metrics.csv, and measures of summary.json."""
    rows = read_numbers(folder / "metrics.csv")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    measures = json.loads((folder / "summary.json").read_text())["metrics"]
    return {
        name: {int(row["step"]): row[name] for row in rows if name in row}
        for name in ("loss", "lr", "effective_rank")
    }, measures["encoder"]["uniformity"]["value"]


def near(values, others):
    assert values.keys() == others.keys()
    assert list(values.values()) == pytest.approx(list(others.values()), rel=1e-6)


def test_tensorboard_has_each_step_once_though_the_run_was_stopped(tmp_path):
    need("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path / "run", "tensorboard")
    columns, rank = written(tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tb")).Reload()
    for name, column in columns.items():
        near({each.step: each.value for each in events.Scalars(name)}, column)
        assert len(events.Scalars(name)) == len(column)
    assert events.Scalars("encoder/uniformity")[0].value == pytest.approx(rank)
    text = events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| options.temperature | 0.3 |" in text


def test_steps_that_are_taken_again_after_a_kill_are_there_once(tmp_path):
    need("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path)
    folder.write_settings(TrainConfig(), "digits")
    for steps in (range(1, 5), range(3, 7)):
        with Tracking(["tensorboard"], folder, Listener()) as tracking:
            for step in steps:
                tracking.row({"step": step, "loss": 1 / step})
    events = EventAccumulator(str(folder.tensorboard)).Reload()
    assert [each.step for each in events.Scalars("loss")] == list(range(1, 7))


def offline_records(path):
    """The records of a .wandb file: blocks of 32 KiB with frames of checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        _, size, kind = struct.unpack("<IHB", content[position : position + 7])
        record += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def test_wandb_continues_the_same_run_without_a_network(tmp_path):
    need("wandb")
    import wandb

    train(tmp_path / "run", "wandb")
    wandb.teardown()  # its own process writes the file, and may lag behind
    columns, rank = written(tmp_path / "run")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    key = json.loads((tmp_path / "run" / "tracking.json").read_text())["key"]
    history, config, summary = [], {}, {}
    for record in (record for file in files for record in offline_records(file)):
        if record.HasField("run"):
            assert (record.run.run_id, record.run.project) == (key, "nearkin")
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            items = record.history.item
            row = {each.key or each.nested_key[0]: json.loads(each.value_json) for each in items}
            history.append(row)
        for item in record.summary.update:
            summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    for name, column in columns.items():
        near({row["_step"]: row[name] for row in history if name in row}, column)
        assert sum(name in row for row in history) == len(column)
    assert config["options.temperature"] == 0.3
    assert summary["encoder/uniformity"] == pytest.approx(rank)


def test_trackio_continues_the_same_run_and_prints_nothing(tmp_path):
    """In processes of their own: its folder is chosen when it is imported."""
    need("trackio")
    np.savez(tmp_path / "data.npz", x=PIXELS)
    command = [sys.executable, "-m", "nearkin", "train", "data.npz", "-o", "run"]
    for name, value in SETTINGS.items():
        option = "--" + name.replace("_", "-")
        command += [f"--no-{name}"] if value is False else [option, str(value)]
    command += ["--track", "trackio", "--json", "--save-every", "1"]
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, check=True, **run)
    assert json.loads(done.stdout)["epochs"] == 2
    for late in (tmp_path / "run" / "checkpoints").glob("*[3-6].pt"):
        late.unlink()
    (tmp_path / "run" / "summary.json").unlink()
    subprocess.run([*command, "--resume"], check=True, **run)
    columns, rank = written(tmp_path / "run")
    read = (
        "import json, trackio\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "(run,) = trackio.Api().runs('nearkin')\n"
        "print(json.dumps([run.config, SQLiteStorage.get_logs('nearkin', run.name)]))"
    )
    done = subprocess.run([sys.executable, "-c", read], check=True, **run)
    config, history = json.loads(done.stdout.splitlines()[-1])
    assert config["options.temperature"] == 0.3
    assert "resuming after step 2" in (tmp_path / "run" / "train.log").read_text()
    for name, column in columns.items():
        near({row["step"]: row[name] for row in history if name in row}, column)
        assert sum(name in row for row in history) == len(column)
    assert [row for row in history if "encoder/uniformity" in row][-1][
        "encoder/uniformity"
    ] == rank


def test_a_tracker_that_is_unknown_or_not_installed_is_refused(tmp_path, refusal, monkeypatch):
    assert tuple(TRACKERS) == choices(Tracker)
    monkeypatch.setitem(sys.modules, "wandb", None)
    for tracker, says in {
        "tensorbord": "is not a list of tensorboard, trackio, wandb. Did you mean tensorboard?",
        "wandb": "needs a library that is not installed; pip install 'nearkin[wandb]'",
    }.items():
        line = refusal(2, "train", "digits", "--track", tracker, "-o", tmp_path / "run")
        assert line == f"error: --track {tracker} {says}"
        assert not (tmp_path / "run").exists()


LOST = """
class Run:
    def log(self, metrics, step):
        if step == 3:
            raise ConnectionError("no server")

def init(**settings):
    return Run()

def finish():
    pass
"""


def test_a_tracker_that_fails_costs_a_warning_and_not_the_training(tmp_path, monkeypatch):
    """TensorBoard cannot start, and the server of Trackio goes away midway."""
    need("tensorboard")
    (tmp_path / "trackio.py").write_text(LOST)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "trackio", None)  # so that it is not there afterwards
    monkeypatch.delitem(sys.modules, "trackio")
    run = tmp_path / "run"

    class Breaking(Listener):
        def info(self, text):
            super().info(text)
            if text.startswith("augmented views"):
                (run / "tb").write_text("a file where the folder should be")

    log = Breaking()
    nearkin.train(PIXELS, output=run, track=["tensorboard", "trackio"], verbose=log, **SETTINGS)
    first, second = (line for line in log.lines if line.startswith("warning: t"))
    assert first.startswith("warning: tensorboard failed (")
    assert second.startswith("warning: trackio failed (ConnectionError: no server); the training")
    assert (run / "summary.json").exists()


def test_a_finished_run_that_is_resumed_opens_no_tracker(tmp_path):
    need("tensorboard")
    log, run = Listener(), {"output": tmp_path / "run"}
    nearkin.train(PIXELS, **run, **SETTINGS)
    nearkin.train(PIXELS, **run, resume=True, track=["tensorboard"], verbose=log, **SETTINGS)
    assert "already complete" in log.lines
    assert not (tmp_path / "run" / "tb").exists()
