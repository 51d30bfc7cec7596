"""Scores against the truth."""

from collections.abc import Sequence
from typing import Final

from nearkin.report.page.markup import Html, element, row, scrolling, table
from nearkin.report.page.report import Confusion, Table
from nearkin.report.page.style import SHADES

FOUND: Final = "What was found (columns) of each true class (rows), in pictures"
MANY: Final = 20
"""A matrix of more classes than this is folded away."""


def result_table(results: Table) -> Html:
    """A table of scores, with how to read it."""
    rows = [row(name, cells) for name, *cells in results.rows]
    note = [element("p", results.note, class_="note")] if results.note else []
    made = scrolling(table(results.title, results.columns, rows), results.title)
    return element("div", element("h3", results.title), *note, made)


def confusion_matrix(confusion: Confusion, title: str = FOUND) -> Html:
    """Counts, each shaded by its share of the pictures of its true class.

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
