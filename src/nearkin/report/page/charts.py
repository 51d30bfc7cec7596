"""Lines over axes, as SVG that stands in the page itself."""

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from nearkin.report.page.page import Html, element, row, table, together
from nearkin.report.page.report import Chart, Number, Points

WIDTH: Final = 640
HEIGHT: Final = 300
LEFT: Final = 56
RIGHT: Final = 624
TOP: Final = 40
BOTTOM: Final = 248
"""Like the three before it, an edge of the box that the lines are drawn in."""
STYLES: Final = 4
"""Ways to draw a line, told apart by color, dashes and the shape of the dots."""
MOST_DOTS: Final = 40
"""A line of more points than this is drawn without dots."""


class Axis(NamedTuple):
    """From values to places on the page."""

    ticks: tuple[float, ...]
    """Round numbers, the first and last at the two ends."""
    start: Number
    end: Number

    def __call__(self, value: Number) -> float:
        """The place of a value."""
        low, high = self.ticks[0], self.ticks[-1]
        share = (value - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)


def round_ticks(values: Sequence[Number]) -> tuple[float, ...]:
    """A few round numbers that enclose these values; whole ones if all values are whole.

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
    """Draw a chart with its axes, a legend if there are several lines, and its numbers as a table.

    Nothing is drawn of a chart without points.
    """
    lines = {name: _finite(points) for name, points in chart.series.items()}
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return Html()
    marked = [x for x in (chart.chosen, *(chart.interval or ())) if x is not None]
    x = Axis(round_ticks([*_all(lines.values(), 0), *marked]), LEFT, RIGHT)
    y = Axis(round_ticks(_all(lines.values(), 1)), BOTTOM, TOP)
    drawn = element(
        "svg",
        element("title", f"{chart.title}: {', '.join(lines)} over {chart.x_label}"),
        *_interval(chart, x),
        *_grid(x, y),
        *_labels(chart),
        *_chosen(chart, x),
        *(_line(style, points, x, y) for style, points in enumerate(lines.values())),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
    )
    heading = element("h3", chart.title)
    note = [element("p", chart.note, class_="note")] if chart.note else []
    parts = heading, *note, *_legend(lines), drawn, _numbers(chart, lines)
    return element("div", *parts, class_="chart")


def _finite(points: Points) -> Points:
    return sorted((x, y) for x, y in points if math.isfinite(x) and math.isfinite(y))


def _all(lines: Iterable[Points], axis: int) -> list[Number]:
    return [point[axis] for points in lines for point in points]


def _grid(x: Axis, y: Axis) -> list[Html]:
    made = [
        element("line", x1=LEFT, x2=RIGHT, y1=y(value), y2=y(value), class_="grid")
        for value in y.ticks
    ]
    made += [_words(f"{value:g}", LEFT - 8, y(value) + 4, "end") for value in y.ticks]
    made += [_words(f"{value:g}", x(value), BOTTOM + 20, "middle") for value in x.ticks]
    return made


def _labels(chart: Chart) -> list[Html]:
    middle = (LEFT + RIGHT) / 2
    return [
        _words(chart.x_label, middle, HEIGHT - 8, "middle"),
        _words(chart.y_label, 0, 12, "start"),
    ]


def _words(said: str, x: Number, y: Number, anchor: str, class_: str = "axis") -> Html:
    return element("text", said, x=x, y=y, text_anchor=anchor, class_=class_)


def _interval(chart: Chart, x: Axis) -> list[Html]:
    if chart.interval is None:
        return []
    low, high = x(chart.interval[0]), x(chart.interval[1])
    width = max(2.0, high - low)
    return [element("rect", x=low, y=TOP, width=width, height=BOTTOM - TOP, class_="band")]


def _chosen(chart: Chart, x: Axis) -> list[Html]:
    if chart.chosen is None:
        return []
    place = x(chart.chosen)
    said = _words(f"chosen: {chart.chosen:g}", place, TOP - 8, "middle", "mark")
    return [element("line", x1=place, x2=place, y1=TOP, y2=BOTTOM, class_="mark"), said]


def _line(style: int, points: Points, x: Axis, y: Axis) -> Html:
    places = [(x(a), y(b)) for a, b in points]
    path = " ".join(f"{a},{b}" for a, b in places)
    dots = [_dot(style, a, b) for a, b in places] if len(points) <= MOST_DOTS else []
    line = element("polyline", points=path, class_=f"line line{style % STYLES}")
    return together([line, *dots])


def _dot(style: int, x: Number, y: Number) -> Html:
    shapes = (
        [(-3, -3), (3, -3), (3, 3), (-3, 3)],
        [(0, -4), (4, 3), (-4, 3)],
        [(0, -4), (4, 0), (0, 4), (-4, 0)],
    )
    class_ = f"dot dot{style % STYLES}"
    if style % STYLES == 0:
        return element("circle", cx=x, cy=y, r=3, class_=class_)
    corners = shapes[style % STYLES - 1]
    path = " ".join(f"{round(x + dx, 1)},{round(y + dy, 1)}" for dx, dy in corners)
    return element("polygon", points=path, class_=class_)


def _legend(lines: Iterable[str]) -> list[Html]:
    names = list(lines)
    if len(names) < 2:
        return []
    items = []
    for style, name in enumerate(names):
        line = element("line", x1=0, x2=32, y1=6, y2=6, class_=f"line line{style % STYLES}")
        size = {"viewBox": "0 0 32 12", "width": "32", "height": "12"}
        sample = element("svg", line, _dot(style, 16, 6), **size, aria_hidden="true")
        items.append(element("li", sample, name))
    return [element("ul", *items, class_="legend")]


def _numbers(chart: Chart, lines: dict[str, Points]) -> Html:
    values = {name: dict(points) for name, points in lines.items()}
    rows = [
        row(f"{x:g}", (f"{of[x]:.4g}" if x in of else "" for of in values.values()))
        for x in sorted(set(_all(lines.values(), 0)))
    ]
    made = table(chart.title, [chart.x_label, *lines], rows)
    return element("details", element("summary", "The numbers"), made)
