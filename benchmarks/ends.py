"""What a training takes beside its steps: from its start to the first, from the last to its page.

    python -m benchmarks ends [--train "cifar10.npz --max-time 15m"] [--max-steps 100]

Trains as `nearkin train` does with these words, in a process of its own, into a temporary folder;
a row has the seconds of each part by what the run reports of its progress, and CPU seconds.
`thread` is the CPU time of the thread that waits for all others: what the part takes on a quiet
machine, even if this one is busy. The last rows are the share of each stage in the whole run.

- `--max-steps` ends the training early, for which the ends do not take any longer or shorter.
"""

import shlex
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from benchmarks.shared.memory import alone
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row

Lap = tuple[float, float, float]  # Seconds of wall, CPU and this thread's CPU time
TINY = "digits --epochs 1 --backbone tiny"
OPTIONS: Final = (
    Option("train", "digits --max-time 2m", "words of `nearkin train`", quick=TINY),
    Option("max_steps", 0, "end after so many; 0: do not", quick=2),
)


def now() -> Lap:
    """Return all clocks."""
    return time.perf_counter(), time.process_time(), time.thread_time()


@dataclass
class Clock:
    """A reporter that adds up what passes between its messages, by the part that these name."""

    since: Lap = field(default_factory=now)
    part: str = "start: imports"
    parts: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    stage: str = "start"

    def info(self, text: str) -> None:
        """Take no notice of a log line."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Begin a part, named by the first words."""
        part = text.split("  ")[0]
        if part.startswith("epoch "):
            self.stage, part = ("end", "after the last step") if done == total else ("steps", "")
        self.reach(f"{self.stage}: {part}")

    def reach(self, part: str) -> None:
        """End a part, and begin another."""
        reached, laps = now(), self.parts.setdefault(self.part, [0.0, 0.0, 0.0])
        for position, (after, before) in enumerate(zip(reached, self.since, strict=True)):
            laps[position] += after - before
        self.part, self.since = part, reached


def shortened(steps: Any, most: int) -> Any:
    """Return training steps that end early; the last one says that it is the last of all."""

    def few(*args: Any, total: int, **named: Any) -> Iterator[Any]:
        for number, (done, step) in enumerate(islice(steps(*args, total=total, **named), most), 1):
            yield total if number == most else done, step

    return few


def trained(words: str, max_steps: int) -> dict[str, list[float]]:
    """Train; return the seconds of each part. Imports, which come first, are one of them."""
    clock = Clock()
    import nearkin
    from nearkin.training import fit

    data, *settings = shlex.split(words)
    names = [name.removeprefix("--").replace("-", "_") for name in settings[::2]]
    values = [int(value) if value.isdigit() else value for value in settings[1::2]]
    named: dict[str, Any] = dict(zip(names, values, strict=True))
    if max_steps:
        fit.training_steps = shortened(fit.training_steps, max_steps)
    with tempfile.TemporaryDirectory() as out:
        nearkin.train(data, output=f"{out}/run", verbose=clock, **named)
    clock.reach("")
    return clock.parts


def run(options: Namespace) -> Iterator[Row]:
    """Train, and yield the parts and the stages."""
    parts = alone(trained, options.train, options.max_steps).result
    stages = {"start": [0.0] * 3, "steps": [0.0] * 3, "end": [0.0] * 3}
    for part, laps in parts.items():
        yield Row(part, laps[0], more={"cpu_seconds": laps[1], "thread": laps[2]})
        stage = stages[part.partition(":")[0]]
        stage[:] = [sum(each) for each in zip(stage, laps, strict=True)]
    total = sum(laps[0] for laps in stages.values())
    for name, laps in stages.items():
        more = {"cpu_seconds": laps[1], "thread": laps[2], "share": laps[0] / total}
        yield Row(f"{name}, in all", laps[0], more=more)
