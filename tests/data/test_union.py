"""Two sets of images as one: order, classes, groups, reading; and exact copies."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from builders import encoded, exchange, fill, write_files

from nearkin.data.duplicates import signatures
from nearkin.data.labels import class_names
from nearkin.data.opening import open_images
from nearkin.data.split import split_images
from nearkin.data.union import copies, union
from nearkin.errors import DataError


def two(tmp_path):
    first = fill(tmp_path / "1", "cat/é.png", "cat/z.png", "9/a.png", "9/b.png")
    second = fill(tmp_path / "2", "ant/1.png", "ant/2.png", "cat/1.png", "cat/2.png", seed=9)
    return open_images(first), open_images(second)


def test_a_union_is_the_folder_that_holds_both(tmp_path):
    """Moved into one folder, the same images open as the same thing."""
    first, second = ("c/1.png", "c/2.png", "d/1.png"), ("1.png", "2.png")
    fill(tmp_path / "whole", *first)
    fill(tmp_path / "whole" / "e", *second, seed=9)
    parts = (fill(tmp_path / "1", *first), fill(tmp_path / "2", *second, seed=9))
    whole = open_images(tmp_path / "whole", labels="none")
    both = union(*(open_images(part, labels="none") for part in parts), "e/")
    assert both.fingerprint == whole.fingerprint
    for field in ("names", "labels", "groups", "splits", "sizes", "num_bytes", "formats"):
        assert np.array_equal(getattr(both, field), getattr(whole, field)), field
        assert type(getattr(both, field)) is type(getattr(whole, field))
    assert [both.read(row) for row in range(5)] == [whole.read(row) for row in range(5)]


def test_classes_of_one_name_are_one_and_all_are_in_order(tmp_path):
    first, second = two(tmp_path)
    both = union(first, second, "b/")
    names = ["9/a.png", "9/b.png", "b/ant/1.png", "b/ant/2.png", "b/cat/1.png", "b/cat/2.png"]
    assert list(both.names) == [*names, "cat/z.png", "cat/é.png"]  # in byte order
    assert both.classes == ("9", "ant", "cat")
    expected = dict(zip(first.names, class_names(first), strict=True))
    expected |= {f"b/{n}": c for n, c in zip(second.names, class_names(second), strict=True)}
    assert dict(zip(both.names, class_names(both), strict=True)) == expected
    both = union(first, second.subset(np.zeros(0, np.int64)), "b/")
    assert (both.names, class_names(both)) == (first.names, class_names(first))
    assert both.classes == ("9", "ant", "cat")  # a class without images stays one
    x = np.zeros((2, 8, 8), np.uint8)
    numbers = union(open_images((x, np.array([10, -1]))), open_images((x, np.array([9, 10]))), "b")
    assert numbers.classes == ("9", "10")
    assert class_names(numbers) == ["10", "", "9", "10"]


def test_groups_stay_apart_and_splits_stay(tmp_path):
    for side in "12":
        fill(tmp_path / side, "a.png", "b.png", "c.png", seed=int(side))
        text = "path,group,split\na.png,g,train\nb.png,g,train\nc.png,,test\n"
        (tmp_path / side / "t.csv").write_text(text)
    first, second = (open_images(tmp_path / side / "t.csv") for side in "12")
    both = union(first, second, "b.")  # a.png b.a.png b.b.png b.c.png b.png c.png
    assert both.groups.tolist() == [0, 1, 1, 3, 0, 5]
    assert both.group_names == ("g", "g", "g", "", "g", "")
    assert both.splits.tolist() == ["train", "train", "train", "test", "train", "test"]
    assert split_images(both, 0.1, 0).test_rows.tolist() == [3, 5]


def test_each_image_is_read_from_where_it_is(tmp_path):
    first, second = two(tmp_path)
    x = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
    # The prefix is that of names of the first, too, and a union may be part of another.
    both = union(union(first, second, "9/"), open_images(x), "9/")
    for images in (both, pickle.loads(pickle.dumps(both))):
        held = {name: images.read(row) for row, name in enumerate(images.names)}
        assert (len(held), held["9/a.png"]) == (11, (tmp_path / "1/9/a.png").read_bytes())
        assert held["9/ant/1.png"] == (tmp_path / "2/ant/1.png").read_bytes()
        assert all(np.array_equal(held[f"9/{row}"], x[row]) for row in range(3))
    assert both.format_counts == {"PNG": 8, "array": 3}
    assert union(open_images(x), first, "").read(0).tolist() == x[0].tolist()


def test_a_name_that_is_taken_is_refused(tmp_path):
    first, second = two(tmp_path)
    says = r"2 images have the names .* 'cat/1\.png'; rename"
    with pytest.raises(DataError, match=says) as error:
        union(union(first, second, ""), second.subset(np.array([2, 3])), "")
    assert "\n" not in str(error.value)
    assert len(union(first, second, "")) == 8


def test_bad_files_and_notes_of_both_are_kept(tmp_path):
    for side in "12":
        fill(tmp_path / side, "a.png")
        (tmp_path / side / "bad.png").write_text("no image")
        (tmp_path / f"{side}.csv").write_text(f"path,label\na.png,x\ngone{side}.png,x\n")
    images = [open_images(tmp_path / s, labels=str(tmp_path / f"{s}.csv")) for s in "12"]
    both = union(*images, "b/")
    assert [bad.name for bad in both.bad] == ["b/bad.png", "bad.png"]
    assert (both.notes, len(both.notes)) == ((*images[0].notes, *images[1].notes), 2)


def test_findings_are_remembered_if_both_remember_theirs(tmp_path):
    first, second = two(tmp_path)
    both = union(first, second, "b/")
    digests = signatures(both)["digest"]
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        exchange(path)
    assert np.array_equal(signatures(union(first, second, "b/"))["digest"], digests)
    assert not any(map(any, signatures(union(first, second, "c/"))["digest"].tolist()))
    assert union(first, open_images(np.zeros((2, 8, 8), np.uint8)), "b/").key == ""


def test_sizes_of_files_and_pixels_of_arrays_count_in_a_union(tmp_path):
    files, x = open_images(fill(tmp_path / "s", "a.png")), np.zeros((2, 8, 8), np.uint8)
    prints = {union(files, open_images(x + i), "b/").fingerprint for i in (0, 1)}
    assert len(prints) == 2
    large = union(files, open_images(fill(tmp_path / "l", "b.png", size=(65, 9))), "x/")
    assert not large.is_small
    assert union(files, files, "x/").is_small
    assert large.sizes.tolist() == [[20, 10], [65, 9]]


def test_names_that_are_not_unicode_keep_their_order(tmp_path):
    for side in "12":
        fill(tmp_path / side, "😀.png", "a\nb.png")
        (tmp_path / side / os.fsdecode(b"\xff\xfe.png")).write_bytes(encoded(7))
    both = union(open_images(tmp_path / "1"), open_images(tmp_path / "2"), "ÿ/")
    assert list(both.names) == sorted(both.names, key=os.fsencode)
    assert all(isinstance(both.read(row), bytes) for row in range(6))


def test_copies_are_groups_with_the_same_bytes(tmp_path):
    fill(tmp_path, "a.png", "b.png", "c.png", "d.png", "e.png")
    write_files(tmp_path, {"a2.png": encoded(0), "x/a3.png": encoded(0), "b2.png": encoded(1)})
    images = open_images(tmp_path)
    a, a2, a3, b, b2 = map(images.names.index, ("a.png", "a2.png", "x/a3.png", "b.png", "b2.png"))
    groups = {tuple(group) for group in copies(images, range(len(images)))}
    assert groups == {tuple(sorted((a, a2, a3))), tuple(sorted((b, b2)))}
    assert copies(images, [a2]) == [sorted((a, a2, a3))]
    assert copies(images, [images.names.index("c.png")]) == []
    assert copies(images, []) == []


def test_copies_of_arrays_have_one_shape_and_what_became_unreadable_has_none(tmp_path):
    flat = np.arange(32, dtype=np.uint8)
    wide, high = flat.reshape(1, 4, 8), flat.reshape(1, 8, 4)
    both = union(open_images(np.concatenate([wide, wide, wide + 1])), open_images(high), "b/")
    assert copies(both, range(4)) == [[0, 1]]
    images = open_images(write_files(tmp_path, {f"{name}.png": encoded() for name in "abcd"}))
    for name in ("b.png", "d.png"):
        (tmp_path / name).unlink()
    assert copies(images, range(4)) == [[0, 2]]
