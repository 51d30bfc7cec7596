"""Plant known bugs, one at a time, and see which tests notice: `make planted`.

    python tests/planted.py [NAME...]            # writes docs/planted.csv
    python tests/planted.py --named [NAME...]    # only the test that each bug names: minutes

Each patch in tests/planted/ is a bug that a public implementation has had, or nearkin. Its first lines
say which test must fail. The patch goes onto a copy of the checkout. Then all tests are run that could
notice: those of the room that is changed, of the rooms above it in the layers of pyproject.toml, and of
no room, as far as they reach a function that is changed (`reached.py`). Others do the same as before.

A row says how many of these tests were run, how many were left out when `--limit-seconds` were over,
and which failed; `[3]` stands for three cases of one test. A test that catches no bug, or
none alone, may be superfluous; without such a row none is deleted. Stop it at any time: rows of this
commit of src and tests are kept, unless `--again`. Fails if a bug is not caught.
"""

import argparse
import csv
import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from reached import ROOT, Outcome, Reach, changed, commit, copied, outcome, record, test_files

PATCHES = ROOT / "tests" / "planted"
TABLE = ROOT / "docs" / "planted.csv"
COLUMNS = ("bug", "room", "tests", "left_out", "caught", "seconds", "commit", "by")


@dataclass(frozen=True)
class Bug:
    """A patch, and what its first lines say."""

    path: Path

    def header(self, what: str) -> str:
        """What follows `what:` at the top of the patch."""
        match = re.search(rf"^{what}: (.+)$", self.path.read_text(), re.MULTILINE)
        assert match, f"{self.path.name} has no line '{what}: ...'"
        return match[1].strip()

    @property
    def files(self) -> list[str]:
        """The files that it changes."""
        return re.findall(r"^\+\+\+ b/(\S+)", self.path.read_text(), re.MULTILINE)

    def apply(self, root: Path, *options: str) -> None:
        """Plant it in a copy, or with `--reverse` pull it out."""
        command = ["git", "apply", *options, str(self.path)]
        subprocess.run(command, cwd=root, check=True)

    def tests(self, root: Path, reach: Reach) -> set[str]:
        """The tests that could notice it, once it is planted in a copy."""
        test = self.header("Test")
        recorded = {each.partition("[")[0] for each in (*reach.seconds, *reach.broken)}
        found = {test} if test.partition("[")[0] not in recorded else set()  # a slow one
        for file in self.files:
            names = changed((ROOT / file).read_text(), (root / file).read_text())
            near = rooms_above(room(file))
            found |= {test for test in reach.of(file, names) if room(test) in near}
        return found


def planted(names: list[str]) -> list[Bug]:
    """The bugs of these names, or all."""
    bugs = [Bug(path) for path in sorted(PATCHES.glob("*.patch"))]
    return [bug for bug in bugs if not names or any(name in bug.path.stem for name in names)]


@cache
def layers() -> list[set[str]]:
    """The rooms of the package from the highest to the lowest."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    listed = next(item["layers"] for item in settings["contracts"] if item["type"] == "layers")
    return [set(layer.replace(" ", "").split("|")) for layer in listed]


def room(path: str) -> str:
    """The room of a file of the package or of tests; '' for tests of the whole."""
    name = re.sub(r"^(src/nearkin|tests)/(test_)?", "", path.partition("::")[0])
    name = name.partition("/")[0].removesuffix(".py")
    return name if any(name in layer for layer in layers()) else ""


def rooms_above(name: str) -> set[str]:
    """The room itself, those of higher layers, and '' for tests of the whole."""
    above = {name, ""}
    for layer in layers():
        if name in layer:
            break
        above |= layer
    return above


def compact(tests: list[str]) -> str:
    """Names of tests, and how many cases of each, by file."""
    counts = Counter(re.sub(r"\[.*", "", test.removeprefix("tests/")) for test in tests)
    return " ".join(test if count == 1 else f"{test}[{count}]" for test, count in counts.items())


def rows() -> dict[str, dict[str, str]]:
    """Those of the table, by the name of the bug."""
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="") as file:
        return {row["bug"]: row for row in csv.DictReader(file)}


def write(found: dict[str, dict[str, str]]) -> None:
    """The whole table, in order, at once."""
    there = {bug.path.stem for bug in planted([])}
    new = TABLE.with_suffix(".new")
    with new.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(row for name, row in sorted(found.items()) if name in there)
    new.replace(TABLE)


def plant(bug: Bug, root: Path, reach: Reach, limit: float) -> dict[str, str]:
    """The row of a bug."""
    started = time.monotonic()
    bug.apply(root)
    tests = bug.tests(root, reach)
    result = outcome(root, sorted(tests), reach.seconds, limit)
    bug.apply(root, "--reverse")
    return row(bug, result, time.monotonic() - started)


def row(bug: Bug, result: Outcome, seconds: float) -> dict[str, str]:
    values = (
        bug.path.stem, room(bug.files[0]), len(result.run), result.left_out, len(result.caught),
        round(seconds), commit(), compact(result.caught),
    )  # fmt: skip
    print("caught" if result.caught else "MISSED", *values[:6], flush=True)
    return {name: str(value) for name, value in zip(COLUMNS, values, strict=True)}


def work(bugs: list[Bug], reach: Reach, limit: float) -> None:
    """Plant these bugs and put their rows into the table."""
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        for bug in bugs:
            found = plant(bug, root, reach, limit)
            with TABLE.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                write({**rows(), bug.path.stem: found})


def divided(bugs: list[Bug], reach: Reach, limit: float, processes: int) -> None:
    """Let processes plant these bugs in turn."""
    children = []
    for number in range(min(processes, len(bugs))):
        if child := os.fork():
            children.append(child)
        else:
            work(bugs[number::processes], reach, limit)
            os._exit(0)
    failed = [os.waitpid(child, 0)[1] for child in children]
    assert not any(failed), "a process that planted bugs has failed"


def matrix(bugs: list[Bug], options: argparse.Namespace) -> int:
    """Which tests catch each bug, from the highest room down. Returns how many are missed."""
    kept, records = {} if options.again else rows(), {}
    left = [bug for bug in bugs if kept.get(bug.path.stem, {}).get("commit") != commit()]
    for name in [name for layer in layers() for name in sorted(layer)]:
        own = [bug for bug in left if room(bug.files[0]) == name]
        near = rooms_above(name)
        files = [file for file in test_files() if own and room(file) in near]
        new = [file for file in files if file not in records]
        records |= dict(record(new, again=options.again))
        divided(
            own, Reach(records[file] for file in files), options.limit_seconds, options.processes
        )
    found = rows()
    return sum(found[bug.path.stem]["caught"] == "0" for bug in bugs)


def named(bugs: list[Bug]) -> int:
    """Run only the test that each bug names. Returns how many miss it."""
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        tests = sorted({bug.header("Test") for bug in bugs})
        before = outcome(root, tests, {})
        assert before.run
        assert not before.caught, f"without any bug, {before.caught} fail"
        for bug in bugs:
            bug.apply(root)
            found = outcome(root, [bug.header("Test")], {})
            assert found.run, f"{bug.path.name} names a test that is not there"
            caught = bool(found.caught)
            bug.apply(root, "--reverse")
            missed += not caught
            print(
                "caught" if caught else "MISSED",
                f"{bug.path.stem}: {bug.header('Bug')}",
                flush=True,
            )
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="words in the names of bugs; all without")
    parser.add_argument("--named", action="store_true", help="only the tests that bugs name")
    parser.add_argument("--again", action="store_true", help="make records and rows anew")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit-seconds", type=float, default=600, help="for each bug")
    options = parser.parse_args()
    bugs = planted(options.names)
    missed = named(bugs) if options.named else matrix(bugs, options)
    print(f"{len(bugs) - missed} of {len(bugs)} planted bugs caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
