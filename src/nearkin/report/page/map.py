"""The map of all images, to be walked through: its markup, and its data for the script."""

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import numpy as np
from jaxtyping import Float, Float32, Int, Shaped

from nearkin.report.page.page import Html, element, together

FINE: Final = 100
"""Steps of similarity from 0 to 1: it is shown to two digits, which a byte holds."""
PARTS: Final = (
    "data",
    "elements",
    "look",
    "view",
    "drawing",
    "legend",
    "panel",
    "pointing",
    "selection",
    "table",
    "served",
    "start",
)
"""Of the script, in the order they are joined in; each uses what others define."""
ESCAPES: Final = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&"})
"""Characters that could end the element which holds the data."""


@dataclass(frozen=True, slots=True, eq=False)
class Coloring:
    """One way to color the map."""

    name: str
    """What is shown. The script knows two by name: a Score, highest first, orders the images
    of a class; a Class can be renamed where there is a server."""
    of: Int[np.ndarray, " n"] | Float[np.ndarray, " n"]
    """The class of every image, -1 where it is not known; without classes a number, or NaN."""
    classes: tuple[str, ...] = ()
    note: str = ""
    """A sentence: how to read it."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageMap:
    """Images, their places, and who is like whom."""

    number: Int[np.ndarray, " n"]
    """Of each image in the data: what the served page asks for."""
    names: tuple[str, ...]
    """Paths in the data. They may hold anything."""
    place: Float[np.ndarray, "n 2"]
    neighbors: Int[np.ndarray, "n k"]
    """Positions among these images, the most similar first, without the image itself."""
    similarity: Float32[np.ndarray, "n k"]
    """Cosine."""
    colorings: tuple[Coloring, ...]
    """The first is shown first."""
    sheets: tuple[bytes, ...]
    """WebP images of tiles, row by row in the order of the images."""
    side: int
    """Pixels of a tile's side."""
    columns: int
    """Tiles in a row of a sheet."""
    per_sheet: int
    """Tiles on every sheet but the last."""
    total: int
    """Images in the run. Where it is more than are here, these are a sample."""


def map_section(shown: ImageMap) -> Html:
    """What stands on the page: all that needs no script, and the data for the script.

    Without colorings, all points look alike.
    """
    coloring = [element("option", each.name, value=n) for n, each in enumerate(shown.colorings)]
    bar = (
        element("label", "Color by ", element("select", *coloring, id="map-coloring")),
        element("label", "Find ", _input("map-filter", "part of a name, or a class")),
        element("span", "", id="map-count", role="status"),
    )
    room = (
        element("div", _canvas(), _tools(), _tip(), class_="map-view", id="map-view"),
        element("div", *_side(), class_="map-side", id="map-side"),
    )
    table = element("summary", "The images as a table"), element("div", "", class_="wide")
    return together(
        [
            element("p", _help(shown)),
            element("noscript", element("p", "The map needs JavaScript; the rest does not.")),
            element(
                "div",
                element("div", *bar, class_="map-bar"),
                element("p", "", class_="note", id="map-note"),
                element("div", *room, class_="map-room"),
                element("p", KEYS, class_="note", id="map-keys"),
                element("p", "", class_="unseen", id="map-said", aria_live="polite"),
                element("div", "", id="map-served"),
                element("details", *table, id="map-table"),
                class_="explorer",
                id="map-explorer",
            ),
            element("script", _packed(shown), type="application/json", id="images"),
        ]
    )


def script() -> str:
    """What makes the map move: the one script of a page."""
    held = files(__package__) / "script"
    parts = [(held / f"{part}.js").read_text(encoding="utf-8") for part in PARTS]
    return "\n".join(['"use strict";\n(() => {', *parts, "})();\n"])


KEYS: Final = (
    "By keyboard: Tab to the map, arrow keys step from image to image, Enter opens one, Space "
    "selects it, + and - zoom, 0 shows all, Escape goes back."
)


def _help(shown: ImageMap) -> str:
    here = len(shown.names)
    sample = (
        f" Here are {here:,} of the {shown.total:,} images, taken evenly from all classes."
        if here < shown.total
        else ""
    )
    return (
        "Every point is an image, and images that the encoder holds alike lie close together. "
        "Click a point to see the image and those most like it; drag to move, scroll to zoom, "
        "until points become images. What lies close belongs together; how far apart groups "
        f"lie, and how large they look, means little.{sample}"
    )


def _input(id_: str, placeholder: str) -> Html:
    return element("input", type="search", id=id_, placeholder=placeholder, autocomplete="off")


def _canvas() -> Html:
    return element(
        "canvas",
        id="map-canvas",
        tabindex=0,
        role="application",
        aria_label="Map of the images",
        aria_describedby="map-keys",
    )


def _tools() -> Html:
    tools = (
        ("map-in", "+", "Zoom in"),
        ("map-out", "\u2212", "Zoom out"),
        ("map-fit", "Show all", "Show the whole map"),
        ("map-lasso", "Lasso", "Draw around images to select them (or drag with Shift held)"),
    )
    made = [element("button", said, type="button", id=id_, title=why) for id_, said, why in tools]
    return element("div", *made, class_="map-tools", role="group", aria_label="Tools of the map")


def _tip() -> Html:
    return element("div", "", id="map-tip", hidden="", aria_hidden="true")


def _side() -> Iterable[Html]:
    yield element("section", "", id="map-legend", aria_label="Legend")
    yield element("section", "", id="map-selection", aria_label="Selected images", hidden="")
    yield element("section", "", id="map-panel", aria_label="Image")


def _packed(shown: ImageMap) -> Html:
    """The data as JSON, which holds arrays as bytes and cannot be taken for markup."""
    similarity = np.rint(shown.similarity * FINE).astype(np.int16)
    colorings = [
        {"name": each.name, "classes": each.classes, "note": each.note, "of": _array(each.of)}
        for each in shown.colorings
    ]
    held = {
        "names": shown.names,
        "number": _array(shown.number),
        "place": _array(shown.place),
        "neighbors": _array(shown.neighbors),
        "similarity": _array(similarity),
        "fine": FINE,
        "colorings": colorings,
        "sheets": [_text(sheet) for sheet in shown.sheets],
        "side": shown.side,
        "columns": shown.columns,
        "perSheet": shown.per_sheet,
    }
    return Html(json.dumps(held, separators=(",", ":")).translate(ESCAPES))


def _array(values: Shaped[np.ndarray, "..."]) -> dict[str, str]:
    """Little-endian bytes in the smallest type that holds all values."""
    kinds = (np.int8, np.int16, np.int32)
    low, high = (values.min(), values.max()) if values.size else (0, 0)
    whole = np.issubdtype(values.dtype, np.integer)
    fitting = (k for k in kinds if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
    kind = np.dtype(next(fitting) if whole else np.float32)
    return {"kind": kind.name, "data": _text(values.astype(kind.newbyteorder("<")).tobytes())}


def _text(held: bytes) -> str:
    return base64.b64encode(held).decode("ascii")
