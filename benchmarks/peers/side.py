"""One run of a pair, in a process of its own that `pairs.py` starts on a core.

It says `ready` when its data are in memory, and trains once it is told to go. Only the time within
steps counts, as none else is training: neither imports, nor opening the data, nor the trial that
the number of steps is from, nor the evaluation.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn

from benchmarks.peers import evaluator
from benchmarks.peers.ours import Ours
from benchmarks.peers.plan import Run
from benchmarks.peers.theirs import Theirs
from benchmarks.shared.rows import commit, cpu
from nearkin.config import TrainConfig
from nearkin.data.batches import center_crops
from nearkin.data.preprocessing import Preprocessing
from nearkin.data.rng import seeded
from nearkin.data.samplers import BatchSampler
from nearkin.data.split import Split
from nearkin.files import replace_text
from nearkin.metrics.metric import Metric
from nearkin.networks.backbone import build_backbone
from nearkin.run.data import open_split, versions

CPU = torch.device("cpu")
REFUSED = 3  # exit status of a run that shared its core
LEAST_SHARE: Final = 0.9  # of its core that a run must have had for its wall clock to count
TRIAL: Final = 1 / 30  # of the budget: 20 s of 10 minutes
TRIAL_STEPS: Final = 2  # at least, after the first, which is not timed
FOREVER: Final = 10**9  # steps that a trial could take
LAST: Final = 10  # steps whose mean loss is noted


class Trainer(Protocol):
    """What both sides do. A trainer starts from the weights of its seed."""

    phases: int  # Equal parts of a training, each with steps of a length of its own

    @property
    def sampler(self) -> BatchSampler:
        """Which images each step sees."""

    @property
    def settings(self) -> dict[str, Any]:
        """What was chosen, for the row."""

    def steps(self, start: int, total: int) -> Iterator[float]:
        """Train from one step to another, with the schedules of `total`; yield each loss."""

    def encoder(self) -> nn.Module:
        """Return the network that training is for."""


@dataclass
class Meter:
    """Seconds spent in steps, by the wall clock and of the CPU."""

    wall: float = 0.0
    cpu: float = 0.0

    def timed(self, steps: Iterable[float]) -> Iterator[float]:
        """Yield from steps, and time nothing else."""
        steps = iter(steps)
        while True:
            wall, cpu = time.perf_counter(), time.process_time()
            loss = next(steps, None)
            self.wall += time.perf_counter() - wall
            self.cpu += time.process_time() - cpu
            if loss is None:
                return
            yield loss

    def of(self, clock: str) -> float:
        """Return the seconds of a clock, `wall` or `cpu`."""
        return self.cpu if clock == "cpu" else self.wall

    @property
    def share(self) -> float:
        """The share of a core that the steps had."""
        return self.cpu / self.wall


def affordable(trainer: Trainer, seconds: float, clock: str) -> int:
    """Return how many steps fit into a time, by trying some of each phase."""
    least = TRIAL * seconds / trainer.phases
    starts = [FOREVER * phase // trainer.phases for phase in range(trainer.phases)]
    paces = [step_seconds(trainer.steps(start, FOREVER), least, clock) for start in starts]
    return max(1, round(seconds / fmean(paces)))


def step_seconds(steps: Iterator[float], least: float, clock: str) -> float:
    """Return the mean time of steps, of so many seconds of them at least, after the first."""
    meter, first = Meter(), 0.0
    for done, _ in enumerate(meter.timed(steps)):
        spent = meter.of(clock)
        if not done:
            first = spent
        elif done >= TRIAL_STEPS and spent - first >= least:
            return (spent - first) / done
    raise AssertionError("steps do not end")


def num_steps(run: Run, make: Callable[[], Trainer], clock: str) -> int:
    """Return the length of a training in steps."""
    if run.unit == "epochs":
        return int(run.budget * make().sampler.steps_per_epoch)
    return affordable(make(), run.budget, clock)


@dataclass
class Progress:
    """What a training has taken."""

    meter: Meter
    done: int = 0
    loss: float = math.nan  # mean of the last steps


def train(trainer: Trainer, total: int) -> Progress:
    """Train to the last step."""
    progress, losses = Progress(Meter()), list[float]()
    for loss in progress.meter.timed(trainer.steps(0, total)):
        progress.done += 1
        losses = [*losses, loss][-LAST:]
        progress.loss = fmean(losses)
    return progress


def trainer_of(run: Run, split: Split, folder: Path) -> Trainer:
    """Build the training of a run as it starts."""
    if run.side == "nearkin":
        return Ours(run.method, run.network, split.train, run.seed, folder)
    return Theirs(run.method, run.network, pixels(split), run.seed)


def pixels(split: Split) -> np.ndarray:
    """Return the training images as they are, in RGB."""
    found, _ = center_crops(split.train, range(len(split.train)), Preprocessing(side(split)))
    return found


def side(split: Split) -> int:
    """Return the side of all images in pixels: nobody resizes them."""
    (size,) = np.unique(split.images.sizes)
    return int(size)


def baseline(run: Run, split: Split) -> Metric:
    """Measure what needs no training."""
    if run.method == "pixels":
        return evaluator.of_pixels(split)
    with seeded(run.seed, CPU):
        network = build_backbone(run.network, side(split))
    return evaluator.of_network(network, split, side(split))


def row(run: Run, metric: Metric, **more: Any) -> dict[str, Any]:
    """Return all that is kept of a run."""
    packages = {name: found for name in ("lightly", "torchvision") if (found := installed(name))}
    return {
        "name": run.name,
        **asdict(run),
        "knn": round(metric.value, 4),
        "low": metric.low and round(metric.low, 4),
        "high": metric.high and round(metric.high, 4),
        "protocol": metric.sentence,
        **more,
        "machine": cpu(),
        "versions": versions() | packages,
        "commit": commit(),
    }


def installed(package: str) -> str:
    """Return the version of a package; nothing if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def trained(progress: Progress, trainer: Trainer, clock: str) -> dict[str, Any]:
    """Return what the row of a training says beside its result."""
    images, meter = progress.done * trainer.sampler.batch_size, progress.meter
    return {
        "steps": progress.done,
        "epochs": round(progress.done / trainer.sampler.steps_per_epoch, 3),
        "images_per_second": round(images / meter.of(clock), 1),
        "seconds": round(meter.wall, 1),
        "cpu_seconds": round(meter.cpu, 1),
        "cpu_share": round(meter.share, 3),
        "clock": clock,
        "loss": round(progress.loss, 4),
        "settings": trainer.settings,
    }


def is_disturbed(run: Run, meter: Meter, clock: str) -> bool:
    """Whether other work took time that the wall clock has counted."""
    return run.unit == "s" and clock == "wall" and meter.share < LEAST_SHARE


def work(run: Run, split: Split, folder: Path, clock: str) -> int:
    """Train and measure; return the exit status."""
    if run.side == "baseline":
        found = row(run, baseline(run, split))
    else:
        make = partial(trainer_of, run, split, folder)
        total = num_steps(run, make, clock)
        trainer = make()
        progress = train(trainer, total)
        if is_disturbed(run, progress.meter, clock):
            print(f"refused: {progress.meter.share:.2f} of a core", flush=True)
            return REFUSED
        measure = evaluator.of_network(trainer.encoder(), split, side(split))
        found = row(run, measure, **trained(progress, trainer, clock))
    replace_text(folder / "row.json", json.dumps(found) + "\n")
    return 0


def main() -> None:
    """Make one run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run", help="the fields of a `plan.Run`, as JSON")
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    run = Run(**json.loads(options.run))
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    split = open_split(options.data, TrainConfig())
    print("ready", flush=True)
    sys.stdin.readline()
    sys.exit(work(run, split, options.folder, options.clock))


if __name__ == "__main__":
    main()
