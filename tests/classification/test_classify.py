"""`nearkin classify` from labels to files: real commands on real digits, with a small encoder."""

import itertools
import json
import re
import shutil
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import builders
import kills
import numpy as np
import pytest
import torch
from builders import contents, write_network
from discoveries import rows, save, strict_json, table
from kills import Aim
from nearkin_command import run
from safetensors.torch import load_file

import nearkin
from nearkin.classification import finetuning, probes
from nearkin.classification.data import open_labeled_data
from nearkin.classification.outcome import lines
from nearkin.classifier.classifier import read_classifier
from nearkin.commands.sources import images_of
from nearkin.config import ClassifyConfig, DiscoverConfig, EmbedConfig
from nearkin.data.opening import open_images
from nearkin.evaluation.table import open_table
from nearkin.metrics import attentive, probe
from nearkin.run.folder import RunFolder
from nearkin.run.opening import self_contained

TRAININGS = ("linear", "attentive", "last:1", "all")
RESULT = ("classifier.safetensors", "encoder.safetensors", "assignments.csv")
QUICK = ("--no-baselines", "--workers", "0", "-q")
SLOW = pytest.mark.slow
each_training = pytest.mark.parametrize(
    "layers", [*TRAININGS[:3], pytest.param("all", marks=SLOW)]
)


@pytest.fixture(scope="module", autouse=True)
def few_steps():
    """A tenth of the usual steps for each probe, of which a training fits dozens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "STEPS", 30)
        patch.setattr(attentive, "STEPS", 15)
        yield


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    return write_network(tmp_path_factory.mktemp("encoder") / "encoder.safetensors", size=8)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return builders.save_digits(tmp_path_factory.mktemp("data") / "digits.npz", 120, 60)


def classify(data: Path, encoder: Path, out: Path, layers: str, **more: object) -> Path:
    fixed = {"train_layers": layers, "baselines": False, "workers": 0, "report": False}
    if layers not in ("linear", "attentive"):
        fixed |= {"epochs": 2, "lr": 1e-3, "batch_size": 32}
    nearkin.classify(encoder, str(data), output=out, **fixed | more)
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data, encoder):
    """Gives the run of a training, which is made when the first asks; read, never written."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def trained(layers: str) -> Path:
        page = {"report": layers == "last:1"}
        return classify(data, encoder, folder / layers.replace(":", "-"), layers, **page)

    return trained


@pytest.fixture(scope="module")
def linear(trained) -> Path:
    return trained("linear")


def measured(out: Path, name: str) -> float:
    return strict_json(out / "summary.json")["metrics"]["classifier"][name]["value"]


@each_training
def test_every_training_learns_digits_and_assign_gives_the_same_classes(trained, data, layers):
    """The files hold all that the predictions come from."""
    # Six steps of fine-tuning are enough to be far from chance, not to be good.
    least = 0.75 if layers in ("linear", "attentive") else 0.2
    assert measured(trained(layers), "accuracy") > least
    assert measured(trained(layers), "balanced accuracy") > least - 0.05
    assigned = nearkin.predict(trained(layers), str(data), workers=0).to_dict()["images"]
    now = {row["path"]: row for row in assigned}
    written = rows(trained(layers) / "assignments.csv")
    assert len(written) == 60
    for row in written:
        same = now[row["path"]]
        assert (same["cluster"], same["nearest_known"]) == (row["cluster"], row["nearest_known"])
        assert same["score"] == pytest.approx(float(row["score"]), abs=2e-4)


@pytest.mark.parametrize(
    "layers", [*TRAININGS[:2], *(pytest.param(each, marks=SLOW) for each in TRAININGS[2:])]
)
def test_labels_of_test_images_decide_nothing(trained, data, encoder, tmp_path, layers):
    """Permuted, they change the scores and not a bit of what was trained."""
    stored = dict(np.load(data))
    permuted = np.random.default_rng(0).permutation(stored["y_test"])
    np.savez(tmp_path / "digits.npz", **stored | {"y_test": permuted})
    out = classify(tmp_path / "digits.npz", encoder, tmp_path / "run", layers)
    for file in RESULT:
        assert (out / file).read_bytes() == (trained(layers) / file).read_bytes(), file
    assert measured(out, "accuracy") < 0.3


def test_fine_tuning_leaves_the_other_parts_as_they_are(trained, encoder):
    """Their batch-norm statistics too, which follow every batch in training mode."""
    out = trained("last:1")
    before, after = load_file(encoder), load_file(out / "encoder.safetensors")
    changed = {name for name, x in after.items() if not torch.equal(x, before[name])}
    assert changed
    assert all(name.startswith("6.") for name in changed)
    assert "trained the last block of the encoder" in (out / "report.html").read_text()


def test_what_was_held_out_is_called_too_high_only_where_something_was_chosen_on_it(trained):
    for layers, chosen in (("linear", True), ("last:1", False)):  # with a given rate and epochs
        metrics = strict_json(trained(layers) / "summary.json")["metrics"]["classifier"]
        method = metrics["held-out training accuracy"]["protocol"]["method"]
        assert ("somewhat too high" in method) == chosen


def test_where_fine_tuning_is_no_better_the_classifier_is_the_linear_probe(
    data, encoder, tmp_path, monkeypatch
):
    """Which is no baseline of itself."""
    monkeypatch.setattr(finetuning, "STEPS", (3,))
    spoiling = {"lr": 5.0, "epochs": "auto", "baselines": True, "report": True}
    out = classify(data, encoder, tmp_path / "run", "last:1", **spoiling)
    summary = strict_json(out / "summary.json")
    assert "so that is kept" in summary["protocol"]
    assert "linear probe, frozen features" not in summary["metrics"]
    assert "trained a linear probe on the frozen encoder" in (out / "report.html").read_text()


@pytest.mark.slow
def test_low_layers_learn_the_more_slowly_the_smaller_the_decay(trained, data, encoder, tmp_path):
    """The lowest layer learns at .75 to the power of its depth, or at a tenth to that power."""
    usual, slow = trained("all"), classify(data, encoder, tmp_path / "run", "all", layer_decay=0.1)
    before, after, less = (
        load_file(path)["0.weight"]
        for path in (encoder, usual / "encoder.safetensors", slow / "encoder.safetensors")
    )
    assert 0 < (less - before).abs().mean() < (after - before).abs().mean() / 20


@pytest.mark.parametrize(
    ("layers", "at", "nth"),
    [
        pytest.param("linear", "nearkin.commands.classify.write_encoder", 1, marks=SLOW),
        ("attentive", "nearkin.classifier.report.write_embeddings", 1),
        ("last:1", kills.SAVE, 2),
        pytest.param("all", kills.SAVE, 5, marks=SLOW),
    ],
    ids=TRAININGS,
)
def test_a_killed_run_goes_on_to_the_same_bytes(trained, data, encoder, tmp_path, layers, at, nth):
    """Without the encoder that it was started from, which is elsewhere and may be gone."""
    out, source = tmp_path / "run", tmp_path / "source.safetensors"
    shutil.copy(encoder, source)
    command = ["classify", str(source), str(data), "--train-layers", layers]
    command += [*QUICK, "-o", str(out)]
    tuned = layers in ("last:1", "all")
    if tuned:  # saving changes nothing, so the unbroken run may save less often
        command += ["--epochs", "2", "--lr", "0.001", "--batch-size", "32", "--save-every", "2"]
    killed = kills.start(command, lambda: kills.set_up(Aim(at, at, "before"), "simclr", nth))
    assert kills.finish(killed) == -9
    assert not (out / "summary.json").exists()
    source.unlink()
    assert run(*command, "--resume") == 0
    for file in RESULT:
        assert (out / file).read_bytes() == (trained(layers) / file).read_bytes(), file
    log = (out / "train.log").read_text()
    assert "features of 180 images were kept in" in log, "features were computed again"
    resumed = re.findall(r"resuming after step (\d+) of (\d+)", log)
    assert [step for step, total in resumed if step != total] == (["2"] if tuned else [])


def few_labels(data: Path, path: Path, per_class: int, *stray: str) -> Path:
    """A table that labels some training images of each class, and all test images."""
    images, counts, written = open_images(str(data)), Counter(), ["path,label", *stray]
    for name, label, side in zip(images.names, images.labels.tolist(), images.splits):
        counts[label] += side == "train"
        if side == "test" or counts[label] <= per_class:
            written.append(f"{name},d{label}")
    path.write_text("\n".join([*written, ""]), encoding="utf-8")
    return path


def test_classes_that_only_test_images_have_are_not_learned_and_come_last(data, encoder, tmp_path):
    """They are the outliers that are known: how far away they are is scored."""
    table = few_labels(data, tmp_path / "labels.csv", 2)
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(x for x in lines if not re.match("train.*,d0", x)))
    opened = open_labeled_data(str(data), ClassifyConfig(labels=str(table)))
    assert opened.classes == tuple(f"d{digit}" for digit in range(1, 10))
    assert opened.images.classes[-1] == "d0"
    out = classify(data, encoder, tmp_path / "run", "linear", labels=str(table))
    stated = strict_json(out / "summary.json")["metrics"]["classifier"]["outliers, AUROC"]
    labels = opened.images.labels[opened.parts.test_rows]
    assert stated["protocol"]["outliers"] == (labels == 9).sum() > 0
    assert 0.5 < stated["value"] <= 1


def test_few_labels_classify_the_rest(data, encoder, tmp_path, capsys):
    """The floors, the page and the JSON."""
    out = tmp_path / "run"
    table = few_labels(data, tmp_path / "labels.csv", 3, "elsewhere/1.png,d1")
    command = ["classify", encoder, data, "--labels", table, "-o", out, "--report"]
    assert run(*command, "--workers", "0", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["sizes"] == {"train": 30, "test": 60, "unlabeled": 90}
    assert len(rows(out / "assignments.csv")) == 150
    measures = summary["metrics"]
    baselines = {"kNN, frozen features", "raw pixels", "majority class"}
    assert measures.keys() == {"classifier", *baselines}
    assert summary["differences"].keys() == baselines
    assert summary["differences"]["majority class"]["low"] > 0
    assert measures["majority class"]["accuracy"]["value"] < 0.25
    assert measures["classifier"]["accuracy"]["value"] > 0.5
    assert summary["calibration"]["num_images"] == 30
    page = (out / "report.html").read_text()
    shown = "Least certain images", "perfectly calibrated", "Metrics beside their baselines"
    assert all(words in page for words in shown)
    log = (out / "train.log").read_text()
    assert "which belong to no usable image" in log
    assert run("explore", out, "--write") == 0
    assert run("export", out, "--format", "atlas") == 0
    assert run("compare", out, encoder.parent) == 2
    assert run(*command, "--workers", "0", "--resume", "-q") == 0


def test_what_the_run_of_the_encoder_held_out_is_held_out_again(encoder, tmp_path, refusal):
    data = builders.save_digits(tmp_path / "digits.npz", 120)
    source, out = tmp_path / "source", tmp_path / "run"
    nearkin.embed_run(encoder, str(data), output=source, val=0.25, workers=0, report=False)
    splits = open_table(source / "embeddings.parquet").read().splits
    command = ["classify", source, data, "-o", out, *QUICK]
    assert "--val 0.1, but " in refusal(2, *command, "--val", "0.1")
    assert not out.exists()
    assert run(*command) == 0
    assert tomllib.loads((out / "config.toml").read_text())["val"] == 0.25
    held_out = strict_json(out / "summary.json")["sizes"]["test"]
    assert held_out == (splits == "test").sum()
    others = {"val": 0.4, "overwrite": True, "workers": 0, "report": False}
    nearkin.embed_run(encoder, str(data), output=source, **others)
    assert run(*command, "--resume") == 0
    shutil.rmtree(source)
    assert run(*command, "--resume") == 0


def test_copies_are_in_no_more_folds_of_a_resumed_run_than_of_the_one_that_was_begun(
    encoder, tmp_path
):
    """Where the run of the encoder held none out, both search for copies: folds divide none."""
    pixels, labels = builders.digits(6)
    np.savez(tmp_path / "digits.npz", x=np.tile(pixels, (2, 1, 1)), y=np.tile(labels, 2))
    source, out = tmp_path / "source", tmp_path / "run"
    data = str(tmp_path / "digits.npz")
    nearkin.embed_run(encoder, data, output=source, val=0.0, workers=0, report=False)
    opened = open_labeled_data(data, ClassifyConfig(encoder=str(source), val=0.0))
    assert len(opened.parts.test_rows) == 0
    assert (np.unique(opened.images.groups, return_counts=True)[1] >= 2).all()
    command = ["classify", source, data, "-o", out, *QUICK]
    assert run(*command, "--report") == 0
    page = (out / "report.html").read_text()
    assert "held-out training accuracy" in page
    assert "test images, but" not in page
    assert "baselines" not in page.partition("Evaluation</h2>")[2].partition("</table>")[0]
    before = (out / "classifier.safetensors").read_bytes()
    (out / "summary.json").unlink()
    assert run(*command, "--resume") == 0
    assert (out / "classifier.safetensors").read_bytes() == before


def test_one_image_of_each_class_is_enough_and_labels_that_change_are_not_resumed_with(
    data, encoder, tmp_path, refusal
):
    table = few_labels(data, tmp_path / "labels.csv", 2)
    command = ["classify", encoder, data, "--labels", table, "-o", tmp_path / "run"]
    assert run(*command, *QUICK) == 0
    rows = table.read_text(encoding="utf-8").split()
    groups = ["path,label,group", *(f"{row},{number // 2}" for number, row in enumerate(rows[1:]))]
    table.write_text("\n".join(groups), encoding="utf-8")
    assert "the groups have changed" in refusal(5, *command, *QUICK, "--resume")
    few_labels(data, table, 3)
    assert "the labels have changed" in refusal(5, *command, *QUICK, "--resume")
    table = few_labels(data, tmp_path / "labels.csv", 1)
    out = classify(data, encoder, tmp_path / "few", "linear", labels=str(table))
    assert read_classifier(out / "classifier.safetensors").calibration is None
    summary = strict_json(out / "summary.json")
    assert "the default: with one training image, or one group, of each" in summary["protocol"]
    stated = {name for name in summary["metrics"]["classifier"] if "calibrated" in name}
    assert stated == {"log-loss, uncalibrated", "calibration error, uncalibrated"}
    assert "10 classes with one training image" in (out / "train.log").read_text()


def test_an_attentive_probe_on_tokens_of_few_images_has_one_of_each_class(
    data, encoder, tmp_path, monkeypatch
):
    """Where memory holds fewer tokens than those of an image for each class."""
    monkeypatch.setattr(probes, "MAX_NUMBERS", 1)
    out = classify(data, encoder, tmp_path / "run", "attentive")
    assert "on 10 of 120 training images" in strict_json(out / "summary.json")["protocol"]
    of_class = np.unique(np.load(data)["y_train"], return_index=True)[1]  # the first of each
    assigned = nearkin.predict(out, str(data), workers=0).records()
    found = {row["path"]: row["cluster"] for row in assigned}
    assert [found[f"train/{row:03}"] for row in of_class] == [*"0123456789"]


def test_images_that_turn_out_unreadable_are_noted_and_count_as_bad(encoder, tmp_path, refusal):
    """Their headers are whole, so only decoding finds them."""
    pixels, labels = builders.digits(12, 2)
    named = {f"{label}/{row:02d}.png": p for row, (p, label) in enumerate(zip(pixels, labels))}
    data = save(tmp_path / "data", named)
    cut = sorted(named)[:3]
    for name in cut:
        content = (data / name).read_bytes()
        (data / name).write_bytes(content[: content.index(b"IDAT") + 8])
    command, out = ["classify", encoder, data, *QUICK], tmp_path / "run"
    line = refusal(3, *command, "-o", out)
    assert f"3 of 24 images are unreadable: '{cut[0]}' (" in line
    assert [row["path"] for row in rows(out / "bad_files.csv")] == cut
    assert run(*command, "-o", out, "--resume", "--max-bad", "0.2") == 0
    note = {"decision": "left out", "text": "3 images that cannot be decoded (bad_files.csv)"}
    assert {**note, "count": 3, "examples": cut} in strict_json(out / "summary.json")["notes"]
    assert f"left out: {note['text']}, such as " in (out / "train.log").read_text()
    frozen = ["embed", encoder, data, "-o", tmp_path / "frozen", "-q"]
    assert "3 of 24 images are unreadable" in refusal(3, *frozen)
    assert run(*frozen, "--resume", "--max-bad", "0.2") == 0
    notes = strict_json(tmp_path / "frozen" / "summary.json")["notes"]
    assert notes == [{**note, "count": 3, "examples": cut}]


def test_a_finished_run_makes_what_is_asked_of_it_later(encoder, tmp_path, refusal):
    pixels, labels = builders.digits(12, 2)
    named = {f"{label}/{row:02d}.png": p for row, (p, label) in enumerate(zip(pixels, labels))}
    command = ["classify", encoder, save(tmp_path / "data", named), *QUICK, "-o", tmp_path / "run"]
    assert run(*command, "--no-report") == 0
    folder, resumed = RunFolder(tmp_path / "run"), [*command, "--resume"]
    summary = folder.summary.read_bytes()
    assert run(*resumed, "--report") == 0
    assert "Test images; below each, the predicted class." in folder.report.read_text()
    assert run(*resumed, "--copy-to", tmp_path / "copies") == 0
    copies = {path.name: path.parent.name for path in (tmp_path / "copies").rglob("*.png")}
    assigned = {f"{row['path'][2:]}": row["cluster"] for row in rows(folder.assignments)}
    assert {name[-6:]: label for name, label in copies.items()} == assigned
    before = contents(tmp_path / "copies")
    assert run(*resumed, "--copy-to", f"{tmp_path}/copies/") == 0
    assert contents(tmp_path / "copies") == before
    line = refusal(2, *resumed, "--copy-to", folder.path)
    assert "is of the run itself" in line
    assert folder.summary.read_bytes() == summary


def test_settings_that_are_paths_hold_from_any_working_directory(encoder, tmp_path, monkeypatch):
    """Whatever files of the same names are there."""
    pixels, labels = builders.digits(12, 2)
    save(tmp_path / "data", {f"{row:02d}.png": image for row, image in enumerate(pixels)})
    written = [(f"{row:02d}.png", f"d{label}") for row, label in enumerate(labels)]
    for folder, rows_of in (("", written), ("sub", [(name, "d0") for name, _ in written])):
        (tmp_path / folder).mkdir(exist_ok=True)
        table(tmp_path / folder / "t.csv", rows_of)
    shutil.copy(encoder, tmp_path / "e.safetensors")
    monkeypatch.chdir(tmp_path)
    assert run("classify", "e.safetensors", "data", "--labeled", "t.csv", "-o", "run", *QUICK) == 0
    monkeypatch.chdir(tmp_path / "sub")
    images = images_of(RunFolder(Path("../run")))
    assert [images.classes[label] for label in images.labels] == [label for _, label in written]
    again = ["../e.safetensors", "../data", "--labeled", "../t.csv", "-o", "../run", *QUICK]
    assert run("classify", *again, "--resume") == 0
    (tmp_path / "sub" / "data").mkdir()
    named = {"labeled": "t.csv", "truth": "data", "encoder": "auto", "accept": "../run"}
    absolute = named | {"labeled": f"{tmp_path}/sub/t.csv", "accept": f"{tmp_path}/run"}
    stored = self_contained(DiscoverConfig(**named))
    assert {name: getattr(stored, name) for name in named} == absolute
    for labels in ("auto", "none", "folders", "../t.csv"):
        Path(labels).with_suffix("").mkdir(exist_ok=True)
        stored = self_contained(EmbedConfig(labels=labels, encoder="timm:x@../e.safetensors"))
        assert stored.labels == (f"{tmp_path}/t.csv" if "." in labels else labels)
        assert stored.encoder == f"timm:x@{tmp_path}/e.safetensors"


def test_a_run_goes_on_where_the_encoder_of_a_relative_path_is_gone(
    encoder, data, tmp_path, monkeypatch, refusal
):
    shutil.copy(encoder, tmp_path / "e.safetensors")
    monkeypatch.chdir(tmp_path)
    typed = ["classify", "e.safetensors", data, *QUICK, "-o", "run"]
    assert run(*typed) == 0
    (tmp_path / "e.safetensors").unlink()
    assert run(*typed, "--resume") == 0
    typed[1] = "f.safetensors"
    assert "--encoder" in refusal(2, *typed, "--resume")


FROM = ("ENCODER", "DATA")
REFUSED = [
    ([], 2, "no encoder given; say nearkin classify ENCODER DATA"),
    ([*FROM, "--train-layers", "last:99"], 2, "tiny has 2 blocks; give at most last:2"),
    ([*FROM, "--train-layers", "first"], 2, "is not linear, attentive, last:N or all"),
    ([*FROM, "--epochs", "3"], 2, "--epochs is of fine-tuning"),
    ([*FROM, "--layer-decay", "0.5"], 2, "--layer-decay is of fine-tuning"),
    (["absent", "DATA"], 2, "absent"),
    ([*FROM, "--labels", "none"], 3, "no image has a label"),
    ([*FROM, "--labels", "ONE"], 3, "all labeled training images are 'd1'"),
    ([*FROM, "--labels", "STRAY"], 3, "write the paths as they are below the data"),
    ([*FROM, "--lables", "x"], 2, "lables"),
    ([*FROM, "--labels", "ONE", "--labeled", "ONE"], 2, "exclude each other"),
]


def test_what_cannot_be_done_is_said_in_one_line(data, encoder, tmp_path, refusal):
    (tmp_path / "one.csv").write_text("path,label\ntrain/000,d1\ntrain/001,d1\n")
    (tmp_path / "stray.csv").write_text("path,label\na.png,d1\nb.png,d2\n")
    words = {"ENCODER": encoder, "DATA": data}
    words |= {name.upper(): tmp_path / f"{name}.csv" for name in ("one", "stray")}
    for number, (more, code, says) in enumerate(REFUSED):
        typed = [words.get(word, word) for word in more]
        line = refusal(code, "classify", *typed, "-o", tmp_path / f"run-{number}")
        assert says in line, more


def test_another_encoder_is_refused(trained, data, tmp_path, refusal):
    """By its architecture, its weights or its preprocessing."""
    others = ("small", 0, 8), ("tiny", 1, 8), ("tiny", 0, 16)
    for layers, other in itertools.product(TRAININGS[:2], others):
        out = shutil.copytree(trained(layers), tmp_path / "run", dirs_exist_ok=True)
        write_network(out / "encoder.safetensors", *other)
        line = refusal(5, "predict", out, data, "-o", tmp_path / "a.csv")
        assert "classifier.safetensors is of another encoder" in line, (layers, other)
        assert "classify again" in line
        assert not (tmp_path / "a.csv").exists()


def test_images_like_none_of_the_classes_are_flagged_and_counted_and_settings_read_back(linear):
    noise = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    flags = [row["flag"] for row in nearkin.predict(linear, noise, workers=0).to_dict()["images"]]
    own = [row["flag"] for row in rows(linear / "assignments.csv")]
    assert flags.count("outlier") > 30
    assert own.count("outlier") < 10
    counted = strict_json(linear / "summary.json") | {"flags": {"outlier": 1, "border": 2}}
    assert {"outlier: 1 image", "border: 2 images"} <= {*lines(counted)}
    learned, unseen = lines(counted)[0], {**counted["classes"][0], "name": "x", "train": 0}
    assert lines(counted | {"classes": [*counted["classes"], unseen]})[0] == learned
    none = {"metrics": {"classifier": {}}, "labels_to_check": []}
    assert "metric  classifier" not in lines(counted | none)
    config, _ = RunFolder(linear).any_settings()
    assert isinstance(config, ClassifyConfig)
    assert (config.train_layers, RunFolder(linear).kind) == ("linear", "classification")
