"""Draw the packages of src/nearkin with their imports.

    python docs/architecture.py IMAGE

The order of the packages is that of import-linter, in pyproject.toml. The site draws the image for
docs/architecture.md.
"""

import ast
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "nearkin"
WIDTH = 5.2
"""Of a box, in the units of the image."""

Edges = Mapping[tuple[str, str], int]


def package_of(path: Path) -> str:
    """Return the first part of a path in the source: a folder, or a module beside the folders."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def find(module: str) -> Path | None:
    """Return the file of a dotted module name, or None if it is none of the source."""
    base = SOURCE.parent / Path(*module.split("."))
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def imported(path: Path) -> set[Path]:
    """Return the files of the source that a module imports directly, lazily too."""
    found = set[Path]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nearkin"):
            names = (alias.name for alias in node.names)
            files = (find(f"{node.module}.{name}") or find(node.module or "") for name in names)
            found |= {file for file in files if file is not None and file != path}
    return found


def layers() -> list[list[str]]:
    """Return the packages of each layer from the top, as import-linter checks them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract["type"] == "layers" and contract["containers"] == ["nearkin"]:
            return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
    raise SystemExit("pyproject.toml has no contract for the layers of nearkin")


def package_imports(files: Iterable[Path]) -> Edges:
    """Count the imports between packages."""
    edges: Counter[tuple[str, str]] = Counter()
    for path in files:
        for target in imported(path):
            if "__" not in package_of(path) + package_of(target):
                edges[package_of(path), package_of(target)] += 1
    return {edge: count for edge, count in edges.items() if edge[0] != edge[1]}


def reduced(edges: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the edges that no longer path implies (transitive reduction)."""
    below: dict[str, set[str]] = defaultdict(set)
    for start, end in edges:
        below[start].add(end)

    @cache
    def reach(package: str) -> frozenset[str]:
        return frozenset(below[package]).union(*(reach(lower) for lower in below[package]))

    return {
        (start, end)
        for start in list(below)
        for end in below[start]
        if not any(end in reach(other) for other in below[start] - {end})
    }


def draw(image: Path) -> None:
    """Draw a box per package, in the order of the layers, and the imports between them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    files, rows = sorted(SOURCE.rglob("*.py")), layers()
    edges, packages = package_imports(files), [name for row in rows for name in row]
    if unlisted := {name for edge in edges for name in edge} - {*packages}:
        raise SystemExit(f"not in pyproject.toml's layers: {', '.join(sorted(unlisted))}")
    figure, axes = plt.subplots(figsize=(9.0, 0.36 * len(packages) + 0.1 * len(rows)))
    middle, y = dict[str, float](), 0.0
    for number, row in enumerate(rows):
        axes.axhspan(y, y + len(row), color="#eef3f8" if number % 2 == 0 else "white", zorder=0)
        for name in row:
            middle[name] = y + 0.5
            draw_box(axes, name, [path for path in files if package_of(path) == name], y + 0.5)
            y += 1
        y += 0.15
    draw_arrows(axes, rows, middle, edges)
    axes.set(xlim=(-1.9, 9.0), ylim=(y, -0.15))
    axes.axis("off")
    figure.savefig(image, dpi=100, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def draw_box(axes: "Axes", name: str, modules: Sequence[Path], y: float) -> None:
    """Draw the box of one package: its name and its size."""
    from matplotlib.patches import FancyBboxPatch

    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules)
    size = f"{len(modules)} module{'s' * (len(modules) > 1)}, {lines:,} lines"
    style = {"facecolor": "white", "edgecolor": "#3b5b7a", "linewidth": 0.9}
    axes.add_patch(
        FancyBboxPatch((0, y - 0.38), WIDTH, 0.76, "round,pad=0,rounding_size=.1", **style)
    )
    axes.text(0.12, y, name, va="center", weight="bold", fontsize=9.5)
    axes.text(WIDTH - 0.12, y, size, va="center", ha="right", fontsize=7, color="#666")


def draw_arrows(
    axes: "Axes", rows: Sequence[Sequence[str]], middle: Mapping[str, float], edges: Edges
) -> None:
    """Draw the imports that no longer path implies and, in red, all that point up."""
    rank = {name: number for number, row in enumerate(rows) for name in row}
    upward = {(start, end) for start, end in edges if rank[start] >= rank[end]}
    for start, end in reduced(edge for edge in edges if edge not in upward):
        draw_arrow(axes, middle[start], middle[end], edges[start, end])
    for start, end in upward:
        draw_arrow(axes, middle[start], middle[end], edges[start, end], upward=True)


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


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
