"""What all pages share: one file, which needs no network, and shows what it is given as text."""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from nearkin.report.page.markup import Html, element, row, table, together
from nearkin.report.page.style import STYLE

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
        tiny: Whether pictures are so small that their pixels are to be seen as squares.
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
    """What a page may load and run: its own style and script, and the pictures in it.

    Args:
        script: What it runs, if anything.
        served: Whether it may ask its server for more.
    """
    pictures = ["'self'"] * served + ["data:"] + ["blob:"] * bool(script)
    allowed = ["default-src 'none'", f"img-src {' '.join(pictures)}"]
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
