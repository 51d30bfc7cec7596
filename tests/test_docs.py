"""The documentation names files that exist, and all rooms of the package."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import words

from benchmarks.__main__ import names

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/nearkin/**/*.md")]
PATH = re.compile(r"(?<![\w/.-])((?:benchmarks|docs|examples|src|tests)/[\w./-]*\w)")
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")
STUDIES = "studies-1"
"""The tag that has the programs of finished studies."""


def named(page):
    """Yield the files that a page names from the root, and those that it links to."""
    text = page.read_text(encoding="utf-8")
    yield from (page.parent / path for path in LINK.findall(text))
    paths = PATH.findall(LINK.sub("", text))
    yield from (ROOT / path for path in paths if not re.search("[A-Z]{2}", path))


@cache
def files_of_studies():
    """The files at the tag; nothing in a clone without tags."""
    command = ["git", "ls-tree", "-r", "--name-only", STUDIES, "benchmarks"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return frozenset(shown.stdout.split())


def missing(page):
    return {str(path.relative_to(ROOT)) for path in named(page) if not path.exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_files_that_exist_or_the_tag_that_has_them(page):
    away = missing(page) - {"benchmarks/throughput.py"}  # the command of an old measurement
    assert not away or STUDIES in page.read_text(encoding="utf-8")
    assert all(path.startswith("benchmarks/") for path in away)


def test_the_tag_has_what_pages_name():
    away = set().union(*map(missing, PAGES)) - {"benchmarks/throughput.py"}
    if not files_of_studies():
        pytest.skip(f"no tag {STUDIES} in this clone")
    assert all(
        any(f"{file}/".startswith(f"{path}/") for file in files_of_studies()) for path in away
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_benchmark_that_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"-m benchmarks (\w+)", text)) - {"NAME"} <= set(names())
    scripts = re.findall(r"python (benchmarks/\S+\.py)", text)
    assert not [path for path in scripts if (ROOT / path).exists()], "run by -m benchmarks"


def test_the_tree_is_that_of_the_package():
    tree = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("    src/nearkin/\n")[1]
    written = set(re.findall(r"\b(\w+(?:/|\.py))", tree.split("\n\n")[0]))
    package = (ROOT / "src" / "nearkin").iterdir()
    rooms = {path.name + "/" * path.is_dir() for path in package if path.suffix in ("", ".py")}
    assert written == {room for room in rooms if not room.startswith("__")}


def test_words_that_the_field_does_not_use_are_found_in_pages_and_messages(monkeypatch, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "a.md").write_text("A `floor`.\n\nA floor that is not beaten, in a room.\n")
    (tmp_path / "src" / "b.py").write_text('x = 1\n"""No room for the page of a run."""\n')
    monkeypatch.setattr(words, "ROOT", tmp_path)
    assert [line.partition(";")[0] for line in words.found()] == [
        "a.md:3: 'floor'", "a.md:3: 'room'", "src/b.py:2: 'page of a run'",
    ]  # fmt: skip
