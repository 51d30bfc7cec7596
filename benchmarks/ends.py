"""What a training takes beside its steps: from its start to the first, from the last to its page.

    python benchmarks/ends.py DATA OUT [--max-time 15m] [--max-steps 100] [--option value ...]

Trains as `nearkin train DATA --out OUT` does, in this process, with all further options, and
prints the wall and CPU seconds of each part by what the run reports of its progress. `threads` is
the CPU time of the thread that waits for all others: what the part takes on a quiet machine, even
if this one is busy.

- Run it twice: the first run also measures the floors, the second finds them in the cache of
  the user. With `XDG_CACHE_HOME=$(mktemp -d)` a run is always a first one.
- `--max-steps` ends the training early, for which the ends do not take any longer or shorter.
  Without it, the share of the ends in the whole run is the last line.
"""

import os
import time

BEGAN = time.perf_counter()
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does

import argparse  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from itertools import islice  # noqa: E402
from typing import Any  # noqa: E402

Lap = tuple[float, float, float]  # Seconds of wall, CPU and this thread's CPU time


def now() -> Lap:
    """Seconds since the process began."""
    return time.perf_counter() - BEGAN, time.process_time(), time.thread_time()


@dataclass
class Clock:
    """A reporter that adds up what passes between its messages, by the part that these name."""

    part: str = "imports"
    since: Lap = (0.0, 0.0, 0.0)
    parts: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    stage: str = "start"

    def info(self, text: str) -> None:
        """Pass a log line on."""
        print(f"{now()[0]:8.1f}  {text}", flush=True)

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


def main() -> None:
    """Train, and print the parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("data")
    parser.add_argument("out")
    parser.add_argument("--max-steps", type=int)
    options, settings = parser.parse_known_args()
    names = [name.removeprefix("--").replace("-", "_") for name in settings[::2]]
    values = [int(value) if value.isdigit() else value for value in settings[1::2]]
    named: dict[str, Any] = dict(zip(names, values, strict=True))

    import nearkin
    from nearkin.training import fit

    if options.max_steps:
        fit.training_steps = shortened(fit.training_steps, options.max_steps)
    clock = Clock()
    run = nearkin.train(options.data, out=options.out, reporter=clock, **named)
    clock.reach("")
    show(clock.parts)
    print(f"{run.path}")


def show(parts: dict[str, list[float]]) -> None:
    """Print a table of the parts, and of the three stages of the run."""
    stages = {"start": [0.0] * 3, "steps": [0.0] * 3, "end": [0.0] * 3}
    print(f"{'':44}{'wall':>8} {'CPU':>8} {'thread':>8}  seconds")
    for part, laps in parts.items():
        print(f"{part:44}{laps[0]:8.1f} {laps[1]:8.1f} {laps[2]:8.1f}")
        stage = stages.get(part.partition(":")[0], stages["start"])
        stage[:] = [sum(each) for each in zip(stage, laps, strict=True)]
    for name, laps in stages.items():
        print(f"{name + ', in all':44}{laps[0]:8.1f} {laps[1]:8.1f} {laps[2]:8.1f}")
    total = sum(laps[0] for laps in stages.values())
    ends = total - stages["steps"][0]
    print(f"the ends are {ends / total:.1%} of {total:.0f} seconds")


if __name__ == "__main__":
    main()
