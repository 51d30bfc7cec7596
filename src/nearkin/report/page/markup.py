"""HTML that is safe by construction: whatever is not markup yet is shown as text."""

from collections.abc import Iterable
from html import escape

VOID = frozenset({"img", "input", "link", "meta"})
"""Elements without an end tag."""


class Html(str):
    """Markup. It is not escaped again."""

    __slots__ = ()


def text(value: str) -> Html:
    r"""A string as text, whatever is in it; markup stays as it is.

    Characters that cannot be seen (controls, marks that turn the direction of writing, bytes that
    are no UTF-8) are written as escapes, so that a name looks like what it is.

    >>> text("<b>\u202egnp.exe")
    '&lt;b&gt;\\u202egnp.exe'
    """
    if isinstance(value, Html):
        return value
    seen = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    return Html(escape("".join(seen)))


def together(parts: Iterable[str]) -> Html:
    """Texts and markup, one after the other."""
    return Html("".join(map(text, parts)))


def element(tag: str, /, *children: str, **attributes: str | int | float) -> Html:
    """An element with what it holds; strings that are not `Html` become text.

    Args:
        tag: Its name.
        children: What it holds, in order.
        attributes: By name, with `_` for `-`; one at the end, as in `class_`, is dropped.

    >>> element("p", "a < b", element("b", "!"), class_="note")
    '<p class="note">a &lt; b<b>!</b></p>'
    """
    said = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{text(str(value))}"'
        for name, value in attributes.items()
    )
    end = "" if tag in VOID else f"</{tag}>"
    return Html(f"<{tag}{said}>{together(children)}{end}")


def table(caption: str, columns: Iterable[str], rows: Iterable[Html], *, class_: str = "") -> Html:
    """A table.

    Args:
        caption: What it shows, for those who hear it.
        columns: The headings, that of the row names first; none for a table without a head.
        rows: Each as made by `row`.
        class_: How it looks.
    """
    heading = [element("th", name, scope="col") for name in columns]
    head = [element("thead", element("tr", *heading))] if heading else []
    body = element("tbody", *rows)
    return element("table", element("caption", caption), *head, body, class_=class_)


def row(name: str, cells: Iterable[str]) -> Html:
    """A row of a table: its name, and what its cells hold."""
    made = (element("td", cell) for cell in cells)
    return element("tr", element("th", name, scope="row"), *made)


def scrolling(held: Html, what: str) -> Html:
    """A box that scrolls, by keyboard too, where the page is too narrow for what it holds."""
    return element("div", held, class_="wide", role="region", aria_label=what, tabindex=0)
