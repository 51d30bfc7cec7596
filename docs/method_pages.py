"""Writes docs/methods: a page per method and their table, from code, recipes and results."""

import textwrap
import tomllib
from pathlib import Path
from typing import Any, Final

from nearkin.commands.lists import describe_method, idea, paper, table, written
from nearkin.methods import METHODS

ROOT: Final = Path(__file__).parents[1]
RECIPES: Final = "src/nearkin/recipes"
BASELINES: Final = ("raw_pixels", "untrained_network")
"""The baselines of a value, as docs/measured.toml names them."""

INTRODUCTION: Final = """\
# Methods

A page per method, made from its code by `make docs`; `nearkin list methods NAME` prints it.

Nearly all of them are one equation. A query is matched against keys, and the loss is the
cross-entropy between that match and what it should have been:

    loss(q) = - sum_j  target_j  log softmax_j( q . k_j / temperature )

In the equations `a.b` is an inner product, `unit` scales to length one, and a loss for one query
or image stands for its mean over the batch.
"""


def write_pages(root: Path = ROOT) -> None:
    """Write the files of docs/methods."""
    for name, text in pages(root).items():
        (root / "docs" / "methods" / name).write_text(text, encoding="utf-8")


def pages(root: Path = ROOT) -> dict[str, str]:
    """The files of docs/methods."""
    return {"README.md": overview()} | {f"{name}.md": full_page(name, root) for name in METHODS}


def overview() -> str:
    """The table of all methods."""
    rows = []
    for name, cls in METHODS.items():
        about = paper(cls)
        assert about is not None
        link = f"[`{name}`]({name}.md)"
        rows.append([link, idea(cls), about.queries, about.keys, written(cls)])
    header = ["method", "idea", "queries", "keys", "what `commit` writes"]
    return f"{INTRODUCTION}\n{table(header, rows)}\n"


def full_page(name: str, root: Path = ROOT) -> str:
    """The page of a method with its recipes and its measured results."""
    return describe_method(name, *recipes(name, root), "## Measured", *measured(name, root))


def recipes(name: str, root: Path) -> list[str]:
    """Links to the recipes of a method."""
    links = []
    for path in sorted(root.glob(f"{RECIPES}/*/*.toml")):
        text, file = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        recipe = path.relative_to(root / RECIPES).with_suffix("").as_posix()
        if tomllib.loads(text).get("method") == name:
            title = text.splitlines()[0].removeprefix("# ")
            links.append(f"- [recipe:{recipe}](../../{file}): {title}")
    return ["Recipes:", "\n".join(links)] if links else []


def measured(name: str, root: Path) -> list[str]:
    """The measured results of a method, from docs/measured.toml."""
    file = root / "docs" / "measured.toml"
    runs = tomllib.loads(file.read_text(encoding="utf-8"))["run"] if file.exists() else []
    return [part for run in runs if run["method"] == name for part in _run(run)] or ["Not run."]


def _run(run: dict[str, Any]) -> list[str]:
    rows = []
    for found in run["found"]:
        low, high = found["interval"]
        value = f"{100 * found['value']:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
        baselines = (f"{100 * found[name]:.1f} %" for name in BASELINES)
        rows.append([found["what"], value, *baselines])
    return [
        f"{run['data']}, {run['epochs']} epochs, on {run['machine']}, commit {run['commit']} "
        f"([protocol and more](../{run['page']})):",
        textwrap.indent(run["command"].strip(), "    "),
        table(["metric", "value [95 %]", *(name.replace("_", " ") for name in BASELINES)], rows),
    ]


if __name__ == "__main__":
    write_pages()
