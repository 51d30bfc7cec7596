"""Images of a run for talks and papers: curves, the map, which classes are confused."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Float

from nearkin.data.images import Images
from nearkin.data.sheets import COLUMNS, class_sheet, shortened
from nearkin.report.from_training import training_curves
from nearkin.report.page.map import Coloring, ImageMap
from nearkin.report.page.report import Chart, Confusion, Report, TrainingReport
from nearkin.run.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure

COLORS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Those of Okabe and Ito, which differ for color-blind people, less yellow."""
GRAY: Final = "#BBBBBB"
DASHES: Final = ("-", "--", ":", "-.")
MARKERS: Final = ("o", "s", "^", "D", "v")
STYLE: Final[dict[Any, Any]] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "savefig.dpi": 150,
    "text.parse_math": False,  # a class may be called "$"
}
MOST_DOTS: Final = 40
"""A line of more points than this is drawn without dots."""
MOST_CLASSES: Final = 12
"""In a legend; the smallest classes of more share one color."""
MOST_COUNTS: Final = 20
"""A matrix of more classes than this shows no numbers."""
MOST_NAMES: Final = 150
NAME: Final = 24
"""Characters of a class."""


@contextmanager
def figure(path: Path, width: float, height: float) -> Iterator["Figure"]:
    """An empty figure, in inches, that is saved at the end of the `with` block."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # names may be in any script
        made = Figure((width, height), layout="constrained")
        yield made
        made.savefig(path)


def draw(chart: Chart, path: Path) -> Path:
    """A chart as an image file."""
    return curves([chart], path)


def curves(charts: Sequence[Chart], path: Path) -> Path:
    """Charts side by side as an image file."""
    width = 6.0 if len(charts) == 1 else 3.4 * len(charts)
    with figure(path, width, 3.4) as made:
        for axis, chart in zip(
            made.subplots(1, len(charts), squeeze=False)[0], charts, strict=True
        ):
            _lines(axis, chart)
    return path


def _lines(axis: "Axes", chart: Chart) -> None:
    for number, (name, points) in enumerate(chart.series.items()):
        axis.plot(
            *np.array(points, dtype=float).reshape(-1, 2).T,
            color=COLORS[number % len(COLORS)],
            linestyle=DASHES[number % len(DASHES)],
            marker=MARKERS[number % len(MARKERS)] if len(points) <= MOST_DOTS else "",
            label=shortened(name, NAME * 2),
        )
    if chart.interval:
        axis.axvspan(*chart.interval, alpha=0.12, color="gray", label="interval", linewidth=0)
    if chart.chosen is not None:
        axis.axvline(chart.chosen, color="black", linewidth=0.8, label=f"chosen: {chart.chosen}")
    axis.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    if all(float(x).is_integer() for points in chart.series.values() for x, _ in points):
        axis.locator_params(axis="x", integer=True)
    if len(axis.get_legend_handles_labels()[0]) > 1:
        axis.legend()


def map_plot(shown: ImageMap, path: Path) -> Path:
    """All images as points on the map, colored as the page colors them first."""
    with figure(path, 7.5, 5.6) as made:
        axis = made.subplots()
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
        axis.set(xticks=[], yticks=[], aspect="equal", title=f"{len(shown.place):,} images")
        axis.set_xlabel("t-SNE of the embeddings: what lies close together is alike")
        if not shown.colorings:
            _dots(axis, shown.place, len(shown.place), COLORS[0])
            return path
        coloring = shown.colorings[0]
        axis.set_title(f"{len(shown.place):,} images by {coloring.name.lower()}")
        if coloring.classes:
            _by_class(axis, shown.place, coloring)
        else:
            scale = _by_number(axis, shown.place, coloring)
            made.colorbar(scale, ax=axis, label=coloring.name, shrink=0.6)
    return path


def _dots(
    axis: "Axes",
    place: Float[np.ndarray, "some 2"],
    of: int,
    color: Any,
    marker: str = "o",
    *,
    hollow: bool = False,
) -> "PathCollection":
    """Some of so many images."""
    return axis.scatter(
        place[:, 0],
        place[:, 1],
        s=float(np.clip(20_000 / of, 3, 30)),
        edgecolors=color,
        facecolors="none" if hollow else color,
        linewidths=0.8,
        marker=marker,
    )


def _by_class(axis: "Axes", place: Float[np.ndarray, "n 2"], coloring: Coloring) -> None:
    sizes = np.bincount(coloring.of[coloring.of >= 0], minlength=len(coloring.classes))
    many = len(sizes) > MOST_CLASSES
    some = np.sort(np.argsort(-sizes, kind="stable")[: MOST_CLASSES - many])
    handles, names = [], []
    others = ~np.isin(coloring.of, some)
    if others.any():
        names.append(f"{len(sizes) - len(some)} other classes" if many else "unknown")
        handles.append(_dots(axis, place[others], len(place), GRAY, "."))
    for number, name in enumerate(some.tolist()):
        round_, color = divmod(number, len(COLORS))
        dots = _dots(
            axis,
            place[coloring.of == name],
            len(place),
            COLORS[color],
            MARKERS[number % len(MARKERS)],
            hollow=round_ > 0,
        )
        handles.append(dots)
        names.append(shortened(coloring.classes[name], NAME))
    axis.legend(handles, names, markerscale=2, loc="center left", bbox_to_anchor=(1, 0.5))


def _by_number(
    axis: "Axes", place: Float[np.ndarray, "n 2"], coloring: Coloring
) -> "ScalarMappable":
    """Draw the images, and give the scale of their colors."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    known = np.isfinite(coloring.of)
    scale = ScalarMappable(Normalize(*np.quantile(coloring.of[known], (0, 1))), "cividis")
    _dots(axis, place[~known], len(place), GRAY)
    _dots(axis, place[known], len(place), scale.to_rgba(coloring.of[known]))
    return scale


def confusion_plot(confusion: Confusion, path: Path) -> Path:
    """How the images of each true class were taken, shaded by their share of it."""
    counts = np.array(confusion.counts, dtype=float).reshape(len(confusion.truth), -1)
    share = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    many = max(counts.shape)
    side = float(np.clip(2.5 + 0.35 * many, 4, 14))
    with figure(path, side + 1, side) as made:
        axis = made.subplots()
        axis.grid(visible=False)
        seen = axis.imshow(share, cmap="Blues", vmin=0, vmax=1)
        axis.set(xlabel="taken for", ylabel="true class", title="Which class was taken for which")
        axis.set(xticks=[], yticks=[])
        if many <= MOST_NAMES:
            size = min(9, 50 * side / many)  # points: names must not run into each other
            axis.set_xticks(
                range(counts.shape[1]), _short(confusion.found), rotation=90, fontsize=size
            )
            axis.set_yticks(range(counts.shape[0]), _short(confusion.truth), fontsize=size)
        if many <= MOST_COUNTS:
            for row, column in np.argwhere(counts).tolist():
                color = "white" if share[row, column] > 0.6 else "black"
                said = f"{counts[row, column]:,.0f}"
                axis.text(column, row, said, color=color, ha="center", va="center", fontsize=7)
        made.colorbar(seen, label="share of the true class", shrink=0.6)
    return path


def _short(names: Sequence[str]) -> list[str]:
    return [shortened(name, NAME) for name in names]


MOST_GALLERIES: Final = 40
"""On a sheet; of more, the largest are shown."""


def write_figures(
    folder: RunFolder, report: TrainingReport | Report, shown: ImageMap | None, images: Images
) -> None:
    """Draw what there is to draw of a finished run.

    Args:
        folder: The run.
        report: What its page tells.
        shown: What the map on it shows.
        images: Its images.
    """
    plots = folder.plots
    plots.mkdir(exist_ok=True)
    if shown is not None:
        map_plot(shown, plots / "map.png")
    if report.confusion is not None:
        confusion_plot(report.confusion, plots / "confusion.png")
    if isinstance(report, Report):
        _of_discovery(folder, report, images)
    else:
        _of_training(folder)


def _of_training(folder: RunFolder) -> None:
    found = training_curves(folder)
    curves(list(found.values()), folder.plots / "curves.png")
    if "knn" in found:
        draw(found["knn"], folder.plots / "knn.png")


def _of_discovery(folder: RunFolder, report: Report, images: Images) -> None:
    if report.training:
        curves(report.training, folder.plots / "curves.png")
    for chart in report.counting:
        draw(chart, folder.plots / "class_count.png")
    row = {name: number for number, name in enumerate(images.names)}
    largest = sorted(report.novel, key=lambda view: -view.size)[:MOST_GALLERIES]
    groups = {
        f"{view.name}: {view.size:,}": np.array(
            [row[one.path] for one in view.core[:COLUMNS] if one.path in row], np.int64
        )
        for view in largest
    }
    if groups:
        class_sheet(images, groups, folder.plots / "clusters.png")
