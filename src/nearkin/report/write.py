"""The page of a run, from its files."""

from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np

from nearkin.data.images import Images
from nearkin.distributed import available_cpus
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import read_embeddings
from nearkin.report.contact import neighbor_sheet
from nearkin.report.from_training import report_of
from nearkin.report.mapping import image_map
from nearkin.report.page.map import ImageMap
from nearkin.report.page.report import ClassView, Report, Tile, TrainingReport
from nearkin.report.page.sections import discovery_page, training_page
from nearkin.report.plots import write_figures
from nearkin.report.thumbnails import thumbnails
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv, replace_text, usable

MEDOID_SIDE: Final = 192
SIDE: Final = 96


@dataclass(frozen=True, eq=False)
class Shown:
    """What is shown of a finished run."""

    report: Report | TrainingReport
    map: ImageMap | None

    def page(self, *, served: bool = False) -> str:
        """The page.

        Args:
            served: Whether a server stands behind it.
        """
        if isinstance(self.report, Report):
            return discovery_page(self.report, self.map, served=served)
        return training_page(self.report, self.map, served=served)


def shown_of(folder: RunFolder, images: Images) -> Shown:
    """What there is to show of a finished run.

    Args:
        folder: The run.
        images: Its images.
    """
    return _shown(folder, images, read_embeddings(folder.embeddings, images))


def _shown(folder: RunFolder, images: Images, found: Embeddings) -> Shown:
    log = _told(folder, images) if folder.page.exists() else report_of(folder, images, found)
    return Shown(log, image_map(folder, found, images))


def write_page(folder: RunFolder, images: Images) -> None:
    """Leave the page of a finished run, and its plots, in the run folder."""
    found = read_embeddings(folder.embeddings, images)
    shown = _shown(folder, images, found)
    write_figures(folder, shown.report, shown.map, images)
    if isinstance(shown.report, TrainingReport):
        neighbor_sheet(found, images, folder.plots / "neighbors.png")
    replace_text(folder.report, shown.page())


def keep(folder: RunFolder, report: Report) -> None:
    """Keep what a page about a discovery tells; its images are looked up again."""
    replace_text(folder.page, msgspec.json.encode(report, enc_hook=str).decode())


def _told(folder: RunFolder, images: Images) -> Report:
    with usable(folder.page, "discover again"):
        report = msgspec.json.decode(folder.page.read_bytes(), type=Report)
    views = *report.novel, *report.assigned
    row = {name: number for number, name in enumerate(images.names)}
    tiles = [shown for view in views for shown in (*view.core, *view.border)]
    small = _looked_up(tiles, row, images, SIDE)
    large = _looked_up([view.medoid for view in views if view.medoid], row, images, MEDOID_SIDE)
    names = {line["cluster"]: line["name"].strip() for line in read_csv(folder.clusters)}

    def seen(view: ClassView) -> ClassView:
        return replace(
            view,
            name=_named(view.name, names),
            merge=tuple(_named(name, names) for name in view.merge),
            medoid=next(iter(_with(large, [view.medoid] if view.medoid else [])), None),
            core=_with(small, view.core),
            border=_with(small, view.border),
        )

    return replace(
        report, novel=tuple(map(seen, report.novel)), assigned=tuple(map(seen, report.assigned))
    )


def _named(cluster: str, names: dict[str, str]) -> str:
    """A class as the user has called it."""
    return f"{names[cluster]} ({cluster})" if names.get(cluster) else cluster


def _looked_up(
    tiles: list[Tile], row: dict[str, int], images: Images, side: int
) -> dict[str, str]:
    """Pixels by name, of those images that are still there."""
    rows = np.array([row[shown.path] for shown in tiles if shown.path in row], np.int64)
    found = thumbnails(images, rows, side, available_cpus())
    return {images.names[number]: uri for number, uri in found.items()}


def _with(uris: dict[str, str], tiles: Any) -> tuple[Tile, ...]:
    return tuple(replace(shown, uri=uris[shown.path]) for shown in tiles if shown.path in uris)
