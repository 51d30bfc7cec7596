"""Find words that the field does not use in what users read, and name the field's own.

    python docs/words.py      # `make lint` calls it; it fails if there is one

Looks at pages, outside of their code, and at the strings of the package: help and messages.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = ("*.md", "docs/*.md", "docs/methods/*.md", "src/nearkin/recipes/*.md")
CODE: Final = re.compile(r"(?ms)```.*?```|^ {4}[^\n]*$|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)")
WORDS: Final = {
    "floors?": "baseline",
    "strangers?": "outlier, someone else",
    "page of (a|the|every|this) (finished )?(run|training|discovery)": "report",
    "(a|the|its|all|these|those|of) measures": "metrics",
    "(images?|something) of no class": "outlier",
    "rounds with a person": "active-learning rounds",
    "choice without labels": "label-free model selection",
    "held out again": "held out",
    "unknown class(es)?": "novel class",
    "purity": "neighbor agreement",
    "what it is worth": "how good it is",
}
"""What the field says instead, by what is not to be said."""
OF_PAGES: Final = {"laws?": "invariant", "rooms?": "package", "health": "collapse detection"}
"""The same of pages alone: a disk has room, and statistics has laws."""


def finders(words: dict[str, str]) -> dict[re.Pattern[str], str]:
    """Return the expressions that find these words."""
    return {re.compile(rf"\b({word})\b", re.IGNORECASE): use for word, use in words.items()}


def prose() -> Iterator[tuple[Path, int, str]]:
    """Yield the text of pages, and of the package, with the number of its first line."""
    for page in (page for pattern in PAGES for page in sorted(ROOT.glob(pattern))):
        text = page.read_text(encoding="utf-8")
        yield page, 1, CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for module in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield module, node.lineno, node.value


def found() -> Iterator[str]:
    """Yield a line for each such word."""
    everywhere, of_pages = finders(WORDS), finders(WORDS | OF_PAGES)
    for file, first, text in prose():
        for finder, use in (of_pages if file.suffix == ".md" else everywhere).items():
            for hit in finder.finditer(text):
                line = first + text.count("\n", 0, hit.start())
                yield f"{file.relative_to(ROOT)}:{line}: {hit[0]!r}; say {use}"


if __name__ == "__main__":
    lines = [*found()]
    print("\n".join(lines), file=sys.stderr, end="\n" * bool(lines))
    sys.exit(bool(lines))
