"""Files from strangers run nothing, start nothing, and end in an exit code and one plain line."""

import io
import json
import os
import re
import stat
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import ENCODER, PICKLE, Commands, Runs, folder_of, image, tensors, tiny, zipped
from PIL import Image, features
from safetensors.torch import save

from nearkin.data.opening import open_images
from nearkin.data.recognize import recognize
from nearkin.discovery.features import CachedFeatures
from nearkin.encoders.encoder import load
from nearkin.errors import CheckpointError, DataError
from nearkin.run.folder import PLOTS
from nearkin.types import UNKNOWN


def sized(length):
    """The start of a safetensors file whose header claims this length."""
    return struct.pack("<Q", length) + b'{"__metadata__":{}}'


VAST = b'{"a":{"dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,4]}}'
NO_TENSORS = {
    "a pickle": PICKLE,
    "a pickle of torch": zipped({"weights": Runs()}),
    "a header of 2**63 bytes": sized(2**63),
    "a header of 2**64 - 1 bytes": sized(2**64 - 1),
    "a header longer than the file": sized(90_000_000),
    "a header that is no text": struct.pack("<Q", 8) + b"\xff" * 8,
    "a header without an end": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "a tensor of 2**80 numbers": struct.pack("<Q", len(VAST)) + VAST + bytes(4),
}
"""Files that are called .safetensors and are none."""


def floats(state, change):
    return {k: change(v) if v.is_floating_point() else v for k, v in state.items()}


ENCODERS = {
    "architecture ../../x": lambda s: tensors(s, {**ENCODER, "backbone": "../../x"}),
    "architecture os.system": lambda s: tensors(s, {**ENCODER, "backbone": "os.system"}),
    "architecture from a hub": lambda s: tensors(s, {**ENCODER, "backbone": "timm/hf-hub:a/b"}),
    "no architecture": lambda s: tensors(s, {"image_size": 16}),
    "images of 0 px": lambda s: tensors(s, {**ENCODER, "image_size": 0}),
    "images of 100,000 px": lambda s: tensors(s, {**ENCODER, "image_size": 10**5}),
    "images of infinite size": lambda s: tensors(s, {**ENCODER, "image_size": float("inf")}),
    "images of no size": lambda s: tensors(s, {**ENCODER, "image_size": float("nan")}),
    "a number of 10,000 digits": lambda s: tensors(s, f'{{"image_size": {"9" * 10_000}}}'),
    "a description of another kind": lambda s: tensors(s, "[]"),
    "a description without an end": lambda s: tensors(s, "[" * 100_000),
    "a later format": lambda s: tensors(s, {**ENCODER, "format": "99"}),
    "weights that are not numbers": lambda s: tensors(floats(s, torch.Tensor.log), ENCODER),
    "weights of another shape": lambda s: tensors(floats(s, torch.Tensor.flatten), ENCODER),
    "weights that a network cannot hold": lambda s: tensors(
        floats(s, lambda weight: torch.full_like(weight, 1e300, dtype=torch.float64)), ENCODER
    ),
    "no weights": lambda _: tensors({"0.0.weight": torch.zeros(1)}, ENCODER),
}
CLASSIFIER = {
    "format": "1",
    "classes": ["a", "b", "new-1"],
    "num_known": 2,
    "disjoint": False,
    "temperature": 0.1,
    "calibration": None,
    "details": {"augment": "simclr_cifar", "num_views": 2, "seed": 0},
}
CLASSIFIERS = {
    "no classes": {"classes": None},
    "a number of classes": {"classes": 3},
    "classes that are no names": {"classes": [1, ["a"], None]},
    "fewer names than classes": {"classes": ["a"]},
    "infinitely many known classes": {"num_known": float("inf")},
    "more known classes than there are": {"num_known": 10**12},
    "only known classes where none may be": {"num_known": 3, "disjoint": True},
    "a temperature of 0": {"temperature": 0},
    "a temperature that is text": {"temperature": "x"},
    "a calibration by 0": {"calibration": dict.fromkeys(
        ("temperature", "num_images", "error_before", "error_after"), 0)},
    "a calibration of another kind": {"calibration": [1]},
    "no details": {"details": {}},
    "a seed that is text": {"details": {"augment": "simclr_cifar", "num_views": 2, "seed": "x"}},
    "no views": {"details": {"augment": "simclr_cifar", "num_views": 0, "seed": 0}},
    "an augmentation ../x": {"details": {"augment": "../x", "num_views": 2, "seed": 0}},
}  # fmt: skip
HEADS = {
    "weights in one row": {"heads.weight": torch.ones(3)},
    "weights for other features": {"heads.weight": torch.ones(3, 64)},
    "weights that are not numbers": {"heads.weight": torch.full((3, 128), torch.nan)},
    "weights that a network cannot hold": {
        "heads.weight": torch.full((3, 128), 1e300, dtype=torch.float64)
    },
    "heads that are fewer than said": {
        "heads.known.weight": torch.ones(1, 128), "heads.known.bias": torch.ones(1),
        "heads.novel.weight": torch.ones(2, 128), "heads.novel.bias": torch.ones(2),
    },
    "no weights": {},
}  # fmt: skip
STEERS = "\x1b[31mred\x1b]0;title\x07\nFORGED"
"""A name that, printed as it is, colors what follows, renames the window and begins a line."""
CONFIGS = {
    "a Python object": b"epochs = '!!python/object/apply:os.system [\"touch marker\"]'",
    "a class to be built": b"options._target_ = 'os.system'",
    "a key that is there twice": b"epochs = 1\nepochs = 2",
    "100 MB of nothing": bytes(100_000_000),
    "100,000 brackets": b"options = " + b"[" * 100_000 + b"]" * 100_000,
    "100,000 tables": b"options = " + b"{a=" * 100_000 + b"1" + b"}" * 100_000,
    "2,000 tables in one name": b"options." + b"a." * 2_000 + b"a = 1",
    "a number of 300 digits": b"epochs = " + b"9" * 300,
    "a number of 5,000 digits": b"epochs = " + b"9" * 5_000,
    "a number of 5,000 hexadecimal digits": b"epochs = 0x" + b"f" * 5_000,
    "an end of a string": b"epochs = 1\0",
    "bytes that are no text": b"epochs = \xff",
}


def arrays(**named):
    file = io.BytesIO()
    np.savez(file, **named)
    return file.getvalue()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


STAGES = {
    "kept features that are a pickle": {"stages/cached-features.safetensors": PICKLE},
    "kept features of 2**63 bytes": {"stages/cached-features.safetensors": sized(2**63)},
    "kept features of other images": {"stages/cached-features.safetensors": save(
        {"center": torch.ones(3, 128), "views": torch.ones(2, 3, 128)}, {"bad": "{}"})},
    "a trial of other images": {"stages/trials/gcd-0-simgcd-0.5.npz": arrays(
        accuracy=np.array(0.5), probability=np.full((2, 4), 0.25),
        correct=np.array([True, False]))},
    "a trial that is one array": {"stages/trials/gcd-0-simgcd-0.5.npz": npy(np.ones(3))},
    "a trial that is a pickle": {"stages/trials/gcd-0-simgcd-0.5.npz": PICKLE},
    "a number of classes that is a pickle": {"stages/number.json": PICKLE},
    "a number of classes that is 0": {"stages/number.json": json.dumps(
        {"chosen": 0, "low": 0, "high": 0, "estimates": {}, "curve": []}).encode()},
    "a number of classes that is vast": {"stages/number.json": json.dumps(
        {"chosen": 10**12, "low": 1, "high": 2, "estimates": {}, "curve": []}).encode()},
    "a number of classes without an end": {"stages/number.json": b"[" * 100_000},
    "a note of no data": {"data.json": b"[]"},
    "a note of the data that is a pickle": {"data.json": PICKLE},
}  # fmt: skip
"""Files of a discovery that was begun elsewhere, by where they lie."""
HOSTILE_NAMES = [
    "<img src=x onerror=alert(1)>.png",
    '"><svg onload=alert(1)>.png',
    f"{STEERS}.png",
    "tab\there.png",
    "\u202egnp.exe.png",
    "=cmd|' C'!A0.png",
    "{{7*7}}${HOME}%s%n.png",
    "%2e%2e%2f.png",
    "x" * 251 + ".png",
    os.fsdecode(b"caf\xe9.png"),
    "-rf.png",
    "~.png",
]


def hostile_folder(path):
    """Two classes of images with such names, and as many files that are no images."""
    for seed, class_name in enumerate(("<script>", STEERS)):
        files = {name: image(seed * 99 + row) for row, name in enumerate(HOSTILE_NAMES)}
        folder_of(path / class_name, files)
    for name in HOSTILE_NAMES:
        (path / STEERS / name.replace(".png", ".jpg")).write_bytes(b"no image")
    return path


def png(side, pixels=b"", extra=b""):
    """An image of one bit per pixel."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def bombs():
    """Small files that are large images."""
    text = b"k\0\0" + zlib.compress(bytes(100_000_000))
    note = (
        struct.pack(">I", len(text))
        + b"zTXt"
        + text
        + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    )
    jpeg = bytearray(image(kind="JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65_500, 65_500)
    two = io.BytesIO()
    frames = [Image.new("L", (16, 16), shade) for shade in (0, 255)]
    frames[0].save(two, "GIF", save_all=True, append_images=frames[1:], duration=10)
    gif = two.getvalue()
    second = gif.index(b"\x21\xf9", gif.index(b"\x21\xf9") + 1)
    return {
        "9k.png": png(9_000, zlib.compress(bytes(9_000 * 1_126))),
        "14k.png": png(14_000, zlib.compress(bytes(14_000 * 1_751))),
        "60k.png": png(60_000),
        "2g.png": png(2**31 - 1),
        "text.png": png(16, zlib.compress(bytes(48)), note),
        "65k.jpg": bytes(jpeg),
        "frames.gif": gif[:second] + gif[second:-1] * 10_000 + b";",
        "good.png": image(),
    }


def other_formats():
    """What Pillow could open if it were asked to, some of it with the help of other programs."""
    red = Image.new("RGB", (16, 16), "red")
    files = {"EPS": b"", "PDF": b"", "TGA": b"", "ICNS": b"", "PCX": b"", "SGI": b""}
    if features.check("jpg_2000"):
        files["JPEG2000"] = b""
    for kind in files:
        file = io.BytesIO()
        red.save(file, kind)
        files[kind] = file.getvalue()
    return files | {
        "PBM": b"P4\n16 16\n" + bytes(32),
        "PSD": b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 16, 16, 8, 3) + bytes(900),
        "FITS": b"SIMPLE  =                    T".ljust(2880),
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "HTML": b"<html><img src=http://localhost/x></html>",
        "WMF": b"\xd7\xcd\xc6\x9a" + bytes(100),
        "MPEG": b"\0\0\1\xb3" + bytes(100),
        "MVG": b"push graphic-context\nviewbox 0 0 9 9\nfill 'url(https://localhost/\"|touch marker\")'",
        "shell": b"#!/bin/sh\ntouch marker\n",
    }


def special_files(path):
    """Everything but regular files under the names of images; one image."""
    folder_of(path, {"good.png": image()})
    (path / "folder.jpg").mkdir()
    os.mkfifo(path / "pipe.jpg")
    os.mknod(path / "socket.jpg", stat.S_IFSOCK | 0o600)
    (path / "to_pipe.jpg").symlink_to("pipe.jpg")
    for name in ("/dev/zero", "/dev/stdin", "/proc/self/mem", "/proc/self/environ"):
        (path / f"{Path(name).name}.jpg").symlink_to(name)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("security")


def add_images(commands, place, encoder):
    folder_of(place / "bombs", bombs())
    formats = {f"{kind}.jpg": content for kind, content in other_formats().items()}
    folder_of(place / "formats", {**formats, "good.png": image()})
    special_files(place / "special")
    for name in ("bombs", "formats", "special"):
        commands.add(name, "embed", encoder, place / name, "-o", f"{name}.npy")


def add_weights(commands, place, state, images):
    encoders = NO_TENSORS | {name: make(state) for name, make in ENCODERS.items()}
    for number, (name, content) in enumerate(encoders.items()):
        folder_of(place / f"encoder{number}", {"encoder.safetensors": content})
        commands.add(f"encoder: {name}", "embed", f"encoder{number}", images, "-o", "x.npz")
    heads = {"heads.weight": torch.ones(3, 128)}
    classifiers = NO_TENSORS | {"sound": tensors(heads, CLASSIFIER)}
    classifiers |= {n: tensors(heads, CLASSIFIER | change) for n, change in CLASSIFIERS.items()}
    classifiers |= {name: tensors(weights, CLASSIFIER) for name, weights in HEADS.items()}
    classifiers["names"] = tensors(heads, CLASSIFIER | {"classes": [STEERS, "b", "c"]})
    for number, (name, content) in enumerate(classifiers.items()):
        files = {"classifier.safetensors": content, "encoder.safetensors": tensors(state, ENCODER)}
        folder_of(place / f"classifier{number}", files)
        commands.add(f"classifier: {name}", "assign", f"classifier{number}", images)


def add_stages(commands, place, encoder):
    for name in "abcdef":
        files = {f"{row}.png": image(100 * ord(name) + row) for row in range(6)}
        folder_of(place / "classes" / name, files)
    features = {"center": torch.ones(36, 128), "views": torch.ones(2, 36, 128)}
    cached = save(features, metadata={"bad": "{}"})
    for number, (name, files) in enumerate(STAGES.items()):
        folder = place / f"stages{number}"
        for file, content in {"stages/cached-features.safetensors": cached, **files}.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        settings = ["--known", "a,b,c,d", "--batch-size", 16, "--num-views", 2, "--resume"]
        settings += ["--from", encoder, *([] if "number" in name else ["--classes", 2])]
        commands.add(f"stage: {name}", "discover", place / "classes", "-o", folder, *settings)


def add_settings(commands, place, images):
    for number, (name, content) in enumerate(CONFIGS.items()):
        (place / f"{number}.toml").write_bytes(content)
        commands.add(f"config: {name}", "train", images, "--config", f"{number}.toml", "-o", "x")


def add_names(commands, place, state, images):
    hostile = hostile_folder(place / "hostile")
    settings = ["--epochs", 1, "--batch-size", 8, "--backbone", "tiny", "--max-bad", 0.5]
    commands.add("train", "train", hostile, "-o", "run", *settings)
    commands.add("bad names", "train", hostile, "-o", "y")
    commands.add("check", "check", hostile)
    commands.add("left out", "embed", "good.safetensors", hostile, "-o", "hostile.npy")
    (place / "key.toml").write_text(f"{json.dumps(STEERS)} = 1")
    commands.add("key", "train", images, "--config", "key.toml", "-o", "x")
    (place / "heading.csv").write_text(f'"{STEERS}",label\n')
    commands.add("heading", "embed", "good.safetensors", "heading.csv", "-o", "x.npz")
    (place / "name.safetensors").write_bytes(tensors(state, {**ENCODER, "backbone": STEERS}))
    commands.add("architecture", "embed", "name.safetensors", images, "-o", "x.npz")


@pytest.fixture(scope="module")
def answers(place):
    """What every command of this file did."""
    if not Path("/proc/self/status").exists():
        pytest.skip("the memory of a process is read from /proc")
    commands, state, encoder = Commands(place), tiny(), place / "good.safetensors"
    images = folder_of(place / "images", {"0.png": image(0), "1.png": image(1)})
    encoder.write_bytes(tensors(state, ENCODER))
    commands.add("warm", "embed", encoder, images, "-o", "warm.npz")
    add_images(commands, place, encoder)
    add_weights(commands, place, state, images)
    add_stages(commands, place, encoder)
    add_settings(commands, place, images)
    add_names(commands, place, state, images)
    return commands.run()


def test_hostile_files_start_nothing_call_nobody_and_are_not_unpickled(answers, place):
    assert answers["warm"].code == answers["classifier: sound"].code == 0
    importing = {"warm", "train", "check"}  # torch looks for libraries, matplotlib for fonts
    assert [a.events for name, a in answers.items() if a.events and name not in importing] == []
    assert not list(place.rglob("marker"))
    with subprocess.Popen([sys.executable, "-c", "import sys, pickle; pickle.load(sys.stdin.buffer)"],
                          stdin=subprocess.PIPE, cwd=place) as reader:  # fmt: skip
        reader.communicate(PICKLE)
    assert (place / "marker").exists()  # it would have


# ---------------------------------------------------------------- S1, S4, S6: files of weights


def test_hostile_files_of_weights_and_of_runs_are_refused(answers):
    lines = {}
    for kind, names, file in (
        ("encoder", [*NO_TENSORS, *ENCODERS], "encoder.safetensors"),
        ("classifier", [*NO_TENSORS, *CLASSIFIERS, *HEADS], "classifier.safetensors"),
        ("stage", STAGES, ""),
    ):
        for name in names:
            file = Path(next(iter(STAGES[name]))).name if kind == "stage" else file
            lines[name] = file, answers[f"{kind}: {name}"].refused(5)
    assert {name: line for name, (file, line) in lines.items() if file not in line} == {}


def test_hostile_settings_are_refused(answers):
    for name in CONFIGS:
        answers[f"config: {name}"].refused(2)


def test_kept_features_of_other_images_or_with_a_hostile_description_are_refused(tmp_path):
    path = tmp_path / "cached-features.safetensors"
    shapes = [
        ((3, 2), (2, 3, 2), 4),
        ((3, 2), (2, 4, 2), 3),
        ((3, 2), (3, 2), 3),
        ((3,), (2, 3), 3),
    ]
    described = ["no JSON", '{"x": "y"}', '{"1": "y"}', "[1]", "[" * 100_000]
    cases = [(*each, "{}") for each in shapes]
    for center, views, count, bad in [
        *cases,
        *(((1, 2), (2, 1, 2), 1, each) for each in described),
    ]:
        features = {"center": torch.ones(center), "views": torch.ones(views)}
        path.write_bytes(save(features, {"bad": bad}))
        with pytest.raises(CheckpointError, match=r"cached-features\.safetensors cannot be used"):
            CachedFeatures.read(path, count)


def test_an_encoder_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "encoder.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"encoder\.safetensors cannot be used"):
        load(tmp_path)


# ---------------------------------------------------------------- S5, S7 to S11: images


def test_bombs_are_left_out_without_being_inflated(answers, place):
    assert answers["bombs"].code == 0
    images = open_images(place / "bombs", cache=False)
    assert images.names == ("frames.gif", "good.png")
    assert {bad.name: bad.reason for bad in images.bad} == {
        "14k.png": "too-large",
        "2g.png": "too-large",
        "60k.png": "too-large",
        "65k.jpg": "too-large",
        "9k.png": "too-large",
        "text.png": "unreadable",
    }
    assert answers["bombs"].grown < 600e6


def test_what_other_decoders_would_open_is_no_image(answers, place):
    assert answers["formats"].out.startswith("1 images")
    images = open_images(place / "formats", cache=False)
    assert images.names == ("good.png",)
    assert {bad.reason for bad in images.bad} == {"not-an-image"}
    assert len(images.bad) >= 15


def test_what_is_no_regular_file_is_not_opened(answers, place):
    assert answers["special"].out.startswith("1 images")
    images = open_images(place / "special", cache=False)
    assert {bad.name: bad.reason for bad in images.bad} == {
        "environ.jpg": "link leaves the folder",
        "mem.jpg": "link leaves the folder",
        "pipe.jpg": "not a regular file",
        "socket.jpg": "not a regular file",
        "stdin.jpg": "link leaves the folder",
        "to_pipe.jpg": "not a regular file",
        "zero.jpg": "link leaves the folder",
    }


def test_a_table_of_labels_opens_no_devices_and_pipes(tmp_path):
    data = folder_of(tmp_path / "data", {"0.png": image(0), "1.png": image(1)})
    os.mkfifo(tmp_path / "pipe.png")
    labels = tmp_path / "labels.csv"
    labels.write_text("path,label\n/dev/zero,a\npipe.png,b\n0.png,c\n")
    labeling = recognize(open_images(data), str(labels))
    assert labeling.outside.names == ()
    assert {bad.name: bad.reason for bad in labeling.outside.bad} == {
        "dev/zero": "not a regular file",
        f"{tmp_path}/pipe.png"[1:]: "not a regular file",
    }


def test_a_chain_of_links_is_followed_as_far_as_the_system_does(tmp_path):
    folder_of(tmp_path / "data", {"0.png": image()})
    for number in range(1, 101):
        (tmp_path / "data" / f"{number}.png").symlink_to(f"{number - 1}.png")
    images = open_images(tmp_path / "data")
    assert {"0.png", "1.png"} <= set(images.names)
    assert "100.png" in {bad.name for bad in images.bad if bad.reason == "broken link"}
    assert len(images) + len(images.bad) == 101


def test_a_table_leads_through_no_link_out_of_its_folder(tmp_path):
    folder_of(tmp_path / "outside", {"secret.png": image(0)})
    data = folder_of(tmp_path / "data", {"own.png": image(1)})
    (data / "folder").symlink_to(tmp_path / "outside")
    (data / "inside").mkdir()
    (data / "inside" / "back").symlink_to(tmp_path / "outside")
    (data / "around").symlink_to("inside")
    (data / "same").symlink_to(data)
    folder_of(tmp_path / "outside" / "deep", {"secret.png": image(0)})
    leaving = ["folder/secret.png", "folder/deep/secret.png", "around/back/secret.png",
               "same/around/back/deep/secret.png"]  # fmt: skip
    (data / "table.csv").write_text("\n".join(["path", "own.png", "same/own.png", *leaving]))
    images = open_images(data / "table.csv")
    assert images.names == ("own.png", "same/own.png")
    assert {bad.name: bad.reason for bad in images.bad} == dict.fromkeys(
        leaving, "link leaves the folder"
    )


# ---------------------------------------------------------------- S12, S19: names and modes


def control_characters(text):
    return {c for c in text if not c.isprintable() and c != "\n"}


def test_hostile_names_neither_steer_the_terminal_nor_forge_lines_of_the_log(answers, place):
    done = answers["train"]
    log = (place / "run" / "train.log").read_text(encoding="utf-8")
    assert done.code == 0, done.err
    assert "24 images" in log
    assert "12 unreadable" in log
    for text in (done.out, done.err, log):
        assert control_characters(text) == set()
        assert not [line for line in text.splitlines() if "FORGED" in line]
    dated = [
        line for line in log.splitlines() if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line)
    ]
    assert len(dated) == len([line for line in done.err.splitlines() if line.strip()]) + 1  # table
    plots = {path.name for path in (place / "run" / "plots").iterdir()}
    assert plots <= set(PLOTS)


PRINTING = (
    "check",
    "bad names",
    "left out",
    "key",
    "heading",
    "architecture",
    "classifier: names",
)


def test_what_is_printed_of_a_file_does_not_steer_a_terminal(answers):
    for name in PRINTING:
        answer = answers[name]
        assert control_characters(answer.out + answer.err) == set(), name
        assert not [line for line in answer.out.splitlines() if line.startswith("FORGED")]
        assert "a bug in nearkin" not in answer.err


def test_what_is_written_is_for_whom_the_umask_allows(answers, place):
    written = [place / "run", *(place / "run").rglob("*"), *(place / "cache").rglob("*")]
    assert len(written) > 10
    assert [path for path in written if path.stat().st_mode & 0o077] == []
    assert [p for p in written if p.is_file() and p.stat().st_mode & stat.S_IXUSR] == []


# ---------------------------------------------------------------- S20, S21: settings and labels


TABLES = {
    "a formula": (
        'path,label\n0.png,"=HYPERLINK(""http://x"")"\n1.png,@b\n',
        '=HYPERLINK("http://x")',
    ),
    "a NUL": ("path,label\n0.png,a\0b\n1.png,c\n", "a\0b"),
    "100,000 columns": (f"path,label{',x' * 100_000}\n0.png,a{',y' * 100_000}\n1.png,b\n", "a"),
    "mixed ends of lines": ("path,label\r\n0.png,a\n1.png,b\r", "a"),
    "old ends of lines": ("path,label\r0.png,a\r1.png,b\r", "a"),
    "an escape": ("path,label\n0.png,\x1b[31ma\n1.png,b\n", "\x1b[31ma"),
    "a cell of several lines": ('path,label\n0.png,"a\nb"\n1.png,c\n', "a\nb"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_hostile_label_is_a_name_and_nothing_else(name, tmp_path):
    data = folder_of(tmp_path / "data", {"0.png": image(0), "1.png": image(1)})
    content, label = TABLES[name]
    labels = tmp_path / "labels.csv"
    labels.write_bytes(content.encode())
    (data / "table.csv").write_bytes(content.encode())
    for images in (open_images(data, labels=str(labels)), open_images(data / "table.csv")):
        assert images.classes[images.labels[0]] == label
        assert images.labels[1] not in (UNKNOWN, images.labels[0])


@pytest.mark.parametrize(
    "content",
    [
        b"path,label\n0.p\0ng,a\n",
        b"," * 1_000_000 + b"\n",
        b'path,label\n0.png,"' + b"x" * 200_000 + b'"\n',
        b"path,label\n\xff.png,a\n",
        "path,label\n0.png,a\n".encode("utf-16"),
        b"path\n" + b"x" * 5_000 + b".png\n",
        b"path\n../../../../etc/passwd\n",
        b"path\n/etc/passwd\n",
        b"path,split\n0.png,\x1b[31m\n",
        b"",
        bytes(1_000_000),
    ],
    ids=["NUL in a path", "columns", "long cell", "no text", "two bytes", "long path", "up",
         "absolute", "split", "empty", "zeros"],
)  # fmt: skip
def test_a_hostile_table_is_refused_in_one_line(content, tmp_path):
    data = folder_of(tmp_path / "data", {"0.png": image(0), "1.png": image(1)})
    (data / "table.csv").write_bytes(content)
    with pytest.raises(DataError, match=r"table\.csv") as raised:
        open_images(data / "table.csv")
    assert control_characters(str(raised.value)) == set()
    assert "\n" not in str(raised.value)
