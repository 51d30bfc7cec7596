"""Known classes from folders, tables, archives and arrays; and a truth that only scores."""

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

import discoveries
import numpy as np
import pyarrow as pa
import pytest
from builders import (
    as_bytes,
    contents,
    encoded,
    fill,
    noise,
    pack,
    tar,
    write_files,
    write_network,
)
from PIL import Image
from pyarrow import parquet

from nearkin.classification.data import open_labeled_data
from nearkin.config import ClassifyConfig, DiscoverConfig
from nearkin.data.notes import Note
from nearkin.data.opening import open_images
from nearkin.data.split import split_images
from nearkin.discovery.data import open_discovery_data
from nearkin.errors import DataError, UsageError
from nearkin.labels.known import label_images, own_images
from nearkin.labels.truth import check_disjoint, truth_labels
from nearkin.run.data import held_share, note_data
from nearkin.run.folder import RunFolder
from nearkin.schema import from_text
from nearkin.types import UNLABELED

FLAT = ("1.png", "2.png", "3.png", "4.png", "5.png")
PETS = ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png")
BEASTS = [f"{name}/{number}.png" for name in ("ant", "bee", "cat") for number in (1, 2)]


@pytest.fixture
def data(tmp_path):
    """Five images without labels."""
    return fill(tmp_path / "data", *FLAT)


@pytest.fixture
def table(tmp_path):
    """Write a table of paths and labels, and return its path."""

    return lambda *rows, **how: discoveries.table(tmp_path / "t.csv", rows, **how)


def known(tmp_path, *names):
    """Class folders beside the data, of other images."""
    return fill(tmp_path / "known", *names, seed=9)


def label(data, by="", names=""):
    """The data with labels by a folder, archive or table, or by the names of its classes."""
    chosen = from_text(names, Sequence[str]) if names else ()
    return label_images(open_images(data), str(by), chosen)


def labels_of(images):
    """The known class of each image that has one, by name."""
    names = zip(images.names, images.labels.tolist(), strict=True)
    return {name: images.classes[label] for name, label in names if label != UNLABELED}


def refused(call, *args, error=DataError):
    """The message of the error that a call ends in, which is one line."""
    with pytest.raises(error) as raised:
        call(*args)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_class_folders_elsewhere_are_added(tmp_path, data):
    folders = known(tmp_path, *PETS)
    images = label(data, folders)
    assert images.classes == ("cat", "dog")
    assert labels_of(images) == {f"{folders}/{name}": name[:3] for name in PETS}
    own = [name for name, own in zip(images.names, own_images(images), strict=True) if own]
    assert own == list(FLAT)
    assert len(images) == 9
    for row, name in enumerate(images.names):
        assert images.read(row) == (data / name).read_bytes()
    assert images.notes == ()


def test_class_folders_inside_the_data_add_nothing_also_through_links(tmp_path, data, table):
    fill(data / "known", *PETS, seed=9)
    images, labeled = open_images(data), label(data, data / "known")
    assert labeled.names == images.names
    assert labeled.fingerprint == images.fingerprint
    assert own_images(labeled).all()
    assert labels_of(labeled) == {f"known/{name}": name[:3] for name in PETS}
    (tmp_path / "link").symlink_to(data)
    assert own_images(label(tmp_path / "link", tmp_path / "link/known")).all()
    by = table((tmp_path / "link/1.png", "a"), (data / "known/../2.png", "b"))
    assert labels_of(label(data, by)) == {"1.png": "a", "2.png": "b"}


def test_copies_of_the_data_are_recognized_by_content(tmp_path, data, table):
    folders = known(tmp_path, "cat/new.png", "dog/new.png")
    (folders / "cat/copy.png").write_bytes((data / "2.png").read_bytes())
    (folders / "cat/again.png").write_bytes((data / "2.png").read_bytes())
    (folders / "dog/twice.png").write_bytes((folders / "dog/new.png").read_bytes())
    (data / "same.png").write_bytes((data / "2.png").read_bytes())
    images = label(data, folders)
    added = {f"{folders}/cat/new.png": "cat", f"{folders}/dog/new.png": "dog"}
    assert labels_of(images) == {"2.png": "cat", "same.png": "cat"} | added
    assert set(images.names) == {*FLAT, "same.png", *added}
    assert [own_images(images)[images.names.index(name)] for name in added] == [False, False]
    assert own_images(images).sum() == 6
    left = tuple(f"{folders}/{name}.png" for name in ("cat/again", "cat/copy", "dog/twice"))
    text = "3 labeled files that are exact copies of other images"
    assert images.notes[0] == Note("left out", text, 3, left)
    assert "2 images of the data are labeled as exact copies" in str(images.notes[1])
    # Copies within the data share a label that a path gave.
    labeled = label(data, table(("2.png", "cat"), ("3.png", "dog")))
    assert labels_of(labeled) == {"2.png": "cat", "same.png": "cat", "3.png": "dog"}
    assert labeled.notes[0].count == 1


def test_labels_of_the_data_themselves_stay_hidden(tmp_path):
    data = fill(tmp_path / "data", *BEASTS)
    assert open_images(data).classes == ("ant", "bee", "cat")
    labeled = label(data, known(tmp_path, "10/1.png", "10/2.png", "9/1.png", "9/2.png"))
    assert labeled.classes == ("9", "10")  # numbered as numbers where they are
    assert (labeled.labels[own_images(labeled)] == UNLABELED).all()
    labeled = label(data, names="cat,ant")
    assert labeled.classes == ("cat", "ant")
    assert labeled.labels.tolist() == [1, 1, UNLABELED, UNLABELED, 0, 0]


def test_any_name_that_a_file_system_allows_can_be_labeled(tmp_path):
    odd = ["a\nb", "\u202ertl", "😀", "-x", "~", "x" * 200, os.fsdecode(b"\xff\xfe")]
    data = fill(tmp_path / "data", *(f"{name}.png" for name in odd))
    folders = fill(tmp_path / "known", *(f"{name}/{name}.png" for name in odd), seed=50)
    for name in odd[:3]:
        (folders / name / "copy.png").write_bytes((data / f"{name}.png").read_bytes())
    labeled = label(data, folders)
    outside = {f"{folders}/{name}/{name}.png": name for name in odd}
    assert labels_of(labeled) == outside | {f"{name}.png": name for name in odd[:3]}
    assert list(labeled.names) == sorted(labeled.names, key=os.fsencode)
    assert list(labeled.classes) == sorted(odd, key=os.fsencode)
    assert ("guessed", 3) in [(note.decision, note.count) for note in labeled.notes]
    inside = label(tmp_path, folders)
    assert own_images(inside).all()
    assert set(labels_of(inside)) >= {f"known/{name}/{name}.png" for name in odd}


def test_damaged_labeled_images_are_bad_files_and_a_class_of_one_image_is_a_note(tmp_path, data):
    folders = write_files(known(tmp_path, *PETS), {"dog/bad.png": b"no image"})
    images = label(data, folders)
    assert images.classes == ("cat", "dog")
    assert [bad.name for bad in images.bad] == [f"{folders}/dog/bad.png"]
    assert [bad.name for bad in label(tmp_path, folders).bad] == ["known/dog/bad.png"]
    few = fill(tmp_path / "few", "cat/1.png", "cat/2.png", "d\ng/1.png", seed=9)
    dataset = open_discovery_data(str(data), DiscoverConfig(labeled=str(few)))
    warning = r"warning: 1 of 2 known classes have one image only, such as 'd\ng'"
    assert warning in list(dataset.lines())


def test_a_known_class_without_a_usable_image_is_refused_and_not_discovered_as_novel(
    tmp_path, data, table
):
    empty = {"eel/1.png": b"", "eel/2.png": b"", "dog/3.png": b""}
    folders = write_files(known(tmp_path, *PETS), empty)
    says = "1 known class without a usable image, such as 'eel'"
    packed = pack(tmp_path / "k.zip", contents(folders).items())
    for labeled, images in ((folders, data), (folders, tmp_path), (packed, data)):
        message = refused(label, images, labeled)
        assert says in message
        assert "eel/1.png': empty file); replace its files, or leave it out" in message
    names = ("1.png", "2.png", *(str(folders / name) for name in empty))
    message = refused(label, data, table(*zip(names, ("cat", "dog", "eel", "eel", "dog"))))
    assert f"{says} ('{folders}/eel/1.png': empty file)" in message
    message = refused(label, folders, "", "cat,eel")
    assert "known eel: none of its 2 images can be used, such as 'eel/1.png' (empty" in message
    (folders / "eel/1.png").write_bytes(encoded(50))
    assert label(data, folders).classes == ("cat", "dog", "eel")


def test_an_archive_of_class_folders_is_like_the_folder(tmp_path, data):
    seeds = {"cat/1.png": 9, "cat/2.png": 0, "dog/1.png": 10, "dog/2.png": 11}
    content = tar((f"set/{name}", encoded(seed)) for name, seed in seeds.items())
    (tmp_path / "known.tar").write_bytes(content)
    labeled = label(data, tmp_path / "known.tar")
    names = ("cat/1.png", "dog/1.png", "dog/2.png")  # the other is data/1.png
    added = {f"{tmp_path}/known.tar/set/{name}": name[:3] for name in names}
    assert labels_of(labeled) == {"1.png": "cat"} | added
    row = labeled.names.index(f"{tmp_path}/known.tar/set/dog/2.png")
    assert labeled.read(row) == encoded(11)


def test_a_table_may_spell_the_images_of_the_data_in_many_ways(tmp_path, table):
    data = fill(tmp_path / "data", *(f"x/{i}.png" for i in range(5)))
    ways = "x/", "./x/", "x\\", f"{data}/x/", f"/{data}/x/", "x//./"
    for way, delimiter in itertools.product(ways, ",;"):
        rows = [(f"{way}{i}.png", "ab"[i % 2]) for i in range(4)]
        labeled = label(data, table(*rows, delimiter=delimiter))
        expected = {f"x/{i}.png": "ab"[i % 2] for i in range(4)}
        assert labels_of(labeled) == expected, (way, delimiter)
        assert own_images(labeled).all()


def test_a_table_may_be_relative_to_itself_and_name_images_outside(tmp_path, data, table):
    fill(tmp_path / "more", "6.png", "7.png", seed=9)
    (tmp_path / "more/copy.png").write_bytes((data / "3.png").read_bytes())
    rows = [("data/1.png", "a"), ("2.png", "b"), ("more/6.png", "a")]
    rows += [(f"{tmp_path}/more/7.png", "b")]
    rows += [("data/../more/copy.png", "b"), ("data/4.png", ""), ("gone.png", "  ")]
    labeled = label(data, table(*rows))
    outside = {f"{tmp_path}/more/6.png": "a", f"{tmp_path}/more/7.png": "b"}
    assert labels_of(labeled) == {"1.png": "a", "2.png": "b", "3.png": "b"} | outside
    assert len(labeled) == 7
    for row, name in enumerate(labeled.names):
        assert labeled.read(row) == (data / name).read_bytes()


def test_rows_without_a_label_that_no_image_is_of_are_noted(tmp_path, data):
    by = tmp_path / "t.csv"
    by.write_text("path,label,split\n1.png,a,\n2.png,b,\n3.png,,test\ngone.png,,test\n")
    images = label(data, by)
    text = f"1 rows without a label of {by}, which no image is of"
    assert images.notes == (Note("left out", text, 1, ("gone.png",)),)
    assert images.splits.tolist() == ["", "", "test", "", ""]


def test_files_outside_of_the_data_are_labeled_however_accents_are_written(tmp_path, data, table):
    """As macOS does, in two letters; a name that is there in both forms is not composed."""
    both = [normalize(form, "é.png") for form in ("NFC", "NFD")]
    one = normalize("NFD", "ü.png")
    fill(tmp_path / "more", *both, one, seed=9)
    rows = [(f"more/{name}", "aba"[n]) for n, name in enumerate([*both, one])]
    labeled = label(data, table(*rows, ("data/1.png", "b")))
    outside = {both[0]: "a", both[1]: "b", normalize("NFC", one): "a"}
    expected = {f"{tmp_path}/more/{name}": cls for name, cls in outside.items()}
    assert labels_of(labeled) == {"1.png": "b"} | expected


def test_a_path_of_two_images_is_refused_and_a_copy_beside_the_table_is_the_image(
    tmp_path, data, table
):
    """And one that the data pass over may be named."""
    (tmp_path / "1.png").write_bytes((data / "1.png").read_bytes())
    labeled = label(data, table(("1.png", "a"), ("2.png", "b")))
    assert labels_of(labeled) == {"1.png": "a", "2.png": "b"}
    assert own_images(labeled).all()
    fill(tmp_path, "2.png", seed=9)
    message = refused(label, data, table(("1.png", "a"), ("2.png", "b")))
    assert f"'2.png' is an image of the data and another file, {tmp_path}/2.png; write" in message
    labeled = label(data, table(("1.png", "a"), (f"{tmp_path}/2.png", "b")))
    assert labels_of(labeled) == {"1.png": "a", f"{tmp_path}/2.png": "b"}
    for name in ("1.png", "2.png"):
        (tmp_path / name).unlink()
    fill(data / "deep", "1.png", seed=9)
    inside = discoveries.table(data / "deep/t.csv", [("1.png", "a"), ("2.png", "b")])
    assert "'1.png' is an image of the data and another file" in refused(label, data, inside)
    for name in ("1.png", "t.csv"):
        (data / "deep" / name).unlink()
    fill(data, ".hidden/6.png", seed=9)
    labeled = label(data, table(("1.png", "a"), (".hidden/6.png", "b")))
    assert labels_of(labeled) == {"1.png": "a", f"{data}/.hidden/6.png": "b"}


def test_arrays_may_be_labeled_by_a_table_of_their_numbers_or_by_arrays_that_are_added(tmp_path):
    columns = {"path": ["0", "3"], "label": pa.array([7, 5], pa.int64())}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    x = np.random.default_rng(0).integers(0, 256, (5, 8, 8), np.uint8)
    assert labels_of(label(x, tmp_path / "t.parquet")) == {"0": "7", "3": "5"}
    x = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "data.npz", x=x[:5])
    np.savez(tmp_path / "known.npz", x=x[3:], y=np.array([0, 1, 1, 0, -1, 2]))
    labeled = label(tmp_path / "data.npz", tmp_path / "known.npz")
    added = {f"{tmp_path}/known.npz/{row}": c for row, c in (("2", "1"), ("3", "0"), ("5", "2"))}
    assert labels_of(labeled) == {"3": "0", "4": "1"} | added
    assert len(labeled) == 8  # the array without a label is not added
    assert labeled.is_small
    assert np.array_equal(labeled.read(labeled.names.index("4")), x[4])


def test_names_that_a_system_has_decomposed_are_those_of_the_table(tmp_path, data):
    folder = fill(tmp_path / "lab", *(f"e\u0301{i}.png" for i in range(4)), seed=9)
    rows = [(f"e\u0301{i}.png", "ab"[i % 2]) for i in range(4)]
    labeled = label(data, discoveries.table(folder / "t.csv", rows))
    assert labels_of(labeled) == {f"{folder}/\u00e9{i}.png": "ab"[i % 2] for i in range(4)}
    assert [note.decision for note in labeled.notes] == ["renamed"]


def test_a_table_of_boxes_labels_these_boxes_and_no_whole_images(tmp_path, data):
    boxes = [f"{name},{corner},0,{corner + 8},8" for name in FLAT[:3] for corner in (0, 4)]
    rows = [f"{box},{'ab'[row % 2]}" for row, box in enumerate(boxes)]
    for name, lines in (("all", rows), ("some", rows[:4])):
        (data / f"{name}.csv").write_text("\n".join(["path,x0,y0,x1,y1,label", *lines]) + "\n")
    images, some = str(data / "all.csv"), str(data / "some.csv")
    expected = {f"{box.replace(',', '#', 1)}": "ab"[row % 2] for row, box in enumerate(boxes[:4])}
    labeled = label(images, some)
    assert labels_of(labeled) == labels_of(open_images(images, labels=some)) == expected
    assert own_images(labeled).all()
    assert len(labeled) == 6
    assert "exist neither in the data" in refused(label, data, some)
    assert "but the images are called '1.png'" in refused(lambda: open_images(data, labels=some))


def test_the_table_that_lists_the_data_may_label_some_of_them(tmp_path, data, table):
    by = table(*((f"data/{name}", {"1": "a", "2": "b"}.get(name[0], "")) for name in FLAT[:4]))
    labeled = label(by, by)
    assert labels_of(labeled) == {"data/1.png": "a", "data/2.png": "b"}
    assert len(labeled) == 4
    # Labeled files that cannot be used are counted.
    write_files(tmp_path, {"data/bad.png": b"no image", "bad2.png": b"no image"})
    good = [("1.png", "a"), ("2.png", "b")]
    labeled = label(data, table(*good, ("bad.png", "a"), ("bad2.png", "b"), ("data", "b")))
    assert labels_of(labeled) == {"1.png": "a", "2.png": "b"}
    lost = (f"{tmp_path}/bad2.png", str(data), "bad.png")
    assert labeled.notes[0] == Note("left out", "3 labeled files that cannot be used", 3, lost)
    assert {bad.name for bad in labeled.bad} == {"bad.png", str(data), f"{tmp_path}/bad2.png"}


def test_class_folders_and_sets_that_cannot_label_are_refused(tmp_path, data):
    folders = known(tmp_path, "cat/1.png", "dog/1.png", "a\nb.png")
    says = r"1 images lie in no class folder, such as 'a\nb.png'; move each"
    assert says in refused(label, data, folders)
    (folders / "a\nb.png").unlink()
    (folders / "dog/copy.png").write_bytes((folders / "cat/1.png").read_bytes())
    message = refused(label, data, folders)
    assert "1 images are labeled as two classes" in message
    assert f"'{folders}/cat/1.png' ('cat') and '{folders}/dog/copy.png' ('dog')" in message
    one = fill(tmp_path / "one", "cat/1.png", "cat/2.png", seed=9)
    assert "labeled as 'cat'; give at least two" in refused(label, data, one)
    np.savez(tmp_path / "known.npz", x=np.zeros((5, 8, 8), np.uint8))
    message = refused(label, data, tmp_path / "known.npz")
    assert "carries no labels; give class folders" in message
    for missing in ("nothing", "nothing.csv"):
        assert "no such file" in refused(label, data, tmp_path / missing).lower()


def test_rows_that_cannot_label_are_refused(tmp_path, data, table):
    (data / "same.png").write_bytes((data / "1.png").read_bytes())
    (tmp_path / "bad.png").write_text("no image")
    twice = f"'{data}/1.png' is described in line 2 and, differently, in line 3"
    copies = "'1.png' ('a') and 'same.png' ('b'), which are exact copies"
    nowhere = [("gone\n1.png", "b"), ("/no/where.png", "b"), ("x\0.png", "b")]
    for rows, *says in (
        ([("1.png", ""), ("2.png", " ")], "none of 2 rows has a label; fill"),
        ([("bad.png", "a")], "1 known class without a usable image, such as 'a'"),
        ([("1.png", "a"), (f"{data}/1.png", "b")], twice),
        ([("1.png", "a"), ("same.png", "b")], copies),
        (
            [("1.png", "a"), *nowhere],
            "3 of 4 labeled files exist neither",
            r"such as 'gone\n1.png', '/no/where.png', 'x\x00.png'",
            "such as '1.png'",
        ),
    ):
        message = refused(label, data, table(*rows))
        assert all(words in message for words in says), (rows, message)


def test_class_names_that_read_the_same_are_one_and_those_in_another_case_are_noted(
    tmp_path, data
):
    folders = known(tmp_path, "caf\u00e9/1.png", "cafe\u0301/2.png", "dog/1.png", "dog/2.png")
    discover, classify = (of(labeled=str(folders)) for of in (DiscoverConfig, ClassifyConfig))
    opened = open_discovery_data(str(data), discover), open_labeled_data(str(data), classify)
    for dataset in opened:
        assert dataset.classes == ("caf\u00e9", "dog")
        decisions = [(note.decision, note.count) for note in dataset.images.notes]
        assert ("renamed", 1) in decisions  # the name of the file, before it is a class
    (folders / "cafe\u0301").rename(folders / "CAFE\u0301")
    dataset = open_discovery_data(str(data), discover)
    assert dataset.classes == ("CAF\u00c9", "caf\u00e9", "dog")
    examples = [note.examples for note in dataset.images.notes if note.decision == "guessed"]
    assert ("CAF\u00c9", "caf\u00e9") in examples


def test_names_that_cannot_be_known_are_refused(tmp_path):
    data = fill(tmp_path, *BEASTS)
    for by, names, says in (
        ("", "ant", "at least two"),
        ("", "ant,ant", "each once"),
        ("", "ant, ant ,bee", "each once"),
        ("", "ant,be", "be is no class of the data. Did you mean bee?"),
    ):
        assert says in refused(label, data, by, names, error=UsageError), (by, names)
    loose = fill(tmp_path / "loose", *(f"{c}/{i}.png" for c in "ab" for i in "12"), "1.png")
    says = "known a: the data have no labels; folders are classes if nine of ten images"
    assert says in refused(label, loose, "", "a,b", error=UsageError)


@pytest.fixture
def classed(tmp_path, table):
    """Data with labels of three classes, and the same with those of two of them."""
    data = fill(tmp_path / "beasts", *BEASTS)
    return open_images(data), label(data, table(("bee/1.png", "bee"), ("cat/1.png", "cat")))


def truth_of(labeled, by, data):
    """All classes of a truth, and that of each image that has one, by name."""
    truth, names, _ = truth_labels(labeled, str(by), data)
    return names, labels_of(replace(labeled, labels=truth, classes=names))


def test_the_truth_may_be_what_the_data_say_or_a_table_that_says_less(classed, table):
    images, labeled = classed
    expected = {name: name[:3] for name in BEASTS}
    assert truth_of(labeled, "data", images) == (("bee", "cat", "ant"), expected)
    assert labeled.labels.tolist() == [UNLABELED, UNLABELED, 0, UNLABELED, 1, UNLABELED]
    by = table(("ant\\1.png", "x"), ("cat/2.png", "cat"), ("bee/2.png", ""), ("gone.png", "y"))
    expected = {"ant/1.png": "x", "cat/2.png": "cat"}
    assert truth_of(labeled, by, images) == (("bee", "cat", "x"), expected)
    (note,) = truth_labels(labeled, str(by), images)[2]
    assert (note.decision, note.count, note.examples) == ("left out", 1, ("gone.png",))


def test_the_truth_may_be_class_folders_with_the_same_paths(tmp_path):
    classes = ["z", "a", "b", "z", "a", "b"]
    folders = [f"{name}/{row}.png" for row, name in enumerate(classes)]
    by = fill(tmp_path / "known", "a/1.png", "a/2.png", "b/1.png", "b/2.png", seed=20)
    other = fill(tmp_path / "truth", *folders, "z/more.png", seed=50)
    for data, paths in (("flat", [Path(path).name for path in folders]), ("same", folders)):
        images = open_images(fill(tmp_path / data, *paths), labels="none")
        expected = ("a", "b", "z"), dict(zip(paths, classes, strict=True))
        labeled = label_images(images, str(by), "")
        assert truth_of(labeled, other, images) == expected
        (note,) = truth_labels(labeled, str(other), images)[2]
        assert (note.decision, note.count, note.examples) == ("left out", 1, ("z/more.png",))


def test_the_truth_of_added_images_is_not_asked_and_arrays_may_be_that_of_arrays(
    tmp_path, data, table
):
    by = fill(tmp_path / "known", "a/1.png", "a/2.png", "b/1.png", "b/2.png", seed=20)
    other = table(("1.png", "b"), ("2.png", "z"), (by / "a/1.png", "b"))
    expected = ("a", "b", "z"), {"1.png": "b", "2.png": "z"}
    assert truth_of(label(data, by), other, open_images(data)) == expected
    x = np.random.default_rng(0).integers(0, 256, (6, 8, 8), np.uint8)
    np.savez(tmp_path / "truth.npz", x=x, y=np.array([3, 3, 4, 4, 5, -1]))
    labeled = label(x, table(("0", "3"), ("4", "5")))
    expected = ("3", "5", "4"), dict(zip("01234", "33445", strict=True))
    assert truth_of(labeled, tmp_path / "truth.npz", open_images(x)) == expected


def test_a_truth_that_cannot_be_used_is_refused(tmp_path, data, classed, table):
    images, labeled = classed
    other = fill(tmp_path / "other", "a/p.png", "a/q.png", "b/r\n.png", "b/s.png")
    twice = fill(tmp_path / "twice", "a/1.png", "b/1.png")
    for truth, of, says in (
        ("data", open_images(data), "carry no labels"),
        (other, images, "'a/p.png', 'a/q.png', 'b/r\\n.png', but the data have 'ant/1.png'"),
        (twice, open_images(data), "'1.png' is of the classes 'a' and 'b'; give a table"),
        (tmp_path / "gone.csv", images, "o such file"),
    ):
        assert says in refused(truth_labels, labeled, str(truth), of)
    for rows, says in (
        ([("bee/1.png", "Bee"), ("cat/1.png", "cat")], "known class 'bee' 'Bee'; use one name"),
        ([("x.png", "a")], "labels 'x.png'"),
    ):
        assert says in refused(truth_labels, labeled, str(table(*rows)), images)


def test_added_images_leave_those_held_out_that_the_encoder_was_not_trained_on(tmp_path):
    """An added near-duplicate is named before its group, and joins the part that the group is in."""
    for row in range(60):
        files = {"data": 0} | ({f"known/{row % 2}": 1} if row % 3 == 0 else {})
        for folder, more in files.items():
            pixels = (noise(row, (16, 16)) // 2 + more).astype(np.uint8)
            write_files(tmp_path / folder, {f"{row:02d}.png": as_bytes(Image.fromarray(pixels))})
    data, by = str(tmp_path / "data"), str(tmp_path / "known")
    alone = split_images(open_images(data), 0.2, 0)
    held_out = {alone.images.names[row] for row in alone.test_rows}
    run = RunFolder(tmp_path)
    note_data(run, alone)
    config = {"labeled": by, "val": 0.2, "encoder": str(run.path)}
    for parts in (
        open_discovery_data(data, DiscoverConfig(**config)).parts,
        open_labeled_data(data, ClassifyConfig(**config)).parts,
    ):
        names = [Path(parts.images.names[row]).name for row in parts.test_rows]
        own = own_images(parts.images)[parts.test_rows]
        assert {name for name, is_own in zip(names, own, strict=True) if is_own} == held_out
        added = {name for name, is_own in zip(names, own, strict=True) if not is_own}
        assert added == {name for name in held_out if int(name[:2]) % 3 == 0} != set()


def test_files_of_other_folders_that_are_called_as_those_of_a_run_are_none(tmp_path, monkeypatch):
    """A user's own in the current folder, and beside weights that are given as a file."""
    data = str(fill(tmp_path / "data", *(f"{name}/{n}.png" for name in "ab" for n in range(9))))
    for name in ("images.csv", "config.toml", "data.json"):
        (tmp_path / name).write_text("file,label\n")
    write_network(tmp_path / "mine.safetensors")
    monkeypatch.chdir(tmp_path)
    for given in ("", "mine.safetensors"):
        config = ClassifyConfig(encoder=given)
        assert held_share(data, config) == 0.1
        parts = open_labeled_data(data, config).parts
        assert len(parts.train_rows) == 18 - len(parts.test_rows)


def test_a_table_of_labels_also_says_groups_and_splits(tmp_path):
    """As it does by --labels; of images beside the data too, and of copies of those."""
    files = [f"{row:02d}.png" for row in range(24)]
    data = fill(tmp_path / "data", *files)
    fill(tmp_path / "more", "a.png", "b.png", seed=50)
    (tmp_path / "more/copy.png").write_bytes((data / "23.png").read_bytes())
    side = ("train", "test", "val")
    written = [
        (f"{row:02d}.png", f"c{row % 2}" if row < 20 else "", f"g{row // 2}", side[row // 2 % 3])
        for row in range(22)
    ]
    beside = [("more/a.png", "c0", "g0", "test"), ("more/copy.png", "c1", "", "test")]

    def by(name, rows):
        header = ("path", "label", "group", "split")[: len(rows[0])]
        text = "\n".join(",".join(row) for row in [header, *rows])
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    same, other = by("same.csv", written), by("other.csv", [*written, *beside])
    for settings in ({"labels": same}, {"labeled": same}, {"labeled": other}):
        parts = open_labeled_data(str(data), ClassifyConfig(**settings)).parts
        held = {parts.images.names[row] for row in parts.test_rows}
        added = {f"{tmp_path}/more/a.png", "23.png"} if settings == {"labeled": other} else set()
        assert held == {path for path, *_, split in written if split == "test"} | added, settings
        assert len(parts.images) == 24 - sum(row[3] == "val" for row in written) + len(added) // 2
    parts = open_discovery_data(str(data), DiscoverConfig(labeled=other)).parts
    assert {parts.images.names[row] for row in parts.test_rows} == held
    grouped = by("t.csv", [row[:3] for row in written])
    for seed in range(5):
        config = DiscoverConfig(labeled=grouped, val=0.3, seed=seed)
        parts = open_discovery_data(str(data), config).parts
        rows = [parts.images.names.index(path) for path, *_ in written]
        held_out, groups = parts.held_out[rows], parts.images.groups[rows]
        assert 0 < held_out.sum() < 22
        assert (held_out[::2] == held_out[1::2]).all()
        assert (groups[::2] == groups[1::2]).all()


def test_known_classes_among_unlabeled_images_are_refused_in_mode_ncd(tmp_path, classed):
    images, labeled = classed
    data = str(tmp_path / "beasts")
    config = DiscoverConfig(labeled=str(tmp_path / "t.csv"), truth="data", mode="ncd", val=0.0)
    message = refused(open_discovery_data, data, config)
    assert "2 unlabeled images are of known classes, by the truth: 'bee' (1), 'cat' (1)" in message
    assert "mode gcd" in message
    dataset = open_discovery_data(data, replace(config, mode="gcd"))
    assert dataset.truth.tolist() == [2, 2, 0, 0, 1, 1]
    truth = tmp_path / "truth.csv"
    discoveries.table(truth, [("ant/1.png", "ant"), ("gone.png", "y")])
    dataset = open_discovery_data(data, replace(config, mode="gcd", truth=str(truth)))
    assert "gone.png" in [name for note in dataset.images.notes for name in note.examples]
    whole = label_images(images, "", ["cat", "bee"])
    check_disjoint(whole, truth_labels(whole, "data", images)[0])
    check_disjoint(labeled, np.full(6, UNLABELED))


def test_everything_is_the_same_at_a_second_start(tmp_path, data, table):
    fill(tmp_path / "more", "1.png", "2.png", seed=20)
    rows = table(("1.png", "a"), ("more/1.png", "b"), ("more/2.png", "a"))
    for source in (known(tmp_path, "cat/1.png", "dog/1.png"), rows):
        first, second = (label(data, source) for _ in range(2))
        assert labels_of(first) == labels_of(second)
        assert first.fingerprint == second.fingerprint
        assert first.key == second.key != ""
    (tmp_path / "more/1.png").write_bytes(encoded(99))
    third = label(data, rows)
    assert third.read(third.names.index(f"{tmp_path}/more/1.png")) == encoded(99)
