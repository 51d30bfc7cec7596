"""`nearkin list`: methods, backbones, encoders, recipes and settings, read from the code.

A method's module docstring holds a title, the paper, the equation as indented lines, its letters,
and its queries and keys (`Queries: ... Keys: ...`); the class docstring, the idea and the options.
"""

import inspect
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markdown import Markdown

from nearkin.choices import Listed
from nearkin.commands.arguments import command
from nearkin.config import GROUPS, TRUST, TrainConfig
from nearkin.encoders.sources import DINOV2, license_of
from nearkin.errors import UsageError
from nearkin.extensions import label
from nearkin.method import Defaults, Method
from nearkin.methods import METHODS, method_class, parameters
from nearkin.networks.backbone import SMALL, timm_names, torchvision_names
from nearkin.run.options import default_options, fitted_options
from nearkin.schema import (
    EMA,
    Value,
    choices,
    described,
    metadata,
    option,
    parameter_docs,
    suggestion,
    types_of,
)
from nearkin.toml import RECIPE, recipe_files, settings_file, toml_value


class Paper(NamedTuple):
    """What the docstring of a method's module says."""

    title: str
    source: str
    equation: str
    letters: str
    queries: str
    keys: str


def paper(cls: type[Method[Any]]) -> Paper | None:
    """What the docstring of a method's module says, part by part; None if it has other parts."""
    title, *rest = (inspect.getdoc(inspect.getmodule(cls)) or "").split("\n\n")
    equation = [part for part in rest if part.startswith("    ")]
    letters = [part.replace("\n", " ") for part in rest if part not in equation]
    if not equation or len(letters) < 2 or not re.match(r"Queries: .*\. Keys: ", letters[-1]):
        return None
    source, matched = letters.pop(0), letters.pop()
    queries, keys = matched.removeprefix("Queries: ").removesuffix(".").split(". Keys: ")
    return Paper(
        title.rstrip("."), source, "\n\n".join(equation), " ".join(letters), queries, keys
    )


def idea(cls: type) -> str:
    """The sentence that a class's docstring starts with."""
    return _remarks(cls)[0]


def _remarks(cls: type) -> list[str]:
    """The paragraphs of a class's docstring, each in one line."""
    text = (inspect.getdoc(cls) or "").partition("\n\nArgs:")[0]
    return [paragraph.replace("\n", " ") for paragraph in text.split("\n\n")]


def list_methods() -> list[str]:
    """Return the names of all methods, as `nearkin.train` takes them."""
    return list(METHODS)


@command
def list_names(what: Listed, name: str = "") -> dict[str, str] | list[str]:
    """List what there is, or show one thing.

    Args:
        what: methods: their ideas, or all about the one that is named. backbones: networks that
            can be trained. pretrained: encoders with weights, and their licenses. recipes:
            settings of papers, or one as it is. settings: those of a method with their defaults,
            for --config.
        name: The method or the recipe; of backbones and pretrained, what names contain.
    """
    match what:
        case "methods":
            ideas = {each: idea(method_class(each)) for each in METHODS}
            return _in_terminal(describe_method(name)) if name else ideas
        case "backbones":
            return list_backbones(name)
        case "pretrained":
            return {each: license_of(each) for each in list_pretrained(name)}
        case "recipes":
            if not name:
                return list_recipes()
            file = settings_file(Path(RECIPE + name.removeprefix(RECIPE)))
            return file.read_text(encoding="utf-8").splitlines()
        case "settings":
            return list_settings(name or TrainConfig.method).rstrip("\n").splitlines()


def _in_terminal(markdown: str) -> list[str]:
    console = Console(highlight=False, color_system=None)
    with console.capture() as text:
        console.print(Markdown(markdown))
    return [line.rstrip() for line in text.get().splitlines()]


@command
def describe_method(method: str, *more: Any) -> str:
    """Return all there is to say about a method, as Markdown: equation, options, paper.

    Args:
        method: Its name.
        more: Sections to add.

    Raises:
        UsageError: If there is no such method.
    """
    cls = method_class(method)
    about = paper(cls)
    needed = " --known A,B" * cls.uses_labels + " --teacher ENCODER" * cls.uses_teacher
    sections = [
        f"# {about.title if about else label(method)}",
        *_remarks(cls),
        _views(cls),
        f"    nearkin train DATA --method {method}{needed}",
    ]
    if about:
        sections += ["## Equation", about.equation, about.letters]
        sections += [f"Queries: {about.queries}. Keys: {about.keys}."]
    sections += ["## What `commit` writes", written(cls), "## Options", *_option_table(cls)]
    if about:
        link = r"[arXiv:\1](https://arxiv.org/abs/\1)"
        sections += ["## Paper", re.sub(r"arXiv:(\d+\.\d+)", link, about.source)]
    means = ", ".join(f"{key} {value}" for key, value in _automatic(cls.defaults).items())
    sections += ["## Settings", f"`auto` is: {means}."]
    if not more and method in METHODS:
        sections += [
            f"Recipes and measured results are in docs/methods/{method}.md in the repository."
        ]
    return "\n\n".join([*sections, *more]) + "\n"


def _views(cls: type[Method[Any]]) -> str:
    """What a method is given of each image."""
    kinds = [view if isinstance(view, str) else view.kind for view in cls.views]
    views = "one view" if len(kinds) == 1 else f"{len(kinds)} views"
    if set(kinds) != {"strong"}:
        views += f" ({', '.join(kinds)})"
    more = ", and more if `--num-views` or the augmentation say so" if cls.more_views else ""
    labels = ", and the labels of known classes" if cls.uses_labels else ""
    teacher = ", and a teacher's features of each view" if cls.uses_teacher else ""
    return f"It takes {views} of each image{more}{labels}{teacher}."


def written(cls: type[Method[Any]]) -> str:
    """What a method's `commit` writes, in a sentence."""
    return "Nothing." if cls.commit is Method.commit else inspect.getdoc(cls.commit) or ""


class Option(NamedTuple):
    """An option of a method, as it is typed."""

    name: str
    meaning: str
    default: Value
    """Of the constructor: the paper's."""
    here: Value
    """Of `nearkin train`."""


def options(cls: type[Method[Any]]) -> dict[str, Option]:
    """The options of a method, from its constructor."""
    here, kinds, notes = default_options(cls), types_of(cls.__init__), parameter_docs(cls)
    found = {}
    for key, parameter in parameters(cls).items():
        meaning = f"{notes.get(key, '')} {_values(kinds[key])}.".strip()
        if average := metadata(kinds[key], EMA):
            meaning += _half_lives({parameter.default, here[key]}, average.unit)
        found[key] = Option(option(key), meaning, parameter.default, here[key])
    return found


def _option_table(cls: type[Method[Any]]) -> list[str]:
    """The options of a method as a table, and a remark on it."""
    rows = []
    for each in options(cls).values():
        own = "" if each.here == each.default else toml_value(each.here)
        defaults = toml_value(each.default), own
        rows.append([f"`{each.name}`", each.meaning, *(text.strip('"') for text in defaults)])
    if not rows:
        return ["None."]
    remark = (
        "Defaults are those of the paper or its code. Where `nearkin train` has one of its own, "
        "it is under *here*."
    )
    if fitted := ", ".join(f"`{option(key)}`" for key in fitted_options(cls)):
        remark += f" Left alone, these shrink to what the images and the batch allow: {fitted}."
    return [table(["option", "meaning", "default", "here"], rows), remark]


def _values(kind: Any) -> str:
    """What an option can be, as the end of its description."""
    if choices(kind):
        return f"One of {', '.join(map(str, choices(kind)))}"
    text = described(kind)
    return text[0].upper() + text[1:]


def _half_lives(momenta: set[float], unit: str) -> str:
    """After how many steps, or visits, half of the past is left."""
    moving = sorted((momentum for momentum in momenta if 0 < momentum < 1), reverse=True)
    lives = [f"{math.log(0.5) / math.log(momentum):.3g} at {momentum:g}" for momentum in moving]
    return f" Half-life in {unit}: {', '.join(lives)}." if lives else ""


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _automatic(of: Defaults) -> dict[str, str]:
    """What `auto` means for settings that depend on the method."""
    large, small = (
        augment if isinstance(augment, str) else f"{len(augment)} views of its own"
        for augment in (of.augment, of.augment_small)
    )
    return {
        "optimizer": of.optimizer,
        "lr": f"{of.lr:g} for a batch of 256",
        "weight_decay": f"{of.weight_decay:g}",
        "augment": f"{large}, below 64 px {small}",
    }


def list_recipes() -> dict[str, str]:
    """Return the title of each recipe by its name, as `--config` takes it."""
    texts = {name: file.read_text(encoding="utf-8") for name, file in recipe_files().items()}
    return {RECIPE + name: text.splitlines()[0][2:] for name, text in texts.items()}


@command
def list_settings(name: str = "simclr") -> str:
    """Return every setting of a training with its default, as commented TOML for `--config`.

    Args:
        name: A method.

    Raises:
        UsageError: If there is no such method.
    """
    cls = method_class(name)
    means, notes = _automatic(cls.defaults), parameter_docs(TrainConfig)
    lines = [f"# {label(name)}: {idea(cls)}", ""]
    default = {**vars(TrainConfig()), "method": name}
    for title, settings in GROUPS.items():
        lines += [f"# --- {title} ---", ""]
        for key in (each for each in settings if each in default and each != TRUST):
            here = f" Here auto is {means[key]}." if key in means else ""
            lines += [f"# {notes[key]}{here}", f"{key} = {toml_value(default[key])}", ""]
    lines += ["[options]"]
    for key, each in options(cls).items():
        lines.append(f"# {each.meaning} Typed as {each.name}.")
        mark = ""
        if key in fitted_options(cls):  # as an explicit value it would have to fit
            lines.append("# Left alone, it shrinks to what the images and the batch allow.")
            mark = "# "
        lines.append(f"{mark}{key} = {toml_value(each.here)}")
    return "\n".join(lines) + "\n"


@command
def list_backbones(pattern: str = "") -> list[str]:
    """Return the names of networks that can be trained; those that contain `pattern`.

    Raises:
        UsageError: If no name contains it.
    """
    names = [*SMALL, *(f"torchvision/{name}" for name in torchvision_names())]
    return _matching(pattern, [*names, *(f"timm/{name}" for name in timm_names())], "backbones")


@command
def list_pretrained(pattern: str = "") -> list[str]:
    """Return the names of encoders with weights, as `nearkin.load` takes them.

    For the argument and errors see `list_backbones`.
    """
    import timm

    names = [*DINOV2, *(f"torchvision:{name}" for name in torchvision_names())]
    names += (
        f"timm:{name}"
        for name in timm.list_pretrained()
        if timm.get_pretrained_cfg(name).crop_mode != "border"  # which `timm_view` refuses
    )
    return _matching(pattern, names, "pretrained")


def _matching(pattern: str, names: Sequence[str], what: Listed) -> list[str]:
    if matching := [name for name in names if pattern in name]:
        return matching
    hint = suggestion(pattern, names)
    raise UsageError(f"no name contains {pattern}.{hint} `nearkin list {what}` lists them")
