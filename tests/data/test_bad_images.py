"""Files that are no good images are found, told and left out, and leave no trace in the result."""

import csv
import io
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
import zlib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from nearkin.cli import main
from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.data.decode import BadImage, center, decode
from nearkin.data.images import Folder
from nearkin.data.opening import open_images
from nearkin.data.order import Order
from nearkin.data.sources import is_image
from nearkin.errors import DataError
from nearkin.tables import read_csv

TESTS = Path(__file__).parents[1]
WITHOUT_ORDER = "multi_frame/pillow__apng__chunk_no_fctl.png"
"""A PNG whose animation is broken: its first frame decodes for whoever asks for no other."""
ODD = TESTS.parents[1] / "shared" / "data" / "odd_images"
QUICK = ("--backbone", "tiny", "--image-size", "16", "--epochs", "1", "--workers", "0")


@pytest.fixture(autouse=True, scope="module")
def index(tmp_path_factory):
    """An index of its own, which nobody else reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def encoded(seed=0, size=(24, 20), kind="PNG", **options):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def fill(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def declared(width, height, *extra):
    """A PNG of one bit per pixel that is black, or ends too early to be as large as it says."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    rows = min(height, 10_000) * b"\0" * min(1 + width // 8, 10_000)
    pixels = chunk(b"IDAT", zlib.compress(rows, 1))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + pixels + chunk(b"IEND", b"")


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


def headless():
    """What the headers tell: name, content, and the reason for which each is left out."""
    bomb = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(3_000_000), 9))
    return {
        "empty.jpg": (b"", "not-an-image"),
        "byte.jpg": (b"\xff", "not-an-image"),
        "text.png": (b"hello world\n" * 50, "not-an-image"),
        "page.jpg": (b"<!DOCTYPE html><html><body>404</body></html>", "not-an-image"),
        "drawing.png": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not-an-image"),
        "none.png": (declared(0, 0), "not-an-image"),
        "script.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not-an-image"),
        "paper.png": (b"%PDF-1.4\n1 0 obj\n<<>>\nendobj\n", "not-an-image"),
        "9k.png": (declared(9_000, 9_000), "too-large"),
        "14k.png": (declared(14_000, 14_000), "too-large"),
        "60k.png": (declared(60_000, 60_000), "too-large"),
        "2g.png": (declared(2**31 - 1, 2**31 - 1), "too-large"),
        "inflates.png": (declared(8, 8, bomb), "unreadable"),
        "dot.png": (encoded(size=(1, 1)), "too-small"),
        "9k.ppm": (b"P6\n9000 9000\n255\n" + bytes(3_000), "too-large"),
        "2g.pgm": (b"P2 2147483647 2147483647 255 ", "too-large"),
        "long.ppm": (b"P6 " + b"9" * 100 + b" 9 255 ", "unreadable"),
        "depth.ppm": (b"P6 9 9 65536 " + bytes(500), "unreadable"),
        "bits.ppm": (b"P4 16 16 " + bytes(32), "not-an-image"),
        "floats.ppm": (b"PF 9 9 -1.0 " + bytes(972), "not-an-image"),
        "tall.png": (encoded(size=(1, 5_000)), "too-small"),
        "wide.png": (encoded(size=(5_000, 1)), "too-small"),
    }


def deeper():
    """The same for damage that only decoding finds."""
    cut = {
        f"cut.{kind.lower()}": (whole[: len(whole) * 3 // 5], "truncated")
        for kind in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
        for whole in [encoded(8, size=(60, 50), kind=kind)]
    }
    short = {
        "head.ppm": (b"P6\n60", "truncated"),
        "text.ppm": (b"P3 9 9 255\n" + b"1 2 3 " * 80, "truncated"),
        "none.pgm": (b"P5 9 9 255\n", "truncated"),
        "word.pgm": (b"P2 2 2 255\n1 2 x 4", "unreadable"),
        "more.pgm": (b"P2 2 2 99\n1 2 3 100", "unreadable"),
        "less.pgm": (b"P2 2 2 99\n1 2 3 -1", "unreadable"),
    }
    return cut | short | {"rot.png": (rotten("PNG"), "unreadable")}


BAD = headless() | deeper()


@pytest.mark.parametrize("name", BAD)
def test_every_kind_of_bad_file_has_its_reason(name, tmp_path):
    content, reason = BAD[name]
    fill(tmp_path, {"good.png": encoded(), name: content})
    images = open_images(tmp_path, cache=False, full=True)
    assert images.names == ("good.png",)
    assert [(bad.name, bad.reason, bad.bytes) for bad in images.bad] == [
        (name, reason, len(content))
    ]


def test_a_full_scan_decodes_nothing_that_is_too_large(tmp_path):
    """Or a folder of eight such files of 20 KB, each in a thread, would take gigabytes."""
    whole = declared(9_000, 9_000)
    fill(tmp_path, {"good.png": encoded(), "9k.png": whole[: len(whole) // 2]})
    (bad,) = open_images(tmp_path, cache=False, full=True).bad
    assert bad.reason == "too-large"


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
    images = open_images(fill(tmp_path, files), cache=False, full=True)
    assert images.bad == ()
    assert (np.asarray(decode(files["end.png"])) == np.asarray(decode(whole))).all()


def test_a_broken_color_profile_does_not_cost_the_image():
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        plain, broken = encoded(kind=kind), encoded(kind=kind, icc_profile=b"garbage" * 9)
        assert plain != broken
        assert (np.asarray(decode(broken)) == np.asarray(decode(plain))).all()


# ---------------------------------------------------------------- no trace in the result


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Images of all formats, and the run that was trained on them."""
    formats = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")
    kinds = [formats[number % 6] for number in range(3 * len(BAD))]
    folder = tmp_path_factory.mktemp("sound")
    files = {f"{i:03d}.{kind.lower()}": encoded(i, kind=kind) for i, kind in enumerate(kinds)}
    fill(folder / "data", files)
    assert run(folder / "data", folder / "run", "--max-bad", "0.5") == 0
    return folder


def run(data, out, *options):
    return main(["train", str(data), "-o", str(out), *QUICK, "-q", *options])


def listed(out):
    return {row["path"]: row["reason"] for row in read_csv(out / "bad_files.csv")}


@pytest.mark.parametrize(
    ("bad", "options"),
    [
        pytest.param(headless(), [], id="headers"),
        pytest.param(BAD, ["--scan", "full"], id="full"),
    ],
)
def test_a_run_with_bad_files_is_to_the_bit_the_run_without_them(bad, options, sound, tmp_path):
    data = shutil.copytree(sound / "data", tmp_path / "data")
    fill(data, {name: content for name, (content, _) in bad.items()})
    os.mkfifo(data / "pipe.png")
    (data / "dangling.jpg").symlink_to("nothing")
    (data / "folder.jpg").mkdir()
    assert run(data, tmp_path / "run", "--max-bad", "0.5", *options) == 0
    assert listed(tmp_path / "run") == {
        "pipe.png": "not a regular file",
        "dangling.jpg": "broken link",
        **{name: reason for name, (_, reason) in bad.items()},
    }
    for name in ("encoder.safetensors", "metrics.csv", "embeddings.parquet"):
        assert (tmp_path / "run" / name).read_bytes() == (sound / "run" / name).read_bytes(), name


# ---------------------------------------------------------------- images that turn bad


class Vandal:
    """A reporter that damages two images once so many steps are done."""

    def __init__(self, after, empty, gone):
        self.after, self.empty, self.gone = after, empty, gone
        self.lines = []

    def info(self, text):
        self.lines.append(text)

    def progress(self, done, _total, text):
        if text.startswith("epoch") and done == self.after:
            self.empty.write_bytes(b"rotten")
            self.gone.unlink()


BATCH, COUNT = 4, 32


def photographs(folder):
    return fill(folder, {f"{n:02d}.png": encoded(n, size=(90, 70)) for n in range(COUNT)})


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Runs whose data lose two images after the first of three epochs, and one on whole data.

    Both are shown in the last step of the second epoch, when no worker can have read them yet.
    """
    root = tmp_path_factory.mktemp("damaged")
    config = TrainConfig(
        backbone="tiny", image_size=16, epochs=3, batch_size=BATCH, val=0.0, evaluate_every=0,
        cache="off",  # what is kept does not turn bad
    )  # fmt: skip
    epoch = COUNT // BATCH
    chosen = Order(COUNT, BATCH, config.seed).rows(2 * epoch - 1)[:2].tolist()
    log = {}
    for name, workers in (("whole", 0), ("alone", 0), ("helped", 2)):
        data = photographs(root / name / "data")
        never = 10**6 if name == "whole" else epoch
        vandal = Vandal(never, *(data / f"{row:02d}.png" for row in chosen))
        train(data, replace(config, workers=workers), out=root / name / "run", reporter=vandal)
        log[name] = vandal.lines
    return root, [f"{row:02d}.png" for row in chosen], log


def weights(root, name):
    return (root / name / "run" / "encoder.safetensors").read_bytes()


def test_images_that_turn_bad_while_training_are_replaced_alike_with_any_workers(damaged):
    root, _, _ = damaged
    assert weights(root, "alone") == weights(root, "helped")
    assert weights(root, "alone") != weights(root, "whole")


def test_images_that_turn_bad_while_training_are_listed_and_have_no_features(damaged):
    root, (empty, gone), _ = damaged
    assert not (root / "whole" / "run" / "bad_files.csv").exists()
    for name in ("alone", "helped"):
        assert listed(root / name / "run") == {empty: "not-an-image", gone: "unreadable"}
        paths = parquet.read_table(root / name / "run" / "embeddings.parquet")["path"].to_pylist()
        assert len(paths) == COUNT - 2
        assert not {empty, gone} & set(paths)


def test_images_that_turn_bad_while_training_are_counted(damaged):
    _, _, log = damaged
    assert any("2 " in line and "bad_files.csv" in line for line in log["alone"])
    assert not any("bad_files.csv" in line for line in log["whole"])


def test_held_out_images_that_cannot_be_decoded_are_listed(tmp_path):
    data = tmp_path / "data"
    photographs(data / "train")
    (data / "test").mkdir()
    for name in ("00.png", "01.png"):
        (data / "train" / name).rename(data / "test" / name)
    whole = (data / "test" / "01.png").read_bytes()
    (data / "test" / "01.png").write_bytes(whole[: len(whole) // 2])
    assert main(["train", str(data), "-o", str(tmp_path / "run"), *QUICK, "-q"]) == 0
    paths = parquet.read_table(tmp_path / "run" / "embeddings.parquet")["path"].to_pylist()
    assert "test/00.png" in paths
    assert "test/01.png" not in paths
    assert listed(tmp_path / "run") == {"test/01.png": "truncated"}


def test_a_file_that_grows_or_becomes_another_image_is_read_as_it_is(tmp_path):
    whole = encoded(0, size=(90, 70), kind="JPEG")
    half = {"a.jpg": whole[: len(whole) // 2], "b.png": encoded(1), "c.jpg": whole}
    images = open_images(fill(tmp_path, half), cache=False)
    fill(tmp_path, {"a.jpg": whole, "b.png": encoded(2, (300, 9), "WEBP"), "c.jpg": whole + whole})
    for row, content in enumerate((whole, encoded(2, (300, 9), "WEBP"), whole)):
        assert (center(images.read(row), 16) == center(content, 16)).all()


def test_a_disk_that_fails_makes_a_bad_image_and_no_failure(tmp_path):
    if not Path("/proc/self/mem").exists():
        pytest.skip("no file that always fails to be read")
    images = open_images(fill(tmp_path, {"a.png": encoded()}), cache=False)
    failing = replace(images, names=("mem",), source=Folder(Path("/proc/self")))
    with pytest.raises(OSError, match="Input/output error"):
        failing.source.read("mem")
    with pytest.raises(BadImage, match="unreadable"):
        failing.read(0)


# ---------------------------------------------------------------- too many


def failure(arguments, capsys):
    """The exit code, and all that was written to standard error."""
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(("good", "code"), [(18, 0), (17, 3)])
def test_max_bad_is_the_largest_share_that_is_gone_on_with(good, code, tmp_path, capsys):
    files = {f"{number:02d}.png": encoded(number) for number in range(good)}
    data = fill(tmp_path / "data", files | {"bad.png": b"", "worse.jpg": b"GIF89a"})
    out = tmp_path / "run"
    exit_code, message = failure(
        ["train", data, "-o", out, *QUICK, "--max-bad", ".1", "-q"], capsys
    )
    assert exit_code == code
    if code:
        assert message.count("\n") == 1
        for word in ("2 of 19", "'bad.png' (not-an-image)", "'worse.jpg' (", "--max-bad"):
            assert word in message
        assert not (out / "encoder.safetensors").exists()


NAMES = ("a\nb.png", "tab\t.png", "=cmd|x.png", "\u202ertl.png", "-x.png", '";,.png', "<b>.png")


def test_bad_files_of_any_name_are_listed_by_it(tmp_path):
    names = [*NAMES, os.fsdecode(b"\xff\xfe.png"), "x" * 250 + ".png"]
    good = {f"{number}.png": encoded(number) for number in range(12)}
    data = fill(tmp_path / "data", good | dict.fromkeys(names, b"no image"))
    assert run(data, tmp_path / "run", "--max-bad", ".5") == 0
    assert set(listed(tmp_path / "run")) == set(names)


def test_names_of_bad_files_do_not_command_the_terminal(tmp_path, capsys):
    data = fill(tmp_path / "data", {"\x1b[31mred.png": b"", "good.png": encoded()})
    code, line = failure(["train", data, "-o", tmp_path / "run"], capsys)
    assert code == 3
    assert "31mred.png" in line
    assert "\x1b" not in line


# ---------------------------------------------------------------- folders


@pytest.mark.parametrize(
    ("count", "options", "code"), [(1, ["--val", "0"], 3), (2, [], 3), (2, ["--val", "0"], 0)]
)
def test_two_images_can_be_trained_on_and_one_cannot(count, options, code, tmp_path, capsys):
    data = fill(tmp_path / "data", {f"{n}.png": encoded(n) for n in range(count)})
    exit_code, message = failure(
        ["train", data, "-o", tmp_path / "r", *QUICK, *options, "-q"], capsys
    )
    assert exit_code == code
    assert ("1 image" in message) == (code == 3)


@pytest.mark.parametrize(("options", "code"), [([], 3), (["--val", "0"], 0)])
def test_images_that_are_all_the_same_are_not_divided(options, code, tmp_path, capsys):
    data = fill(tmp_path / "data", {f"{n:02d}.png": encoded() for n in range(12)})
    exit_code, message = failure(
        ["train", data, "-o", tmp_path / "r", *QUICK, *options, "-q"], capsys
    )
    assert exit_code == code
    assert ("all alike" in message) == (code == 3)


@pytest.mark.parametrize(("copies", "warned"), [(2, False), (3, True)])
def test_check_warns_of_more_than_one_exact_copy_in_twenty(copies, warned, tmp_path, capsys):
    files = {f"{number:02d}.png": encoded(number) for number in range(40 - copies)}
    data = fill(tmp_path, files | {f"copy{n}.png": encoded(n) for n in range(copies)})
    assert main(["check", str(data), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["images"], answer["exact_duplicates"]) == (40, copies)
    assert any("exact duplicates" in warning for warning in answer["warnings"]) == warned


def test_training_warns_of_more_than_one_exact_copy_in_twenty(tmp_path, capsys):
    data = fill(tmp_path / "data", {f"{n:02d}.png": encoded(n % 20) for n in range(24)})
    code, line = failure(["train", data, "-o", tmp_path / "run", *QUICK], capsys)
    assert code == 0
    assert "4 exact duplicates" in line


def test_names_that_differ_in_case_or_in_unicode_form_only_are_different_images(tmp_path):
    composed, split = (unicodedata.normalize(form, "é.png") for form in ("NFC", "NFD"))
    names = ["a.JPG", "a.jpg", "a.Jpeg", "A.jpg", composed, split]
    files = {name: encoded(seed) for seed, name in enumerate(names)}
    data = fill(tmp_path / "data", files)
    if len(list(data.iterdir())) < len(names):
        pytest.skip("this file system takes some of the names for the same")
    table = tmp_path / "labels.csv"
    rows = [f"{name},class{seed}" for seed, name in enumerate(names)]
    table.write_text("path,label\n" + "\n".join(rows) + "\n", encoding="utf-8")
    images = open_images(data, cache=False, labels=str(table))
    assert list(images.names) == sorted(names, key=os.fsencode)
    for row, name in enumerate(images.names):
        assert images.read(row) == files[name]
        assert images.classes[images.labels[row]] == f"class{names.index(name)}"


def test_a_folder_of_hidden_files_holds_no_images(tmp_path):
    fill(tmp_path, {".a.png": encoded(), "._b.png": encoded()})
    with pytest.raises(DataError, match="no images"):
        open_images(tmp_path)


def test_class_folders_without_images_are_no_classes(tmp_path):
    for label in ("cat", "dog"):
        fill(tmp_path / label, {f"{n}.png": encoded(n) for n in range(2)})
    fill(tmp_path / "cow", {"readme.txt": b"none yet"})
    (tmp_path / "empty.png").mkdir()
    images = open_images(tmp_path, cache=False)
    assert images.classes == ("cat", "dog")
    assert (len(images), images.bad) == (4, ())


@contextmanager
def ignore_progress():
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
        folder = fill(Path(path), {f"{n}.png": encoded(n) for n in range(3)})
        folder.chmod(0o755)
        fill(folder / "locked", {"a.png": encoded()})
        for secret in (folder / "1.png", folder / "locked"):
            secret.chmod(0)
        with ignore_progress():
            images = open_images(folder, cache=False)
        (folder / "locked").chmod(stat.S_IRWXU)
    assert images.names == ("0.png", "2.png")
    assert [(bad.name, bad.reason) for bad in images.bad] == [
        ("1.png", "unreadable"),
        ("locked", "unreadable folder"),
    ]


# ---------------------------------------------------------------- hostile files


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """The odd images as a folder, scanned in full and trained on with bounded memory.

    Returns the folder, the files that were trained on, and the reason for each of the others.

    Those whose names no image has are given one, so that their content has to tell.
    """
    if not (ODD / "odd_images.tar").exists():
        pytest.skip("the corpus of odd images is not here")
    root = tmp_path_factory.mktemp("odd")
    with tarfile.open(ODD / "odd_images.tar") as tar:
        for member in filter(tarfile.TarInfo.isfile, tar):
            name = member.name if is_image(member.name) else member.name + ".jpg"
            (root / "data" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "data" / name).write_bytes(tar.extractfile(member).read())
    program = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
from nearkin.cli import main
sys.exit(main(["train", {str(root / "data")!r}, "-o", {str(root / "run")!r}, "--max-bad", ".9",
               "--scan", "full", "--val", "0", "--evaluate-every", "0", *{QUICK!r}, "-q"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    used = parquet.read_table(root / "run" / "embeddings.parquet")["path"].to_pylist()
    return root, used, listed(root / "run")


def files_of(root):
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_a_full_scan_admits_or_refuses_every_odd_file_as_it_decodes(odd):
    root, used, bad = odd
    assert len(used) + len(bad) == 826
    assert {*used, *bad} == files_of(root / "data")
    assert set(bad.values()) == {
        "not-an-image", "truncated", "too-large", "too-small", "unreadable",
    }  # fmt: skip
    with (ODD / "manifest.csv").open(newline="") as file:
        allowed = {"JPEG", "MPO", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"}
        fine = [
            row["path"] if is_image(row["path"]) else row["path"] + ".jpg"
            for row in csv.DictReader(file)
            if row["decode_with_pillow_13"] == "ok" and row["format"] in allowed
            if (row["format"], row["mode"]) != ("PPM", "1")
        ]
    assert len(fine) > 500
    refused = {path: bad[path] for path in fine if path in bad}
    assert {path for path, reason in refused.items() if "too-" not in reason} <= {WITHOUT_ORDER}


# ---------------------------------------------------------------- mutated images


def python(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_three_hundred_mutated_images_crash_and_hang_nothing():
    report = python("fuzz_images.py", "300", "0")
    assert report["images"] == 300
    assert (report["crashes"], report["hangs"]) == ({}, [])
    assert report["accepted"] > 10
    assert report["accepted"] + sum(report["refused"].values()) == 300
    assert {"not-an-image", "truncated", "unreadable"} <= set(report["refused"])


PLANTED = """
import json, os, time
from fuzz_images import fuzz

def look(seed):
    if seed == 3:
        os.abort()
    if seed == 4:
        raise ValueError("no\\nBadImage")
    while seed == 6:
        pass
    if seed == 8:
        return "x" * 10**12
    return "accepted" if seed % 2 else "truncated"

print(json.dumps(fuzz(look, range(12), seconds=0.2)))
"""


def test_the_fuzzer_notices_crashes_and_hangs_and_goes_on():
    report = python("-c", PLANTED)
    assert report == {
        "images": 12,
        "accepted": 5,
        "refused": {"truncated": 3},
        "crashes": {
            "3": "ended by SIGABRT",
            "4": "raised ValueError: no BadImage",
            "8": "raised MemoryError: ",
        },
        "hangs": [6],
    }
