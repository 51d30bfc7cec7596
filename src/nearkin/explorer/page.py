"""The page of a discovery run: one file, which needs neither network nor script."""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from nearkin.explorer.charts import line_chart
from nearkin.explorer.classes import class_card, count, folded_card, overview
from nearkin.explorer.markup import Html, element, row, table, together
from nearkin.explorer.report import Report
from nearkin.explorer.results import confusion_matrix, result_table
from nearkin.explorer.style import STYLE

NAMED: Final = 12
"""Known classes that are called by name in the first paragraph."""

Section = tuple[str, Html]
"""A heading, and what stands under it."""


def discovery_page(report: Report) -> str:
    """The whole page. Whatever it is given is shown as text, and parts without content not at all.

    A policy in its head keeps browsers from loading, running or sending anything, should some
    text ever be taken for markup.
    """
    sections = [section for section in _sections(report) if section[1]]
    links = [element("li", element("a", name, href=f"#{_anchor(name)}")) for name, _ in sections]
    header = element(
        "header",
        element("p", "nearkin discover", class_="kicker"),
        element("h1", _title(report)),
        element("p", _lead(report), class_="lead"),
        element("nav", element("ul", *links), aria_label="Contents"),
    )
    parts = (
        element("section", element("h2", name), held, id=_anchor(name)) for name, held in sections
    )
    body = element("body", header, element("main", *parts), class_="tiny" if report.tiny else "")
    return "<!doctype html>\n" + element("html", _head(_title(report)), body, lang="en") + "\n"


def _head(title: str) -> Html:
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(STYLE)),
    )


def _sections(report: Report) -> Iterable[Section]:
    yield "Findings", _findings(report.findings)
    yield "New classes", _novel(report)
    yield "Known classes", _assigned(report)
    yield "How sure this is", _sure(report)
    results = [result_table(results) for results in report.results]
    matrix = [confusion_matrix(report.confusion)] if report.confusion else []
    yield "Results against the truth", together([*results, *matrix])
    yield "How many classes", together(map(line_chart, report.counting))
    yield "Training", together(map(line_chart, report.training))
    yield "Protocol", _listed("ul", [(said, "") for said in report.protocol])
    yield "Settings", _settings(report)
    yield "What to do next", _listed("ol", report.steps)


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


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


def _findings(findings: Iterable[str]) -> Html:
    items = [element("li", element("b", "Note. "), said) for said in findings]
    return element("ul", *items, class_="findings") if items else Html()


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


def _settings(report: Report) -> Html:
    command = [element("p", "This repeats the run:"), _code(report.command)]
    return together(
        [
            *(command if report.command else []),
            *_folded("All settings", report.configuration or {}),
            *_folded("Versions", report.versions or {}),
        ]
    )


def _folded(title: str, values: Mapping[str, Any]) -> list[Html]:
    rows = [row(name, [str(value)]) for name, value in values.items()]
    return [element("details", element("summary", title), table(title, [], rows))] if rows else []


def _listed(kind: str, steps: Iterable[tuple[str, str]]) -> Html:
    items = [element("li", said, *([_code(code)] if code else [])) for said, code in steps]
    return element(kind, *items) if items else Html()


def _code(command: str) -> Html:
    return element("pre", element("code", command))
