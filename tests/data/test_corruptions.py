"""Common corruptions: pure functions, as strong as their severity says, and what each is about."""

import io
import pickle

import numpy as np
import pytest
from builders import as_bytes, soft
from PIL import Image

from nearkin.data import corruptions
from nearkin.data.corruptions import CORRUPTIONS, SEVERITIES, CorruptedSource, corrupt
from nearkin.data.images import Arrays

UNEVEN = {"pixelate", "fog"}  # The papers' own strengths of these hardly rise in the middle
UNORDERED = "elastic"  # The mildest moves all of the image, the strongest many small parts


def photograph(height, width, seed=0):
    """A smooth image with some edges, of mean brightness."""
    pixels = np.asarray(soft(seed, (width, height))) // 2 + 60
    pixels[height // 4 : height // 2, width // 4 : width // 2] = (200, 60, 30)
    return pixels


def psnr(a, b):
    error = np.mean((a.astype(float) - b) ** 2)
    return 10 * np.log10(255**2 / max(error, 1e-9))


@pytest.mark.parametrize("side", [32, 96], ids=["small", "large"])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_are_as_strong_as_their_severity(name, side):
    image = photograph(side, side + 8)
    before = image.copy()
    corrupted = [corrupt(image, name, severity) for severity in SEVERITIES]
    assert all(x.shape == image.shape and x.dtype == np.uint8 for x in corrupted)
    assert np.array_equal(image, before)
    quality = [psnr(x, image) for x in corrupted]
    assert max(quality) < 45  # each of them changes the image
    if name in UNEVEN:
        assert quality[0] > quality[4]
    elif name != UNORDERED:
        assert quality[0] > quality[2] > quality[4]


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_images_of_any_shape_are_corrupted_alike_unless_the_seed_is_another(name):
    image = photograph(40, 32)
    first, again, other = (corrupt(image, name, 3, seed=seed) for seed in (5, 5, 6))
    assert np.array_equal(first, again)
    drawn = not name.startswith(("defocus", "zoom", "bright", "contrast", "pixel", "jpeg"))
    assert np.array_equal(first, other) != drawn
    for shape in ((2, 3), (7, 90), (64, 65)):
        for value in (0, 255):
            image = np.full((*shape, 3), value, np.uint8)
            assert corrupt(image, name, 5).shape == (*shape, 3)


def test_noise_has_the_strength_of_the_paper():
    gray = np.full((200, 200, 3), 128, np.uint8)
    noisy = corrupt(gray, "gaussian noise", 1).astype(float)
    assert noisy.std() / 255 == pytest.approx(0.08, rel=0.02)
    shot = corrupt(gray, "shot noise", 1) / 255
    assert shot.std() == pytest.approx((128 / 255 / 60) ** 0.5, rel=0.05)
    impulses = corrupt(gray, "impulse noise", 5)
    for value in (0, 255):
        assert (impulses == value).mean() == pytest.approx(0.27 / 2, abs=0.005)
    small = corrupt(gray[:48, :48], "gaussian noise", 1).astype(float)
    assert small.std() / 255 == pytest.approx(0.04, rel=0.05)  # that of CIFAR-10-C


def test_blur_leaves_an_even_image_as_it_is_and_spreads_a_point_over_a_disk():
    even = np.broadcast_to(np.array([20, 120, 220], np.uint8), (70, 80, 3))
    for name in ("defocus blur", "motion blur", "zoom blur", "elastic"):
        assert np.abs(corrupt(even, name, 5).astype(int) - even).max() <= 1, name
    point = np.zeros((225, 225, 3), np.uint8)
    point[110:115, 110:115] = 255
    blurred = corrupt(point, "defocus blur", 3)[..., 0].astype(float)
    rows, columns = np.nonzero(blurred > blurred.max() / 2)
    radius = np.hypot(rows - 112, columns - 112).max()
    assert 5 < radius < 9  # a disk of 6 pixels, and half of the square
    assert blurred.sum() == pytest.approx(point[..., 0].sum(), rel=0.15)


def test_brightness_raises_the_value_and_keeps_the_hue():
    image = photograph(96, 96)
    brighter = corrupt(image, "brightness", 1)
    value, raised = (x.max(axis=2).astype(int) for x in (image, brighter))
    assert np.abs(raised - (value + 25.5).clip(max=255)).max() <= 1
    hues = [np.asarray(Image.fromarray(x).convert("HSV"))[..., 0] for x in (image, brighter)]
    turned = np.abs(np.subtract(*(hue.astype(int) for hue in hues)))
    assert np.median(turned) <= 1


def test_contrast_shrinks_toward_the_mean_of_each_channel_and_jpeg_is_that_of_pillow():
    image = photograph(96, 96)
    flat = corrupt(image, "contrast", 2).astype(float)
    mean = image.mean(axis=(0, 1))
    assert np.abs(flat - (mean + 0.3 * (image - mean))).max() <= 1
    encoded = as_bytes(Image.fromarray(image), "JPEG", quality=15)
    assert np.array_equal(corrupt(image, "jpeg", 3), np.asarray(Image.open(io.BytesIO(encoded))))


def test_a_source_is_corrupted_before_any_preprocessing():
    pixels = np.stack([photograph(300, 600), photograph(300, 600, seed=1)])
    arrays = Arrays(pixels)
    plain = CorruptedSource(arrays, "", 1, 0).read(1)
    assert plain.shape == (corruptions.LARGEST_SIDE, 2 * corruptions.LARGEST_SIDE, 3)
    source = pickle.loads(pickle.dumps(CorruptedSource(arrays, "shot noise", 3, 7)))
    assert np.array_equal(source.read(1), corrupt(plain, "shot noise", 3, seed=7))
    small = CorruptedSource(Arrays(pixels[:, :50, :50]), "", 1, 0)
    assert np.array_equal(small.read(0), pixels[0, :50, :50])  # never enlarged
