"""HTML: escaping, elements, tables, and whole documents with their security policy."""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any, Final

SHADES: Final = 10
"""Background shades of a table cell, besides none."""

STYLE: Final = (files(__package__) / "style.css").read_text(encoding="utf-8") + "".join(
    f".shade{step} {{ background: rgb(var(--shade) / {0.07 * step:.2f}) }}\n"
    for step in range(1, SHADES + 1)
)

VOID = frozenset({"img", "input", "link", "meta"})
"""Elements without an end tag."""


class Html(str):
    """Markup, which is not escaped again."""

    __slots__ = ()


def text(value: str) -> Html:
    r"""Return a string as escaped text; `Html` stays as it is.

    Invisible characters (controls, bidirectional marks, bytes that are not UTF-8) become escape
    sequences, so that a hostile file name cannot pose as another.

    >>> text("<b>\u202egnp.exe")
    '&lt;b&gt;\\u202egnp.exe'
    """
    if isinstance(value, Html):
        return value
    visible = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    return Html(escape("".join(visible)))


def join(parts: Iterable[str]) -> Html:
    """Concatenate text and markup."""
    return Html("".join(map(text, parts)))


def element(tag: str, /, *children: str, **attributes: str | int | float) -> Html:
    """Return an element.

    Args:
        tag: Its name.
        children: Its content in order; strings that are not `Html` become text.
        attributes: By name, with `_` for `-`; a trailing `_`, as in `class_`, is dropped.

    >>> element("p", "a < b", element("b", "!"), class_="note")
    '<p class="note">a &lt; b<b>!</b></p>'
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{text(str(value))}"'
        for name, value in attributes.items()
    )
    end = "" if tag in VOID else f"</{tag}>"
    return Html(f"<{tag}{written}>{join(children)}{end}")


def note(content: str) -> list[Html]:
    """Return a small paragraph; nothing for an empty string."""
    return [element("p", content, class_="note")] if content else []


def folded(title: str, content: Html) -> Html:
    """Return content that a click on its title opens."""
    return element("details", element("summary", title), content)


def table(caption: str, columns: Iterable[str], rows: Iterable[Html], *, class_: str = "") -> Html:
    """Return a table.

    Args:
        caption: Read by screen readers.
        columns: Headings, that of the row names first; a table without headings has no head.
        rows: Made by `row`.
        class_: CSS class.
    """
    heading = [element("th", name, scope="col") for name in columns]
    head = [element("thead", element("tr", *heading))] if heading else []
    return element(
        "table", element("caption", caption), *head, element("tbody", *rows), class_=class_
    )


def row(name: str, cells: Iterable[str]) -> Html:
    """Return a table row: its name, then its cells."""
    return element(
        "tr", element("th", name, scope="row"), *(element("td", cell) for cell in cells)
    )


def scrolling(content: Html, label: str) -> Html:
    """Return a box that scrolls sideways, by keyboard too, where the page is too narrow."""
    return element("div", content, class_="wide", role="region", aria_label=label, tabindex=0)


def code(command: str) -> Html:
    """Return a command line to copy."""
    return element("pre", element("code", command))


def findings(messages: Iterable[str]) -> Html:
    """Return highlighted notes; nothing if there are none."""
    items = [element("li", element("b", "Note. "), message) for message in messages]
    return element("ul", *items, class_="findings") if items else Html()


Section = tuple[str, Html]
"""A heading and its content."""


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
    """Return a whole page; sections without content are left out.

    A Content-Security-Policy in its head keeps browsers from loading, running or sending anything
    but the page's own script, in case some text is ever taken for markup.

    Args:
        title: The main heading.
        kicker: The command that made the page.
        lead: The first paragraph.
        sections: In order.
        script: JavaScript of the page, if any.
        tiny: Enlarge images without blur, since they are only a few pixels wide.
        served: The page has a server to send requests to.
    """
    nonempty = [section for section in sections if section[1]]
    links = [element("li", element("a", name, href=f"#{_anchor(name)}")) for name, _ in nonempty]
    header = element(
        "header",
        element("p", kicker, class_="kicker"),
        element("h1", title),
        element("p", lead, class_="lead"),
        element("nav", element("ul", *links), aria_label="Contents"),
    )
    main = element(
        "main",
        *(
            element("section", element("h2", name), content, id=_anchor(name))
            for name, content in nonempty
        ),
    )
    scripts = [element("script", Html(script))] if script else []
    body = element("body", header, main, *scripts, class_="tiny" if tiny else "")
    # Browsers ask a server for /favicon.ico unless the page names an icon.
    icon = [element("link", rel="icon", href="data:,")] if served else []
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element(
            "meta", http_equiv="Content-Security-Policy", content=policy(script, served=served)
        ),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        *icon,
        element("style", Html(STYLE)),
    )
    attributes = {"data_served": "true"} if served else {}
    return f"<!doctype html>\n{element('html', head, body, lang='en', **attributes)}\n"


def policy(script: str = "", *, served: bool = False) -> str:
    """Return the Content-Security-Policy of a page: its own style, script and images only."""
    images = ["'self'"] * served + ["data:"] + ["blob:"] * bool(script)
    allowed = ["default-src 'none'", f"img-src {' '.join(images)}"]
    allowed += [f"style-src 'sha256-{_digest(STYLE)}'"]
    allowed += [f"script-src 'sha256-{_digest(script)}'"] if script else []
    allowed += ["connect-src 'self'"] if served else []
    return "; ".join([*allowed, "base-uri 'none'", "form-action 'none'"])


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def settings(command: str, configuration: Mapping[str, Any], versions: Mapping[str, str]) -> Html:
    """Return the command that repeats a run, its configuration and its versions."""
    repeat = [element("p", "This command repeats the run:"), code(command)] if command else []
    tables = (("All settings", configuration), ("Versions", versions))
    return join(
        [
            *repeat,
            *(
                folded(title, table(title, [], [row(name, [str(of[name])]) for name in of]))
                for title, of in tables
                if of
            ),
        ]
    )


def listing(kind: str, items: Iterable[tuple[str, str]]) -> Html:
    """Return a list (`ol` or `ul`) of sentences, each with a command or ''."""
    lines = [element("li", said, *([code(line)] if line else [])) for said, line in items]
    return element(kind, *lines) if lines else Html()
