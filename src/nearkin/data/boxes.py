"""Boxes of images, in pixels."""

import re
from collections.abc import Mapping
from math import ceil, floor, isfinite
from typing import Any, Final, NamedTuple

SIDES: Final = ("x0", "y0", "x1", "y1")
"""Columns of a table that hold a box, in pixels from the upper left corner of the image."""


class Box(NamedTuple):
    """A region of an upright image: its first column and row, and the first ones behind it."""

    left: int
    top: int
    right: int
    bottom: int

    @classmethod
    def around(cls, left: float, top: float, right: float, bottom: float) -> "Box":
        """The smallest box of whole pixels around corners; a ValueError if it holds nothing."""
        numbers = (left, top, right, bottom)
        if not (all(map(isfinite, numbers)) and left < right and top < bottom):
            raise ValueError(f"box {', '.join(f'{x:g}' for x in numbers)} holds no pixel")
        return cls(floor(left), floor(top), ceil(right), ceil(bottom))

    @classmethod
    def of(cls, cells: Mapping[str, Any]) -> "Box | None":
        """The box of a table's row, None if it has none; a ValueError of what is none of a box."""
        written = [cells.get(side) for side in SIDES]
        known = [cell for cell in written if cell not in (None, "") and cell == cell]  # not NaN
        if not known:
            return None
        try:
            left, top, right, bottom = map(float, known)
        except (TypeError, ValueError) as error:
            said = ", ".join(f"{x!r}" for x in written)
            raise ValueError(f"box {said}; give numbers x0, y0, x1 and y1") from error
        return cls.around(left, top, right, bottom)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.right - self.left, self.bottom - self.top

    def within(self, width: int, height: int) -> "Box | None":
        """The part of it inside of an image of this size; None if there is none."""
        left, top = max(0, self.left), max(0, self.top)
        inside = Box(left, top, min(width, self.right), min(height, self.bottom))
        return inside if min(inside.size) > 0 else None


def region(path: str, box: Box | None) -> str:
    """What a box of an image is called; without one, the image.

    >>> region("cats/1.jpg", Box(10, 20, 110, 220))
    'cats/1.jpg#10,20,110,220'
    """
    return f"{path}#{','.join(map(str, box))}" if box else path


def without_box(name: str) -> str:
    """The name of the image that a box is of; a name of another form as it is.

    >>> without_box("cats/1.jpg#10,20,110,220"), without_box("cats/1#2.jpg")
    ('cats/1.jpg', 'cats/1#2.jpg')
    """
    return re.sub(r"#-?\d+(,-?\d+){3}$", "", name)
