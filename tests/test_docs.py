"""The documentation names files that exist, and all rooms of the package."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/nearkin/**/*.md")]
PATH = re.compile(r"(?<![\w/.-])((?:benchmarks|docs|examples|src|tests)/[\w./-]*\w)")
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


def named(page):
    """Yield the files that a page names from the root, and those that it links to."""
    text = page.read_text(encoding="utf-8")
    yield from (page.parent / path for path in LINK.findall(text))
    paths = PATH.findall(LINK.sub("", text))
    yield from (ROOT / path for path in paths if not re.search("[A-Z]{2}", path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_files_that_exist(page):
    missing = {str(path.relative_to(ROOT)) for path in named(page) if not path.exists()}
    assert missing <= {"benchmarks/throughput.py"}  # the command of an old measurement


def test_the_tree_is_that_of_the_package():
    tree = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("    src/nearkin/\n")[1]
    written = set(re.findall(r"\b(\w+(?:/|\.py))", tree.split("\n\n")[0]))
    package = (ROOT / "src" / "nearkin").iterdir()
    rooms = {path.name + "/" * path.is_dir() for path in package if path.suffix in ("", ".py")}
    assert written == {room for room in rooms if not room.startswith("__")}
