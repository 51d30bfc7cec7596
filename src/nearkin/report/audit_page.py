"""The page of `nearkin audit`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from nearkin.data.images import Images
from nearkin.report.duplicates_page import Pair, found_tiles, tiled
from nearkin.report.page.blocks import Chart, Page, Pairs, Paragraphs, Table, Tile, Tiles
from nearkin.report.page.html import render

SHOWN: Final = 48  # Images of a list


@dataclass(frozen=True)
class AuditContent:
    """What the page shows, as values."""

    lead: str
    lines: tuple[str, ...]  # What was found, a sentence each
    tables: tuple[Table, ...]
    curve: Chart | None  # Accuracy by the distance to the nearest training image
    leaks: tuple[Pair, ...]  # Test and training image, cosine, why
    doubts: tuple[tuple[int, float, str], ...]  # Image, score, the label and the other class
    bad: tuple[tuple[int, float, str], ...]  # Image, what it is decided by, its kind


def audit_page(content: AuditContent, images: Images | None, data: str, workers: int) -> str:
    """Return the page; of features without images, one without lists of images."""
    leaks, doubts, bad = content.leaks[:SHOWN], content.doubts[:SHOWN], content.bad[:SHOWN]
    rows = {row for leak in leaks for row in leak[:2]} | {each[0] for each in (*doubts, *bad)}
    tiles = {} if images is None else found_tiles(images, rows, workers)
    explanation = "On the left a test image, on the right the training image, with their cosine."
    page = Page(
        kicker="nearkin audit",
        title=f"Audit of {data}",
        lead=content.lead,
        sections=(
            ("Summary", (Paragraphs(content.lines),)),
            ("Price of leaks", content.tables),
            ("Distance", (content.curve,) if content.curve else ()),
            ("Leaks", (Pairs(explanation, tiled(leaks, tiles)),)),
            ("Labels", (_tiles("Labels to check", doubts, tiles),)),
            ("Images", (_tiles("Images that show little, or are odd", bad, tiles),)),
        ),
        tiny=images is not None and images.is_small,
    )
    return render(page)


def _tiles(
    title: str, found: Sequence[tuple[int, float, str]], tiles: Mapping[int, Tile]
) -> Tiles:
    shown = (
        Tile(tiles[row].path, tiles[row].uri, value, note)
        for row, value, note in found
        if row in tiles
    )
    return Tiles(title, "", tuple(shown))
