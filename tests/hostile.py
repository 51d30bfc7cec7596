"""What a stranger may send, and a process that shows what it does to commands."""

import contextlib
import io
import json
import os
import pickle
import resource
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import builders
import jaxtyping
import pytest
import torch
from processes import fork
from safetensors.torch import save
from sources import offline

import nearkin
from nearkin.networks.backbone import build_backbone
from nearkin.toml import to_toml

PACKAGE = Path(nearkin.__file__).parent
ENCODER = {"format": "1", "backbone": "tiny", "image_size": 16, "feature_dim": 128}
"""The header of an encoder's file."""
image = partial(builders.encoded, size=(16, 16))


def folder_of(path, files):
    contents = {name: c.encode() if isinstance(c, str) else c for name, c in files.items()}
    return builders.write_files(path, contents)


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


@cache
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


def run_of(config, data="images", fingerprint="0", **header):
    """The files of a finished run as a stranger hands it out."""
    return {
        "config.toml": to_toml(config, data),
        "encoder.safetensors": tensors(tiny(), {**ENCODER, **header}),
        "summary.json": json.dumps({"metrics": {"encoder": {}}, "left_out": {}}),
        "data.json": json.dumps({"images": 12, "fingerprint": fingerprint, "bad": 0}),
        "images.csv": "path,bytes,content,split\n",
    }


WATCHED = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn",
           "socket.connect", "socket.getaddrinfo", "pickle.find_class"}  # fmt: skip


def peak():
    """The largest memory so far; getrusage inherits that of who started this process."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) * 1024


def run_all(place, commands):
    """Run commands in this process, which is good for nothing else then; write what they did."""
    from nearkin.cli import main

    events = []
    os.chdir(place)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
    sys.path.insert(0, "")  # where a module might be that a file names
    sys.addaudithook(lambda event, args: event in WATCHED and events.append(f"{event} {args}"))
    with open("answers.jsonl", "w") as file:  # noqa: PTH123  (which is an event of its own)
        for name, arguments in commands.items():
            before = peak()
            events.clear()
            texts = [io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in "oe"]
            with contextlib.redirect_stdout(texts[0]), contextlib.redirect_stderr(texts[1]):
                code = main(arguments)
            for text in texts:
                text.flush()
            said = [text.buffer.getvalue().decode() for text in texts]
            file.write(json.dumps([name, code, *said, events, peak() - before]) + "\n")


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
        assert all(len(line) < 2_000 for line in lines)  # with names of images, of 255 bytes each
        return "".join(lines)


Case = tuple[str, Mapping[str, bytes | str], str, Container[int], str]
"""What it is, files of a folder of its own, a command in which HERE is that folder, the exit codes
that it may have, and words of its one line."""
REFUSED = range(2, 6)


def _answer(place, commands):
    jaxtyping.config.update("jaxtyping_disable", True)  # types are not the point
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        offline(patch, place)
        run_all(place, commands)


def answers_to(place, cases):
    """Give all commands to one process, a fork of this one."""
    commands = {}
    for number, (what, files, command, _, _) in enumerate(cases):
        assert what not in commands
        folder_of(place / f"case{number}", files)
        commands[what] = [word.replace("HERE", f"case{number}") for word in command.split()]
    assert os.waitpid(fork(partial(_answer, place, commands)), 0)[1] == 0
    lines = (place / "answers.jsonl").read_text().splitlines()
    answers = {name: Answer(*rest) for name, *rest in map(json.loads, lines)}
    assert answers.keys() == commands.keys()
    return answers


def assert_harmless(place, cases, answers, importing=("warm",)):
    """Nothing ran, started, called or was unpickled, and each command ended as its case says.

    Those that are `importing` are forgiven that torch looks for libraries, matplotlib for fonts.
    """
    assert not list(place.rglob("marker"))
    assert {n: a.events for n, a in answers.items() if a.events and n not in importing} == {}
    for what, _, _, codes, says in cases:
        answer = answers[what]
        assert answer.code in codes, (what, answer)
        assert says in answer.line, (what, answer.line)
        assert answer.out == "" or codes not in ({2}, {5}), (what, answer.out)
