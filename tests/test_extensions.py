"""Methods, backbones, augmentations and image sources from outside of the package."""

import inspect
import json
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import fields
from types import UnionType
from typing import Any, Union, get_origin, get_type_hints

import numpy as np
import pytest
import torch

import nearkin
from nearkin import extensions
from nearkin.cli import main
from nearkin.config import ClassifyConfig, DiscoverConfig, EmbedConfig, TrainConfig
from nearkin.errors import UsageError
from nearkin.methods import METHODS, method_class, method_name

METHOD = '''
"""A method of one's own, with a module beside it."""
from typing import Literal

from beside import SCALE
from nearkin.config import Dim, Temperature
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


class Positional(Pairs):
    def __init__(self, backbone, dim: int = 3) -> None:
        super().__init__(backbone, dim=dim)


class NoDefault(Pairs):
    def __init__(self, backbone, *, dim: int) -> None:
        super().__init__(backbone, dim=dim)


class NoType(Pairs):
    def __init__(self, backbone, *, dim=3) -> None:
        super().__init__(backbone, dim=dim)


class TakenOption(Pairs):
    def __init__(self, backbone, *, epochs: int = 3) -> None:
        super().__init__(backbone)
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
SHORT = ["--epochs", "1", "--batch-size", "16", "--image-size", "16", "--backbone", "tiny", "-q"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a user's own modules and 48 images, and the working directory."""
    (tmp_path / "my_method.py").write_text(METHOD)
    (tmp_path / "beside.py").write_text("SCALE = 1.0\n")
    (tmp_path / "parts.py").write_text(PARTS)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (48, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(48) % 3)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def forget(path):
    """Import a file anew when it is named again, as a new process does."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == str(path):
            del sys.modules[name]


def refused(capsys, *arguments):
    """The one line of a command that ends with code 2, and prints nothing else."""
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    lines = [*out.splitlines(), *err.splitlines()]
    assert len(lines) == 1, lines
    return lines[0]


def test_a_method_in_a_file_is_trained_evaluated_reported_and_resumed(folder, capsys):
    train = ["train", "data.npz", "--method", "my_method.py:Pairs", *SHORT, "-o", "run"]
    train += ["--temperature", "0.3", "--sides", "both"]
    assert main([*train, "--devices", "2"]) == 0
    config = tomllib.loads((folder / "run" / "config.toml").read_text())
    assert config["method"] == f"{folder / 'my_method.py'}:Pairs"
    assert config["options"] == {"dim": 16, "temperature": 0.3, "sides": "both"}
    (folder / "my_method.py").write_text(METHOD + "# changed\n")
    forget(folder / "my_method.py")
    capsys.readouterr()
    assert main([*(word for word in train if word != "-q"), "--resume"]) == 0
    log = capsys.readouterr().err
    assert log.count("has changed since the run was started (SHA-256 ") == 1
    (folder / "my_method.py").unlink()  # the encoder and the tables are enough from here on
    forget(folder / "my_method.py")
    for command in (["evaluate", "run"], ["report", "run"]):
        assert main(command) == 0
    assert nearkin.load(folder / "run").dim == 128
    capsys.readouterr()
    line = refused(capsys, *train, "--resume")
    assert line.startswith("error: method ")
    assert "there is no file" in line


def test_help_and_config_and_the_page_show_the_options_of_a_method_in_a_file(folder, capsys):
    for command in (
        ["train", "--method", "my_method.py:Pairs", "--help"],
        ["methods", "my_method.py:Pairs"],
    ):
        assert main(command) == 0
        text = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "--dim" in text
        assert "Embedding dimension. " in text
        assert "A number, at least 0.001." in text
        assert "KEYWORD" not in text
    assert main(["config", "my_method.py:Pairs"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["options"]["sides"] == "one"


def test_a_method_in_a_module_and_a_class_from_python(folder, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    cls = method_class("my_method:Pairs")
    short = dict(epochs=1, batch_size=16, image_size=16, backbone="tiny")
    run = nearkin.train("data.npz", method=cls, out=folder / "by-class", **short)
    assert run.summary["title"] == "Pairs"
    assert method_name(METHODS["moco"]) == "moco"

    class Local(METHODS["simclr"]):
        """A class that no file names."""

        def __init__(self, backbone, *, temperature: float = 0.3) -> None:
            super().__init__(backbone, temperature=temperature)

    where = folder / "local"
    run = nearkin.train("data.npz", method=Local, temperature=0.4, out=where, **short)
    assert nearkin.evaluate(run.path).measures
    extensions._PASSED.clear()  # as in a new process
    assert main(["report", str(where)]) == 0
    capsys.readouterr()
    again = ["train", "--config", where / "config.toml", "-o", where, "--resume"]
    assert "config.toml names code to run: method is " in refused(capsys, *again)
    line = refused(capsys, *again, "--trust-remote-code")
    assert "pass it again, as method=Local of nearkin.train" in line


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("my_method.py:Missing", "has no Missing"),
        ("my_method.py:Pair", "Did you mean Pairs?"),
        ("my_method.py:NoMethod", "is no subclass of nearkin.method.Method"),
        ("my_method.py:Unfinished", "does not define compute_loss"),
        ("my_method.py:Positional", "option dim is not keyword-only"),
        ("my_method.py:NoDefault", "option dim has no default"),
        ("my_method.py:NoType", "option dim has no type"),
        ("my_method.py:TakenOption", "option epochs has the name of a setting"),
        ("missing.py:Pairs", "there is no file"),
        ("no_such_module:Pairs", "there is no module no_such_module"),
        ("broken.py:Pairs", "cannot be imported: ZeroDivisionError: division by zero (line 2)"),
        ("wrong.py:Pairs", "cannot be imported: SyntaxError"),
        ("leaves.py:Pairs", "cannot be imported: SystemExit"),
    ],
)
def test_what_is_no_method_is_refused_in_one_line(method, says, folder, capsys):
    (folder / "broken.py").write_text("x = 1\nx / 0\n")
    (folder / "wrong.py").write_text("def f(:\n")
    (folder / "leaves.py").write_text("raise SystemExit(1)\n")
    for arguments in (["data.npz", "-o", "run"], ["--help"]):
        assert says in refused(capsys, "train", "--method", method, *arguments)
    assert not (folder / "run").exists()


def test_an_unknown_option_of_a_method_in_a_file_names_the_file_once(folder, capsys):
    arguments = ["train", "data.npz", "--method", "my_method.py:Pairs", "--dimm", 3, "-o", "run"]
    line = refused(capsys, *arguments)
    assert "unknown option --dimm for Pairs. Did you mean dim?" in line
    assert line.count("my_method.py") == 1


def test_backbones_augmentations_and_sources_in_files(folder, capsys):
    own = ["--backbone", "parts.py:network", "--augment", "parts.py:both"]
    short = ["--epochs", "1", "--batch-size", "16", "-q"]
    code = main(["train", "parts.py:images", *own, *short, "-o", "run"])
    assert code == 0, capsys.readouterr().err
    config = tomllib.loads((folder / "run" / "config.toml").read_text())
    assert config["backbone"] == f"{folder / 'parts.py'}:network"
    assert config["views"] == [{"scale": [0.5, 1.0]}, {"flip": 0.5}]
    assert {*json.loads((folder / "run" / "data.json").read_text())["sources"]} == {"backbone"}
    with pytest.raises(UsageError, match=r"names code to run: backbone is .*parts\.py:network"):
        nearkin.load("run")
    assert nearkin.load("run", trust_remote_code=True).dim == 8
    (folder / "views.toml").write_text("[[views]]\nscale = [0.5, 1.0]\n[[views]]\nflip = 0.5\n")
    again = ["--backbone", "parts.py:network", "--augment", "views.toml"]
    assert main(["train", "parts.py:images", *again, *short, "-o", "run2"]) == 0
    metrics = [(folder / run / "metrics.csv").read_bytes() for run in ("run", "run2")]
    assert metrics[0] == metrics[1]
    capsys.readouterr()
    # Named by the command line, the code of a run is trusted; by its files alone, it is not.
    resume = ["train", "parts.py:images", *short, "-o", "run", "--resume"]
    for command in (["evaluate", "run"], ["embed", "run", "data.npz", "-o", "x.npz"], resume):
        line = refused(capsys, *command)
        assert "if you trust it, give --trust-remote-code" in line
        assert main([*command, "--trust-remote-code"]) == 0
        capsys.readouterr()
    assert main(["train", "parts.py:images", *own, *short, "-o", "run", "--resume"]) == 0
    capsys.readouterr()
    for option in ("--backbone", "--augment"):
        assert main(["train", "data.npz", option, "parts.py:nothing", "-o", "run3"]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("error: ")
        assert "parts.py:nothing" in line


@pytest.fixture
def install(tmp_path_factory, monkeypatch):
    """Leaves a package as an installer does: a module and its entry points."""

    def install(points):
        site = tmp_path_factory.mktemp("site")
        (site / "their_parts.py").write_text(
            METHOD.replace("from beside import SCALE", "SCALE = 1") + PARTS
        )
        info = site / "their_parts-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-parts\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(points))
        monkeypatch.syspath_prepend(str(site))
        extensions._declared.cache_clear()

    yield install
    monkeypatch.undo()
    extensions._declared.cache_clear()


def test_an_installed_package_declares_its_parts_as_entry_points(folder, install, capsys):
    settings = ["--method", "pairs", "--temperature", "0.5"]
    settings += ["--backbone", "theirs", "--augment", "both"]
    train = ["train", "noise", *settings, "--epochs", "1", "--batch-size", "16", "-q", "-o", "run"]
    assert "unknown method pairs" in refused(capsys, *train)
    install(
        """
        [nearkin.methods]
        pairs = their_parts:Pairs
        [nearkin.backbones]
        theirs = their_parts:network
        [nearkin.augmentations]
        both = their_parts:both
        [nearkin.sources]
        noise = their_parts:images
        """
    )
    assert main(train) == 0
    assert tomllib.loads((folder / "run" / "config.toml").read_text())["method"] == "pairs"
    capsys.readouterr()
    assert main(["methods"]) == 0
    assert "pairs " in capsys.readouterr().out


def test_a_name_that_is_taken_is_refused_and_its_owners_are_named(folder, install, capsys):
    install("[nearkin.methods]\nmoco = their_parts:Pairs\n")
    for command in (["train", "data.npz", "--method", "moco", *SHORT], ["methods"]):
        line = refused(capsys, *command)
        assert line.startswith("error: the method name moco is taken by nearkin and their-parts")


def test_a_reference_holds_from_any_folder(folder, monkeypatch):
    reference = extensions.absolute("my_method.py:Pairs")
    cls = method_class("my_method.py:Pairs")
    monkeypatch.chdir("/")
    assert method_class(reference) is cls
    assert extensions.reference_to(cls) == reference
    assert extensions.source_of(METHODS["moco"]) == {}
    with pytest.raises(UsageError, match="there is no file"):
        method_class("my_method.py:Pairs")


def test_of_two_classes_of_one_name_the_last_is_meant():
    def define():
        class Local(METHODS["simclr"]):
            """A cell of a notebook, which is run again."""

        return Local

    for cls in (define(), define()):
        assert extensions.load_reference(extensions.reference_to(cls), "method") is cls


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (nearkin.train, TrainConfig),
        (nearkin.discover, DiscoverConfig),
        (nearkin.classify, ClassifyConfig),
    ],
    ids=["train", "discover", "classify"],
)
def test_the_signatures_of_python_have_every_setting_with_its_default(function, settings):
    parameters = inspect.signature(function).parameters
    for entry in fields(settings):
        if entry.name != "options":
            assert parameters[entry.name].default == entry.default, entry.name
    own = {"data", "out", "resume", "overwrite", "reporter"}
    own |= {"method_options"} if "options" in settings.__dataclass_fields__ else set()
    assert parameters.keys() == {entry.name for entry in fields(settings)} | own


def test_the_signature_of_embed_has_every_setting_with_its_default():
    parameters = inspect.signature(nearkin.embed).parameters
    settings = {entry.name: entry.default for entry in fields(EmbedConfig)}
    assert settings.pop("encoder") == ""  # which the function always needs
    assert {name: parameters[name].default for name in settings} == settings
    own = {"encoder", "data", "out", "output", "resume", "overwrite", "backbone", "reporter"}
    assert parameters.keys() == settings.keys() | own


def test_every_name_of_the_package_is_there_and_importing_it_loads_no_torch():
    program = "import sys, nearkin; assert 'torch' not in sys.modules; " + "".join(
        f"nearkin.{name}; " for name in dir(nearkin)
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert {"objectives", "memory", "methods", "transforms", "testing"} <= {*dir(nearkin)}
    with pytest.raises(AttributeError, match="nearkin has no trian"):
        nearkin.trian  # noqa: B018


OTHERWISE = {  # modules of the package have the names of these verbs
    "index": "build_index",
    "report": "write_report",
    "methods": "list_methods",
    "backbones": "list_backbones",
    "config": "default_settings",
}


def test_every_verb_is_a_function_with_typed_arguments_and_one_type_of_result():
    from nearkin.cli import app

    verbs = [name for name in app if not name.startswith("-")]
    assert {"train", "embed", "doctor", *OTHERWISE} <= set(verbs)
    for verb in verbs:
        function = getattr(nearkin, OTHERWISE.get(verb, verb))
        hints = get_type_hints(function)
        signature = inspect.signature(function)
        assert hints.keys() == {*signature.parameters, "return"}, verb
        returned = hints["return"]
        assert returned is not Any, verb
        assert get_origin(returned) not in (Union, UnionType), verb


def test_what_is_listed_for_people_is_there_as_values():
    assert "moco" in nearkin.list_methods()
    assert nearkin.describe_method("moco").startswith("# MoCo")
    assert "timm/resnet18" in nearkin.list_backbones("resnet18")
    assert "timm:resnet18.a1_in1k" in nearkin.list_backbones("resnet18", pretrained=True)
    assert 'method = "moco"' in nearkin.default_settings("moco")
    assert nearkin.doctor()["torch"] == torch.__version__.partition("+")[0]
