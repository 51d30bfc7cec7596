"""report.html of a finished run, from its files."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from nearkin.data.images import Images
from nearkin.data.labels import numbered
from nearkin.distributed import available_cpus
from nearkin.errors import DataError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.layout import EarlyMap
from nearkin.evaluation.table import EmbeddingTable
from nearkin.evaluation.vectors import read_embeddings
from nearkin.files import replace_text, usable
from nearkin.pace import ProgressCallback, count, ignore_progress
from nearkin.report.encoder_report import frozen_report, training_report
from nearkin.report.image_map import ONE_FILE, image_map, thumbnails
from nearkin.report.page.html import document
from nearkin.report.page.map import ImageMap, map_section, script, write_files
from nearkin.report.page.sections import (
    ClassificationReport,
    ClassView,
    DiscoveryReport,
    Report,
    Tile,
    TrainingReport,
    report_page,
)
from nearkin.report.plots import neighbor_sheet, write_figures
from nearkin.run.folder import KINDS, RunFolder
from nearkin.run.named import display_name
from nearkin.tables import read_csv

FILES: Final = "files"  # Where a server has the files of a page
MEDOID_SIDE: Final = 192
SIDE: Final = 96


def served_page(
    folder: RunFolder, images: Images, one_file: int = ONE_FILE
) -> tuple[str, ImageMap | None]:
    """Return the report of a finished run for a server, and its map; its files are in `FILES`."""
    embeddings = read_embeddings(folder.embeddings, images)
    map_ = image_map(folder, embeddings, images, one_file=one_file)
    report = report_of(folder, images, embeddings)
    return report_page(report, map_, served=True, files=FILES), map_


def write_page(
    folder: RunFolder,
    images: Images,
    on_progress: ProgressCallback = ignore_progress,
    early: EarlyMap | None = None,
    output: Path | None = None,
    one_file: int = ONE_FILE,
) -> None:
    """Write the report of a finished run, and its plots unless the page goes elsewhere.

    Of more than `one_file` images, a folder beside the page, such as report_files, holds most.
    """
    on_progress(0, 3, "page: embeddings")
    embeddings = read_embeddings(folder.embeddings, images)
    report = report_of(folder, images, embeddings)
    on_progress(1, 3, "page: map")
    map_ = image_map(folder, embeddings, images, early, one_file=one_file)
    on_progress(2, 3, "page: plots")
    if output is None:
        write_figures(folder, report, map_, images)
        if isinstance(report, TrainingReport):
            neighbor_sheet(embeddings, images, folder.plots / "neighbors.png")
    path = output or folder.report
    replace_text(path, report_page(report, map_, files=_files(map_, path)))
    on_progress(3, 3, "page: written")


def write_table_page(
    table: EmbeddingTable,
    images: Images,
    rows: Int[np.ndarray, " rows"],
    output: Path,
    one_file: int = ONE_FILE,
) -> None:
    """Write a page with the map of a table of features, of which a block is in memory.

    Args:
        table: Features.
        images: The images that they are of.
        rows: The image of each row of the table.
        output: Where to.
        one_file: As of `write_page`.
    """
    classes, numbers = numbered(table.texts("label"))
    embeddings = Embeddings(
        np.zeros((len(rows), 0), np.float32),
        numbers,
        rows=rows,
        paths=table.texts("path"),
        classes=classes,
        splits=np.array(table.texts("split")),
    )

    def read(chosen: Int[np.ndarray, " chosen"]) -> Iterator[Float[Tensor, "_ dim"]]:
        return table.blocks(chosen)

    map_ = image_map(None, embeddings, images, read=read, one_file=one_file)
    if map_ is None:
        raise DataError(f"{table.path} has fewer than two images, which need no map")
    page = document(
        title=f"{count(len(rows), 'image')} of {table.path.name}",
        kicker="nearkin report",
        lead="Features that nearkin embed has written"
        + (f", {table.removed} removed." if table.removed else "."),
        sections=[("Map", map_section(map_, _files(map_, output)))],
        script=script(),
        files=bool(map_.per_file),
    )
    replace_text(output, page)


def _files(map_: ImageMap | None, page: Path) -> str:
    """Write the files of a map beside its page, if it has such; return their address."""
    folder = page.with_name(f"{page.stem}_{FILES}")
    if map_ and map_.per_file:
        write_files(map_, folder)
    return quote(os.fsencode(folder.name))


def report_of(folder: RunFolder, images: Images, embeddings: Embeddings) -> Report:
    """Return the content of a finished run's page, but for the map."""
    if folder.page.exists():
        return _stored_report(folder, images)
    report = frozen_report if folder.is_frozen else training_report
    return report(folder, images, embeddings)


def store_report(folder: RunFolder, report: DiscoveryReport | ClassificationReport) -> None:
    """Store the content of a page whose thumbnails are made anew each time."""
    folder.page.parent.mkdir(parents=True, exist_ok=True)
    # Not by msgspec, which refuses names of files that are not UTF-8.
    replace_text(folder.page, json.dumps(msgspec.to_builtins(report, enc_hook=str)))


def _stored_report(folder: RunFolder, images: Images) -> Report:
    """Return the stored content, with thumbnails and the names that the user has given."""
    kind = ClassificationReport if folder.kind == "classification" else DiscoveryReport
    with usable(folder.page, f"{KINDS[folder.kind].verb} again"):
        report: Any = msgspec.convert(json.loads(folder.page.read_bytes()), kind)
    groups = ("novel", "assigned") if kind is DiscoveryReport else ("classes",)
    alone = ("unsure",) if kind is DiscoveryReport else ("unsure", "doubts")
    views = [view for group in groups for view in getattr(report, group)]
    tiles = [tile for view in views for tile in (*view.core, *view.border)]
    tiles += [tile for group in alone for tile in getattr(report, group)]
    small = _found(tiles, images, SIDE)
    large = _found([view.medoid for view in views if view.medoid], images, MEDOID_SIDE)
    names = dict[str, str]()
    if kind is DiscoveryReport:
        names = {row["cluster"]: display_name(row) for row in read_csv(folder.clusters)}

    def named(cluster: str) -> str:
        name = names.get(cluster, cluster)
        return name if name == cluster else f"{name} ({cluster})"

    def completed(view: ClassView) -> ClassView:
        return replace(
            view,
            name=named(view.name),
            on_map=names.get(view.name, view.name),
            merge=tuple(map(named, view.merge)),
            medoid=next(iter(_completed([view.medoid] if view.medoid else [], large)), None),
            core=_completed(view.core, small),
            border=_completed(view.border, small),
        )

    changed = {group: tuple(map(completed, getattr(report, group))) for group in groups}
    lone = {group: _completed(getattr(report, group), small) for group in alone}
    stored: Report = replace(report, **changed, **lone)
    return stored


def _found(tiles: Sequence[Tile], images: Images, side: int) -> dict[str, dict[str, Any]]:
    """Numbers and thumbnails by name, of images that are still there and readable."""
    row = {name: number for number, name in enumerate(images.names)}
    rows = np.array([row[tile.path] for tile in tiles if tile.path in row], np.int64)
    uris = thumbnails(images, rows, side, available_cpus())
    return {images.names[row]: {"number": row, "uri": uri} for row, uri in uris.items()}


def _completed(tiles: Sequence[Tile], found: dict[str, dict[str, Any]]) -> tuple[Tile, ...]:
    return tuple(replace(tile, **found[tile.path]) for tile in tiles if tile.path in found)
