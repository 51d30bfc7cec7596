"""Which tests reach which functions of the package, and tests that run against a changed copy of it.

`planted.py` and `mutation.py` change a function in a copy and ask which tests notice. A test that
enters none of the changed functions does the same as before, so only those that do are run. Who enters
what is recorded once, by a copy in which every function first notes its own number. Notes go to
a file, so those of other processes, forked or new, count as well; a test hands its name down in the
environment. What a shared fixture reaches belongs to all tests that use it. Functions inside others
count as part of the outermost one.

A record is made anew if its file of tests has changed. If the package calls new functions, a record
may be too old: `--again`, or a fresh checkout, makes all of them anew.
"""

import ast
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import scipy.optimize  # noqa: F401  (imported before forking, as are the next three)
import sklearn.linear_model  # noqa: F401
import torch  # noqa: F401
import torchvision  # noqa: F401

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "build" / "reached"
PATIENCE = 300
"""Seconds that a test may take, and ten times what the longest took before: then it hangs."""
OPTIONS = (
    *("-q", "--continue-on-collection-errors"),
    *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"),
)

NOTES = """
import os
seen, write, file = set(), os.write, os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note(number):
    if number not in seen:
        try:
            write(file, f"{{os.environ.get('REACHED_BY', '')}}\\t{{number}}\\n".encode())
        except OSError:  # a test that allows no large files
            return
        seen.add(number)
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


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


def commit() -> str:
    """The last one that changed what is measured."""
    command = ["git", "log", "-1", "--format=%h", "--", "src", "tests"]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, Function]]:
    """Functions and methods with their names, without those inside of functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield within + node.name, node
        else:
            inner = f"{within}{node.name}." if isinstance(node, ast.ClassDef) else within
            yield from functions(node, inner)


def changed(before: str, after: str) -> set[str]:
    """Names of functions that differ; '' if anything outside of them does."""
    found = []
    for text in (before, after):
        tree, parts = ast.parse(text), defaultdict(list)
        for name, node in functions(tree):
            parts[name].append(ast.dump(node))  # a property and its setter have one name
            node.body, node.args, node.decorator_list, node.returns = [], ast.arguments(), [], None
        found.append({**parts, "": [ast.dump(tree)]})
    return {name for name in found[0] | found[1] if found[0].get(name) != found[1].get(name)}


def instrument(root: Path, log: Path) -> list[str]:
    """Let every function of a copy note its number in `log`. Returns what the numbers mean."""
    names: list[str] = []
    package = root / "src" / "nearkin"
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for name, node in functions(tree):
            at = ast.get_docstring(node) is not None
            node.body[at:at] = ast.parse(f"_note_reached({len(names)})").body
            names.append(f"{path.relative_to(root)}:{name}")
        at = ast.get_docstring(tree) is not None
        tree.body[at:at] = ast.parse("from nearkin.reached import note as _note_reached").body
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    (package / "reached.py").write_text(NOTES.format(log=str(log)))
    return names


class Recorder:
    """A plugin of pytest that names who reaches a function now, and measures tests."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.uses: dict[str, list[str]] = {}
        self.failed: set[str] = set()
        self.skipped: set[str] = set()

    def call(self, name: str) -> str:
        """From now on, `name` reaches what is reached. Returns who did before."""
        before = os.environ.get("REACHED_BY", "")
        os.environ["REACHED_BY"] = name
        if notes := sys.modules.get("nearkin.reached"):
            notes.seen.clear()
        return before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        started, before = time.perf_counter(), self.call(item.nodeid)
        result = yield
        self.call(before)
        self.seconds[item.nodeid] = round(time.perf_counter() - started, 3)
        self.uses[item.nodeid] = list(item.fixturenames)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        shared = fixturedef.scope != "function"
        before = self.call(f"fixture {fixturedef.argname}") if shared else ""
        try:
            return (yield)
        finally:
            if shared:
                self.call(before)

    def pytest_runtest_logreport(self, report):
        kind = {"failed": self.failed, "skipped": self.skipped}.get(report.outcome, set())
        kind.add(report.nodeid)


def forked(
    root: Path,
    arguments: list[str],
    plugin: object,
    *,
    then: Callable[[], None] = lambda: None,
    noted: Path,
    patience: float,
) -> bool:
    """Run pytest in a process of its own, which has imported torch before. Returns whether it can.

    It is killed, with all that it has started, if it writes nothing to `noted` for so many seconds.
    """
    noted.write_bytes(b"")
    child = os.fork()
    if child:
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            time.sleep(0.05)
            if time.time() - noted.stat().st_mtime > patience:
                os.killpg(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(ended[1]) == 0
    os.setsid()
    os.chdir(root)
    sys.path[:1] = [str(root), str(root / "src")]  # in place of this file's folder
    os.environ["PYTHONPATH"] = str(root / "src")  # of processes that tests start
    del sys.modules["__main__"].__file__  # interpreters that tests start do not import it
    sys.dont_write_bytecode = True  # a change may come within the second of the last one
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    code = pytest.main([*OPTIONS, *arguments], [plugin])
    then()
    os._exit(code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR))


class Reach:
    """The tests of each function, and their seconds, by the records of some files."""

    def __init__(self, records: Iterable[dict]) -> None:
        self.seconds: dict[str, float] = {}
        self.tests: defaultdict[str, set[str]] = defaultdict(set)
        self.always: set[str] = set()  # they fail in a copy that takes notes
        self.broken: set[str] = set()  # they fail in any
        for kept in records:
            names = list(kept["seconds"])
            self.seconds |= kept["seconds"]
            self.always |= set(kept["always"])
            self.broken |= set(kept["broken"])
            for function, numbers in kept["reached"].items():
                self.tests[function] |= {names[number] for number in numbers}

    def of(self, path: str, names: set[str]) -> set[str]:
        """Tests that reach one of these functions of a file; all of its, for what is outside."""
        files = {path, *importers(path)} if "" in names else set()
        found = {f"{path}:{name}" for name in names}
        found |= {name for name in self.tests if name.partition(":")[0] in files}
        return set().union(self.always, *(self.tests.get(name, set()) for name in found))


def importers(path: str) -> set[str]:
    """Files that import from this one."""
    parent, _, name = (
        path.removeprefix("src/").removesuffix(".py").replace("/", ".").rpartition(".")
    )
    words = (f"from {parent}.{name} import", f"import {parent}.{name}\n")
    found = set()
    for other in (ROOT / "src").rglob("*.py"):
        text = other.read_text()
        if any(word in text for word in words) or f"from {parent} import {name}" in text:
            found.add(str(other.relative_to(ROOT)))
    return found


def test_files() -> list[str]:
    """Files of tests, and those of the package that have examples."""
    tests = [
        path for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_planted.py"
    ]
    package = [path for path in (ROOT / "src").rglob("*.py") if ">>> " in path.read_text()]
    return sorted(str(path.relative_to(ROOT)) for path in tests + package)


def record(files: list[str], again: bool = False) -> Iterator[tuple[str, dict]]:
    """What the tests of each file reach: kept records, and new ones of files that have changed."""
    with tempfile.TemporaryDirectory() as folder:
        roots, log, names = [], Path(folder, "log"), []
        for file in files:
            kept = RECORDS / f"{file.replace('/', '.')}.json"
            source = hashlib.sha256((ROOT / file).read_bytes()).hexdigest()
            if again or not kept.exists() or json.loads(kept.read_text())["source"] != source:
                if not roots:
                    roots = [copied(Path(folder, name)) for name in ("plain", "noted")]
                    names = instrument(roots[1], log)
                made = {"source": source, **_record(file, roots, log, names)}
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(made))
                print(f"recorded {file}: {len(made['seconds'])} tests", flush=True)
            yield file, json.loads(kept.read_text())


def _record(file: str, roots: list[Path], log: Path, names: list[str]) -> dict:
    plain, noted = roots
    found = log.with_name("found")
    found.unlink(missing_ok=True)
    recorder = Recorder()

    def keep() -> None:
        seen = (recorder.seconds, recorder.uses, *map(list, (recorder.failed, recorder.skipped)))
        found.write_text(json.dumps(seen))

    arguments = ["-m", "not slow", file]
    forked(noted, arguments, recorder, then=keep, noted=log, patience=4 * PATIENCE)
    seconds, uses, failed, skipped = json.loads(found.read_text())
    by = defaultdict(set)
    for line in log.read_text().splitlines():
        who, _, number = line.rpartition("\t")
        by[who].add(names[int(number)])
    again = outcome(plain, failed, Counter(seconds)) if failed else Outcome([], [], 0)
    broken = {*again.caught, *skipped}
    seconds = {test: spent for test, spent in seconds.items() if test not in broken}
    reached = defaultdict(list)
    for position, test in enumerate(seconds):
        for function in by[test].union(*(by[f"fixture {name}"] for name in uses[test])):
            reached[function].append(position)
    always = [test for test in failed if test not in broken]
    return {"seconds": seconds, "always": always, "broken": again.caught, "reached": reached}


@dataclass(frozen=True)
class Outcome:
    """Of tests against a changed copy."""

    run: list[str]
    caught: list[str]
    left_out: int


KINDS = ("chosen", "run", "end", "caught")


class Watcher:
    """A plugin of pytest: runs these tests, until a time is over, and notes which fail."""

    def __init__(self, tests: set[str], limit: float, log: Path) -> None:
        self.tests, self.log = tests, log
        self.end = time.monotonic() + limit

    def note(self, kind: str, name: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{kind}\t{name}\n")

    def pytest_collection_modifyitems(self, items):
        chosen = [item for item in items if self.tests & {item.nodeid, item.nodeid.split("[")[0]}]
        items[:] = chosen
        for item in items:
            self.note("chosen", item.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        if time.monotonic() > self.end:
            item.session.shouldstop = "out of time"
            return True
        self.note("run", item.nodeid)
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid):
        self.note("end", nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.note("caught", report.nodeid)

    def pytest_collectreport(self, report):
        self.note("caught" if report.failed else "collected", report.nodeid)


def outcome(
    root: Path, tests: list[str], seconds: Mapping[str, float], limit: float = 1e9, *options: str
) -> Outcome:
    """Run tests, or all cases of one, against a copy, the cheapest files first.

    A test that ends the process, or hangs, has caught what is wrong.
    """
    costs: Counter[str] = Counter()
    for test in tests:
        costs[test.partition("::")[0]] += seconds.get(test, 1)
    log = root.with_name("outcome")
    longest = max((seconds.get(test, 0) for test in tests), default=0)
    watcher = Watcher(set(tests), limit, log)
    files = sorted(costs, key=lambda file: costs[file])
    sound = forked(root, [*options, *files], watcher, noted=log, patience=PATIENCE + 10 * longest)
    notes = [line.split("\t", 1) for line in log.read_text().splitlines()]
    named = {kind: [name for each, name in notes if each == kind] for kind in KINDS}
    caught = dict.fromkeys([*named["caught"], *sorted({*named["run"]} - {*named["end"]})])
    if not (sound or caught):
        caught = {"all": None}  # there is no package that tests could import
    return Outcome(named["run"], [*caught], len(named["chosen"]) - len(named["run"]))
