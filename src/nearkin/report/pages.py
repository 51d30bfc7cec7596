"""report.html of a finished run, from its files."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec
import numpy as np
from jaxtyping import Float, Int
from msgspec.structs import replace
from torch import Tensor

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
from nearkin.report.page.blocks import Block, Cards, ClassView, Page, Pairs, Tile, Tiles
from nearkin.report.page.html import render
from nearkin.report.page.map import ImageMap, write_files
from nearkin.report.plots import write_figures
from nearkin.run.folder import KINDS, RunFolder
from nearkin.run.named import CLUSTER_COLUMNS, display_name, read_edited

FILES: Final = "files"  # Where a server has the files of a page
MEDOID_SIDE: Final = 192
PAIR_SIDE: Final = 128
SIDE: Final = 96


def served_page(
    folder: RunFolder, images: Images, one_file: int = ONE_FILE
) -> tuple[str, ImageMap | None]:
    """Return the report of a finished run for a server, and its map; its files are in `FILES`."""
    embeddings = read_embeddings(folder.embeddings, images)
    map_ = image_map(folder, embeddings, images, one_file=one_file)
    page = page_of(folder, images, embeddings)
    return render(page, map_, served=True, files=FILES), map_


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
    page = page_of(folder, images, embeddings)
    on_progress(1, 3, "page: map")
    map_ = image_map(folder, embeddings, images, early, one_file=one_file)
    on_progress(2, 3, "page: plots")
    if output is None:
        write_figures(folder, page, map_, images)
    path = output or folder.report
    replace_text(path, render(page, map_, files=_files(map_, path)))
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
    page = Page(
        kicker="nearkin report",
        title=f"{count(len(rows), 'image')} of {table.path.name}",
        lead="Features that nearkin embed has written"
        + (f", {table.removed} removed." if table.removed else "."),
        sections=(),
    )
    replace_text(output, render(page, map_, files=_files(map_, output)))


def _files(map_: ImageMap | None, page: Path) -> str:
    """Write the files of a map beside its page, if it has such; return their address."""
    folder = files_beside(page)
    if map_ and map_.per_file:
        write_files(map_, folder)
    return quote(os.fsencode(folder.name))


def files_beside(page: Path) -> Path:
    """Return the folder of the files of a page, if it has such."""
    return page.with_name(f"{page.stem}_{FILES}")


def page_of(folder: RunFolder, images: Images, embeddings: Embeddings) -> Page:
    """Return the content of a finished run's page, but for the map."""
    if not folder.page.exists():
        return encoder_page(folder, images, embeddings)
    with usable(folder.page, f"{KINDS[folder.kind].verb} again"):
        page = msgspec.convert(json.loads(folder.page.read_bytes()), Page)
    names = dict[str, str]()
    if folder.kind == "discovery":
        rows = read_edited(folder.clusters, CLUSTER_COLUMNS)
        names = {row["cluster"]: display_name(row) for row in rows}
    return with_thumbnails(_named(page, names), images, available_cpus(), on_map=True)


def store_page(folder: RunFolder, page: Page) -> None:
    """Store the content of a page, whose thumbnails are made anew each time."""
    folder.page.parent.mkdir(parents=True, exist_ok=True)
    # Not by msgspec, which refuses names of files that are not UTF-8.
    replace_text(folder.page, json.dumps(msgspec.to_builtins(page)))


def _named(page: Page, names: Mapping[str, str]) -> Page:
    """Let classes have the names that users have given to clusters, on the page and on the map."""

    def named(cluster: str) -> str:
        name = names.get(cluster, cluster)
        return name if name == cluster else f"{name} ({cluster})"

    def view(each: ClassView) -> ClassView:
        merge, on_map = tuple(map(named, each.merge)), names.get(each.name, each.name)
        return replace(each, name=named(each.name), merge=merge, on_map=on_map)

    def block(each: Block) -> Block:
        if isinstance(each, Cards):
            return replace(each, classes=tuple(map(view, each.classes)))
        return each

    return _changed(page, block)


def with_thumbnails(
    page: Page, images: Images | None, workers: int, *, on_map: bool = False
) -> Page:
    """Return a page with the pixels of its images, without those that cannot be read.

    Args:
        page: Its images have names only.
        images: Among which they are; without any, the page shows none.
        workers: Processes that decode photographs.
        on_map: Whether images lead to their places on the map of the page.
    """
    asked = defaultdict[int, set[str]](set)
    _changed(page, _on_tiles(lambda tile, side: asked[side].add(tile.path)))
    found = {side: _found(names, images, side, workers) for side, names in asked.items()}

    def shown(tile: Tile, side: int) -> Tile | None:
        row, uri = found[side].get(tile.path, (-1, ""))
        return replace(tile, uri=uri, number=row if on_map else -1) if uri else None

    return _changed(page, _on_tiles(shown))


def _changed(page: Page, change: Callable[[Block], Block]) -> Page:
    sections = ((title, tuple(map(change, blocks))) for title, blocks in page.sections)
    return replace(page, sections=tuple(sections))


def _on_tiles(change: Callable[[Tile, int], Tile | None]) -> Callable[[Block], Block]:
    """Change each tile of a block, given its side in pixels; None leaves it out."""

    def tiles(each: Iterable[Tile], side: int = SIDE) -> tuple[Tile, ...]:
        return tuple(new for tile in each if (new := change(tile, side)))

    def view(each: ClassView) -> ClassView:
        medoid = next(iter(tiles([each.medoid] if each.medoid else [], MEDOID_SIDE)), None)
        return replace(each, medoid=medoid, core=tiles(each.core), border=tiles(each.border))

    def block(each: Block) -> Block:
        match each:
            case Tiles():
                return replace(each, tiles=tiles(each.tiles))
            case Pairs():
                both = ((*tiles(pair[:2], PAIR_SIDE), *pair[2:]) for pair in each.pairs)
                return replace(each, pairs=tuple(pair for pair in both if len(pair) == 4))
            case Cards():
                return replace(each, classes=tuple(map(view, each.classes)))
        return each

    return block


def _found(
    names: Iterable[str], images: Images | None, side: int, workers: int
) -> dict[str, tuple[int, str]]:
    """Rows and thumbnails by name, of images that are there and readable."""
    if images is None:
        return {}
    row = {name: number for number, name in enumerate(images.names)}
    rows = np.array(sorted(row[name] for name in names if name in row), np.int64)
    uris = thumbnails(images, rows, side, workers)
    return {images.names[row]: (row, uri) for row, uri in uris.items()}
