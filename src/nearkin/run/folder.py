"""The run folder: the only place that knows the names of files. One process at a time opens it."""

import json
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from nearkin.config import (
    ClassifyConfig,
    Config,
    DiscoverConfig,
    Duration,
    EmbedConfig,
    Settings,
    TrainConfig,
)
from nearkin.data.archives import is_pattern
from nearkin.data.arrays import is_name
from nearkin.data.folders import MARKER
from nearkin.data.remote import is_url
from nearkin.errors import CheckpointError, OutputError, UsageError, redacted
from nearkin.extensions import absolute
from nearkin.files import check_writable, replace_text, usable, writing
from nearkin.places import exists, user_path
from nearkin.schema import suggestion
from nearkin.text import json_text
from nearkin.toml import PLANNED_FOR, load_toml, read_toml, to_toml

STAGES = "stages"
KINDS: Final[Mapping[str, type[Config]]] = {
    "training": TrainConfig,
    "discovery": DiscoverConfig,
    "classification": ClassifyConfig,
    "frozen encoder": EmbedConfig,
}
"""Kinds of runs and their settings, whose verbs name them in files."""


class RunFolder:
    """Everything that one run reads and writes. All file names are here."""

    def __init__(self, path: Path) -> None:  # noqa: PLR0915 (a line for each name)
        self.path, stages = path, path / STAGES

        # The process that writes here, or was the last to do so, and the lock that it holds
        self.marker, self.lock = path / MARKER, path / f"{MARKER}.lock"
        self.config = path / "config.toml"  # The resolved settings, which can repeat the run
        self.machine = path / "machine.json"  # What it was computed on, and from which step on
        self.log = path / "train.log"  # The log lines, with times
        self.data = path / "data.json"  # Number and fingerprint of the images
        self.images = path / "images.csv"  # Names and sizes of these images
        self.bad_files = path / "bad_files.csv"  # Images that could not be read, with the reason

        # Training
        self.start = path / "start.safetensors"  # The encoder that it started from, as it was
        self.teacher = path / "teacher.safetensors"  # The encoder that it learns from
        self.teacher_features = stages / "teacher"  # The folder of its features of the views
        self.checkpoints = path / "checkpoints"  # A folder
        self.diverged = path / "diverged"  # The folder of the state at which training diverged
        self.metrics = path / "metrics.csv"  # A row per training step
        self.tracking = path / "tracking.json"  # What the run is called in trackers
        self.tensorboard = path / "tb"  # The folder of TensorBoard's events
        self.encoder = path / "encoder.safetensors"  # The trained backbone, for other tools too
        self.projector = path / "projector.safetensors"  # From its features to the embedding

        # Measures and pages
        self.summary = path / "summary.json"  # The final metrics
        self.evaluation = path / "evaluation.json"  # Those of `nearkin evaluate --protocol`
        self.column = path / "column.csv"  # What the column of `--ignore` says of each image
        self.embeddings = path / "embeddings.parquet"  # Features of every image of the data
        self.plots = path / "plots"  # A folder
        self.augmentations = self.plots / "augmentations.png"  # A sheet of augmented views
        self.map = path / "map.npz"  # Coordinates of the images on the page's map
        self.report = path / "report.html"  # The page about the run
        self.report_files = path / "report_files"  # The folder of most of it, of very many images
        self.page = stages / "page.json"  # Its content, of a discovery or classification
        self.atlas = path / "atlas.parquet"  # The images as a table for Embedding Atlas
        self.exports = path / "exports"  # The folder of what the user has copied or exported

        # Classes
        self.accepted = path / "accepted.csv"  # Labels taken over from the discovery before
        self.accepted_notes = stages / "accepted.json"  # The notes on these labels
        self.excluded = path / "excluded.csv"  # Classes that images without a label do not have
        self.kept_features = stages / "kept-features"  # Those that cannot be outside of the run
        self.number = stages / "number.json"  # The estimate of the number of classes
        self.classifier = path / "classifier.safetensors"  # Assigns classes to features
        self.copying = path / "copying.txt"  # Where images are copied to, until all have been
        self.assignments = path / "assignments.csv"  # The class of every image not learned from
        self.clusters = path / "clusters.csv"  # The novel classes, with room for their names
        self.to_label = path / "to_label.csv"  # Images whose labels would teach most, with room
        # These three as the discovery wrote them, before the user's edits
        self.original_assignments = path / "original-assignments.csv"
        self.original_clusters = path / "original-clusters.csv"
        self.original_to_label = path / "original-to_label.csv"

    def stage(self, name: str) -> "RunFolder":
        """The folder of one stage of several."""
        return RunFolder(self.path / STAGES / name)

    @property
    def kind(self) -> str:
        """One of `KINDS`; or UsageError."""
        self.check_is_run()
        verb = load_toml(self.config).get("kind")
        kinds = [kind for kind, settings in KINDS.items() if settings.verb == verb]
        if not kinds:
            raise UsageError(f"{self.config} names no kind of run; it is not what a run wrote")
        return kinds[0]

    @property
    def is_frozen(self) -> bool:
        """Whether this is the run of an encoder that was not trained here, by `nearkin embed`."""
        return self.config.exists() and self.kind == "frozen encoder"

    def settings(self) -> tuple[TrainConfig, str]:
        """The stored configuration of a training, and the data it names; or UsageError."""
        if self.kind != "training":
            raise UsageError(
                f"{self.path} is a {self.kind}; look at its {self.report.name}, or give the run "
                "that its encoder is from"
            )
        return self.settings_of(TrainConfig)

    def encoder_settings(self) -> tuple[TrainConfig | EmbedConfig, str]:
        """Those of a run that is about an encoder, trained or frozen; or UsageError."""
        return self.settings_of(EmbedConfig) if self.is_frozen else self.settings()

    def any_settings(self) -> tuple[Config, str]:
        """The stored configuration of a run of any kind, and the data it names; or UsageError."""
        return self.settings_of(KINDS[self.kind])

    def settings_of(self, kind: type[Settings]) -> tuple[Settings, str]:
        """The stored configuration of a run of that kind, and the data it names; or UsageError."""
        self.check_is_run()
        stored = read_toml(self.config, kind)
        if "data" not in stored:
            raise UsageError(f"{self.config} names no data; it is not what a run wrote")
        data = str(stored.pop("data"))
        return kind(**stored), data

    def check_is_run(self) -> None:
        """Raise UsageError for a folder that holds no run."""
        if not self.path.exists():
            raise UsageError(
                f"{self.path} is no run folder; `nearkin embed ENCODER DATA` or `nearkin train "
                f"DATA` makes one.{suggestion(str(self.path), neighboring_runs(self.path))}"
            )
        if not self.config.exists():
            raise UsageError(f"{self.path} is no run folder: it has no {self.config.name}")

    @property
    def has_noted_data(self) -> bool:
        """Whether a run has noted its images here; other programs may have a file of that name."""
        with suppress(OSError, ValueError, RecursionError):
            noted = json.loads(self.data.read_text(encoding="utf-8"))
            return isinstance(noted, dict) and "fingerprint" in noted
        return False

    @property
    def copied_to(self) -> Path | None:
        """The folder that this run had begun to copy images to, and may not have finished."""
        return Path(os.fsdecode(self.copying.read_bytes())) if self.copying.exists() else None

    @property
    def is_occupied(self) -> bool:
        """Whether there is more than a run leaves that fails before its first step."""
        left = {self.lock, self.marker, self.log, self.bad_files}
        left |= {each for each in (self.checkpoints, self.plots) if not any(each.glob("*"))}
        return any(entry not in left for entry in self.path.iterdir())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from writing to the folder, which exists; OutputError if one does."""
        with writing(self.path):
            try:
                lock = FileLock(self.lock, timeout=0).acquire()
            except Timeout as error:
                holder = "another run"
                # No part of the lock, which may be unreadable while it is held.
                with suppress(OSError):
                    holder = self.marker.read_text(encoding="utf-8").strip() or holder
                raise OutputError(
                    f"{self.path} is in use by {holder}; wait for it or choose another -o"
                ) from error
        with lock:
            holder = f"process {os.getpid()} on {platform.node()}, started {time.ctime()}\n"
            with suppress(OSError):  # on a full disk
                self.marker.write_text(holder, encoding="utf-8")
            yield

    def write_settings(self, config: Config, data: str, planned_for: Duration = "") -> None:
        """Store the configuration, and the time that its epochs are planned for, which stays."""
        replace_text(self.config, to_toml(config, data, planned_for or self.planned_for))

    @property
    def planned_for(self) -> Duration:
        """The `--max-time` that the stored number of epochs was planned for; '' for none."""
        return str(load_toml(self.config).get(PLANNED_FOR, "")) if self.config.exists() else ""

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Store the final metrics."""
        replace_text(self.summary, json_text(summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """The stored metrics; empty before there are any."""
        return _read_tables(
            self.summary, "remove it; the run's command with --resume measures anew"
        )

    def add_metrics(self, evaluation: Mapping[str, Any], titles: Sequence[str]) -> None:
        """Store further metrics of the run's own images; those of the same name are replaced.

        Of what was measured anew, by its `titles`, earlier reasons why not are forgotten.
        """
        further = _merged(self._read_evaluation(), {**evaluation, "titles": titles})
        replace_text(self.evaluation, json_text(further, indent=2) + "\n")

    def read_evaluated(self) -> dict[str, Any]:
        """The summary with what `add_metrics` has stored, which tests a column last."""
        summary, further = self.read_summary(), self._read_evaluation()
        if not further or "metrics" not in summary:
            return summary
        # The training's own metrics come first, and stay.
        own = {"metrics": summary["metrics"], "left_out": {}}
        return {**summary, **_merged(_merged(summary, further), own)}

    def _read_evaluation(self) -> dict[str, Any]:
        remedy = "remove it; `nearkin evaluate` measures anew"
        return _read_tables(self.evaluation, remedy, "metrics", "left_out")


def _read_tables(path: Path, remedy: str, *names: str) -> dict[str, Any]:
    """Read a file of metrics, which has tables of these names; empty before there is one."""
    if not path.exists():
        return {}
    with usable(path, remedy):
        stored = json.loads(path.read_text(encoding="utf-8"))
        for table in (stored, *(stored[name] for name in names)):
            if not isinstance(table, dict):
                raise ValueError("it holds no metrics")
    return dict(stored)


def _merged(measured: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with others, which replace those of the same name, and the last test of a column.

    What is measured of the column, or by the `titles` of the others, has no earlier reason left.
    """
    metrics = {**measured.get("metrics", {})}
    for table, column in more["metrics"].items():
        metrics[table] = {**metrics.get(table, {}), **column}
    column, anew = more.get("column", measured.get("column")), more.get("titles", ())
    tested = f"column {column['column']}" if column else ""
    # Of a table, and of some k
    forgotten = tuple(f"{title}{of}" for title in anew for of in (" of ", " k "))
    earlier = {
        name: why
        for name, why in measured.get("left_out", {}).items()
        if name not in (*anew, tested) and not name.startswith(forgotten)
    }
    titles = [*dict.fromkeys((*measured.get("titles", ()), *anew))]
    left_out = {**earlier, **more["left_out"]}
    merged = {"metrics": metrics, "left_out": left_out, "titles": titles}
    return merged | ({"column": column} if column else {})


def neighboring_runs(path: Path) -> list[str]:
    """The run folders beside a path, and those in `runs`."""
    marks = {*path.parent.glob("*/config.toml"), *Path("runs").glob("*/config.toml")}
    return sorted(str(mark.parent) for mark in marks)


def data_name(data: Any) -> str:
    """Return the name of the data in files: their full path, reference or name, or `arrays`."""
    if not isinstance(data, str | Path):
        return "arrays"
    if is_name(str(data)):  # whatever folder of that name there is
        return str(data)
    if is_url(str(data)):
        return redacted(str(data))
    if is_pattern(str(data)):
        return str(user_path(data).absolute())
    path = user_path(data)
    return str(path.resolve()) if exists(path) else absolute(str(data))


def clear(run: RunFolder) -> None:
    """Remove what an earlier run made, and nothing else: the folder may hold other things.

    The record of its data goes last: what a killed process leaves is not taken for a new run.
    """
    last = run.data, run.images
    for file in cleared(run) - {*last}:
        file.unlink()
    shutil.rmtree(run.path / STAGES, ignore_errors=True)
    for file in last:
        file.unlink(missing_ok=True)


def cleared(run: RunFolder) -> set[Path]:
    """Return the files that `clear` removes."""
    return _written(run) - {run.lock, run.marker, run.log, run.bad_files}


def _written(run: RunFolder) -> set[Path]:
    """Return the files that a run, or a command on it, has written under a name of its own."""
    made = {*vars(run).values()}
    made |= {*run.diverged.glob("ckpt-*"), *run.checkpoints.glob("ckpt-*")}
    made |= {*run.tensorboard.glob("events.out.tfevents.*")}
    made |= {*run.report_files.glob("[0-9]*.js"), *run.report_files.glob("[0-9]*.webp")}
    made |= {*(run.path / STAGES).rglob("*")}
    return {file for file in made if file.is_file()}


def check_target(
    path: Path, *, overwrite: bool, reads: Iterable[Any] = (), is_file: bool = True
) -> None:
    """Refuse an output before anything is computed: what is read, or there and not to be replaced.

    A file of a run is never replaced, but for the table for Embedding Atlas: it is `nearkin
    export` that writes it. Those of `reads` count that are paths. The output's folder may be
    missing: `creating` makes it.
    """
    entry = path.parent.resolve() / path.name  # which is replaced, even if it is a link
    for run in map(RunFolder, entry.parents):
        is_run = run.config.exists() and run.data.exists()  # others may have one of the two
        if is_run and entry in _written(run) - {run.atlas}:
            raise UsageError(f"{path} is a file of the run {run.path}; choose another -o")
    named = [user_path(Path(read)) for read in reads if isinstance(read, str | os.PathLike)]
    if path.resolve() in [read.resolve() for read in named]:
        raise UsageError(f"this would replace {path}, which is read; choose another -o")
    if is_file and path.is_dir():
        raise OutputError(f"{path} is a folder; give the name of a file as -o")
    if not overwrite and os.path.lexists(path):
        raise OutputError(f"{path} exists; choose another -o, or replace it with --overwrite")
    check_writable(path)


def run_folder(
    output: str | os.PathLike[str] | None, data: Any, name: str, *, again: bool
) -> RunFolder:
    """The folder `output`; `runs/DATA-NAME` if None, with a number behind it.

    That is the next which is free or, where a run is to be resumed or replaced, the newest of the
    same data: others may have a folder of the same name. Arrays and lists, which have no name, are
    those of a run if they share an image with it.
    """
    if output is not None:
        return RunFolder(Path(output))
    named = data_name(data)
    base = named.partition("{")[0].rstrip("/-_") if is_pattern(named) else named
    stem = Path(base).name.strip(".")
    if not Path(base).is_dir():  # whose names may have points
        stem = stem.split(".")[0]
    path = first = Path("runs") / f"{stem.replace(':', '-')}-{name}"
    if again and (newest := _newest(first, data)):
        return newest
    number = 1
    while path.exists() and (not path.is_dir() or RunFolder(path).is_occupied):
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return RunFolder(path)


def _newest(first: Path, data: Any) -> RunFolder | None:
    """The run of these data with the greatest number behind this path; None without any."""
    from nearkin.run.data import shares_images  # which needs what is here

    numbered = {1: first}
    for path in first.parent.glob(f"{escape(first.name)}-*"):
        number = path.name.removeprefix(f"{first.name}-")
        if number.isascii() and number.isdecimal():
            numbered[int(number)] = path
    for _, path in sorted(numbered.items(), reverse=True):
        run = RunFolder(path)
        with suppress(CheckpointError, UsageError):  # files of a run that cannot be read
            named = load_toml(run.config).get("data")
            if named == data_name(data) and shares_images(run, data):
                return run
    return None
