"""The run folder: the only place that knows the names of files. One process at a time opens it."""

import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nearkin.config import (
    ClassifyConfig,
    Config,
    DiscoverConfig,
    EmbedConfig,
    Settings,
    TrainConfig,
)
from nearkin.data.archives import is_pattern
from nearkin.data.arrays import is_name
from nearkin.data.folders import MARKER
from nearkin.data.remote import is_url
from nearkin.errors import OutputError, UsageError, redacted
from nearkin.extensions import absolute
from nearkin.files import remove_partial, replace_text, usable
from nearkin.pace import count
from nearkin.places import exists, user_path
from nearkin.schema import suggestion
from nearkin.text import aligned
from nearkin.toml import load_toml, read_toml, to_toml

STAGES = "stages"
KINDS: Final[Mapping[str, type[Config]]] = {
    "training": TrainConfig,
    "discovery": DiscoverConfig,
    "classification": ClassifyConfig,
    "frozen encoder": EmbedConfig,
}
"""Kinds of runs, by the class of their settings."""
PLOTS = (
    "augmentations.png",
    "class_count.png",
    "clusters.png",
    "confusion.png",
    "curves.png",
    "knn.png",
    "map.png",
    "neighbors.png",
)


class _Entry:
    """The path of an entry of the run folder, as an attribute of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: "RunFolder", owner: type["RunFolder"]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """Everything that one run reads and writes. All file names are here."""

    path: Path

    lock = _Entry(MARKER)  # Locked, and signed, by the process that writes here
    config = _Entry("config.toml")  # The resolved settings, which can repeat the run
    checkpoints = _Entry("checkpoints")  # The folder of checkpoints
    diverged = _Entry("diverged")  # The folder of the state at which the training diverged
    machine = _Entry("machine.json")  # The machine the run was computed on, and from which step on
    encoder = _Entry("encoder.safetensors")  # The trained backbone, which other tools load
    projector = _Entry("projector.safetensors")  # On top of it: from features to the embedding
    start = _Entry("start.safetensors")  # The encoder that training started from, as it was
    teacher = _Entry("teacher.safetensors")  # The encoder that the training learns from
    teacher_features = _Entry(f"{STAGES}/teacher")  # The folder of its features of the views
    metrics = _Entry("metrics.csv")  # A row per training step
    tracking = _Entry("tracking.json")  # What the run is called in trackers
    tensorboard = _Entry("tb")  # The folder of TensorBoard's events
    summary = _Entry("summary.json")  # The final measures
    evaluation = _Entry("evaluation.json")  # Further measures, by `nearkin evaluate --protocol`
    log = _Entry("train.log")  # The log lines, with times
    bad_files = _Entry("bad_files.csv")  # Images that could not be read, with the reason
    data = _Entry("data.json")  # Number and fingerprint of the images
    images = _Entry("images.csv")  # Names and sizes of these images
    embeddings = _Entry("embeddings.parquet")  # Features of every image of the data
    plots = _Entry("plots")  # The folder of plots and image sheets
    assignments = _Entry("assignments.csv")  # The class of every image that was not learned from
    clusters = _Entry("clusters.csv")  # The novel classes, with room for their names
    to_label = _Entry("to_label.csv")  # Images whose labels would teach most, with room for them
    accepted = _Entry("accepted.csv")  # Labels that come from the discovery before this one
    original_assignments = _Entry("original-assignments.csv")  # As the discovery wrote it
    original_clusters = _Entry("original-clusters.csv")  # Before the user's edits
    original_to_label = _Entry("original-to_label.csv")
    exports = _Entry("exports")  # The folder of what the user has copied or exported
    classes = _Entry("classes")  # The folder of sheets, one per class
    classifier = _Entry("classifier.safetensors")  # Assigns classes to features
    report = _Entry("report.html")  # The page about the run
    page = _Entry(f"{STAGES}/page.json")  # The page of a discovery or classification, as values
    map = _Entry("map.npz")  # Coordinates of the images on the page's map
    atlas = _Entry("atlas.parquet")  # The images as a table for Embedding Atlas
    cached_features = _Entry(f"{STAGES}/cached-features.safetensors")  # Of all images and of views
    feature_parts = _Entry(f"{STAGES}/cached-features")  # The folder of these, until all are there
    finetuned_features = _Entry(f"{STAGES}/finetuned-features")
    """The folder of features by trained networks, until the run is complete."""
    number = _Entry(f"{STAGES}/number.json")  # The estimate of the number of classes
    parts = _Entry(f"{STAGES}/parts")  # Folders of embeddings that are computed part by part

    def stage(self, name: str) -> "RunFolder":
        """The folder of one stage of several."""
        return RunFolder(self.path / STAGES / name)

    def settings(self) -> tuple[TrainConfig, str]:
        """The stored configuration of a training, and the data it names; or UsageError."""
        kind = self.kind
        if kind != "training":
            raise UsageError(
                f"{self.path} is a {kind}; look at its {self.report.name}, or give the run "
                "that its encoder is from"
            )
        return self.settings_of(TrainConfig)

    @property
    def is_frozen(self) -> bool:
        """Whether this is the run of an encoder that was not trained here, by `nearkin embed`."""
        return self.config.exists() and self.kind == "frozen encoder"

    def encoder_settings(self) -> tuple[TrainConfig | EmbedConfig, str]:
        """The stored configuration of a run that leaves an encoder, trained or frozen; its data.

        Raises:
            UsageError: If this is a discovery, or no run.
        """
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

    @property
    def kind(self) -> str:
        """One of `KINDS`: the first that has all of the stored settings; or UsageError."""
        self.check_is_run()
        stored = load_toml(self.config, "the configuration").keys() - {"format", "data", "views"}
        fitting = (
            kind for kind, cls in KINDS.items() if stored <= cls.__dataclass_fields__.keys()
        )
        return next(fitting, "training")

    def check_is_run(self) -> None:
        """Raise UsageError for a folder that holds no run."""
        if not self.path.exists():
            raise UsageError(
                f"{self.path} is no run folder; `nearkin embed ENCODER DATA` or `nearkin train "
                f"DATA` makes one.{suggestion(str(self.path), neighboring_runs(self.path))}"
            )
        if not self.config.exists():
            raise UsageError(f"{self.path} is no run folder: it has no {self.config.name}")

    def write_settings(self, config: Config, data: str) -> None:
        """Store the configuration."""
        replace_text(self.config, to_toml(config, data))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Store the final measures."""
        replace_text(self.summary, json.dumps(summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """The stored measures; empty before there are any."""
        if not self.summary.exists():
            return {}
        with usable(self.summary, "remove it; the run's command with --resume measures anew"):
            stored: dict[str, Any] = json.loads(self.summary.read_text(encoding="utf-8"))
            if not isinstance(stored, dict):
                raise ValueError("it holds no measures")
        return stored

    def add_measures(self, evaluation: Mapping[str, Any]) -> None:
        """Store further measures of the run's own images; those of the same name are replaced."""
        stored = self._read_evaluation()
        measures = {**stored.get("measures", {})}
        for table, column in evaluation["measures"].items():
            measures[table] = {**measures.get(table, {}), **column}
        taken = {name for column in measures.values() for name in column}
        left_out = {**stored.get("left_out", {}), **evaluation["left_out"]}
        missing = {name: why for name, why in left_out.items() if name not in taken}
        text = json.dumps({"measures": measures, "left_out": missing}, indent=2)
        replace_text(self.evaluation, text + "\n")

    def read_evaluated(self) -> dict[str, Any]:
        """The summary with the further measures of `add_measures` among its measures."""
        summary, further = self.read_summary(), self._read_evaluation()
        if not further or "measures" not in summary:
            return summary
        measures = {**summary["measures"]}
        for table, column in further["measures"].items():
            own = measures.get(table, {})
            measures[table] = own | column | own  # the training's own come first, and stay
        left_out = {**summary["left_out"], **further["left_out"]}
        return {**summary, "measures": measures, "left_out": left_out}

    def _read_evaluation(self) -> dict[str, Any]:
        if not self.evaluation.exists():
            return {}
        with usable(self.evaluation, "remove it; `nearkin evaluate` measures anew"):
            stored: dict[str, Any] = json.loads(self.evaluation.read_text(encoding="utf-8"))
            if not all(isinstance(stored[name], dict) for name in ("measures", "left_out")):
                raise ValueError("it holds no measures")
        return stored


def neighboring_runs(path: Path) -> list[str]:
    """Return the run folders beside a path, and those in `runs`."""
    marks = {*path.parent.glob("*/config.toml"), *Path("runs").glob("*/config.toml")}
    return sorted(str(mark.parent) for mark in marks)


def data_name(data: Any) -> str:
    """Return the name of the data in files: their full path, reference or name, or `arrays`.

    An address is named without password and signature.
    """
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
    """Remove what an earlier run made, and nothing else: the folder may hold other things."""
    entries = [name for name, entry in vars(RunFolder).items() if isinstance(entry, _Entry)]
    made = {getattr(run, name) for name in entries} - {run.lock, run.log, run.bad_files}
    made |= {*run.diverged.glob("ckpt-*"), *run.checkpoints.glob("ckpt-*")}
    made |= {*run.tensorboard.glob("events.out.tfevents.*")}
    made |= {*run.classes.glob("*.png"), *(run.plots / plot for plot in PLOTS)}
    for file in made:
        if file.is_file():
            file.unlink()
    shutil.rmtree(run.path / STAGES, ignore_errors=True)


def lines(summary: Mapping[str, Any]) -> list[str]:
    """Summarize a discovery in lines: classes, scores beside the baselines, and warnings."""
    sizes = [cluster["size"] for cluster in summary["clusters"] if cluster["kind"] == "novel"]
    named = [cluster["size"] for cluster in summary["clusters"] if cluster["kind"] == "known"]
    classes = count(len(sizes), "novel class")
    if sizes:
        classes += f" of {min(sizes)} to {max(sizes)} images"
    into = f", and {sum(named)} images of known classes" if named else ""
    return [
        f"found  {classes}{into}",
        *_table(summary["scores"]),
        *(f"warning: {finding['text']}" for finding in summary["findings"]),
    ]


def _table(scores: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Format a row per score and a column per way of finding classes; ours comes first."""
    rows = [["", *scores]]
    for position, score in enumerate(next(iter(scores.values()))):
        cells = [column[position] for column in scores.values()]
        rows.append([score["name"], *(f"{cell['value']:.3f}" for cell in cells)])
    return aligned(rows)


def run_folder(out: str | Path | None, data: Any, name: str, *, again: bool) -> RunFolder:
    """The folder `out`; `runs/DATA-NAME` if None, with a number behind it.

    That is the next which is free or, where a run is to be resumed or replaced, the newest.
    """
    if out is not None:
        return RunFolder(Path(out))
    named = data_name(data)
    base = named.partition("{")[0].rstrip("/-_") if is_pattern(named) else named
    stem = Path(base).name.split(".")[0].replace(":", "-")
    path = first = Path("runs") / f"{stem}-{name}"
    newest, number = None, 1
    while path.exists() and (not path.is_dir() or _occupied(RunFolder(path))):
        newest, number = path, number + 1
        path = first.with_name(f"{first.name}-{number}")
    return RunFolder(newest if again and newest else path)


@contextmanager
def opened(path: Path, *, resume: bool, overwrite: bool) -> Iterator[RunFolder]:
    """Open a run folder for writing; no other process can open it meanwhile.

    Raises:
        OutputError: If it cannot be written, is in use, or is not empty and neither `resume`
            nor `overwrite` is set.
    """
    run = RunFolder(path)
    if resume and overwrite:
        raise UsageError("--resume and --overwrite contradict each other; give one")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    with locked(run):
        if _occupied(run) and not (resume or overwrite):
            raise OutputError(
                f"{path} is not empty; continue it with --resume, or replace it with --overwrite"
            )
        if overwrite and _occupied(run) and not run.data.exists():
            raise OutputError(
                f"{path} is no run, so --overwrite spares it; empty it or choose another --out"
            )
        for folder in (path, *path.glob(f"{STAGES}/**/")):
            remove_partial(folder)
        run.checkpoints.mkdir(exist_ok=True)
        run.plots.mkdir(exist_ok=True)
        yield run


@contextmanager
def locked(run: RunFolder) -> Iterator[None]:
    """Keep all others who would do so from writing to a run folder that is there.

    Raises:
        OutputError: If it cannot be written, or is in use.
        UsageError: If this system has no locks.
    """
    try:
        import fcntl
    except ModuleNotFoundError as error:  # on Windows, which can train in its Linux
        raise UsageError(
            f"this system has no locks to keep other runs out of {run.path}; run it under WSL"
        ) from error
    try:
        lock = run.lock.open("a+")
    except OSError as error:
        raise _unwritable(run.path, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            raise OutputError(
                f"{run.path} is in use by {lock.readline().strip() or 'another run'}; "
                "wait for it or choose another --out"
            ) from error
        # Who holds the lock, for those who wait; the lock itself does not need it.
        holder = f"process {os.getpid()} on {platform.node()}, started {time.ctime()}\n"
        with suppress(OSError):  # on a full disk
            lock.truncate(0)
            os.write(lock.fileno(), holder.encode())
        yield


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write to {path}: {error.strerror}; choose another --out")


def _occupied(run: RunFolder) -> bool:
    """Return whether there is more than a run leaves that fails before its first step."""
    left = {run.lock.name, run.log.name, run.bad_files.name}
    empty = {folder for folder in (run.checkpoints, run.plots) if not any(folder.glob("*"))}
    return any(entry.name not in left and entry not in empty for entry in run.path.iterdir())
