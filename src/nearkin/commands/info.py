"""What the one-screen commands show: backbones, a method's settings, this machine."""

import inspect
import platform
import sys
from dataclasses import fields

import torch

from nearkin.config import TrainConfig, Value, option, toml_value
from nearkin.distributed import available_cpus, choose_device, device_name, native_precision
from nearkin.methods import method_class
from nearkin.networks.backbone import SMALL, timm_names, torchvision_names
from nearkin.run.settings.options import default_options, fitted_options
from nearkin.version import __version__


def idea(cls: type) -> str:
    """The sentence that a class's docstring starts with."""
    return (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")


def backbone_lines(pattern: str) -> list[str]:
    """Names of networks, as `--backbone` takes them."""
    names = [
        *SMALL,
        *(f"torchvision/{name}" for name in torchvision_names()),
        *(f"timm/{name}" for name in timm_names()),
    ]
    return [name for name in names if pattern in name]


def config_lines(method: str) -> list[str]:
    """A method's settings as commented TOML."""
    cls, means = method_class(method), automatic(method)
    notes = documented(TrainConfig)
    lines = [f"# {method}: {idea(cls)}", ""]
    for entry in fields(TrainConfig):
        if entry.name != "options":
            value: Value = method if entry.name == "method" else getattr(TrainConfig, entry.name)
            here = f" Here auto is {means[entry.name]}." if entry.name in means else ""
            lines += [f"# {notes[entry.name]}{here}", f"{entry.name} = {toml_value(value)}", ""]
    lines += ["[options]"]
    notes = arguments(cls)
    for name, value in default_options(cls).items():
        lines.append(f"# {notes[name]} Typed as {option(name)}.")
        fitted = name in fitted_options(cls)  # given, it would have to fit
        if fitted:
            lines.append("# Left alone, it shrinks to what the images and the batch allow.")
        mark = "# " if fitted else ""
        lines.append(f"{mark}{name} = {toml_value(value)}")
    return lines


def automatic(method: str) -> dict[str, str]:
    """What `auto` means for settings that depend on the method."""
    chosen = method_class(method).defaults
    return {
        "optimizer": chosen.optimizer,
        "lr": f"{chosen.lr:g} for a batch of 256",
        "weight_decay": f"{chosen.weight_decay:g}",
        "augment": f"{chosen.augment}, below 64 px {chosen.augment_small}",
    }


def documented(cls: type) -> dict[str, str]:
    """The sentence below each field of a data class."""
    import ast
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    notes = {}
    for entry, note in zip(body.body, body.body[1:], strict=False):
        if isinstance(entry, ast.AnnAssign) and isinstance(note, ast.Expr):
            assert isinstance(entry.target, ast.Name)
            assert isinstance(note.value, ast.Constant)
            notes[entry.target.id] = str(note.value.value)
    return notes


def arguments(cls: type) -> dict[str, str]:
    """The descriptions under `Args:` in a class's docstring."""
    _, _, section = (inspect.getdoc(cls) or "").partition("Args:\n")
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if not line.strip():
            break
        if line.startswith("     "):
            found[name] += " " + line.strip()
        else:
            name, _, text = line.strip().partition(": ")
            found[name] = text
    return found


def doctor_lines() -> list[str]:
    """Versions and what this machine can do."""
    from importlib.metadata import version

    device = choose_device("auto")
    packages = ("torch", "torchvision", "timm", "numpy", "Pillow", "scikit-learn")
    return [
        f"nearkin    {__version__}",
        f"python     {sys.version.split()[0]} on {platform.platform()}",
        *(f"{name:10} {version(name)}" for name in packages),
        f"device     {device_name(device)}",
        f"precision  {str(native_precision(device)).removeprefix('torch.')} is native here",
        f"processors {available_cpus()} may be used; torch uses {torch.get_num_threads()} threads",
    ]
