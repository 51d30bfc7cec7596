"""HTML from templates: escaping, whole documents with their policy, line charts as SVG."""

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nearkin.pace import count
from nearkin.text import printable

SHADES: Final = 10  # background shades of a table cell, besides none

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
"""What sections consist of: a function for each macro of the template."""


def document(
    *,
    title: str,
    kicker: str,
    lead: str,
    sections: Iterable[tuple[str, str]],  # headings, each with its content
    script: str = "",
    tiny: bool = False,  # enlarge images without blur, since they are only a few pixels wide
    served: bool = False,  # allow requests to the page's server
    files: bool = False,  # allow scripts and images from files beside the page
) -> str:
    """Return a whole page; sections without content are left out.

    A Content-Security-Policy in its head keeps browsers from loading, running or sending anything
    but the page's own script, in case some text is ever taken for markup.
    """
    return TEMPLATES.get_template("page.html").render(
        title=title,
        kicker=kicker,
        lead=lead,
        sections={name: content for name, content in sections if content.strip()},
        policy=policy(script, served=served, files=files),
        style=Markup(STYLE),
        script=Markup(script),
        tiny=tiny,
        served=served,
    )


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


Number = int | float
Points = Sequence[tuple[Number, Number]]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over a common x axis."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]
    """The (x, y) points of each line by name; points that are not finite are left out."""
    note: str = ""  # how to read it
    chosen: Number | None = None  # an x to mark
    interval: tuple[Number, Number] | None = None  # an uncertainty range of x to shade


LEFT, RIGHT, TOP, BOTTOM = AREA = 56, 624, 40, 248  # edges of the plot area
MAX_DOTS: Final = 40  # a line of more points is drawn without dots


class Axis(NamedTuple):
    """A linear scale from values to SVG coordinates."""

    ticks: tuple[float, ...]  # round numbers, the first and last at the two ends
    start: Number
    end: Number

    def __call__(self, value: Number) -> float:
        """Return the coordinate of a value."""
        low, high = self.ticks[0], self.ticks[-1]
        share = (value - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)


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


def line_chart(chart: Chart) -> Markup:
    """Return a chart with a legend if it has several lines, and its values as a folded table.

    A chart without finite points is empty.
    """
    lines = {name: finite for name in chart.series if (finite := _finite(chart.series[name]))}
    if not lines:
        return Markup()
    places = [place for points in lines.values() for place in points]
    marked = [x for x in (chart.chosen, *(chart.interval or ())) if x is not None]
    x = Axis(round_ticks([*(x for x, _ in places), *marked]), LEFT, RIGHT)
    y = Axis(round_ticks([y for _, y in places]), BOTTOM, TOP)
    columns = [dict(points) for points in lines.values()]
    values = [
        (f"{x:g}", *(f"{of[x]:.4g}" if x in of else "" for of in columns))
        for x in sorted({x for x, _ in places})
    ]
    return Markup(BLOCKS.chart(chart, lines, x, y, values, AREA, MAX_DOTS))


def _finite(points: Points) -> Points:
    return sorted((x, y) for x, y in points if math.isfinite(x) and math.isfinite(y))
