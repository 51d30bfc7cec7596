"""Which images are trained on and scored, and what their classes are, as data say it anywhere."""

from collections import Counter
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from builders import encoded, fill, tar, write_files
from nearkin_command import run
from pyarrow import parquet

from nearkin.commands.evaluate import _split as rows_of
from nearkin.config import TrainConfig
from nearkin.data.labels import Row, class_names, split_of, text_of
from nearkin.data.opening import column_of, open_images
from nearkin.errors import DataError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import open_table
from nearkin.evaluation.vectors import write_embeddings
from nearkin.run.data import open_split
from nearkin.tables import write_csv


def splits_of(images):
    """How many images are of each part."""
    return dict(Counter(images.splits.tolist()))


def held_out(data):
    """The split of a training: the names that are trained on, and those that are scored."""
    split = open_split(data, TrainConfig())
    return split.train.names, split.test.names, split.images


def test_folders_of_every_convention_are_parts_and_no_classes(tmp_path):
    for train, test in (("train", "test"), ("Training", "Testing"), ("seg_train", "TestImages")):
        names = [f"{part}/{c}/{i}.png" for part in (train, test) for c in "ab" for i in "12"]
        for labels, classes in (("auto", ("a", "b")), ("none", ())):
            images = open_images(fill(tmp_path / train, *names), labels=labels, cache=False)
            assert images.classes == classes
            assert splits_of(images) == {"train": 4, "test": 4}
            assert images.notes == ()


def test_names_of_parts_are_known_and_those_that_say_more_are_none():
    names = {
        "": ("bus", "train station", "bullet_train", "test tube", "untrained", "valid-not", ""),
        "train": ("train", "Training", "train2017", "training_set", "seg_train"),
        "val": ("dev", "val2017", "Valid", "validation_images", "ValSet", "x_val"),
        "test": ("test", "Testing", "eval", "evaluation", "test_set", "TestImages"),
    }
    for split, alike in names.items():
        assert [split_of(name) for name in alike] == [split] * len(alike)
    assert split_of("imagenet-train-000012.tar") == "train"  # a shard is no class


def test_coco_and_folders_of_parts_below_or_inside_classes(tmp_path):
    coco = fill(tmp_path / "coco", *(f"{p}2017/{i}.png" for p in ("train", "val") for i in "12"))
    images = open_images(coco, cache=False)
    assert (images.classes, splits_of(images)) == ((), {"train": 2, "val": 2})
    names = [
        f"bottle/{path}/{i}.png" for path in ("train/good", "test/good", "test/bad") for i in "12"
    ]
    images = open_images(fill(tmp_path / "mvtec", *names), cache=False)
    assert splits_of(images) == {"train": 2, "test": 4}
    assert images.classes == ("bad", "good")
    twice = [f"seg_{p}/seg_{p}/{c}/{i}.png" for p in ("train", "test") for c in "ab" for i in "12"]
    images = open_images(fill(tmp_path / "intel", *twice), cache=False)
    assert (images.classes, splits_of(images)) == (("a", "b"), {"train": 4, "test": 4})


@pytest.mark.parametrize("around", ["training_data", "test_data"])
def test_a_folder_around_all_parts_is_no_part_whatever_it_is_called(tmp_path, around):
    names = [f"{around}/{p}/{c}/{i}.png" for p in ("train", "val") for c in "ab" for i in "12"]
    images = open_images(fill(tmp_path, *names), cache=False)
    assert (images.classes, splits_of(images)) == (("a", "b"), {"train": 4, "val": 4})


def parts(root, kind):
    """Images of three parts, as folders, as a table, as shards and as arrays."""
    rows = [(f"{part}{i}.png", part) for part in ("train", "dev", "test") for i in range(4)]
    if kind == "folders":
        return fill(root, *(f"{part}/{name}" for name, part in rows))
    if kind == "table":
        fill(root, *(name for name, _ in rows))
        (root / "t.csv").write_text("path,split\n" + "".join(f"{n},{p}\n" for n, p in rows))
        return root / "t.csv"
    if kind == "npz":
        x = np.random.default_rng(0).integers(0, 256, (3, 4, 8, 8, 3), np.uint8)
        np.savez(root / "d.npz", train_images=x[0], val_images=x[1], test_images=x[2])
        return root / "d.npz"
    for part in ("train", "dev", "test"):
        names = [name for name, of in rows if of == part]
        images = [{"bytes": encoded(seed), "path": name} for seed, name in enumerate(names)]
        parquet.write_table(pa.table({"image": images}), root / f"{part}-00000-of-00001.parquet")
    return root


@pytest.mark.parametrize("kind", ["folders", "table", "npz", "shards"])
def test_the_test_part_is_scored_and_validation_is_neither_scored_nor_trained_on(tmp_path, kind):
    data = parts(tmp_path, kind)
    assert splits_of(open_images(data, cache=False)) == {"train": 4, "val": 4, "test": 4}
    train, test, images = held_out(data)
    assert (len(train), len(test), len(images)) == (4, 4, 8)
    assert all("train" in name for name in train) or kind == "table"
    (note,) = images.notes
    assert (note.decision, note.count) == ("left out", 4)
    assert "validation" in note.text


def test_a_validation_part_is_scored_where_there_is_no_other(tmp_path):
    names = [f"{part}/{c}/{i}.png" for part in ("train", "val") for c in "ab" for i in range(3)]
    train, test, images = held_out(fill(tmp_path, *names))
    assert {name.partition("/")[0] for name in train} == {"train"}
    assert {name.partition("/")[0] for name in test} == {"val"}
    (note,) = images.notes
    assert (note.decision, note.count) == ("substituted", 6)


@pytest.mark.parametrize("part", ["test", "val", "valid"])
def test_data_of_one_part_to_score_can_be_checked_and_trained_on(tmp_path, capsys, part):
    data = fill(tmp_path, *(f"{part}/{c}/{i}.png" for c in ("cat", "dog") for i in range(10)))
    assert run("check", data) == 0
    assert "all 20 images are of one part" in capsys.readouterr().out
    train, test, _ = held_out(data)
    assert len(train) > len(test) > 0


def test_shards_are_parts_and_no_classes(tmp_path):
    for part, seeds in (("train", (0, 1, 2)), ("test", (3, 4))):
        for shard, seed in enumerate(seeds):
            images = [{"bytes": encoded(10 * seed + i), "path": ""} for i in range(2)]
            path = tmp_path / f"data/{part}-{shard:05}-of-{len(seeds):05}.parquet"
            path.parent.mkdir(exist_ok=True)
            parquet.write_table(pa.table({"image": images, "label": [0, 1]}), path)
    (tmp_path / "data/README.md").write_text("of the hub")
    images = open_images(tmp_path, cache=False)
    assert images.names[-1] == "data/train-00002-of-00003.parquet/00000001"
    assert splits_of(images) == {"train": 6, "test": 4}
    assert images.classes == ("0", "1")
    with pytest.raises(DataError, match="lies in no class folder"):
        open_images(tmp_path / "data", labels="folders", cache=False)
    write_files(
        tmp_path / "tars",
        {
            f"{c}/0001.tar": tar({f"{c}{i}.png": encoded(i) for i in range(2)}.items())
            for c in "ab"
        },
    )
    assert open_images(tmp_path / "tars", cache=False).classes == ("a", "b")


def test_a_stray_picture_changes_neither_classes_nor_parts(tmp_path):
    names = [f"{c}/{i}.png" for c in ("cat", "dog") for i in range(6)]
    images = open_images(fill(tmp_path / "d", *names, "preview.png"), cache=False)
    assert images.classes == ("cat", "dog")
    assert class_names(images)[-1] == ""
    (note,) = images.notes
    assert (note.decision, note.count) == ("guessed", 1)
    names = [f"{part}/{c}/{i}.png" for part in ("train", "test") for c in "ab" for i in range(3)]
    train, test, images = held_out(fill(tmp_path / "s", *names, "preview.png", "more/x.png"))
    assert {name.partition("/")[0] for name in test} == {"test"}
    assert len(test) == 6
    assert {"preview.png", "more/x.png"} < set(train)
    assert images.classes == ("a", "b")
    assert [(note.decision, note.count) for note in images.notes] == [("guessed", 2)]


def test_class_folders_at_unequal_depth_are_guessed_and_said(tmp_path):
    folders = ("Fruit/Apple/Golden", "Fruit/Apple/Red", "Vegetables/Leek", "Vegetables/Kale")
    names = [f"{folder}/{i}.png" for folder in folders for i in range(2)]
    images = open_images(fill(tmp_path / "d", *names, "Vegetables/Kale/cut/3.png"), cache=False)
    assert images.classes == folders[:2] + folders[:1:-1]
    (note,) = images.notes
    assert note.decision == "guessed"
    assert "4 classes" in note.text
    assert "--labels none" in note.text
    assert open_images(tmp_path / "d", labels="none", cache=False).notes == ()
    few = fill(tmp_path / "few", *(f"{c}/{i}.png" for c in "ab" for i in "12"), "1.png", "2.png")
    images = open_images(few, cache=False)
    assert images.classes == ()
    assert "2 of 6 images lie in none; move these, or give" in images.notes[0].text


def test_a_folder_called_test_beside_classes_is_said_to_be_one(tmp_path):
    names = [f"{c}/{i}.png" for c in ("cat", "dog", "test") for i in range(2)]
    images = open_images(fill(tmp_path, *names), cache=False)
    assert images.classes == ("cat", "dog", "test")
    assert [note.examples for note in images.notes] == [("test",)]


def test_groups_and_cameras_have_one_form_in_all_tables(tmp_path):
    """Programs make floats of whole numbers where one is missing, and take accents apart."""
    images = open_images(fill(tmp_path, *(f"{number}.png" for number in range(4))), cache=False)
    cells = zip(("3", "3.0", "caf\u00e9", "cafe\u0301"), ("3", "3", "caf\u00e9", "caf\u00e9"))
    table = tmp_path / "t.csv"
    for row, (written, form) in enumerate(cells):
        assert Row.of(group=written).group == form
        table.write_text(f"path,camera\n{row}.png,{written}\n", encoding="utf-8")
        assert column_of("camera", images, str(table))[row] == form
    table.write_text("path,camera,Camera\n0.png,a,b\n")
    with pytest.raises(DataError, match="no header of different names"):
        column_of("camera", images, str(table))


def test_a_cell_of_any_type_is_text_or_nothing():
    nothing = (None, float("nan"), np.nan, np.float32("nan"), "", "  ", [None], [""])
    assert {text_of(cell) for cell in nothing} == {""}
    for cell, text in (
        (1, "1"), (np.int64(1), "1"), ([1], "1"), (np.array([1]), "1"), (np.array(1), "1"),
        (1.5, "1.5"), (True, "True"), (np.True_, "True"), (b"caf\xc3\xa9", "café"), (" a b ", "a b"),
        (Decimal("2"), "2"), (np.str_("x"), "x"),
    ):  # fmt: skip
        assert text_of(cell) == text, cell
    for cell in ([1, 2], (), {"a": 1}, np.zeros(3)):
        row = Row.of(cell, "g", "train")
        assert (row.label, row.group, row.split) == ("", "g", "train")
        assert row.unusable, cell


def test_whole_numbers_of_any_length_are_classes_by_value(tmp_path):
    """Python itself converts 4,300 digits at most."""
    long = "9" * 5000
    fill(tmp_path, *(f"{n}.png" for n in range(4)))
    labels = zip(range(4), (long, "10", "9", "0010"), strict=True)
    write_csv(tmp_path / "labels.csv", ("path", "label"), [(f"{n}.png", x) for n, x in labels])
    images = open_images(tmp_path / "labels.csv")
    assert images.classes == ("9", "0010", "10", long)
    assert Row.of(long).named(["a", "b"]).label == ""
    assert Row.of("0001.0").named(["a", "b"]).label == "b"


CELLS = {
    "floats and NaN": ([0.0, 1.0, float("nan"), 1.0], ["0", "1", "", "1"]),
    "-1": ([0, 1, -1, 1], ["0", "1", "", "1"]),
    "-1.0": ([0.0, 1.0, -1.0, 1.0], ["0", "1", "", "1"]),
    "negative numbers": ([-2, -1, 0, 1], ["-2", "-1", "0", "1"]),
    "fractions": ([0.5, 1.0, 0.5, 2.0], ["0.5", "1.0", "0.5", "2.0"]),
    "None": (["a", None, "b", "a"], ["a", "", "b", "a"]),
    "spaces": ([" a", "a ", "b", ""], ["a", "a", "b", ""]),
    "truth": ([True, False, True, False], ["True", "False", "True", "False"]),
    "names": (["nan", "None", "-1", "x"], ["nan", "None", "-1", "x"]),
}


class Series:
    """What pandas gives: an array behind an index."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype)


def readers(root, cells):
    """The same labels in every form of data, by the name of that form."""
    files = {f"{seed}.png": encoded(seed) for seed in range(4)}
    names = [*files]
    write_files(root, files)
    arrays = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    parquet.write_table(pa.table({"path": names, "Label": cells}), root / "t.parquet")
    written = ["" if cell is None else str(cell) for cell in cells]
    (root / "t.csv").write_text("path,label\n" + "".join(map("{},{}\n".format, names, written)))
    images = [{"bytes": content, "path": ""} for content in files.values()]
    parquet.write_table(pa.table({"image": images, "label": cells}), root / "i.parquet")
    yield "table", open_images(root / "t.parquet", cache=False)
    yield "CSV", open_images(root / "t.csv", cache=False)
    yield "table of labels", open_images(root, labels=str(root / "t.parquet"), cache=False)
    yield "table with images", open_images(root / "i.parquet", cache=False)
    yield "pair", open_images((arrays, cells), cache=False)
    yield "objects", open_images((arrays, np.array(cells, object)), cache=False)
    yield "a column each", open_images((arrays, np.array(cells, object)[:, None]), cache=False)
    yield "lists of both", open_images((list(arrays), tuple(cells)), cache=False)
    yield "column of pandas", open_images((arrays, Series(np.array(cells, object))), cache=False)
    source = SimpleNamespace(names=names, labels=cells, read=files.get)
    yield "source", open_images(source, cache=False)


@pytest.mark.parametrize("kind", CELLS)
def test_a_label_means_the_same_in_every_form_of_data(tmp_path, kind):
    cells, expected = CELLS[kind]
    for form, images in readers(tmp_path, cells):
        assert class_names(images) == expected, form
        assert all(note.count for note in images.notes), form
        if "-1" in kind or kind == "names":
            assert images.notes, form


def test_several_labels_of_one_image_are_none_and_said_and_too_few_are_refused(tmp_path):
    x = np.zeros((3, 8, 8), np.uint8)
    with pytest.raises(DataError, match="3 images but 2 labels"):
        open_images((x, ["cat", "dog"]), cache=False)
    mixed = Series(np.array(["cat", None, np.nan], object))
    assert class_names(open_images((x, mixed), cache=False)) == ["cat", "", ""]
    images = open_images((x, np.eye(3, dtype=int)), cache=False)
    assert images.classes == ()
    assert [(note.decision, note.count) for note in images.notes] == [("left out", 3)]
    rows = [{"bytes": encoded(seed), "path": ""} for seed in range(3)]
    parquet.write_table(pa.table({"image": rows, "label": [[0, 1]] * 3}), tmp_path / "t.parquet")
    images = open_images(tmp_path / "t.parquet", cache=False)
    assert (images.classes, images.notes[0].examples[0]) == ((), "[0, 1]")


def test_medmnist_and_other_names_of_arrays(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (3, 4, 8, 8), np.uint8)
    y = np.array([[0], [1], [1], [0]])
    arrays = {}
    for pixels, part in zip(x, ("train", "val", "test"), strict=True):
        arrays |= {f"{part}_images": pixels, f"{part}_labels": y}
    np.savez(tmp_path / "medmnist.npz", **arrays, features=np.zeros(3), test_ids=np.zeros(4))
    images = open_images(tmp_path / "medmnist.npz", cache=False)
    assert splits_of(images) == {"train": 4, "val": 4, "test": 4}
    assert images.classes == ("0", "1")
    assert class_names(images) == ["0", "1", "1", "0"] * 3
    assert np.array_equal(images.read(0)[..., 0], x[2, 0])  # test/0 comes first
    (note,) = images.notes
    assert (note.decision, note.examples) == ("left out", ("features", "test_ids"))


def test_vectors_of_a_validation_part_are_scored_only_where_there_is_no_other(tmp_path):
    parts = {"three": ["train", "val", "test", "train"], "two": ["train", "val", "val", "train"]}
    for name, splits in parts.items():
        path, paths = tmp_path / f"{name}.parquet", [f"{i}.png" for i in range(4)]
        vectors, labels = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
        of = {"rows": np.arange(4), "paths": paths, "classes": ("9", "10")}
        write_embeddings(path, Embeddings(vectors, labels, **of, splits=np.array(splits)))
        table = open_table(path)
        learned, scored, (note,) = rows_of(table, table)
        assert learned.tolist() == [0, 3]
        assert scored.tolist() == {"three": [2], "two": [1, 2]}[name]
        assert note.decision == {"three": "left out", "two": "substituted"}[name]
        assert open_table(path).read().classes == ("9", "10")  # numbers by value, as everywhere
