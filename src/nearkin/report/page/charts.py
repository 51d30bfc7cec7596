"""Line charts as inline SVG."""

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from nearkin.report.page.html import Html, element, folded, join, note, row, table
from nearkin.report.page.values import Chart, Number, Points

WIDTH: Final = 640
HEIGHT: Final = 300
LEFT: Final = 56
RIGHT: Final = 624
TOP: Final = 40
BOTTOM: Final = 248
"""LEFT to BOTTOM are the edges of the plot area."""
MAX_DOTS: Final = 40
"""A line of more points is drawn without dots."""
DOTS: Final = (
    None,  # a disk
    [(-3, -3), (3, -3), (3, 3), (-3, 3)],
    [(0, -4), (4, 3), (-4, 3)],
    [(0, -4), (4, 0), (0, 4), (-4, 0)],
)
"""Corners of the dots of each line style; styles also differ in color and dashes (style.css)."""


class Axis(NamedTuple):
    """A linear scale from values to SVG coordinates."""

    ticks: tuple[float, ...]
    """Round numbers, the first and last at the two ends."""
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
    lines = {name: _finite(points) for name, points in chart.series.items()}
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return Html()
    marked = [x for x in (chart.chosen, *(chart.interval or ())) if x is not None]
    x = Axis(round_ticks([*_coordinates(lines.values(), 0), *marked]), LEFT, RIGHT)
    y = Axis(round_ticks(_coordinates(lines.values(), 1)), BOTTOM, TOP)
    svg = element(
        "svg",
        element("title", f"{chart.title}: {', '.join(lines)} over {chart.x_label}"),
        *_interval(chart, x),
        *_grid(x, y),
        _label(chart.x_label, (LEFT + RIGHT) / 2, HEIGHT - 8, "middle"),
        _label(chart.y_label, 0, 12, "start"),
        *_chosen(chart, x),
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


def _interval(chart: Chart, x: Axis) -> list[Html]:
    if chart.interval is None:
        return []
    low, high = x(chart.interval[0]), x(chart.interval[1])
    width = max(2.0, high - low)
    return [element("rect", x=low, y=TOP, width=width, height=BOTTOM - TOP, class_="band")]


def _chosen(chart: Chart, x: Axis) -> list[Html]:
    if chart.chosen is None:
        return []
    at = x(chart.chosen)
    label = _label(f"chosen: {chart.chosen:g}", at, TOP - 8, "middle", "mark")
    return [element("line", x1=at, x2=at, y1=TOP, y2=BOTTOM, class_="mark"), label]


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
