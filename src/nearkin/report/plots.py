"""Plots of a run for talks and papers: curves, map, confusion matrix, sheets of images."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.data.channels import preview
from nearkin.data.decode import MIDDLE_GRAY, BadImage, center
from nearkin.data.images import Images
from nearkin.errors import DataError, OutputError
from nearkin.files import whole
from nearkin.report.page.blocks import Cards, Chart, ClassView, Confusion, Page
from nearkin.report.page.map import Coloring, ImageMap
from nearkin.run.folder import RunFolder
from nearkin.run.sheets import COLUMNS, class_sheet, save_sheet, shortened
from nearkin.text import as_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure

COLORS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette for color-blind readers, without yellow."""
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
    "image.cmap": "cividis",
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "savefig.dpi": 150,
    "text.parse_math": False,  # a class may be called "$"
}
CURVES: Final = {"Training curves": "curves.png", "Number of classes": "class_count.png"}
"""The plots of charts, by the sections of the page that have them."""
MAX_DOTS: Final = 40  # a line of more points is drawn without dots
MAX_LEGEND: Final = 12  # classes in a legend; the smallest of more classes share one color
MAX_CLASSES: Final = 2_000  # a confusion matrix of more classes is not drawn
MAX_COUNTS: Final = 20  # a confusion matrix of more classes has no numbers
MAX_TICKS: Final = 150  # a confusion matrix of more classes has no names
MAX_NAME: Final = 24  # characters of a class name
MAX_ROWS: Final = 40  # classes on the sheet of novel classes, the largest of more
CONTACT_SIDE: Final = 112  # Wide enough for the file names below


def write_figures(
    folder: RunFolder, page: Page, image_map: ImageMap | None, images: Images
) -> None:
    """Write the plots of a finished run into its folder."""
    plots = folder.plots
    plots.mkdir(exist_ok=True)
    if image_map is not None:
        map_plot(image_map, plots / "map.png")
    for title, blocks in page.sections:
        charts = [block for block in blocks if isinstance(block, Chart)]
        if charts and title in CURVES:
            curves(charts, plots / CURVES[title])
    for block in page.blocks:
        if isinstance(block, Confusion) and len(block.true) <= MAX_CLASSES:
            confusion_plot(block, plots / "confusion.png")
        if isinstance(block, Cards) and block.kind == "new":
            _novel_sheet(block.classes, images, plots / "clusters.png")


def _novel_sheet(classes: Sequence[ClassView], images: Images, path: Path) -> None:
    """The most typical images of each novel class."""
    row = {name: number for number, name in enumerate(images.names)}
    largest = sorted(classes, key=lambda view: -view.size)[:MAX_ROWS]
    groups = {
        f"{view.name}: {view.size:,}": np.array(
            [row[tile.path] for tile in view.core[:COLUMNS] if tile.path in row], np.int64
        )
        for view in largest
    }
    if groups:
        class_sheet(images, groups, path)


@contextmanager
def figure(path: Path, width: float, height: float) -> Iterator["Figure"]:
    """Yield an empty figure, sized in inches, and save it at the end of the `with` block."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # names may be in any script
        fig = Figure((width, height), layout="constrained")
        yield fig
        with whole(path) as partial:
            fig.savefig(partial, format=path.suffix[1:])


def curves(charts: Sequence[Chart], path: Path) -> Path:
    """Plot charts side by side."""
    width = 6.0 if len(charts) == 1 else 3.4 * len(charts)
    with figure(path, width, 3.4) as fig:
        axes = fig.subplots(1, len(charts), squeeze=False)[0]
        for axis, chart in zip(axes, charts, strict=True):
            _plot_lines(axis, chart)
    return path


def _plot_lines(axis: "Axes", chart: Chart) -> None:
    for number, (name, points) in enumerate(chart.series.items()):
        axis.plot(
            *np.array(points, dtype=float).reshape(-1, 2).T,
            color=COLORS[number % len(COLORS)],
            linestyle=DASHES[number % len(DASHES)],
            marker=MARKERS[number % len(MARKERS)] if len(points) <= MAX_DOTS else "",
            label=shortened(name, MAX_NAME * 2),
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


def map_plot(image_map: ImageMap, path: Path) -> Path:
    """Plot the t-SNE map in its first coloring."""
    xy = image_map.xy
    with figure(path, 7.5, 5.6) as fig:
        axis = fig.subplots()
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
        axis.set(xticks=[], yticks=[], aspect="equal", xlabel="t-SNE of the embeddings")
        coloring = next(iter(image_map.colorings), None)
        by = f" by {coloring.name.lower()}" if coloring else ""
        axis.set_title(f"{len(xy):,} images{by}")
        if coloring is None:
            _scatter(axis, xy, len(xy), COLORS[0])
        elif coloring.classes:
            _scatter_classes(axis, xy, coloring)
        else:
            known = np.isfinite(coloring.values)
            _scatter(axis, xy[~known], len(xy), GRAY)
            points = _scatter(axis, xy[known], len(xy), coloring.values[known])
            fig.colorbar(points, label=coloring.name, shrink=0.6)
    return path


def _scatter(
    axis: "Axes", xy: Float[np.ndarray, "some 2"], total: int, color: Any, marker: Any = "o"
) -> "PathCollection":
    """Some of `total` images; the more there are, the smaller the points."""
    size = float(np.clip(20_000 / total, 3, 30))
    x, y = xy.T
    return axis.scatter(x, y, s=size, c=color, linewidths=0.8, marker=marker)


def _scatter_classes(axis: "Axes", xy: Float[np.ndarray, "n 2"], coloring: Coloring) -> None:
    from matplotlib.markers import MarkerStyle

    values = coloring.values
    sizes = np.bincount(values[values >= 0], minlength=len(coloring.classes))
    many = len(sizes) > MAX_LEGEND
    largest = np.sort(np.argsort(-sizes, kind="stable")[: MAX_LEGEND - many])
    handles, names = [], []
    others = ~np.isin(values, largest)
    if others.any():
        names.append(f"{len(sizes) - len(largest)} other classes" if many else "unknown")
        handles.append(_scatter(axis, xy[others], len(xy), GRAY, "."))
    for number, class_ in enumerate(largest.tolist()):
        # Colors and markers cycle with different periods; hollow ones tell the rest apart.
        round_, color = divmod(number, len(COLORS))
        marker = MarkerStyle(MARKERS[number % len(MARKERS)], "none" if round_ else "full")
        handles.append(_scatter(axis, xy[values == class_], len(xy), COLORS[color], marker))
        names.append(shortened(coloring.classes[class_], MAX_NAME))
    axis.legend(handles, names, markerscale=2, loc="center left", bbox_to_anchor=(1, 0.5))


def confusion_plot(confusion: Confusion, path: Path) -> Path:
    """Plot a confusion matrix, shaded by the share of each true class."""
    counts = confusion.dense().astype(float)
    share = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    many = max(counts.shape)
    side = float(np.clip(2.5 + 0.35 * many, 4, 14))
    with figure(path, side + 1, side) as fig:
        axis = fig.subplots()
        axis.grid(visible=False)
        shading = axis.imshow(share, cmap="Blues", vmin=0, vmax=1)
        axis.set(xlabel="predicted class", ylabel="true class", title="Confusion matrix")
        axis.set(xticks=[], yticks=[])
        if many <= MAX_TICKS:
            size = min(9, 50 * side / many)  # points: names must not run into each other
            predicted, true = (
                [shortened(name, MAX_NAME) for name in names]
                for names in (confusion.predicted, confusion.true)
            )
            axis.set_xticks(range(counts.shape[1]), predicted, rotation=90, fontsize=size)
            axis.set_yticks(range(counts.shape[0]), true, fontsize=size)
        if many <= MAX_COUNTS:
            for row, column in np.argwhere(counts).tolist():
                color = "white" if share[row, column] > 0.6 else "black"
                number = f"{counts[row, column]:,.0f}"
                axis.text(column, row, number, color=color, ha="center", va="center", fontsize=7)
        fig.colorbar(shading, label="share of the true class", shrink=0.6)
    return path


def contact_sheet(
    results: Sequence[tuple[str, Sequence[tuple[str, float]]]], images: Images, path: Path
) -> Path:
    """Save a sheet of query images, one per row, beside their neighbors."""
    row = {as_text(name): number for number, name in enumerate(images.names)}
    if not any(name in row for _, neighbors in results for name, _ in neighbors):
        raise DataError("none of the neighbors is among these images; give --data those of them")
    # Images that are all smaller keep the size of the largest of them.
    side = min(CONTACT_SIDE, int(images.sizes.min(axis=1).max()))
    sheet, captions = [], []
    contents = [Path(query).read_bytes() for query, _ in results]
    try:
        for content, (query, neighbors) in zip(contents, results, strict=True):
            sources = (content, *(row.get(name) for name, _ in neighbors))
            sheet.append(torch.stack([_square(images, each, side) for each in sources]))
            found = [(name, f"{similarity:.3f}") for name, similarity in neighbors]
            captions.append([(Path(query).name, "query"), *found])
        return save_sheet(torch.stack(sheet).unbind(dim=1), path, captions=captions)
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"cannot write {path} ({why}); choose another -o") from error


def _square(images: Images, source: int | bytes | None, side: int) -> Float[Tensor, "3 s s"]:
    """The central square of an image, by its row or its file; gray if missing or unreadable."""
    pixels = np.full((side, side, 3), MIDDLE_GRAY, np.uint8)
    with suppress(BadImage):
        if source is not None:
            stored = source if isinstance(source, bytes) else images.stored(source)
            pixels = preview(center(images.scaled(stored), side))
    return torch.from_numpy(pixels).movedim(2, 0) / 255
