"""Batches of one camera, where the camera is to be ignored: noted in the run, and kept by it."""

import json
import shutil

import numpy as np
import pytest
import torch
from builders import noise
from kills import resumed_steps
from nearkin_command import run
from PIL import Image
from small import fork_workers

import nearkin
from nearkin.commands.run import Run
from nearkin.data.opening import open_images
from nearkin.evaluation.column import ColumnTest
from nearkin.evaluation.table import read_embeddings
from nearkin.report.image_map import colorings
from nearkin.run.data import note_column, noted_column
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv, read_numbers
from nearkin.training.session import build

SETTINGS = (
    *("--method", "moco", "--queue-size", 32, "--bn-groups", 4, "--backbone", "tiny"),
    *("--batch-size", 16, "--epochs", 3, "--precision", "fp32", "--evaluate-every", 0),
    *("--save-every", 1, "--device", "cpu", "--optimizer", "sgd", "-q"),
)
CAMERAS = 40 * ["phone"] + 30 * ["scanner"] + 2 * [""]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Images of two cameras, and two of which nobody knows; a fifth of them are test images."""
    folder = tmp_path_factory.mktemp("cameras")
    lines = ["path,split,label,camera,site"]
    for number, camera in enumerate(CAMERAS):
        Image.fromarray(noise(number, (12, 12))).save(folder / f"{number:02}.png")
        split = "test" if number % 5 == 4 else "train"
        lines.append(f"{number:02}.png,{split},{'ab'[number % 2]},{camera},here")
    table = folder / "images.csv"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return table


def train(data, out, *more) -> RunFolder:
    assert run("train", data, *SETTINGS, "-o", out, *more) == 0
    return RunFolder(out)


def losses(folder) -> list[float]:
    return [row["loss"] for row in read_numbers(folder.metrics)]


@pytest.fixture(scope="module")
def ignoring(table, tmp_path_factory):
    return train(table, tmp_path_factory.mktemp("runs") / "ignoring", "--ignore", "camera")


def test_the_run_has_the_values_and_its_batches_have_one_each(ignoring, table):
    noted = {row["path"]: row["ignore"] for row in read_csv(ignoring.images)}
    assert noted == {row["path"]: row["camera"] for row in read_csv(table)}
    config, _ = ignoring.settings()
    assert config.ignore == "camera"
    images = open_images(str(table))
    images = images.subset(np.flatnonzero(images.splits == "train"))
    _, batches = build(config, images, torch.device("cpu"), folder=ignoring)
    seen = [batch.index.tolist() for batch in batches.load(0, 6)]  # two epochs
    cameras = [{noted[images.names[row]] for row in rows} for rows in seen]
    # Of 32, 24 and 2 images; the third batch has what is left over.
    for epoch in (cameras[:3], cameras[3:]):
        assert {"phone"} in epoch
        assert {"scanner"} in epoch
    pure = sum(len(each) == 1 for each in cameras[:3])
    assert f"ignore camera: {pure} of 3 batches of an epoch have one" in ignoring.log.read_text()


def colored(folder, images):
    """The coloring of the run's map by its column."""
    embeddings = read_embeddings(folder.embeddings, images)
    rows = np.arange(len(images))
    return {each.name: each for each in colorings(folder, embeddings, rows)}.get("camera")


def test_it_says_at_its_end_what_knn_predicts_of_the_column_as_evaluate_does(
    ignoring, table, tmp_path, capsys
):
    """With numbers of its own for a column that it was not to ignore, which the report then has."""
    folder = RunFolder(shutil.copytree(ignoring.path, tmp_path / "run"))
    measured = folder.read_summary()["column"]
    assert run("evaluate", folder.path, "--ignore", "camera", "--json", "-q") == 0
    assert json.loads(capsys.readouterr().out)["column"] == measured
    test = ColumnTest.stored(measured)
    assert test.to_dict() == measured
    line = test.lines()[0]
    assert line.startswith("camera: ")
    assert line in Run(folder).lines()

    images = open_images(str(table))
    coloring = colored(folder, images)
    assert coloring.note == f"{test.sentence}."
    assert f"kNN predicts camera for {100 * test.metrics[0].value:.1f} % of" in coloring.note
    names = ["", *coloring.classes]
    values = {row["path"]: row["camera"] for row in read_csv(table)}
    assert [names[each + 1] for each in coloring.values] == [values[x] for x in images.names]
    assert run("explore", folder.path, "--write", "-q") == 0
    page = folder.report.read_text(encoding="utf-8")
    assert coloring.note in page
    assert f"C{line[1:]}." in page

    assert run("evaluate", folder.path, "--ignore", "label", "-q") == 0
    assert folder.read_evaluated()["column"]["column"] == "label"
    assert colored(folder, images) is None
    assert folder.read_summary()["column"] == measured


def test_a_column_is_noted_by_the_name_that_the_user_writes(table, tmp_path):
    folder, images = RunFolder(tmp_path), open_images(str(table))
    note_column(folder, "Camera", images, np.array(CAMERAS))
    assert list(noted_column(folder, "Camera").values()) == CAMERAS
    assert not noted_column(folder, "site")


def test_a_number_that_cannot_be_taken_is_missing_with_the_reason(table, tmp_path):
    """No test image has a value: that is known after the training alone, and does not end it."""
    rows = list(read_csv(table))
    for row in rows:
        row["camera"] = "" if row["split"] == "test" else row["camera"]
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    shutil.copytree(table.parent, tmp_path / "data")
    (tmp_path / "data" / "images.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    how = dict(backbone="tiny", batch_size=16, epochs=1, evaluate_every=0, ignore="camera")
    run = nearkin.train(tmp_path / "data" / "images.csv", output=tmp_path / "run", **how)
    summary = run.folder.read_summary()
    assert "column" not in summary
    assert "0 among the test images" in summary["left_out"]["column camera"]


def test_two_processes_have_the_same_batches(ignoring, table, tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    both = train(table, tmp_path / "both", "--ignore", "camera", "--devices", 2)
    assert losses(both) == pytest.approx(losses(ignoring), rel=1e-3)


def test_a_resumed_run_keeps_the_values_with_which_it_was_started(ignoring, table, tmp_path):
    """Also where somebody has edited the table since."""
    resumed = RunFolder(shutil.copytree(ignoring.path, tmp_path / "resumed"))
    for path in sorted((resumed.path / "checkpoints").glob("*.pt"))[1:]:
        path.unlink()
    resumed.summary.unlink()
    resumed.encoder.unlink()
    before = table.read_text(encoding="utf-8")
    try:
        table.write_text(before.replace("phone", "scanner", 9), encoding="utf-8")
        train(table, resumed.path, "--ignore", "camera", "--resume")
    finally:
        table.write_text(before, encoding="utf-8")
    assert len(resumed_steps(resumed.path)) == 1
    assert "has other values of 9 images than when" in resumed.log.read_text()
    assert resumed.metrics.read_bytes() == ignoring.metrics.read_bytes()
    assert resumed.encoder.read_bytes() == ignoring.encoder.read_bytes()


def test_columns_that_say_nothing_are_refused_in_one_line(table, tmp_path, refuses):
    commands = (
        (
            "train TABLE -o OUT/run --ignore site",
            2,
            "--ignore site: all images to train on have one value",
        ),
        ("train TABLE -o OUT/run --ignore hour", 3, "no column 'hour'"),
        ("train FOLDER -o OUT/run --ignore camera", 2, "column camera: there is no table"),
        (
            "train TABLE -o OUT/run --ignore camera --batch-size 40",
            2,
            "none of 3 values has the 40 images of a batch; give --batch-size 32 or less",
        ),
    )
    refuses(commands, TABLE=table, FOLDER=table.parent, OUT=tmp_path)
