"""Photographs kept decoded: the same pixels wherever they are kept and whoever decoded them."""

import multiprocessing
import os
import signal

import numpy as np
import pytest
from builders import soft
from hypothesis import given
from hypothesis import strategies as st
from loaders import batches, same
from PIL import Image
from processes import small_files

from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.data.cache import Cache, cache_for, cached_sizes, free_disk
from nearkin.data.decode import BadImage
from nearkin.data.opening import open_images
from nearkin.errors import ResourceError

SIZE = 16
PLACES = ("ram", "disk")


@pytest.fixture(autouse=True)
def cache_folder(cache):
    return cache / "images"


@pytest.fixture
def folder(tmp_path):
    for number in range(12):
        soft(number, (120 + 10 * number, 90)).save(tmp_path / f"{number:02d}.jpg")
    return tmp_path


def all_bytes(cache):
    return [cache.read(row).tobytes() for row in range(len(cache.images))]


SIDES = st.integers(2, 20_000)


@given(width=SIDES, height=SIDES, image_size=st.integers(8, 224))
def test_kept_images_keep_their_shape_and_are_never_enlarged(width, height, image_size):
    (size,) = cached_sizes(np.array([[width, height]], np.int32), image_size)
    side = 2 * image_size
    assert (size >= 1).all()
    assert (size <= (width, height)).all()
    assert (size - 1).prod() <= 4 * side**2  # sides are rounded
    scale = size / (width, height)
    assert np.abs(scale[0] - scale[1]) * min(width, height) <= 1
    if max(width, height) <= 4 * min(width, height):
        assert size.min() == min(width, height, side)


def test_what_is_read_is_the_whole_image_at_the_kept_size(folder):
    large = soft(99, (800, 600))
    large.save(folder / "99.png")
    images = open_images(folder, cache=False)
    cache = Cache(images, SIZE, "ram")
    small = large.resize((43, 32), Image.Resampling.BICUBIC)
    for _ in range(3):
        assert (cache.read(12) == np.asarray(small)).all()
    at_hand = np.asarray(Image.open(folder / "03.jpg").resize((53, 32), Image.Resampling.BICUBIC))
    assert cache.read(3).shape == at_hand.shape
    assert np.abs(cache.read(3).astype(int) - at_hand).max() < 30
    x = np.random.default_rng(0).integers(0, 256, (6, 80, 100, 3), dtype=np.uint8)
    cache = Cache(open_images(x), SIZE, "ram")  # large arrays, too
    expected = np.asarray(Image.fromarray(x[4]).resize((40, 32), Image.Resampling.BICUBIC))
    assert all((cache.read(4) == expected).all() for _ in range(2))


def test_batches_are_the_same_wherever_images_are_kept_and_with_any_workers(folder):
    images = open_images(folder, cache=False)
    alone = list(batches(images, size=SIZE, cache="ram").load(0, 9))
    for options in (dict(cache="disk"), dict(cache="disk"), dict(cache="ram", workers=2)):
        assert all(map(same, batches(images, size=SIZE, **options).load(0, 9), alone))
    later = batches(images, size=SIZE, cache="ram").load(6, 9)
    assert all(map(same, later, alone[6:]))
    (plain,) = batches(images, size=SIZE).load(0, 1)
    assert not same(alone[0], plain)  # which is cut from other pixels


def assert_decoded_once(folder, workers, until, *places):
    images = open_images(folder, cache=False)
    made = [batches(images, size=SIZE, cache=place, workers=workers) for place in places]
    expected = [list(each.load(0, until)) for each in made]
    for path in folder.iterdir():
        path.unlink()
    for each, before in zip(made, expected, strict=True):
        assert all(map(same, each.load(0, until), before))
        assert each.bad == {}


def test_what_one_worker_decoded_no_other_process_decodes_again(folder):
    assert_decoded_once(folder, 2, 9, "ram")


def test_workers_that_are_not_forks_share_what_is_kept(folder, forkserver):
    assert_decoded_once(folder, 1, 3, *PLACES)


@pytest.mark.filterwarnings("ignore:.*workers are replaced")
def test_a_worker_that_is_killed_amid_filling_changes_nothing(folder):
    images = open_images(folder, cache=False)
    expected = list(batches(images, size=SIZE, cache="ram").load(0, 9))
    for place in PLACES:
        made = batches(images, size=SIZE, cache=place, workers=2).load(0, 9)
        result = [next(made)]
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)
        assert all(map(same, [*result, *made], expected)), place


def test_what_was_half_written_is_decoded_again(folder, cache_folder):
    images = open_images(folder, cache=False)
    expected = all_bytes(Cache(images, SIZE, "disk"))
    (file,) = cache_folder.iterdir()
    pixels, checksum, every = slice(5000, 20_000), slice(0, 20), slice(0, None)
    for place in (pixels, checksum, every):
        content = bytearray(file.read_bytes())
        content[place] = bytes(len(content[place]))
        with file.open("r+b") as stored:
            stored.write(content)
        assert all_bytes(Cache(images, SIZE, "disk")) == expected, place
        assert file.read_bytes() != bytes(content)  # and is whole once more


def test_a_disk_that_fills_up_costs_time_only(folder, cache_folder):
    images = open_images(folder, cache=False)
    expected = all_bytes(Cache(images, SIZE, "ram"))
    cache = Cache(images, SIZE, "disk")
    with small_files(cache.num_bytes // 2):
        assert all_bytes(cache) == all_bytes(cache) == expected
    (file,) = cache_folder.iterdir()
    assert not any(file.read_bytes()[cache.num_bytes // 2 :])


def test_a_second_run_decodes_nothing_and_a_disk_that_cannot_be_written_is_one_line(
    folder, cache_folder
):
    cache_folder.parent.touch()
    images = open_images(folder, cache=False)
    with pytest.raises(ResourceError, match=r"cannot be written .*cache off") as raised:
        Cache(images, SIZE, "disk")
    assert "\n" not in str(raised.value)
    cache_folder.parent.unlink()
    first = all_bytes(Cache(images, SIZE, "disk"))
    for path in folder.iterdir():
        path.write_bytes(b"unread")
    assert all_bytes(Cache(images, SIZE, "disk")) == first
    assert len(list(cache_folder.iterdir())) == 1


def test_images_or_settings_that_changed_are_decoded_anew(folder, cache_folder):
    path = folder / "00.jpg"
    for change in ("content", "time", "size", "fewer"):
        before = Cache(open_images(folder), SIZE, "disk")
        first = all_bytes(before)
        if change == "content":
            soft(77, (120, 90)).save(path)
        if change == "time":
            os.utime(path, ns=(1, 1))
        images = open_images(folder)
        images = images.subset(np.arange(1, 12)) if change == "fewer" else images
        size = SIZE + 8 * (change == "size")
        assert all_bytes(Cache(images, size, "disk")) == all_bytes(Cache(images, size, "ram"))
        assert len(list(cache_folder.iterdir())) == 1  # what was kept before gives its room back
        assert all_bytes(before) == first, change  # to all but those who use it


def test_unreadable_images_have_the_reason_they_have_without_a_cache(folder):
    images = open_images(folder, cache=False)
    (folder / "02.jpg").write_bytes(b"rotten")
    (folder / "09.jpg").unlink()
    plain = batches(images, size=SIZE)
    expected = [batch.index.tolist() for batch in plain.load(0, 6)]
    for place in PLACES:
        cache = Cache(images, SIZE, place)
        for row, reason in plain.bad.items():
            for _ in range(2):
                with pytest.raises(BadImage, match=reason):
                    cache.read(row)
        made = batches(images, size=SIZE, cache=place)
        assert [batch.index.tolist() for batch in made.load(0, 6)] == expected
        assert made.bad == plain.bad == {2: "text, not an image", 9: "unreadable"}


def test_a_training_keeps_images_where_it_is_told_to(photographs, tmp_path, cache_folder):
    settings = {"backbone": "tiny", "image_size": 16, "batch_size": 4, "epochs": 1, "val": 0.0}
    settings |= {"evaluate_every": 0, "report": False}
    disk, auto = (
        train(photographs, TrainConfig(**settings, **more), output=tmp_path / more["cache"]).folder
        for more in (dict(cache="disk", workers=2), dict(cache="auto", workers=0))
    )
    assert disk.encoder.read_bytes() == auto.encoder.read_bytes()
    assert list(cache_folder.iterdir())
    assert auto.settings()[0].cache == "ram"  # they are far larger than what is kept


def test_auto_takes_memory_then_a_disk_that_pays_then_nothing(folder):
    images = open_images(folder, cache=False)
    need = 3 * int(cached_sizes(images.sizes, 12).prod(axis=1).sum())
    assert cache_for(images, 12, memory=2 * need, disk=0) == "ram"
    assert cache_for(images, 12, memory=2 * need - 1, disk=2 * need) == "disk"
    assert cache_for(images, 12, memory=2 * need - 1, disk=2 * need - 1) == "off"
    need = 3 * int(cached_sizes(images.sizes, 32).prod(axis=1).sum())
    assert cache_for(images, 32, memory=2 * need, disk=0) == "ram"
    assert cache_for(images, 32, memory=0, disk=2 * need) == "off"  # little would be saved
    pixels = open_images(np.zeros((9, 200, 200), np.uint8))
    assert cache_for(pixels, SIZE, memory=2**50, disk=2**50) == "off"
    assert free_disk() > 2**20  # of this machine
