"""Text for people: without control characters, in columns, abridged."""

from collections.abc import Sequence
from typing import Final
from unicodedata import category

JOINERS: Final = "\u200c\u200d"
"""Between letters of Persian and of the scripts of India, and between the parts of an emoji."""


def is_visible(character: str) -> bool:
    r"""Whether a character is a letter, a space or a joiner of any script.

    Controls, marks of direction and bytes that are not UTF-8 are not.

    >>> [is_visible(character) for character in "a\u3000\u202f\u200c\u202e\n"]
    [True, True, True, True, False, False]
    """
    return character.isprintable() or character in JOINERS or category(character) == "Zs"


def printable(text: str) -> str:
    r"""Escape control characters and broken bytes, which names of files may hold.

    >>> print(printable("a\x1b[31mred"))
    a\x1b[31mred
    """
    return "".join(c if is_visible(c) or c == "\n" else ascii(c)[1:-1] for c in text)


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
