"""`nearkin classify` from labels to files: real commands on real digits, with a small encoder."""

import csv
import json
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import environment
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits

import nearkin
from nearkin.classification.report import lines
from nearkin.cli import main
from nearkin.config import ClassifyConfig
from nearkin.data.opening import open_images
from nearkin.data.rng import seeded
from nearkin.discovery.classifier import read_classifier
from nearkin.encoders.encoder import load, write_encoder
from nearkin.networks.backbone import build_backbone

TRAININGS = ("linear", "attentive", "last:1", "all")
SLOW = pytest.mark.slow
TUNED = {"epochs": 2, "lr": 1e-3, "batch_size": 32}


def digits(path: Path, *, train: int = 120, test: int = 60, permuted: bool = False) -> Path:
    x, y = load_digits(return_X_y=True)
    pixels = np.round(x.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    held_out = y[train : train + test]
    if permuted:
        held_out = np.random.default_rng(0).permutation(held_out)
    np.savez(
        path,
        x_train=pixels[:train],
        y_train=y[:train],
        x_test=pixels[train : train + test],
        y_test=held_out,
    )
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    with seeded(0, torch.device("cpu")):
        backbone = build_backbone("tiny", 8)
    path = tmp_path_factory.mktemp("encoder") / "encoder.safetensors"
    write_encoder(path, backbone, {"backbone": "tiny", "image_size": 8})
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return digits(tmp_path_factory.mktemp("data") / "digits.npz")


def settings(layers: str) -> dict[str, object]:
    tuned = {} if layers in ("linear", "attentive") else TUNED
    return {"train_layers": layers, "baselines": False, "workers": 0, **tuned}


def run(data: Path, encoder: Path, out: Path, layers: str, **more: object) -> Path:
    nearkin.classify(str(data), out=out, from_run=str(encoder), **settings(layers), **more)
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data, encoder) -> dict[str, Path]:
    """A finished run of each training, by its name."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: run(data, encoder, folder / name.replace(":", "-"), name) for name in TRAININGS}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured(out: Path, name: str) -> float:
    summary = json.loads((out / "summary.json").read_text())
    return summary["measures"]["classifier"][name]["value"]


@pytest.mark.parametrize("layers", TRAININGS)
def test_every_training_learns_digits(runs, layers):
    # Six steps of fine-tuning are enough to be far from chance, not to be good.
    least = 0.75 if layers in ("linear", "attentive") else 0.2
    assert measured(runs[layers], "accuracy") > least
    assert measured(runs[layers], "balanced accuracy") > least - 0.05
    assert len(rows(runs[layers] / "assignments.csv")) == 60


@pytest.mark.parametrize("layers", TRAININGS)
def test_assign_gives_the_classes_and_scores_of_the_run(runs, data, layers):
    """The files hold all that the predictions come from."""
    assigned = nearkin.assign(runs[layers], str(data), workers=0).to_dicts()
    now = {row["path"]: row for row in assigned}
    for row in rows(runs[layers] / "assignments.csv"):
        same = now[row["path"]]
        assert same["cluster"] == row["cluster"]
        assert same["score"] == pytest.approx(float(row["score"]), abs=2e-4)
        assert same["nearest_known"] == row["nearest_known"]


@pytest.mark.parametrize(
    "layers", [*TRAININGS[:2], *(pytest.param(each, marks=SLOW) for each in TRAININGS[2:])]
)
def test_labels_of_test_images_decide_nothing(runs, encoder, tmp_path, layers):
    """Permuted, they change the scores and not a bit of what was trained."""
    permuted = digits(tmp_path / "digits.npz", permuted=True)
    out = run(permuted, encoder, tmp_path / "run", layers)
    for file in ("classifier.safetensors", "encoder.safetensors", "assignments.csv"):
        assert (out / file).read_bytes() == (runs[layers] / file).read_bytes(), file
    assert measured(out, "accuracy") < 0.3


def test_fine_tuning_leaves_the_other_parts_as_they_are(runs, encoder):
    """Their batch-norm statistics too, which follow every batch in training mode."""
    before, after = load_file(encoder), load_file(runs["last:1"] / "encoder.safetensors")
    trained = {name for name, x in after.items() if not torch.equal(x, before[name])}
    assert trained
    assert all(name.startswith("6.") for name in trained)
    assert "trained the last block of the encoder" in (runs["last:1"] / "report.html").read_text()


@pytest.mark.slow
def test_low_layers_learn_the_more_slowly_the_smaller_the_decay(runs, data, encoder, tmp_path):
    """The lowest layer learns at .75 to the power of its depth, or at a tenth to that power."""
    slow = run(data, encoder, tmp_path / "run", "all", layer_decay=0.1)
    before = load_file(encoder)["0.weight"]
    moved = {
        out: (load_file(out / "encoder.safetensors")["0.weight"] - before).abs().mean().item()
        for out in (runs["all"], slow)
    }
    assert 0 < moved[slow] < moved[runs["all"]] / 20


KILLED = """
import os, signal, sys
import {module} as module
real, count = module.{name}, 0
def dying(*arguments, **options):
    global count
    count += 1
    if count == {nth}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **options)
module.{name} = dying
from nearkin.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("layers", "module", "name", "nth"),
    [
        pytest.param("linear", "nearkin.commands.classify", "write_encoder", 1, marks=SLOW),
        ("attentive", "nearkin.classification.report", "write_embeddings", 1),
        ("last:1", "nearkin.training.checkpoint", "save", 2),
        pytest.param("all", "nearkin.training.checkpoint", "save", 5, marks=SLOW),
    ],
    ids=TRAININGS,
)
def test_a_killed_run_goes_on_to_the_same_bytes(
    runs, data, encoder, tmp_path, layers, module, name, nth
):
    """Without the encoder that it was started from, which is elsewhere and may be gone."""
    source = tmp_path / "source.safetensors"
    shutil.copy(encoder, source)
    command = ["classify", str(data), "--from", str(source), "--train-layers", layers]
    command += ["--no-baselines", "--workers", "0", "--out", str(tmp_path / "run"), "-q"]
    if layers in ("last:1", "all"):
        # Saving changes nothing, so the unbroken run may save less often.
        command += [*["--epochs", "2", "--lr", "0.001", "--batch-size", "32", "--save-every", "2"]]
    program = KILLED.format(module=module, name=name, nth=nth)
    killed = subprocess.run(
        [sys.executable, "-c", program, *command],
        env=environment(),
        capture_output=True,
        timeout=300,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not (tmp_path / "run" / "summary.json").exists()
    source.unlink()
    assert main([*command, "--resume"]) == 0
    for file in ("classifier.safetensors", "encoder.safetensors", "assignments.csv"):
        assert (tmp_path / "run" / file).read_bytes() == (runs[layers] / file).read_bytes(), file


def few_labels(data: Path, path: Path, per_class: int, stray: bool = False) -> Path:
    """A table that labels some training images of each class, and all test images."""
    images, counts = open_images(str(data)), dict[int, int]()
    with path.open("w", encoding="utf-8") as file:
        file.write("path,label\n")
        for name, label, side in zip(images.names, images.labels.tolist(), images.splits):
            counts[label] = counts.get(label, 0) + (side == "train")
            if side == "test" or counts[label] <= per_class:
                file.write(f"{name},d{label}\n")
        if stray:
            file.write("elsewhere/1.png,d1\n")
    return path


def test_few_labels_classify_the_rest(data, encoder, tmp_path, capsys):
    """The floors, the page and the JSON."""
    table = few_labels(data, tmp_path / "labels.csv", 3, stray=True)
    out = tmp_path / "run"
    command = ["classify", str(data), "--from", str(encoder), "--labels", str(table)]
    assert main([*command, "--out", str(out), "--workers", "0", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["sizes"] == {"train": 30, "test": 60, "unlabeled": 90}
    assert len(rows(out / "assignments.csv")) == 150
    measures = summary["measures"]
    assert {*measures} == {
        "classifier",
        "kNN, frozen features",
        "untrained encoder",
        "raw pixels",
        "majority class",
    }
    assert measures["majority class"]["accuracy"]["value"] < 0.25
    assert measures["classifier"]["accuracy"]["value"] > 0.5
    assert summary["calibration"]["num_images"] == 30
    assert summary["learning_curve"].keys() <= {"10", "20"}
    page = (out / "report.html").read_text()
    for words in ("Least certain images", "perfectly calibrated", "Accuracy with fewer labels"):
        assert words in page
    log = (out / "train.log").read_text()
    assert "1 of 91 rows belong to no usable image" in log
    assert main(["report", str(out)]) == 0
    assert main(["export", str(out)]) == 0
    capsys.readouterr()
    assert main(["compare", str(out), str(encoder.parent)]) == 2
    assert main([*command, "--out", str(out), "--workers", "0", "--resume", "-q"]) == 0


def test_what_the_run_of_the_encoder_held_out_is_held_out_again(encoder, tmp_path, capsys):
    pixels, labels = load_digits(return_X_y=True)
    pixels = np.round(pixels[:120].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    np.savez(tmp_path / "digits.npz", x=pixels, y=labels[:120])
    data, source, out = (str(tmp_path / name) for name in ("digits.npz", "source", "run"))
    held_out = nearkin.embed(encoder, data, out=source, val=0.25, workers=0).splits == "test"
    command = ["classify", data, "--from", source, "--out", out, "--no-baselines", "-q"]
    assert main([*command, "--val", "0.1"]) == 2
    assert "--val 0.1, but " in capsys.readouterr().err
    assert not Path(out).exists()
    assert main(command) == 0
    stored = tomllib.loads(Path(out, "config.toml").read_text())
    assert stored["val"] == 0.25
    assert json.loads(Path(out, "summary.json").read_text())["sizes"]["test"] == held_out.sum()
    shutil.rmtree(source)
    assert main([*command, "--resume"]) == 0


def test_labels_that_change_are_not_resumed_with(data, encoder, tmp_path, capsys):
    table = few_labels(data, tmp_path / "labels.csv", 2)
    command = ["classify", str(data), "--from", str(encoder), "--labels", str(table)]
    command += ["--out", str(tmp_path / "run"), "--no-baselines", "--workers", "0", "-q"]
    assert main(command) == 0
    few_labels(data, table, 3)
    capsys.readouterr()
    assert main([*command, "--resume"]) == 5
    assert "the labels have changed" in capsys.readouterr().err


def test_one_image_of_each_class_is_enough(data, encoder, tmp_path):
    table = few_labels(data, tmp_path / "labels.csv", 1)
    out = run(data, encoder, tmp_path / "run", "linear", labels=str(table))
    assert read_classifier(out / "classifier.safetensors").calibration is None
    summary = json.loads((out / "summary.json").read_text())
    assert "the default" in summary["protocol"]
    assert "10 classes with one training image" in (out / "train.log").read_text()


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        ((), 2, "give --from ENCODER"),
        (
            ("--from", "ENCODER", "--train-layers", "last:99"),
            2,
            "tiny has 2 blocks; give at most last:2",
        ),
        (
            ("--from", "ENCODER", "--train-layers", "first"),
            2,
            "is not linear, attentive, last:N or all",
        ),
        (("--from", "ENCODER", "--epochs", "3"), 2, "--epochs is of fine-tuning"),
        (("--from", "ENCODER", "--layer-decay", "0.5"), 2, "--layer-decay is of fine-tuning"),
        (("--from", "absent"), 2, "absent"),
        (("--from", "ENCODER", "--labels", "none"), 3, "no image has a label"),
        (("--from", "ENCODER", "--labels", "ONE"), 3, "all labeled training images are 'd1'"),
        (
            ("--from", "ENCODER", "--labels", "STRAY"),
            3,
            "write the paths as they are below the data",
        ),
        (("--from", "ENCODER", "--lables", "x"), 2, "lables"),
        (("--from", "ENCODER", "--labels", "ONE", "--labeled", "ONE"), 2, "exclude each other"),
    ],
    ids=[
        "encoder",
        "last:99",
        "word",
        "epochs",
        "decay",
        "absent",
        "none",
        "one",
        "stray",
        "typo",
        "both",
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    data, encoder, tmp_path, capsys, more, code, message
):
    (tmp_path / "one.csv").write_text("path,label\ntrain/000,d1\ntrain/001,d1\n")
    (tmp_path / "stray.csv").write_text("path,label\na.png,d1\nb.png,d2\n")
    words = {"ENCODER": encoder, "ONE": tmp_path / "one.csv", "STRAY": tmp_path / "stray.csv"}
    command = ["classify", str(data), *(str(words.get(word, word)) for word in more)]
    assert main([*command, "--out", str(tmp_path / "run")]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert lines[-1].startswith("error: ")


@pytest.mark.parametrize("layers", ["linear", "attentive"])
@pytest.mark.parametrize(
    ("name", "seed", "size"),
    [("small", 0, 8), ("tiny", 1, 8), ("tiny", 0, 16)],
    ids=["features", "weights", "preprocessing"],
)
def test_another_encoder_is_refused(runs, data, tmp_path, capsys, layers, name, seed, size):
    out = tmp_path / "run"
    shutil.copytree(runs[layers], out)
    with seeded(seed, torch.device("cpu")):
        other = build_backbone(name, size)
    write_encoder(out / "encoder.safetensors", other, {"backbone": name, "image_size": size})
    assert main(["assign", str(out), str(data), "-o", str(tmp_path / "a.csv")]) == 5
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "classifier.safetensors is of another encoder" in line
    assert "classify again" in line
    assert not (tmp_path / "a.csv").exists()


def test_a_classifier_that_names_no_encoder_is_read(runs, data, tmp_path):
    """As those of format 1; it may be applied to any that has as many features."""
    out = tmp_path / "run"
    shutil.copytree(runs["linear"], out)
    path = out / "classifier.safetensors"
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["nearkin"])
    assert header.pop("encoder") == load(runs["linear"]).digest
    save_file(load_file(path), path, {"nearkin": json.dumps(header)})
    assert read_classifier(path).digest == ""
    now, before = (nearkin.assign(each, str(data), workers=0) for each in (out, runs["linear"]))
    assert now.to_dicts() == before.to_dicts()


def test_images_like_none_of_the_classes_are_flagged(runs, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    flags = [row["flag"] for row in nearkin.assign(runs["linear"], noise, workers=0).to_dicts()]
    own = [row["flag"] for row in rows(runs["linear"] / "assignments.csv")]
    assert flags.count("unlike") > 30
    assert own.count("unlike") < 10


def test_a_summary_counts_the_images_of_each_flag(runs):
    summary = json.loads((runs["linear"] / "summary.json").read_text())
    printed = lines(summary | {"flags": {"unlike": 1, "border": 2}})
    assert {"unlike: 1 image", "border: 2 images"} <= {*printed}


def test_settings_of_a_run_read_back(runs):
    config, _ = nearkin.run.folder.RunFolder(runs["last:1"]).any_settings()
    assert isinstance(config, ClassifyConfig)
    assert config.train_layers == "last:1"
    assert nearkin.run.folder.RunFolder(runs["last:1"]).kind == "classification"
