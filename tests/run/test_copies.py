"""`--copy-to`: copies of images go into a folder per class, and nowhere else."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import contents, fill, tar, write_files
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from processes import small_files

from nearkin.data.decode import decode
from nearkin.data.opening import open_images
from nearkin.data.union import union
from nearkin.errors import OutputError, UsageError
from nearkin.run.copies import check_destination, copy_to, file_names
from nearkin.run.folder import RunFolder
from nearkin.run.opening import check_copies

DEVICES = {"con", "prn", "aux", "nul", *(f"{p}{n}" for p in ("com", "lpt") for n in range(1, 10))}
HOSTILE = ["con", "LPT9.a.png", "end.", "../../x.png", "/etc/passwd", "..", ".", "a\0b", "a\nb",
           "c:\\d", "-rf", "\udcff", "~"]  # fmt: skip


def filled(root, *names):
    return open_images(fill(root, *names), cache=False)


def copy(folder, images, classes, data=()):
    return copy_to(folder, images, np.arange(len(images)), classes, data=data)


def test_copies_have_the_bytes_of_the_images_and_lie_in_the_folders_of_their_classes(tmp_path):
    images = filled(tmp_path / "data", "1.png", "2.jpg", "old/1.png", "old/deep/3.png")
    rows, classes = np.array([3, 0, 2]), ["new-1", "cat", "new-1"]
    out = tmp_path / "there" / "sorted"
    assert copy_to(out, images, rows, classes, data=[str(tmp_path / "data")]) == 3
    assert contents(out) == {
        "cat/1.png": images.read(0),
        "new-1/old-1.png": images.read(2),
        "new-1/old-deep-3.png": images.read(3),
    }


def test_images_of_an_archive_are_copied(tmp_path):
    made = filled(tmp_path / "data", "a/1.png", "b/1.png")
    members = [(f"data/{name}", made.read(row)) for row, name in enumerate(made.names)]
    (tmp_path / "data.tar").write_bytes(tar(members))
    images = open_images(tmp_path / "data.tar", cache=False)
    assert copy(tmp_path / "out", images, ["cat", "cat"], [str(tmp_path / "data.tar")]) == 2
    assert sorted(contents(tmp_path / "out")) == ["cat/data-a-1.png", "cat/data-b-1.png"]
    assert contents(tmp_path / "out")["cat/data-b-1.png"] == made.read(1)


def test_pixels_become_a_png_without_loss(tmp_path):
    for shape in ((3, 5, 4), (3, 5, 4, 3)):
        out = tmp_path / str(len(shape))
        images = open_images(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
        assert copy(out, images, ["a", "b", "a"]) == 3
        copies = {name: np.asarray(Image.open(out / name)) for name in contents(out)}
        assert sorted(copies) == ["a/0.png", "a/2.png", "b/1.png"]
        for name, copied in copies.items():
            np.testing.assert_array_equal(copied, images.read(int(name[2])))


def test_regions_become_files_that_are_named_as_images(tmp_path):
    filled(tmp_path / "data", "1.png", "2.jpg")
    (tmp_path / "boxes.csv").write_text(
        "path,x0,y0,x1,y1\ndata/1.png,0,0,6,4\ndata/2.jpg,1,1,8,8\n"
    )
    images, out = open_images(tmp_path / "boxes.csv", cache=False), tmp_path / "out"
    both = union(images, filled(tmp_path / "data", "3.png"), "whole/")
    assert copy(out, both, ["a"] * 5) == 5
    copies = open_images(out, cache=False)
    for row, name in enumerate(images.names):
        copied = copies.names.index(f"a/{name.replace('/', '-')}.png")
        np.testing.assert_array_equal(decode(copies.read(copied)), images.read(row))


def test_an_empty_folder_is_filled_and_none_made_without_images(tmp_path):
    images, out = filled(tmp_path / "data", "1.png", "2.png"), tmp_path / "out"
    assert copy_to(out, images, np.arange(0), [], data=[]) == 0
    assert not out.exists()
    out.mkdir()
    (tmp_path / "data" / "1.png").unlink()  # one that cannot be read is left out
    assert copy(out, images, ["cat", "cat"]) == 1
    assert list(contents(out)) == ["cat/2.png"]


def test_hostile_names_of_images_and_classes_stay_inside_the_folder(tmp_path):
    names = sorted(HOSTILE, key=lambda name: name.encode("utf-8", "surrogateescape"))
    pixels = np.arange(len(names), dtype=np.uint8)[:, None, None, None].repeat(2, 1).repeat(2, 2)
    images = replace(open_images(pixels), names=tuple(names))
    for number, classes in enumerate((["", *names[1:]], ["cat"] * len(names))):
        out = tmp_path / "deep" / str(number)
        assert copy(out, images, classes) == len(names)
        copies = contents(tmp_path)
        assert Counter(Path(name).parts[:2] for name in copies)["deep", str(number)] == len(names)
        assert len(copies) == (number + 1) * len(names)
        inside = contents(out)
        assert all(re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*\.png", name) for name in inside)
        assert len({path.split("/")[number] for path in inside}) == len(names)
        assert len({Image.open(out / name).getpixel((0, 0)) for name in inside}) == len(names)


@given(st.lists(st.text(st.characters(exclude_categories=())) | st.sampled_from(HOSTILE)))
def test_file_names_are_harmless_short_and_each_another_one(names):
    made = file_names(names)
    assert len(made) == len(names) == len({name.lower() for name in made})
    for name in made:
        assert not set('/\\:*?"<>|').intersection(name)
        assert name[0] not in ".-~"
        assert name[-1] not in ". "
        assert all(c.isprintable() or c in "\u200c\u200d" for c in name)
        assert name.lower().split(".")[0] not in DEVICES
        assert len(name.encode()) <= 255


def test_file_names_keep_what_they_can():
    for names, made in (
        (["IMG_01.jpg", "new-1", "a.b.c"], ["IMG_01.jpg", "new-1", "a.b.c"]),
        (["a/b.png", "a-b.png", "A-B.PNG"], ["a-b.png", "a-b-2.png", "A-B-3.PNG"]),
        (["x", "x-2", "x", "x"], ["x", "x-2", "x-3", "x-4"]),
        (["", "", ".", ".."], ["_", "_-2", "_-3", "__"]),
        (["nul", "COM1.tar.gz", "contour", "a."], ["_nul", "_COM1.tar.gz", "contour", "a_"]),
        (["maine coon", "Löwe", "猫", "кошка"], ["maine coon", "Löwe", "猫", "кошка"]),
        (["a:b", "C++ (old)", "x\u202ey", "~"], ["a_b", "C++ (old)", "x_y", "_"]),
        (["\u00e9", "e\u0301", "\u00c9"], ["\u00e9", "e\u0301-2", "\u00c9-3"]),
    ):
        assert file_names(names) == made


def test_classes_of_any_script_are_the_same_after_copying(tmp_path):
    classes = ["кошка", "猫 (家)", "कुत्ता", "می‌خواهم", "golden retriever"]
    images = filled(tmp_path / "data", *(f"{row}.png" for row in range(10)))
    copy(tmp_path / "out", images, [classes[row % 5] for row in range(10)])
    assert set(open_images(tmp_path / "out", cache=False).classes) == set(classes)


def test_long_names_are_cut_and_keep_their_ending_and_their_differences():
    long = ["d" * 200 + "/" + "e" * 200 + f"{number}.jpeg" for number in range(10_000)]
    made = file_names([*long, "猫" * 100, "." + "x" * 300])
    assert len(set(made)) == 10_002
    assert max(len(name.encode()) for name in made) <= 250
    assert all(name.endswith(".jpeg") for name in made[:-2])


def refused(error, folder, images, data=()):
    """That copying fails in one line, and the same is said before."""
    for attempt in (
        lambda: check_destination(folder, data),
        lambda: copy(folder, images, ["cat"] * len(images), data),
    ):
        with pytest.raises(error) as raised:
            attempt()
        message = str(raised.value)
        assert "\n" not in message
        assert str(folder) in message
        assert message.rpartition("; ")[2].startswith(("choose", "give", "make room"))


def test_a_folder_with_anything_in_it_is_refused(tmp_path):
    images = filled(tmp_path / "data", "1.png")
    write_files(tmp_path / "out", {".keep": b""})
    refused(OutputError, tmp_path / "out", images)
    assert contents(tmp_path / "out") == {".keep": b""}


def test_a_link_or_a_file_is_refused_wherever_it_leads(tmp_path):
    images = filled(tmp_path / "data", "1.png")
    (tmp_path / "file").write_text("mine")
    refused(OutputError, tmp_path / "file", images)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(OutputError, match=r"^cannot write .*file/out.*Not a directory.*$"):
        copy(tmp_path / "file" / "out", images, ["cat"])
    (tmp_path / "empty").mkdir()
    for number, target in enumerate((tmp_path / "empty", tmp_path / "gone", f"link{2}")):
        link = tmp_path / f"link{number}"
        link.symlink_to(target)
        refused(OutputError, link, images)
    assert not any((tmp_path / "empty").iterdir())
    assert not (tmp_path / "gone").exists()


def test_a_folder_in_the_data_is_refused(tmp_path):
    images = filled(tmp_path / "data", "1.png")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    before = contents(tmp_path)
    for inside in ("data", "data/sorted", "data/new/deep", "link/sorted"):
        refused(UsageError, tmp_path / inside, images, ["digits", str(tmp_path / "data")])
        assert contents(tmp_path) == before, inside
    # But not one beside data of a similar name, or beside a table.
    (tmp_path / "list.csv").write_text("path\ndata/1.png\n")
    data = [str(tmp_path / "data"), str(tmp_path / "list.csv")]
    assert copy(tmp_path / "data-sorted", images, ["cat"], data) == 1


def test_a_folder_of_the_run_itself_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "run")
    for folder in (tmp_path / "run", run.plots, Path("run/checkpoints")):
        with pytest.raises(UsageError, match=r"is of the run itself; give a folder of its own"):
            check_copies(run, str(folder), "digits", resume=False)
    check_copies(run, str(tmp_path / "run" / "mine"), "digits", resume=False)


def test_copying_that_has_begun_goes_on_and_replaces_nothing(tmp_path):
    images, out = filled(tmp_path / "data", "1.png", "2.png", "3.png"), tmp_path / "out"
    write_files(out / "cat", {"1.png": images.read(0), ".2.png.partial.7": b"half", "mine": b""})
    assert copy_to(out, images, np.arange(3), ["cat"] * 3, data=[], begun=True) == 3
    whole = {f"cat/{row + 1}.png": images.read(row) for row in range(3)}
    assert contents(out) == {**whole, "cat/mine": b""}
    (out / "cat" / "3.png").write_bytes(b"mine")
    with pytest.raises(OutputError, match=r"3\.png is another file than the copy of '3\.png'"):
        copy_to(out, images, np.arange(3), ["cat"] * 3, data=[], begun=True)
    assert (out / "cat" / "3.png").read_bytes() == b"mine"


def test_an_image_of_a_long_name_is_copied(tmp_path):
    """Under a name to which that of a file which is being written still fits."""
    images = replace(open_images(np.zeros((1, 2, 2), np.uint8)), names=("x" * 300 + ".jpeg",))
    assert copy(tmp_path / "out", images, ["cat"]) == 1


def test_a_disk_that_fills_up_leaves_whole_copies_only_and_says_how_many(tmp_path):
    images = filled(tmp_path / "data", "1.png", "2.png")
    (tmp_path / "data" / "2.png").write_bytes(bytes(20_000))  # grown since it was listed
    says = r"after 1 copies: File too large; .*another folder$"
    with small_files(10_000), pytest.raises(OutputError, match=says):
        copy(tmp_path / "out", images, ["cat", "cat"])
    assert contents(tmp_path / "out") == {"cat/1.png": images.read(0)}
