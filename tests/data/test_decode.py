"""Encoded images of every kind become the right RGB pixels, or a reason why not."""

import io
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders import as_bytes, noise
from PIL import Image, ImageOps

from nearkin.data.decode import FORMATS, BadImage, center, crops, decode, header


def smooth(width=64, height=48):
    """An image without detail, which every codec keeps."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 255 - x], axis=2).astype(np.uint8))


def noised(width=64, height=64):
    return Image.fromarray(noise(0, (width, height)))


def reason(encoded):
    with pytest.raises(BadImage) as raised:
        decode(encoded)
    return raised.value.reason


def test_every_format_decodes_to_the_pixels_that_were_saved_unless_it_stops_halfway():
    image = smooth()
    for kind in FORMATS:
        encoded = as_bytes(image, kind)
        got = np.asarray(decode(encoded), int)
        assert header(encoded) == (kind, 64, 48, None)
        if kind in ("PNG", "BMP", "TIFF", "PPM"):
            assert (got == np.asarray(image)).all(), kind
        else:
            assert np.abs(got - np.asarray(image)).mean() < 12, kind
        encoded = as_bytes(noised(), kind)
        assert reason(encoded[: len(encoded) // 2]) == "truncated", kind
    for kind in ("TGA", "PCX"):  # not on the list, and not tried
        assert reason(as_bytes(image, kind)) == "not-an-image"
    assert reason(as_bytes(image.convert("1"), "PPM")) == "not-an-image"  # P4, a bitmap


def test_the_eight_exif_orientations_are_those_of_pillow():
    exif = Image.Exif()
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        for orientation in range(1, 9):
            exif[0x0112], lossless = orientation, {"lossless": True} if kind == "WEBP" else {}
            encoded = as_bytes(noised(60, 40), kind, exif=exif, **lossless)
            theirs = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))))
            assert header(encoded) == (kind, *theirs.shape[1::-1], None)
            assert theirs.shape == ((40, 60, 3) if orientation < 5 else (60, 40, 3))
            assert (np.asarray(decode(encoded)) == theirs).all(), (kind, orientation)


def test_a_broken_block_of_exif_or_color_does_not_cost_the_image():
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        plain = np.asarray(decode(as_bytes(smooth(), kind)))
        broken = as_bytes(smooth(), kind, icc_profile=b"garbage" * 9)
        assert (np.asarray(decode(broken)) == plain).all(), kind
    plain = as_bytes(smooth(), "JPEG")
    broken = plain[:2] + b"\xff\xe1\x00\x10Exif\0\0GARBAGE!" + plain[2:]
    assert (np.asarray(decode(broken)) == np.asarray(decode(plain))).all()


def test_what_is_transparent_becomes_white():
    clear = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    half = Image.new("LA", (8, 8), (0, 128))
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    assert (np.asarray(decode(as_bytes(clear, "PNG"))) == 255).all()
    assert (np.asarray(decode(as_bytes(half, "PNG"))) == 127).all()
    assert (np.asarray(decode(as_bytes(palette, "PNG", transparency=1))) == 255).all()
    assert (np.asarray(decode(as_bytes(palette, "PNG", transparency=b"\xff\x00"))) == 255).all()
    assert (np.asarray(decode(as_bytes(palette, "PNG"))) == 9).all()
    assert (np.asarray(decode(as_bytes(palette, "GIF", transparency=1))) == 255).all()


@pytest.mark.parametrize("kind", ["P5", "P6"])
def test_netpbm_samples_are_scaled_by_the_largest_value_of_the_header(kind):
    """GTSRB is PPM, many medical and astronomical images are PGM of 10 to 16 bits."""
    bands = 3 if kind == "P6" else 1
    for largest in (1, 99, 255, 1023, 65535):
        samples = np.random.default_rng(0).integers(0, largest + 1, (7, 5, bands))
        head = kind.encode() + b"\n# from a camera\n#\r#\n5 7 #\n%d\n" % largest
        data = samples.astype(">u2" if largest > 255 else "u1").tobytes()
        assert header(head + data) == ("PPM", 5, 7, None)
        got = np.asarray(decode(head + data))
        assert (got == np.rint(samples * (255 / largest))).all(), largest
        assert reason((head + data)[: -len(data) // 2]) == "truncated"


def test_netpbm_as_text_is_refused_at_once():
    """In Pillow the time is quadratic in its comments: hours for these 4 MB."""
    for kind in (b"P2", b"P3"):
        data = kind + b" 2 2 255\n" + b"#\n" * 2_000_000 + b"0 0 255 255"
        assert reason(data) == "PGM or PPM as text; convert it to PNG"


def test_gray_and_one_bit_images_have_three_equal_channels_and_cmyk_keeps_its_colors():
    gray = smooth().convert("L")
    assert (np.asarray(decode(as_bytes(gray, "PNG"))) == np.asarray(gray)[..., None]).all()
    bits = noised().convert("1")
    expected = np.asarray(bits)[..., None] * 255
    assert (np.asarray(decode(as_bytes(bits, "PNG"))) == expected).all()
    got = np.asarray(decode(as_bytes(smooth().convert("CMYK"), "JPEG", quality=95)), int)
    assert np.abs(got - np.asarray(smooth())).mean() < 4


def test_sixteen_bits_are_scaled_by_their_depth_and_floats_by_their_range():
    values = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    for kind in ("PNG", "TIFF"):
        got = np.asarray(decode(as_bytes(Image.fromarray(values), kind)))
        assert (got[..., 0] == np.rint(values / 65535 * 255)).all()
    dark = np.asarray(decode(as_bytes(Image.fromarray(values // 256), "PNG")))
    assert dark.max() == 1
    ramp = np.linspace(-3, 7, 256).reshape(16, 16)
    expected = np.rint(np.linspace(0, 255, 256)).reshape(16, 16)
    for values in (ramp.astype(np.float32), (ramp * 1e6).astype(np.int32)):
        got = np.asarray(decode(as_bytes(Image.fromarray(values), "TIFF")))[..., 0]
        assert np.abs(got - expected).max() <= 1
    constant = Image.fromarray(np.full((4, 4), 5, np.float32))
    assert (np.asarray(decode(as_bytes(constant, "TIFF"))) == 0).all()


def test_of_an_animation_the_first_frame_counts():
    red, blue = (Image.new("RGB", (16, 16), color) for color in ("red", "blue"))
    for kind in ("GIF", "WEBP", "TIFF", "PNG"):
        lossless = {"lossless": True} if kind == "WEBP" else {}
        encoded = as_bytes(red, kind, save_all=True, append_images=[blue], **lossless)
        assert (np.asarray(decode(encoded)) == [255, 0, 0]).all(), kind


def test_a_large_jpeg_is_decoded_no_smaller_than_needed():
    encoded = as_bytes(smooth(800, 600), "JPEG")
    assert decode(encoded).size == (800, 600)
    for least in (600, 301, 300, 151, 150, 75, 10):
        assert min(decode(encoded, min_side=least).size) >= least
    assert decode(encoded, min_side=300).size == (400, 300)
    assert decode(encoded, min_side=10).size == (100, 75)


def test_crops_are_those_of_pillow_of_pixels_and_of_what_is_encoded():
    encoded = as_bytes(noised(80, 60), "PNG")
    boxes = np.array([[0.0, 0.0, 1.0, 1.0], [0.25, 0.5, 0.5, 0.25]])
    full = decode(encoded)
    bicubic = Image.Resampling.BICUBIC
    for image in (encoded, np.asarray(full)):
        whole, part = crops(image, boxes, [32, 20])
        assert (whole == np.asarray(full.resize((32, 32), bicubic))).all()
        assert (part == np.asarray(full.resize((20, 20), bicubic, box=(20, 30, 60, 45)))).all()


def test_crops_have_the_detail_that_their_size_needs():
    # Decoding at half size would blur this one-pixel pattern to gray.
    stripes = np.zeros((512, 512, 3), np.uint8)
    stripes[:, ::2] = 255
    encoded = as_bytes(Image.fromarray(stripes), "JPEG", quality=100)
    (fine,) = crops(encoded, np.array([[0.0, 0.0, 0.25, 0.25]]), [128])
    (coarse,) = crops(encoded, np.array([[0.0, 0.0, 1.0, 1.0]]), [128])
    assert fine.std() > 100
    assert coarse.std() < 10


def test_crops_of_a_turned_image_are_fractions_of_the_upright_one():
    exif = Image.Exif()
    exif[0x0112] = 6
    encoded = as_bytes(smooth(600, 400), "JPEG", exif=exif, quality=95)
    (top,) = crops(encoded, np.array([[0.0, 0.0, 1.0, 0.1]]), [40])
    expected = decode(encoded).resize((40, 40), Image.Resampling.BICUBIC, box=(0, 0, 400, 60))
    assert np.abs(top.astype(int) - np.asarray(expected)).mean() < 2


def test_center_is_resize_then_crop_and_leaves_an_image_of_the_right_size_alone():
    image = smooth(300, 200)
    resized = image.resize((384, 256), Image.Resampling.BICUBIC)
    expected = np.asarray(resized.crop((80, 16, 304, 240)), int)
    assert np.abs(center(as_bytes(image, "PNG"), 224) - expected).max() <= 2
    small = image.resize((48, 32), Image.Resampling.BICUBIC).crop((8, 0, 40, 32))
    assert np.abs(center(as_bytes(image, "PNG"), 32) - np.asarray(small, int)).max() <= 2
    for side in (32, 96):
        pixels = np.asarray(noised(side, side))
        assert (center(pixels, side) == pixels).all()
        assert (center(as_bytes(noised(side, side), "PNG"), side) == pixels).all()


def test_many_threads_may_decode_and_leave_the_warning_filters_alone():
    before = list(warnings.filters)
    warning = as_bytes(smooth(), "TIFF")[:20] + b"\0" * 4  # Pillow warns of corrupt exif data
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(reason, [warning] * 400))) == 1
    assert warnings.filters == before
