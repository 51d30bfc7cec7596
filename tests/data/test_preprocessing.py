"""Preprocessing against torchvision's own transforms: the same pixels, bit for bit."""

import io

import numpy as np
import pytest
from builders import as_bytes, soft
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from nearkin.data.decode import center
from nearkin.data.preprocessing import Preprocessing

SIDES = [(333, 477), (477, 333), (224, 224), (97, 640), (641, 98), (256, 257), (30, 41)]


def photograph(height, width):
    return np.asarray(soft(height * width, (width, height)))


def test_center_and_squash_are_torchvisions_resize_and_crop():
    for height, width in SIDES:
        pixels = photograph(height, width)
        image = Image.fromarray(pixels)
        for size, resize_to, how in (
            (224, 256, "bicubic"), (224, 232, "bilinear"), (98, 98, "bicubic"), (65, 90, "lanczos"),
        ):  # fmt: skip
            resized = transforms.Resize(resize_to, InterpolationMode(how))(image)
            theirs = transforms.CenterCrop(size)(resized)
            ours = Preprocessing(size, "center", resize_to, how).pixels(pixels)
            np.testing.assert_array_equal(ours, np.asarray(theirs), err_msg=f"{height} {width}")
        theirs = transforms.Resize((96, 96), InterpolationMode.BICUBIC)(image)
        ours = Preprocessing(96, "squash", 96, "bicubic").pixels(pixels)
        np.testing.assert_array_equal(ours, np.asarray(theirs))


@pytest.mark.parametrize("by", [1, 255])
def test_of_a_scan_line_only_the_middle_is_enlarged(by):
    """All of it would be 65,000 x 5 px enlarged to 3,328,000 x 256. Of 8 bits, and from 0 to 1."""
    line = photograph(3, 6000)
    pixels = line if by == 1 else line.astype(np.float32) / by
    view = Preprocessing(20, "center", 24)
    resized = transforms.Resize(24, InterpolationMode.BICUBIC)(Image.fromarray(line))
    theirs = np.asarray(transforms.CenterCrop(20)(resized), np.float32)
    lying = view.pixels(pixels)
    standing = view.pixels(pixels.swapaxes(0, 1)).swapaxes(0, 1)
    for ours in (lying, standing):
        assert by * ours == pytest.approx(theirs, abs=0 if by == 1 else 1)
    assert Preprocessing(224, "center", 256).pixels(photograph(1, 65_000)).shape == (224, 224, 3)


def test_a_jpeg_is_decoded_at_full_scale_unless_it_is_four_times_as_large():
    """At a smaller scale the pixels differ, so that must stay the exception of large files."""
    view = Preprocessing(64, "center", 73)
    for side, same in ((291, True), (1200, False)):
        encoded = as_bytes(soft(side, (side, side)), "JPEG", quality=95)
        full = np.asarray(Image.open(io.BytesIO(encoded)))
        scaled, whole = view.pixels(encoded), view.pixels(full)
        assert np.array_equal(scaled, whole) == same
        assert np.abs(scaled.astype(int) - whole).mean() < 1


def test_an_image_size_keeps_the_proportion_of_the_crop_and_box_is_nearkins_own_view():
    view = Preprocessing(224, "center", 256).resized(98)
    assert (view.image_size, view.resize_to) == (98, 112)
    pixels = photograph(333, 477)
    np.testing.assert_array_equal(Preprocessing(96).pixels(pixels), center(pixels, 96))


def test_a_header_that_no_network_was_trained_with_is_refused():
    stored = Preprocessing(224, "center", 256).to_dict()
    assert Preprocessing.from_dict(stored) == Preprocessing(224, "center", 256)
    wrong = {"image_size": (0, 10_000), "crop": ("border",), "interpolation": ("box",)}
    wrong |= {"resize_to": (5, 10_000_000), "std": ((0.0, 1.0, 1.0),)}
    wrong |= {"mean": ((0.5, 0.5), (float("nan"), 0.0, 0.0))}
    for changed in ({name: value} for name, values in wrong.items() for value in values):
        # Where tests check types, that of a field is refused first, by a TypeError.
        with pytest.raises((ValueError, TypeError)):
            Preprocessing.from_dict(stored | changed)
