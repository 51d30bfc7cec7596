"""HTML: escaping, elements, tables, line charts as SVG, and whole documents with their policy."""

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any, Final, NamedTuple

SHADES: Final = 10  # background shades of a table cell, besides none

STYLE: Final = (files(__package__) / "style.css").read_text(encoding="utf-8") + "".join(
    f".shade{step} {{ background: rgb(var(--shade) / {0.07 * step:.2f}) }}\n"
    for step in range(1, SHADES + 1)
)

VOID = frozenset({"img", "input", "link", "meta"})  # elements without an end tag


class Html(str):
    """Markup, which is not escaped again."""

    __slots__ = ()


def text(value: str) -> Html:
    r"""Return a string as escaped text; `Html` stays as it is.

    Invisible characters (controls, bidirectional marks, bytes that are not UTF-8) become escape
    sequences, so that a hostile file name cannot pose as another.

    >>> text("<b>\u202egnp.exe")
    '&lt;b&gt;\\u202egnp.exe'
    """
    if isinstance(value, Html):
        return value
    visible = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    return Html(escape("".join(visible)))


def join(parts: Iterable[str]) -> Html:
    """Concatenate text and markup."""
    return Html("".join(map(text, parts)))


def element(tag: str, /, *children: str, **attributes: str | int | float) -> Html:
    """Return an element; children that are not `Html` become text.

    In names of attributes, `_` stands for `-`; a trailing `_`, as in `class_`, is dropped.

    >>> element("p", "a < b", element("b", "!"), class_="note")
    '<p class="note">a &lt; b<b>!</b></p>'
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{text(str(value))}"'
        for name, value in attributes.items()
    )
    end = "" if tag in VOID else f"</{tag}>"
    return Html(f"<{tag}{written}>{join(children)}{end}")


def note(content: str) -> list[Html]:
    """Return a small paragraph; nothing for an empty string."""
    return [element("p", content, class_="note")] if content else []


def folded(title: str, content: Html) -> Html:
    """Return content that a click on its title opens."""
    return element("details", element("summary", title), content)


def table(caption: str, columns: Iterable[str], rows: Iterable[Html], *, class_: str = "") -> Html:
    """Return a table of rows from `row`, with a caption for screen readers.

    The first heading is that of the row names; without headings, the table has no head.
    """
    heading = [element("th", name, scope="col") for name in columns]
    parts = [element("thead", element("tr", *heading))] if heading else []
    parts = [element("caption", caption), *parts, element("tbody", *rows)]
    return element("table", *parts, class_=class_)


def row(name: str, cells: Iterable[str]) -> Html:
    """Return a table row: its name, then its cells."""
    return element(
        "tr", element("th", name, scope="row"), *(element("td", cell) for cell in cells)
    )


def scrolling(content: Html, label: str) -> Html:
    """Return a box that scrolls sideways, by keyboard too, where the page is too narrow."""
    return element("div", content, class_="wide", role="region", aria_label=label, tabindex=0)


def code(command: str) -> Html:
    """Return a command line to copy."""
    return element("pre", element("code", command))


def findings(messages: Iterable[str]) -> Html:
    """Return highlighted notes; nothing if there are none."""
    items = [element("li", element("b", "Note. "), message) for message in messages]
    return element("ul", *items, class_="findings") if items else Html()


Section = tuple[str, Html]  # a heading and its content


def document(
    *,
    title: str,
    kicker: str,
    lead: str,
    sections: Iterable[Section],
    script: str = "",
    tiny: bool = False,  # enlarge images without blur, since they are only a few pixels wide
    served: bool = False,  # allow requests to the page's server
) -> str:
    """Return a whole page; sections without content are left out.

    A Content-Security-Policy in its head keeps browsers from loading, running or sending anything
    but the page's own script, in case some text is ever taken for markup.
    """
    nonempty = [section for section in sections if section[1]]
    links = [element("li", element("a", name, href=f"#{_anchor(name)}")) for name, _ in nonempty]
    header = element(
        "header",
        element("p", kicker, class_="kicker"),
        element("h1", title),
        element("p", lead, class_="lead"),
        element("nav", element("ul", *links), aria_label="Contents"),
    )
    main = [
        element("section", element("h2", name), content, id=_anchor(name))
        for name, content in nonempty
    ]
    scripts = [element("script", Html(script))] if script else []
    body = element("body", header, element("main", *main), *scripts, class_="tiny" if tiny else "")
    # Browsers ask a server for /favicon.ico unless the page names an icon.
    icon = [element("link", rel="icon", href="data:,")] if served else []
    allowed = policy(script, served=served)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=allowed),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        *icon,
        element("style", Html(STYLE)),
    )
    attributes = {"data_served": "true"} if served else {}
    return f"<!doctype html>\n{element('html', head, body, lang='en', **attributes)}\n"


def policy(script: str = "", *, served: bool = False) -> str:
    """Return the Content-Security-Policy of a page: its own style, script and images only."""
    images = ["'self'"] * served + ["data:"] + ["blob:"] * bool(script)
    allowed = ["default-src 'none'", f"img-src {' '.join(images)}"]
    allowed += [f"style-src 'sha256-{_digest(STYLE)}'"]
    allowed += [f"script-src 'sha256-{_digest(script)}'"] if script else []
    allowed += ["connect-src 'self'"] if served else []
    return "; ".join([*allowed, "base-uri 'none'", "form-action 'none'"])


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def settings(command: str, configuration: Mapping[str, Any], versions: Mapping[str, str]) -> Html:
    """Return the command that repeats a run, its configuration and its versions."""
    repeat = [element("p", "This command repeats the run:"), code(command)] if command else []
    tables = (("All settings", configuration), ("Versions", versions))
    details = [
        folded(title, table(title, [], [row(name, [str(of[name])]) for name in of]))
        for title, of in tables
        if of
    ]
    return join([*repeat, *details])


def listing(kind: str, items: Iterable[tuple[str, str]]) -> Html:
    """Return a list (`ol` or `ul`) of sentences, each with a command or ''."""
    entries = [
        element("li", sentence, *([code(command)] if command else []))
        for sentence, command in items
    ]
    return element(kind, *entries) if entries else Html()


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


WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 624, 40, 248  # edges of the plot area
MAX_DOTS: Final = 40  # a line of more points is drawn without dots
DOTS: Final = (
    None,  # a disk
    [(-3, -3), (3, -3), (3, 3), (-3, 3)],
    [(0, -4), (4, 3), (-4, 3)],
    [(0, -4), (4, 0), (0, 4), (-4, 0)],
)
"""Corners of the dots of each line style; styles also differ in color and dashes (style.css)."""


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


def line_chart(chart: Chart) -> Html:
    """Return a chart with a legend if it has several lines, and its values as a folded table.

    A chart without finite points is empty.
    """
    lines = {name: finite for name in chart.series if (finite := _finite(chart.series[name]))}
    if not lines:
        return Html()
    marked = [x for x in (chart.chosen, *(chart.interval or ())) if x is not None]
    x = Axis(round_ticks([*_coordinates(lines.values(), 0), *marked]), LEFT, RIGHT)
    y = Axis(round_ticks(_coordinates(lines.values(), 1)), BOTTOM, TOP)
    band, mark = [], []
    if chart.interval is not None:
        low, high = x(chart.interval[0]), x(chart.interval[1])
        size = {"width": max(2.0, high - low), "height": BOTTOM - TOP}
        band = [element("rect", x=low, y=TOP, **size, class_="band")]
    if chart.chosen is not None:
        at = x(chart.chosen)
        label = _label(f"chosen: {chart.chosen:g}", at, TOP - 8, "middle", "mark")
        mark = [element("line", x1=at, x2=at, y1=TOP, y2=BOTTOM, class_="mark"), label]
    svg = element(
        "svg",
        element("title", f"{chart.title}: {', '.join(lines)} over {chart.x_label}"),
        *band,
        *_grid(x, y),
        _label(chart.x_label, (LEFT + RIGHT) / 2, HEIGHT - 8, "middle"),
        _label(chart.y_label, 0, 12, "start"),
        *mark,
        *(_line(style, points, x, y) for style, points in enumerate(lines.values())),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
    )
    parts = *note(chart.note), *_legend(list(lines)), svg, folded("Values", _values(chart, lines))
    return element("div", element("h3", chart.title), *parts, class_="chart")


def _finite(points: Points) -> Points:
    return sorted((x, y) for x, y in points if math.isfinite(x) and math.isfinite(y))


def _coordinates(lines: Iterable[Points], axis: int) -> list[Number]:
    return [point[axis] for points in lines for point in points]


def _grid(x: Axis, y: Axis) -> list[Html]:
    return [
        *(
            element("line", x1=LEFT, x2=RIGHT, y1=y(value), y2=y(value), class_="grid")
            for value in y.ticks
        ),
        *(_label(f"{value:g}", LEFT - 8, y(value) + 4, "end") for value in y.ticks),
        *(_label(f"{value:g}", x(value), BOTTOM + 20, "middle") for value in x.ticks),
    ]


def _label(content: str, x: Number, y: Number, anchor: str, class_: str = "axis") -> Html:
    return element("text", content, x=x, y=y, text_anchor=anchor, class_=class_)


def _line(style: int, points: Points, x: Axis, y: Axis) -> Html:
    places = [(x(a), y(b)) for a, b in points]
    path = " ".join(f"{a},{b}" for a, b in places)
    dots = [_dot(style, a, b) for a, b in places] if len(points) <= MAX_DOTS else []
    line = element("polyline", points=path, class_=f"line line{style % len(DOTS)}")
    return join([line, *dots])


def _dot(style: int, x: Number, y: Number) -> Html:
    corners = DOTS[style % len(DOTS)]
    class_ = f"dot dot{style % len(DOTS)}"
    if corners is None:
        return element("circle", cx=x, cy=y, r=3, class_=class_)
    path = " ".join(f"{round(x + dx, 1)},{round(y + dy, 1)}" for dx, dy in corners)
    return element("polygon", points=path, class_=class_)


def _legend(names: Sequence[str]) -> list[Html]:
    if len(names) < 2:
        return []
    items = []
    for style, name in enumerate(names):
        line = element("line", x1=0, x2=32, y1=6, y2=6, class_=f"line line{style % len(DOTS)}")
        size = {"viewBox": "0 0 32 12", "width": "32", "height": "12"}
        sample = element("svg", line, _dot(style, 16, 6), **size, aria_hidden="true")
        items.append(element("li", sample, name))
    return [element("ul", *items, class_="legend")]


def _values(chart: Chart, lines: dict[str, Points]) -> Html:
    values = [dict(points) for points in lines.values()]
    rows = [
        row(f"{x:g}", (f"{of[x]:.4g}" if x in of else "" for of in values))
        for x in sorted(set(_coordinates(lines.values(), 0)))
    ]
    return table(chart.title, [chart.x_label, *lines], rows)
