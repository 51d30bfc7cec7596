"""Copies are found however they were saved, and images that merely resemble are not merged."""

import tracemalloc
from dataclasses import replace

import builders
import numpy as np
import pytest
from needs import SHARED
from PIL import Image, ImageEnhance

from nearkin.data.decode import decode
from nearkin.data.duplicates import ALIKE, REACH, duplicates
from nearkin.data.opening import open_images


def detail(image):
    """How much of an image is left when it is tiny."""
    return np.asarray(image.resize((16, 16), Image.Resampling.BOX)).std(axis=(0, 1)).mean()


@pytest.fixture(scope="module")
def crops(tmp_path_factory):
    """Forty pieces of two real photographs, without those of nothing but sky."""
    folder = tmp_path_factory.mktemp("crops")
    for number, image in enumerate(sorted(builders.photographs(48, 96), key=detail)[8:]):
        image.save(folder / f"{number:02d}.jpg", quality=95)
    return open_images(folder, cache=False)


@pytest.fixture(scope="module")
def caltech():
    """2,772 real photographs and drawings of 99 classes."""
    return open_images(SHARED / "caltech99" / "caltech99.tar", cache=False)


CHANGES = {
    "half.jpg": lambda p: (p.resize((p.width // 2, p.height // 2)), {"quality": 90}),
    "double.png": lambda p: (p.resize((p.width * 2, p.height * 2)), {}),
    "worse.jpg": lambda p: (p, {"quality": 30}),
    "darker.jpg": lambda p: (ImageEnhance.Brightness(p).enhance(0.85), {"quality": 90}),
    "stronger.jpg": lambda p: (ImageEnhance.Contrast(p).enhance(1.15), {"quality": 90}),
    "other.webp": lambda p: (p, {"quality": 70}),
}


@pytest.mark.parametrize(
    "images", ["crops", pytest.param("caltech", marks=pytest.mark.needs("shared"))]
)
def test_copies_of_real_photographs_are_found(images, request, tmp_path):
    photographs = request.getfixturevalue(images)
    for row in np.random.default_rng(0).choice(len(photographs), 40, replace=False):
        folder = tmp_path / str(row)
        original = photographs.read(row)
        builders.write_files(folder, {"original.jpg": original, "same.jpg": original})
        for name, change in CHANGES.items():
            image, options = change(decode(original))
            image.save(folder / name, **options)
    planted = open_images(tmp_path, cache=False)
    copies = duplicates(planted)
    originals = np.array([name.split("/")[0] for name in planted.names])
    merged = [len(set(originals[copies.groups == group])) for group in set(copies.groups)]
    assert max(merged) == 1  # never two different photographs
    assert copies.num_exact == 40
    lost = len(set(copies.groups)) - 40
    assert lost <= 0.02 * len(planted)
    assert copies.num_near == 40 * len(CHANGES) - lost


@pytest.mark.needs("shared")
def test_different_real_photographs_are_not_merged_and_the_pairs_found_are_all(caltech):
    copies = duplicates(caltech)
    classes = [set(caltech.labels[copies.groups == group]) for group in set(copies.groups)]
    assert all(len(members) == 1 for members in classes)
    # By eye, 20 of these 2,772 are further copies: cartoons, stop signs, clip art saved twice.
    assert copies.num_exact == 0
    assert 15 <= copies.num_near <= 25
    thumbnails = []
    for row in range(len(caltech)):
        small = decode(caltech.read(row), min_side=64).resize((16, 16), Image.Resampling.BOX)
        pixels = np.asarray(small, np.float64).reshape(256, 3)
        vector = (pixels - pixels.mean(0)).ravel()
        thumbnails.append(vector / np.linalg.norm(vector))
    cosines = np.triu(np.stack(thumbnails) @ np.stack(thumbnails).T, 1)
    sure = np.argwhere(cosines > ALIKE + 1e-4)
    assert len(sure) >= 20
    assert (copies.groups[sure[:, 0]] == copies.groups[sure[:, 1]]).all()


def test_plain_images_are_merged_only_if_they_are_the_same_file(tmp_path):
    for level in range(0, 250, 25):
        Image.new("RGB", (100, 100), (level, level, level)).save(tmp_path / f"{level}.png")
    (tmp_path / "copy.png").write_bytes((tmp_path / "0.png").read_bytes())
    copies = duplicates(open_images(tmp_path, cache=False))
    assert (copies.num_exact, copies.num_near) == (1, 0)


def test_digits_that_look_alike_are_not_copies():
    copies = duplicates(open_images("digits"))
    assert copies.num_exact == 0
    assert copies.num_near <= 2


def test_thousands_of_equal_views_become_one_group():
    base = np.random.default_rng(0).integers(0, 240, (16, 16, 3), dtype=np.uint8)
    x = np.repeat(base[None], 40 * REACH, axis=0)
    x[np.arange(len(x)), np.arange(len(x)) % 16, np.arange(len(x)) // 16 % 16] += 1
    copies = duplicates(open_images(x))
    assert (set(copies.groups), copies.num_near) == ({0}, 256 - 1)
    assert copies.num_exact == len(x) - 256


def test_exact_copies_among_arrays_are_counted_once_each_and_groups_are_merged():
    x = np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8)
    x[4], x[5] = x[1], x[1]
    copies = duplicates(open_images(x))
    assert (copies.num_exact, copies.num_near) == (2, 0)
    assert copies.groups.tolist() == [0, 1, 2, 3, 1, 1]
    x[4], x[5] = 255 - x[1], x[0]
    copies = duplicates(replace(open_images(x), groups=np.array([9, 7, 7, 3, 9, 2])))
    assert (copies.groups.tolist(), copies.num_near) == ([0, 1, 1, 3, 0, 0], 0)


def soft(folder, **seeds):
    """Images of these seeds, under these names."""
    for name, seed in seeds.items():
        builders.soft(seed, (100, 100)).save(folder / f"{name}.png")
    return folder


def test_an_image_is_alone_while_it_is_unreadable(tmp_path):
    images = open_images(soft(tmp_path, a=0, b=0, c=0))
    (tmp_path / "b.png").rename(tmp_path / "away")
    assert duplicates(images).groups.tolist() == [0, 1, 0]
    (tmp_path / "away").rename(tmp_path / "b.png")
    assert duplicates(images).groups.tolist() == [0, 0, 0]


def same(a, b):
    return (a.groups == b.groups).all() and (a.num_exact, a.num_near) == (b.num_exact, b.num_near)


def test_a_second_search_decodes_nothing_that_has_not_changed(tmp_path):
    soft(tmp_path, a=0, b=1, c=0, d=2)
    builders.soft(1, (100, 100)).resize((70, 70)).save(tmp_path / "e.png")
    first = duplicates(open_images(tmp_path))
    assert first.groups.tolist() == [0, 1, 0, 3, 1]
    assert (first.num_exact, first.num_near) == (1, 1)
    builders.exchange(tmp_path / "c.png")
    again = open_images(tmp_path)
    assert same(duplicates(again), first)
    assert duplicates(again.subset(np.array([0, 2, 3]))).groups.tolist() == [0, 0, 2]
    assert duplicates(open_images(soft(tmp_path, c=2))).groups.tolist() == [0, 1, 2, 2, 1]
    assert duplicates(open_images(soft(tmp_path, b=3, aa=1))).groups.tolist() == [0, 1, 2, 3, 3, 1]


def test_without_a_cache_nothing_is_remembered_and_a_damaged_one_costs_nothing(tmp_path, cache):
    first = duplicates(open_images(soft(tmp_path, a=0, b=1, c=0), cache=False))
    assert not cache.exists()
    assert same(duplicates(open_images(tmp_path)), first)
    for stored in cache.rglob("*.npz"):
        stored.write_bytes(stored.read_bytes()[:200])
    assert same(duplicates(open_images(tmp_path)), first)


def test_memory_is_bounded_though_all_images_are_alike():
    base = np.random.default_rng(0).integers(0, 240, (16, 16, 3), dtype=np.uint8)
    x = np.repeat(base[None], 2000, axis=0)
    flat = x.reshape(2000, -1)
    flat[np.arange(2000), np.arange(2000) % 768] += (1 + np.arange(2000) // 768).astype(np.uint8)
    images = open_images(x)
    tracemalloc.start()
    copies = duplicates(images)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (set(copies.groups), copies.num_near) == ({0}, 1999)
    # 2,000 x 16 pairs of 16 bytes are .5 MB, and all pairs of 2,000 images are 64 MB.
    assert peak < 50e6
