"""A page as HTML, with its policy: a template per block, which escapes all values."""

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from operator import itemgetter
from typing import Any, Final
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nearkin.pace import count
from nearkin.report.page.blocks import Block, Cards, Chart, Confusion, Number, Page, Table
from nearkin.report.page.map import ImageMap, map_data, script
from nearkin.text import printable

SHADES: Final = 10  # background shades of a table cell, besides none
MAX_OPEN_CLASSES: Final = 20  # a confusion matrix of more classes is folded
MAX_MATRIX: Final = 60  # of more classes, a table has the largest confusions
NUM_CONFUSIONS: Final = 100  # in it
STYLE: Final = (files(__package__) / "style.css").read_text(encoding="utf-8") + "".join(
    f".shade{step} {{ background: rgb(var(--shade) / {0.07 * step:.2f}) }}\n"
    for step in range(1, SHADES + 1)
)


def text(value: object) -> Markup:
    r"""Return a value as escaped text; markup stays as it is.

    Invisible characters (controls, bidirectional marks, bytes that are not UTF-8) become escape
    sequences, so that a hostile file name cannot pose as another.

    >>> str(text("<b>\u202egnp.exe"))
    '&lt;b&gt;\\u202egnp.exe'
    """
    if isinstance(value, Markup):
        return value
    return Markup(escape(printable(str(value)).replace("\n", r"\n")))


def decimal(value: float | None) -> str:
    """Return a number with two decimals; '' if it is unknown."""
    return "" if value is None or math.isnan(value) else f"{value:.2f}"


TEMPLATES: Final = Environment(
    loader=PackageLoader(__package__),
    autoescape=True,
    finalize=text,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals |= {"count": count, "decimal": decimal}
TEMPLATES.filters["fragment"] = lambda name: quote(printable(name))  # of an address
BLOCKS: Final[Any] = TEMPLATES.get_template("blocks.html").module
"""A function for each macro of the template; that of a block is called as its class is."""


def render(
    page: Page, image_map: ImageMap | None = None, *, site: str = "", files: str = ""
) -> str:
    """Return a whole page; sections without content are left out.

    A Content-Security-Policy in its head keeps browsers from loading, running or sending anything
    but the page's own script, in case some text is ever taken for markup; with a `site`, the
    identifier that a server knows its own pages by, it may also send requests to that server.
    `files` is the address of what `details` and the sheets are in.
    """
    sections = [(title, Markup().join(map(drawn, blocks))) for title, blocks in page.sections]
    if image_map is not None:
        template = TEMPLATES.get_template("map.html")
        content = template.render(map=image_map, data=Markup(map_data(image_map, files)))
        sections.insert(1, ("Map", Markup(content)))
    code, in_files = script() if image_map else "", bool(image_map and image_map.per_file)
    return TEMPLATES.get_template("page.html").render(
        page=page,
        sections={title: content for title, content in sections if content.strip()},
        policy=policy(code, served=bool(site), files=in_files),
        style=Markup(STYLE),
        script=Markup(code),
        site=site,
    )


def drawn(block: Block) -> Markup:
    """Return a block as HTML; empty if it has nothing to show."""
    match block:
        case Chart():
            return _line_chart(block)
        case Confusion():
            return _confusion(block)
        case Cards():
            numbered = enumerate(block.classes, start=1)
            anchors = {view.name: f"{block.kind}-{number}" for number, view in numbered}
            return Markup(BLOCKS.Cards(block, anchors))
    return Markup(getattr(BLOCKS, type(block).__name__)(block))


def policy(script: str = "", *, served: bool = False, files: bool = False) -> str:
    """Return the Content-Security-Policy of a page: its own style, script, images, files only."""
    beside = ["'self'"] * (served or files) + ["file:"] * (files and not served)
    images = [*beside, "data:"] + ["blob:"] * bool(script)
    allowed = ["default-src 'none'", f"img-src {' '.join(images)}"]
    allowed += [f"style-src 'sha256-{_digest(STYLE)}'"]
    scripts = [f"'sha256-{_digest(script)}'", *(beside if files else ())]
    allowed += [f"script-src {' '.join(scripts)}"] if script else []
    allowed += ["connect-src 'self'"] if served else []
    return "; ".join([*allowed, "base-uri 'none'", "form-action 'none'"])


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _confusion(confusion: Confusion) -> Markup:
    num_classes = max(len(confusion.true), len(confusion.predicted))
    if num_classes > MAX_MATRIX:
        return drawn(_largest_confusions(confusion))
    counts = confusion.dense()
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    # Rounded up, so that every count above 0 has a shade.
    shades = np.ceil(shares * SHADES).astype(int).tolist()
    rows = [
        (name, *(f"{n:,}" if n else "" for n in own))
        for name, own in zip(confusion.true, counts.tolist(), strict=True)
    ]
    folded = num_classes > MAX_OPEN_CLASSES
    return Markup(BLOCKS.Confusion(("", *confusion.predicted), rows, shades, folded))


def _largest_confusions(confusion: Confusion) -> Table:
    sizes = Counter[int]()  # of the true classes
    for true, _, images in confusion.cells:
        sizes[true] += images
    rows = [
        (confusion.true[true], confusion.predicted[predicted], f"{n:,}", f"{n / sizes[true]:.0%}")
        for true, predicted, n in confusion.largest(NUM_CONFUSIONS)
    ]
    columns = ("True class", "Predicted class", "Images", "Share of the true class")
    note = f"Of {len(confusion.true):,} true and {len(confusion.predicted):,} predicted classes."
    return Table("Largest confusions", columns, tuple(rows), note)


# ---- charts ----


LEFT, RIGHT, TOP, BOTTOM = AREA = 56, 624, 40, 248  # edges of the plot area
MAX_DOTS: Final = 40  # a line of more points is drawn without dots


def _scale(ticks: Sequence[float], start: int, end: int) -> Callable[[Number], float]:
    """Return the SVG coordinate of a value, by ticks of which the first and last are the ends."""
    low, high = ticks[0], ticks[-1]
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 1)


def round_ticks(values: Sequence[Number]) -> tuple[float, ...]:
    """Return a few round numbers that enclose these values; integers if all values are integers.

    >>> round_ticks([0.13, 0.92])
    (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    >>> round_ticks([2, 4])
    (2.0, 3.0, 4.0)
    """
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(1, abs(low), abs(high)):
        low, high = low - 1, high + 1
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= 5)
    if all(float(value).is_integer() for value in values):
        step = max(step, 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(number * step, 12) for number in range(first, last + 1))


def _line_chart(chart: Chart) -> Markup:
    """Return a chart with a legend if it has several lines, and its values as a folded table.

    A chart without finite points is empty.
    """
    finite = {
        name: sorted(point for point in points if all(map(math.isfinite, point)))
        for name, points in chart.series.items()
    }
    lines = {name: points for name, points in finite.items() if points}
    if not lines:
        return Markup()
    places = [place for points in lines.values() for place in points]
    marked = [x for x in (chart.chosen, *(chart.interval or ())) if x is not None]
    ticks = round_ticks([*(x for x, _ in places), *marked]), round_ticks([y for _, y in places])
    x, y = _scale(ticks[0], LEFT, RIGHT), _scale(ticks[1], BOTTOM, TOP)
    columns = [
        {
            (at, nth): y
            for at, same in groupby(points, itemgetter(0))
            for nth, (_, y) in enumerate(same)
        }
        for points in lines.values()
    ]  # Of points at the same place, each has a row.
    values = [
        (f"{row[0]:g}", *(f"{of[row]:.4g}" if row in of else "" for of in columns))
        for row in sorted(set().union(*columns))
    ]
    return Markup(BLOCKS.Chart(chart, lines, x, y, ticks, values, AREA, MAX_DOTS))
