"""Trackers by name: TensorBoard, Weights & Biases and Trackio.

None is needed: metrics.csv, config.toml and summary.json hold all that a tracker is given. A
library is imported when its tracker is named, and what fails in it ends no training.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import uuid4

from nearkin.data.loader import first_sentence
from nearkin.errors import UsageError
from nearkin.files import replace_text, usable
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Reporter
from nearkin.tables import read_numbers

PROJECT: Final = "nearkin"  # What runs are filed under, unless a variable of the tracker's says so
PATIENCE: Final = 60  # seconds that W&B may wait: for somebody to log in, and to upload at the end


class Tracker(NamedTuple):
    """A tracker that is open for a run."""

    where: str  # Where to look at it
    log: Callable[[int, Mapping[str, int | float]], object]  # Takes a step, and numbers by name


class RunToTrack(NamedTuple):
    """What a tracker is opened with."""

    folder: Path
    title: str
    key: str  # Names the run in every tracker; the same when it is resumed
    settings: dict[str, Any]
    step: int  # The first step to come


@contextmanager
def tensorboard(run: RunToTrack) -> Iterator[Tracker]:
    """Write event files into the run folder; those of steps that are taken again are purged."""
    from torch.utils.tensorboard import SummaryWriter

    path = RunFolder(run.folder).tensorboard
    with SummaryWriter(str(path), purge_step=run.step, flush_secs=10) as writer:
        rows = "\n".join(f"| {name} | {value} |" for name, value in run.settings.items())
        writer.add_text("settings", f"| setting | value |\n| --- | --- |\n{rows}", run.step)

        def log(step: int, metrics: Mapping[str, int | float]) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name.replace(" ", "_"), value, step)

        yield Tracker(f"tensorboard --logdir {path.resolve()}", log)


@contextmanager
def wandb(run: RunToTrack) -> Iterator[Tracker]:
    """Report to Weights & Biases, or without network into the run folder (WANDB_MODE=offline)."""
    import wandb

    settings = {
        "console": "off",  # the log has a file of its own
        "silent": True,
        "login_timeout": PATIENCE,
        "finish_timeout": PATIENCE,
        "finish_timeout_raises": True,
    }
    tracked = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run.title,
        id=run.key,
        resume="allow",
        dir=run.folder,
        config=run.settings,
        settings=settings,
    )
    try:
        place = f"wandb sync {Path(tracked.dir).parent}" if tracked.offline else str(tracked.url)
        yield Tracker(place, lambda step, metrics: tracked.log(dict(metrics), step=step))
    except BaseException:
        tracked.finish(exit_code=1)
        raise
    tracked.finish()


@contextmanager
def trackio(run: RunToTrack) -> Iterator[Tracker]:
    """Report to Trackio's files in TRACKIO_DIR, or to the server or Space that it is set to."""
    import trackio

    name = f"{run.title}-{run.key}"
    tracked = trackio.init(
        project=PROJECT, name=name, config=run.settings, resume="allow", embed=False
    )
    try:
        place = f"trackio show --project {PROJECT}, run {name}"
        yield Tracker(place, lambda step, metrics: tracked.log(dict(metrics), step=step))
    finally:
        trackio.finish()


TRACKERS: Final[Mapping[str, Callable[[RunToTrack], AbstractContextManager[Tracker]]]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "trackio": trackio,
}
"""Each has the name of its library, and of the extra that installs it."""


def check_trackers(names: Iterable[str]) -> None:
    """Raise UsageError if a tracker is named whose library is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UsageError(
                f"--track {name} needs a library that is not installed; "
                f"pip install 'nearkin[{name}]'"
            )


class Tracking:
    """Passes the metrics of a training on to trackers, which open with the first row.

    One that fails is left out from there on, with a warning.
    """

    def __init__(self, names: Iterable[str], folder: RunFolder, log: Reporter) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._folder, self._log = folder, log
        self._open: dict[str, tuple[Tracker, ExitStack]] = {}

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *error: Any) -> None:
        self._each(lambda _, stack: stack.__exit__(*error))

    def row(self, row: Mapping[str, int | float]) -> None:
        """Report a row of metrics.csv."""
        metrics = {name: value for name, value in row.items() if name != "step"}
        step = int(row["step"])
        self._start(step)
        self._each(lambda tracker, _: tracker.log(step, metrics))

    def summary(self) -> None:
        """Report the metrics of summary.json, at the last step of metrics.csv, if it has one."""
        rows = read_numbers(self._folder.metrics) if self._names or self._open else []
        if not rows:  # a user may have removed that file
            return
        metrics = {
            f"{table}/{name}": metric["value"]
            for table, column in self._folder.read_summary()["metrics"].items()
            for name, metric in column.items()
        }
        last = int(rows[-1]["step"])
        self._start(last + 1)  # of a run that was stopped after the last step
        self._each(lambda tracker, _: tracker.log(last, metrics))

    def _start(self, step: int) -> None:
        names, self._names = self._names, ()
        for name in names:
            with self._spared(name):
                stack = ExitStack()
                tracker = stack.enter_context(TRACKERS[name](_to_track(self._folder, step)))
                self._open[name] = tracker, stack
                self._log.info(f"tracker {name}: {tracker.where}")

    def _each(self, use: Callable[[Tracker, ExitStack], object]) -> None:
        for name, opened in list(self._open.items()):
            with self._spared(name):
                use(*opened)

    @contextmanager
    def _spared(self, name: str) -> Iterator[None]:
        """Turn what fails in a tracker into a warning, and keep it from printing results."""
        try:
            with redirect_stdout(StringIO()):
                yield
        except Exception as error:
            self._open.pop(name, None)
            self._log.info(
                f"warning: {name} failed ({type(error).__name__}: {first_sentence(error)}); the "
                "training goes on without it, and metrics.csv has everything"
            )


def _to_track(folder: RunFolder, step: int) -> RunToTrack:
    """A run with its resolved settings as plain values, and the key that it is given once."""
    if not folder.tracking.exists():
        replace_text(folder.tracking, json.dumps({"key": uuid4().hex[:12]}) + "\n")
    with usable(folder.tracking, "remove it; trackers begin a new run"):
        key = str(json.loads(folder.tracking.read_text(encoding="utf-8"))["key"])
    config, data = folder.settings()
    options = {f"options.{name}": value for name, value in config.options.items()}
    settings = {"data": data, **vars(config), **options}
    del settings["options"]
    for name, value in settings.items():
        settings[name] = value if isinstance(value, str | int | float) else str(value)
    return RunToTrack(folder.path, folder.path.resolve().name, key, settings, step)
