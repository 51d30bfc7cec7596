"""Tar shards: one data set of many archives, read in place, in any process, in one order."""

import io
import os
import pickle
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nearkin.data import sources as archive
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.opening import open_images
from nearkin.data.order import Order
from nearkin.errors import DataError


@pytest.fixture(autouse=True)
def index(tmp_path_factory, monkeypatch):
    """An empty index for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def encoded(seed, size=(90, 70), kind="JPEG"):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def pack(path, members):
    """A .tar of {name: bytes}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


PICTURES = {f"{('cat', 'dog')[n % 2]}/{n:02d}.jpg": encoded(n, (90 + n, 70)) for n in range(18)}


@pytest.fixture
def shards(tmp_path):
    """Three shards, written neither in their order nor in that of their members."""
    names = sorted(PICTURES, reverse=True)
    for number in (2, 0, 1):
        held = {name: PICTURES[name] for name in names[number::3]}
        pack(tmp_path / "data" / f"shard-{number:06d}.tar", held | {"note.txt": b"hello"})
    return tmp_path / "data"


def test_shards_are_one_data_set_in_the_order_of_their_names(shards):
    images = open_images(shards)
    assert len(images) == 18
    assert list(images.names) == sorted(images.names)
    for row, name in enumerate(images.names):
        shard, _, member = name.partition("/")
        assert shard in {f"shard-{number:06d}.tar" for number in range(3)}
        assert images.read(row) == PICTURES[member]
        assert images.sizes[row].tolist() == [90 + int(member[4:6]), 70]
    assert images.bad == ()


def test_classes_are_folders_in_the_shards_and_never_the_shards(shards):
    images = open_images(shards)
    assert images.classes == ("cat", "dog")
    classes = [images.classes[label] for label in images.labels]
    assert classes == [name.split("/")[1] for name in images.names]
    for number in range(2):
        pack(shards / "flat" / f"{number}.tar", {f"{n}.jpg": encoded(n) for n in range(3)})
    assert open_images(shards / "flat").classes == ()


def test_folders_of_shards_can_be_the_sides_of_a_split(tmp_path):
    for side in ("train", "val"):
        pack(tmp_path / side / "0.tar", {f"{c}/{n}.jpg": encoded(n) for c in "ab" for n in (1, 2)})
    images = open_images(tmp_path)
    assert images.classes == ("a", "b")
    assert images.splits.tolist() == ["train"] * 4 + ["test"] * 4


def test_a_folder_with_images_is_no_folder_of_shards(shards):
    (shards / "own.jpg").write_bytes(encoded(1))
    assert open_images(shards).names == ("own.jpg",)


def test_a_second_start_reads_no_header_until_a_shard_changes(shards):
    first = open_images(shards)
    path = shards / "shard-000001.tar"
    state, content = path.stat(), bytearray(path.read_bytes())
    start = content.index(b"\xff\xd8\xff")
    content[start : start + 3] = b"bad"
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert open_images(shards).names == first.names
    os.utime(path, ns=(1, 1))
    assert len(open_images(shards).bad) == 1


def test_what_cannot_be_used_is_listed_by_shard(shards):
    pack(shards / "z.tar", {"a.jpg": b"text", "../up.jpg": b"", "b.jpg": PICTURES["cat/00.jpg"]})
    images = open_images(shards)
    assert [(bad.name, bad.reason) for bad in images.bad] == [
        ("z.tar/../up.jpg", "name leaves the archive"),
        ("z.tar/a.jpg", "not-an-image"),
    ]
    assert len(images) == 19


def test_a_damaged_shard_and_shards_without_images_are_refused_in_one_line(shards, tmp_path):
    (shards / "broken.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(DataError, match=r"broken\.tar: not a readable archive") as raised:
        open_images(shards)
    assert "\n" not in str(raised.value)
    pack(tmp_path / "empty" / "0.tar", {"a.txt": b""})
    with pytest.raises(DataError, match=r"no images \(found 1 x \.txt"):
        open_images(tmp_path / "empty")


def batches(images, workers):
    kinds, order = views_of("simclr_cifar"), Order(len(images), 6, 0)
    cpu = torch.device("cpu")
    return Batches(images, kinds, image_size=32, order=order, device=cpu, workers=workers)


def same(a, b):
    return torch.equal(a.index, b.index) and all(map(torch.equal, a.views, b.views))


def test_training_on_shards_is_training_on_their_files(shards, tmp_path):
    for name in open_images(shards).names:
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_bytes(PICTURES[name.partition("/")[2]])
    packed, loose = open_images(shards), open_images(tmp_path / "files")
    assert packed.names == loose.names
    assert packed.fingerprint == loose.fingerprint
    alone = list(batches(loose, 0).between(0, 9))
    assert all(map(same, batches(packed, 0).between(0, 9), alone))
    assert all(map(same, batches(packed, 2).between(0, 9), alone))
    assert all(map(same, batches(open_images(shards), 1).between(5, 9), alone[5:]))


@pytest.mark.parametrize("kept_open", [1, 128])
def test_threads_read_many_shards_at_once_whatever_stays_open(shards, monkeypatch, kept_open):
    opened = lru_cache(maxsize=kept_open)(archive._opened.__wrapped__)
    monkeypatch.setattr(archive, "_opened", opened)
    images = open_images(shards, cache=False)
    rows = list(range(len(images))) * 20
    expected = [PICTURES[images.names[row].partition("/")[2]] for row in rows]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(images.read, rows)) == expected
    assert opened.cache_info().currsize <= kept_open


def test_a_shard_is_opened_once_for_many_reads_and_closed_when_nobody_needs_it(shards):
    images = open_images(shards, cache=False)
    archive._opened.cache_clear()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for row in list(range(len(images))) * 5:
        images.read(row)
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 3
    copy = pickle.loads(pickle.dumps(images))
    assert copy.read(4) == images.read(4)
    archive._opened.cache_clear()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_shard_that_was_replaced_is_not_read_from_the_old_file(shards):
    first = open_images(shards)
    assert first.read(0) == PICTURES[first.names[0].partition("/")[2]]
    path = shards / "shard-000000.tar"
    pack(shards / "new", {"cat/00.jpg": encoded(77)})
    (shards / "new").rename(path)
    again = open_images(shards)
    assert again.names[0] == "shard-000000.tar/cat/00.jpg"
    assert again.read(0) == encoded(77)


# Classes beside the images, as in WebDataset


def labeled(folder, classes):
    """Two shards, in each of which images and their classes have one name."""
    for shard in range(2):
        members = {}
        for number, label in enumerate(classes):
            members[f"{number:04d}.jpg"] = encoded(10 * shard + number)
            if label is not None:
                members[f"{number:04d}.cls"] = label
        pack(folder / "train" / f"{shard:02d}.tar", members)
    return folder


def test_files_beside_the_images_name_their_classes(tmp_path):
    images = open_images(labeled(tmp_path / "data", [b"10\n", b"2", None, "Käfer".encode()]))
    assert images.classes == ("10", "2", "Käfer")
    assert images.labels.tolist() == [0, 1, -1, 2] * 2
    assert images.splits.tolist() == ["train"] * 8
    assert not images.bad


def test_classes_that_are_numbers_are_ordered_as_numbers(tmp_path):
    images = open_images(labeled(tmp_path / "data", [b"10", b"2"]))
    assert images.classes == ("2", "10")


def test_classes_beside_images_may_be_left_out_or_replaced(tmp_path):
    data = labeled(tmp_path / "data", [b"0", b"1"])
    assert open_images(data, labels="none").classes == ()
    table = tmp_path / "labels.csv"
    table.write_text("path,label\ntrain/00.tar/0001.jpg,mine\n")
    assert open_images(data, labels=str(table)).classes == ("mine",)


def test_a_damaged_class_is_an_error_that_names_the_data(tmp_path):
    with zipfile.ZipFile(tmp_path / "data.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("1.jpg", encoded(1))
        packed.writestr("1.cls", b"seven " * 30)
        place = packed.getinfo("1.cls").header_offset + 30 + len("1.cls")
    content = bytearray((tmp_path / "data.zip").read_bytes())
    content[place : place + 4] = b"\xff" * 4
    (tmp_path / "data.zip").write_bytes(content)
    with pytest.raises(DataError, match=r"data\.zip: not a readable archive"):
        open_images(tmp_path / "data.zip")
