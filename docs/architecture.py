"""Draw the packages of src/nearkin with their imports, and count what a reader meets.

    python docs/architecture.py [--source FOLDER] [--image FILE]

Writes the tables of docs/architecture.md, prints what it counts, and draws the image if it is told
where. The order of the packages is that of import-linter, in pyproject.toml. `make docs` writes
tables, and `make site` draws the image. With another `--source` no table is written.
"""

import argparse
import ast
import statistics
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
OWN = ROOT / "src" / "nearkin"
PAGE_SUFFIXES = (".html", ".css", ".js")
KNOWN_ROOMS = ("types", "errors", "config")
"""Vocabulary of all methods: a walk through one method does not count it."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
Edges = Mapping[tuple[str, str], int]

ROOMS = {
    "cli": "parse arguments, call one command, print",
    "sklearn": "a training as a transformer of scikit-learn",
    "testing": "common tests for a method of your own",
    "commands": "one module per verb: open the run, call the rooms below, write files",
    "exports": "weights and graphs for other programs, compared; the model card",
    "auditing": "what a split hides: leaks and their price, bad images, wrong labels",
    "classification": "classes from labels: probes, fine-tuning, metrics",
    "discovery": "novel classes: stages, trials, number of classes, findings",
    "classifier": "features that are kept, classifier, calibration, outliers",
    "report": "the page of a run and its server",
    "training": "loop, checkpoints, signals, health, optimizers, schedules",
    "evaluation": "embeddings, metrics with protocols, baselines, verdicts",
    "encoders": "what an encoder is, its file, and those of other libraries",
    "run": "the run folder, settings, machine, progress",
    "methods": "one file per paper",
    "method": "what a method is: forward reads, commit writes",
    "metrics": "neighbors, k-means, clusters, probes, intervals; pure functions",
    "transforms": "views as a transform for any DataLoader",
    "networks": "backbones, projectors, momentum encoders, batch norm in groups",
    "memory": "queue and memory bank",
    "labels": "labels of images: known classes, what is held out, the truth",
    "data": "images from anywhere, views, order, split, duplicates, cache",
    "objectives": "losses of unit vectors; pure functions",
    "distributed": "processes and devices",
    "result": "what commands return: lines, rows, plain values",
    "tables": "CSV and Parquet tables; no torch",
    "files": "atomic writes, files with a checksum",
    "toml": "settings as files",
    "config": "settings of each kind of run",
    "schema": "types of settings, checked by msgspec",
    "choices": "names that several packages share",
    "places": "paths that users give, and what the system refuses",
    "extensions": "methods, backbones, augmentations and sources from outside",
    "types": "Batch and Step",
    "errors": "errors with exit codes",
    "text": "text for people",
    "pace": "time left, images per second",
    "version": "the version",
}
"""What each room is for."""

WIDTH = 9.2
"""Of a box, in the units of the image."""

WALKS: Mapping[str, Sequence[str]] = {
    "an image, from its file to the loss": (
        "data/images.py",
        "data/decode.py",
        "data/views.py",
        "data/batches.py",
        "training/loop.py",
        "method.py",
        "methods/simclr.py",
        "networks/branch.py",
        "objectives/contrast.py",
    ),
    "labels, from --labeled to stage 3": (
        "cli/command.py",
        "config.py:DiscoverConfig",
        "commands/discover.py",
        "discovery/data.py",
        "labels/known.py",
        "discovery/pipeline.py",
        "discovery/task.py",
        "discovery/stages.py",
    ),
    "features, to report.html": (
        "evaluation/embeddings.py",
        "evaluation/table.py:read_embeddings",
        "report/pages.py",
        "report/encoder_report.py",
        "report/image_map.py",
        "report/page/blocks.py",
        "report/page/map.py",
        "report/page/html.py",
    ),
    "--temperature, from the command line to the method": (
        "cli/command.py",
        "commands/train.py",
        "run/options.py",
        "methods/moco.py",
    ),
}
"""What a reader opens, in order. An entry is a file, or `file:definition` to count only that."""

METHODS = {"MoCo": "methods/moco.py", "SimSiam": "methods/simsiam.py"}
"""Walks that are computed: a file and the definitions that it names, or that these lead to."""


class Source:
    """The package below a folder: its modules, their definitions and imports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = sorted(folder.rglob("*.py"))

    def name(self, path: Path) -> str:
        """Return the path inside the package, as in `methods/moco.py`."""
        return path.relative_to(self.folder).as_posix()

    def room(self, path: Path) -> str:
        """Return the first part of the path: a folder, or a module beside the folders."""
        return path.relative_to(self.folder).parts[0].removesuffix(".py")

    def find(self, module: str) -> Path | None:
        """Return the file of a dotted module name, or None if it is none of the package."""
        base = self.folder.parent / Path(*module.split("."))
        candidates = (base.with_suffix(".py"), base / "__init__.py")
        return next((path for path in candidates if path.is_file()), None)

    def imports(self, path: Path) -> Iterable[tuple[str, str, str]]:
        """Yield (module, name, local name) of every import from the package, lazy ones too."""
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nearkin"):
                for alias in node.names:
                    yield node.module or "", alias.name, alias.asname or alias.name

    def imported(self, path: Path) -> set[Path]:
        """Return the files that a module imports directly."""
        found = (
            self.find(f"{module}.{name}") or self.find(module)
            for module, name, _ in self.imports(path)
        )
        return {file for file in found if file is not None and file != path}

    def resolve(self, module: str, name: str) -> tuple[Path, str] | None:
        """Return where a name is defined, through the packages that pass it on."""
        path = self.find(module)
        if path is None or self.find(f"{module}.{name}"):
            return None
        if name in definitions(path):
            return path, name
        for origin, original, local in self.imports(path):
            if local == name:
                return self.resolve(origin, original)
        return None

    def reading(self, start: str, deep: bool) -> tuple[int, int]:
        """Count files and lines: one whole file, and the definitions that its code names.

        If `deep`, also those that these name, and so on.
        """
        first = self.folder / start
        seen: set[tuple[Path, str]] = set()
        todo = list(self._leads_to(first, parse(first)))
        while todo:
            path, name = todo.pop()
            if (path, name) in seen or path == first or self.room(path) in KNOWN_ROOMS:
                continue
            seen.add((path, name))
            todo += self._leads_to(path, definitions(path)[name]) if deep else ()
        lines = Counter({first: length(first)})
        for path, name in seen:
            lines[path] += span(definitions(path)[name])
        return len(lines), sum(lines.values())

    def _leads_to(self, path: Path, node: ast.AST) -> Iterable[tuple[Path, str]]:
        own = definitions(path)
        outside = {local: (module, name) for module, name, local in self.imports(path)}
        for part in without_annotations(node):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                module, name = outside.get(part.value.id, ("", ""))
                target = self.resolve(f"{module}.{name}", part.attr) if module else None
            elif isinstance(part, ast.Name) and part.id in own:
                target = path, part.id
            else:
                name = part.id if isinstance(part, ast.Name) else ""
                target = self.resolve(*outside[name]) if name in outside else None
            if target:
                yield target


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def definitions(path: Path) -> dict[str, Definition]:
    """Return the functions, classes and variables at the top of a module, by name."""
    found: dict[str, Definition] = {}
    for node in parse(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def without_annotations(node: ast.AST) -> Iterable[ast.AST]:
    """Yield a node and all below it, except annotations."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from without_annotations(child)


def span(node: Definition) -> int:
    """Return the number of lines of a definition, without decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def length(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def layers() -> list[list[str]]:
    """Return the rooms of each layer from the top, as import-linter checks them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract["type"] == "layers" and contract["containers"] == ["nearkin"]:
            return [[room.strip() for room in layer.split("|")] for layer in contract["layers"]]
    raise SystemExit("pyproject.toml has no contract for the layers of nearkin")


def room_imports(source: Source) -> Edges:
    """Count the imports between rooms."""
    edges: Counter[tuple[str, str]] = Counter()
    for path in source.files:
        for target in source.imported(path):
            if "__" not in source.room(path) + source.room(target):
                edges[source.room(path), source.room(target)] += 1
    return {edge: count for edge, count in edges.items() if edge[0] != edge[1]}


def reduced(edges: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the edges that no longer path implies (transitive reduction)."""
    below: dict[str, set[str]] = defaultdict(set)
    for start, end in edges:
        below[start].add(end)

    @cache
    def reach(room: str) -> frozenset[str]:
        return frozenset(below[room]).union(*(reach(lower) for lower in below[room]))

    return {
        (start, end)
        for start in list(below)
        for end in below[start]
        if not any(end in reach(other) for other in below[start] - {end})
    }


def counts(source: Source) -> dict[str, str]:
    """Return the figures of docs/architecture.md."""
    python = sum(map(length, source.files))
    pages = [path for path in source.folder.rglob("*") if path.suffix in PAGE_SUFFIXES]
    importers: Counter[Path] = Counter()
    public: dict[str, set[Path]] = defaultdict(set)
    functions: list[int] = []
    for path in source.files:
        importers.update(source.imported(path))
        functions += [
            span(node)
            for node in ast.walk(parse(path))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        for name in definitions(path):
            if not name.startswith("_"):
                public[name].add(path)
    functions.sort()
    single = [p for p, n in importers.items() if n == 1 and not p.name.startswith("__")]
    return {
        "modules": f"{len(source.files)}",
        "lines of Python": f"{python:,}",
        "lines with the page's scripts": f"{python + sum(map(length, pages)):,}",
        "modules of at most 60 lines": f"{sum(length(p) <= 60 for p in source.files)}",
        "modules with one importer": f"{len(single)}",
        "functions": f"{len(functions):,}",
        "median lines of a function": f"{statistics.median(functions):g}",
        "90th percentile": f"{functions[int(0.9 * len(functions))]}",
        "public names defined in several modules": f"{sum(len(p) > 1 for p in public.values())}",
    }


def walk(source: Source, entries: Sequence[str]) -> tuple[int, int]:
    """Return how many files a walk opens, and how many lines of them it reads."""
    files, lines = set(), 0
    for entry in entries:
        name, _, definition = entry.partition(":")
        path = source.folder / name
        if not path.is_file() or (definition and definition not in definitions(path)):
            raise SystemExit(f"docs/architecture.py: a walk names {entry}, which is not there")
        files.add(path)
        lines += span(definitions(path)[definition]) if definition else length(path)
    return len(files), lines


def draw(source: Source, rows: Sequence[Sequence[str]], edges: Edges, image: Path) -> None:
    """Draw a box per room, in the order of the layers, and the imports between them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rooms = [room for row in rows for room in row]
    figure, axes = plt.subplots(figsize=(13.5, 0.36 * len(rooms) + 0.1 * len(rows)))
    middle, y = {}, 0.0
    for number, row in enumerate(rows):
        axes.axhspan(y, y + len(row), color="#eef3f8" if number % 2 == 0 else "white", zorder=0)
        for room in row:
            middle[room] = y + 0.5
            draw_box(axes, source, room, middle[room])
            y += 1
        y += 0.15
    rank = {room: number for number, row in enumerate(rows) for room in row}
    upward = {(start, end) for start, end in edges if rank[start] >= rank[end]}
    for start, end in reduced(edge for edge in edges if edge not in upward):
        draw_arrow(axes, middle[start], middle[end], edges[start, end])
    for start, end in upward:
        draw_arrow(axes, middle[start], middle[end], edges[start, end], upward=True)
    axes.set(xlim=(-1.9, 13.0), ylim=(y, -0.15))
    axes.axis("off")
    figure.savefig(image, dpi=100, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def draw_box(axes: "Axes", source: Source, room: str, y: float) -> None:
    """Draw the box of one room: its name, its size and what it is for."""
    from matplotlib.patches import FancyBboxPatch

    modules = [path for path in source.files if source.room(path) == room]
    size = f"{len(modules)} module{'s' * (len(modules) > 1)}, {sum(map(length, modules)):,} lines"
    style = {"facecolor": "white", "edgecolor": "#3b5b7a", "linewidth": 0.9}
    axes.add_patch(
        FancyBboxPatch((0, y - 0.38), WIDTH, 0.76, "round,pad=0,rounding_size=.1", **style)
    )
    axes.text(0.12, y, room, va="center", weight="bold", fontsize=9.5)
    axes.text(3.5, y, size, va="center", ha="right", fontsize=7, color="#666")
    axes.text(3.7, y, ROOMS[room], va="center", fontsize=7)


def draw_arrow(axes: "Axes", start: float, end: float, count: int, upward: bool = False) -> None:
    """Draw an arc from one height to another: blue on the right, red on the left if upward."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    side, edge = (-1, 0.0) if upward else (1, WIDTH)
    bulge = edge + side * (0.35 + 0.17 * abs(end - start))
    shift = 0.2 if end > start else -0.2  # arrows leave a box below the middle, and enter above it
    points = [
        (edge, start + shift),
        (bulge, start + shift),
        (bulge, end - shift),
        (edge, end - shift),
    ]
    curve = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
    color = "#c0392b" if upward else "#3b5b7a"
    width = 0.5 + 0.2 * min(count, 10)
    style = {"arrowstyle": "-|>", "mutation_scale": 8, "linewidth": width, "color": color}
    axes.add_patch(FancyArrowPatch(path=curve, alpha=0.75, zorder=3, **style))


def walks(source: Source) -> dict[str, str]:
    """Return files and lines of every walk."""
    found = {name: walk(source, entries) for name, entries in WALKS.items()}
    for name, start in METHODS.items():
        found[f"{name} and what it names"] = source.reading(start, deep=False)
        found[f"{name} and all that it leads to"] = source.reading(start, deep=True)
    return {name: f"{files} files, {lines:,} lines" for name, (files, lines) in found.items()}


def table(title: str, found: Mapping[str, str]) -> str:
    """Return a Markdown table with a row per count."""
    rows = [f"| {name} | {value} |" for name, value in found.items()]
    return "\n".join([f"| {title} | |", "|---|---|", *rows])


def steps() -> str:
    """Return a Markdown list of the files of each walk."""
    lists = (
        ", ".join(f"`{entry.partition(':')[0]}`" for entry in entries)
        for entries in WALKS.values()
    )
    return "\n".join(f"- {name}: {files}." for name, files in zip(WALKS, lists, strict=True))


def fill(page: Path, parts: Mapping[str, str]) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- end -->`."""
    text = page.read_text(encoding="utf-8")
    for name, content in parts.items():
        head, _, rest = text.partition(f"<!-- {name} -->")
        text = f"{head}<!-- {name} -->\n{content}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    page.write_text(text, encoding="utf-8")


def draw_rooms(image: Path, source: Source) -> None:
    """Draw the rooms of a source in the order of the layers, with their imports."""
    rows, edges = layers(), room_imports(source)
    known = {room for row in rows for room in row}
    if strangers := {room for edge in edges for room in edge} - known:
        raise SystemExit(f"not in pyproject.toml's layers: {', '.join(sorted(strangers))}")
    draw(source, rows, edges, image)


def main() -> None:
    """Print the counts, write the tables, and draw the image."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, default=OWN)
    parser.add_argument("--image", type=Path)
    options = parser.parse_args()
    source = Source(options.source)
    sizes = counts(source)
    lengths = walks(source) if options.source == OWN else {}
    for name, value in (sizes | lengths).items():
        print(f"{value:>24}  {name}")
    if options.image:
        draw_rooms(options.image, source)
    if lengths:
        parts = {"walks": table("question", lengths), "sizes": table("count", sizes)}
        parts["steps"] = steps()
        fill(ROOT / "docs" / "architecture.md", parts)


if __name__ == "__main__":
    main()
