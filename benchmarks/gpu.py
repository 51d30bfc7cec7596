"""What a GPU is to run that is there for half an hour: tests, ceilings, steps, whole recipes.

    python -m benchmarks gpu --minutes 30 --data FOLDER [--out runs/gpu] [-o rows.jsonl]

FOLDER has cifar10.npz. The stages run in the order of their worth, each as a process with a time
limit of its own; a failure ends nothing. What is done is not done again: the same command goes on
where the budget ended, so that half an hour may be three calls of ten minutes. OUT must outlive a
call, and lie outside of the checkout if that does not.

1. `nearkin doctor`.
2. Ceilings of memory and matrix products; time and kernels of a step of SimCLR and MoCo at batch
   512, and of SimCLR with Muon, which `auto` takes; the same compiled, and as CUDA graphs.
3. The tests of the GPU's paths, by several processes.
4. The recipes, one after the other, and what `auto` makes of four minutes. They are processes that
   the end of a call does not end; the next one waits for them. Nothing is timed while one trains.
   SimCLR comes first: public are kNN 83.2 % in 20 minutes of an A100 with 100 epochs, and 90.3 %
   in 99 minutes with 500 (github.com/dkobak/simclr-cifar10).
5. Steps of all methods beside the bare step and lightly, and BYOL's recipe for what time is left.

OUT holds a log of each stage, and the runs. `--compile` is what stage 2 favors. With little time:
`--recipes simclr_lightly --train "--epochs 100"`.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.pairs import made_up
from benchmarks.shared.options import Option
from benchmarks.shared.rows import ROOT, Row

RECIPES: Final = ROOT / "src" / "nearkin" / "recipes" / "cifar10"
TESTS = ["tests/training/test_cuda.py", "tests/objectives/test_fused.py"]
TINY = "--epochs 1 --backbone tiny --image-size 16 --batch-size 32"
LAST = "byol"
AUTO, AUTO_TIME = "auto", "4m"
"""In the place of a recipe: settings that nobody has chosen, within a time."""
OPTIONS: Final = (
    Option("minutes", 30.0, "budget of this call", quick=4.0),
    Option("out", "runs/gpu", "logs and runs"),
    Option("device", "cuda", "what runs it", quick="cpu"),
    Option("tests", TESTS, "of the GPU's paths", quick=TESTS[:1]),
    Option("recipes", ["simclr_lightly", AUTO, "moco_symmetric"], "in this order", quick=[LAST]),
    Option("train", "", "more words of `nearkin train`", quick=TINY),
    Option("compile", "auto", "of the recipes", choices=("auto", "on", "off", "graphs")),
    Option("workers", 6, "processes of the tests", quick=0),
    Option("batch", 512, "images of a step", quick=2),
)


@dataclass(frozen=True)
class Stage:
    """Words for Python's `-m`, and the seconds that they may take."""

    name: str
    words: Sequence[str]
    limit: float


def first_stages(options: Namespace) -> Iterator[Stage]:
    """Yield what is measured before anything trains."""
    yield Stage("doctor", ["nearkin", "doctor"], 30)
    kernels = measured("kernels", options)
    with_muon = ["--methods", "simclr", "--optimizer", "muon"]
    yield Stage("kernels", kernels, 60)
    yield Stage("kernels muon", [*kernels, *with_muon], 40)
    if not options.quick:  # compiling takes minutes on a CPU
        yield Stage("kernels compiled", [*kernels, "--compile", "on"], 120)
        yield Stage("kernels muon compiled", [*kernels, *with_muon, "--compile", "on"], 60)
        graphs = ["--methods", "simclr", "--compile", "graphs"]
        yield Stage("kernels graphs", [*kernels, *graphs], 60)
    # Named as they go: what a test says at the end is lost at a limit.
    pytest = ["pytest", "-v", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    yield Stage("tests", [*pytest, "-n", str(options.workers), *options.tests], 240)


def measured(name: str, options: Namespace) -> list[str]:
    """Return the words of a benchmark, with the options that it shares with this one."""
    words = ["benchmarks", name, "--device", options.device, "--batch", str(options.batch)]
    words += ["--rounds", str(options.rounds), *(["--quick"] if options.quick else [])]
    rows = options.output if options.output != Path() else Path(options.out) / "rows.jsonl"
    return [*words, "-o", str(rows)]


def perform(stage: Stage, out: Path, until: float) -> Row | None:
    """Run a stage that is not done, as long as the budget lasts; its failure ends nothing.

    One that the end of the budget has stopped, and not its own limit, is for the next call.
    """
    done, limit = out / f"{stage.name}.done", min(stage.limit, until - time.time())
    if done.exists() or limit <= 0:
        return None
    start, ended = time.perf_counter(), True
    with (out / f"{stage.name}.log").open("ab") as log:
        process = started(stage.words, log)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code, ended = process.wait(), limit == stage.limit
    if ended:
        done.write_text(f"{code}\n", encoding="utf-8")
    return Row(stage.name, time.perf_counter() - start, more={"exit code": code})


def started(words: Sequence[str], log: Any) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, which the end of this one does not end."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class Training:
    """The training of a recipe, or of `AUTO`, which calls that follow each other share."""

    def __init__(self, recipe: str, options: Namespace, data: Path) -> None:
        self.recipe, self.out = recipe, Path(options.out)
        self.run = self.out / recipe
        chosen = ["--config", f"recipe:cifar10/{recipe}"]
        chosen = ["--max-time", AUTO_TIME] if recipe == AUTO else chosen
        self.words = ["nearkin", "train", str(data), *chosen]
        self.words += ["--device", options.device, "--compile", options.compile, "--no-report"]
        self.words += ["-o", str(self.run), "--resume", *shlex.split(options.train)]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def head(self) -> str:
        """What the file of the recipe says; `AUTO` has none."""
        recipe = RECIPES / f"{self.recipe}.toml"
        return "" if self.recipe == AUTO else recipe.read_text(encoding="utf-8")

    def begin(self) -> None:
        """Start it, or go on, unless it is finished or an earlier call's process still trains."""
        if self.is_finished() or self.trains_since_before():
            return
        with (self.out / f"{self.recipe}.log").open("ab") as log:
            self.process = started(self.words, log)
        (self.out / f"{self.recipe}.pid").write_text(str(self.process.pid), encoding="utf-8")

    def is_finished(self) -> bool:
        """Whether its results are there."""
        return (self.run / "summary.json").exists()

    def trains_since_before(self) -> bool:
        """Whether the process that an earlier call has started is still there."""
        note = self.out / f"{self.recipe}.pid"
        if not note.exists():
            return False
        command = Path(f"/proc/{note.read_text(encoding='utf-8')}/cmdline")
        return command.exists() and str(self.run).encode() in command.read_bytes()

    def is_running(self) -> bool:
        """Whether there is something to wait for."""
        return self.process.poll() is None if self.process else self.trains_since_before()

    def row(self) -> Row:
        """Return its result, or how far it is, beside what is published."""
        more: dict[str, Any] = {"published": published(self.head)}
        if not self.is_finished():
            return Row(self.recipe, 1.0, "kNN error, not finished", more=more)
        summary = json.loads((self.run / "summary.json").read_text(encoding="utf-8"))
        knn, probe = (summary["metrics"]["encoder"][n] for n in ("kNN top-1", "linear probe"))
        more |= {"low": knn["low"], "high": knn["high"], "linear probe": probe["value"]}
        evaluation = self.run / "evaluation.json"
        if evaluation.exists():
            measures = json.loads(evaluation.read_text(encoding="utf-8"))["metrics"]
            embedding = measures.get("embedding", {}).get("kNN top-1", {})
            more["kNN of the embedding"] = embedding.get("value")
        return Row(self.recipe, 1 - knn["value"], "kNN error", more=more)


def published(head: str) -> str:
    """Return the published result from the head of a recipe; nothing without one."""
    lines = head.splitlines()
    start = next((row for row, line in enumerate(lines) if line.startswith("# Published")), None)
    if start is None:
        return ""
    said = [lines[start].removeprefix("# Published")]
    more = takewhile(lambda line: line.startswith("#      "), lines[start + 1 :])
    return " ".join(line.strip("# ") for line in [*said, *more])


def train(recipes: Sequence[str], options: Namespace, until: float) -> Iterator[Row]:
    """Train recipes one after the other, as long as the budget lasts."""
    out = Path(options.out)
    data = Path(options.data) / "cifar10.npz" if options.data else made_up(out)
    for recipe in recipes:
        training = Training(recipe, options, data)
        if time.time() < until:
            training.begin()
        while training.is_running() and time.time() < until:
            time.sleep(1)
        # Some papers have measured the embedding: the head of such a recipe says so.
        words = ["nearkin", "evaluate", str(training.run), "--features", "embedding"]
        if training.is_finished() and "--features embedding" in training.head:
            perform(Stage(f"{training.recipe} embedding", words, 60), out, until)
        yield training.row()


def run(options: Namespace) -> Iterator[Row]:
    """Go through the stages until the budget is spent."""
    until, out = time.time() + 60 * options.minutes, Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if not (options.data or options.quick):
        raise SystemExit("name the folder of cifar10.npz by --data")
    for stage in first_stages(options):
        if row := perform(stage, out, until):
            yield row
    if time.time() < until:
        yield from train(options.recipes, options, until)
    if time.time() < until and not options.quick:
        steps = [*measured("steps", options), "--methods", "all"]
        if row := perform(Stage("all methods", steps, 600), out, until):
            yield row
    if time.time() < until:
        yield from train([LAST], options, until)
