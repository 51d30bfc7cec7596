"""Count the alarms of healthy and sabotaged runs that are evaluated after every epoch.

    python benchmarks/health/epochs.py digits -o docs/health/epochs.csv

Trains what sabotage.py trains, for 12 epochs, and appends a row per epoch; without data, it only
replays the rows. Prints how many runs `Alarm` reports, and how many it would report if measures
on their way back to their bounds counted as signs of a collapse.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sabotage import ARMS, CPU, align, config_for

from nearkin.data.opening import open_images
from nearkin.data.split import Split, split_images
from nearkin.errors import DivergedError
from nearkin.methods import METHODS
from nearkin.tables import read_csv
from nearkin.training.fit import optimizer_for, training_steps
from nearkin.training.health import PATIENCE, SETTLED, Alarm, Monitor, violations
from nearkin.training.session import build

MEASURES = ("effective_rank", "directions", "feature_std", "mean_cosine")
COLUMNS = ("method", "arm", "seed", "progress", *MEASURES)
EPOCHS, IMAGES = 12, 1000


def run(method: str, arm: str, seed: int, split: Split) -> list[list[object]]:
    """Train once, and return a row per epoch."""
    config = replace(config_for(method, seed, ARMS[arm], split), epochs=EPOCHS)
    trained, batches = build(config, split.train, CPU)
    if ARMS[arm].aligned:
        align(trained)
    monitor, rows = Monitor(split, config, CPU), list[list[object]]()
    per_epoch = batches.order.steps_per_epoch
    total = EPOCHS * per_epoch
    optimizer, fed = optimizer_for(trained, config), batches.between(0, total)
    try:
        for done, _ in training_steps(config, trained, optimizer, fed, start=0, total=total):
            if done % per_epoch == 0:
                health = monitor.evaluate(trained)
                values = [health[name] for name in MEASURES]
                rows.append([method, arm, seed, done / total, *values])
    except DivergedError:
        pass  # the rows until then count
    return rows


def reported(rows: Sequence[Mapping[str, str]]) -> tuple[bool, bool]:
    """Return whether a run is reported, and whether it would be without regard to recovery."""
    method = METHODS[rows[0]["method"]]
    alarm, in_a_row, alarms = Alarm(method), 0, [False, False]
    for row in rows:
        health, progress = {name: float(row[name]) for name in MEASURES}, float(row["progress"])
        alarms[0] |= bool(alarm.update(health, progress))
        bad = progress >= SETTLED and bool(violations(health, method))
        in_a_row = in_a_row + 1 if bad else 0
        alarms[1] |= in_a_row == PATIENCE
    return alarms[0], alarms[1]


def main() -> None:
    """Run what is missing, and count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("data", nargs="?")
    parser.add_argument("--methods", nargs="*", default=["moco", "byol", "simsiam", "dino"])
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    runs: dict[tuple[str, str, str], list[Mapping[str, str]]] = defaultdict(list)
    for row in read_csv(options.output) if options.output.exists() else ():
        runs[row["method"], row["arm"], row["seed"]].append(row)
    if options.data:
        split = split_images(open_images(options.data).spread(IMAGES), 0.2, 0)
        with options.output.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if not runs:
                writer.writerow(COLUMNS)
            for method, arm in ((m, a) for m in options.methods for a in ARMS):
                if (method, arm, "1") in runs:
                    continue
                for cells in run(method, arm, 1, split):
                    writer.writerow(cells)
                    runs[method, arm, "1"].append(dict(zip(COLUMNS, map(str, cells), strict=True)))
                file.flush()
    for kind in ("healthy", "sabotaged"):
        each = [
            reported(r)
            for (_, arm, _), r in runs.items()
            if (arm == "healthy") == (kind == "healthy")
        ]
        now, before = (sum(column) for column in zip(*each, strict=True))
        print(f"{kind}: {now} of {len(each)} runs reported; {before} if recovery did not matter")


if __name__ == "__main__":
    main()
