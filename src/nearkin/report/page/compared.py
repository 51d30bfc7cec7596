"""The page that puts runs side by side."""

from collections.abc import Iterable, Sequence

from nearkin.report.page.charts import line_chart
from nearkin.report.page.markup import Html, element, together
from nearkin.report.page.page import document, findings
from nearkin.report.page.report import Chart, Table
from nearkin.report.page.results import result_table


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
