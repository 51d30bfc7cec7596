"""Run those trials of a stage that have no row yet, two at a time, one thread each."""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stages import STAGES

HERE = Path(__file__).parent


def key(trial: dict[str, Any]) -> str:
    """What tells a trial from others: its settings."""
    return json.dumps(trial, sort_keys=True)


def done(table: Path) -> set[str]:
    """The trials that have a row."""
    lines = table.read_text().splitlines() if table.exists() else []
    return {key(json.loads(line)["trial"]) for line in lines}


def run(trial: dict[str, Any], data: Path, table: Path) -> None:
    """Run one trial in a process of its own, and append its row; failures have one too."""
    command = [sys.executable, str(HERE / "candidate.py"), json.dumps(trial), "--data", str(data)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    if result.returncode == 0:
        outcome = json.loads(result.stdout.splitlines()[-1])
    else:
        outcome = {"failed": result.stderr.strip().splitlines()[-1]}
    with table.open("a") as file:
        file.write(json.dumps({"trial": trial, **outcome}) + "\n")
    print(json.dumps({"trial": trial, **outcome}), flush=True)


def main() -> None:
    """Run what is missing of a stage."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/lab/trials.jsonl"))
    parser.add_argument("--at-once", type=int, default=2)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    missing = [trial for trial in STAGES[options.stage] if key(trial) not in done(options.out)]
    with ThreadPoolExecutor(options.at_once) as pool:
        for trial in missing:
            pool.submit(run, trial, options.data, options.out)


if __name__ == "__main__":
    main()
