"""Kill runs of every method by the thousand, and keep count: `make faults`.

    python tests/faults.py --kills 1000 [--methods moco,ncl] -o docs/faults.csv

Works in pieces, and adds a row to the table after each. All rows of a method add up, whichever
commit they are of; a program that was stopped goes on with the next piece, which has a new seed for
the training and for the kills. Prints the totals, and fails if a run did not end as it should have.
With TMPDIR in memory it is faster: no kill can tell whether a file has reached the disk.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from kills import AIMS, RANDOM, harness, warm_up

from nearkin.methods import METHODS

PIECE = 4 * len(AIMS)
"""Kills in a piece, at most: two at every aim, and as many at random."""
COUNTS = ("kills", "resumes", "in_write", "runs")
COLUMNS = ("commit", "method", "seed", *COUNTS, "differing", RANDOM, *AIMS)


def read(table: Path) -> list[dict[str, str]]:
    """The pieces so far."""
    if not table.exists():
        return []
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def add(table: Path, row: Mapping[str, object]) -> None:
    """Add a piece."""
    new = not table.exists()
    with table.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval=0, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def commit() -> str:
    """What is tested; `+` if it has been changed since."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    root = Path(__file__).parent
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()


def killed(table: Path, method: str) -> int:
    """Kills of a method so far."""
    return sum(int(row["kills"]) for row in read(table) if row["method"] == method)


def piece(table: Path, method: str, kills: int) -> None:
    """Do one more piece of a method."""
    seeds = [int(row["seed"]) for row in read(table) if row["method"] == method]
    seed = max(seeds, default=-1) + 1
    with tempfile.TemporaryDirectory() as folder:
        found = harness(method, min(kills, PIECE), seed, folder)
    aims, differing = found.pop("aims"), "; ".join(found.pop("differing"))
    add(
        table,
        {
            "commit": commit(),
            "method": method,
            "seed": seed,
            **found,
            **aims,
            "differing": differing,
        },
    )


def totals(rows: list[dict[str, str]]) -> list[str]:
    """A line per method."""
    lines = []
    for method in sorted({row["method"] for row in rows}):
        own = [row for row in rows if row["method"] == method]
        sums = "  ".join(f"{sum(int(row[name]) for row in own)} {name}" for name in COUNTS)
        bad = sum(bool(row["differing"]) for row in own)
        lines.append(f"{method:20}  {sums}  {bad} of {len(own)} pieces differ")
    return lines


def main() -> int:
    """Do all pieces that are missing, of the method that is furthest behind first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, required=True, help="of each method, in all")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("-o", type=Path, required=True, dest="table")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()
    left = asked.methods.split(",")
    while left:
        method = min(left, key=lambda name: killed(asked.table, name))
        missing = asked.kills - killed(asked.table, method)
        if missing > 0:
            piece(asked.table, method, missing)
            print(f"{method}: {killed(asked.table, method)} of {asked.kills} kills", flush=True)
        else:
            left.remove(method)
    rows = read(asked.table)
    print("\n".join(totals(rows)))
    return int(any(row["differing"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
