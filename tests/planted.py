"""Plant known bugs, one at a time, and see that tests notice: `make planted`.

    python tests/planted.py [NAME...]
    python tests/planted.py --all [NAME...]    # writes docs/planted.csv: hours

Each patch in tests/planted/ is a bug that a public implementation has had, or nearkin. Its first lines
say which test must fail. The patch goes onto a copy of the checkout. Fails if a bug is not caught,
or if its test is skipped.

With `--all`, the tests of whatever room are run that run a changed line, by what coverage has seen of
them without a bug: the quick ones, and the one that the bug names. Of a line that most run, they are
those of its room. A row of the table says how many there were, and which failed. Stop it at any time:
what is of this commit is kept.
"""

import ast
import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import coverage
import pytest
import scipy.optimize  # noqa: F401  (imported before forking, as are the next three)
import sklearn.linear_model  # noqa: F401
import torch  # noqa: F401
import torchvision  # noqa: F401

ROOT = Path(__file__).parents[1]
PATCHES = ROOT / "tests" / "planted"
TABLE = ROOT / "docs" / "planted.csv"
REACHED = ROOT / "build" / "planted"
"""For each commit, the tests that run a line which a bug changes."""
COLUMNS = ("bug", "room", "tests", "failed", "commit", "by")
PATIENCE = 300
"""Seconds without a test that begins or ends: then one hangs."""
QUICK = 2
"""Seconds of a test, under coverage, and of the fixtures that it shares: whole runs take longer."""
MANY = 120
"""Tests that run a line, at most, for all of them to be run with a bug there."""
OPTIONS = (
    *("-q", "--continue-on-collection-errors"),
    *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"),
)


def copied(folder: Path) -> Path:
    """A copy of the checkout. It is in no repository, or patches would miss it."""
    root = folder / "checkout"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    if (ROOT.parent / "shared").exists():
        (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
    return root


class Watcher:
    """A plugin of pytest that notes which tests begin, end, fail and are skipped.

    With `seen`, coverage is told which test runs, or which fixture that tests share.
    """

    def __init__(self, log: Path, seen: coverage.Coverage | None = None) -> None:
        self.log, self.seen, self.running = log, seen, ""

    def note(self, kind: str, name: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{kind}\t{time.time():.3f}\t{name}\n")

    def attribute(self, lines_to: str) -> None:
        self.running = lines_to
        if self.seen:
            self.seen.switch_context(lines_to)

    def pytest_runtest_logstart(self, nodeid):
        self.note("begun", nodeid)
        self.attribute(nodeid)

    def pytest_runtest_logfinish(self, nodeid):
        self.note("ended", nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed or report.skipped:
            self.note(report.outcome, report.nodeid)

    pytest_collectreport = pytest_runtest_logreport

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        for name in item.fixturenames if self.seen else ():
            self.note("takes", f"{name}\t{item.nodeid}")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if not self.seen or fixturedef.scope == "function":
            return (yield)
        outside = self.running
        self.note("begun", fixturedef.argname)
        self.attribute(fixturedef.argname)
        value = yield
        self.note("ended", fixturedef.argname)
        self.attribute(outside)
        return value


@dataclass(frozen=True)
class Outcome:
    """Of tests against a changed copy, by their names, and of the fixtures that they share."""

    spans: dict[str, list[float]]  # When each began and, unless it did not, ended
    failed: list[str]
    skipped: list[str]
    takes: dict[str, set[str]]  # The tests that take a fixture

    @classmethod
    def read(cls, log: Path) -> "Outcome":
        """What a watcher has noted. A test that did not end has failed."""
        spans, takes = dict[str, list[float]](), dict[str, set[str]]()
        ends: dict[str, list[str]] = {"failed": [], "skipped": []}
        for line in log.read_text().splitlines():
            kind, moment, name = line.split("\t", 2)
            if kind == "begun":
                spans[name] = [float(moment)]
            elif kind == "ended":
                spans[name].append(float(moment))
            elif kind == "takes":
                fixture, test = name.split("\t")
                takes.setdefault(fixture, set()).add(test)
            else:
                ends[kind].append(name)
        hanging = [name for name, span in spans.items() if "::" in name and len(span) < 2]
        failed = [*dict.fromkeys(ends["failed"] + hanging)]
        return cls(spans, failed, ends["skipped"], takes)

    @property
    def begun(self) -> list[str]:
        """The tests."""
        return [name for name in self.spans if "::" in name]

    def seconds(self, test: str) -> float:
        """What a test takes, with the fixtures that it shares."""
        fixtures = {
            name for name, tests in self.takes.items() if test in tests
        } & self.spans.keys()
        return sum(
            max(self.spans[name][1:], default=math.inf) - self.spans[name][0]
            for name in {test, *fixtures}
        )

    def during(self, moment: float) -> set[str]:
        """The tests that something is of that ended at a moment."""
        running = [
            name
            for name, (begun, *ended) in self.spans.items()
            if begun <= moment <= max(ended, default=0)
        ]
        return self.of(max(running, key=lambda name: self.spans[name][0])) if running else set()

    def of(self, name: str) -> set[str]:
        """The test of this name, or those that take the fixture."""
        return self.takes.get(name, {name})


def outcome(root: Path, *arguments: str, lines: coverage.Coverage | None = None) -> Outcome:
    """Give pytest these arguments in a copy, in a process of its own that has imported torch before.

    A test that ends the process, or hangs, has failed. `lines` is to note what it runs.
    """
    log = root.with_name("outcome")
    log.write_bytes(b"")
    child = os.fork()
    if not child:
        try:
            _run(root, list(arguments), Watcher(log, lines))
        finally:
            os._exit(1)
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        time.sleep(0.05)
        if time.time() - log.stat().st_mtime > PATIENCE:
            os.killpg(child, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what tests have left behind
    found = Outcome.read(log)
    if os.waitstatus_to_exitcode(ended[1]) and not found.failed:
        found.failed.append("all")  # there is no package that tests could import
    return found


def _run(root: Path, arguments: list[str], watcher: Watcher) -> None:
    os.setsid()
    os.chdir(root)
    sys.path[:1] = [str(root), str(root / "src")]  # in place of this file's folder
    os.environ["PYTHONPATH"] = str(root / "src")  # of processes that tests start
    del sys.modules["__main__"].__file__  # interpreters that tests start do not import it
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    if watcher.seen:
        watcher.seen.start()
    code = pytest.main([*OPTIONS, *arguments], [watcher])
    if watcher.seen:
        watcher.seen.stop()
        watcher.seen.save()
    os._exit(code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR))


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
    def room(self) -> str:
        """The part of the package that it changes."""
        match = re.search(r"^\+\+\+ b/src/nearkin/(\w+)", self.path.read_text(), re.MULTILINE)
        return match[1] if match else ""

    def apply(self, root: Path, *options: str) -> None:
        """Plant it in a copy, or with `--reverse` pull it out."""
        command = ["git", "apply", *options, str(self.path)]
        subprocess.run(command, cwd=root, check=True)


def planted(names: list[str]) -> list[Bug]:
    """The bugs of these names, or all."""
    bugs = [Bug(path) for path in sorted(PATCHES.glob("*.patch"))]
    return [bug for bug in bugs if not names or any(name in bug.path.stem for name in names)]


def caught(bug: Bug, root: Path) -> str:
    """Whether the test that a bug names fails with it in a copy, in a word."""
    bug.apply(root)
    found = outcome(root, bug.header("Test"))
    bug.apply(root, "--reverse")
    assert found.begun or found.skipped, f"{bug.path.name} names a test that is not there"
    return "caught" if found.failed else "skipped" if found.skipped else "MISSED"


def commit() -> str:
    """The last one that changed what is run."""
    command = ["git", "log", "-1", "--format=%h", "--", "src", "tests"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def reached(root: Path, bugs: list[Bug]) -> dict[str, list[str]]:
    """Of each bug, the quick tests that run a line which it changes: found once for a commit."""
    kept = REACHED / f"{commit()}.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    for path in sorted((root / "tests").glob("*")):
        name = str(path.relative_to(root))
        if name in found or not (path.is_dir() or path.match("test_*.py")):
            continue
        with tempfile.TemporaryDirectory() as folder:
            seen = coverage.Coverage(f"{folder}/data", data_suffix=True, branch=False)
            done = outcome(root, "-m", "not slow", name, lines=seen)
            found[name] = _reaching(Path(folder), root, bugs, done)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    return {bug.path.stem: _to_run(bug, found.values()) for bug in bugs}


def _to_run(bug: Bug, found: Iterable[dict[str, list[str]]]) -> list[str]:
    """The tests that run a bug's lines or, where these are many, those of its room."""
    tests = {test for by_bug in found for test in by_bug[bug.path.stem]}
    if len(tests) > MANY:
        of_room = (f"tests/{bug.room}/", f"tests/test_{bug.room}.py")
        tests = {test for test in tests if test.startswith(of_room)}
    return sorted({bug.header("Test"), *tests})


def _reaching(folder: Path, root: Path, bugs: list[Bug], done: Outcome) -> dict[str, list[str]]:
    """Of each bug, which quick tests run its lines, by the files of coverage in a folder.

    A process that a test has started knows none: its lines are of the test during which it ended.
    """
    quick = {test for test in done.begun if done.seconds(test) < QUICK} - {*done.failed}
    by_bug: dict[str, set[str]] = {bug.path.stem: set() for bug in bugs}
    for path in folder.iterdir():
        of_process = done.during(path.stat().st_mtime)
        data = coverage.CoverageData(str(path))
        try:
            data.read()
        except coverage.exceptions.DataError:
            continue  # of a process that a test has killed
        for bug in bugs:
            for file, numbers in changed(bug).items():
                by_line = data.contexts_by_lineno(str(root / file))
                for context in {name for number in numbers for name in by_line.get(number, [])}:
                    by_bug[bug.path.stem] |= done.of(context) if context else of_process
    for bug in bugs:
        if not any(changed(bug).values()):  # it runs on import: by all, which are too many
            by_bug[bug.path.stem] = set(done.begun)
    return {name: sorted(tests & quick) for name, tests in by_bug.items()}


@cache
def changed(bug: Bug) -> dict[str, set[int]]:
    """The lines that a bug changes, or puts something beside: those of the statement in a function.

    Where a patch says that they are may be where they were before other changes.
    """
    places: dict[str, set[int]] = {}
    for part in re.split("^--- a/", bug.path.read_text(), flags=re.MULTILINE)[1:]:
        name, *hunks = re.split("^@@ -", part, flags=re.MULTILINE)
        file = ROOT / name.split("\n")[0]
        if file.suffix == ".py":
            numbers = {line for hunk in hunks for line in _changed_by(hunk, file)}
            statements = (_statement(file, number) for number in numbers)
            places[str(file.relative_to(ROOT))] = {line for lines in statements for line in lines}
    return places


def _changed_by(hunk: str, file: Path) -> set[int]:
    """The lines of a file that a hunk of a patch removes or, of what it adds, the ones before."""
    head, *rows = hunk.rstrip("\n").split("\n")
    before = [row[1:] for row in rows if not row.startswith("+")]
    lines = file.read_text().splitlines()
    starts = [at for at in range(len(lines)) if lines[at : at + len(before)] == before]
    number = min(starts, key=lambda at: abs(at + 1 - int(re.split("[-,]", head)[0]))) + 1
    changed = set[int]()
    for row in rows:
        if row.startswith("+"):
            changed.add(number - 1)
        else:
            changed.update([number] * row.startswith("-"))
            number += 1
    return changed


def _statement(file: Path, number: int) -> range:
    """The lines of the smallest statement around one; of a function, its body; none outside."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.stmt)]
    around = [node for node in nodes if node.lineno <= number <= (node.end_lineno or 0)]
    if not any(isinstance(node, ast.FunctionDef) for node in around):
        return range(0)
    node = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
    begin, end = node.lineno, (node.end_lineno or 0) + 1
    if isinstance(node, ast.FunctionDef):
        begin = node.body[0].lineno
    elif body := getattr(node, "body", []):
        end = body[0].lineno
    return range(begin, end)


def write_row(bug: Bug, root: Path, tests: list[str]) -> None:
    """Put into the table which tests notice a bug, unless it is there from this commit."""
    rows = list(csv.DictReader(TABLE.open(newline=""))) if TABLE.exists() else []
    if any((row["bug"], row["commit"]) == (bug.path.stem, commit()) for row in rows):
        return
    bug.apply(root)
    found = outcome(root, *tests)
    bug.apply(root, "--reverse")
    counts = len(found.begun), len(found.failed)
    values = (bug.path.stem, bug.room, *counts, commit(), " ".join(found.failed))
    row = dict(zip(COLUMNS, values, strict=True))
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows([*(each for each in rows if each["bug"] != row["bug"]), row])
    print(*values[:4], flush=True)


def main() -> int:
    names = [name for name in sys.argv[1:] if name != "--all"]
    bugs = planted(names)
    if len(names) + 1 < len(sys.argv):
        with tempfile.TemporaryDirectory() as folder:
            root = copied(Path(folder))
            tests = reached(root, planted([]))
            for bug in bugs:
                write_row(bug, root, tests[bug.path.stem])
        rows = csv.DictReader(TABLE.open(newline=""))
        return int(any(row["failed"] == "0" for row in rows))
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        before = outcome(root, *sorted({bug.header("Test") for bug in bugs}))
        assert before.begun
        assert not before.failed, f"without any bug, {before.failed} fail"
        for bug in bugs:
            word = caught(bug, root)
            missed += word != "caught"
            print(word, f"{bug.path.stem}: {bug.header('Bug')}", flush=True)
    print(f"{len(bugs) - missed} of {len(bugs)} planted bugs caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
