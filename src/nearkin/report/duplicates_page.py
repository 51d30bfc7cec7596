"""The page of `nearkin duplicates`: pairs of images to look at."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from nearkin.data.images import Images
from nearkin.evaluation.duplicates import Precision
from nearkin.report.page.blocks import PAIR_SIDE, Page, Pairs, Table, Tile

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

    `found` has each image that is not kept, beside the one that is; `others` images beside the
    most similar ones below the threshold. `lead` says how many duplicates there are.
    """

    def pairs(note: str, shown: Sequence[Pair]) -> tuple[Pairs]:
        def tile(row: int) -> Tile:
            return Tile(images.names[row], side=PAIR_SIDE)

        tiles = ((tile(one), tile(two), f"{cosine:.4f}", why) for one, two, cosine, why in shown)
        return (Pairs(note, tuple(tiles)),)

    near = sorted(found, key=lambda pair: pair.similarity)
    rest = near[MAX_PAIRS:]
    least = (
        "On the left the image that is kept, on the right its duplicate, from the least similar "
        "pair on."
    )
    below = (
        "Sampled images beside the most similar image below the threshold, closest first. If some "
        "are duplicates, lower it."
    )
    closest = sorted(others, key=lambda pair: -pair.similarity)[:MAX_PAIRS]
    further = rest[:: len(rest) // MAX_PAIRS + 1]
    return Page(
        kicker="nearkin duplicates",
        title=f"Duplicates in {data}",
        lead=lead,
        sections=(
            ("Threshold", () if estimate is None else (_threshold(estimate),)),
            ("Least similar", pairs(least, near[:MAX_PAIRS])),
            ("Further duplicates", pairs("Evenly drawn from all other pairs.", further)),
            ("No duplicates", pairs(below, closest)),
        ),
        tiny=images.is_small,
    )


def _threshold(estimate: Precision) -> Table:
    note = (
        f"Of {estimate.num} sampled images, each with an edited copy and with the most similar "
        "image that is no duplicate by its pixels; 95 % intervals. Precision is the share of "
        "copies among both above the threshold. If the least similar pairs are no duplicates, "
        "raise it."
    )
    return Table(f"Threshold {estimate.threshold:.4f}", (), tuple(estimate.rows()), note)
