"""Plant known bugs, one at a time, and see that the tests notice: `make planted`.

    python tests/planted.py [NAME...]

Each patch in tests/planted/ is a bug that a public implementation has had. Its first lines say which
test must fail. The patch goes onto a copy of the package and its tests, never onto this checkout.
Prints a line for each, and fails if one is not caught. Imports torch once and forks for every bug.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch  # noqa: F401  (imported before forking)

LIMIT = 600
"""Seconds for each test; far more than any takes that does not hang."""

ROOT = Path(__file__).parents[1]
PATCHES = ROOT / "tests" / "planted"
COPIED = ("src", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Bug:
    """A patch, and what its first lines say."""

    path: Path

    def header(self, what: str) -> str:
        """What follows `what:` at the top of the patch."""
        match = re.search(rf"^{what}: (.+)$", self.path.read_text(), re.MULTILINE)
        assert match, f"{self.path.name} has no line '{what}: ...'"
        return match[1].strip()

    def apply(self, root: Path, *options: str) -> None:
        """Plant it in a copy, or with `--reverse` pull it out."""
        command = ["git", "apply", *options, str(self.path)]
        subprocess.run(command, cwd=root, check=True)


def planted(names: list[str]) -> list[Bug]:
    """The bugs of these names, or all."""
    bugs = [Bug(path) for path in sorted(PATCHES.glob("*.patch"))]
    return [bug for bug in bugs if not names or any(name in bug.path.stem for name in names)]


def copied(folder: Path) -> Path:
    """A copy of what the tests need. It is in no repository, or patches would miss it."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def run_tests(root: Path, tests: list[str]) -> int:
    """The exit code of pytest in a process of its own: 0 passed, 1 failed, others are accidents."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(LIMIT * len(tests))
    os.chdir(root)
    sys.path[:1] = [str(root), str(root / "src")]  # in place of this file's folder
    os.environ["PYTHONPATH"] = str(root / "src")  # of processes that tests start
    sys.dont_write_bytecode = True  # a patch may come within the second of the last one
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))


def main(names: list[str]) -> int:
    """Plant each bug and return how many were missed."""
    bugs = planted(names)
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        if code := run_tests(root, sorted({bug.header("Test") for bug in bugs})):
            print(f"the tests do not pass without any bug (pytest says {code})")
            return 1
        missed = 0
        for bug in bugs:
            bug.apply(root)
            caught = run_tests(root, [bug.header("Test")]) == 1
            bug.apply(root, "--reverse")
            missed += not caught
            print(
                "caught" if caught else "MISSED",
                f"{bug.path.stem}: {bug.header('Bug')}",
                flush=True,
            )
    print(f"{len(bugs) - missed} of {len(bugs)} planted bugs caught")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
