"""What the page of a discovery tells, section by section."""

from collections.abc import Iterable
from typing import Final

from nearkin.report.page.charts import line_chart
from nearkin.report.page.classes import class_card, count, folded_card, overview
from nearkin.report.page.map import PictureMap, map_section, script
from nearkin.report.page.markup import Html, element, together
from nearkin.report.page.page import Section, document, findings, listed, settings
from nearkin.report.page.report import Report
from nearkin.report.page.results import confusion_matrix, result_table

NAMED: Final = 12
"""Known classes that are called by name in the first paragraph."""


def discovery_page(
    report: Report, shown: PictureMap | None = None, *, served: bool = False
) -> str:
    """The whole page.

    Args:
        report: What it tells; parts without content are left out.
        shown: The pictures on its map.
        served: Whether a server stands behind it.
    """
    return document(
        title=_title(report),
        kicker="nearkin discover",
        lead=_lead(report),
        sections=_sections(report, shown),
        script=script() if shown else "",
        tiny=report.tiny,
        served=served,
    )


def _sections(report: Report, shown: PictureMap | None) -> Iterable[Section]:
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
        f"{count(report.num_labeled, 'picture')} came with a label, of "
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
        return element("p", "None was found. Every picture looked like one of a known class.")
    anchors = {view.name: f"new-{place}" for place, view in enumerate(report.novel, start=1)}
    cards = [class_card(view, report.num_unlabeled, anchors) for view in report.novel]
    return together([overview(report.novel, anchors), *cards])


def _assigned(report: Report) -> Html:
    if not report.assigned:
        return Html()
    anchors = {view.name: f"known-{place}" for place, view in enumerate(report.assigned, start=1)}
    said = "Pictures without a label that look like one of a class that you named."
    cards = [folded_card(view, report.num_unlabeled, anchors) for view in report.assigned]
    return together([element("p", said), overview(report.assigned, anchors), *cards])


def _sure(report: Report) -> Html:
    said = (
        "A class to trust is large, stable when trained with other seeds, apart from the others "
        "(silhouette), and its least sure pictures still look like its most typical ones."
    )
    return together([element("p", report.confidence), element("p", said)])
