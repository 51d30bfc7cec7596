"""A class on the page: its most central picture, its numbers, and what it holds."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from nearkin.report.page.markup import Html, element, row, table, text, together
from nearkin.report.page.report import ClassView, Picture

Anchors = Mapping[str, str]
"""Where on the page each class is, by its name."""


def overview(classes: Sequence[ClassView], anchors: Anchors) -> Html:
    """All classes at a glance, each a link to what is said of it."""
    items = []
    for view in classes:
        picture = [_image(view.medoid, "")] if view.medoid else []
        name, size = element("b", view.name), element("span", count(view.size, "picture"))
        link = element("a", *picture, name, size, href=f"#{anchors[view.name]}")
        items.append(element("li", link))
    return element("ol", *items, class_="overview")


def class_card(view: ClassView, of: int, anchors: Anchors) -> Html:
    """All there is to show of a class.

    Args:
        view: The class.
        of: How many pictures there are that could have been given to it.
        anchors: Where the classes that it names are.
    """
    heading = element("h3", element("bdi", view.name))
    body = _body(view, of, anchors)
    return element("article", heading, body, class_="class", id=anchors[view.name])


def folded_card(view: ClassView, of: int, anchors: Anchors) -> Html:
    """The same, to be opened."""
    heading = element("h3", element("bdi", view.name), f": {count(view.size, 'picture')}")
    body = _body(view, of, anchors)
    return element(
        "details", element("summary", heading), body, class_="class", id=anchors[view.name]
    )


def count(number: int, what: str) -> str:
    """A number of things, with the plural.

    >>> count(1, "picture"), count(1200, "class")
    ('1 picture', '1,200 classes')
    """
    plural = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{plural}"


def _body(view: ClassView, of: int, anchors: Anchors) -> Html:
    about = [_numbers(view, of, anchors)]
    if view.medoid:
        caption = element(
            "figcaption", "Its most central picture, ", element("bdi", view.medoid.path)
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
    "Pictures": "given to it, and their share of all that came without a label",
    "Score": "mean over its pictures of how sure the classifier is",
    "Stability": "how much of it other seeds found again: 1 all, 0 nothing",
    "Silhouette": "how far apart it stands: 1 far, 0 touching another class, below 0 inside one",
    "Most like": "the known class that looks most alike",
    "Maybe one with": "compare the pictures before you join them",
    "In truth": "by the labels that were kept aside",
}
"""The numbers of a class, each with a line for those who see it for the first time."""


def _numbers(view: ClassView, of: int, anchors: Anchors) -> Html:
    size = f"{view.size:,} ({view.size / of:.0%})" if of else "0"
    said = {
        "Pictures": size,
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


def _tiles(title: str, note: str, pictures: Sequence[Picture]) -> list[Html]:
    if not pictures:
        return []
    items = [
        element("li", _image(shown, shown.path), element("span", _decimal(shown.score)))
        for shown in pictures
    ]
    return [
        element("h4", title),
        element("p", note, class_="note"),
        element("ul", *items, class_="tiles"),
    ]


def _image(picture: Picture, alt: str) -> Html:
    return element("img", src=picture.uri, alt=alt, title=picture.path)


def _decimal(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.2f}"
