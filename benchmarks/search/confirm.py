"""`auto` beside the published SimCLR recipe at equal time, on images that the search never saw.

    python benchmarks/search/confirm.py OUT --omniglot FOLDER [--seeds 0 1 2]

Arms are whole `nearkin train` commands of one thread with the same --max-time, one after another
in turns, so that other work slows all alike. `published` is recipe:cifar10/simclr as long as the
time allows; `published, same network` has the network that `auto` takes. A row for each run,
which the same command does not make again, is appended to --table.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECIPE = ("--config", "recipe:cifar10/simclr", "--epochs", "auto", "--image-size", "auto")
ARMS = {
    "auto": (),
    "published": RECIPE,
    "published, same network": (*RECIPE, "--backbone", "auto"),
}
MINUTES = {"digits": 2, "omniglot": 3}


def missing(table: Path, seeds: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the runs that have no row yet."""
    lines = table.read_text().splitlines() if table.exists() else []
    done = [json.loads(line)["run"] for line in lines]
    for data, minutes in MINUTES.items():
        for seed in seeds:
            for arm in ARMS:
                run = {"data": data, "minutes": minutes, "seed": seed, "arm": arm}
                if run not in done:
                    yield run


def train(run: dict[str, Any], data: str, out: Path) -> dict[str, Any]:
    """Train and evaluate; return the epochs and kNN with its interval, or why there is none."""
    options = ["--val", "0.2", "--max-time", f"{run['minutes']}m", "--seed", str(run["seed"])]
    command = ["train", data, "-o", str(out), *options, "--no-report", *ARMS[run["arm"]]]
    result = subprocess.run(
        [sys.executable, "-m", "nearkin", *command, "--overwrite"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if result.returncode:
        return {"failed": result.stderr.strip().splitlines()[-1]}
    summary = json.loads((out / "summary.json").read_text())
    knn = {
        key: summary["measures"]["encoder"]["kNN top-1"][key] for key in ("value", "low", "high")
    }
    return {"knn": knn, "epochs": summary["epochs"], "backbone": summary["backbone"]}


def main() -> None:
    """Make the runs that are missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--omniglot", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", type=Path, default=Path("docs/lab/confirm.jsonl"))
    given = parser.parse_args()
    sources = {"digits": "digits", "omniglot": str(given.omniglot)}
    for run in missing(given.table, given.seeds):
        name = f"{run['data']}-{run['arm'].replace(', ', '-').replace(' ', '-')}-{run['seed']}"
        row = {"run": run, **train(run, sources[run["data"]], given.out / name)}
        with given.table.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
