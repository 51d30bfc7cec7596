"""Where in two images their likeness lies: the equation, and objects whose place is known."""

import numpy as np
import pytest
import tifffile
import timm
import torch
from PIL import Image
from torch import nn

import nearkin
from nearkin.data.preprocessing import Preprocessing
from nearkin.encoders.encoder import Encoder
from nearkin.errors import DataError, UsageError
from nearkin.networks.branch import as_backbone

CELL, GRID = 8, 6


class Colors(nn.Module):
    """The mean of the color of each of 36 places, minus gray, averaged."""

    def __init__(self):
        super().__init__()
        self.project = nn.Conv2d(3, 3, CELL, stride=CELL, bias=False)
        nn.init.zeros_(self.project.weight)
        with torch.no_grad():
            for channel in range(3):
                self.project.weight[channel, channel] = 1 / CELL**2

    def forward(self, images):
        return self.project(images).mean(dim=(2, 3))


@pytest.fixture
def encoder():
    return Encoder(as_backbone(Colors(), CELL * GRID), CELL * GRID, {"backbone": "colors"})


def scene(row, column, color, background):
    """A square of a color, of two by two places, on a background."""
    pixels = np.full((CELL * GRID, CELL * GRID, 3), background, np.uint8)
    pixels[row * CELL : (row + 2) * CELL, column * CELL : (column + 2) * CELL] = color
    return pixels


RED, DARK, LIGHT = (250, 20, 20), (120, 116, 108), (122, 118, 104)


def test_values_are_cosines_with_the_mean_of_the_other_and_add_up_to_that_of_the_features(encoder):
    rng = np.random.default_rng(0)
    pair = [rng.integers(0, 256, (48, 48, 3), np.uint8) for _ in range(2)]
    maps = nearkin.likeness(encoder, *pair)
    assert maps.shape == (2, GRID, GRID)
    images = torch.stack([encoder.transform(each) for each in pair])
    with torch.no_grad():
        tokens, features = encoder.forward_features(images), encoder(images)
    for own, other in ((0, 1), (1, 0)):
        mean = tokens[other].mean(0)
        expected = tokens[own] @ mean / tokens[own].norm(dim=1) / mean.norm()
        torch.testing.assert_close(maps[own].flatten(), expected)
        length = tokens[own].norm(dim=1) / (GRID**2 * features[own].norm())
        whole = torch.nn.functional.cosine_similarity(*features, dim=0)
        torch.testing.assert_close((maps[own].flatten() * length).sum(), whole)


def test_a_common_object_is_where_the_maps_are_highest(encoder):
    first, second = scene(1, 4, RED, DARK), scene(3, 0, RED, LIGHT)
    maps = nearkin.likeness(encoder, first, second)
    for found, (row, column) in zip(maps, ((1, 4), (3, 0)), strict=True):
        places = {divmod(place, GRID) for place in found.flatten().topk(4).indices.tolist()}
        assert places == {(row + down, column + right) for down in (0, 1) for right in (0, 1)}


def test_other_weights_give_other_maps(encoder):
    rng = np.random.default_rng(1)
    pair = [rng.integers(0, 256, (48, 48, 3), np.uint8) for _ in range(2)]
    maps = nearkin.likeness(encoder, *pair)
    with torch.no_grad():
        encoder.backbone.body.project.weight.copy_(torch.randn(3, 3, CELL, CELL))
    others = nearkin.likeness(encoder, *pair)
    assert abs(np.corrcoef(maps.flatten(), others.flatten())[0, 1]) < 0.6


def test_class_tokens_are_no_place_and_files_are_read_upright(tmp_path):
    body = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=0)
    encoder = Encoder(as_backbone(body, 32), 32, {"backbone": "vit"})
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    exif = Image.Exif()
    exif[274] = 3
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    maps = nearkin.likeness(encoder, tmp_path / "a.png", str(tmp_path / "a.png"))
    assert maps.shape == (2, 2, 2)
    torch.testing.assert_close(maps, nearkin.likeness(encoder, *2 * [pixels[::-1, ::-1].copy()]))


def ranged(high):
    """An encoder of three channels from 0 to this value, or of gray."""
    view = Preprocessing(CELL * GRID, low=3 * (0.0,), high=3 * (float(high),))
    return Encoder(as_backbone(Colors(), CELL * GRID), view, {"backbone": "colors"})


def test_files_of_16_bits_are_as_their_arrays_for_an_encoder_of_such(tmp_path):
    rng, encoder = np.random.default_rng(0), ranged(2**16 - 1)
    pair = [rng.integers(0, 2**16, (48, 60), np.uint16) for _ in range(2)]
    files = [tmp_path / "a.png", tmp_path / "b.tif"]
    for pixels, file in zip(pair, files, strict=True):
        Image.fromarray(pixels).save(file)
    expected = nearkin.likeness(encoder, *pair)
    torch.testing.assert_close(nearkin.likeness(encoder, *files), expected)
    images = [Image.open(file) for file in files]
    torch.testing.assert_close(nearkin.likeness(encoder, *images), expected)


def test_pages_that_are_channels_are_as_their_array(tmp_path):
    encoder, pixels = ranged(255), np.random.default_rng(0).integers(0, 256, (3, 48, 48), np.uint8)
    how = {"metadata": {"axes": "CYX"}, "photometric": "minisblack", "ome": True}
    tifffile.imwrite(tmp_path / "a.ome.tif", pixels, **how)
    array = pixels.transpose(1, 2, 0)
    maps = nearkin.likeness(encoder, tmp_path / "a.ome.tif", array)
    torch.testing.assert_close(maps, nearkin.likeness(encoder, array, array))


def test_images_of_8_bits_are_refused_by_an_encoder_of_others(tmp_path):
    encoder, image = ranged(2**16 - 1), Image.fromarray(scene(0, 0, RED, DARK))
    for picture in (image, image.convert("L")):
        picture.save(tmp_path / "a.png")
        with pytest.raises(DataError, match=r"a\.png' cannot be read \(.*8 bits"):
            nearkin.likeness(encoder, tmp_path / "a.png", tmp_path / "a.png")
        with pytest.raises(UsageError, match="it is of 8 bits, and the encoder takes others"):
            encoder.transform(picture)


def test_what_cannot_be_compared_is_refused(encoder, tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"a\.png' cannot be read"):
        nearkin.likeness(encoder, tmp_path / "a.png", scene(0, 0, RED, DARK))
    with pytest.raises(DataError, match="No such file"):
        nearkin.likeness(encoder, tmp_path / "b.png", scene(0, 0, RED, DARK))

    class Flat(nn.Module):
        def forward(self, images):
            return images.flatten(1)[:, :4]

    flat = Encoder(as_backbone(Flat(), 8), 8, {"backbone": "flat"})
    with pytest.raises(UsageError, match="neither tokens nor a feature map"):
        nearkin.likeness(flat, *2 * [np.zeros((8, 8, 3), np.uint8)])
