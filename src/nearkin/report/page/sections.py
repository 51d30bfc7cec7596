"""Scores against the truth."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from nearkin.report.page.charts import line_chart
from nearkin.report.page.map import ImageMap, map_section, script
from nearkin.report.page.page import (
    SHADES,
    Html,
    Section,
    document,
    element,
    findings,
    listed,
    row,
    scrolling,
    settings,
    table,
    text,
    together,
)
from nearkin.report.page.report import (
    Chart,
    ClassView,
    Confusion,
    Report,
    Table,
    Tile,
    TrainingReport,
)

FOUND: Final = "What was found (columns) of each true class (rows), in images"
MANY: Final = 20
"""A matrix of more classes than this is folded away."""


def result_table(results: Table) -> Html:
    """A table of scores, with how to read it."""
    rows = [row(name, cells) for name, *cells in results.rows]
    note = [element("p", results.note, class_="note")] if results.note else []
    made = scrolling(table(results.title, results.columns, rows), results.title)
    return element("div", element("h3", results.title), *note, made)


def confusion_matrix(confusion: Confusion, title: str = FOUND) -> Html:
    """Counts, each shaded by its share of the images of its true class.

    Args:
        confusion: The counts.
        title: What its rows and columns are.
    """
    rows = [_row(*of) for of in zip(confusion.truth, confusion.counts, strict=True)]
    heading = "Which class was taken for which"
    matrix = table(title, ["", *confusion.found], rows, class_="matrix")
    matrix = scrolling(matrix, heading)
    if max(len(confusion.truth), len(confusion.found)) > MANY:
        return element("details", element("summary", heading), matrix)
    return element("div", element("h3", heading), matrix)


def _row(name: str, counts: Sequence[int]) -> Html:
    total = max(1, sum(counts))
    cells = (
        element("td", f"{number:,}" if number else "", class_=f"shade{_shade(number / total)}")
        for number in counts
    )
    return element("tr", element("th", name, scope="row"), *cells)


def _shade(share: float) -> int:
    """From 0 to `SHADES`; whatever is not empty can be seen."""
    return -int(-share * SHADES // 1)


Anchors = Mapping[str, str]
"""Where on the page each class is, by its name."""


def overview(classes: Sequence[ClassView], anchors: Anchors) -> Html:
    """All classes at a glance, each a link to what is said of it."""
    items = []
    for view in classes:
        image = [_image(view.medoid, "")] if view.medoid else []
        name, size = element("b", view.name), element("span", count(view.size, "image"))
        link = element("a", *image, name, size, href=f"#{anchors[view.name]}")
        items.append(element("li", link))
    return element("ol", *items, class_="overview")


def class_card(view: ClassView, of: int, anchors: Anchors) -> Html:
    """All there is to show of a class.

    Args:
        view: The class.
        of: How many images there are that could have been given to it.
        anchors: Where the classes that it names are.
    """
    heading = element("h3", element("bdi", view.name))
    body = _body(view, of, anchors)
    return element("article", heading, body, class_="class", id=anchors[view.name])


def folded_card(view: ClassView, of: int, anchors: Anchors) -> Html:
    """The same, to be opened."""
    heading = element("h3", element("bdi", view.name), f": {count(view.size, 'image')}")
    body = _body(view, of, anchors)
    return element(
        "details", element("summary", heading), body, class_="class", id=anchors[view.name]
    )


def count(number: int, what: str) -> str:
    """A number of things, with the plural.

    >>> count(1, "image"), count(1200, "class")
    ('1 image', '1,200 classes')
    """
    plural = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{plural}"


def _body(view: ClassView, of: int, anchors: Anchors) -> Html:
    about = [_numbers(view, of, anchors)]
    if view.medoid:
        caption = element(
            "figcaption", "Its most central image, ", element("bdi", view.medoid.path)
        )
        about.insert(0, element("figure", _image(view.medoid, view.medoid.path), caption))
    return together(
        [
            element("div", *about, class_="about" if view.medoid else ""),
            *_tiles("Most typical", "Most like the rest of it, with their scores.", view.core),
            *_tiles("Least sure", "Look at these first: errors gather here.", view.border),
        ]
    )


MEANING: Final = {
    "Images": "given to it, and their share of all that came without a label",
    "Score": "mean over its images of how sure the classifier is",
    "Stability": "how much of it other seeds found again: 1 all, 0 nothing",
    "Silhouette": "how far apart it stands: 1 far, 0 touching another class, below 0 inside one",
    "Most like": "the known class that looks most alike",
    "Maybe one with": "compare the images before you join them",
    "In truth": "by the labels that were kept aside",
}
"""The numbers of a class, each with a line for those who see it for the first time."""


def _numbers(view: ClassView, of: int, anchors: Anchors) -> Html:
    size = f"{view.size:,} ({view.size / of:.0%})" if of else "0"
    said = {
        "Images": size,
        "Score": _decimal(view.score),
        "Stability": _decimal(view.stability),
        "Silhouette": _decimal(view.silhouette),
        "Most like": view.nearest_known if view.nearest_known != view.name else "",
        "Maybe one with": _links(view.merge, anchors),
        "In truth": view.truth,
    }
    rows = [row(name, (value, MEANING[name])) for name, value in said.items() if value]
    return table(f"Numbers of {view.name}", [], rows, class_="numbers")


def _links(names: Sequence[str], anchors: Anchors) -> Html:
    links = [
        element("a", name, href=f"#{anchors[name]}") if name in anchors else text(name)
        for name in names
    ]
    return Html(", ".join(links))


def _tiles(title: str, note: str, images: Sequence[Tile]) -> list[Html]:
    if not images:
        return []
    items = [
        element("li", _image(shown, shown.path), element("span", _decimal(shown.score)))
        for shown in images
    ]
    return [
        element("h4", title),
        element("p", note, class_="note"),
        element("ul", *items, class_="tiles"),
    ]


def _image(image: Tile, alt: str) -> Html:
    return element("img", src=image.uri, alt=alt, title=image.path)


def _decimal(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.2f}"


NAMED: Final = 12
"""Known classes that are called by name in the first paragraph."""


def discovery_page(report: Report, shown: ImageMap | None = None, *, served: bool = False) -> str:
    """The whole page.

    Args:
        report: What it tells; parts without content are left out.
        shown: The images on its map.
        served: Whether a server stands behind it.
    """
    return document(
        title=_title(report),
        kicker="nearkin discover",
        lead=_lead(report),
        sections=_discovery_sections(report, shown),
        script=script() if shown else "",
        tiny=report.tiny,
        served=served,
    )


def _discovery_sections(report: Report, shown: ImageMap | None) -> Iterable[Section]:
    yield "Findings", findings(report.findings)
    yield "Map", map_section(shown) if shown else Html()
    yield "New classes", _novel(report)
    yield "Known classes", _assigned(report)
    yield "How sure this is", _sure(report)
    results = [result_table(results) for results in report.results]
    matrix = [confusion_matrix(report.confusion)] if report.confusion else []
    yield "Results against the truth", together([*results, *matrix])
    yield "How many classes", together(map(line_chart, report.counting))
    yield "Training", together(map(line_chart, report.training))
    yield "Protocol", listed("ul", [(said, "") for said in report.protocol])
    yield "Settings", settings(report.command, report.configuration or {}, report.versions or {})
    yield "What to do next", listed("ol", report.steps)


def _title(report: Report) -> str:
    found = count(len(report.novel), "new class") if report.novel else "No new class"
    return f"{found} in {report.data}"


def _lead(report: Report) -> str:
    novel, known = (sum(view.size for view in views) for views in (report.novel, report.assigned))
    more = len(report.known) - NAMED
    names = ", ".join(report.known[:NAMED]) + (f" and {more} more" if more > 0 else "")
    asked = (
        f"{count(report.num_labeled, 'image')} came with a label, of "
        f"{count(len(report.known), 'known class')} ({names}); "
        f"{report.num_unlabeled:,} came without."
    )
    if report.mode == "ncd":
        sorted_ = "These were taken to be of none of the known classes and were sorted"
        found = f"{sorted_} into {count(len(report.novel), 'new class')}."
    else:
        found = (
            f"Of these, {novel:,} were sorted into {count(len(report.novel), 'new class')}, and "
            f"{known:,} looked like one of the known classes."
        )
    return f"{asked} {found} {_number(report)}"


def _number(report: Report) -> str:
    said = f"The number of new classes was {report.chosen}"
    if report.interval is None:
        return f"{said}."
    low, high = report.interval
    return f"{said}; it may be anything from {low} to {high}."


def _novel(report: Report) -> Html:
    if not report.novel:
        return element("p", "None was found. Every image looked like one of a known class.")
    anchors = {view.name: f"new-{place}" for place, view in enumerate(report.novel, start=1)}
    cards = [class_card(view, report.num_unlabeled, anchors) for view in report.novel]
    return together([overview(report.novel, anchors), *cards])


def _assigned(report: Report) -> Html:
    if not report.assigned:
        return Html()
    anchors = {view.name: f"known-{place}" for place, view in enumerate(report.assigned, start=1)}
    said = "Images without a label that look like one of a class that you named."
    cards = [folded_card(view, report.num_unlabeled, anchors) for view in report.assigned]
    return together([element("p", said), overview(report.assigned, anchors), *cards])


def _sure(report: Report) -> Html:
    said = (
        "A class to trust is large, stable when trained with other seeds, apart from the others "
        "(silhouette), and its least sure images still look like its most typical ones."
    )
    return together([element("p", report.confidence), element("p", said)])


VOTED = "What its nearest training images (columns) say of each true class (rows), in images"


def training_page(
    report: TrainingReport, shown: ImageMap | None = None, *, served: bool = False
) -> str:
    """The whole page.

    Args:
        report: What it tells; parts without content are left out.
        shown: The images on its map.
        served: Whether a server stands behind it.
    """
    return document(
        title=f"What was learned from {report.data}",
        kicker="nearkin train",
        lead=report.lead,
        sections=_training_sections(report, shown),
        script=script() if shown else "",
        tiny=report.tiny,
        served=served,
    )


def _training_sections(report: TrainingReport, shown: ImageMap | None) -> Iterable[Section]:
    yield "In short", together([element("p", report.health), findings(report.findings)])
    yield "Map", map_section(shown) if shown else Html()
    yield "How good it is", _results(report)
    matrix = confusion_matrix(report.confusion, VOTED) if report.confusion else Html()
    yield "Which classes are confused", matrix
    yield "Training", together(map(line_chart, report.curves))
    yield "Protocol", listed("ul", [(said, "") for said in report.protocol])
    yield (
        "Settings",
        settings(report.command, report.configuration or {}, report.versions or {}),
    )
    yield "What to do next", listed("ol", report.steps)


def _results(report: TrainingReport) -> Html:
    if report.results is None:
        return Html()
    rows = [row(name, [meaning]) for name, meaning in report.meanings]
    means = element(
        "details",
        element("summary", "What the numbers mean"),
        table("What the numbers mean", [], rows),
    )
    return together([result_table(report.results), means])


def comparison_page(
    kind: str,
    names: Sequence[str],
    notes: Iterable[str],
    measures: Table,
    settings: Table,
    curves: Iterable[Chart],
) -> str:
    """The whole page.

    Args:
        kind: What the runs are, in the plural.
        names: What each is called.
        notes: What to beware of before reading the numbers.
        measures: A row per measure, a column per run. A cell that begins with `*` is the best.
        settings: Those that differ.
        curves: How the runs went.
    """
    rows = tuple((name, *map(_cell, cells)) for name, *cells in measures.rows)
    shown = Table(measures.title, measures.columns, rows, measures.note)
    differ = (
        result_table(settings) if settings.rows else element("p", "They have the same settings.")
    )
    return document(
        title=f"{len(names)} {kind} compared",
        kicker="nearkin compare",
        lead=", ".join(names),
        sections=[
            ("Findings", findings(notes)),
            ("Measures", result_table(shown)),
            ("Settings", differ),
            ("On the way", together(map(line_chart, curves))),
        ],
    )


def _cell(said: str) -> str:
    """A cell of the best run stands out, to the ear, too."""
    if not said.startswith("*"):
        return said
    return together([element("strong", said.removeprefix("*")), Html(" (best)")])
