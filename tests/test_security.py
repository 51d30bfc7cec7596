"""Files from strangers run nothing, start nothing, and end in an exit code and one plain line."""

import ast
import gzip
import io
import json
import os
import pickle
import re
import stat
import struct
import subprocess
import sys
import tomllib
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, features
from safetensors.torch import save

import nearkin
from nearkin.data.images import open_images
from nearkin.data.labels import SIDES
from nearkin.data.recognize import recognize
from nearkin.errors import CheckpointError, DataError
from nearkin.networks.backbone import build_backbone
from nearkin.runs.encoder import load
from nearkin.runs.kept import read_looks
from nearkin.types import UNKNOWN

PACKAGE = Path(nearkin.__file__).parent
GIB = 2**30


def picture(seed=0, size=(16, 16), kind="PNG", **options):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def folder_of(path, files):
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


# ---------------------------------------------------------------- S3: what the package may use


MAY_RUN_CODE = {
    "builtins", "cloudpickle", "code", "ctypes", "dill", "joblib", "marshal", "pickle", "pty",
    "runpy", "shelve", "subprocess", "torch.hub", "torch.jit", "torch.package", "yaml",
}  # fmt: skip
CALLS = {"__import__", "compile", "os.popen", "os.startfile", "shutil.unpack_archive"}
LOADERS = {"load", "open_memmap", "read_array"}


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_nothing_is_imported_that_could_run_what_a_file_says(path):
    """Beside `test_architecture`, which forbids the calls: no import gives them another name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
            heavy = str(node.module).split(".")[0] in ("torch", "numpy")
            assert not heavy or not LOADERS & {alias.name for alias in node.names}
            assert node.module != "os" or imported <= {"os", "os.path"}
        elif isinstance(node, ast.Call):
            name, imported = ast.unparse(node.func), set()
            assert name not in CALLS
            assert not re.match(r"os\.(exec|spawn|posix_spawn|system)", name)
            if name in ("torch.load", "np.load", "numpy.load"):
                assert len(node.args) == 1, "an option without a name is not seen by any lint"
        else:
            continue
        assert not MAY_RUN_CODE & imported


# ---------------------------------------------------------------- commands on hostile files


PROGRAM = """
import contextlib, io, json, os, resource, sys
memory = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
os.umask(0o077)
WATCHED = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn",
           "socket.connect", "socket.getaddrinfo", "pickle.find_class", "ctypes.dlopen"}
events = []
sys.addaudithook(lambda event, args: event in WATCHED and events.append(f"{event} {args}"))
from nearkin.cli import main

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

for line in sys.stdin:
    name, arguments = json.loads(line)
    before = peak()
    events.clear()
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
        out.flush(), err.flush()
    said = [file.buffer.getvalue().decode() for file in (out, err)]
    print(json.dumps([name, code, *said, events, peak() - before]), file=sys.__stdout__, flush=True)
"""


@dataclass(frozen=True)
class Answer:
    """What a command did."""

    code: int
    out: str
    err: str
    events: list[str]
    """What it started, whom it called, which classes were unpickled."""
    grown: int
    """Bytes by which the largest memory of the process grew."""

    def refused(self, code):
        """The one line of a refusal."""
        (line,) = [said for said in self.err.splitlines() if said.startswith("error: ")]
        assert (self.code, "a bug in nearkin" in line) == (code, False), line
        assert self.out == ""
        return line


class Commands:
    """Commands to be run by one process, since loading torch takes longer than all of them."""

    def __init__(self, root):
        self.root = root
        self.arguments = {}

    def add(self, name, *arguments):
        self.arguments[name] = [str(argument) for argument in arguments]

    def run(self):
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.root / "cache")}
        environment["PYTHONPATH"] = str(PACKAGE.parent)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(24 * GIB)],
            input="\n".join(map(json.dumps, self.arguments.items())),
            capture_output=True, text=True, env=environment, cwd=self.root, timeout=500,
        )  # fmt: skip
        found = map(json.loads, done.stdout.splitlines())
        answers = {name: Answer(*rest) for name, *rest in found}
        assert answers.keys() == self.arguments.keys(), (done.returncode, done.stderr[-2000:])
        return answers


class Runs:
    """A pickle that runs a command when it is read."""

    def __reduce__(self):
        return os.system, ("touch marker",)


def zipped(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def sized(length):
    """The start of a safetensors file whose header claims this length."""
    return struct.pack("<Q", length) + b'{"__metadata__":{}}'


NO_TENSORS = {
    "a pickle": pickle.dumps(Runs()),
    "a pickle of torch": zipped({"weights": Runs()}),
    "a header of 2**63 bytes": sized(2**63),
    "a header of 2**64 - 1 bytes": sized(2**64 - 1),
    "a header longer than the file": sized(90_000_000),
    "a header that is no text": struct.pack("<Q", 8) + b"\xff" * 8,
    "a header without an end": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "a tensor of 2**80 numbers": sized(0)[:0]
    + (lambda head: struct.pack("<Q", len(head)) + head + bytes(4))(
        b'{"a":{"dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,4]}}'
    ),
}
"""Files that are called .safetensors and are none."""


def tensors(state, said):
    described = said if isinstance(said, str) else json.dumps(said)
    return save(state, metadata={"nearkin": described})


def tiny():
    torch.manual_seed(1)
    return {k: v.contiguous() for k, v in build_backbone("tiny", 16).body.state_dict().items()}


def floats(state, change):
    return {k: change(v) if v.is_floating_point() else v for k, v in state.items()}


ENCODER = {"format": "1", "backbone": "tiny", "image_size": 16, "feature_dim": 128}
ENCODERS = {
    "architecture ../../x": lambda s: tensors(s, {**ENCODER, "backbone": "../../x"}),
    "architecture os.system": lambda s: tensors(s, {**ENCODER, "backbone": "os.system"}),
    "architecture from a hub": lambda s: tensors(s, {**ENCODER, "backbone": "timm/hf-hub:a/b"}),
    "no architecture": lambda s: tensors(s, {"image_size": 16}),
    "pictures of 0 px": lambda s: tensors(s, {**ENCODER, "image_size": 0}),
    "pictures of 100,000 px": lambda s: tensors(s, {**ENCODER, "image_size": 10**5}),
    "pictures of infinite size": lambda s: tensors(s, {**ENCODER, "image_size": float("inf")}),
    "pictures of no size": lambda s: tensors(s, {**ENCODER, "image_size": float("nan")}),
    "a number of 10,000 digits": lambda s: tensors(s, f'{{"image_size": {"9" * 10_000}}}'),
    "a description of another kind": lambda s: tensors(s, "[]"),
    "a description without an end": lambda s: tensors(s, "[" * 100_000),
    "a later format": lambda s: tensors(s, {**ENCODER, "format": "99"}),
    "weights that are not numbers": lambda s: tensors(floats(s, torch.Tensor.log), ENCODER),
    "weights of another shape": lambda s: tensors(floats(s, torch.Tensor.flatten), ENCODER),
    "no weights": lambda s: tensors({"0.0.weight": torch.zeros(1)}, ENCODER),
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
    "a temperature of 0": {"temperature": 0},
    "a temperature that is text": {"temperature": "x"},
    "a calibration by 0": {"calibration": dict.fromkeys(
        ("temperature", "num_pictures", "error_before", "error_after"), 0)},
    "a calibration of another kind": {"calibration": [1]},
    "no details": {"details": {}},
    "no views": {"details": {"augment": "simclr_cifar", "num_views": 0, "seed": 0}},
    "an augmentation ../x": {"details": {"augment": "../x", "num_views": 2, "seed": 0}},
}  # fmt: skip
HEADS = {
    "weights in one row": {"heads.weight": torch.ones(3)},
    "weights for other features": {"heads.weight": torch.ones(3, 64)},
    "weights that are not numbers": {"heads.weight": torch.full((3, 128), torch.nan)},
    "no weights": {},
}
STEERS = "\x1b[31mred\x1b]0;title\x07\nFORGED"
"""A name that, printed as it is, colors what follows, renames the window and begins a line."""
CONFIGS = {
    "a Python object": b"epochs = '!!python/object/apply:os.system [\"touch marker\"]'",
    "a class to be built": b"options._target_ = 'os.system'",
    "a key that is there twice": b"epochs = 1\nepochs = 2",
    "100 MB of nothing": bytes(100_000_000),
    "100,000 brackets": b"options = " + b"[" * 100_000 + b"]" * 100_000,
    "100,000 tables": b"options = " + b"{a=" * 100_000 + b"1" + b"}" * 100_000,
    "a number of 5,000 digits": b"epochs = " + b"9" * 5_000,
    "an end of a string": b"epochs = 1\0",
    "bytes that are no text": b"epochs = \xff",
}
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
    """Two classes of pictures with such names, and as many files that are no pictures."""
    for seed, class_name in enumerate(("<script>", STEERS)):
        files = {name: picture(seed * 99 + row) for row, name in enumerate(HOSTILE_NAMES)}
        folder_of(path / class_name, files)
    for name in HOSTILE_NAMES:
        (path / STEERS / name.replace(".png", ".jpg")).write_bytes(b"no picture")
    return path


def overlapping(members, size):
    """A zip of so many pictures of so many zeros each, which all share the same few bytes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = b"".join(packer.compress(bytes(2**20)) for _ in range(size >> 20)) + packer.flush()
    sizes = (0, len(packed), size, 5, 0)
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 8, 0, 0, *sizes) + b"0.png" + packed
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 8, 0, 0, *sizes, 0, 0, 0, 0, 0)
    entries = b"".join(entry + b"%d.png" % number for number in range(members))
    tail = ("<4s4H2IH", b"PK\5\6", 0, 0, members, members, len(entries), len(local), 0)
    return local + entries + struct.pack(*tail)


def png(side, pixels=b"", extra=b""):
    """A picture of one bit per pixel."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def bombs():
    """Small files that are large pictures."""
    text = b"k\0\0" + zlib.compress(bytes(100_000_000))
    note = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    jpeg = bytearray(picture(kind="JPEG"))
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
        "good.png": picture(),
    }


def other_formats():
    """What Pillow could open if it were asked to, some of it with the help of other programs."""
    red = Image.new("RGB", (16, 16), "red")
    files = {"EPS": b"", "PDF": b"", "PPM": b"", "TGA": b"", "ICNS": b"", "PCX": b"", "SGI": b""}
    if features.check("jpg_2000"):
        files["JPEG2000"] = b""
    for kind in files:
        file = io.BytesIO()
        red.save(file, kind)
        files[kind] = file.getvalue()
    return files | {
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
    """Everything but regular files under the names of pictures; one picture."""
    folder_of(path, {"good.png": picture()})
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


@pytest.fixture(scope="module")
def answers(place):
    """What every command of this file did."""
    commands, state = Commands(place), tiny()
    pictures = folder_of(place / "pictures", {"0.png": picture(0), "1.png": picture(1)})
    encoder = place / "good.safetensors"
    encoder.write_bytes(tensors(state, ENCODER))
    embed = ("embed", encoder)
    commands.add("warm", *embed, pictures, "-o", "warm.npz")
    folder_of(place / "bombs", bombs())
    (place / "bomb.zip").write_bytes(overlapping(8, 200 * 2**20))
    hostile = hostile_folder(place / "hostile")
    formats = {f"{kind}.jpg": content for kind, content in other_formats().items()}
    folder_of(place / "formats", {**formats, "good.png": picture()})
    special_files(place / "special")
    for name in ("bombs", "formats", "special", "bomb.zip"):
        commands.add(name, *embed, place / name, "-o", f"{name}.npy")
    encoders = NO_TENSORS | {name: make(state) for name, make in ENCODERS.items()}
    for number, (name, content) in enumerate(encoders.items()):
        folder_of(place / f"encoder{number}", {"encoder.safetensors": content})
        commands.add(f"encoder: {name}", "embed", f"encoder{number}", pictures, "-o", "x.npz")
    heads = {"heads.weight": torch.ones(3, 128)}
    classifiers = dict(NO_TENSORS)
    classifiers |= {n: tensors(heads, CLASSIFIER | change) for n, change in CLASSIFIERS.items()}
    classifiers |= {name: tensors(weights, CLASSIFIER) for name, weights in HEADS.items()}
    steering = [STEERS, "b", "c"]
    classifiers["sound"] = tensors(heads, CLASSIFIER)
    classifiers["names"] = tensors(heads, CLASSIFIER | {"classes": steering})
    for number, (name, content) in enumerate(classifiers.items()):
        files = {"classifier.safetensors": content, "encoder.safetensors": encoder.read_bytes()}
        folder_of(place / f"classifier{number}", files)
        commands.add(f"classifier: {name}", "assign", f"classifier{number}", pictures)
    for number, (name, content) in enumerate(CONFIGS.items()):
        (place / f"{number}.toml").write_bytes(content)
        commands.add(f"config: {name}", "train", pictures, "--config", f"{number}.toml", "-o", "x")
    train = ("train", hostile, "--epochs", 1, "--batch-size", 8, "-o", "run")
    commands.add("train", *train, "--backbone", "tiny", "--max-bad", 0.5)
    commands.add("bad names", "train", hostile, "-o", "y")
    commands.add("check", "check", hostile)
    commands.add("left out", *embed, hostile, "-o", "hostile.npy")
    (place / "key.toml").write_text(f"{json.dumps(STEERS)} = 1")
    commands.add("key", "train", pictures, "--config", "key.toml", "-o", "x")
    (place / "heading.csv").write_text(f'"{STEERS}",label\n')
    commands.add("heading", *embed, "heading.csv", "-o", "x.npz")
    (place / "name.safetensors").write_bytes(tensors(state, {**ENCODER, "backbone": STEERS}))
    commands.add("architecture", "embed", "name.safetensors", pictures, "-o", "x.npz")
    return commands.run()


def fails(reason):
    return pytest.mark.xfail(strict=True, reason=reason)


def cases(names, failing):
    """Parameters, of which some are known to fail."""
    return [pytest.param(n, marks=fails(failing[n])) if n in failing else n for n in names]


def test_hostile_files_start_nothing_call_nobody_and_are_not_unpickled(answers, place):
    assert answers["warm"].code == answers["classifier: sound"].code == 0
    loaded = "which torch imports at first use"
    quiet = {n: a.events for n, a in answers.items() if n not in ("warm", "train", "check")}
    assert {n: e for n, e in quiet.items() if e} == {}, loaded
    assert not list(place.rglob("marker"))
    with subprocess.Popen([sys.executable, "-c", "import sys, pickle; pickle.load(sys.stdin.buffer)"],
                          stdin=subprocess.PIPE, cwd=place) as reader:  # fmt: skip
        reader.communicate(NO_TENSORS["a pickle"])
    assert (place / "marker").exists()  # it would have
