"""Known classes from folders, tables, archives and arrays; and a truth that only scores."""

import csv
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nearkin.classification.data import open_labeled_data
from nearkin.config import ClassifyConfig, DiscoverConfig
from nearkin.data.opening import open_images
from nearkin.data.split import split_images
from nearkin.discovery.data import (
    check_disjoint,
    label_images,
    open_discovery_data,
    own_images,
    truth_labels,
)
from nearkin.errors import DataError, UsageError
from nearkin.types import UNKNOWN


@pytest.fixture(autouse=True)
def index(tmp_path_factory, monkeypatch):
    """An empty index for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def encoded(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (10, 20, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def fill(root, *names, seed=0):
    """Write a small image, each another one, under each of these names."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encoded(seed + number))
    return root


def table(path, rows, delimiter=","):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([("path", "label"), *rows])
    return str(path)


def known_classes(result):
    """The known class of each image that has one, by name."""
    names = zip(result.names, result.labels.tolist(), strict=True)
    return {name: result.classes[label] for name, label in names if label != UNKNOWN}


def refusal(error, call, *args):
    """The message of the error that a call ends in, which is one line."""
    with pytest.raises(error) as raised:
        call(*args)
    assert "\n" not in str(raised.value)
    return str(raised.value)


FLAT = ("1.png", "2.png", "3.png", "4.png", "5.png")


@pytest.fixture
def data(tmp_path):
    """Five images without labels."""
    return fill(tmp_path / "data", *FLAT)


# ---------------------------------------------------------------- class folders


def test_class_folders_elsewhere_are_added(tmp_path, data):
    labeled = fill(tmp_path / "known", "cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png", seed=9)
    images = label_images(open_images(data), str(labeled), "")
    assert images.classes == ("cat", "dog")
    assert known_classes(images) == {
        f"{labeled}/{name}": name[:3]
        for name in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png")
    }
    assert [n for n, own in zip(images.names, own_images(images), strict=True) if own] == list(
        FLAT
    )
    assert len(images) == 9
    for row, name in enumerate(images.names):
        assert images.read(row) == (data / name).read_bytes()
    assert images.notes == ()


def test_class_folders_inside_the_data_add_nothing(data):
    fill(data, "known/cat/1.png", "known/cat/2.png", "known/dog/1.png", "known/dog/2.png", seed=9)
    images = open_images(data)
    labeled = label_images(images, str(data / "known"), "")
    assert labeled.names == images.names
    assert labeled.fingerprint == images.fingerprint
    assert own_images(labeled).all()
    assert known_classes(labeled) == {
        f"known/{name}": name[:3] for name in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png")
    }


def test_links_to_the_data_are_seen_through(tmp_path, data):
    fill(data, "known/cat/1.png", "known/cat/2.png", "known/dog/1.png", "known/dog/2.png", seed=9)
    (tmp_path / "link").symlink_to(data)
    labeled = label_images(open_images(tmp_path / "link"), str(tmp_path / "link/known"), "")
    assert own_images(labeled).all()
    rows = [(tmp_path / "link/1.png", "a"), (data / "known/../2.png", "b")]
    labeled = label_images(open_images(data), table(tmp_path / "t.csv", rows), "")
    assert known_classes(labeled) == {"1.png": "a", "2.png": "b"}


def test_copies_of_the_data_are_recognized_by_content(tmp_path, data):
    labeled = fill(tmp_path / "known", "cat/new.png", "dog/new.png", seed=9)
    (labeled / "cat/copy.png").write_bytes((data / "2.png").read_bytes())
    (labeled / "cat/again.png").write_bytes((data / "2.png").read_bytes())
    (labeled / "dog/twice.png").write_bytes((labeled / "dog/new.png").read_bytes())
    (data / "same.png").write_bytes((data / "2.png").read_bytes())
    images = label_images(open_images(data), str(labeled), "")
    added = {f"{labeled}/cat/new.png": "cat", f"{labeled}/dog/new.png": "dog"}
    assert known_classes(images) == {"2.png": "cat", "same.png": "cat"} | added
    assert set(images.names) == {*FLAT, "same.png", *added}
    assert [own_images(images)[images.names.index(name)] for name in added] == [False, False]
    assert own_images(images).sum() == 6
    assert "2 images of the data are labeled as exact copies" in images.notes[0]


def test_copies_within_the_data_share_a_label_that_a_path_gave(tmp_path, data):
    (data / "same.png").write_bytes((data / "2.png").read_bytes())
    rows = [("2.png", "cat"), ("3.png", "dog")]
    labeled = label_images(open_images(data), table(tmp_path / "t.csv", rows), "")
    assert known_classes(labeled) == {"2.png": "cat", "same.png": "cat", "3.png": "dog"}
    assert "1 images of the data" in labeled.notes[0]


def test_labels_of_the_data_themselves_stay_hidden(tmp_path):
    names = [f"{c}/{i}.png" for c in ("ant", "bee", "cat") for i in (1, 2)]
    images = open_images(fill(tmp_path / "data", *names))
    labeled = fill(tmp_path / "known", "p/1.png", "p/2.png", "q/1.png", "q/2.png", seed=9)
    labeled_images = label_images(images, str(labeled), "")
    assert images.classes == ("ant", "bee", "cat")
    assert labeled_images.classes == ("p", "q")
    assert (labeled_images.labels[own_images(labeled_images)] == UNKNOWN).all()
    labeled_images = label_images(images, "", "cat,ant")
    assert labeled_images.classes == ("cat", "ant")
    assert labeled_images.labels.tolist() == [1, 1, UNKNOWN, UNKNOWN, 0, 0]


def test_known_classes_are_numbered_as_numbers_where_they_are(tmp_path, data):
    labeled = fill(tmp_path / "known", "10/1.png", "10/2.png", "9/1.png", "9/2.png", seed=9)
    assert label_images(open_images(data), str(labeled), "").classes == ("9", "10")


def test_any_name_that_a_file_system_allows_can_be_labeled(tmp_path):
    odd = ["a\nb", "\u202ertl", "😀", "-x", "~", "x" * 200, os.fsdecode(b"\xff\xfe")]
    data = fill(tmp_path / "data", *(f"{name}.png" for name in odd))
    known = fill(tmp_path / "known", *(f"{name}/{name}.png" for name in odd), seed=50)
    for name in odd[:3]:
        (known / name / "copy.png").write_bytes((data / f"{name}.png").read_bytes())
    labeled = label_images(open_images(data), str(known), "")
    assert known_classes(labeled) == {f"{known}/{n}/{n}.png": n for n in odd} | {
        f"{n}.png": n for n in odd[:3]
    }
    assert list(labeled.names) == sorted(labeled.names, key=os.fsencode)
    assert list(labeled.classes) == sorted(odd, key=os.fsencode)
    assert len(labeled.notes) == 2
    assert all("\n" not in note for note in labeled.notes)
    inside = label_images(open_images(tmp_path), str(known), "")
    assert own_images(inside).all()
    assert set(known_classes(inside)) >= {f"known/{name}/{name}.png" for name in odd}


def test_images_outside_all_class_folders_are_refused(tmp_path, data):
    labeled = fill(tmp_path / "known", "cat/1.png", "dog/1.png", "a\nb.png", seed=9)
    message = refusal(DataError, label_images, open_images(data), str(labeled), "")
    assert r"1 images lie in no class folder, such as 'a\nb.png'; move each" in message


def test_damaged_labeled_images_are_bad_files_and_lend_no_class(tmp_path, data):
    labeled = fill(tmp_path / "known", "cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png", seed=9)
    (labeled / "ox").mkdir()
    (labeled / "ox/bad.png").write_text("no image")
    images = label_images(open_images(data), str(labeled), "")
    assert images.classes == ("cat", "dog")
    assert [bad.name for bad in images.bad] == [f"{labeled}/ox/bad.png"]
    inside = label_images(open_images(tmp_path), str(labeled), "")
    assert [bad.name for bad in inside.bad] == ["known/ox/bad.png"]


# ---------------------------------------------------------------- archives and arrays


def test_an_archive_of_class_folders_is_like_the_folder(tmp_path, data):
    names = ["set/cat/1.png", "set/cat/2.png", "set/dog/1.png", "set/dog/2.png"]
    with tarfile.open(tmp_path / "known.tar", "w") as archive:
        for name, seed in zip(names, (9, 0, 10, 11), strict=True):  # the second is data/1.png
            info = tarfile.TarInfo(name)
            info.size = len(encoded(seed))
            archive.addfile(info, io.BytesIO(encoded(seed)))
    labeled = label_images(open_images(data), str(tmp_path / "known.tar"), "")
    prefix = f"{tmp_path}/known.tar/set"
    added = {
        f"{prefix}/cat/1.png": "cat",
        f"{prefix}/dog/1.png": "dog",
        f"{prefix}/dog/2.png": "dog",
    }
    assert known_classes(labeled) == {"1.png": "cat"} | added
    row = labeled.names.index(f"{prefix}/dog/2.png")
    assert labeled.read(row) == encoded(11)


def test_arrays_with_labels_may_be_added_to_arrays(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "data.npz", x=x[:5])
    np.savez(tmp_path / "known.npz", x=x[3:], y=np.array([0, 1, 1, 0, -1, 2]))
    labeled = label_images(open_images(tmp_path / "data.npz"), str(tmp_path / "known.npz"), "")
    added = {f"{tmp_path}/known.npz/{row}": c for row, c in (("2", "1"), ("3", "0"), ("5", "2"))}
    assert known_classes(labeled) == {"3": "0", "4": "1"} | added
    assert len(labeled) == 8  # the array without a label is not added
    assert labeled.is_small
    assert np.array_equal(labeled.read(labeled.names.index("4")), x[4])


def test_a_labeled_set_that_says_nothing_is_refused(tmp_path, data):
    np.savez(tmp_path / "known.npz", x=np.zeros((5, 8, 8), np.uint8))
    message = refusal(DataError, label_images, open_images(data), str(tmp_path / "known.npz"), "")
    assert "carries no labels; give class folders" in message
    for missing in ("nothing", "nothing.csv"):
        path = str(tmp_path / missing)
        assert (
            "no such file" in refusal(DataError, label_images, open_images(data), path, "").lower()
        )


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize("delimiter", [",", ";"])
@pytest.mark.parametrize(
    "spelling",
    ["x/{}.png", "./x/{}.png", "x\\{}.png", "{root}/x/{}.png", "/{root}/x/{}.png", "x//./{}.png"],
)
def test_a_table_may_spell_the_images_of_the_data_in_many_ways(tmp_path, delimiter, spelling):
    data = fill(tmp_path / "data", *(f"x/{i}.png" for i in range(5)))
    rows = [(spelling.format(i, root=data), "ab"[i % 2]) for i in range(4)]
    path = table(tmp_path / "t.csv", rows, delimiter)
    labeled = label_images(open_images(data), path, "")
    assert known_classes(labeled) == {f"x/{i}.png": "ab"[i % 2] for i in range(4)}
    assert own_images(labeled).all()


def test_a_table_may_be_relative_to_itself_and_name_images_outside(tmp_path, data):
    fill(tmp_path / "more", "6.png", "7.png", seed=9)
    (tmp_path / "more/copy.png").write_bytes((data / "3.png").read_bytes())
    rows = [
        ("data/1.png", "a"),
        ("2.png", "b"),
        ("more/6.png", "a"),
        (f"{tmp_path}/more/7.png", "b"),
        ("data/../more/copy.png", "b"),
        ("data/4.png", ""),
        ("gone.png", "  "),
    ]
    labeled = label_images(open_images(data), table(tmp_path / "t.csv", rows), "")
    outside = {f"{tmp_path}/more/6.png": "a", f"{tmp_path}/more/7.png": "b"}
    assert known_classes(labeled) == {"1.png": "a", "2.png": "b", "3.png": "b"} | outside
    assert len(labeled) == 7
    for row, name in enumerate(labeled.names):
        assert labeled.read(row) == (data / name).read_bytes()


def test_a_name_in_the_data_goes_before_one_beside_the_table(tmp_path, data):
    fill(tmp_path, "1.png", "2.png", seed=9)
    rows = [("1.png", "a"), ("2.png", "b")]
    labeled = label_images(open_images(data), table(tmp_path / "t.csv", rows), "")
    assert known_classes(labeled) == {"1.png": "a", "2.png": "b"}
    assert own_images(labeled).all()


def test_a_table_may_name_what_the_data_pass_over(tmp_path, data):
    fill(data, ".hidden/6.png", seed=9)
    rows = [("1.png", "a"), (".hidden/6.png", "b")]
    labeled = label_images(open_images(data), table(tmp_path / "t.csv", rows), "")
    assert known_classes(labeled) == {"1.png": "a", f"{data}/.hidden/6.png": "b"}


def test_a_parquet_table_labels_arrays_by_their_numbers(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    columns = {"path": ["0", "3"], "label": pa.array([7, 5], pa.int64())}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    x = np.random.default_rng(0).integers(0, 256, (5, 8, 8), np.uint8)
    labeled = label_images(open_images(x), str(tmp_path / "t.parquet"), "")
    assert known_classes(labeled) == {"0": "7", "3": "5"}


def test_the_table_that_lists_the_data_may_label_some_of_them(tmp_path, data):
    rows = [(name, {"1": "a", "2": "b"}.get(name[0], "")) for name in FLAT[:4]]
    path = table(data / "t.csv", rows)
    images = open_images(path)
    labeled = label_images(images, path, "")
    assert known_classes(labeled) == {"1.png": "a", "2.png": "b"}
    assert len(labeled) == 4


def test_rows_of_files_that_exist_nowhere_are_refused(tmp_path, data):
    rows = [("1.png", "a"), ("gone\n1.png", "b"), ("/no/where.png", "b"), ("x\0.png", "b")]
    message = refusal(
        DataError, label_images, open_images(data), table(tmp_path / "t.csv", rows), ""
    )
    assert r"3 of 4 labeled files exist neither" in message
    assert r"such as 'gone\n1.png', '/no/where.png', 'x\x00.png'" in message
    assert "such as '1.png'" in message


def test_labeled_files_that_cannot_be_used_are_counted(tmp_path, data):
    for name in ("data/bad.png", "bad2.png"):
        (tmp_path / name).write_text("no image")
    rows = [("1.png", "a"), ("2.png", "b"), ("bad.png", "c"), ("bad2.png", "d"), ("data", "e")]
    labeled = label_images(open_images(data), table(tmp_path / "t.csv", rows), "")
    assert known_classes(labeled) == {"1.png": "a", "2.png": "b"}
    examples = f"'{tmp_path}/bad2.png', '{data}', 'bad.png'"
    assert labeled.notes[0] == f"3 labeled files cannot be used, such as {examples}"
    assert {bad.name for bad in labeled.bad} == {"bad.png", str(data), f"{tmp_path}/bad2.png"}


def test_a_table_without_labels_is_refused(tmp_path, data):
    path = table(tmp_path / "t.csv", [("1.png", ""), ("2.png", " ")])
    message = refusal(DataError, label_images, open_images(data), path, "")
    assert "none of 2 rows has a label; fill" in message


# ---------------------------------------------------------------- refusals and warnings


def test_one_image_of_two_classes_is_refused(tmp_path, data):
    images = open_images(data)
    labeled = fill(tmp_path / "known", "cat/1.png", "dog/1.png", seed=9)
    (labeled / "dog/copy.png").write_bytes((labeled / "cat/1.png").read_bytes())
    message = refusal(DataError, label_images, images, str(labeled), "")
    assert "1 images are labeled as two classes" in message
    assert f"'{labeled}/cat/1.png' ('cat') and '{labeled}/dog/copy.png' ('dog')" in message
    path = table(tmp_path / "t.csv", [("1.png", "a"), (f"{data}/1.png", "b")])
    message = refusal(DataError, label_images, images, path, "")
    assert f"'{data}/1.png' is labeled 'a' and, in another row, 'b'" in message
    (data / "same.png").write_bytes((data / "1.png").read_bytes())
    path = table(tmp_path / "t.csv", [("1.png", "a"), ("same.png", "b")])
    message = refusal(DataError, label_images, open_images(data), path, "")
    assert "'1.png' ('a') and 'same.png' ('b'), which are exact copies" in message


def test_class_names_that_read_the_same_are_refused_and_those_in_another_case_noted(
    tmp_path, data
):
    known = tmp_path / "known"
    fill(known, "caf\u00e9/1.png", "cafe\u0301/1.png", seed=9)
    message = refusal(
        DataError, open_discovery_data, str(data), DiscoverConfig(labeled=str(known))
    )
    assert r"read the same, 'cafe\u0301' and 'caf\xe9'; spell both in one way" in message
    (known / "cafe\u0301").rename(known / "caf\u00e9 ")
    message = refusal(DataError, open_labeled_data, str(data), ClassifyConfig(labeled=str(known)))
    assert r"read the same, 'caf\xe9' and 'caf\xe9 '" in message
    (known / "caf\u00e9 ").rename(known / "CAFE\u0301")
    dataset = open_discovery_data(str(data), DiscoverConfig(labeled=str(known)))
    assert dataset.classes == ("CAFE\u0301", "caf\u00e9")
    (note,) = [note for note in dataset.images.notes if "in case only" in note]
    assert note.startswith("warning: the classes 'CAFE\u0301' and 'caf\u00e9' differ")


def test_fewer_than_two_classes_are_refused(tmp_path, data):
    labeled = fill(tmp_path / "known", "cat/1.png", "cat/2.png", seed=9)
    message = refusal(DataError, label_images, open_images(data), str(labeled), "")
    assert "labeled as 'cat'; give at least two" in message
    (tmp_path / "bad.png").write_text("no image")
    path = table(tmp_path / "t.csv", [("bad.png", "a")])
    message = refusal(DataError, label_images, open_images(data), path, "")
    assert "labeled as nothing; give at least two" in message


def test_nothing_left_to_discover_is_refused(tmp_path, data):
    path = table(tmp_path / "t.csv", [(name, "ab"[int(name[0]) % 2]) for name in FLAT])
    message = refusal(DataError, label_images, open_images(data), path, "")
    assert "labels all 5 images, so nothing is left to discover" in message
    classes = fill(tmp_path / "c", "a/1.png", "a/2.png", "b/1.png", "b/2.png")
    message = refusal(DataError, label_images, open_images(classes), str(classes), "")
    assert "labels all 4 images" in message


def test_a_class_of_one_image_is_a_note(tmp_path, data):
    labeled = fill(tmp_path / "known", "cat/1.png", "cat/2.png", "d\ng/1.png", seed=9)
    images = label_images(open_images(data), str(labeled), "")
    assert images.notes == (r"1 of 2 known classes have one image only, such as 'd\ng'",)


def test_either_images_or_names_say_what_is_known(data):
    for options in (("", ""), ("known", "a,b")):
        message = refusal(UsageError, label_images, open_images(data), *options)
        assert "either --labeled PATH, or --known A,B" in message


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ("ant", "at least two"),
        ("ant,ant", "each once"),
        ("ant, ant ,bee", "each once"),
        (" , ", "--known A,B"),
        ("ant,be", "be is no class of the data. Did you mean bee?"),
        ("ant,bee,cat", "none is left to discover; omit some"),
    ],
)
def test_names_that_cannot_be_known_are_refused(tmp_path, known, message):
    names = [f"{c}/{i}.png" for c in ("ant", "bee", "cat") for i in (1, 2)]
    images = open_images(fill(tmp_path, *names))
    assert message in refusal(UsageError, label_images, images, "", known)


# ---------------------------------------------------------------- the truth


def classed(tmp_path):
    """Data with labels of three classes, and a Labeled that knows two of them."""
    names = [f"{c}/{i}.png" for c in ("ant", "bee", "cat") for i in (1, 2)]
    images = open_images(fill(tmp_path / "data", *names))
    rows = [("bee/1.png", "bee"), ("cat/1.png", "cat")]
    return images, label_images(images, table(tmp_path / "known.csv", rows), "")


def test_the_truth_may_be_what_the_data_say(tmp_path):
    images, labeled_images = classed(tmp_path)
    truth, names = truth_labels(labeled_images, "data", images)
    assert names == ("bee", "cat", "ant")
    assert truth.tolist() == [2, 2, 0, 0, 1, 1]
    assert labeled_images.labels.tolist() == [UNKNOWN, UNKNOWN, 0, UNKNOWN, 1, UNKNOWN]


def test_the_truth_may_be_a_table_that_says_less(tmp_path):
    images, labeled_images = classed(tmp_path)
    rows = [("ant\\1.png", "x"), ("cat/2.png", "cat"), ("bee/2.png", ""), ("gone.png", "y")]
    truth, names = truth_labels(labeled_images, table(tmp_path / "t.csv", rows), images)
    assert names == ("bee", "cat", "x")
    assert truth.tolist() == [2, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, 1]


@pytest.mark.parametrize("folder", ["", "{}/"])  # the truth has class folders, the data not
def test_the_truth_may_be_class_folders_with_the_same_paths(tmp_path, folder):
    classes = ["z", "a", "b", "z", "a", "b"]
    paths = [f"{folder.format(name)}{row}.png" for row, name in enumerate(classes)]
    images = open_images(fill(tmp_path / "data", *paths), labels="none")
    labeled = fill(tmp_path / "known", "a/1.png", "a/2.png", "b/1.png", "b/2.png", seed=20)
    labeled_images = label_images(images, str(labeled), "")
    folders = [f"{name}/{row}.png" for row, name in enumerate(classes)]
    other = str(fill(tmp_path / "truth", *folders, "z/more.png", seed=50))
    truth, names = truth_labels(labeled_images, other, images)
    assert names == ("a", "b", "z")
    row = labeled_images.names.index
    assert [names[truth[row(path)]] for path in paths] == classes
    assert (truth[~own_images(labeled_images)] == UNKNOWN).all()


def test_the_truth_of_added_images_is_not_asked(tmp_path, data):
    labeled = fill(tmp_path / "known", "a/1.png", "a/2.png", "b/1.png", "b/2.png", seed=20)
    images = open_images(data)
    labeled_images = label_images(images, str(labeled), "")
    rows = [("1.png", "b"), ("2.png", "z"), (f"{labeled}/a/1.png", "b")]
    truth, names = truth_labels(labeled_images, table(tmp_path / "t.csv", rows), images)
    assert names == ("a", "b", "z")
    assert truth[own_images(labeled_images)].tolist() == [1, 2, UNKNOWN, UNKNOWN, UNKNOWN]
    assert (truth[~own_images(labeled_images)] == UNKNOWN).all()


def test_arrays_may_be_the_truth_of_arrays(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (6, 8, 8), np.uint8)
    np.savez(tmp_path / "truth.npz", x=x, y=np.array([3, 3, 4, 4, 5, -1]))
    images = open_images(x)
    labeled = label_images(images, table(tmp_path / "t.csv", [("0", "3"), ("4", "5")]), "")
    truth, names = truth_labels(labeled, str(tmp_path / "truth.npz"), images)
    assert names == ("3", "5", "4")
    assert truth.tolist() == [0, 0, 2, 2, 1, UNKNOWN]


def test_a_truth_that_cannot_be_used_is_refused(tmp_path, data):
    images, labeled_images = classed(tmp_path / "x")
    flat = open_images(data)

    def message(truth, images, labeled_images=labeled_images):
        return refusal(DataError, truth_labels, labeled_images, str(truth), images)

    assert "carry no labels" in message("data", flat)
    other = fill(tmp_path / "other", "a/p.png", "a/q.png", "b/r\n.png", "b/s.png")
    assert "'a/p.png', 'a/q.png', 'b/r\\n.png', but the data have 'ant/1.png'" in message(
        other, images
    )
    twice = fill(tmp_path / "twice", "a/1.png", "b/1.png")
    assert "'1.png' is of the classes 'a' and 'b'; give a table" in message(twice, flat)
    renamed = table(tmp_path / "t.csv", [("bee/1.png", "Bee"), ("cat/1.png", "cat")])
    assert "the known class 'bee' 'Bee'; use one name" in message(renamed, images)
    nothing = table(tmp_path / "t.csv", [("x.png", "a")])
    assert "labels 'x.png'" in message(nothing, images)
    assert "no such file" in message(tmp_path / "gone.csv", images).lower()


def test_added_images_leave_those_held_out_that_the_encoder_was_not_trained_on(tmp_path):
    """An added near-duplicate is named before its group, and joins the part that the group is in."""
    x = np.random.default_rng(0).integers(0, 240, (60, 16, 16, 3), np.uint8)
    for row, pixels in enumerate(x):
        paths = [tmp_path / "data" / f"{row:02d}.png"]
        paths += [tmp_path / "known" / f"{row % 2}" / f"{row:02d}.png"] * (row % 3 == 0)
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels + (path.parent.name != "data")).save(path)
    data, known = str(tmp_path / "data"), str(tmp_path / "known")
    alone = split_images(open_images(data), 0.2, 0)
    for parts in (
        open_discovery_data(data, DiscoverConfig(labeled=known, val=0.2)).parts,
        open_labeled_data(data, ClassifyConfig(labeled=known, val=0.2)).parts,
    ):
        names = [Path(parts.images.names[row]).name for row in parts.test_rows]
        own = own_images(parts.images)[parts.test_rows]
        held_out = {alone.images.names[row] for row in alone.test_rows}
        assert {name for name, is_own in zip(names, own, strict=True) if is_own} == held_out
        added = {name for name, is_own in zip(names, own, strict=True) if not is_own}
        assert added == {name for name in held_out if int(name[:2]) % 3 == 0} != set()


def test_known_classes_among_unlabeled_images_are_refused_in_mode_ncd(tmp_path):
    images, labeled_images = classed(tmp_path)
    labeled, data = str(tmp_path / "known.csv"), str(tmp_path / "data")
    config = DiscoverConfig(labeled=labeled, truth="data", mode="ncd", val=0.0)
    message = refusal(DataError, open_discovery_data, data, config)
    assert "2 unlabeled images are of known classes, by the truth: 'bee' (1), 'cat' (1)" in message
    assert "--mode gcd" in message
    dataset = open_discovery_data(data, replace(config, mode="gcd"))
    assert dataset.truth.tolist() == [2, 2, 0, 0, 1, 1]
    whole = label_images(images, "", "cat,bee")
    check_disjoint(whole, truth_labels(whole, "data", images)[0])
    check_disjoint(labeled_images, np.full(6, UNKNOWN))


def test_everything_is_the_same_at_a_second_start(tmp_path, data):
    labeled = fill(tmp_path / "known", "cat/1.png", "dog/1.png", seed=9)
    fill(tmp_path / "more", "1.png", "2.png", seed=20)
    rows = [("1.png", "a"), ("more/1.png", "b"), ("more/2.png", "a")]
    for source in (str(labeled), table(tmp_path / "t.csv", rows)):
        first, second = (label_images(open_images(data), source, "") for _ in range(2))
        assert known_classes(first) == known_classes(second)
        assert first.fingerprint == second.fingerprint
        assert first.key == second.key != ""
    (tmp_path / "more/1.png").write_bytes(encoded(99))
    third = label_images(open_images(data), source, "")
    assert third.read(third.names.index(f"{tmp_path}/more/1.png")) == encoded(99)
