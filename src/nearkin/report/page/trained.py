"""What the page of a training tells, section by section."""

from collections.abc import Iterable

from nearkin.report.page.charts import line_chart
from nearkin.report.page.map import PictureMap, map_section, script
from nearkin.report.page.markup import Html, element, row, table, together
from nearkin.report.page.page import Section, document, findings, listed, settings
from nearkin.report.page.report import TrainingReport
from nearkin.report.page.results import confusion_matrix, result_table

VOTED = "What its nearest training pictures (columns) say of each true class (rows), in pictures"


def training_page(
    report: TrainingReport, shown: PictureMap | None = None, *, served: bool = False
) -> str:
    """The whole page.

    Args:
        report: What it tells; parts without content are left out.
        shown: The pictures on its map.
        served: Whether a server stands behind it.
    """
    return document(
        title=f"What was learned from {report.data}",
        kicker="nearkin train",
        lead=report.lead,
        sections=_sections(report, shown),
        script=script() if shown else "",
        tiny=report.tiny,
        served=served,
    )


def _sections(report: TrainingReport, shown: PictureMap | None) -> Iterable[Section]:
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
