"""Change the package at random, one place at a time, and count what its tests notice: `make mutation`.

    python tests/mutation.py [ROOM...]

Mutants are made by the operators of cosmic-ray: another operator or comparison, a number that is one
off, a condition negated, a loop left out. Of each place in a function there is at most one, and of each
room a sample. Which ones follows from a digest of the line, so that the same lines have the same
mutants before and after a change elsewhere. A mutant is killed if a test of its room fails. Rooms,
numbers and the seed are in pyproject.toml.

cosmic-ray itself starts a process for each mutant, which imports torch; mutmut leaves out functions
with decorators, which are all objectives.

Writes a row per room to docs/mutation.csv, and what survived to build/mutation. Results of this commit
of src and tests are kept: stop it at any time.
"""

import argparse
import ast
import csv
import difflib
import hashlib
import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider
from planted import ROOT, commit, copied, outcome
from scipy.stats import binomtest

TABLE = ROOT / "docs" / "mutation.csv"
COLUMNS = ("room", "mutants", "killed", "survived", "score", "low", "high", "commit", "command")
NEEDS_NAMES = {"VariableReplacer", "VariableInserter", "ExceptionReplacer"}
"""Operators that are told what to put in, or put in a name that is nowhere."""


@dataclass(frozen=True, order=True)
class Place:
    """Where an operator can change a file."""

    digest: str
    file: str
    line: int
    operator: str
    occurrence: int

    def mutant(self) -> str | None:
        """The text of the changed file; None if it means the same, or is outside of functions."""
        before = (ROOT / self.file).read_text()
        after = mutate_code(before, OperatorProvider()[self.operator](), self.occurrence)
        try:
            same = after is None or meaning(before) == meaning(after)
        except SyntaxError:  # the `*` before keywords is no product
            return None
        functions = [x for x in ast.walk(ast.parse(before)) if isinstance(x, ast.FunctionDef)]
        inside = any(x.body[0].lineno <= self.line <= x.end_lineno for x in functions)
        return None if same or not inside else after


def meaning(text: str) -> str:
    """A file without what does nothing when it runs: annotations, and a promise to override."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
            node.decorator_list = [x for x in node.decorator_list if ast.unparse(x) != "override"]
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def places(file: str, seed: int) -> list[Place]:
    """One for each position in a file, in the order of their digests."""
    text = (ROOT / file).read_text()
    tree, lines, found = get_ast(text), text.splitlines(), {}
    for name in sorted(set(OperatorProvider()) - NEEDS_NAMES):
        operator, occurrence = OperatorProvider()[name](), 0
        for node in ast_nodes(tree):
            for index, (at, _) in enumerate(operator.mutation_positions(node)):
                code = lines[at[0] - 1].lstrip()
                column = at[1] - len(lines[at[0] - 1]) + len(code)
                words = f"{seed} {file} {code} {column} {name} {index}"
                digest = hashlib.sha256(words.encode()).hexdigest()
                place = Place(digest, file, at[0], name, occurrence)
                found[at] = min(place, found.get(at, place))
                occurrence += 1
    return sorted(found.values())


def sample(files: list[str], seed: int, most: int) -> Iterator[tuple[Place, str]]:
    """Mutants of a room, with the text of the changed file."""
    every = sorted(place for file in files for place in places(file, seed))
    for place in every:
        if most and (text := place.mutant()):
            yield place, text
            most -= 1


def killers(place: Place, text: str, root: Path, tests: list[str]) -> list[str]:
    """The first of these tests that fails with a mutant in the copy, if any."""
    before = (ROOT / place.file).read_text()
    (root / place.file).write_text(text)
    found = outcome(root, "-x", "-m", "not slow", *tests).failed
    (root / place.file).write_text(before)
    return found


def modules(sources: list[str]) -> list[str]:
    """The files of a room, by their paths in the repository."""
    paths = [path for source in sources for path in ((ROOT / source).rglob("*.py"))]
    alone = [source for source in sources if source.endswith(".py")]
    return alone + sorted(str(path.relative_to(ROOT)) for path in paths)


def measure(room: str, sources: list[str], tests: list[str], seed: int, most: int) -> dict:
    """The row of a room."""
    notes = ROOT / "build" / "mutation" / f"{room}-{commit()}.jsonl"
    notes.parent.mkdir(parents=True, exist_ok=True)
    lines = notes.read_text().splitlines() if notes.exists() else []
    done = {tuple(json.loads(line)["place"]): json.loads(line)["by"] for line in lines}
    with tempfile.TemporaryDirectory() as folder, notes.open("a") as file:
        root = copied(Path(folder))
        for place, text in sample(modules(sources), seed, most):
            if (key := (place.digest, place.line)) not in done:
                done[key] = killers(place, text, root, [*tests, *sources])
                before = (ROOT / place.file).read_text().splitlines()
                diff = difflib.unified_diff(before, text.splitlines(), lineterm="", n=2)
                note = {"place": key, "by": done[key], "file": place.file, "diff": [*diff][2:]}
                print(json.dumps(note), file=file, flush=True)
                print("killed" if done[key] else "SURVIVED", place, flush=True)
    killed = sum(map(bool, done.values()))
    low, high = binomtest(killed, len(done)).proportion_ci(method="wilson")
    shares = [f"{share:.3f}" for share in (killed / len(done), low, high)]
    counts = (len(done), killed, len(done) - killed)
    values = (room, *counts, *shares, commit(), f"make mutation ROOMS={room}")
    return dict(zip(COLUMNS, values, strict=True))


def write(row: dict[str, object]) -> None:
    """Put a row into the table, in place of that of the same room and commit."""
    rows = list(csv.DictReader(TABLE.open(newline=""))) if TABLE.exists() else []
    same = [
        each for each in rows if (each["room"], each["commit"]) != (row["room"], row["commit"])
    ]
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows([*same, row])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutation"]
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(settings['rooms'])}; all without")
    for room in parser.parse_args().rooms or settings["rooms"]:
        sources, tests = settings["rooms"][room]
        row = measure(room, sources, tests, settings["seed"], settings["mutants"])
        write(row)
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
