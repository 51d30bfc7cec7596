"""Images of many channels and of more than 8 bits: what is read, its range, and its views."""

import io
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from builders import as_bytes
from loaders import batches, same
from PIL import Image, ImageOps

from nearkin.data.augmentations import SIMCLR
from nearkin.data.batches import CenterCrops
from nearkin.data.channels import (
    NEEDS_CODECS,
    header,
    in_8_bits,
    preview,
    read_channels,
    stored_channels,
)
from nearkin.data.decode import BadImage, PixelType, array_pixels, crops, decode
from nearkin.data.notes import Note
from nearkin.data.opening import open_images
from nearkin.data.preprocessing import Preprocessing
from nearkin.data.views import View, augment, contrast, sample_view
from nearkin.errors import DataError, UsageError
from nearkin.run.copies import copy_to


def values(count: int = 13, dtype: str = "uint16", seed: int = 0, side: int = 24) -> np.ndarray:
    """Pixels (side, side + 4, count) whose channels differ in brightness."""
    rng = np.random.default_rng(seed)
    drawn = rng.gamma(3, 100 * np.arange(1, count + 1), (side, side + 4, count))
    largest = np.inf if dtype.startswith("float") else np.iinfo(dtype).max
    return drawn.clip(0, largest).astype(dtype)


def tiff(pixels: np.ndarray, **options) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, **options)
    return file.getvalue()


def contiguous(pixels: np.ndarray, **options) -> bytes:
    options["photometric"] = "minisblack"
    if pixels.shape[-1] == 1:
        return tiff(pixels[..., 0], **options)
    return tiff(pixels, planarconfig="contig", **options)


def planar(pixels: np.ndarray) -> np.ndarray:
    return np.moveaxis(pixels, -1, 0)


def folder(root: Path, count: int = 12, channels: int = 13, dtype: str = "uint16") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (root / f"{number:02}.tif").write_bytes(contiguous(values(channels, dtype, number)))
    return root


CYX = {"axes": "CYX"}
WRITTEN = {
    "samples": lambda x: contiguous(x),
    "planes": lambda x: tiff(planar(x), photometric="minisblack", planarconfig="separate"),
    "ImageJ": lambda x: tiff(planar(x), imagej=True, metadata=CYX),
    "OME": lambda x: tiff(planar(x), ome=True, metadata=CYX),
    "tiles": lambda x: contiguous(x, tile=(16, 16), compression="zlib"),
    "BigTIFF": lambda x: contiguous(x, bigtiff=True),
    "big-endian": lambda x: contiguous(x, byteorder=">"),
}


def test_channels_of_several_samples_each_stay_in_order():
    planes = np.stack([values(3, seed=seed) for seed in range(2)])
    for how in ({}, {"ome": True}):
        encoded = tiff(planes, photometric="rgb", metadata={"axes": "CYXS"}, **how)
        assert header(encoded) == ("TIFF", 28, 24, PixelType(6, "uint16"))
        assert (read_channels(encoded) == np.concatenate([*planes], axis=-1)).all(), how


@pytest.mark.parametrize("how", WRITTEN)
def test_every_value_of_every_layout_comes_back(how):
    for count, dtype in ((2, "uint8"), (4, "uint16"), (13, "float32")):
        pixels = values(count, dtype)
        encoded = WRITTEN[how](pixels)
        assert header(encoded) == ("TIFF", 28, 24, PixelType(count, dtype))
        assert (read_channels(encoded) == pixels).all(), dtype
        whole = header(encoded)
        for size in (8, 16, *range(100, len(encoded), 997), len(encoded) - 1):
            with suppress(BadImage):  # then all of the file is read
                assert header(encoded[:size], whole=False) == whole, size


def test_gray_of_more_than_8_bits_is_never_clipped_whoever_wrote_it():
    for dtype in ("uint16", "int16", "float32", "uint32"):
        pixels = values(1, dtype) * 20
        assert (read_channels(tiff(pixels[..., 0])) == pixels).all(), dtype
    pixels = values(1)[..., 0] * 40
    assert pixels.max() > 20_000
    for kind in ("PNG", "TIFF"):
        encoded = as_bytes(Image.fromarray(pixels), kind)
        assert header(encoded) == (kind, 28, 24, PixelType(1, "uint16"))
        assert (read_channels(encoded)[..., 0] == pixels).all()


def test_gray_pixels_of_more_than_8_bits_are_those_of_their_file_in_8_bits():
    for dtype in ("uint16", "int16", "int32", "float32"):
        pixels = values(1, dtype) * 20
        assert (in_8_bits(pixels) == np.asarray(decode(tiff(pixels[..., 0])))).all(), dtype


@pytest.mark.parametrize("count", [1, 5])
def test_orientation_turns_all_channels(count):
    pixels = values(count)
    planes = [Image.fromarray(plane.copy()) for plane in planar(pixels)]
    for turn in range(1, 9):
        encoded = contiguous(pixels, extratags=[(274, 3, 1, turn, True)])
        for plane in planes:
            plane.getexif()[274] = turn
        upright = [np.asarray(ImageOps.exif_transpose(plane)) for plane in planes]
        expected = np.stack(upright, axis=-1)
        assert header(encoded)[2:0:-1] == expected.shape[:2]
        assert (read_channels(encoded) == expected).all(), turn
        assert (stored_channels(planes[0])[..., 0] == upright[0]).all(), turn


def test_rgb_gray_and_transparent_tiffs_of_8_bits_are_as_before():
    pixels = values(4, "uint8")
    for shown in (pixels[..., 0], pixels[..., :3], pixels):  # the last with transparency
        assert header(tiff(shown)).pixel_type is None
    assert header(tiff(planar(values(5, "uint8")))).pixel_type is None  # its first page
    infrared = tiff(pixels, photometric="rgb", extrasamples=["unspecified"])
    assert header(infrared).pixel_type == PixelType(4, "uint8")
    assert (read_channels(infrared) == pixels).all()


def test_pages_are_channels_only_where_the_file_says_so_and_overviews_are_no_pages():
    pixels = planar(values(5))
    for stack in (tiff(pixels), tiff(pixels, imagej=True, metadata={"axes": "ZYX"})):
        with pytest.raises(BadImage, match=r"stack of 5 pages \((Q|Z)YX\); channels are CYX"):
            header(stack)
    file, pixels = io.BytesIO(), values(4)
    with tifffile.TiffWriter(file) as writer:
        options = dict(photometric="minisblack", planarconfig="contig")
        writer.write(pixels, **options)
        writer.write(pixels[::2, ::2], subfiletype=1, **options)
    assert (read_channels(file.getvalue()) == pixels).all()


def test_a_deep_tiff_is_as_large_as_other_images_may_be(monkeypatch):
    def reason(height, width):
        with pytest.raises(BadImage) as caught:
            header(tiff(np.zeros((height, width), np.uint16)))
        return caught.value.reason

    assert reason(1, 4) == reason(4, 1) == "too-small"
    monkeypatch.setenv("NEARKIN_MAX_PIXELS", "100")
    assert reason(11, 10) == "too-large: 10x11 pixels; see NEARKIN_MAX_PIXELS"
    assert header(tiff(np.zeros((10, 10), np.uint16))).width == 10


def test_a_tiff_that_ends_early_is_bad_wherever_it_ends():
    for compression in (None, "zlib"):
        encoded = contiguous(values(), compression=compression)
        for size in range(4, len(encoded), 997):
            with pytest.raises(BadImage):
                read_channels(encoded[:size])


def falsely_lzw() -> bytes:
    deflated, lzw = (struct.pack("<HHIHH", 259, 3, 1, number, 0) for number in (8, 5))
    return contiguous(values(), compression="zlib").replace(deflated, lzw)


WITHOUT_CODECS = """
import sys
sys.modules["imagecodecs"] = None  # importing it fails
from nearkin.data.channels import BadImage, read_channels
try:
    read_channels(sys.stdin.buffer.read())
except BadImage as error:
    print(error.reason, end="")
"""


def test_without_the_codecs_one_line_says_what_to_install():
    """In a process of its own, as tifffile takes them when it is imported."""
    command = [sys.executable, "-c", WITHOUT_CODECS]
    done = subprocess.run(command, input=falsely_lzw(), check=True, stdout=subprocess.PIPE)
    assert done.stdout.decode() == NEEDS_CODECS


@pytest.mark.needs("imagecodecs")
def test_with_the_codecs_what_they_compress_is_read():
    assert (read_channels(contiguous(values(), compression="lzw")) == values()).all()
    with pytest.raises(BadImage, match="unreadable"):
        read_channels(falsely_lzw())


def test_a_gray_tiff_in_lzw_needs_no_codecs():
    gray = as_bytes(Image.fromarray(values(1)[..., 0]), "TIFF", compression="tiff_lzw")
    assert (read_channels(gray) == values(1)).all()  # Pillow does


@pytest.mark.parametrize("pages", [1, 150])
def test_pages_in_a_circle_are_bad_and_never_walked_for_long(pages):
    encoded = contiguous(np.stack([values(4)] * pages), metadata=None)
    (last,) = (
        page.offset + 2 + 12 * len(page.tags)
        for page in tifffile.TiffFile(io.BytesIO(encoded)).pages[-1:]
    )
    circle = encoded[:last] + encoded[4:8] + encoded[last + 4 :]
    with pytest.raises(BadImage, match="too-large: more than 65536 pages"):
        header(circle)


def test_ranges_are_percentiles_and_the_statistics_are_of_what_is_scaled(tmp_path):
    images = open_images(folder(tmp_path))
    whole = np.concatenate([values(seed=n).reshape(-1, 13) for n in range(12)])
    low, high = np.percentile(whole, (0.1, 99.9), axis=0)
    scaled = ((whole - low) / (high - low)).clip(0, 1)
    channels = images.channels
    for ours, expected in zip(
        (channels.low, channels.high, channels.mean, channels.std),
        (low, high, scaled.mean(axis=0), scaled.std(axis=0)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-9)
    assert images.format_counts == {"TIFF of 13 uint16": 12}
    np.testing.assert_allclose(
        images.read(3), scaled[3 * 672 : 4 * 672].reshape(24, 28, 13), atol=1e-6
    )
    again = open_images(tmp_path)
    assert (again.channels, again.fingerprint) == (images.channels, images.fingerprint)


@pytest.mark.parametrize("constant", [7.0, -3.4e38, 2.0**24, 1e-30])
def test_a_channel_that_hardly_varies_is_0_but_where_it_is_more(constant):
    stacked = np.full((40, 16, 16, 2), constant, np.float32)
    stacked[..., 1] = np.random.default_rng(0).normal(size=(40, 16, 16))
    stacked[0, 0, 0, 0] = constant + abs(constant) + 10
    images = open_images(stacked)
    assert (images.read(1)[..., 0] == 0).all()
    assert images.read(0)[0, 0, 0] == 1
    assert np.isfinite([images.channels.mean, images.channels.std]).all()


def test_files_and_arrays_are_the_same_images(tmp_path):
    images = open_images(folder(tmp_path / "files", 4, 2))
    stacked = np.stack([values(2, seed=n) for n in range(4)])
    np.savez(tmp_path / "images.npz", x=stacked)
    array = open_images(tmp_path / "images.npz")
    assert array.channels == images.channels == open_images(stacked).channels
    assert array.format_counts == {"array of 2 uint16": 4}
    assert all((array.read(n) == images.read(n)).all() for n in range(4))
    assert copy_to(tmp_path / "copies", array, np.arange(2), ["a", "b"], data=[]) == 2
    assert (np.load(tmp_path / "copies" / "a" / "0.npy") == stacked[0]).all()
    with pytest.raises(ValueError, match=r"shape \(2, 5, 24, 28\); give \(height, width, 3\)"):
        array_pixels(np.zeros((2, 5, 24, 28), np.uint8), 4)  # channels first, no wide image


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16"])
def test_one_color_image_is_not_many_gray_ones_of_three_columns(dtype):
    color = values(3, dtype)
    says = r"shape \(24, 28, 3\) is one image; give a list of images"
    with pytest.raises(ValueError, match=says):
        array_pixels(color, 4)
    with pytest.raises(DataError, match=says):
        open_images(color)
    assert (array_pixels(color, 3) == color).all()
    gray = planar(values(5, dtype))
    assert (array_pixels(gray, 4) == gray[..., None]).all()
    assert len(open_images(gray)) == 5


def test_a_few_of_other_channels_or_with_nan_are_bad_files(tmp_path):
    folder(tmp_path)
    (tmp_path / "other.tif").write_bytes(contiguous(values(4)))
    Image.new("RGB", (24, 24)).save(tmp_path / "photo.jpg")
    (tmp_path / "torn.tif").write_bytes(contiguous(values())[:5000])
    bad = open_images(tmp_path, full=True).reasons
    assert bad == {
        "other.tif": "4 channels of uint16, not 13 channels of uint16",
        "photo.jpg": "RGB of 8 bits, not 13 channels of uint16",
        "torn.tif": "truncated",
    }


def test_nan_is_found_by_a_full_scan_and_else_when_it_is_read(tmp_path):
    folder(tmp_path, 4, 3, "float32")
    holes = values(3, "float32")
    holes[3, 4, 1] = np.nan
    (tmp_path / "00.tif").write_bytes(contiguous(holes))
    (bad,) = open_images(tmp_path, full=True).bad
    assert (bad.name, bad.reason) == ("00.tif", "NaN or infinite pixels; give them a value")
    crops = CenterCrops(open_images(tmp_path), 16)
    assert torch.cat(list(crops)).isfinite().all()
    assert crops.bad == {0: bad.reason}
    for path in tmp_path.iterdir():
        path.write_bytes(contiguous(holes))
    with pytest.raises(DataError, match=r"no image can be decoded, such as '03.tif' \(NaN"):
        open_images(tmp_path)


def test_gray_among_8_bits_is_scaled_by_its_type_and_said_so(tmp_path):
    Image.fromarray(np.full((24, 24), 1000, np.uint16)).save(tmp_path / "a.png")
    for name in "bcd":
        Image.new("RGB", (24, 24)).save(tmp_path / f"{name}.png")
    (tmp_path / "e.tif").write_bytes(contiguous(values(13)))
    images = open_images(tmp_path)
    assert images.channels is None
    assert [file.reason for file in images.bad] == ["13 channels of uint16, not RGB of 8 bits"]
    text = "1 image of more bits or channels, read as RGB of 8 bits, as the others are"
    assert images.notes == (Note("substituted", text, 1),)


def test_of_gray_images_the_type_of_most_decides(tmp_path):
    """A few of 8 bits do not make all others be read so; without a type of most, all are."""

    def written(name, **counts):
        (tmp_path / name).mkdir()
        for dtype, count in counts.items():
            for number in range(count):
                pixels = values(1, dtype, number)[..., 0]
                (tmp_path / name / f"{dtype}-{number}.tif").write_bytes(tiff(pixels))
        return open_images(tmp_path / name)

    Image.new("RGB", (24, 24)).save(written("deep", uint16=19, uint8=1).source.root / "photo.jpg")
    images = open_images(tmp_path / "deep")
    assert images.pixel_type == PixelType(1, "uint16")
    assert images.notes == ()
    reason = "RGB of 8 bits, not 1 channel of uint16"
    assert [(file.name, file.reason) for file in images.bad] == [
        ("photo.jpg", reason), ("uint8-0.tif", reason),
    ]  # fmt: skip
    for name, counts in (
        ("most of 8 bits", {"uint8": 3, "uint16": 2}),
        ("few of 16 bits more", {"uint16": 3, "uint8": 2}),
        ("no type of most", {"uint16": 2, "int16": 2}),
    ):
        images = written(name, **counts)
        assert (images.pixel_type, images.bad) == (None, ()), name
        deep = sum(counts.values()) - counts.get("uint8", 0)
        why = "as the others are" if "uint8" in counts else "as no type is that of most"
        text = f"{deep} images of more bits or channels, read as RGB of 8 bits, {why}"
        assert images.notes == (Note("substituted", text, deep),), name


def test_an_encoder_sees_no_images_of_other_channels(tmp_path):
    many = open_images(folder(tmp_path / "many"))
    few = open_images(folder(tmp_path / "few", channels=4))
    gray = open_images(folder(tmp_path / "gray", channels=1))
    own = Preprocessing.of(24, many.channels)
    assert Preprocessing.from_dict(own.to_dict()) == own
    assert own.applied(many).channels == many.channels
    for images, view, said in (
        (few, own, "4 channels of uint16, and the encoder takes 13 channels"),
        (many, Preprocessing(24), "13 channels of uint16, and the encoder takes RGB of 8 bits"),
    ):
        with pytest.raises(DataError, match=said):
            CenterCrops(images, view)
    # Gray is seen by an encoder of 8 bits, by its type, or in the range that it is given.
    assert Preprocessing(24).applied(gray).channels is None
    assert Preprocessing(24).for_images(gray).low == gray.channels.low
    assert "low" not in Preprocessing(24).to_dict()


def test_crops_of_channels_are_those_of_their_planes_and_people_see_the_first_three():
    floats = np.random.default_rng(0).random((4, 4, 5), np.float32)
    eight = np.rint(255 * floats).astype(np.uint8)
    assert (preview(floats) == eight[..., :3]).all()
    assert (preview(floats[..., :2]) == np.dstack([eight[..., :2], 0 * eight[..., :1]])).all()
    # Within the range: between its two passes, Pillow cuts what is of 8 bits.
    pixels = np.random.default_rng(0).integers(60, 190, (60, 64, 3), np.uint8)
    boxes = np.array([[0.1, 0.2, 0.5, 0.6]])
    floats = (pixels / 255).astype(np.float32)
    (deep,) = crops(floats, boxes, [16])
    (plain,) = crops(pixels, boxes, [16])
    assert np.abs(255 * deep - plain).max() <= 1


def sampled(view: View, channels: int, index: int = 0, count: int = 400, **changes):
    where = dict(seed=0, epoch=0, number=0, num_channels=channels)
    rows = np.arange(index, index + count)
    return sample_view(view, np.full((count, 2), 32), index=rows, **where | changes)


def test_channels_jitter_apart_and_one_of_them_is_lost():
    params = sampled(SIMCLR, 6)
    jittered, lost = (params.gain != 1).any(axis=1), (params.gain == 0).any(axis=1)
    kept = (params.gain >= 1 - SIMCLR.brightness - 1e-6).sum(axis=1)
    assert (kept[lost] == 5).all()
    assert 0.15 < lost.mean() < 0.25
    assert 0.75 < jittered.mean() < 0.95
    assert not params.gray.any()
    assert not params.solarize.any()
    assert (params.jitter[:, [0, 2, 3, 4]] == [1, 1, 0, 0]).all()
    assert (sampled(SIMCLR, 2).gain > 0).all()
    assert sampled(SIMCLR, 3).gain.shape == (400, 0)
    later = sampled(SIMCLR, 6, index=100, count=5)  # draws are of the image alone
    assert (params.gain[100:105] == later.gain).all()
    assert (params.gain != sampled(SIMCLR, 6, epoch=1).gain).any()
    for field in ("box", "sigma", "flip", "order"):  # and RGB has those it had
        assert (getattr(params, field) == getattr(sampled(SIMCLR, 3), field)).all()


def test_a_lost_channel_is_zero_and_contrast_keeps_the_mean_of_each():
    images = torch.rand(8, 6, 16, 16, generator=torch.Generator().manual_seed(0)) / 2 + 0.2
    params = sampled(View(gray=1.0), 6, count=8)
    views = augment(images, params)
    lost = torch.from_numpy(params.gain == 0)
    assert (views.amax(dim=(2, 3)) == 0).equal(lost)
    assert views[~lost].equal(images[~lost])
    changed = contrast(images, torch.full((8,), 0.5))
    torch.testing.assert_close(changed.mean(dim=(2, 3)), images.mean(dim=(2, 3)))


def test_batches_have_all_channels_with_any_number_of_workers(tmp_path):
    for side in (24, 80):  # in memory, and from files
        for number in range(8):
            stored = contiguous(values(4, "uint8", number, side))
            (tmp_path / f"{number}.tif").write_bytes(stored)
        images = open_images(tmp_path)
        assert (set(images.channels.low), set(images.channels.high)) == ({0.0}, {255.0})
        alone, helped = (batches(images, size=16, workers=n).load(0, 3) for n in (0, 1))
        for one, other in zip(alone, helped, strict=True):
            assert one.views[0].shape == (4, 4, 16, 16)
            assert same(one, other)
        with pytest.raises(UsageError, match="cache ram holds RGB of 8 bits, and images have 4"):
            batches(images, cache="ram")
