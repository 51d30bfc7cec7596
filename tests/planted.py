"""Plant known bugs, one at a time, and see that tests notice: `make planted`.

    python tests/planted.py [NAME...]

Each patch in tests/planted/ is a bug that a public implementation has had, or nearkin. Its first lines
say which test must fail. The patch goes onto a copy of the checkout. Fails if a bug is not caught.
"""

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from changed_copy import ROOT, copied, outcome

PATCHES = ROOT / "tests" / "planted"


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


def caught(bug: Bug, root: Path) -> bool:
    """Whether the test that a bug names fails with it in a copy."""
    bug.apply(root)
    found = outcome(root, bug.header("Test"))
    bug.apply(root, "--reverse")
    assert found.begun, f"{bug.path.name} names a test that is not there"
    return bool(found.failed)


def main() -> int:
    bugs = planted(sys.argv[1:])
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        before = outcome(root, *sorted({bug.header("Test") for bug in bugs}))
        assert before.begun
        assert not before.failed, f"without any bug, {before.failed} fail"
        for bug in bugs:
            noticed = caught(bug, root)
            missed += not noticed
            word = "caught" if noticed else "MISSED"
            print(word, f"{bug.path.stem}: {bug.header('Bug')}", flush=True)
    print(f"{len(bugs) - missed} of {len(bugs)} planted bugs caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
