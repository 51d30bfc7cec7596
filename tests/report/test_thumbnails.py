"""Small images for the page, and a sheet of images."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from nearkin.data.decode import center
from nearkin.data.opening import open_images
from nearkin.report.image_map import thumbnails


def opened(uri):
    """The format and the pixels of a data URI."""
    kind, _, encoded = uri.partition(";base64,")
    image = Image.open(io.BytesIO(base64.b64decode(encoded, validate=True)))
    assert kind == f"data:image/{image.format.lower()}"
    return image.format, np.asarray(image)


def photographs(folder, *sizes):
    folder.mkdir(exist_ok=True)
    for number, (width, height) in enumerate(sizes):
        ramp = np.linspace(0, 200, width * height * 3).reshape(height, width, 3) + number
        Image.fromarray(ramp.astype(np.uint8)).save(folder / f"{number}.jpg", quality=95)
    return open_images(folder, cache=False)


def test_thumbnails_of_tiny_images_are_the_images_pixel_by_pixel():
    images = open_images("digits")
    uris = thumbnails(images, np.array([7, 3, 7, 1700]))
    assert sorted(uris) == [3, 7, 1700]
    for row, uri in uris.items():
        kind, pixels = opened(uri)
        assert kind == "PNG"
        np.testing.assert_array_equal(pixels, images.read(row))


@pytest.mark.parametrize("workers", [0, 1])
def test_thumbnails_of_photographs_are_small_squares_of_their_middle(tmp_path, workers):
    images = photographs(tmp_path, (200, 120), (90, 300), (150, 150))
    uris = thumbnails(images, np.arange(3), workers=workers)
    for row, uri in uris.items():
        kind, pixels = opened(uri)
        assert kind == "WEBP"
        assert pixels.shape == (96, 96, 3)
        middle = center(images.read(row), 96)
        assert np.abs(pixels.astype(int) - middle).mean() < 4
        assert len(uri) < 6000


def test_the_side_can_be_chosen_and_beyond_the_images_own_nothing_is_enlarged(tmp_path):
    images = photographs(tmp_path, (80, 70), (50, 40))
    sides = {side: opened(thumbnails(images, np.arange(2), side)[0])[1].shape for side in (32, 99)}
    assert sides == {32: (32, 32, 3), 99: (70, 70, 3)}


def test_images_that_cannot_be_read_are_left_out(tmp_path):
    images = photographs(tmp_path, (80, 80), (80, 80), (80, 80))
    (tmp_path / "0.jpg").unlink()
    (tmp_path / "2.jpg").write_bytes((tmp_path / "2.jpg").read_bytes()[:300])
    assert list(thumbnails(images, np.arange(3))) == [1]
    assert thumbnails(images, np.array([0])) == {}
    assert thumbnails(images, np.arange(0)) == {}
