"""A file may say any size of itself: no more is read or allocated than there is room for."""

import gzip
import io
import struct
import tarfile
import zlib

import pyarrow as pa
import pytest
from builders import as_bytes
from hostile import answers_to, assert_harmless, folder_of, image, work_place
from PIL import Image

from nearkin.data.archives import list_archives
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import load
from nearkin.errors import CheckpointError, DataError

PIXELS = image(7)
ZEROS = 300 * 2**20
"""Bytes that a few hundred kilobytes unpack to."""


def deflated(content, times=1):
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return b"".join(packer.compress(content) for _ in range(times)) + packer.flush()


PACKED_ZEROS = deflated(bytes(2**20), ZEROS >> 20)


def zip_of(packed, form=8, *, size, packed_size=None, offset=0, local_size=None, names=("0.png",)):
    """A zip whose members all share the same packed bytes, and which states any sizes."""
    packed_size = len(packed) if packed_size is None else packed_size
    local_size = size if local_size is None else local_size
    small, checksum = min(local_size, 2**32 - 1), 0 if form else zlib.crc32(packed)
    local = struct.pack(
        "<4s5H3I2H", b"PK\3\4", 45, 0, form, 0, 0, checksum, len(packed), small, 5, 0
    )
    entries = b""
    for name in names:
        large = struct.pack("<HHQQQ", 1, 24, size, packed_size, offset)
        unsaid = (2**32 - 1,) * 2
        entries += struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 45, 45, 0, form, 0, 0, checksum, *unsaid, len(name), len(large),
            0, 0, 0, 0, 2**32 - 1,
        ) + name.encode() + large  # fmt: skip
    start = len(local) + 5 + len(packed)
    tail = ("<4s4H2IH", b"PK\5\6", 0, 0, len(names), len(names), len(entries), start, 0)
    return local + b"0.png" + packed + entries + struct.pack(*tail)


def tar_of(content, **said):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, each in content.items():
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(each), said.get("pax", {})
            archive.addfile(info, io.BytesIO(each))
    whole = bytearray(file.getvalue())
    for field, (start, end) in {"size": (124, 136), "kind": (156, 157)}.items():
        if field in said:  # of the first member, and then the checksum of its header
            whole[start:end] = said[field]
            whole[148:156] = b" " * 8
            whole[148:156] = b"%06o\0 " % sum(whole[:512])
    return bytes(whole)


def tiff(width, height, bits=16, count=1):
    """A gray TIFF without pixels; `count` is how many values the tag of its bits has."""
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, count, bits), (259, 3, 1, 1),
            (262, 3, 1, 1), (273, 4, 1, 8), (277, 3, 1, 1), (278, 4, 1, height),
            (279, 4, 1, 64)]  # fmt: skip
    packed = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + packed + bytes(68)


def npy(shape, kind="|u1"):
    """An array of a few bytes that states any shape."""
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head.encode() + bytes(64)


def npz_of(content, size=None):
    whole = zip_of(content, 0, size=len(content) if size is None else size)
    return whole.replace(b"0.png", b"x.npy")


def arrow_of(ends, columns=("image",)):
    """A table whose columns of two values each lie of where these end."""
    true = [0, 123, 456]
    batch = pa.RecordBatch.from_pydict(
        {"image": [PIXELS[:123], PIXELS[123:456]], "label": ["a" * 123, "b" * 333]}
    ).select(columns)
    file = io.BytesIO()
    with pa.ipc.new_stream(file, batch.schema) as stream:
        stream.write_batch(batch)
    packed = [struct.pack("<3i", *numbers) for numbers in (true, ends)]
    assert file.getvalue().count(packed[0]) == len(columns)
    return file.getvalue().replace(*packed)


def riff(kind, content):
    return b"RIFF" + struct.pack("<I", len(content) + 12) + b"WEBP" + kind + content


def chunk(kind, data):
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


def png(side, pixels=b"", extra=b""):
    """An image of one bit per pixel."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def wide_jpeg():
    jpeg = bytearray(image(kind="JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65_500, 65_500)
    return bytes(jpeg)


def frames(count):
    """A GIF whose second frame is there as often."""
    first, second = (Image.new("L", (16, 16), shade) for shade in (0, 255))
    gif = as_bytes(first, "GIF", save_all=True, append_images=[second], duration=10)
    start = gif.index(b"\x21\xf9", gif.index(b"\x21\xf9") + 1)
    return gif[:start] + gif[start:-1] * count + b";"


SIZES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
OCTAL = {"octal": b"77777777777\0", "40-bits": b"\x80" + bytes(6) + b"\1" + bytes(4),
         "63-bits": b"\x80" + bytes(3) + b"\x7f" + b"\xff" * 7, "64-bits": b"\x80" + b"\xff" * 11,
         "below-0": b"\xff" * 12, "no-number": b"x" * 12}  # fmt: skip
BOMBS = {
    **{f"deflated-{size}.zip": zip_of(PACKED_ZEROS, size=size) for size in SIZES},
    **{f"stored-{size}.zip": zip_of(PIXELS, 0, size=size, packed_size=size) for size in SIZES},
    **{f"packed-{size}.zip": zip_of(PACKED_ZEROS, size=99, packed_size=size) for size in SIZES},
    **{f"place-{size}.zip": zip_of(PIXELS, 0, size=99, offset=size) for size in SIZES},
    "overlapping.zip": zip_of(PACKED_ZEROS, size=ZEROS, names=[f"{n}.png" for n in range(8)]),
    **{f"size-{name}.tar": tar_of({"0.png": PIXELS}, size=size) for name, size in OCTAL.items()},
    **{f"{kind}-of-{name}.tar": tar_of({"0.png": PIXELS}, size=size, kind=kind.encode())
       for name, size in OCTAL.items() for kind in "LxgS"},
    "pax.tar": tar_of({"0.png": PIXELS}, pax={"size": "9" * 4999, "GNU.sparse.map": "x,y"}),
    "sparse.tar": tar_of({"0.png": PIXELS}, pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
    "deep.tar": tar_of({"0.png": PIXELS, "0.json": b"[" * 65_000, "0.cls": b"9" * 5_000}),
    **{f"shape-{number}.npz": npz_of(npy(shape)) for number, shape in enumerate(
        [(2**40,), (2**62, 4), (2**31, 2**31, 2**31), (-1, 8, 8), (10**400,)])},
    "unpacks.npz": npz_of(npy((2**40,)), size=2**48),
    "array.npz": npy((64,)),
    "deflated.npz": zip_of(PACKED_ZEROS, size=ZEROS).replace(b"0.png", b"x.npy"),
    **{f"values-{number}.arrow": arrow_of(ends) for number, ends in enumerate(
        [(0, 2**30, 2**31 - 1), (0, -5, 10), (-(2**31), 0, 10), (10, 5, 0)])},
    "texts.arrow": arrow_of((0, 2**30, 2**31 - 1), ("image", "label")),
    **{f"footer-{size}.parquet": b"PAR1" + bytes(99) + struct.pack("<I", size) + b"PAR1"
       for size in (0, 2**31 - 1, 2**32 - 1)},
    "long.csv": b'path,label\n0.png,"' + b"x" * 200_000 + b'"\n',
}  # fmt: skip
"""Archives and tables, one alone in each command."""
SIDES = (0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
LARGE = {
    "9k.png": png(9_000, zlib.compress(bytes(9_000 * 1_126))),
    "14k.png": png(14_000, zlib.compress(bytes(14_000 * 1_751))),
    "60k.png": png(60_000),
    "2g.png": png(2**31 - 1),
    "65k.jpg": wide_jpeg(),
    **{f"{side}x{other}.tif": tiff(side, other) for side in SIDES for other in (4, side)},
    **{f"4x{side}.tif": tiff(4, side) for side in SIDES},
}
PICTURES = {
    **LARGE,
    **{f"bits{count}.tif": tiff(4, 4, count=count) for count in SIDES},
    "text.png": png(16, zlib.compress(bytes(48)),
                    chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(100_000_000)))),
    "frames.gif": frames(10_000),
    "eight.tif": tiff(0xFFFFFFFF, 4, bits=8),
    "canvas.webp": riff(b"VP8X", struct.pack("<IIHBHB", 10, 0, 0xFFFF, 255, 0xFFFF, 255)),
    "frame.webp": riff(b"VP8 ", struct.pack("<I", 10) + b"\x9d\1\2\x9d\1\x2a\xff\x3f\xff\x3f"),
    "side.ppm": b"P6\n2147483647 2147483647\n255\n",
    "digits.pgm": b"P5\n" + b"9" * 4000 + b" 9\n255\n",
    "side.bmp": b"BM" + bytes(8) + struct.pack("<IIiiHH", 54, 40, 2**31 - 1, 2**31 - 1, 1, 24)
    + bytes(24),
    "side.gif": b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(99),
}  # fmt: skip
"""Images in one folder with a good one."""
EMBED = "embed good images -o x.npz --overwrite"


def test_no_stated_size_is_believed(tmp_path):
    place = folder_of(work_place(tmp_path) / "pictures", {**PICTURES, "good.png": image()}).parent
    folder_of(place / "warm", {"good.png": image(), "2.png": PIXELS})
    cases = [("warm", {}, "check warm", {0}, ""), ("warm encoder", {}, EMBED, {0}, "")]
    cases.append(("pictures", {}, "check pictures --scan full", {0, 3}, ""))
    cases.append(("embedded", {}, "embed good pictures -o y.npz", {0}, ""))
    for name, content in BOMBS.items():
        cases.append((name, {name: content}, f"check HERE/{name}", {0, 3}, ""))
    packed = gzip.compress(bytes(2**26)) * 17  # a gzip file may have several parts; 1 GiB in all
    assert len(packed) < 2e6
    says = "over 1024 MiB unpacked"
    cases.append(("zeros", {"zeros.tar.gz": packed}, "check HERE/zeros.tar.gz", {3}, says))
    answers = answers_to(place, cases)
    assert_harmless(place, cases, answers, importing=("warm", "warm encoder"))
    large = {name: answer.grown for name, answer in answers.items() if answer.grown > 400e6}
    assert large.keys() <= {"warm", "warm encoder", "deflated.npz", "zeros"}, large
    assert answers["deflated.npz"].grown < 2.5 * ZEROS  # which it has; numpy joins parts of them


def test_an_image_of_any_stated_size_is_left_out(tmp_path):
    images = open_images(folder_of(tmp_path, {**PICTURES, "good.png": image()}), cache=False)
    read = {"frames.gif", "good.png", "text.png"}
    assert {*images.names} - {f"bits{count}.tif" for count in SIDES} == read
    reasons = {bad.name: bad.reason.partition(":")[0] for bad in images.bad}
    assert {name: reasons[name] for name in LARGE} == dict.fromkeys(LARGE, "too-large")


@pytest.mark.parametrize("form", [0, 8], ids=["stored", "deflated"])
def test_a_read_with_a_limit_returns_at_most_that(form, tmp_path):
    """Whatever the headers say: of what there is, as much as was asked for and stated."""
    there = PIXELS * 40
    packed = there if form == 0 else deflated(there)
    for stated in SIZES:
        path = tmp_path / f"{stated}.zip"
        path.write_bytes(zip_of(packed, form, size=stated, packed_size=len(packed), local_size=7))
        source = list_archives(path, {"": path}).source
        for limit in (0, 1, 65_536, len(there), 10**9, None):
            content = source.read(0, limit)
            most = stated if limit is None else min(limit, stated)
            assert content[: len(there)] == there[:most]
            assert len(content) <= (path.stat().st_size if form == 0 else len(there))


def test_what_a_flush_after_each_byte_has_packed_is_read_whole(tmp_path):
    """It is twice as large as what it holds, which is more than any other packing makes of it."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    pieces = [PIXELS[start : start + 16] for start in range(0, len(PIXELS), 16)]
    packed = b"".join(packer.compress(p) + packer.flush(zlib.Z_SYNC_FLUSH) for p in pieces)
    path = tmp_path / "flushed.zip"
    path.write_bytes(zip_of(packed + packer.flush(), size=len(PIXELS)))
    assert list_archives(path, {"": path}).source.read(0) == PIXELS


def test_arrays_and_weights_that_unpack_to_more_than_the_memory_are_refused(tmp_path):
    large = npz_of(npy((2**40,)), size=2**48)
    folder_of(tmp_path, {"x.npz": large, "x.pth": large})
    says = r"it unpacks to 281,474,977 MB, and [\d,]+ are free"
    with pytest.raises(DataError, match=says):
        open_images(tmp_path / "x.npz")
    with pytest.raises(CheckpointError, match=says):
        load(f"resnet18@{tmp_path / 'x.pth'}")
