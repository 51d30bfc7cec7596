"""Leaks across parts: what is found, with which precision, and what is refused."""

import builders
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from nearkin.auditing.data import Audited
from nearkin.auditing.leaks import _Neighbors, _threshold, find_leaks
from nearkin.data.decode import decode
from nearkin.data.opening import open_images
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings, embeddings_of
from nearkin.pace import ignore_progress


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def vectors(train, test):
    """Features alone, of two parts."""
    both = unit(np.concatenate([train, test]))
    splits = np.repeat(["train", "test"], [len(train), len(test)])
    labels = np.zeros(len(both), np.int64)
    return Audited(Embeddings(both, labels, paths=list(map(str, range(len(both)))), splits=splits))


def look(audited, precision=0.9):
    return find_leaks(audited, precision, 0, ignore_progress)


def edited(image, kind):
    if kind == "near-duplicate":
        return decode(builders.as_bytes(image, "JPEG", quality=60))
    if kind == "shifted":
        x, y = (round(0.04 * side) for side in image.size)
        pixels = np.pad(np.asarray(image), ((y, 0), (0, x), (0, 0)), "edge")
        return Image.fromarray(pixels[: image.height, x:])
    return ImageOps.mirror(image) if kind == "mirrored" else image


def test_copies_in_the_other_part_are_found_each_by_its_reason(tmp_path):
    crops, kinds = (
        detailed(builders.photographs(120)),
        ("same bytes", "near-duplicate", "mirrored", "shifted"),
    )
    assert len(crops) > 60
    for number, image in enumerate(crops):
        folder = tmp_path / ("test" if number >= 45 else "train")
        folder.mkdir(exist_ok=True)
        image.save(folder / f"{number:03}.png")
    for number, kind in enumerate(kinds * 3):
        edited(crops[number], kind).save(tmp_path / "test" / f"copy-{number:03}.png")
    images = open_images(tmp_path, labels="none")
    decoded = (decode(images.read(row)) for row in range(len(images)))
    pixels = np.stack([np.asarray(image.resize((4, 4))) for image in decoded])
    pixels = pixels + pixels[:, :, ::-1].astype(np.float32)  # as features, which know no left
    features = unit(pixels.reshape(len(images), -1) - pixels.mean(dtype=np.float64))
    found = look(Audited(embeddings_of(images, features), images), 0.99).found
    said = {images.names[leak.test]: (images.names[leak.train], leak.why) for leak in found}
    assert said == {
        f"test/copy-{number:03}.png": (
            f"train/{number:03}.png",
            "same bytes" if kind == "same bytes" else "near-duplicate",
        )
        for number, kind in enumerate(kinds * 3)
    }


def detailed(crops):
    """Those that show more than sky: a plain image is no near-duplicate of any."""
    return [image for image in crops if np.asarray(image.convert("L")).std() > 20]


def test_the_threshold_is_the_lowest_one_whose_precision_is_high_enough():
    rng = np.random.default_rng(0)
    cosine, decoys = np.append(rng.random(60), 0.9 + rng.random(30) / 10), rng.random(200) * 0.98
    threshold, reached = _threshold(cosine, decoys, 0.8)
    estimates = {}
    for level in cosine:
        above = sum(each >= level for each in cosine)
        false = (sum(each >= level for each in decoys) + 1) / (len(decoys) + 1) * len(cosine)
        estimates[level] = 1 - false / above
    assert threshold == min(level for level, value in estimates.items() if value >= 0.8)
    assert reached == pytest.approx(estimates[threshold])
    assert _threshold(rng.random(50), rng.random(200) + 0.5, 0.8)[0] is None


def test_the_promised_precision_is_kept_whatever_the_share_of_leaks():
    for share in (0.0, 0.3):
        false, found, of = [], 0, 0
        for seed in range(25):
            rng = np.random.default_rng(seed)
            train, test = rng.normal(size=(400, 6)), rng.normal(size=(200, 6))
            leaked = rng.random(200) < share
            copies = train[rng.integers(0, 400, 200)] + 0.02 * rng.normal(size=(200, 6))
            leaks = look(vectors(train, np.where(leaked[:, None], copies, test)))
            wrong = [not leaked[leak.test - 400] for leak in leaks.found]
            false.append(np.mean(wrong) if wrong else 0.0)
            found, of = found + len(wrong) - sum(wrong), of + leaked.sum()
        assert np.mean(false) <= 0.1, share
        assert share < 0.3 or found > of / 2  # by features alone


def test_equal_vectors_are_found_and_a_test_part_inside_of_the_other_is_refused():
    rng = np.random.default_rng(0)
    train, test = rng.normal(size=(30, 8)), rng.normal(size=(5, 8))
    leaks = look(vectors(train, np.concatenate([test, train[3:5]])))
    assert [(x.test, x.train, x.why) for x in leaks.found] == [
        (35, 3, "same vector"),
        (36, 4, "same vector"),
    ]
    assert leaks.groups[35] == leaks.groups[3] != leaks.groups[4]
    with pytest.raises(UsageError, match="all 10 test images are training images"):
        look(vectors(train, train[:10]))


def test_of_few_training_images_each_is_compared_with_each_test_image():
    rng = np.random.default_rng(0)
    train, test = rng.normal(size=(3, 8)), rng.normal(size=(5, 8))
    copies = 2 * np.repeat(train[:1], 3, axis=0)
    for num in (1, 2, 3):
        leaks = look(vectors(train[:num], np.concatenate([test, copies[:num]])))
        assert [(x.test, x.train) for x in leaks.found] == [(num + 5 + n, 0) for n in range(num)]
        assert (leaks.decoys, leaks.threshold) == (0 if num == 1 else num, None)
    every = vectors(train, train[2:] + 9 * rng.normal(size=(1, 8)))
    vectors_of = torch.from_numpy(every.embeddings.vectors)
    found = _Neighbors.among(vectors_of, every.test_rows, every.train_rows, np.arange(4), None)
    assert sorted(found.index[0].tolist()) == [0, 1, 2]
