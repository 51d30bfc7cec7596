"""Which images `nearkin discover` takes: labels of a table or of folders, copies, broken files."""

import html
import re
import shlex
import shutil
import tomllib
from collections import Counter
from dataclasses import fields

import builders
import numpy as np
import pytest
from discoveries import (
    FEW,
    LEAST,
    SHORT,
    close,
    discover,
    held_out,
    names,
    rows,
    save,
    strict_json,
    table,
    words,
)
from nearkin_command import run
from safetensors.numpy import load_file

from nearkin.data.rng import permutation
from nearkin.metrics.metric import Metric
from nearkin.run import auto as build
from nearkin.run.folder import RunFolder

DIGITS = ["digit 0", "digit 1", "digit 2"]


def test_images_may_be_labeled_by_a_table_and_copies_are_sorted_into_the_classes(discovery, flat):
    labeled = {f"{n}-{row:02d}.png" for n in range(3) for row in range(8)}
    assert names(discovery) == {path.name for path in flat.iterdir()} - labeled
    summary = strict_json(discovery / "summary.json")
    assert (summary["known"], summary["labeled"]) == (DIGITS, 24)
    kept = {field.name for field in fields(Metric)} - {"outcome"}
    assert set(summary["scores"]["nearkin"][0]) == kept
    copies = discovery.parent / "copies"
    sizes = Counter(row["cluster"] for row in rows(discovery / "assignments.csv"))
    written = {folder.name: len(list(folder.iterdir())) for folder in copies.iterdir()}
    assert written == sizes
    for row in rows(discovery / "assignments.csv"):
        copy = copies / row["cluster"] / row["path"]
        assert copy.read_bytes() == (flat / row["path"]).read_bytes()


def test_images_may_be_labeled_by_class_folders_outside_and_copies_are_recognized(
    pixels, flat, encoder, tmp_path
):
    """Of each class, four files are copies of the data and two are not."""
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "run"
    for number in range(3):
        noise = np.random.default_rng(number).integers(0, 9, (2, 8, 8), dtype=np.uint8)
        new = pixels[number][:2] // 2 + noise
        folder = save(elsewhere / f"digit {number}", {f"new{row}.png": new[row] for row in (0, 1)})
        for row in range(4):
            shutil.copy(flat / f"{number}-{row:02d}.png", folder / f"copy{row}.png")
    settings = ["--labeled", elsewhere, "--encoder", encoder, *LEAST]
    assert run("discover", flat, "-o", out, *settings) == 0
    copied = {f"{number}-{row:02d}.png" for number in range(3) for row in range(4)}
    assert names(out) == {path.name for path in flat.iterdir()} - copied
    assert strict_json(out / "summary.json")["labeled"] == 3 * (4 + 2)


def test_images_that_cannot_be_read_are_listed_and_not_assigned(
    flat, labels, encoder, tmp_path, refusal
):
    data, out = shutil.copytree(flat, tmp_path / "images"), tmp_path / "run"
    whole = (data / "4-00.png").read_bytes()
    (data / "cut.png").write_bytes(whole[: len(whole) * 2 // 3])
    (data / "text.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    settings = ["discover", data, "--labeled", labels, "--encoder", encoder, *LEAST]
    assert run(*settings, "-o", out) == 0
    assert {row["path"] for row in rows(out / "bad_files.csv")} == {"cut.png", "text.png"}
    labeled = {row["path"] for row in rows(labels)}
    assert names(out) == {path.name for path in flat.iterdir()} - labeled
    note = "left out: 1 image that cannot be decoded (bad_files.csv), such as 'cut.png'"
    assert note in (out / "train.log").read_text()
    noted = [note["examples"] for note in strict_json(out / "summary.json")["notes"]]
    assert noted == [["cut.png"]]
    # Headers promise enough; the pixels of a whole known class cannot be decoded.
    for path in data.glob("2-0[0-7].png"):
        content = path.read_bytes()
        path.write_bytes(content[: content.index(b"IDAT") + 8])
    line = refusal(3, *settings, "-o", tmp_path / "strict")
    assert "10 of 82 images are unreadable" in line
    out = tmp_path / "other"
    line = refusal(3, *settings, "-o", out, "--max-bad", "0.2")
    assert "all labeled images of 1 known class are held out ('digit 2') or cannot be read" in line
    assert {row["path"][0] for row in rows(out / "bad_files.csv")} == {"2", "c", "t"}
    assert not (out / "stages" / "known").exists()


def test_one_labeled_image_of_each_class_is_enough(flat, parts, encoder, tmp_path):
    """Even if trials would hide all of them: nothing is tried then, and the log says so."""
    hidden = np.flatnonzero(permutation(0, 1, len(parts.images)) % 2 == 0)
    usable = [parts.images.names[row] for row in np.intersect1d(hidden, parts.train_rows)]
    first = {name[0]: name for name in reversed(usable)}
    written = [(first[digit], f"digit {digit}") for digit in "0123"]
    labels, out = table(tmp_path / "labels.csv", written), tmp_path / "run"
    settings = ["--labeled", labels, "--encoder", encoder, *FEW, "--classes", 1, "--report"]
    assert discover(flat, "-o", out, *settings) == 0
    log = (out / "train.log").read_text(encoding="utf-8")
    assert "4 of 4 known classes have one image only" in log
    assert "too few labels to hold known classes out" in log
    assert strict_json(out / "summary.json")["calibration"] is None
    assert "too few known classes or labels to hold some out" in (out / "report.html").read_text()


def test_the_first_stage_learns_without_labels_if_no_encoder_is_given(
    pixels, tmp_path, monkeypatch
):
    """Nor does it see what is held out."""
    monkeypatch.setattr(build, "MOST_EPOCHS", 2)
    some = {f"{n}-{row}.png": p for n in range(4) for row, p in enumerate(pixels[n][:6])}
    data, out = save(tmp_path / "images", some), tmp_path / "run"
    written = [(f"{n}-{row}.png", n) for n in (0, 1) for row in range(4)]
    labeled = table(tmp_path / "labels.csv", written)
    settings = ["--labeled", labeled, "--val", 0.2, *LEAST]
    assert run("discover", data, "-o", out, *settings) == 0
    stored = tomllib.loads((out / "config.toml").read_text())
    assert (stored["method"], stored["encoder"]) == ("simclr", "auto"), "not what was decided"
    settings = tomllib.loads((out / "stages" / "features" / "config.toml").read_text())
    assert (settings["method"], settings["labels"], settings["known"]) == ("simclr", "none", [])
    held = strict_json(out / "summary.json")["held_out"]
    assert 0 < held == len(held_out(out / "stages" / "features"))
    own, final = (path / "encoder.safetensors" for path in (out / "stages" / "features", out))
    assert own.stat().st_size == pytest.approx(final.stat().st_size, rel=0.01)


def test_the_command_for_another_number_of_classes_takes_the_encoder_that_was_trained(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(build, "MOST_EPOCHS", 1)
    data = builders.save_digits(tmp_path / "digits.npz", 60)
    out, again = tmp_path / "run", tmp_path / "again"
    settings = words("--known 0,1,2,3 --val 0 --method simclr --max-time 1s --report")
    settings += ["--augment", "moco_cifar"]  # which the training of the encoder takes over
    assert run("discover", data, "-o", out, *settings, *SHORT, "--epochs", 1) == 0
    text = (out / "stages" / "page.json").read_text(encoding="utf-8")
    command = re.search(r"nearkin discover [^\"]*--classes [^\"]*", text)[0]
    encoder = out / "stages" / "features"
    assert RunFolder(encoder).settings()[0].augment == "moco_cifar"
    assert f"take another with --encoder {encoder} " in (out / "train.log").read_text()
    assert run(*shlex.split(command)[1:], "-o", again, "-q") == 0
    assert not (again / "stages" / "features").exists(), "another encoder was trained"
    assert tomllib.loads((again / "config.toml").read_text())["encoder"] == str(encoder)


TRAINED = ["--epochs", 1]


@pytest.mark.parametrize("layers", ["last:1", "last:1,top"])
def test_parts_of_a_network_may_learn_and_new_images_are_sorted_by_what_was_learned(
    folders, encoder, tmp_path, layers
):
    out = tmp_path / "run"
    settings = ["--known", "cat,dog", "--encoder", encoder, *LEAST, *TRAINED]
    assert discover(folders, "-o", out, *settings, "--train-layers", layers) == 0
    start, learned = (load_file(f / "encoder.safetensors") for f in (encoder, out))
    parameters = [key for key in start if key.endswith(("weight", "bias"))]
    moved = {key.split(".")[0] for key in parameters if (start[key] != learned[key]).any()}
    assert moved == {"6"}
    assert run("predict", out, folders, "-o", tmp_path / "again.csv") == 0
    again = {row["path"]: row for row in rows(tmp_path / "again.csv")}
    expected = rows(out / "assignments.csv")
    assert {row["path"].split("/")[0] for row in expected} == {"eel", "fox"}
    close([again[row["path"]] for row in expected], expected)


def test_scores_of_a_network_are_calibrated_by_trainings_of_that_network(
    tmp_path, pixels, encoder
):
    """With some known classes hidden; trials on top of the frozen one are not asked."""
    images, out = tmp_path / "images", tmp_path / "run"
    for number, label in enumerate(("ant", "bee", "cat", "dog", "eel")):
        save(images / label, {f"{row}.png": p for row, p in enumerate(pixels[number][:8])})
    settings = ["--known", "ant,bee,cat,dog", "--encoder", encoder, *LEAST, *TRAINED]
    assert discover(images, "-o", out, *settings, "--train-layers", "last:1") == 0
    assert (out / "stages" / "calibration-class" / "metrics.csv").exists()
    (trial,) = (out / "stages" / "calibration").iterdir()
    frozen = out / "stages" / "trials" / trial.name
    calibration = strict_json(out / "summary.json")["calibration"]
    with np.load(trial) as used, np.load(frozen) as other:
        assert calibration["num_images"] == len(used["correct"])
        assert not np.array_equal(used["probability"], other["probability"])


def test_a_class_that_is_found_has_the_name_of_no_true_one(flat, labels, encoder, tmp_path):
    """Or rows and columns of the confusion would have equal names that mean different things."""
    called = [*DIGITS, "new-1", "new-3"]
    written = [(path.name, called[int(path.name[0])]) for path in flat.iterdir()]
    settings = ["--truth", table(tmp_path / "truth.csv", written), "--labeled", labels]
    out = tmp_path / "run"
    assert discover(flat, "-o", out, *settings, "--encoder", encoder, *LEAST) == 0
    novel = [row["cluster"] for row in rows(out / "clusters.csv") if row["kind"] == "novel"]
    assert novel == ["new-2", "new-4"]


def test_one_label_of_each_class_is_enough_and_names_may_be_in_any_script(flat, encoder, tmp_path):
    """Four classes of one label, files and classes with names that people and machines give."""
    known = ["кошка", "猫 \N{CAT FACE}", "قطة", 'c, "d"; = #1']
    own = ["изображение", "画像 {}", "صورة", "a'b", "%d"]
    images = {f"{own[int(path.name[0])]} {path.name}": path for path in sorted(flat.iterdir())}
    data = tmp_path / "данные"
    data.mkdir()
    for name, path in images.items():
        shutil.copy(path, data / name)
    labeled = [(f"{own[n]} {n}-00.png", known[n]) for n in range(4)]
    out, copies = tmp_path / "結果", tmp_path / "отсортировано"
    typed = ["--labeled", table(tmp_path / "метки.csv", labeled), "--encoder", encoder, *LEAST]
    assert discover(data, "-o", out, *typed, "--copy-to", copies, "--report") == 0
    summary = strict_json(out / "summary.json")
    assert (sorted(summary["known"]), summary["labeled"]) == (sorted(known), 4)
    assert names(out) == images.keys() - {path for path, _ in labeled}
    found = Counter(row["cluster"] for row in rows(out / "assignments.csv"))
    assert found.keys() <= {*known, "new-1", "new-2"}
    assert {row["cluster"]: int(row["size"]) for row in rows(out / "clusters.csv")} == {
        **dict.fromkeys(("new-1", "new-2"), 0), **found,
    }  # fmt: skip
    assert sum(path.is_file() for path in copies.rglob("*")) == found.total()
    page = (out / "report.html").read_text(encoding="utf-8")
    assert all(html.escape(name) in page for name in known)
    assert run("predict", out, data, "-o", tmp_path / "再.csv") == 0
    assert [row["path"] for row in rows(tmp_path / "再.csv")] == sorted(images)
