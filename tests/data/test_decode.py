"""Encoded images of every kind become the right RGB pixels, or a reason why not."""

import io
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from nearkin.data.batches import center_crops
from nearkin.data.decode import FORMATS, BadImage, center, crops, decode, header
from nearkin.data.opening import open_images
from nearkin.data.preprocessing import Preprocessing

SHARED = Path(__file__).parents[3] / "shared"


def encode(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def smooth(width=64, height=48):
    """An image without detail, which every codec keeps."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 255 - x], axis=2).astype(np.uint8))


def noise(width=64, height=64):
    return Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )


def png(width, height, pixels, extra=b""):
    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def reason(encoded):
    with pytest.raises(BadImage) as raised:
        decode(encoded)
    return raised.value.reason


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_decodes_to_the_pixels_that_were_saved(kind):
    image = smooth()
    got = np.asarray(decode(encode(image, kind)), int)
    assert header(encode(image, kind)) == (kind, 64, 48)
    if kind in ("PNG", "BMP", "TIFF", "PPM"):
        assert (got == np.asarray(image)).all()
    else:
        assert np.abs(got - np.asarray(image)).mean() < 12


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_the_eight_exif_orientations_give_the_same_image(kind):
    upright = smooth(60, 40)
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    lossless = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}
    for orientation in range(1, 9):
        stored = upright.transpose(undo[orientation]) if orientation > 1 else upright
        exif = Image.Exif()
        exif[0x0112] = orientation
        encoded = encode(stored, kind, exif=exif, **lossless.get(kind, {}))
        assert header(encoded) == (kind, 60, 40)
        difference = np.asarray(decode(encoded), int) - np.asarray(upright)
        assert np.abs(difference).max() <= (6 if kind == "JPEG" else 0)


def test_orientation_is_that_of_pillow():
    exif = Image.Exif()
    exif[0x0112] = 6
    encoded = encode(noise(40, 20), "PNG", exif=exif)
    theirs = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))
    assert (np.asarray(decode(encoded)) == np.asarray(theirs)).all()


def test_a_broken_exif_block_does_not_cost_the_image():
    plain = encode(smooth(), "JPEG")
    broken = plain[:2] + b"\xff\xe1\x00\x10Exif\0\0GARBAGE!" + plain[2:]
    assert (np.asarray(decode(broken)) == np.asarray(decode(plain))).all()


def test_what_is_transparent_becomes_white():
    clear = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    half = Image.new("LA", (8, 8), (0, 128))
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    assert (np.asarray(decode(encode(clear, "PNG"))) == 255).all()
    assert (np.asarray(decode(encode(half, "PNG"))) == 127).all()
    assert (np.asarray(decode(encode(palette, "PNG", transparency=1))) == 255).all()
    assert (np.asarray(decode(encode(palette, "PNG", transparency=b"\xff\x00"))) == 255).all()
    assert (np.asarray(decode(encode(palette, "PNG"))) == 9).all()
    assert (np.asarray(decode(encode(palette, "GIF", transparency=1))) == 255).all()


COMMENT = b"# from a camera\n#\r#\n"


@pytest.mark.parametrize("largest", [1, 99, 255, 1023, 65535])
@pytest.mark.parametrize("kind", ["P2", "P3", "P5", "P6"])
def test_netpbm_samples_are_scaled_by_the_largest_value_of_the_header(kind, largest):
    """GTSRB is PPM, many medical and astronomical images are PGM of 10 to 16 bits."""
    bands = 3 if kind in ("P3", "P6") else 1
    samples = np.random.default_rng(0).integers(0, largest + 1, (7, 5, bands))
    head = kind.encode() + b"\n" + COMMENT + b"5 7 " + COMMENT + b"\n%d\n" % largest
    if kind in ("P2", "P3"):
        text = [b"%d" % sample for sample in samples.ravel()]
        data = b" ".join(text[:20]) + b"\n" + COMMENT + b"\t\n".join(text[20:])
    else:
        data = samples.astype(">u2" if largest > 255 else "u1").tobytes()
    assert header(head + data) == ("PPM", 5, 7)
    got = np.asarray(decode(head + data))
    assert (got == np.rint(samples * (255 / largest))).all()
    assert reason((head + data)[: -len(data) // 2]) == "truncated"


def test_a_text_of_comments_takes_no_more_time_than_its_length():
    """In Pillow 12 the time is quadratic: hours for these 4 MB."""
    data = b"P2 2 2 255\n" + b"#\n" * 2_000_000 + b"0 0 255 255"
    assert np.asarray(decode(data))[:, :, 0].tolist() == [[0, 0], [255, 255]]


def test_gray_and_one_bit_images_have_three_equal_channels():
    gray = smooth().convert("L")
    assert (np.asarray(decode(encode(gray, "PNG"))) == np.asarray(gray)[..., None]).all()
    bits = noise().convert("1")
    expected = np.asarray(bits)[..., None] * 255
    assert (np.asarray(decode(encode(bits, "PNG"))) == expected).all()


def test_cmyk_keeps_its_colors():
    got = np.asarray(decode(encode(smooth().convert("CMYK"), "JPEG", quality=95)), int)
    assert np.abs(got - np.asarray(smooth())).mean() < 4


def test_sixteen_bits_are_scaled_by_their_depth():
    values = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    for kind in ("PNG", "TIFF"):
        got = np.asarray(decode(encode(Image.fromarray(values), kind)))
        assert (got[..., 0] == np.rint(values / 65535 * 255)).all()
    dark = np.asarray(decode(encode(Image.fromarray(values // 256), "PNG")))
    assert dark.max() == 1


def test_integers_and_floats_are_scaled_by_their_smallest_and_largest_value():
    ramp = np.linspace(-3, 7, 256).reshape(16, 16)
    expected = np.rint(np.linspace(0, 255, 256)).reshape(16, 16)
    for values in (ramp.astype(np.float32), (ramp * 1e6).astype(np.int32)):
        got = np.asarray(decode(encode(Image.fromarray(values), "TIFF")))[..., 0]
        assert np.abs(got - expected).max() <= 1
    constant = Image.fromarray(np.full((4, 4), 5, np.float32))
    assert (np.asarray(decode(encode(constant, "TIFF"))) == 0).all()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF", "PNG"])
def test_of_an_animation_the_first_frame_counts(kind):
    red, blue = (Image.new("RGB", (16, 16), color) for color in ("red", "blue"))
    lossless = {"lossless": True} if kind == "WEBP" else {}
    encoded = encode(red, kind, save_all=True, append_images=[blue], **lossless)
    assert (np.asarray(decode(encoded)) == [255, 0, 0]).all()


@pytest.mark.parametrize(
    "encoded",
    [b"", b"\xff", b"hello world" * 50, b'<svg xmlns="http://www.w3.org/2000/svg"/>'],
    ids=["empty", "one byte", "text", "svg"],
)
def test_what_is_no_image_is_called_so(encoded):
    assert reason(encoded) == "not-an-image"


def test_formats_off_the_list_are_not_tried():
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    assert reason(eps) == "not-an-image"
    assert reason(encode(smooth(), "TGA")) == "not-an-image"
    assert reason(encode(smooth(), "PCX")) == "not-an-image"
    assert reason(encode(smooth().convert("1"), "PPM")) == "not-an-image"  # P4, a bitmap


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_stops_halfway_is_called_truncated(kind):
    encoded = encode(noise(), kind)
    assert reason(encoded[: len(encoded) // 2]) == "truncated"


def test_a_file_of_too_many_pixels_is_refused_by_its_header():
    for side in (14_000, 60_000, 2**31 - 1):
        assert reason(png(side, side, zlib.compress(b"\0" * 100))) == "too-large"


def test_a_side_of_one_pixel_is_too_small():
    assert reason(encode(Image.new("RGB", (1, 50)), "PNG")) == "too-small"
    assert decode(encode(Image.new("RGB", (2, 50)), "PNG")).size == (2, 50)


def test_a_text_chunk_that_inflates_without_end_is_unreadable():
    text = b"k\0\0" + zlib.compress(b"a" * 200_000_000, 9)
    chunk = (
        struct.pack(">I", len(text))
        + b"zTXt"
        + text
        + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    )
    assert reason(png(8, 8, zlib.compress(b"\0" * 200), chunk)) == "unreadable"


def test_a_large_jpeg_is_decoded_no_smaller_than_needed():
    encoded = encode(smooth(800, 600), "JPEG")
    assert decode(encoded).size == (800, 600)
    for least in (600, 301, 300, 151, 150, 75, 10):
        assert min(decode(encoded, min_side=least).size) >= least
    assert decode(encoded, min_side=300).size == (400, 300)
    assert decode(encoded, min_side=10).size == (100, 75)


def test_crops_are_those_of_pillow():
    encoded = encode(noise(80, 60), "PNG")
    boxes = np.array([[0.0, 0.0, 1.0, 1.0], [0.25, 0.5, 0.5, 0.25]])
    whole, part = crops(encoded, boxes, [32, 20])
    full = decode(encoded)
    bicubic = Image.Resampling.BICUBIC
    assert (whole == np.asarray(full.resize((32, 32), bicubic))).all()
    assert (part == np.asarray(full.resize((20, 20), bicubic, box=(20, 30, 60, 45)))).all()


def test_crops_of_pixels_are_those_of_the_same_image_encoded():
    boxes = np.array([[0.1, 0.2, 0.5, 0.5], [0.0, 0.0, 1.0, 1.0]])
    encoded = crops(encode(noise(80, 60), "PNG"), boxes, [32, 20])
    pixels = crops(np.asarray(noise(80, 60)), boxes, [32, 20])
    assert all((a == b).all() for a, b in zip(encoded, pixels))


def test_crops_have_the_detail_that_their_size_needs():
    # Decoding at half size would blur this one-pixel pattern to gray.
    stripes = np.zeros((512, 512, 3), np.uint8)
    stripes[:, ::2] = 255
    encoded = encode(Image.fromarray(stripes), "JPEG", quality=100)
    (fine,) = crops(encoded, np.array([[0.0, 0.0, 0.25, 0.25]]), [128])
    (coarse,) = crops(encoded, np.array([[0.0, 0.0, 1.0, 1.0]]), [128])
    assert fine.std() > 100
    assert coarse.std() < 10


def test_crops_of_a_turned_image_are_fractions_of_the_upright_one():
    exif = Image.Exif()
    exif[0x0112] = 6
    encoded = encode(smooth(600, 400), "JPEG", exif=exif, quality=95)
    (top,) = crops(encoded, np.array([[0.0, 0.0, 1.0, 0.1]]), [40])
    expected = decode(encoded).resize((40, 40), Image.Resampling.BICUBIC, box=(0, 0, 400, 60))
    assert np.abs(top.astype(int) - np.asarray(expected)).mean() < 2


def test_center_is_resize_then_crop():
    image = smooth(300, 200)
    resized = image.resize((384, 256), Image.Resampling.BICUBIC)
    expected = np.asarray(resized.crop((80, 16, 304, 240)), int)
    assert np.abs(center(encode(image, "PNG"), 224) - expected).max() <= 2
    small = image.resize((48, 32), Image.Resampling.BICUBIC).crop((8, 0, 40, 32))
    assert np.abs(center(encode(image, "PNG"), 32) - np.asarray(small, int)).max() <= 2


def test_center_leaves_a_image_of_the_right_size_alone():
    for side in (32, 96):
        pixels = np.asarray(noise(side, side))
        assert (center(pixels, side) == pixels).all()
        assert (center(encode(noise(side, side), "PNG"), side) == pixels).all()


def test_a_image_that_goes_bad_after_the_scan_is_gray_and_reported(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").write_bytes(encode(noise(), "PNG"))
    images = open_images(tmp_path, cache=False)
    (tmp_path / "b.png").unlink()
    (tmp_path / "c.png").write_bytes(b"no longer an image")
    pixels, bad = center_crops(images, range(len(images)), Preprocessing(16))
    assert bad == {1: "unreadable", 2: "not-an-image"}
    assert (pixels[1:] == 128).all()
    assert (pixels[0] == center(images.read(0), 16)).all()


def test_many_threads_may_decode_and_leave_the_warning_filters_alone():
    import warnings

    before = list(warnings.filters)
    warning = encode(smooth(), "TIFF")[:20] + b"\0" * 4  # Pillow warns of corrupt exif data
    failures = []

    def work():
        for _ in range(50):
            try:
                decode(warning)
            except BadImage:
                continue
            except Warning as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert warnings.filters == before


def test_hostile_files_are_decoded_or_refused_within_time_and_memory():
    corpus = SHARED / "data" / "odd_images" / "odd_images.tar"
    if not corpus.exists():
        pytest.skip("the corpus of odd images is not here")
    program = f"""
import resource, tarfile
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
from nearkin.data.decode import decode
from nearkin.data.decode import FORMATS, BadImage, header
with tarfile.open({str(corpus)!r}) as tar:
    for member in tar:
        if not member.isfile():
            continue
        encoded = tar.extractfile(member).read()
        try:
            image = decode(encoded)
            assert image.mode == "RGB"
            assert header(encoded) == (header(encoded).format, *image.size), member.name
            print("ok", member.name)
        except BadImage as error:
            print(error.reason, member.name)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr[-2000:]
    verdicts = [line.split(" ", 1) for line in run.stdout.splitlines()]
    reasons = {"ok", "not-an-image", "truncated", "too-large", "too-small", "unreadable"}
    assert len(verdicts) == 826
    assert {verdict for verdict, _ in verdicts} <= reasons
    plain = [v for v, name in verdicts if name.startswith("plain_rgb/exif_orientation")]
    assert plain
    assert set(plain) == {"ok"}
