"""Methods, backbones, augmentations and image sources from outside of the package."""

import json
import re
import sys
import tomllib

import numpy as np
import pytest
from builders import write_files
from nearkin_command import run
from small import fork_workers

import nearkin
from nearkin import extensions
from nearkin.errors import UsageError
from nearkin.files import sha256
from nearkin.methods import METHODS, method_class, method_name

METHOD = '''
"""A method of one's own, with a module beside it."""
from typing import Literal

from beside import SCALE
from nearkin.schema import (Dim, Temperature)
from nearkin.method import Method
from nearkin.networks.branch import Branch
from nearkin.objectives import in_batch, unit
from nearkin.types import Step


class Pairs(Method[None]):
    """Each first view must find its second view in the batch.

    Args:
        backbone: The network to train.
        dim: Embedding dimension. Not its width.
        temperature: Softmax temperature.
        sides: Which views are queries.
    """

    def __init__(
        self, backbone, *, dim: Dim = 16, temperature: Temperature = 0.2,
        sides: Literal["one", "both"] = "one",
    ) -> None:
        super().__init__()
        self.temperature = temperature * SCALE
        self.online = Branch(backbone, 16, dim)

    def encode(self, batch):
        return [unit(self.online(view)) for view in batch.views]

    def compute_loss(self, encoded, batch, progress):
        z1, z2 = encoded
        return Step(in_batch(z1, z2, self.temperature), memo=None)


class NoMethod:
    pass


class Unfinished(Method[None]):
    def encode(self, batch):
        return []
'''
PARTS = """
import numpy as np
from torch import nn
from nearkin.data.views import View

weak = View(scale=(0.5, 1.0))

def both():
    return [weak, View(flip=0.5)]

def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def images():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (48, 16, 16, 3), dtype=np.uint8), np.arange(48) % 3

nothing = 3
"""
BAD_OPTIONS = {
    "Positional": ("dim: int = 3", "option dim is not keyword-only"),
    "NoDefault": ("*, dim: int", "option dim has no default"),
    "NoType": ("*, dim=3", "option dim has no type"),
    "TakenOption": ("*, epochs: int = 3", "option epochs has the name of a setting"),
}
"""Methods by the options they take, and why these cannot be."""
NO_MODULES = {
    "broken": "x = 1\nx / 0\n", "wrong": "def f(:\n", "leaves": "raise SystemExit(1)\n"
}  # fmt: skip
NO_METHODS = {
    "my_method.py:Missing": "has no Missing",
    "my_method.py:Pair": "Did you mean Pairs?",
    "my_method.py:NoMethod": "is no subclass of nearkin.method.Method",
    "my_method.py:Unfinished": "does not define compute_loss",
    "missing.py:Pairs": "there is no file",
    "no_such_module:Pairs": "there is no module no_such_module",
    "broken.py:Pairs": "cannot be imported: ZeroDivisionError: division by zero (line 2)",
    "wrong.py:Pairs": "cannot be imported: SyntaxError",
    "leaves.py:Pairs": "cannot be imported: SystemExit",
} | {f"options.py:{name}": says for name, (_, says) in BAD_OPTIONS.items()}
SHORT = ["--epochs", "1", "--batch-size", "16", "--image-size", "16", "--backbone", "tiny", "-q"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a user's own modules and 48 images, and the working directory."""
    modules = {"my_method": METHOD, "beside": "SCALE = 1.0\n", "parts": PARTS}
    write_files(tmp_path, {f"{name}.py": text.encode() for name, text in modules.items()})
    x = np.random.default_rng(0).integers(0, 256, (48, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=x)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings_of(folder):
    return tomllib.loads((folder / "config.toml").read_text())


def forget(path):
    """Import a file anew when it is named again, as a new process does."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == str(path):
            del sys.modules[name]


def test_a_method_in_a_file_is_trained_evaluated_reported_and_resumed(
    folder, capsys, refusal, monkeypatch
):
    fork_workers(monkeypatch)
    train = ["train", "data.npz", "--method", "my_method.py:Pairs", *SHORT, "-o", "run"]
    train += ["--temperature", "0.3", "--sides", "both"]
    assert run(*train, "--devices", "2") == 0
    config = settings_of(folder / "run")
    assert config["method"] == f"{folder / 'my_method.py'}:Pairs"
    assert config["options"] == {"dim": 16, "temperature": 0.3, "sides": "both"}
    (folder / "my_method.py").write_text(METHOD + "# changed\n")
    forget(folder / "my_method.py")
    capsys.readouterr()
    assert run(*(word for word in train if word != "-q"), "--resume") == 0
    assert capsys.readouterr().err.count("has changed since the run was started (SHA-256 ") == 1
    (folder / "my_method.py").unlink()  # the encoder and the tables are enough from here on
    forget(folder / "my_method.py")
    for command in (["evaluate", "run"], ["explore", "run", "--write"]):
        assert run(*command) == 0
    assert nearkin.load(folder / "run").num_features == 128
    assert re.match("error: method .*there is no file", refusal(2, *train, "--resume"))


def test_help_and_config_and_the_page_show_the_options_of_a_method_in_a_file(folder, capsys):
    for command in (["train", "--help", "--method"], ["list", "methods"]):
        assert run(*command, "my_method.py:Pairs") == 0
        text = " ".join(capsys.readouterr().out.replace("│", " ").split())
        for says in ("--dim", "Embedding dimension. ", "A number of at least 0.001."):
            assert says in text
        assert "KEYWORD" not in text
    assert run("list", "settings", "my_method.py:Pairs") == 0
    assert tomllib.loads(capsys.readouterr().out)["options"]["sides"] == "one"


def test_a_method_in_a_module_and_a_class_from_python(folder, refusal, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    cls = method_class("my_method:Pairs")
    short = dict(epochs=1, batch_size=16, image_size=16, backbone="tiny")
    done = nearkin.train("data.npz", method=cls, output=folder / "by-class", **short)
    assert done.summary["title"] == "Pairs"
    assert method_name(METHODS["moco"]) == "moco"

    class Local(METHODS["simclr"]):
        """A class that no file names."""

        def __init__(self, backbone, *, temperature: float = 0.3) -> None:
            super().__init__(backbone, temperature=temperature)

    where = folder / "local"
    done = nearkin.train("data.npz", method=Local, temperature=0.4, output=where, **short)
    assert nearkin.evaluate(done.path, protocol=["labelfree"]).metrics
    extensions._PASSED.clear()  # as in a new process
    assert run("explore", where, "--write") == 0
    again = ["train", "--config", where / "config.toml", "-o", where, "--resume"]
    assert "config.toml names code to run: method is " in refusal(2, *again)
    line = refusal(2, *again, "--trust-remote-code")
    assert "pass it again, as method=Local of nearkin.train" in line


def test_what_is_no_method_is_refused_in_one_line(folder, refusal):
    classes = "".join(
        f"class {name}(Pairs):\n    def __init__(self, backbone, {options}): pass\n"
        for name, (options, _) in BAD_OPTIONS.items()
    )
    for name, text in {**NO_MODULES, "options": f"from my_method import Pairs\n{classes}"}.items():
        (folder / f"{name}.py").write_text(text)
    for method, says in NO_METHODS.items():
        for arguments in (["data.npz", "-o", "run"], ["--help"]):
            assert says in refusal(2, "train", "--method", method, *arguments), method
    assert not (folder / "run").exists()
    unknown = ["--method", "my_method.py:Pairs", "--dimm", 3, "-o", "run"]
    line = refusal(2, "train", "data.npz", *unknown)
    assert "unknown option --dimm for Pairs. Did you mean dim?" in line
    assert line.count("my_method.py") == 1


def test_backbones_augmentations_and_sources_in_files(folder, refusal):
    own = ["--backbone", "parts.py:network", "--augment", "parts.py:both"]
    train = ["train", "parts.py:images", "--epochs", "1", "--batch-size", "16", "-q"]
    assert run(*train, *own, "-o", "run") == 0
    config = settings_of(folder / "run")
    assert config["backbone"] == f"{folder / 'parts.py'}:network"
    assert config["views"] == [{"scale": [0.5, 1.0]}, {"flip": 0.5}]
    assert {*json.loads((folder / "run" / "data.json").read_text())["sources"]} == {"backbone"}
    with pytest.raises(UsageError, match=r"names code to run: backbone is .*parts\.py:network"):
        nearkin.load("run")
    assert nearkin.load("run", trust_remote_code=True).num_features == 8
    (folder / "views.toml").write_text("[[views]]\nscale = [0.5, 1.0]\n[[views]]\nflip = 0.5\n")
    assert run(*train, *own[:3], "views.toml", "-o", "run2") == 0
    first, second = ((folder / name / "metrics.csv").read_bytes() for name in ("run", "run2"))
    assert first == second
    # Named by the command line, the code of a run is trusted; by its files alone, it is not.
    resume = [*train, "-o", "run", "--resume"]
    for command in (["evaluate", "run"], ["embed", "run", "data.npz", "-o", "x.npz"], resume):
        assert refusal(2, *command).endswith("if you trust it, give --trust-remote-code")
        assert run(*command, "--trust-remote-code") == 0
    assert run(*resume, *own) == 0
    for option in ("--backbone", "--augment"):
        command = ("train", "data.npz", option, "parts.py:nothing", "-o", "run3")
        assert "parts.py:nothing" in refusal(2, *command)


def test_a_reference_holds_from_any_folder(folder, monkeypatch):
    reference = extensions.absolute("my_method.py:Pairs")
    cls = method_class("my_method.py:Pairs")
    monkeypatch.chdir("/")
    assert method_class(reference) is cls
    assert extensions.reference_to(cls) == reference
    assert extensions.source_of(METHODS["moco"]) == {}
    with pytest.raises(UsageError, match="there is no file"):
        method_class("my_method.py:Pairs")


def test_an_edited_file_is_read_again_by_the_next_command_and_noted_as_it_ran(folder):
    file, name = folder / "my_method.py", "my_method.py:Pairs"
    assert "Each first view" in nearkin.describe_method(name)
    cls, read = method_class(name), sha256(file)
    file.write_text(METHOD.replace("Each first", "Every first"))
    assert method_class(name) is cls, "a run goes on with what it began with"
    assert extensions.source_of(cls) == {"file": str(file), "sha256": read}
    assert "Every first view" in nearkin.describe_method(name)
    assert extensions.source_of(method_class(name)) == {"file": str(file), "sha256": sha256(file)}


def test_of_two_classes_of_one_name_the_last_is_meant():
    def define():
        class Local(METHODS["simclr"]):
            """A cell of a notebook, which is run again."""

        return Local

    for cls in (define(), define()):
        assert extensions.load_reference(extensions.reference_to(cls), "method") is cls
