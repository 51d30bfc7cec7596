"""What a stranger may send: payloads, and a process that shows what they do to a command."""

import io
import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save

import nearkin
from nearkin.config import to_toml
from nearkin.networks.backbone import build_backbone

PACKAGE = Path(nearkin.__file__).parent
GIB = 2**30
ENCODER = {"format": "1", "backbone": "tiny", "image_size": 16, "feature_dim": 128}
"""The header of an encoder's file."""


def image(seed=0, size=(16, 16), kind="PNG"):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def folder_of(path, files):
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return path


class Runs:
    """A pickle that runs a command when it is read."""

    def __reduce__(self):
        return os.system, ("touch marker",)


PICKLE = pickle.dumps(Runs())


def zipped(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def tensors(state, description):
    described = description if isinstance(description, str) else json.dumps(description)
    return save(state, metadata={"nearkin": described})


def tiny():
    """The weights that belong to the header `ENCODER`."""
    torch.manual_seed(1)
    return {k: v.contiguous() for k, v in build_backbone("tiny", 16).body.state_dict().items()}


THEIRS = """
open("marker", "w").close()
from nearkin.data.views import View
from nearkin.methods import METHODS
from nearkin.networks.backbone import SMALL
Net, Method, VIEWS = SMALL["tiny"], METHODS["simclr"], View()
def load(): return "images"
"""
"""A module that leaves a mark when it is imported, and then is what was asked for."""


def work_place(place):
    """Two classes of six images, an encoder, and the module that must not be imported."""
    images = {f"{name}{row}.png": image(ord(name) + 9 * row) for name in "ab" for row in range(6)}
    folder_of(place, {f"images/{name[0]}/{name}": content for name, content in images.items()})
    encoder = tensors(tiny(), ENCODER)
    return folder_of(place, {"theirs.py": THEIRS, "good/encoder.safetensors": encoder})


def run_of(place, name, config, data="images", **header):
    """A finished run as a stranger hands it out."""
    files = {
        "config.toml": to_toml(config, data),
        "encoder.safetensors": tensors(tiny(), {**ENCODER, **header}),
        "summary.json": json.dumps({"measures": {"encoder": {}}, "left_out": {}}),
        "data.json": json.dumps({"images": 12, "fingerprint": "0", "bad": 0}),
    }
    return folder_of(place / name, files).name


PROGRAM = """
import contextlib, io, json, os, resource, sys
memory = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
os.umask(0o077)
WATCHED = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn",
           "socket.connect", "socket.getaddrinfo", "pickle.find_class"}
events = []
sys.addaudithook(lambda event, args: event in WATCHED and events.append(f"{event} {args}"))
from nearkin.cli import main

def peak():
    with open("/proc/self/status") as status:  # getrusage inherits the peak of who started this
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

for line in sys.stdin:
    name, arguments = json.loads(line)
    before = peak()
    events.clear()
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
        out.flush(), err.flush()
    texts = [file.buffer.getvalue().decode() for file in (out, err)]
    print(json.dumps([name, code, *texts, events, peak() - before]), file=sys.__stdout__, flush=True)
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

    @property
    def line(self):
        """The one line of a failure; '' of a success."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == (self.code != 0), self.err
        assert self.code != 1, self.err
        assert all(len(line) < 1_000 for line in lines)
        return "".join(lines)

    def refused(self, code):
        """The one line of a refusal."""
        assert (self.code, self.out) == (code, ""), (self.code, self.out, self.err)
        return self.line


class Commands:
    """Commands to be run by one process, since loading torch takes longer than all of them."""

    def __init__(self, root):
        self.root = root
        self.arguments = {}

    def add(self, name, *arguments):
        assert name not in self.arguments
        self.arguments[name] = [str(argument) for argument in arguments]

    def run(self, memory=24 * GIB):
        homes = {"XDG_CACHE_HOME": "cache", "TORCH_HOME": "torch", "HF_HOME": "hf"}
        environment = os.environ | {name: str(self.root / home) for name, home in homes.items()}
        environment |= {"PYTHONPATH": str(PACKAGE.parent), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(memory)],
            input="\n".join(map(json.dumps, self.arguments.items())),
            capture_output=True, text=True, env=environment, cwd=self.root, timeout=500,
        )  # fmt: skip
        lines = map(json.loads, done.stdout.splitlines())
        answers = {name: Answer(*rest) for name, *rest in lines}
        assert answers.keys() == self.arguments.keys(), (done.returncode, done.stderr[-2000:])
        return answers
