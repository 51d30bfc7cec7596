"""Archives, and folders of shards: read in place, in any process, in one order."""

import multiprocessing
import os
import pickle
import struct
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from builders import encoded, exchange, fill, pack
from needs import SHARED

from nearkin.data.decode import BadImage
from nearkin.data.labels import class_names
from nearkin.data.members import DEFLATED, STORED, Place, read_member
from nearkin.data.opening import open_images
from nearkin.data.unpacked import unpacked
from nearkin.errors import DataError

KINDS = ("d.zip", "d.tar", "d.tar.gz", "d.tgz")


def test_an_archive_is_like_the_folder_it_was_made_of(tmp_path):
    names = [f"set/{side}/{c}/{i}.png" for side in ("train", "test") for c in "ab" for i in (1, 2)]
    root = fill(tmp_path / "data", *names)
    members = [(f"./{n}", (root / n).read_bytes()) for n in names] + [("set/.hidden.png", b"")]
    expected = open_images(root)
    assert expected.classes == ("a", "b")
    for name in KINDS:
        images = open_images(pack(tmp_path / name, members))
        assert (images.names, images.classes) == (expected.names, expected.classes)
        for field in ("labels", "splits", "sizes"):
            assert np.array_equal(getattr(images, field), getattr(expected, field)), (name, field)
        assert (images.fingerprint, images.bad) == (expected.fingerprint, ())
        for each in (images, pickle.loads(pickle.dumps(images))):
            assert all(each.read(row) == expected.read(row) for row in range(len(expected)))


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
def test_evil_members_are_refused_and_nothing_is_written(tmp_path, suffix):
    good = [("A.PNG", encoded(2)), ("A.png", encoded(1)), ("a.png", encoded(0))]  # three names
    evil = ["../up.png", "/abs.png", "a/../../b.png", "a.png"]
    with pytest.warns(UserWarning, match="Duplicate") if suffix == ".zip" else nullcontext():
        path = pack(tmp_path / f"d{suffix}", [*good, *((name, b"evil") for name in evil)])
    before = sorted(tmp_path.rglob("*"))
    images = open_images(path)
    assert [(name, images.read(row)) for row, name in enumerate(images.names)] == good
    assert {bad.reason for bad in images.bad} == {"name leaves the archive", "duplicate name"}
    assert len(images.bad) == 4
    assert sorted(tmp_path.rglob("*")) == before


def test_links_and_devices_in_an_archive_are_refused(tmp_path):
    pack(tmp_path / "d.tar", [("a.png", encoded())])
    with tarfile.open(tmp_path / "d.tar", "a") as archive:
        for name, kind in (("l", tarfile.SYMTYPE), ("h", tarfile.LNKTYPE), ("c", tarfile.CHRTYPE)):
            info = tarfile.TarInfo(f"{name}.png")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    images = open_images(tmp_path / "d.tar")
    assert images.names == ("a.png",)
    assert [bad.name for bad in images.bad] == ["c.png", "h.png", "l.png"]
    link = zipfile.ZipInfo("l.png")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(pack(tmp_path / "d.zip", [("a.png", encoded())]), "a") as archive:
        archive.writestr(link, "/etc/passwd")
    assert [bad.reason for bad in open_images(tmp_path / "d.zip").bad] == ["link"]


def test_folders_of_a_zip_of_windows_are_folders_and_a_member_without_a_name_is_passed_over(
    tmp_path,
):
    rows = [(part, c, n) for part in ("test", "train") for c in ("cat", "dog") for n in "12"]
    with zipfile.ZipFile(tmp_path / "d.zip", "w") as archive:
        for seed, name in enumerate([*map("\\".join, rows), "", "train\\", "..\\up"]):
            info = zipfile.ZipInfo()
            info.filename = name and (name if name[-1] == "\\" else f"{name}.jpg")
            archive.writestr(info, encoded(seed) if info.filename else b"")
    images = open_images(tmp_path / "d.zip")
    assert images.names == tuple(f"{'/'.join(row)}.jpg" for row in rows)
    assert images.classes == ("cat", "dog")
    assert images.splits.tolist() == ["test"] * 4 + ["train"] * 4
    assert [images.read(row) for row in range(8)] == [encoded(seed) for seed in range(8)]
    assert images.reasons == {"../up.jpg": "name leaves the archive"}


def test_a_zip_member_that_is_not_where_it_should_be_is_unreadable(tmp_path):
    for offset in (2, 50, 2**31):
        path = pack(tmp_path / "d.zip", [("a.png", encoded()), ("b.png", encoded(1))])
        whole = open_images(path)
        raw = path.read_bytes()
        at = raw.rindex(b"PK\1\2")
        path.write_bytes(raw[: at + 42] + struct.pack("<I", offset) + raw[at + 46 :])
        images = open_images(path, cache=False)
        assert (images.names, images.read(0)) == (("a.png",), encoded())
        assert [(bad.name, bad.reason) for bad in images.bad] == [("b.png", "unreadable")]
        path.write_bytes(raw[:20])
        with pytest.raises(BadImage, match="unreadable"):
            whole.read(1)


def test_a_member_beyond_all_bounds_is_an_error_of_the_file(tmp_path):
    path = pack(tmp_path / "d.zip", [("a.png", encoded())])

    def read(*place):
        return read_member(path, Place(*place), None)

    with pytest.raises(OSError, match=r"damaged in the archive|Invalid argument"):
        read(2**63 - 31, 9, 9, STORED)
    assert read(0, 2**62, 9, DEFLATED) == encoded()[:9]  # packed bytes end with the file


def _read_all(images):
    return [images.read(row) for _ in range(20) for row in range(len(images))]


def test_several_processes_read_one_archive_at_once(tmp_path, forkserver):
    images = open_images(pack(tmp_path / "d.zip", [(f"{i}.png", encoded(i)) for i in range(5)]))
    expected = _read_all(images)
    for start in ("fork", "forkserver"):
        with multiprocessing.get_context(start).Pool(2) as pool:
            assert pool.map(_read_all, [images] * 2) == [expected] * 2


@pytest.mark.slow
@pytest.mark.needs("shared")
def test_real_archives_have_the_classes_and_splits_they_are_known_for():
    images = open_images(SHARED / "caltech99" / "caltech99.tar")
    assert (len(images), len(images.classes), images.bad) == (2772, 99, ())
    assert (images.splits == "train").sum() == 22 * 99
    images = open_images(SHARED / "omniglot" / "images_background_small1.zip")
    assert (len(images), len(images.classes), images.bad) == (2720, 136, ())
    assert images.classes[0] == "Balinese/character01"


PICTURES = {
    f"{('cat', 'dog')[n % 2]}/{n:02d}.jpg": encoded(n, (90 + n, 70), "JPEG") for n in range(18)
}


@pytest.fixture
def shards(tmp_path):
    """Three shards, written neither in their order nor in that of their members."""
    names = sorted(PICTURES, reverse=True)
    for number in (2, 0, 1):
        held = [(name, PICTURES[name]) for name in names[number::3]]
        pack(tmp_path / "data" / f"shard-{number:06d}.tar", [*held, ("note.txt", b"hello")])
    return tmp_path / "data"


def test_shards_are_one_data_set_in_the_order_of_their_names(shards):
    images = open_images(shards)
    assert (len(images), list(images.names)) == (18, sorted(images.names))
    for row, name in enumerate(images.names):
        shard, _, member = name.partition("/")
        assert shard in {f"shard-{number:06d}.tar" for number in range(3)}
        assert images.read(row) == PICTURES[member]
        assert images.sizes[row].tolist() == [90 + int(member[4:6]), 70]
    assert images.bad == ()


def test_classes_are_folders_in_the_shards_and_never_the_shards(shards, tmp_path):
    images = open_images(shards)
    assert images.classes == ("cat", "dog")
    classes = [images.classes[label] for label in images.labels]
    assert classes == [name.split("/")[1] for name in images.names]
    for number in range(2):
        pack(tmp_path / "flat" / f"{number}.tar", [(f"{n}.png", encoded(n)) for n in range(3)])
    assert open_images(tmp_path / "flat").classes == ()
    for side in ("train", "val"):  # but folders of shards can be the sides of a split
        members = [(f"{name}/{n}.png", encoded(n)) for name in "ab" for n in (1, 2)]
        pack(tmp_path / "sides" / side / "0.tar", members)
    images = open_images(tmp_path / "sides")
    assert images.classes == ("a", "b")
    assert images.splits.tolist() == ["train"] * 4 + ["val"] * 4


def test_a_second_start_reads_no_header_until_a_shard_changes(shards):
    first = open_images(shards)
    path = shards / "shard-000001.tar"
    exchange(path, path.read_bytes().replace(b"\xff\xd8\xff", b"bad", 1))
    assert open_images(shards).names == first.names
    os.utime(path, ns=(1, 1))
    assert len(open_images(shards).bad) == 1


def test_a_file_without_a_time_is_unpacked_again(tmp_path, cache):
    path = tmp_path / "a.tar.gz"
    for content in (b"old", b"new"):
        path.write_bytes(content)
        os.utime(path, ns=(0, 0))
        copy = unpacked(path, ".tar", lambda file, new: new.write_bytes(file.read()))
        assert copy.read_bytes() == content


def test_what_cannot_be_used_is_listed_by_shard(shards):
    good = PICTURES["cat/00.jpg"]
    pack(shards / "z.tar", [("a.jpg", b"text"), ("../up.jpg", b""), ("b.jpg", good)])
    images = open_images(shards)
    assert [(bad.name, bad.reason) for bad in images.bad] == [
        ("z.tar/../up.jpg", "name leaves the archive"),
        ("z.tar/a.jpg", "text, not an image"),
    ]
    assert len(images) == 19


def test_damaged_archives_and_those_without_images_are_refused_in_one_line(shards, tmp_path):
    for path in (*(tmp_path / kind for kind in KINDS), shards / "broken.tar"):
        path.write_bytes(b"no archive" * 100)
        opened = path.parent if path.parent == shards else path
        with pytest.raises(DataError, match=rf"{path.name}: not a readable archive") as raised:
            open_images(opened)
        assert "\n" not in str(raised.value)
    path = pack(tmp_path / "data.zip", [("1.cls", b"seven " * 30), ("1.jpg", encoded(1))])
    content = bytearray(path.read_bytes())
    content[35:39] = b"\xff" * 4  # the first bytes of a class
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"data\.zip: not a readable archive"):
        open_images(path)
    pack(tmp_path / "empty" / "0.tar", [("a.txt", b"")])
    for path in (pack(tmp_path / "e.zip", [("a.txt", b"")]), tmp_path / "empty"):
        with pytest.raises(DataError, match=r"no images \(found 1 \.txt"):
            open_images(path)


def test_a_shard_that_ends_early_is_named(tmp_path):
    pack(tmp_path / "0.tar", [("1.png", encoded(0))])
    pack(tmp_path / "1.tar", [("1.png", encoded(0)), ("2.png", encoded(1, (90, 70)))])
    whole = (tmp_path / "1.tar").read_bytes()
    second = 512 + -(-len(encoded(0)) // 512) * 512
    says = r"1.tar: not a readable archive \(unexpected end of data\); pack"
    for kept in (1000, 99, 0):  # in the last image, in a header, and between two members
        (tmp_path / "1.tar").write_bytes(whole[: second + kept])
        with pytest.raises(DataError, match=says):
            open_images(tmp_path)


def test_a_shard_in_which_files_may_lie_behind_what_is_damaged_is_named(tmp_path):
    pack(tmp_path / "0.tar", [("1.png", encoded(0)), ("2.png", encoded(1))])
    whole = (tmp_path / "0.tar").read_bytes()
    second = 512 + -(-len(encoded(0)) // 512) * 512
    for content, at in (
        (whole[:second] + b"x" * 99 + whole[second + 99 :], second),
        (whole + whole, 2 * second),
        (whole[:second] + bytes(2**21), second),  # of a download that was never finished
    ):
        (tmp_path / "0.tar").write_bytes(content)
        says = rf"0.tar: not a readable archive \(neither a file nor the end at byte {at}\); pack"
        with pytest.raises(DataError, match=says):
            open_images(tmp_path)
    (tmp_path / "0.tar").write_bytes(whole + bytes(2**19))
    assert len(open_images(tmp_path)) == 2


def test_threads_read_many_shards_at_once_and_leave_none_open(shards):
    images = open_images(shards, cache=False)
    rows = list(range(len(images))) * 20
    before = len(list(Path("/proc/self/fd").iterdir()))
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(images.read, rows))
    assert read == [PICTURES[images.names[row].partition("/")[2]] for row in rows]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_shard_that_was_replaced_is_not_read_from_the_old_file(shards):
    first = open_images(shards)
    assert first.read(0) == PICTURES[first.names[0].partition("/")[2]]
    path = shards / "shard-000000.tar"
    pack(shards / "new", [("cat/00.jpg", encoded(77))])
    (shards / "new").rename(path)
    again = open_images(shards)
    assert (again.names[0], again.read(0)) == ("shard-000000.tar/cat/00.jpg", encoded(77))


def labeled(folder, *classes):
    """Two shards, in each of which images and their classes have one name."""
    labels = [(f"{number:04d}.cls", label) for number, label in enumerate(classes) if label]
    for shard in range(2):
        images = [(f"{n:04d}.jpg", encoded(10 * shard + n)) for n in range(len(classes))]
        pack(folder / "train" / f"{shard:02d}.tar", sorted(images + labels))
    return folder


def test_files_beside_the_images_name_their_classes_which_may_be_replaced(tmp_path):
    images = open_images(labeled(tmp_path / "data", b"10\n", b"2", None, "Käfer".encode()))
    assert (images.classes, images.labels.tolist()) == (("10", "2", "Käfer"), [0, 1, -1, 2] * 2)
    assert images.splits.tolist() == ["train"] * 8
    assert not images.bad
    assert open_images(labeled(tmp_path / "numbers", b"10", b"2")).classes == ("2", "10")
    assert open_images(tmp_path / "data", labels="none").classes == ()
    table = tmp_path / "labels.csv"
    table.write_text("path,label\ntrain/00.tar/0001.jpg,mine\n")
    assert open_images(tmp_path / "data", labels=str(table)).classes == ("mine",)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_label_is_of_the_image_with_its_whole_name_and_of_no_other(tmp_path, kind):
    """Where names have dots, the files of many images begin like one sample of WebDataset."""
    images = [(f"scan.{n:03}.jpg", encoded(n)) for n in range(4)]
    labels = [(f"scan.{n:03}.json", b'{"label": "%s"}' % c) for n, c in ((1, b"cat"), (2, b"dog"))]
    found = open_images(pack(tmp_path / kind, [*images, *labels]))
    assert class_names(found) == ["", "cat", "dog", ""]
    views = [(f"0.{side}.jpg", encoded(row)) for row, side in enumerate(("left", "right"))]
    found = open_images(pack(tmp_path / kind, [*views, ("0.meta.json", b'{"label": "cat"}')]))
    assert class_names(found) == ["cat", "cat"]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_label_of_no_image_leaves_class_folders_classes(tmp_path, kind):
    images = [(f"{name}s/{n}.jpg", encoded(n)) for name in ("cat", "dog") for n in range(2)]
    path = pack(tmp_path / kind, [("info.json", b'{"label": "pets"}'), *images])
    found = open_images(path)
    assert found.classes == ("cats", "dogs")
    assert [str(note) for note in found.notes] == [
        "left out: 1 file (1 .json), such as 'info.json'"
    ]
