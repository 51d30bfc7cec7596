"""Duplicates are found however they were saved; images that merely resemble are not merged."""

import tracemalloc
from dataclasses import replace

import builders
import numpy as np
import pytest
from needs import SHARED
from PIL import Image, ImageEnhance

from nearkin.commands.check import check
from nearkin.data.decode import decode
from nearkin.data.duplicates import (
    Duplicates,
    divided,
    duplicates,
    keep_one,
    near_groups,
    signatures,
)
from nearkin.data.opening import open_images
from nearkin.data.split import split_images


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


def cropped(image, share):
    """Without this share of the width or height at each edge."""
    x, y = (max(1, round(share * edge)) for edge in image.size)
    return image.crop((x, y, image.width - x, image.height - y))


CHANGES = {
    "smaller.jpg": lambda p: (p.resize((p.width * 7 // 10, p.height * 7 // 10)), {"quality": 85}),
    "larger.png": lambda p: (p.resize((p.width * 5 // 4, p.height * 5 // 4)), {}),
    "worse.jpg": lambda p: (p, {"quality": 35}),
    "better.jpg": lambda p: (p, {"quality": 85}),
    "brighter.png": lambda p: (ImageEnhance.Brightness(p).enhance(1.15), {}),
    "darker.jpg": lambda p: (ImageEnhance.Brightness(p).enhance(0.85), {"quality": 85}),
    "cropped.png": lambda p: (cropped(p, 0.03), {}),
    "other.webp": lambda p: (p, {"quality": 70}),
}


@pytest.mark.parametrize(
    ("images", "side"),
    [
        *(("crops", side) for side in (28, 64, 300)),
        *(pytest.param("caltech", side, marks=pytest.mark.needs("shared")) for side in (28, 300)),
    ],
)
def test_copies_of_photographs_of_any_size_are_found(images, side, request, tmp_path):
    photographs = request.getfixturevalue(images)
    for row in np.random.default_rng(0).choice(len(photographs), 20, replace=False):
        folder, original = tmp_path / str(row), decode(photographs.read(row)).resize((side, side))
        builders.write_files(
            folder, dict.fromkeys(("a.png", "b.png"), builders.as_bytes(original))
        )
        for name, change in CHANGES.items():
            image, options = change(original)
            image.save(folder / name, **options)
    planted = open_images(tmp_path, cache=False)
    found = duplicates(planted)
    originals = np.array([name.split("/")[0] for name in planted.names])
    merged = [len(set(originals[found.groups == group])) for group in set(found.groups)]
    assert max(merged) == 1  # never two different photographs
    lost = len(set(found.groups)) - 20
    assert lost <= 0.05 * 20 * len(CHANGES)
    assert (found.num_exact, found.num_near) == (20, 20 * len(CHANGES) - lost)


@pytest.mark.slow
@pytest.mark.needs("shared")
def test_different_photographs_and_characters_are_not_merged(caltech):
    found = duplicates(caltech)
    classes = [set(caltech.labels[found.groups == group]) for group in set(found.groups)]
    assert all(len(members) == 1 for members in classes)
    # By eye, 20 of these 2,772 are further copies: cartoons, stop signs, clip art saved twice.
    assert found.num_exact == 0
    assert 15 <= found.num_near <= 40
    drawn = open_images(SHARED / "omniglot" / "images_background_small1.zip", cache=False)
    assert duplicates(drawn).num_near <= 0.01 * len(drawn)  # single strokes


def test_plain_and_smooth_images_are_merged_only_if_they_are_the_same_file(tmp_path):
    for level in range(0, 250, 25):
        Image.new("RGB", (100, 100), (level, level, level)).save(tmp_path / f"{level}.png")
        sky = np.linspace(level, 255, 100)[:, None, None].repeat(100, 1).repeat(3, 2)
        Image.fromarray(sky.astype(np.uint8)).save(tmp_path / f"sky{level}.png")
    (tmp_path / "copy.png").write_bytes((tmp_path / "0.png").read_bytes())
    copies = duplicates(open_images(tmp_path, cache=False))
    assert (copies.num_exact, copies.num_near) == (1, 0)


def test_digits_that_look_alike_are_not_copies():
    copies = duplicates(open_images("digits"))
    assert copies.num_exact == 0
    assert copies.num_near <= 1


def test_the_same_thing_in_another_color_is_no_duplicate(tmp_path):
    pixels = np.asarray(builders.photographs(2, 96)[1])
    for number, dye in enumerate(([1, 0.6, 0.6], [0.6, 1, 0.6], [0.6, 0.6, 1])):
        Image.fromarray((pixels * dye).astype(np.uint8)).save(tmp_path / f"{number}.png")
    assert duplicates(open_images(tmp_path, cache=False)).num_near == 0


def test_thousands_of_equal_views_become_one_group():
    base = np.random.default_rng(0).integers(0, 240, (16, 16, 3), dtype=np.uint8)
    x = np.repeat(base[None], 640, axis=0)
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


@pytest.fixture
def scene(tmp_path):
    """One hundred frames of a scene whose light moves from left to right, and five others."""
    view = np.asarray(builders.photographs(2, 96)[1], np.float32)
    ramp = np.linspace(-1, 1, 96)[None, :, None]
    for number in range(100):
        frame = view * (0.6 + 0.3 * ramp * (number / 50 - 1))
        Image.fromarray(frame.astype(np.uint8)).save(tmp_path / f"frame{number:03}.png")
    soft(tmp_path, **{f"odd{seed}": seed for seed in range(5)})
    return open_images(tmp_path, cache=False)


def test_the_ends_of_a_slow_change_are_both_kept_and_each_dropped_one_is_like_its_own(scene):
    known = signatures(scene)
    groups = near_groups(known)
    assert set(groups[:100]) == {0}
    keeper, similar = keep_one(known, groups, np.arange(len(scene)))
    assert keeper[0] == 0 != keeper[99]
    assert (keeper[100:] == np.arange(100, 105)).all()
    assert similar[keeper != np.arange(105)].min() > 0.97


def test_frames_of_one_scene_are_held_out_as_a_run_of_frames(scene):
    split = split_images(scene, share=0.2, seed=0)
    frames = split.test_rows[split.test_rows < 100]
    assert 10 <= len(frames) <= 60
    assert (np.diff(frames) > 1).sum() <= len(frames) / 10  # few runs, of ten frames each
    (note,) = split.images.notes
    assert (note.decision, note.count) == ("merged", 100)
    assert "in the order of names" in str(note)
    few = scene.subset(np.arange(60, 105))  # a piece would be little but edges
    assert (split_images(few, share=0.2, seed=0).test_rows >= 40).all()
    copies = open_images(np.repeat(builders.pixels(2), [60, 40], axis=0))
    assert len(split_images(copies, share=0.2, seed=0).test_rows) == 40  # exact ones stay whole


def test_groups_are_divided_in_order_without_dividing_what_stays_together():
    found = Duplicates(np.zeros(8, np.int64), np.array([0, 1, 2, 3, 4, 0, 6, 7]), 1, 6)
    assert divided(found, 3).tolist() == [0, 0, 2, 2, 2, 0, 6, 6]
    assert divided(found, 8).tolist() == [0] * 8
    assert divided(found, 1).tolist() == [0, 1, 2, 3, 4, 0, 6, 7]


def test_test_images_with_a_duplicate_in_the_training_part_are_counted(tmp_path):
    for seed in range(4):
        for part in ("train", "test"):
            (tmp_path / part / "a").mkdir(parents=True, exist_ok=True)
        builders.soft(seed, (32, 32)).save(tmp_path / "train" / "a" / f"{seed}.png")
        other = builders.soft(seed if seed % 2 else 9 + seed, (30, 30))
        other.save(tmp_path / "test" / "a" / f"{seed}.jpg")
    images = open_images(tmp_path, cache=False)
    split = split_images(images, share=0.0, seed=0)
    leaked = [images.names[row] for row in split.test_rows[split.leaked]]
    assert leaked == ["test/a/1.jpg", "test/a/3.jpg"]
    report = check(tmp_path)
    assert report.to_dict()["leaked"] == 2
    said = "2 of 4 test images have a near-duplicate among the training images"
    assert any(said in line for line in report.lines())


def test_memory_is_bounded_though_all_images_are_alike():
    base = np.random.default_rng(0).integers(0, 240, (16, 16, 3), dtype=np.uint8)
    x = np.repeat(base[None], 1000, axis=0)
    flat = x.reshape(1000, -1)
    flat[np.arange(1000), np.arange(1000) % 768] += (1 + np.arange(1000) // 768).astype(np.uint8)
    images = open_images(x)
    tracemalloc.start()
    copies = duplicates(images)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (set(copies.groups), copies.num_near) == ({0}, 999)
    # 1,000 x 16 pairs of 16 bytes are .5 MB, and all pairs of 1,000 images are 64 MB.
    assert peak < 50e6
