"""A page per method, made from its code: docstrings, constructor, recipes, measured results.

A method's module docstring holds a title, the paper, the equation as indented lines, its letters,
and what it matches with what (`Queries: ... Keys: ...`); its class the idea and the options.
"""

import inspect
import io
import math
import re
import textwrap
import tomllib
import typing
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.markdown import Markdown

from nearkin.commands.info import arguments, automatic, idea
from nearkin.config import EMA, Range, metadata, option, spelled, toml_value
from nearkin.method import Method
from nearkin.methods import METHODS, method_class, option_types, parameters
from nearkin.run.settings.options import default_options, fitted_options

REPOSITORY: Final = Path(__file__).parents[3]
"""Where recipes and measured results are, if the package is used from a clone."""


class Paper(NamedTuple):
    """What the docstring of a method's module says."""

    title: str
    source: str
    equation: str
    letters: str
    queries: str
    keys: str


def paper(cls: type[Method[Any]]) -> Paper:
    """What the docstring of a method's module says, part by part."""
    title, source, *rest = (inspect.getdoc(inspect.getmodule(cls)) or "").split("\n\n")
    equation = [part for part in rest if part.startswith("    ")]
    *letters, matched = (part.replace("\n", " ") for part in rest if part not in equation)
    queries, keys = matched.removeprefix("Queries: ").removesuffix(".").split(". Keys: ")
    source = source.replace("\n", " ")
    return Paper(
        title.rstrip("."), source, "\n\n".join(equation), " ".join(letters), queries, keys
    )


def method_lines(name: str = "") -> list[str]:
    """Each method in a sentence, or the page of one.

    Raises:
        UsageError: If there is no method of that name.
    """
    if name:
        console = Console(file=io.StringIO(), highlight=False, color_system=None)
        with console.capture() as text:
            console.print(Markdown(page(name)))
        return [line.rstrip() for line in text.get().splitlines()]
    width = max(map(len, METHODS))
    return [f"{name:{width}}  {idea(cls)}" for name, cls in METHODS.items()]


def write_pages(root: Path = REPOSITORY) -> None:
    """Write docs/methods: a page per method, and their table."""
    for name, text in pages(root).items():
        (root / "docs" / "methods" / name).write_text(text, encoding="utf-8")


def pages(root: Path) -> dict[str, str]:
    """The files of docs/methods."""
    return {"README.md": overview()} | {f"{name}.md": page(name, root) for name in METHODS}


def overview() -> str:
    """The table of all methods."""
    rows = []
    for name, cls in METHODS.items():
        about = paper(cls)
        link = f"[`{name}`]({name}.md)"
        rows.append([link, idea(cls), about.queries, about.keys, written(cls)])
    table = _table(["method", "idea", "queries", "keys", "what `commit` writes"], rows)
    return f"{INTRODUCTION}\n{table}\n"


INTRODUCTION: Final = """\
# Methods

A page per method, made from its code by `make docs`; `nearkin methods NAME` prints it.

Nearly all of them are one equation. A query is matched against keys, and the loss is the
cross-entropy between that match and what it should have been:

    loss(q) = - sum_j  target_j  log softmax_j( q . k_j / temperature )

In the equations `a.b` is an inner product, `unit` scales to length one, and a loss for one query
or image stands for its mean over the batch.
"""


def page(name: str, root: Path = REPOSITORY) -> str:
    """All there is to say about a method, as Markdown.

    Raises:
        UsageError: If there is no method of that name.
    """
    cls = method_class(name)
    about = paper(cls)
    _, *remarks = (inspect.getdoc(cls) or "").partition("\n\nArgs:")[0].split("\n\n")
    sections = [
        f"# {about.title}",
        idea(cls),
        *(remark.replace("\n", " ") for remark in remarks),
        takes(cls),
        f"    nearkin train DATA --method {name}" + (" --known A,B" if cls.uses_labels else ""),
        "## Equation",
        about.equation,
        about.letters,
        f"Queries: {about.queries}. Keys: {about.keys}.",
        "## What `commit` writes",
        written(cls),
        "## Options",
        *options(name),
        "## Paper",
        re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", about.source),
        "## Recipes",
        *recipes(name, root),
        "## Measured",
        *measured(name, root),
    ]
    return "\n\n".join(sections) + "\n"


def takes(cls: type[Method[Any]]) -> str:
    """What a method is given of each image."""
    kinds = [view if isinstance(view, str) else view.kind for view in cls.views]
    views = "one view" if len(kinds) == 1 else f"{len(kinds)} views"
    if set(kinds) != {"strong"}:
        views += f" ({', '.join(kinds)})"
    more = ", and smaller ones where the augmentation draws them" if cls.more_views else ""
    labels = ", and the labels of known classes" if cls.uses_labels else ""
    return f"It takes {views} of each image{more}{labels}."


def written(cls: type[Method[Any]]) -> str:
    """What a method's `commit` writes, in a sentence."""
    return "Nothing." if cls.commit is Method.commit else inspect.getdoc(cls.commit) or ""


def options(name: str) -> list[str]:
    """The options of a method, from its constructor: a table, and what it leaves to say."""
    cls = method_class(name)
    here, kinds, notes = default_options(cls), option_types(cls), arguments(cls)
    rows = []
    for key, parameter in parameters(cls).items():
        usual, own = parameter.default, here[key]
        meaning = f"{notes[key]} {values(kinds[key])}."
        if average := metadata(kinds[key], EMA):
            meaning += half_lives({usual, own}, average.unit)
        shown = toml_value(usual), "" if own == usual else toml_value(own)
        rows.append([f"`{option(key)}`", meaning, *(text.strip('"') for text in shown)])
    if not rows:
        return ["None."]
    remark = (
        "Defaults are those of the paper or its code. Where `nearkin train` has one of its own, "
        "it is under *here*."
    )
    if shrunk := ", ".join(f"`{option(key)}`" for key in fitted_options(cls)):
        remark += f" Left alone, these shrink to what the images and the batch allow: {shrunk}."
    return [_table(["option", "meaning", "default", "here"], rows), remark]


def values(kind: Any) -> str:
    """What an option can be, as the end of its description."""
    if typing.get_origin(kind) is typing.Literal:
        return f"One of {', '.join(typing.get_args(kind))}"
    limits = metadata(kind, Range)
    separator = "," if limits and str(limits).startswith("at least") else ""
    text = spelled(kind) + (f"{separator} {limits}" if limits else "")
    return text[0].upper() + text[1:]


def half_lives(momenta: set[float], clock: str) -> str:
    """After how many steps, or visits, half of the past is left."""
    moving = sorted((momentum for momentum in momenta if 0 < momentum < 1), reverse=True)
    lives = [f"{math.log(0.5) / math.log(momentum):.3g} at {momentum:g}" for momentum in moving]
    return f" Half-life in {clock}: {', '.join(lives)}." if lives else ""


def recipes(name: str, root: Path) -> list[str]:
    """How a method is trained: where nothing is said, and by the recipes on disk."""
    settings = ", ".join(f"{key} {value}" for key, value in automatic(name).items())
    links = []
    for path in sorted(root.glob("recipes/*/*.toml")):
        text, file = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        if tomllib.loads(text).get("method") == name:
            title = text.splitlines()[0].removeprefix("# ")
            links.append(f"- [{file}](../../{file}): {title}")
    return [f"Where nothing is said: {settings}.", *(["\n".join(links)] if links else [])]


FLOORS: Final = ("raw_pixels", "untrained_network")
"""What a value has to beat, as in docs/measured.toml."""


def measured(name: str, root: Path) -> list[str]:
    """The measured results of a method, from docs/measured.toml."""
    file = root / "docs" / "measured.toml"
    if not file.exists():
        return [f"See docs/methods/{name}.md in the repository, which also has the recipes."]
    runs = tomllib.loads(file.read_text(encoding="utf-8"))["run"]
    return [part for run in runs if run["method"] == name for part in _run(run)] or ["Not run."]


def _run(run: dict[str, Any]) -> list[str]:
    rows = []
    for found in run["found"]:
        low, high = found["interval"]
        value = f"{found['value']:.3f} [{low:.3f}, {high:.3f}]"
        rows.append([found["what"], value, *(f"{found[floor]:.3f}" for floor in FLOORS)])
    return [
        f"{run['data']}, {run['epochs']} epochs, on {run['machine']}, commit {run['commit']} "
        f"([protocol and more](../{run['page']})):",
        textwrap.indent(run["command"].strip(), "    "),
        _table(["measure", "value [95 %]", *(floor.replace("_", " ") for floor in FLOORS)], rows),
    ]


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
