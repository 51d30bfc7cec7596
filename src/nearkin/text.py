"""Text for people: without control characters, in columns, abridged."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final
from unicodedata import category

JOINERS: Final = "\u200c\u200d"
"""Between letters of Persian and of the scripts of India, and between the parts of an emoji."""
LATIN: Final = "\u02ff"  # The last of its letters, between which a joiner would only hide


def printable(text: str) -> str:
    r"""Escape what cannot be seen, and line ends not: controls, marks of direction, broken bytes.

    Spaces of any script stay, and joiners where their scripts have them.

    >>> print(printable("a\x1b[31mred\u202e"))
    a\x1b[31mred\u202e
    """
    pairs = zip(("", *text), text, strict=False)
    return "".join(c if _is_shown(c, last) else ascii(c)[1:-1] for last, c in pairs)


def _is_shown(character: str, last: str) -> bool:
    if character in JOINERS:
        return last > LATIN
    return character.isprintable() or character == "\n" or category(character) == "Zs"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]


def abridged(names: Sequence[str], most: int) -> list[str]:
    """Return the first of many names, and how many more there are.

    >>> ", ".join(abridged(["a", "b", "c"], 1))
    'a, and 2 more'
    """
    more = len(names) - most
    return [*names[:most], f"and {more} more"] if more > 0 else list(names)


def as_text(name: str) -> str:
    r"""Return a name that any file format takes: bytes that are not UTF-8 become `\xNN`."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def json_text(values: Any, indent: int | None = None) -> str:
    """Format plain values as JSON, which has no infinity: numbers that are not finite are null.

    >>> json_text({"low": 0.0, "high": float("inf")})
    '{"low": 0.0, "high": null}'
    """
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def _finite(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {name: _finite(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
