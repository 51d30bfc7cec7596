"""The plots folder of a run: what its page shows, as picture files."""

from typing import Final

import numpy as np

from nearkin.data.images import Images
from nearkin.report.curves import training_curves
from nearkin.report.page.map import PictureMap
from nearkin.report.page.report import Report, TrainingReport
from nearkin.report.plots import confusion_plot, curves, draw, map_plot
from nearkin.report.sheets import COLUMNS, class_sheet
from nearkin.run.folder import RunFolder

MOST_CLASSES: Final = 40
"""On a sheet; of more, the largest are shown."""


def write_figures(
    folder: RunFolder, report: TrainingReport | Report, shown: PictureMap | None, images: Images
) -> None:
    """Draw what there is to draw of a finished run.

    Args:
        folder: The run.
        report: What its page tells.
        shown: What the map on it shows.
        images: Its pictures.
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
    largest = sorted(report.novel, key=lambda view: -view.size)[:MOST_CLASSES]
    groups = {
        f"{view.name}: {view.size:,}": np.array(
            [row[one.path] for one in view.core[:COLUMNS] if one.path in row], np.int64
        )
        for view in largest
    }
    if groups:
        class_sheet(images, groups, folder.plots / "clusters.png")
