"""Files that are no good images are found, told and left out, and leave no trace in the result."""

import csv
import json
import os
import resource
import stat
import struct
import tarfile
import tempfile
import zlib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import fuzz_images
import numpy as np
import pytest
from builders import encoded, write_files
from nearkin_command import run
from needs import SHARED
from pyarrow import parquet
from small import spawn

from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.data.decode import NETPBM_TEXT, BadImage, center, decode, header
from nearkin.data.images import Folder
from nearkin.data.listing import is_image
from nearkin.data.opening import open_images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Silent
from nearkin.tables import read_csv

ODD = SHARED / "odd_images"
WITHOUT_ORDER = "multi_frame/pillow__apng__chunk_no_fctl.png"
"""A PNG whose animation is broken: its first frame decodes for whoever asks for no other."""
QUICK = ("--backbone", "tiny", "--image-size", "16", "--epochs", "1", "--workers", "0")


def learn(data, out, *options):
    return run("train", data, "-o", out, *QUICK, "-q", *options)


def listed(out):
    return {row["path"]: row["reason"] for row in read_csv(out / "bad_files.csv")}


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def declared(side):
    """A square PNG of one bit per pixel: black, or too short for the size that it states."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    rows = min(side, 1_000) * b"\0" * min(1 + side // 8, 1_000)
    pixels = chunk(b"IDAT", zlib.compress(rows, 1))
    return b"\x89PNG\r\n\x1a\n" + head + pixels + chunk(b"IEND", b"")


def rotten(kind):
    """An image with a byte changed behind its header."""
    data = bytearray(encoded(7, kind=kind))
    data[len(data) // 2] ^= 0x55
    return bytes(data)


def zeroed(kind, **options):
    data = bytearray(encoded(7, kind=kind, **options))
    middle = len(data) // 2
    data[middle : middle + 40] = bytes(40)
    return bytes(data)


LFS = "git-lfs pointer; run git lfs pull"


def large(side):
    return f"too-large: {side}x{side} pixels; see NEARKIN_MAX_PIXELS"


def headless():
    """What the headers tell: name, content, and the reason for which each is left out."""
    return {
        "empty.jpg": (b"", "empty file"),
        "byte.jpg": (b"\xff", "not-an-image"),
        "text.png": (b"hello world\n" * 50, "text, not an image"),
        "words.png": ("Käfer\r\n甲虫\n".encode() * 99, "text, not an image"),
        "page.jpg": (b"\n<!DOCTYPE html><html></html>", "HTML page, not an image"),
        "lfs.jpg": (b"version https://git-lfs.github.com/spec/v1\n", LFS),
        "jxl.jpg": (b"\xff\x0a" + bytes(99), "JPEG XL; convert it to PNG"),
        "none.png": (declared(0), "not-an-image"),
        "script.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "text, not an image"),
        "9k.png": (declared(9_000), large(9_000)),
        "14k.png": (declared(14_000), large(14_000)),
        "60k.png": (declared(60_000), large(60_000)),
        "2g.png": (declared(2**31 - 1), large(2**31 - 1)),
        "dot.png": (encoded(0, (1, 1)), "too-small"),
        "9k.ppm": (b"P6\n9000 9000\n255\n" + bytes(3_000), large(9_000)),
        "2g.pgm": (b"P5 2147483647 2147483647 255 ", large(2**31 - 1)),
        "long.ppm": (b"P6 " + b"9" * 100 + b" 9 255 ", "unreadable"),
        "depth.ppm": (b"P6 9 9 65536 " + bytes(500), "unreadable"),
        "bits.ppm": (b"P4 16 16 " + bytes(32), "not-an-image"),
        "floats.ppm": (b"PF 9 9 -1.0 " + bytes(972), "not-an-image"),
        "tall.png": (encoded(0, (1, 5_000)), "too-small"),
        "wide.png": (encoded(0, (5_000, 1)), "too-small"),
    }


def deeper():
    """The same for damage that only decoding finds."""
    cut = {
        f"cut.{kind.lower()}": (whole[: len(whole) * 3 // 5], "truncated")
        for kind in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
        for whole in [encoded(8, (60, 50), kind)]
    }
    short = {
        "head.ppm": (b"P6\n60", "truncated"),
        "none.pgm": (b"P5 9 9 255\n", "truncated"),
        "text.pgm": (b"P2 2 2 255\n1 2 3 4", NETPBM_TEXT),
    }
    return cut | short | {"rot.png": (rotten("PNG"), "unreadable")}


BAD = headless() | deeper()


def test_every_kind_of_bad_file_has_its_reason(tmp_path):
    write_files(tmp_path, {name: content for name, (content, _) in BAD.items()})
    write_files(tmp_path, {"good.png": encoded(), "thin.png": encoded(0, (2, 50))})
    images = open_images(tmp_path, cache=False, full=True)
    assert images.names == ("good.png", "thin.png")
    found = {bad.name: (bad.reason, bad.bytes) for bad in images.bad}
    assert found == {name: (reason, len(content)) for name, (content, reason) in BAD.items()}
    quick = open_images(tmp_path, cache=False)  # without damage behind the header
    assert {"cut.jpeg", "rot.png"} <= {*quick.names}
    assert (
        quick.reasons.items() >= {name: reason for name, (_, reason) in headless().items()}.items()
    )
    for name in BAD:
        with pytest.raises(BadImage) as raised:
            decode(BAD[name][0])
        assert raised.value.reason == BAD[name][1], name


def test_a_full_scan_decodes_nothing_that_is_too_large(tmp_path):
    """Or a folder of eight such files of 20 KB, each in a thread, would take gigabytes."""
    whole = declared(9_000)
    write_files(tmp_path, {"good.png": encoded(), "9k.png": whole[: len(whole) // 2]})
    (bad,) = open_images(tmp_path, cache=False, full=True).bad
    assert bad.reason == large(9_000)


def test_damage_that_no_decoder_can_see_is_accepted(tmp_path):
    """Only a checksum would tell: none of these formats has one over its pixels."""
    whole = encoded(7)
    files = {
        "end.png": whole[:-10],  # all pixels are there
        "rot.bmp": rotten("BMP"),
        "rot.tif": rotten("TIFF"),
        "rot.gif": rotten("GIF"),
        "hole.bmp": zeroed("BMP"),
        "hole.jpg": zeroed("JPEG", quality=95),
    }
    images = open_images(write_files(tmp_path, files), cache=False, full=True)
    assert images.bad == ()
    assert (np.asarray(decode(files["end.png"])) == np.asarray(decode(whole))).all()


NAMES = ["a\nb.png", "tab\t.png", "=cmd|x.png", "\u202ertl.png", "-x.png", '";,.png', "<b>.png",
         os.fsdecode(b"\xff\xfe.png"), "x" * 250 + ".png"]  # fmt: skip


def test_a_run_with_bad_files_is_to_the_bit_the_run_without_them(tmp_path):
    formats = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")
    kinds = [formats[number % 6] for number in range(36)]
    files = {f"{i:03d}.{kind.lower()}": encoded(i, kind=kind) for i, kind in enumerate(kinds)}
    data, sound = write_files(tmp_path / "data", files), tmp_path / "sound"
    assert learn(data, sound) == 0
    bad = BAD | dict.fromkeys(NAMES, (b"no image", "text, not an image"))
    write_files(data, {name: content for name, (content, _) in bad.items()})
    os.mkfifo(data / "pipe.png")
    (data / "dangling.jpg").symlink_to("nothing")
    (data / "folder.jpg").mkdir()
    assert learn(data, tmp_path / "run", "--max-bad", ".9", "--scan", "full") == 0
    assert listed(tmp_path / "run") == {
        "pipe.png": "not a regular file",
        "dangling.jpg": "broken link",
        **{name: reason for name, (_, reason) in bad.items()},
    }
    for name in ("encoder.safetensors", "metrics.csv", "embeddings.parquet"):
        assert (tmp_path / "run" / name).read_bytes() == (sound / name).read_bytes(), name


COUNT, BATCH = 32, 4


def photographs(folder):
    return write_files(folder, {f"{n:02d}.png": encoded(n, (90, 70)) for n in range(COUNT)})


class Vandal(Silent):
    """Damages two images when the first epoch is done."""

    def __init__(self, empty, gone):
        self.empty, self.gone, self.lines = empty, gone, []

    def info(self, text):
        self.lines.append(text)

    def progress(self, done, _total, text):
        if text.startswith("epoch") and done == COUNT // BATCH:
            self.empty.write_bytes(b"rotten")
            self.gone.unlink()


def test_images_that_turn_bad_while_training_are_listed_counted_and_have_no_features(tmp_path):
    """They are in the last step of the second epoch, when no worker can have read them yet."""
    config = TrainConfig(
        backbone="tiny", image_size=16, epochs=2, batch_size=BATCH, val=0.0, evaluate_every=0,
        report=False, workers=1, cache="off",  # what is kept does not turn bad
    )  # fmt: skip
    data, run = photographs(tmp_path / "data"), tmp_path / "run"
    rows = RandomBatchSampler(COUNT, BATCH, config.seed).rows(2 * COUNT // BATCH - 1)[:2]
    empty, gone = (f"{row:02d}.png" for row in rows)
    vandal = Vandal(data / empty, data / gone)
    train(data, config, output=run, verbose=vandal)
    assert listed(run) == {empty: "text, not an image", gone: "unreadable"}
    paths = parquet.read_table(run / "embeddings.parquet")["path"].to_pylist()
    assert len(paths) == COUNT - 2
    assert not {empty, gone} & set(paths)
    assert any("2 " in line and "bad_files.csv" in line for line in vandal.lines)
    (note,) = RunFolder(run).read_summary()["notes"]
    assert (note["decision"], note["examples"]) == ("left out", sorted((empty, gone)))


def test_held_out_images_that_cannot_be_decoded_are_listed(tmp_path):
    data, whole = tmp_path / "data", encoded(98, (90, 70))
    photographs(data / "train")
    write_files(data / "test", {"00.png": encoded(99), "01.png": whole[: len(whole) // 2]})
    assert learn(data, tmp_path / "run") == 0
    paths = parquet.read_table(tmp_path / "run" / "embeddings.parquet")["path"].to_pylist()
    assert {path for path in paths if path.startswith("test")} == {"test/00.png"}
    assert listed(tmp_path / "run") == {"test/01.png": "truncated"}


def test_a_file_that_grows_or_becomes_another_image_is_read_as_it_is(tmp_path):
    whole, other = encoded(0, (90, 70), "JPEG"), encoded(2, (300, 9), "WEBP")
    half = {"a.jpg": whole[: len(whole) // 2], "b.png": encoded(1), "c.jpg": whole}
    images = open_images(write_files(tmp_path, half), cache=False)
    write_files(tmp_path, {"a.jpg": whole, "b.png": other, "c.jpg": whole + whole})
    for row, content in enumerate((whole, other, whole)):
        assert (center(images.read(row), 16) == center(content, 16)).all()


def test_a_disk_that_fails_makes_a_bad_image_and_no_failure(tmp_path):
    if not Path("/proc/self/mem").exists():
        pytest.skip("no file that always fails to be read")
    images = open_images(write_files(tmp_path, {"a.png": encoded()}), cache=False)
    failing = replace(images, source=Folder(Path("/proc/self"), ["mem"]))
    with pytest.raises(OSError, match="Input/output error"):
        failing.source.read(0)
    with pytest.raises(BadImage, match="unreadable"):
        failing.read(0)


def test_max_bad_is_the_largest_share_that_is_gone_on_with(tmp_path, refusal, capsys):
    """Names of bad files do not command the terminal; more than one copy in twenty is told."""
    files = {f"{number:02d}.png": encoded(number) for number in range(17)}
    data = write_files(tmp_path / "data", files | {"\x1b[31mbad.png": b"", "worse.jpg": b"GIF89a"})
    line = refusal(3, "train", data, "-o", tmp_path / "run", *QUICK)
    for word in ("2 of 19", "31mbad.png' (empty file)", "'worse.jpg' (", "--max-bad"):
        assert word in line
    assert "\x1b" not in line
    assert not (tmp_path / "run" / "encoder.safetensors").exists()
    write_files(data, {"copy0.png": encoded(0), "copy1.png": encoded(1)})
    assert run("train", data, "-o", tmp_path / "run", *QUICK) == 0
    assert "2 exact duplicates" in capsys.readouterr().err
    assert len(listed(tmp_path / "run")) == 2


def test_images_that_are_too_few_or_all_alike_are_not_divided(tmp_path, refusal):
    train = ("train", tmp_path / "data", "-o", tmp_path / "r", *QUICK)
    data = write_files(tmp_path / "data", {"0.png": encoded(0)})
    assert "1 image" in refusal(3, *train, "--val", "0")
    write_files(data, {"1.png": encoded(1)})
    assert "1 image" in refusal(3, *train)
    write_files(data, {"1.png": encoded(0)})
    assert "all alike" in refusal(3, *train)
    assert run(*train, "--val", "0", "-q") == 0


def test_check_warns_of_more_than_one_exact_copy_in_twenty(tmp_path, capsys):
    data = write_files(tmp_path, {f"{number:02d}.png": encoded(number) for number in range(19)})
    for copies in (1, 2):
        write_files(data, {f"copy{copies}.png": encoded(copies)})
        assert run("check", data, "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["images"], answer["exact_duplicates"]) == (19 + copies, copies)
        assert any("exact duplicates" in each for each in answer["warnings"]) == (copies == 2)


def test_class_folders_without_images_are_no_classes(tmp_path):
    for label in ("cat", "dog"):
        write_files(tmp_path / label, {f"{n}.png": encoded(n) for n in range(2)})
    write_files(tmp_path / "cow", {"readme.txt": b"none yet"})
    (tmp_path / "empty.png").mkdir()
    images = open_images(tmp_path, cache=False)
    assert images.classes == ("cat", "dog")
    assert (len(images), images.bad) == (4, ())


@contextmanager
def unprivileged():
    """Without the rights of the superuser, whom no permission stops."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_what_may_not_be_read_is_listed_and_left_out():
    with tempfile.TemporaryDirectory() as path:  # whose parents, unlike tmp_path's, all may enter
        folder = write_files(Path(path), {f"{n}.png": encoded(n) for n in range(3)})
        folder.chmod(0o755)
        write_files(folder / "locked", {"a.png": encoded()})
        for secret in (folder / "1.png", folder / "locked"):
            secret.chmod(0)
        with unprivileged():
            images = open_images(folder, cache=False)
        (folder / "locked").chmod(stat.S_IRWXU)
    assert images.names == ("0.png", "2.png")
    assert images.reasons == {"1.png": "unreadable", "locked": "unreadable folder"}


def generated():
    """Files of every format and mode, animated, turned, and all that are bad."""
    good = {f"good/{number:02d}.jpg": file for number, file in enumerate(fuzz_images.generated())}
    return good | {name: content for name, (content, _) in BAD.items()}


def collected():
    """Files that have crashed decoders; those whose names no image has are given one."""
    with tarfile.open(ODD / "odd_images.tar") as tar:
        for member in filter(tarfile.TarInfo.isfile, tar):
            name = member.name if is_image(member.name) else member.name + ".jpg"
            yield name, tar.extractfile(member).read()


def learn_within_memory(_rank, data, out):
    """Decode every file and train on all of them, in a process that may not grow."""
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    for path in filter(Path.is_file, data.rglob("*")):
        try:
            image = decode(path.read_bytes())
        except BadImage:
            continue
        assert (image.mode, *image.size) == ("RGB", *header(path.read_bytes())[1:3]), path
    options = ("--max-bad", ".9", "--scan", "full", "--val", "0", "--evaluate-every", "0")
    assert learn(data, out, *options) == 0


@pytest.fixture(scope="module")
def odd(request, tmp_path_factory):
    """The names of files of a corpus, of those that were trained on, and why the others were not."""
    root = tmp_path_factory.mktemp("odd")
    files = dict(request.param())
    spawn(learn_within_memory, write_files(root / "data", files), root / "run", processes=1)
    used = parquet.read_table(root / "run" / "embeddings.parquet")["path"].to_pylist()
    return files, used, listed(root / "run")


@pytest.mark.parametrize("odd", [generated], indirect=True)
def test_a_full_scan_admits_every_format_and_refuses_what_is_bad(odd):
    files, used, bad = odd
    assert {*used} == {name for name in files if name.startswith("good/")}
    assert len(used) > 50
    assert bad == {name: reason for name, (_, reason) in BAD.items()}


@pytest.mark.slow
@pytest.mark.needs("shared")
@pytest.mark.parametrize("odd", [collected], indirect=True)
def test_a_full_scan_admits_or_refuses_every_odd_file_as_it_decodes(odd):
    files, used, bad = odd
    assert len(used) + len(bad) == 826
    assert {*used, *bad} == files.keys()
    known = {reason.partition(":")[0] for _, reason in BAD.values()}
    assert {r.partition(":")[0] for r in bad.values()} <= known | {"JPEG 2000; convert it to PNG"}
    turned = [name for name in files if name.startswith("plain_rgb/exif_orientation")]
    assert turned
    assert {*turned} <= {*used}
    with (ODD / "manifest.csv").open(newline="") as file:
        allowed = {"JPEG", "MPO", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"}
        fine = [
            row["path"] if is_image(row["path"]) else row["path"] + ".jpg"
            for row in csv.DictReader(file)
            if row["decode_with_pillow_13"] == "ok" and row["format"] in allowed
            if (row["format"], row["mode"]) != ("PPM", "1")
        ]
        fine = [path for path in fine if not files[path].startswith((b"P2", b"P3"))]
    assert len(fine) > 500
    refused = {path: bad[path] for path in fine if path in bad}
    assert {path for path, reason in refused.items() if "too-" not in reason} <= {WITHOUT_ORDER}


def fuzzed(_rank, out, judge, count, seconds):
    fuzz_images.corpus()  # so that the forks share it
    out.write_text(json.dumps(fuzz_images.fuzz(judge, range(count), seconds)))


def report_of(out, *how):
    spawn(fuzzed, out / "report.json", *how, processes=1)
    return json.loads((out / "report.json").read_text())


def test_mutated_images_crash_and_hang_nothing(tmp_path):
    report = report_of(tmp_path, fuzz_images.judge, 60, fuzz_images.SECONDS)
    assert (report["crashes"], report["hangs"]) == ({}, [])
    assert report["accepted"] > 10
    assert report["accepted"] + sum(report["refused"].values()) == report["images"] == 60
    assert {"not-an-image", "truncated", "unreadable"} <= set(report["refused"])


def planted(seed):
    if seed == 3:
        os.abort()
    if seed == 4:
        raise ValueError("no\nBadImage")
    while seed == 6:
        pass  # until the fuzzer ends it
    if seed == 8:
        return "x" * 10**12
    return "accepted" if seed % 2 else "truncated"


def test_the_fuzzer_notices_crashes_and_hangs_and_goes_on(tmp_path):
    report = report_of(tmp_path, planted, 12, 0.2)
    raised = {"4": "raised ValueError: no BadImage", "8": "raised MemoryError: "}
    assert report.pop("crashes") == {"3": "ended by SIGABRT"} | raised
    expected = {"images": 12, "accepted": 5, "refused": {"truncated": 3}, "hangs": [6]}
    assert report == expected
