"""The page of `nearkin audit`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from nearkin.data.images import Images
from nearkin.report.duplicates_page import Pair, found_tiles, tiled
from nearkin.report.page.html import BLOCKS, Chart, document, line_chart
from nearkin.report.page.map import ImageMap, map_section, script
from nearkin.report.page.sections import Table, Tile

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


def audit_page(
    content: AuditContent,
    images: Images | None,
    data: str,
    workers: int,
    image_map: ImageMap | None = None,
) -> str:
    """Return the page; of features without images, one without lists of images."""
    leaks, doubts, bad = content.leaks[:SHOWN], content.doubts[:SHOWN], content.bad[:SHOWN]
    rows = {row for leak in leaks for row in leak[:2]} | {each[0] for each in (*doubts, *bad)}
    tiles = {} if images is None else found_tiles(images, rows, workers)
    pairs = tiled(leaks, tiles)
    explanation = "On the left a test image, on the right the training image, with their cosine."
    return document(
        title=f"Audit of {data}",
        kicker="nearkin audit",
        lead=content.lead,
        sections=[
            ("Summary", BLOCKS.paragraphs(content.lines)),
            ("Map", map_section(image_map) if image_map else Markup()),
            ("Price of leaks", Markup().join(map(BLOCKS.results, content.tables))),
            ("Distance", line_chart(content.curve) if content.curve else Markup()),
            ("Leaks", BLOCKS.pairs(explanation, pairs) if pairs else Markup()),
            ("Labels", _tiles("Labels to check", doubts, tiles)),
            ("Images", _tiles("Images that show little, or are odd", bad, tiles)),
        ],
        tiny=images is not None and images.is_small,
        script=script() if image_map else "",
    )


def _tiles(
    title: str, found: Sequence[tuple[int, float, str]], tiles: Mapping[int, Tile]
) -> Markup:
    shown = [
        Tile(tiles[row].path, tiles[row].uri, value, note)
        for row, value, note in found
        if row in tiles
    ]
    return Markup(BLOCKS.tiles(title, "", shown)) if shown else Markup()
