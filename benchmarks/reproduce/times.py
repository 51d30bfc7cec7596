"""Whole trainings to which nothing but a time is given, and beside them the published recipe.

    python benchmarks/reproduce/times.py OUT --cifar10 cifar10.npz --fashion10k fashion10k.npz \
        --caltech caltech99.tar --omniglot FOLDER

Runs `nearkin train DATA --max-time T` for what has no row in docs/results/times.jsonl, and appends
a row for each. `auto` is the command without any other setting than a method; `published` is
recipe:cifar10/simclr as long as the time allows, `published, same network` has the network that
`auto` takes. Digits and Omniglot were never used to choose `auto`. A run that was stopped goes on
with `--resume`; its row then has no CPU time.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from made import commit, cpu
from plan import MEASURES, Timed, rows, timed_plan

from nearkin.run.data import versions

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE.parents[1] / "docs" / "results" / "times.jsonl"


def missing(results: Path, data: Sequence[str]) -> Iterator[Timed]:
    """Yield the runs on these data that have no row; others may write rows meanwhile."""
    for run in timed_plan():
        if run.data in data and run.name not in {row["name"] for row in rows(results)}:
            yield run


def train(run: Timed, data: str, out: Path, cores: Sequence[int]) -> dict[str, Any]:
    """Train and evaluate on some cores; return what they took, or exit where it fails."""
    folder = out / run.name
    whole = not folder.exists()
    command = ["train", data, "-o", str(folder), "--no-report", *run.options]
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "nearkin", *command, *(() if whole else ("--resume",))],
        env={**os.environ, "OMP_NUM_THREADS": str(run.threads)},
        preexec_fn=lambda: os.sched_setaffinity(0, cores[: run.threads]),  # of this thread alone
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{run.name} has failed; see {folder / 'train.log'}")
    seconds = {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": used.ru_utime + used.ru_stime,
    }
    return {name: round(value) for name, value in seconds.items()} if whole else {}


def row(run: Timed, folder: Path, spent: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a finished run."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    of = {
        table: {name: [each[name][key] for key in ("value", "low", "high")] for name in MEASURES}
        for table, each in summary["measures"].items()
    }
    settings = {"epochs": summary["epochs"], "backbone": summary["backbone"]}
    made = {"machine": cpu(), "commit": commit(), "versions": versions()}
    return {"name": run.name, **asdict(run), **settings, **spent, "measures": of, **made}


def main() -> None:
    """Make the runs that are missing, as long as the time lasts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    for name in ("cifar10", "fashion10k", "caltech", "omniglot"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    sources = {"digits": "digits", "cifar10": options.cifar10, "fashion10k": options.fashion10k}
    sources |= {"caltech": options.caltech, "omniglot": options.omniglot}
    sources = {name: source for name, source in sources.items() if source}
    until = time.time() + 60 * options.minutes
    cores = sorted(os.sched_getaffinity(0))
    for run in missing(options.results, list(sources)):
        if time.time() > until:
            break
        if run.threads > len(cores):
            continue
        spent = train(run, sources[run.data], options.out, cores)
        made = row(run, options.out / run.name, spent)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(made) + "\n")
        print(f"{run.name}: kNN {made['measures']['encoder']['kNN top-1'][0]:.3f}", flush=True)


if __name__ == "__main__":
    main()
