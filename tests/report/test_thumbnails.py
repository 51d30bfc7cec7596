"""Images of a class: small ones for the page, and a sheet."""

import base64
import io
from itertools import pairwise

import numpy as np
import pytest
import torch
from builders import pixels_of
from PIL import Image

from nearkin.data.decode import center
from nearkin.data.opening import open_images
from nearkin.report.image_map import thumbnails
from nearkin.run.sheets import class_sheet, save_sheet


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


def sheet_of(images, groups, tmp_path):
    path = class_sheet(images, groups, tmp_path / "new-1.png")
    assert path == tmp_path / "new-1.png"
    return pixels_of(path)


def split_sheet(sheet, side, scale):
    """The margin of the labels, and the tiles: rows, columns, side, side, 3."""
    cell, wide = (side + 4) * scale, 12
    margin = sheet.shape[1] - wide * cell
    tiles = sheet[:, margin:].reshape(-1, cell, wide, cell, 3).swapaxes(1, 2)
    edge = 2 * scale
    return sheet[:, :margin], tiles[:, :, edge:-edge, edge:-edge][:, :, ::scale, ::scale]


def test_a_sheet_shows_the_images_of_each_group_in_their_order(tmp_path):
    images = open_images("digits")
    groups = {
        "medoid": np.array([9]),
        "core": np.arange(24)[::-1].copy(),
        "border": np.arange(100, 112),
        "random": np.array([9, 9, 4]),
    }
    margin, tiles = split_sheet(sheet_of(images, groups, tmp_path), 16, 4)
    assert tiles.shape[:2] == (5, 12)
    filled = [*tiles[0][:1], *tiles[1], *tiles[2], *tiles[3], *tiles[4][:3]]
    for tile, row in zip(filled, np.concatenate(list(groups.values())), strict=True):
        assert np.abs(tile.astype(int) - images.read(row)).max() <= 1
    assert (tiles[0][1:] == 255).all()
    assert (tiles[4][3:] == 255).all()
    labeled = [(line < 128).any() for line in np.split(margin, 5)]
    assert labeled == [True, True, False, True, True]


def test_a_sheet_leaves_out_what_cannot_be_read_and_keeps_the_row_of_an_empty_group(tmp_path):
    images = photographs(tmp_path / "data", (200, 200), (120, 120), (150, 300))
    (tmp_path / "data" / "1.jpg").unlink()
    groups = {"core": np.array([1, 2, 0]), "border": np.arange(0)}
    margin, tiles = split_sheet(sheet_of(images, groups, tmp_path), 96, 1)
    assert tiles.shape[:2] == (2, 12)
    for tile, row in zip(tiles[0][:2], (2, 0)):
        assert np.abs(tile.astype(int) - center(images.read(row), 96)).max() <= 1
    assert (tiles[0][2:] == 255).all()
    assert (tiles[1] == 255).all()
    assert all((line < 128).any() for line in np.split(margin, 2))
    _, tiles = split_sheet(sheet_of(images, {"core": np.array([1])}, tmp_path), 96, 1)
    assert (tiles == 255).all()  # none can be read


def test_a_sheet_without_labels_has_no_margin_and_longer_labels_have_a_wider_one(tmp_path):
    columns = [torch.zeros(2, 3, 64, 64)] * 3
    widths = []
    for labels in ((), ("a", "b"), ("a", "a much longer label")):
        path = save_sheet(columns, tmp_path / "sheet.png", labels=labels)
        widths.append(pixels_of(path).shape[1])
    assert widths[0] == 3 * 68
    assert all(less < more for less, more in pairwise(widths))
