"""Kill runs of every method by the thousand, and keep count: `make faults`.

    python tests/faults.py --kills 1000 [--methods moco,ncl] -o docs/faults.csv

Works in pieces, and adds a row to the table after each. All rows of a method add up, whichever
commit they are of; a program that was stopped goes on with the next piece, which has a new seed for
the training and for the kills. Prints the totals. Fails if a run did not end as the unbroken one,
or if less than half of the kills were followed by a resume or less than a tenth came in a write.
With TMPDIR in memory it is faster: no kill can tell whether a file has reached the disk.
"""

# ruff: noqa: T201

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from kills import AIMS, RANDOM, harness

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
    return subprocess.check_output(command, cwd=Path(__file__).parent, text=True).strip()


def piece(table: Path, method: str, kills: int) -> None:
    """Do one more piece of a method."""
    seeds = [int(row["seed"]) for row in read(table) if row["method"] == method]
    seed = max(seeds, default=-1) + 1
    with tempfile.TemporaryDirectory() as folder:
        counts = harness(method, min(kills, PIECE), seed, folder)
    aims, differing = counts.pop("aims"), "; ".join(counts.pop("differing"))
    place = {"commit": commit(), "method": method, "seed": seed}
    add(table, {**place, **counts, **aims, "differing": differing})


def totals(rows: list[dict[str, str]], method: str) -> dict[str, int]:
    """Sums over the pieces of a method, and how many of them differ."""
    own = [row for row in rows if row["method"] == method]
    sums = {name: sum(int(row[name]) for row in own) for name in COUNTS}
    return sums | {"pieces": len(own), "differ": sum(bool(row["differing"]) for row in own)}


def sound(total: Mapping[str, int]) -> bool:
    """Whether nothing differs although enough of the kills were of the kinds that matter."""
    true = total["resumes"] >= 0.5 * total["kills"] and total["in_write"] >= 0.1 * total["kills"]
    return true and not total["differ"]


def main() -> int:
    """Do all pieces that are missing, of the method that is furthest behind first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, required=True, help="of each method, in all")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("-o", type=Path, required=True, dest="table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    methods = options.methods.split(",")

    def done(method: str) -> int:
        return totals(read(options.table), method)["kills"]

    while done(last := min(methods, key=done)) < options.kills:
        piece(options.table, last, options.kills - done(last))
        print(f"{last}: {done(last)} of {options.kills} kills", flush=True)
    sums = {method: totals(read(options.table), method) for method in methods}
    for method, total in sums.items():
        columns = "  ".join(f"{count:6} {name}" for name, count in total.items())
        print(f"{method:20}{columns}{'' if sound(total) else '  FAILED'}")
    return int(not all(map(sound, sums.values())))


if __name__ == "__main__":
    sys.exit(main())
