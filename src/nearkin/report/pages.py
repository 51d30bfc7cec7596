"""report.html of a finished run, from its files."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import numpy as np
from jaxtyping import Int
from msgspec import Struct
from msgspec.structs import replace

from nearkin.data.images import Images
from nearkin.data.labels import numbered
from nearkin.distributed import available_cpus
from nearkin.errors import DataError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.layout import EarlyMap
from nearkin.evaluation.table import EmbeddingTable, read_embeddings
from nearkin.files import replace_text, usable
from nearkin.pace import ProgressCallback, count, ignore_progress
from nearkin.report.encoder_report import encoder_page
from nearkin.report.image_map import ONE_FILE, image_map, thumbnails
from nearkin.report.page.blocks import MEDOID_SIDE, Cards, ClassView, Page, Pairs, Tile, Tiles
from nearkin.report.page.html import render
from nearkin.report.page.map import ImageMap, write_files
from nearkin.run import edits
from nearkin.run.folder import KINDS, RunFolder

FILES: Final = "files"  # Where a server has the files of a page


def served_page(
    folder: RunFolder, images: Images, one_file: int = ONE_FILE, *, site: str
) -> tuple[str, ImageMap | None]:
    """Return the report of a finished run for a server, and its map; its files are in `FILES`.

    `site` is the identifier that the page's requests carry.
    """
    embeddings = read_embeddings(folder.embeddings, images)
    map_ = image_map(folder, embeddings, images, served=True, one_file=one_file)
    page = page_of(folder, images, embeddings)
    return render(page, map_, site=site, files=FILES), map_


def write_page(
    folder: RunFolder,
    images: Images,
    on_progress: ProgressCallback = ignore_progress,
    early: EarlyMap | None = None,
    output: Path | None = None,
    one_file: int = ONE_FILE,
) -> None:
    """Write the report of a finished run.

    Of more than `one_file` images, a folder beside the page, such as report_files, holds most.
    """
    on_progress(0, 2, "page: embeddings")
    embeddings = read_embeddings(folder.embeddings, images)
    page = page_of(folder, images, embeddings)
    on_progress(1, 2, "page: map")
    map_ = image_map(folder, embeddings, images, early, one_file=one_file)
    _write(output or folder.report, page, map_)
    on_progress(2, 2, "page: written")


def write_table_page(
    table: EmbeddingTable,
    images: Images,
    rows: Int[np.ndarray, " rows"],
    output: Path,
    one_file: int = ONE_FILE,
) -> None:
    """Write a page with the map of a table of features, of which a block is in memory.

    `rows` are the image of each row of the table; `one_file` is as of `write_page`.
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

    map_ = image_map(None, embeddings, images, read=table.blocks, one_file=one_file)
    if map_ is None:
        raise DataError(f"{table.path} has fewer than two images, which need no map")
    page = Page(
        kicker="nearkin explore",
        title=f"{count(len(rows), 'image')} of {table.path.name}",
        lead="Features that nearkin embed has written"
        + (f", {table.removed} removed." if table.removed else "."),
        sections=(),
    )
    _write(output, page, map_)


def _write(path: Path, page: Page, map_: ImageMap | None) -> None:
    """Write a page, after the files of its map beside it, if it has such."""
    folder = files_beside(path)
    if map_ and map_.per_file:
        write_files(map_, folder)
    replace_text(path, render(page, map_, files=quote(os.fsencode(folder.name))))


def files_beside(page: Path) -> Path:
    """Return the folder of the files of a page, if it has such."""
    return page.with_name(f"{page.stem}_{FILES}")


def page_of(folder: RunFolder, images: Images, embeddings: Embeddings) -> Page:
    """Return the content of a finished run's page, but for the map."""
    if not folder.page.exists():
        return encoder_page(folder, images, embeddings)
    with usable(folder.page, f"{KINDS[folder.kind].verb} again"):
        page = msgspec.convert(json.loads(folder.page.read_bytes()), Page)
    rows = edits.classes(folder, ())["classes"] if folder.kind == "discovery" else []
    return with_thumbnails(_edited(page, rows), images, available_cpus(), on_map=True)


def store_page(folder: RunFolder, page: Page) -> None:
    """Store the content of a page, whose thumbnails are made anew each time."""
    folder.page.parent.mkdir(parents=True, exist_ok=True)
    # Not by msgspec, which refuses names of files that are not UTF-8.
    replace_text(folder.page, json.dumps(msgspec.to_builtins(page)))


def _edited(page: Page, rows: Sequence[Mapping[str, Any]]) -> Page:
    """Let classes have the names and sizes of the run now, on the page and on the map.

    Novel classes that were split off have cards, too; those without an image left have none.
    """
    names = {row["cluster"]: edits.display_name(row) for row in rows}
    sizes = {row["cluster"]: row["size"] for row in rows}
    novel = {
        row["cluster"]: ClassView(row["cluster"], 0) for row in rows if row["kind"] == "novel"
    }

    def named(cluster: str) -> str:
        name = names.get(cluster, cluster)
        return name if name == cluster else f"{name} ({cluster})"

    def view(each: ClassView) -> ClassView:
        return replace(
            each,
            name=named(each.name),
            size=sizes.get(each.name, each.size),
            medoid=each.medoid and replace(each.medoid, side=MEDOID_SIDE),
            merge=tuple(map(named, each.merge)),
            on_map=names.get(each.name, each.name),
        )

    def cards(block: Cards) -> Cards:
        views = {each.name: each for each in block.classes}
        if block.kind == "new":
            every = {**views, **novel, **views}  # those that were split off come last
            views = {name: each for name, each in every.items() if sizes.get(name, 1)}
        return replace(block, classes=tuple(map(view, views.values())))

    changed: Page = _changed(page, Cards, cards)
    return changed


def with_thumbnails(page: Page, images: Images, workers: int, *, on_map: bool = False) -> Page:
    """Return a page, whose images have names only, with the pixels of those that can be read.

    With `on_map`, they lead to their places on its map.
    """
    rows = {name: row for row, name in enumerate(images.names)}
    shown = defaultdict[int, set[int]](set)  # rows by the side that they are shown with
    _changed(page, Tile, lambda tile: shown[tile.side].add(rows.get(tile.path, -1)))
    uris = {
        side: thumbnails(images, np.array([*of_side - {-1}], np.int64), side, workers)
        for side, of_side in shown.items()
    }

    def with_pixels(tile: Tile) -> Tile:
        row = rows.get(tile.path, -1)
        return replace(tile, uri=uris[tile.side].get(row, ""), number=row if on_map else -1)

    changed: Page = _changed(page, Tile, with_pixels)
    return changed


def _changed(value: Any, kind: type[Struct], change: Callable[[Any], Any]) -> Any:
    """Return a page, or a part of it, with all values of a kind in it changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_changed(each, kind, change) for each in value)
    if isinstance(value, Page | Tiles | Pairs | Cards | ClassView):
        fields = value.__struct_fields__
        parts = {name: _changed(getattr(value, name), kind, change) for name in fields}
        return replace(value, **parts)
    return value
