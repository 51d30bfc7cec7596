"""Files from strangers run nothing, start nothing, and end in an exit code and one plain line."""

import json
import os
import pickle
import re
import stat
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import as_bytes
from hostile import (
    ENCODER,
    PICKLE,
    REFUSED,
    Runs,
    answers_to,
    assert_harmless,
    folder_of,
    image,
    tensors,
    tiny,
    work_place,
    zipped,
)
from PIL import Image, features
from safetensors.torch import save

from nearkin.classifier.kept import KeptFeatures
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import load
from nearkin.errors import CheckpointError
from nearkin.labels.known import recognize
from nearkin.types import UNLABELED


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
    "format": "3",
    "kind": "discovery",
    "encoder": "",
    "classes": ["a", "b", "new-1"],
    "num_known": 2,
    "outliers": {"k": 1, "max_neighbor": 0.5, "max_left": 0.5},
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
    "the neighbor before the first": {"outliers": {"k": 0, "max_neighbor": 0.5, "max_left": 0.5}},
    "a distance that is no number": {
        "outliers": {"k": 1, "max_neighbor": float("nan"), "max_left": 0.5}
    },
    "no outliers": {"outliers": None},
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
REFERENCE = {
    "reference.features": torch.eye(3, 128), "reference.cluster": torch.arange(3),
    "reference.labeled": torch.tensor([True, True, False]), "reference.sizes": torch.arange(3),
}  # fmt: skip
WEIGHTS = {"heads.weight": torch.ones(3, 128)}
HEADS = {
    "images of other features": WEIGHTS | {"reference.features": torch.ones(3, 64)},
    "images of other classes": WEIGHTS | {"reference.cluster": torch.tensor([0, 1, 10**12])},
    "more classes than images": WEIGHTS | {"reference.cluster": torch.arange(2)},
    "sizes of other classes": WEIGHTS | {"reference.sizes": torch.arange(4)},
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


def saved(write, *arrays, **named):
    file = BytesIO()
    write(file, *arrays, **named)
    return file.getvalue()


def number(**changed):
    estimate = {"chosen": 2, "low": 1, "high": 2, "estimates": {}, "curve": [], "most": 9}
    return json.dumps(estimate | changed).encode()


TRIAL = "stages/trials/gcd-0-simgcd.npz"
STAGES = {
    "a trial of other images": (TRIAL, saved(
        np.savez, accuracy=np.array(0.5), probability=np.full((2, 4), 0.25),
        correct=np.array([True, False]))),
    "a trial that is one array": (TRIAL, saved(np.save, np.ones(3))),
    "a trial that is a pickle": (TRIAL, PICKLE),
    "a number of classes that is a pickle": ("stages/number.json", PICKLE),
    "a number of classes that is 0": ("stages/number.json", number(chosen=0, low=0, high=0)),
    "a number of classes that is vast": ("stages/number.json", number(chosen=10**12)),
    "a number of classes without an end": ("stages/number.json", b"[" * 100_000),
    "a note of no data": ("data.json", b"[]"),
    "a note of the data that is a pickle": ("data.json", PICKLE),
    "a note of the data without an end": ("data.json", b"[" * 100_000),
}  # fmt: skip
"""Files of a discovery that was begun elsewhere, and where they lie."""
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


def other_formats():
    """What Pillow could open if it were asked to, some of it with the help of other programs."""
    kinds = ["EPS", "PDF", "TGA", "ICNS", "PCX", "SGI"]
    kinds += ["JPEG2000"] if features.check("jpg_2000") else []
    files = {kind: as_bytes(Image.new("RGB", (16, 16), "red"), kind) for kind in kinds}
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
    place = work_place(tmp_path_factory.mktemp("files"))
    formats = {f"{kind}.jpg": content for kind, content in other_formats().items()}
    folder_of(place / "formats", {**formats, "good.png": image()})
    special_files(place / "special")
    hostile_folder(place / "hostile")
    names = [(name, row) for name in "abcdef" for row in range(6)]
    classes = {f"{name}/{row}.png": image(100 * ord(name) + row) for name, row in names}
    folder_of(place / "classes", classes)
    return place


def weights():
    state = tiny()
    encoders = NO_TENSORS | {name: make(state) for name, make in ENCODERS.items()}
    for name, content in encoders.items():
        file = "encoder.safetensors"
        yield (
            f"encoder: {name}",
            {file: content},
            "embed HERE images -o x.npz --overwrite",
            {5},
            file,
        )
    heads = {"heads.weight": torch.ones(3, 128), **REFERENCE}
    sound = {"sound": {}, "names": {"classes": [STEERS, "b", "c"]}}
    classifiers = {
        n: tensors(heads, CLASSIFIER | more) for n, more in (CLASSIFIERS | sound).items()
    }
    classifiers |= {
        name: tensors({**REFERENCE, **weights}, CLASSIFIER) for name, weights in HEADS.items()
    }
    for name, content in (NO_TENSORS | classifiers).items():
        file = "classifier.safetensors"
        files = {file: content, "encoder.safetensors": tensors(state, ENCODER)}
        expected = ({0}, "") if name in sound else ({5}, file)
        yield f"classifier: {name}", files, "predict HERE images", *expected


def stages():
    command = (
        "discover classes -o HERE --known a,b,c,d --encoder good/encoder.safetensors --resume"
    )
    command += " --batch-size 16"
    for name, (file, content) in STAGES.items():
        files = {file: content, "stages/begun": b""}
        given = "" if "number" in name else " --classes 2"
        yield f"stage: {name}", files, command + given, {5}, Path(file).name


def settings():
    contents = CONFIGS | {"key": f"{json.dumps(STEERS)} = 1"}
    for name, content in contents.items():
        command = "train images --config HERE/x.toml -o x"
        yield f"config: {name}", {"x.toml": content}, command, {2}, "error: "


TRAIN = "train hostile -o run --epochs 1 --batch-size 8 --backbone tiny --max-bad 0.5"


def others():
    for name in ("formats", "special"):
        yield name, {}, f"embed good {name} -o {name}.npy", {0}, ""
    yield "train", {}, TRAIN, {0}, ""
    yield "bad names", {}, "train hostile -o y", REFUSED, "error: "
    yield "check", {}, "check hostile", {0, 3}, ""
    yield "left out", {}, "embed good hostile -o hostile.npy", {0}, ""
    heading = {"heading.csv": f'"{STEERS}",label\n'}
    yield (
        "heading",
        heading,
        "embed good HERE/heading.csv -o x.npz --overwrite",
        REFUSED,
        "error: ",
    )
    named = {"x.safetensors": tensors(tiny(), {**ENCODER, "backbone": STEERS})}
    yield (
        "architecture",
        named,
        "embed HERE/x.safetensors images -o x.npz --overwrite",
        REFUSED,
        "error: ",
    )


@pytest.fixture(scope="module")
def cases():
    warm = "warm", {}, "embed good images -o warm.npz", {0}, ""
    return [warm, *others(), *weights(), *stages(), *settings()]


@pytest.fixture(scope="module")
def answers(place, cases):
    return answers_to(place, cases)


def test_hostile_files_start_nothing_and_are_refused_in_one_line(
    answers, cases, place, monkeypatch
):
    assert_harmless(place, cases, answers, importing=("warm", "train", "check"))
    monkeypatch.chdir(place)
    pickle.loads(PICKLE)
    assert Path("marker").exists()  # it would have


def test_kept_features_of_other_images_or_hostilely_described_are_none_and_folders_are_refused(
    tmp_path,
):
    kept, path = KeptFeatures(tmp_path), tmp_path / "000000000.safetensors"
    good = {"features": torch.ones(2, 3, 4)}
    path.write_bytes(save(good, {"bad": '{"1": "y"}'}))
    assert kept.read(range(3), 2, 4)[1] == {1: "y"}
    contents = [PICKLE, sized(2**63), b"", save(good), save({"other": torch.ones(2, 3, 4)})]
    contents += [save({"features": torch.ones(shape)}, {"bad": "{}"})
                 for shape in ((2, 4, 4), (1, 3, 4), (2, 3, 5), (3, 4), (24,))]  # fmt: skip
    contents.append(save({"features": good["features"].double()}, {"bad": "{}"}))
    described = ["no JSON", '{"x": "y"}', '{"3": "y"}', "[1]", "[" * 100_000]
    contents += [save(good, {"bad": each}) for each in described]
    for content in contents:
        path.write_bytes(content)
        assert kept.read(range(3), 2, 4) is None, content[:99]
    (tmp_path / "encoder.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"encoder\.safetensors cannot be used"):
        load(tmp_path)


def test_what_other_decoders_would_open_is_no_image(answers, place):
    assert answers["formats"].out.startswith("1 image,")
    images = open_images(place / "formats", cache=False)
    assert images.names == ("good.png",)
    others = {"not-an-image", "text, not an image", "HTML page, not an image"}
    assert {bad.reason for bad in images.bad} - others <= {"JPEG 2000; convert it to PNG"}
    assert len(images.bad) >= 15


def test_what_is_no_regular_file_is_not_opened(answers, place, monkeypatch):
    assert answers["special"].out.startswith("1 image,")
    images = open_images(place / "special", cache=False)
    links, others = ("environ", "mem"), ("pipe", "socket", "stdin", "to_pipe", "zero")
    inside = {bad.name.removesuffix(".jpg") for bad in images.bad}
    assert inside == {"pipe", "socket", "to_pipe"}
    monkeypatch.setenv("NEARKIN_LINKS", "follow")
    images = open_images(place / "special", cache=False)
    reasons = {bad.name.removesuffix(".jpg"): bad.reason for bad in images.bad}
    assert reasons.keys() == {*links, *others}
    assert {name: reasons[name] for name in others} == dict.fromkeys(others, "not a regular file")


def test_a_table_of_labels_opens_no_devices_and_pipes(tmp_path):
    data = folder_of(tmp_path / "data", {"0.png": image(0), "1.png": image(1)})
    os.mkfifo(tmp_path / "pipe.png")
    labels = tmp_path / "labels.csv"
    labels.write_text("path,label\n/dev/zero,a\npipe.png,b\n0.png,c\n")
    labeling = recognize(open_images(data), str(labels))
    assert labeling.outside.names == ()
    assert labeling.outside.reasons == {
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


def steering(text):
    """What in a text would steer a terminal, or begin a line of its own."""
    forged = [line for line in text.splitlines() if line.startswith("FORGED")]
    return {c for c in text if not c.isprintable() and c != "\n"} | {*forged}


def test_hostile_names_neither_steer_the_terminal_nor_forge_lines_of_the_log(answers, place):
    done = answers["train"]
    log = (place / "run" / "train.log").read_text(encoding="utf-8")
    assert "24 images" in log
    assert "12 unreadable" in log
    assert steering(log) == set()
    assert "FORGED" not in done.out + done.err + log
    dated = re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", log, re.MULTILINE)
    said = [line for line in done.err.splitlines() if not re.match(r"\s*(\d+%|$)", line)]
    assert len(dated) == len(said) + 1  # the table; percentages are shown where it is slow
    plots = {path.name for path in (place / "run" / "plots").iterdir()}
    assert plots <= {"augmentations.png"}
    for name, answer in answers.items():
        assert steering(answer.out + answer.err) == set(), name
        assert "a bug in nearkin" not in answer.err


def test_what_is_written_is_for_whom_the_umask_allows(answers, place):
    written = [place / "run", *(place / "run").rglob("*"), *(place / "cache").rglob("*")]
    assert len(written) > 10
    assert [path for path in written if path.stat().st_mode & 0o077] == []
    assert [p for p in written if p.is_file() and p.stat().st_mode & stat.S_IXUSR] == []


TABLES = {
    "a formula": ('path,label\n0.png,"=A(""http://x"")"\n1.png,@b\n', '=A("http://x")'),
    "a NUL": ("path,label\n0.png,a\0b\n1.png,c\n", "a\0b"),
    "100,000 columns": (f"path,label{',x' * 100_000}\n0.png,a{',y' * 100_000}\n1.png,b\n", "a"),
    "mixed ends of lines": ("path,label\r\n0.png,a\n1.png,b\r", "a"),
    "old ends of lines": ("path,label\r0.png,a\r1.png,b\r", "a"),
    "an escape": ("path,label\n0.png,\x1b[31ma\n1.png,b\n", "\x1b[31ma"),
    "a cell of several lines": ('path,label\n0.png,"a\nb"\n1.png,c\n', "a\nb"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_hostile_label_is_a_name_and_nothing_else(name, tmp_path):
    content, label = TABLES[name]
    data = tmp_path / "data"
    folder_of(data, {"0.png": image(0), "1.png": image(1), "table.csv": content})
    labels = tmp_path / "labels.csv"
    labels.write_bytes(content.encode())
    for images in (open_images(data, labels=str(labels)), open_images(data / "table.csv")):
        assert images.classes[images.labels[0]] == label
        assert images.labels[1] not in (UNLABELED, images.labels[0])
