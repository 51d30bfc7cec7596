"""A discovery in a folder that has one: resumed to the same bytes, overwritten, or refused."""

import os
import re
import shutil
import signal
from pathlib import Path

import kills
import pytest
from discoveries import (
    LEAST,
    LEAST_NCD,
    bytes_of,
    discover,
    held_out,
    names,
    once,
    rows,
    strict_json,
    table,
    write_rows,
)
from nearkin_command import run

from nearkin.data.opening import open_images
from nearkin.data.split import split_images
from nearkin.run.data import note_data
from nearkin.run.folder import RunFolder

RESULT = ("assignments.csv", "clusters.csv", "classifier.safetensors")


@pytest.fixture
def unfinished(discovery, tmp_path):
    """A copy of a discovery that has stopped before its summary."""
    out = Path(shutil.copytree(discovery, tmp_path / "run"))
    (out / "summary.json").unlink()
    return out


def test_a_folder_with_a_discovery_is_refused_and_overwritten_if_asked(
    folders, encoder, tmp_path, refusal
):
    out = tmp_path / "run"
    settings = ["discover", folders, "-o", out, "--encoder", encoder, *LEAST]
    assert run(*settings, "--known", "cat,dog") == 0
    (out / "mine.txt").write_text("mine")
    line = refusal(4, *settings, "--known", "eel,fox")
    assert "--resume" in line
    assert "--overwrite" in line
    assert run(*settings, "--known", "eel,fox", "--overwrite") == 0
    assert strict_json(out / "summary.json")["known"] == ["eel", "fox"]
    assert (out / "mine.txt").read_text() == "mine"


def stopping(stage, number):
    """Let a run get a signal after the third step of that stage."""

    def wrap(after):
        def call(record, done, *more):
            after(record, done, *more)
            if done == 3 and record.lead.folder.path.name == stage:
                os.kill(os.getpid(), number)

        return call

    return lambda: kills.replace("nearkin.training.fit.Record.after", wrap)


def test_a_discovery_that_is_killed_twice_ends_where_the_unbroken_one_ends(
    folders, encoder, tmp_path
):
    """SIGKILL in the last stage's first training, SIGTERM in its second, which saves."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = ["--encoder", encoder, "--known", "cat,dog", "--mode", "ncd", *LEAST_NCD]
    command = once("discover", folders, *settings, "--epochs", 6)
    typed = [*command, "-o", str(broken), "--resume"]
    for stage, number, code in (
        ("ncl-0", signal.SIGKILL, -signal.SIGKILL),
        ("ncl-1", signal.SIGTERM, 143),
    ):
        assert kills.finish(kills.start(typed, stopping(stage, number))) == code
    assert not (broken / "assignments.csv").exists()
    assert run(*typed) == 0
    assert run(*command, "-o", whole) == 0
    files = [
        *RESULT,
        *(f"stages/{stage}/metrics.csv" for stage in ("known", "ncl-0", "ncl-1", "ncl-2")),
    ]
    assert bytes_of(broken, *files) == bytes_of(whole, *files)
    resumed = re.findall(r"resuming after step (\d+) of (\d+)", (broken / "train.log").read_text())
    assert [step for step, total in resumed if step != total] == ["3"]
    assert [step for step, total in resumed if step == total], "finished stages were done again"


def test_a_discovery_that_is_killed_before_its_encoder_has_settings_goes_on(folders, tmp_path):
    """Its folder has the images by then."""
    out = tmp_path / "run"
    settings = ["--method", "simclr", "--max-time", "1s", "--known", "cat,dog", *LEAST]
    typed = once("discover", folders, "-o", out, *settings, "--resume")

    def prepare():
        kills.replace("nearkin.training.session.with_epochs", lambda _: lambda *_: kills.die())

    assert kills.finish(kills.start(typed, prepare)) == -signal.SIGKILL
    stage = RunFolder(out).stage("features")
    assert stage.data.exists()
    assert not stage.config.exists()
    assert run(*typed) == 0
    assert stage.summary.exists()


def test_a_run_that_ended_while_it_copied_goes_on_with_another_folder(
    discovery, unfinished, flat, labels, encoder, tmp_path, refusal
):
    """But the copies of the first time do not stand in the way of the same command."""
    copies, other = discovery.parent / "copies", tmp_path / "copies"
    settings = ["--labeled", labels, "--encoder", encoder, *LEAST, "--resume"]
    assert discover(flat, "-o", discovery, *settings, "--copy-to", copies) == 0
    typed = once("discover", flat, "-o", unfinished, *settings)
    edited = [row | {"label": "mine"} for row in rows(unfinished / "to_label.csv")]
    write_rows(unfinished / "to_label.csv", edited)  # the tables were there before the copies
    assert "give a new folder" in refusal(4, *typed, "--copy-to", copies)
    assert run(*typed, "--copy-to", other) == 0
    assert {path.name for path in other.rglob("*.png")} == names(unfinished)
    assert rows(unfinished / "to_label.csv") == edited


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_that_is_killed_while_it_copies_finishes_its_copies_from_anywhere(
    discovery, unfinished, flat, labels, encoder, tmp_path, monkeypatch, refusal, finished
):
    """With or without the option, which is a relative path; others' copies stay in the way."""
    monkeypatch.chdir(tmp_path)
    if finished:
        shutil.copy(discovery / "summary.json", unfinished)
    typed = once("discover", flat, "-o", unfinished, "--labeled", labels, "--encoder", encoder,
                 *LEAST, "--resume")  # fmt: skip
    named, aim = "nearkin.run.copies._copy", "pathlib.Path.replace"
    killed = kills.start(
        [*typed, "--copy-to", "copies"],
        lambda: kills.set_up(kills.Aim(named, aim, "before"), "simclr", 5),
    )
    assert kills.finish(killed) == -signal.SIGKILL
    copies = tmp_path / "copies"
    assert (len(list(copies.rglob("*.png"))), len(kills.temporary(copies))) == (4, 1)
    monkeypatch.chdir("/")
    again = [] if finished else ["--copy-to", copies]
    assert run(*typed, *again) == 0
    of = {f"{row['cluster']}/{row['path']}" for row in rows(unfinished / "assignments.csv")}
    assert {str(path.relative_to(copies)) for path in copies.rglob("*.*")} == of
    for path in copies.rglob("*.png"):
        assert path.read_bytes() == (flat / path.name).read_bytes()
    assert not RunFolder(unfinished).copying.exists()
    (copies / "mine.txt").write_text("mine")
    assert run(*typed, "--copy-to", copies) == 0  # already complete
    (unfinished / "summary.json").unlink()
    assert "give a new folder" in refusal(4, *typed)


def test_a_finished_run_makes_what_is_asked_of_it_later(
    discovery, flat, labels, encoder, tmp_path
):
    out, copies = shutil.copytree(discovery, tmp_path / "run"), tmp_path / "copies"
    (out / "report.html").unlink(missing_ok=True)
    settings = ["--labeled", labels, "--encoder", encoder, *LEAST, "--resume"]
    assert discover(flat, "-o", out, *settings, "--copy-to", copies, "--report") == 0
    assert {path.name for path in copies.rglob("*.png")} == names(out)
    assert (out / "report.html").exists()
    assert bytes_of(out, *RESULT) == bytes_of(discovery, *RESULT)


def test_what_is_held_out_stays_so_where_the_run_that_decided_it_is_gone(
    flat, labels, encoder, tmp_path
):
    """It was another seed than that of the discovery, so its settings do not say it."""
    gone = Path(shutil.copytree(encoder, tmp_path / "encoder"))
    first, second = tmp_path / "first", tmp_path / "second"
    for name in ("data.json", "config.toml"):  # as if it had been trained on these files
        (gone / name).unlink()
    note_data(RunFolder(gone), split_images(open_images(str(flat)), 0.1, 0))
    shutil.copy(encoder / "config.toml", gone)
    seed = 2**32 - 1  # the largest; the last stage has the next ones, too
    settings = ["discover", flat, *LEAST, "--seed", seed]
    started = [*settings, "-o", first, "--labeled", labels, "--encoder", gone]
    assert run(*started) == 0
    kept = held_out(first)
    own = split_images(open_images(str(flat)), 0.1, seed)
    assert kept != {own.images.names[row] for row in own.test_rows}
    shutil.rmtree(gone)
    (first / "summary.json").unlink()
    assert run(*started, "--resume") == 0
    assert held_out(first) == kept
    asked = rows(first / "to_label.csv")
    labeled = [row | {"label": "another digit"} for row in asked[:2]]
    write_rows(first / "to_label.csv", labeled + asked[2:])
    assert run(*settings, "-o", second, "--accept", first) == 0
    assert held_out(second) == kept
    # The images of a run are found again without the one that it started from.
    shutil.rmtree(first)
    assert run("explore", second, "--write") == 0


def test_a_run_is_not_resumed_with_other_settings_or_labels(
    discovery, flat, labels, encoder, refusal, unfinished, tmp_path
):
    settings = ["--labeled", labels, "--encoder", encoder, *LEAST, "--epochs", 3, "--resume"]
    before = (discovery / "config.toml").read_bytes()
    line = refusal(2, *once("discover", flat, "-o", discovery, *settings))
    assert "--epochs 2 became 3" in line
    assert (discovery / "config.toml").read_bytes() == before
    changed = tmp_path / "labels.csv"
    shutil.rmtree(unfinished / "stages" / "simgcd-0")
    (unfinished / "assignments.csv").unlink()
    swapped = {"digit 0": "digit 1", "digit 1": "digit 0", "digit 2": "digit 2"}
    config = (unfinished / "config.toml").read_text(encoding="utf-8")
    config = config.replace(str(labels), str(changed))
    (unfinished / "config.toml").write_text(config, encoding="utf-8")
    written = [(row["path"], row["label"]) for row in rows(labels)]
    settings = ["--labeled", changed, "--encoder", encoder, *LEAST, "--resume"]
    typed = once("discover", flat, "-o", unfinished, *settings, "--copy-to", tmp_path / "copies")
    table(changed, [(path, swapped[name]) for path, name in written])
    assert "the labels have changed since the run was started" in refusal(5, *typed)
    table(changed, written)
    assert run(*typed) == 0
    assert bytes_of(unfinished, *RESULT) == bytes_of(discovery, *RESULT)
