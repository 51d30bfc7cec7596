"""How pages look: quiet, in the reader's own fonts, by day and by night."""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any, Final

SHADES: Final = 10
"""Steps from an empty cell to a full one."""

STYLE: Final = (files(__package__) / "style.css").read_text(encoding="utf-8") + "".join(
    f".shade{step} {{ background: rgb(var(--shade) / {0.07 * step:.2f}) }}\n"
    for step in range(1, SHADES + 1)
)


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


Section = tuple[str, Html]
"""A heading, and what stands under it."""


def document(
    *,
    title: str,
    kicker: str,
    lead: str,
    sections: Iterable[Section],
    script: str = "",
    tiny: bool = False,
    served: bool = False,
) -> str:
    """A whole page. Whatever it is given is shown as text, and sections without content are not.

    A policy in its head keeps browsers from loading, running or sending anything but its own
    script, should some text ever be taken for markup.

    Args:
        title: The heading.
        kicker: What made it, in two words.
        lead: The first paragraph.
        sections: In order.
        script: What the page runs, if anything.
        tiny: Whether images are so small that their pixels are to be seen as squares.
        served: Whether a server stands behind the page, which then may ask it.
    """
    shown = [section for section in sections if section[1]]
    links = [element("li", element("a", name, href=f"#{_anchor(name)}")) for name, _ in shown]
    header = element(
        "header",
        element("p", kicker, class_="kicker"),
        element("h1", title),
        element("p", lead, class_="lead"),
        element("nav", element("ul", *links), aria_label="Contents"),
    )
    parts = (
        element("section", element("h2", name), held, id=_anchor(name)) for name, held in shown
    )
    running = [element("script", Html(script))] if script else []
    body = element(
        "body", header, element("main", *parts), *running, class_="tiny" if tiny else ""
    )
    root = {"lang": "en", **({"data_served": "true"} if served else {})}
    head = _head(title, policy(script, served=served), served)
    return "<!doctype html>\n" + element("html", head, body, **root) + "\n"


def policy(script: str = "", *, served: bool = False) -> str:
    """What a page may load and run: its own style and script, and the images in it.

    Args:
        script: What it runs, if anything.
        served: Whether it may ask its server for more.
    """
    images = ["'self'"] * served + ["data:"] + ["blob:"] * bool(script)
    allowed = ["default-src 'none'", f"img-src {' '.join(images)}"]
    allowed += [f"style-src 'sha256-{_digest(STYLE)}'"]
    allowed += [f"script-src 'sha256-{_digest(script)}'"] if script else []
    allowed += ["connect-src 'self'"] if served else []
    return "; ".join([*allowed, "base-uri 'none'", "form-action 'none'"])


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _head(title: str, policy: str, served: bool) -> Html:
    icon = [element("link", rel="icon", href="data:,")] if served else []  # else it is asked for
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        *icon,
        element("style", Html(STYLE)),
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def findings(found: Iterable[str]) -> Html:
    """What a reader should know first."""
    items = [element("li", element("b", "Note. "), said) for said in found]
    return element("ul", *items, class_="findings") if items else Html()


def settings(command: str, configuration: Mapping[str, Any], versions: Mapping[str, str]) -> Html:
    """What repeats a run, and all it was made with."""
    repeat = [element("p", "This repeats the run:"), code(command)]
    return together(
        [
            *(repeat if command else []),
            *_folded("All settings", configuration),
            *_folded("Versions", versions),
        ]
    )


def _folded(title: str, values: Mapping[str, Any]) -> list[Html]:
    rows = [row(name, [str(value)]) for name, value in values.items()]
    return [element("details", element("summary", title), table(title, [], rows))] if rows else []


def listed(kind: str, steps: Iterable[tuple[str, str]]) -> Html:
    """Sentences, each with a command or nothing."""
    items = [element("li", said, *([code(line)] if line else [])) for said, line in steps]
    return element(kind, *items) if items else Html()


def code(command: str) -> Html:
    """A command, to be copied."""
    return element("pre", element("code", command))
