"""The page of `nearkin duplicates`: pairs of images to look at, beside what the threshold does."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from markupsafe import Markup

from nearkin.data.images import Images
from nearkin.evaluation.copies import Precision
from nearkin.evaluation.table import as_text
from nearkin.report.image_map import thumbnails
from nearkin.report.page.html import BLOCKS, Chart, Points, document
from nearkin.report.page.sections import Table, Tile, line_charts

MAX_PAIRS: Final = 24  # Pairs in each list
SIDE: Final = 128


class Pair(NamedTuple):
    """Two images, and how similar they are."""

    one: str
    two: str
    similarity: float
    note: str = ""


def copies_page(
    images: Images,
    data: str,
    lead: str,
    findings: Sequence[str],
    estimate: Precision | None,
    curves: Mapping[str, Points],
    copies: Sequence[Pair],
    others: Sequence[Pair],
    workers: int,
) -> str:
    """Return the page.

    Args:
        images: Those of the pairs, by name.
        data: What they are called.
        lead: How many copies there are, in a sentence.
        findings: What to know, a sentence each.
        estimate: What the threshold does.
        curves: What other thresholds would do.
        copies: Each image that is not kept, beside the one that is.
        others: Images beside the most similar ones below the threshold.
        workers: Processes that decode photographs.
    """
    near = sorted(copies, key=lambda pair: pair.similarity)
    rest = near[MAX_PAIRS:]
    lists = {
        "Least similar copies": near[:MAX_PAIRS],
        "Further copies": [rest[row] for row in range(0, len(rest), len(rest) // MAX_PAIRS + 1)],
        "Not copies": sorted(others, key=lambda pair: -pair.similarity)[:MAX_PAIRS],
    }
    row = {as_text(name): number for number, name in enumerate(images.names)}
    names = {name for pairs in lists.values() for pair in pairs for name in (pair.one, pair.two)}
    uris = thumbnails(images, np.array([row[name] for name in names], np.int64), SIDE, workers)
    tiles = {name: Tile(name, uris[row[name]], 0.0) for name in names if row[name] in uris}
    blocks = {
        title: BLOCKS.pairs(EXPLANATIONS[title], _tiled(pairs, tiles))
        for title, pairs in lists.items()
        if pairs
    }
    return document(
        title=f"Copies in {data}",
        kicker="nearkin duplicates",
        lead=lead,
        sections=[
            ("Findings", BLOCKS.findings(findings)),
            ("Threshold", _threshold(estimate, curves)),
            *blocks.items(),
        ],
        tiny=images.is_small,
    )


EXPLANATIONS: Final = {
    "Least similar copies": "On the left the image that is kept, on the right its copy, from the "
    "least similar pair on. If some are no copies, raise the threshold.",
    "Further copies": "Evenly drawn from all other pairs.",
    "Not copies": "Sampled images beside the most similar image below the threshold, closest "
    "first. If some are copies, lower it.",
}


def _tiled(
    pairs: Sequence[Pair], tiles: Mapping[str, Tile]
) -> Iterator[tuple[Tile, Tile, str, str]]:
    for pair in pairs:
        if pair.one in tiles and pair.two in tiles:
            yield tiles[pair.one], tiles[pair.two], f"{pair.similarity:.4f}", pair.note


def _threshold(estimate: Precision | None, curves: Mapping[str, Points]) -> str:
    if estimate is None:
        return ""
    note = (
        f"Of {estimate.num} sampled images, each with an edited copy and with the most similar "
        "image that is no copy by its bytes and thumbnail; 95 % intervals. Precision is the share "
        "of copies among both above the threshold."
    )
    chart = Chart(
        "Other thresholds",
        "threshold on the cosine",
        "share",
        curves,
        chosen=round(estimate.threshold, 4),
    )
    title = f"Threshold {estimate.threshold:.4f}"
    table = Markup(BLOCKS.results(Table(title, (), tuple(estimate.rows()), note)))
    return table + line_charts([chart])
