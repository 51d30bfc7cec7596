"""The run folder: the only place that knows the names of files."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearkin.config import Config, DiscoverConfig, TrainConfig, read_toml, to_toml
from nearkin.data.sources import MARKER
from nearkin.errors import UsageError
from nearkin.tables import replace_text, usable

STAGES = "stages"
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


@dataclass(frozen=True)
class RunFolder:
    """Where everything about one run is kept."""

    path: Path

    @property
    def lock(self) -> Path:
        """Held, and signed, by the process that writes here."""
        return self.path / MARKER

    @property
    def config(self) -> Path:
        """The settings, resolved; `nearkin train --config` repeats the run from it."""
        return self.path / "config.toml"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def diverged(self) -> Path:
        """The folder of the state at which the training diverged."""
        return self.path / "diverged"

    @property
    def machine(self) -> Path:
        """What the run was computed with, and from which step on."""
        return self.path / "machine.json"

    @property
    def encoder(self) -> Path:
        """The trained backbone, which other tools load."""
        return self.path / "encoder.safetensors"

    @property
    def metrics(self) -> Path:
        """A row per training step."""
        return self.path / "metrics.csv"

    @property
    def summary(self) -> Path:
        """Final measures, versions, timings."""
        return self.path / "summary.json"

    @property
    def log(self) -> Path:
        """What was printed, with times."""
        return self.path / "train.log"

    @property
    def bad_files(self) -> Path:
        """Images that could not be read, with the reason."""
        return self.path / "bad_files.csv"

    @property
    def data(self) -> Path:
        """How many images the run was started with, and their fingerprint."""
        return self.path / "data.json"

    @property
    def images(self) -> Path:
        """Which images these are."""
        return self.path / "images.csv"

    @property
    def embeddings(self) -> Path:
        """Features of every image of the data."""
        return self.path / "embeddings.parquet"

    @property
    def plots(self) -> Path:
        """The folder of images about the run."""
        return self.path / "plots"

    @property
    def assignments(self) -> Path:
        """The class of every image that came without one."""
        return self.path / "assignments.csv"

    @property
    def clusters(self) -> Path:
        """The classes that were found, with room for their names."""
        return self.path / "clusters.csv"

    @property
    def found_assignments(self) -> Path:
        """`assignments` as it was before the user changed it."""
        return self.path / "found-assignments.csv"

    @property
    def found_clusters(self) -> Path:
        """`clusters` as it was before the user changed it."""
        return self.path / "found-clusters.csv"

    @property
    def exports(self) -> Path:
        """The folder of what the user has copied out of the page."""
        return self.path / "exports"

    @property
    def classes(self) -> Path:
        """The folder of sheets, one per class."""
        return self.path / "classes"

    @property
    def classifier(self) -> Path:
        """What turns features into the classes that were found."""
        return self.path / "classifier.safetensors"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.path / "report.html"

    @property
    def page(self) -> Path:
        """What the page about a discovery tells, as values, without images."""
        return self.path / STAGES / "page.json"

    @property
    def map(self) -> Path:
        """Where the images lie on the page's map."""
        return self.path / "map.npz"

    @property
    def kept(self) -> Path:
        """What a frozen encoder sees of all images."""
        return self.path / STAGES / "kept.safetensors"

    @property
    def number(self) -> Path:
        """The estimate of the number of classes."""
        return self.path / STAGES / "number.json"

    def stage(self, name: str) -> "RunFolder":
        """The folder of one stage of several."""
        return RunFolder(self.path / STAGES / name)

    def settings(self) -> tuple[TrainConfig, str]:
        """The stored configuration of a training, and the data it names.

        Raises:
            UsageError: If this is no folder of a training.
        """
        if self.classifier.exists():
            raise UsageError(
                f"{self.path} is a discovery; look at its {self.report.name}, or give the run "
                "that its encoder is from"
            )
        stored, data = self._stored(TrainConfig)
        return TrainConfig(**stored), data

    def discovery_settings(self) -> tuple[DiscoverConfig, str]:
        """The stored configuration of a discovery, and the data it names.

        Raises:
            UsageError: If this is no folder of a discovery.
        """
        stored, data = self._stored(DiscoverConfig)
        return DiscoverConfig(**stored), data

    def _stored(self, kind: type[Config]) -> tuple[dict[str, Any], str]:
        if not self.config.exists():
            raise UsageError(f"{self.path} is no run folder: it has no {self.config.name}")
        stored = read_toml(self.config, kind)
        if "data" not in stored:
            raise UsageError(f"{self.config} names no data; it is not what a run wrote")
        return stored, str(stored.pop("data"))

    def write_settings(self, config: Config, data: str) -> None:
        """Store the configuration."""
        replace_text(self.config, to_toml(config, data))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Store the final measures."""
        replace_text(self.summary, json.dumps(summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """The stored measures; empty before there are any.

        Raises:
            CheckpointError: If the file is damaged.
        """
        if not self.summary.exists():
            return {}
        with usable(self.summary, "remove it; the run's command with --resume measures anew"):
            stored: dict[str, Any] = json.loads(self.summary.read_text(encoding="utf-8"))
            if not isinstance(stored, dict):
                raise ValueError("it holds no measures")
        return stored


def data_name(data: Any) -> str:
    """What the data are called in files: their full path, their name, or `arrays`."""
    if not isinstance(data, str | Path):
        return "arrays"
    return str(Path(data).resolve()) if Path(data).exists() else str(data)


def clear(run: RunFolder) -> None:
    """Remove what an earlier run made, and nothing else: the folder may hold other things."""
    made = [
        run.config,
        run.encoder,
        run.metrics,
        run.summary,
        run.data,
        run.images,
        run.embeddings,
    ]
    made += [run.assignments, run.clusters, run.classifier, run.report, run.map]
    made += [run.found_assignments, run.found_clusters]
    made += [run.machine, *run.diverged.glob("ckpt-*")]
    made += [*run.checkpoints.glob("ckpt-*"), *run.classes.glob("*.png")]
    for file in [*made, *(run.plots / plot for plot in PLOTS)]:
        file.unlink(missing_ok=True)
    shutil.rmtree(run.path / STAGES, ignore_errors=True)


def lines(summary: Mapping[str, Any]) -> list[str]:
    """What was found, how good it is beside the baselines, and what to beware of."""
    sizes = [cluster["size"] for cluster in summary["clusters"] if cluster["kind"] == "novel"]
    named = [cluster["size"] for cluster in summary["clusters"] if cluster["kind"] == "known"]
    found = f"{len(sizes)} novel classes of {min(sizes)} to {max(sizes)} images"
    into = f", and {sum(named)} images of known classes" if named else ""
    return [
        f"found  {found}{into}",
        *_table(summary["scores"]),
        *(f"warning: {finding['text']}" for finding in summary["findings"]),
    ]


def _table(scores: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """A row per score, a column per way of finding classes; ours comes first."""
    rows = [["", *scores]]
    for position, score in enumerate(next(iter(scores.values()))):
        cells = [found[position] for found in scores.values()]
        rows.append([score["name"], *(f"{cell['value']:.3f}" for cell in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
