"""The documentation names files that exist, and all rooms of the package."""

import re
import subprocess
from pathlib import Path

import pytest
import words
from needs import STUDIES

from benchmarks.__main__ import names

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/nearkin/**/*.md")]
BENCHMARKS = {"NAME", *names()}
PATH = re.compile(r"(?<![\w/.-])((?:benchmarks|docs|examples|src|tests)/[\w./-]*\w)")
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


def named(page):
    """Yield the files that a page names from the root, those that it links to, and benchmarks."""
    text = page.read_text(encoding="utf-8")
    yield from (page.parent / path for path in LINK.findall(text))
    paths = PATH.findall(LINK.sub("", text))
    yield from (ROOT / path for path in paths if not re.search("[A-Z]{2}", path))
    programs = set(re.findall(r"-m\s+benchmarks (\w+)", text)) - BENCHMARKS
    yield from (ROOT / "benchmarks" / f"{program}.py" for program in programs)


def files_of(study):
    """The benchmarks at a commit."""
    command = ["git", "ls-tree", "-r", "--name-only", study, "benchmarks"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return shown.stdout.split()


def missing(page):
    away = {str(path.relative_to(ROOT)) for path in named(page) if not path.exists()}
    return away - {"benchmarks/throughput.py"}  # the command of an old measurement


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_files_that_exist_or_the_commit_that_has_them(page):
    away, text = missing(page), page.read_text(encoding="utf-8")
    assert not away or any(study in text for study in STUDIES)
    assert all(path.startswith("benchmarks/") for path in away)
    scripts = re.findall(r"python (benchmarks/\S+\.py)", text)
    assert not [path for path in scripts if (ROOT / path).exists()], "run by -m benchmarks"


@pytest.mark.needs("history")
def test_studies_have_the_programs_that_pages_name():
    there = {file for study in STUDIES for file in files_of(study)}
    for path in set().union(*map(missing, PAGES)):
        assert any(f"{file}/".startswith(f"{path}/") for file in there), path


def test_every_package_has_its_row_in_the_table_of_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    package = ROOT / "src" / "nearkin"
    there = [*package.glob("[a-z]*.py"), *(file.parent for file in package.glob("*/__init__.py"))]
    assert sorted(named) == sorted(path.stem for path in there)


def test_words_that_the_field_does_not_use_are_found_in_pages_and_messages(monkeypatch, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "a.md").write_text("A `floor`.\n\nA floor that is not beaten, in a room.\n")
    (tmp_path / "src" / "b.py").write_text('x = 1\n"""No room for the page of a run."""\n')
    monkeypatch.setattr(words, "ROOT", tmp_path)
    assert [line.partition(";")[0] for line in words.found()] == [
        "a.md:3: 'floor'", "a.md:3: 'room'", "src/b.py:2: 'page of a run'",
    ]  # fmt: skip
