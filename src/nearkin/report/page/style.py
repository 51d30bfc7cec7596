"""How pages look: quiet, in the reader's own fonts, by day and by night."""

from importlib.resources import files
from typing import Final

SHADES: Final = 10
"""Steps from an empty cell to a full one."""

STYLE: Final = (files(__package__) / "style.css").read_text(encoding="utf-8") + "".join(
    f".shade{step} {{ background: rgb(var(--shade) / {0.07 * step:.2f}) }}\n"
    for step in range(1, SHADES + 1)
)
