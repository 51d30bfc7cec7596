"""`nearkin select`: tables of images that are worth a label."""

import os
import shutil

import numpy as np
import pytest
from builders import fill, write_network
from nearkin_command import run

import nearkin
from nearkin.data.opening import open_images
from nearkin.discovery.clusters import LABEL_COLUMNS
from nearkin.errors import DataError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.vectors import write_embeddings
from nearkin.tables import read_csv, write_csv

UNLABELED = 100
"""Of the 160 digits that a classification may learn from."""


@pytest.fixture(scope="module")
def vectors(trained_run):
    return trained_run / "embeddings.parquet"


@pytest.fixture(scope="module")
def classified(tmp_path_factory, digits_file, trained_run):
    """A classification by the labels of sixty images, and their names."""
    folder = tmp_path_factory.mktemp("classified")
    images = open_images(digits_file)
    names = [name for name, split in zip(images.names, images.splits) if split != "test"]
    learned, rows = names[UNLABELED:], dict(zip(images.names, images.labels.tolist()))
    write_csv(folder / "labels.csv", ("path", "label"), [(n, rows[n]) for n in learned])
    nearkin.classify(
        trained_run, digits_file, output=folder / "run", labels=folder / "labels.csv",
        baselines=False, workers=0, report=False,
    )  # fmt: skip
    return folder / "run", set(learned)


def test_a_selection_is_a_table_to_label_and_labels_count_in_the_next_round(
    vectors, tmp_path, capsys
):
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    assert run("select", vectors, "--num=10", "-o", first) == 0
    rows = list(read_csv(first))
    assert tuple(rows[0]) == LABEL_COLUMNS
    assert [row["label"] for row in rows] == [""] * 10
    assert nearkin.select(vectors, num=10).paths == tuple(row["path"] for row in rows)
    capsys.readouterr()
    assert run("select", vectors, "--num=10") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [row["path"] for row in rows]
    labels = [(row["path"], "cat" if number < 6 else "") for number, row in enumerate(rows)]
    labeled = tmp_path / "labeled.csv"
    write_csv(labeled, ("path", "label"), labels)
    assert run("select", vectors, "--num=50", "-o", second, "--labeled", labeled) == 0
    again = {row["path"] for row in read_csv(second)}
    assert len(again) == 50
    assert not again & {path for path, label in labels if label}


def test_labels_are_of_images_wherever_their_table_lies_and_copies_go_by_their_names(
    trained_run, tmp_path, caplog
):
    """Held-out ones among them, too; rows of no image are counted."""
    data = tmp_path / "photos"
    fill(data, *(f"{part}/{n}.png" for part in ("train", "test") for n in range(8)))
    shutil.copy(data / "train/0.png", data / "train/copy.png")
    shutil.copy(data / "train/7.png", data / "train" / os.fsdecode(b"caf\xe9.png"))
    rows = [(f"photos/train/{n}.png", "ab"[n % 2]) for n in range(4)]
    table = tmp_path / "labels.csv"
    write_csv(table, ("path", "label"), [*rows, ("photos/test/0.png", "a"), ("gone.png", "a")])
    how = {"labels": table, "baselines": False, "workers": 0, "report": False}
    out = nearkin.classify(trained_run, data, output=tmp_path / "run", **how).path
    caplog.clear()
    selected = nearkin.select(trained_run, data, num=1, labeled=table, workers=0)
    assert (selected.num_labeled, selected.num_unlabeled) == (4, 6)
    assert caplog.text.count("left out: 1 of 6 rows of") == 1
    again = nearkin.select(out, data, num=1, workers=0)
    alone = nearkin.select(out, num=1)
    assert (again.num_labeled, again.num_unlabeled) == (alone.num_labeled, alone.num_unlabeled)


def test_names_that_are_not_utf_8_are_written_as_they_are(tmp_path):
    name = os.fsdecode(b"caf\xe9.png")
    data, encoder = (
        fill(tmp_path / "data", name, "b.png"),
        write_network(tmp_path / "e.safetensors"),
    )
    found = nearkin.select(encoder, data, num=2, output=tmp_path / "t.csv", workers=0)
    assert {*found.paths} == {name, "b.png"}
    assert name in {row["path"] for row in read_csv(tmp_path / "t.csv")}


def test_images_that_are_held_out_are_not_selected(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    splits = np.array(["train", "test", ""] * 10)
    paths = [f"{split}/{row:02}.png" for row, split in enumerate(splits)]
    table = tmp_path / "vectors.parquet"
    write_embeddings(table, Embeddings(vectors, np.full(30, -1), paths=paths, splits=splits))
    chosen = nearkin.select(table, num=20)
    assert sorted(chosen.paths) == sorted(path for path in paths if not path.startswith("test"))


def test_a_run_with_classes_fills_in_what_it_says_and_what_it_learned_from_has_a_label(
    classified, tmp_path
):
    out, learned = classified
    file = tmp_path / "selected.csv"
    assert run("select", out, "--num=60", "--rule=random", "-o", file) == 0
    rows, assigned = (
        list(read_csv(file)),
        {row["path"]: row for row in read_csv(out / "assignments.csv")},
    )
    assert len({row["path"] for row in rows} - learned) == 60
    for row in rows:
        assert row["margin"] == assigned[row["path"]]["margin"] != ""
    assert nearkin.select(out, num=1).num_labeled > 40


def test_what_a_run_holds_out_and_has_labels_of_counts_for_its_images_given_again(
    classified, digits_file, trained_run, tmp_path
):
    """By their contents, whatever they are called; features alone by their names."""
    out, learned = classified
    with np.load(digits_file) as arrays:
        images = np.concatenate([arrays["x_train"], arrays["x_test"]])
    again = nearkin.select(trained_run, digits_file, num=1, workers=0)
    assert again.num_unlabeled == nearkin.select(trained_run, num=1).num_unlabeled
    renamed = nearkin.select(trained_run, images, num=1, workers=0)
    assert renamed.num_unlabeled == again.num_unlabeled
    known = nearkin.select(out, digits_file, num=1, workers=0)
    assert known.num_labeled == len(learned)
    called_otherwise = nearkin.select(out, images, num=1, workers=0)
    assert called_otherwise.num_labeled == len(learned)
    table = tmp_path / "vectors.parquet"
    nearkin.embed(trained_run, digits_file, labels="none", output=table, workers=0)
    assert nearkin.select(trained_run, vectors=table, num=1).num_unlabeled == again.num_unlabeled


def test_other_images_of_the_same_names_have_no_label(classified, digits_file, tmp_path):
    out, learned = classified
    with np.load(digits_file) as arrays:
        np.savez(tmp_path / "others.npz", **{**arrays, "x_train": 255 - arrays["x_train"]})
    assert learned < {*open_images(tmp_path / "others.npz").names}
    selection = nearkin.select(out, tmp_path / "others.npz", num=1, workers=0)
    assert (selection.num_labeled, selection.num_unlabeled) == (0, 160)


def test_what_cannot_be_selected_is_refused_before_features_are_computed(
    classified, digits_file, trained_run, tmp_path
):
    out, learned = classified
    names = open_images(digits_file).names
    write_csv(tmp_path / "all.csv", ("path", "label"), [(name, "cat") for name in names])
    write_csv(tmp_path / "none.csv", ("path", "label"), [("somebody.jpg", "cat")])
    how = {"device": "cuda:99", "workers": 0}  # which is refused as soon as anything is computed
    for run_of, error, message, more in (
        (trained_run, UsageError, "num 161, but only 160 images have no label", {}),
        (out, UsageError, f"num 161, but only {160 - len(learned)} images have no label", {}),
        (trained_run, UsageError, "all images have a label", {"labeled": tmp_path / "all.csv"}),
        (trained_run, DataError, "are called", {"labeled": tmp_path / "none.csv"}),
        (trained_run, UsageError, "cuda:99", {"num": 1}),
    ):
        with pytest.raises(error, match=message):
            nearkin.select(run_of, digits_file, **{"num": 161, **how, **more})


REFUSED = [
    ("select vectors.parquet --num 1000 -o new.csv", 2, "only 160 images"),
    ("select vectors.parquet --num 0 -o new.csv", 2, "at least 1"),
    ("select vectors.parquet --num 3 --rule diverse -o new.csv", 2, "typical"),
    ("select vectors.parquet --num 3 -o old.csv", 4, "replace it with --overwrite"),
    ("select vectors.parquet --num 3 -o new.parquet", 2, "ends in .csv"),
    ("select vectors.parquet --num 3 -o new.csv --labeled old.csv", 3, "are called"),
    ("select gone.parquet --num 3 --labeled gone.csv", 3, "gone.csv"),  # before any features
    ("select broken.parquet --num 3 -o new.csv", 5, "cannot be used"),
]


def test_bad_input_is_one_line_and_writes_nothing(vectors, tmp_path, monkeypatch, refuses):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.csv").write_text("path,label\nsomebody.jpg,cat\n")
    (tmp_path / "broken.parquet").write_bytes(vectors.read_bytes()[:5000])
    shutil.copy(vectors, tmp_path / "vectors.parquet")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    refuses(REFUSED)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
