"""The page of `nearkin duplicates`: pairs of images to look at."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from nearkin.data.images import Images
from nearkin.evaluation.duplicates import Precision
from nearkin.report.image_map import thumbnails
from nearkin.report.page.blocks import Page, Pairs, Table, Tile
from nearkin.report.page.html import render
from nearkin.text import as_text

MAX_PAIRS: Final = 24  # Pairs in each list
SIDE: Final = 128


class Pair(NamedTuple):
    """Two images, by their rows, and how similar they are."""

    one: int
    two: int
    similarity: float
    note: str = ""


def duplicates_page(
    images: Images,
    data: str,
    lead: str,
    estimate: Precision | None,
    found: Sequence[Pair],
    others: Sequence[Pair],
    workers: int,
) -> str:
    """Return the page.

    Args:
        images: Those of the pairs.
        data: What they are called.
        lead: How many duplicates there are, in a sentence.
        estimate: What the threshold on features does.
        found: Each image that is not kept, beside the one that is.
        others: Images beside the most similar ones below the threshold.
        workers: Processes that decode photographs.
    """
    near = sorted(found, key=lambda pair: pair.similarity)
    rest = near[MAX_PAIRS:]
    lists = {
        "Least similar": near[:MAX_PAIRS],
        "Further duplicates": rest[:: len(rest) // MAX_PAIRS + 1],
        "No duplicates": sorted(others, key=lambda pair: -pair.similarity)[:MAX_PAIRS],
    }
    rows = {row for pairs in lists.values() for pair in pairs for row in pair[:2]}
    tiles = found_tiles(images, rows, workers)
    page = Page(
        kicker="nearkin duplicates",
        title=f"Duplicates in {data}",
        lead=lead,
        sections=(
            ("Threshold", () if estimate is None else (_threshold(estimate),)),
            *(
                (title, (Pairs(EXPLANATIONS[title], tiled(pairs, tiles)),))
                for title, pairs in lists.items()
            ),
        ),
        tiny=images.is_small,
    )
    return render(page)


EXPLANATIONS: Final = {
    "Least similar": "On the left the image that is kept, on the right its duplicate, from the "
    "least similar pair on. Similar features are no duplicates? Raise the threshold.",
    "Further duplicates": "Evenly drawn from all other pairs.",
    "No duplicates": "Sampled images beside the most similar image below the threshold, closest "
    "first. If some are duplicates, lower it.",
}


def found_tiles(images: Images, rows: Iterable[int], workers: int) -> dict[int, Tile]:
    """Return thumbnails by row, of images that can be read."""
    uris = thumbnails(images, np.array(sorted(rows), np.int64), SIDE, workers)
    return {row: Tile(as_text(images.names[row]), uri, 0.0) for row, uri in uris.items()}


def tiled(
    pairs: Iterable[Pair], tiles: Mapping[int, Tile]
) -> tuple[tuple[Tile, Tile, str, str], ...]:
    """Return pairs as they are drawn, where both images can be."""
    return tuple(
        (tiles[one], tiles[two], f"{similarity:.4f}", note)
        for one, two, similarity, note in pairs
        if one in tiles and two in tiles
    )


def _threshold(estimate: Precision) -> Table:
    note = (
        f"Of {estimate.num} sampled images, each with an edited copy and with the most similar "
        "image that is no duplicate by its pixels; 95 % intervals. Precision is the share of "
        "copies among both above the threshold."
    )
    return Table(f"Threshold {estimate.threshold:.4f}", (), tuple(estimate.rows()), note)
