"""The page of `nearkin duplicates`: pairs of images to look at."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from nearkin.data.images import Images
from nearkin.evaluation.duplicates import Precision
from nearkin.report.page.blocks import Page, Pairs, Table, Tile

MAX_PAIRS: Final = 24  # Pairs in each list


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
) -> Page:
    """Return the page, whose images have no pixels yet.

    Args:
        images: Those of the pairs.
        data: What they are called.
        lead: How many duplicates there are, in a sentence.
        estimate: What the threshold on features does.
        found: Each image that is not kept, beside the one that is.
        others: Images beside the most similar ones below the threshold.
    """
    near = sorted(found, key=lambda pair: pair.similarity)
    rest = near[MAX_PAIRS:]
    lists = {
        "Least similar": near[:MAX_PAIRS],
        "Further duplicates": rest[:: len(rest) // MAX_PAIRS + 1],
        "No duplicates": sorted(others, key=lambda pair: -pair.similarity)[:MAX_PAIRS],
    }
    threshold = () if estimate is None else (_threshold(estimate),)
    sections = ((title, (_pairs(images, title, pairs),)) for title, pairs in lists.items())
    return Page(
        kicker="nearkin duplicates",
        title=f"Duplicates in {data}",
        lead=lead,
        sections=(("Threshold", threshold), *sections),
        tiny=images.is_small,
    )


def _pairs(images: Images, title: str, pairs: Sequence[Pair]) -> Pairs:
    def tile(row: int) -> Tile:
        return Tile(images.names[row], "", 0.0)

    shown = ((tile(one), tile(two), f"{cosine:.4f}", note) for one, two, cosine, note in pairs)
    return Pairs(EXPLANATIONS[title], tuple(shown))


EXPLANATIONS: Final = {
    "Least similar": "On the left the image that is kept, on the right its duplicate, from the "
    "least similar pair on.",
    "Further duplicates": "Evenly drawn from all other pairs.",
    "No duplicates": "Sampled images beside the most similar image below the threshold, closest "
    "first. If some are duplicates, lower it.",
}


def _threshold(estimate: Precision) -> Table:
    note = (
        f"Of {estimate.num} sampled images, each with an edited copy and with the most similar "
        "image that is no duplicate by its pixels; 95 % intervals. Precision is the share of "
        "copies among both above the threshold. If the least similar pairs are no duplicates, "
        "raise it."
    )
    return Table(f"Threshold {estimate.threshold:.4f}", (), tuple(estimate.rows()), note)
