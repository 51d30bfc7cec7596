"""Finished runs side by side: what their files tell, as text, as plain values, and as a page."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from markupsafe import Markup
from msgspec.structs import replace
from typing_extensions import override

from nearkin.encoders.encoder import AGAIN
from nearkin.errors import CheckpointError, UsageError
from nearkin.evaluation.baselines import TITLES
from nearkin.evaluation.column import divided
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import KNN, knn
from nearkin.evaluation.table import open_table, stored_labels
from nearkin.evaluation.verdict import differences
from nearkin.files import usable
from nearkin.metrics.metric import Difference, Metric
from nearkin.report.encoder_report import training_curves
from nearkin.report.page.blocks import Chart, Findings, Page, Table
from nearkin.report.page.html import render
from nearkin.result import Result, Row
from nearkin.run.folder import RunFolder
from nearkin.text import aligned
from nearkin.types import UNLABELED

TRAININGS: Final = "trainings"
KINDS: Final = {
    "training": TRAININGS,
    "frozen encoder": TRAININGS,  # beside which they say whether training helped
    "discovery": "discoveries",
    "classification": "classifications",
}
"""What several runs of a kind are called."""
OWN: Final = ("encoder", "nearkin", "classifier")
"""The table of a summary that is of the run itself, one for each of these."""
SUMMARY_SETTINGS: Final = ("novel", "nearkin", "torch", "python", "threads")
"""Entries of summary.json that count as settings."""
WHAT: Final = ("encoder", "method", "backbone", "epochs")
"""Settings that say what a run is, beside runs that do not have them."""
OF_BASELINES: Final = (KNN, "linear probe")  # Metrics of baselines that are shown too
MAX_LINES: Final = 4  # in one chart: a page has no more line styles
NOTE: Final = (
    "Intervals are of 95 % confidence. The best kNN top-1 is marked if all runs were scored on "
    "the same test images and the paired intervals of its differences from the others exclude 0; "
    "of other metrics, intervals that overlap or not decide nothing. Intervals cover the sampling "
    "of images, not the random seed: for that, compare runs of several seeds."
)


@dataclass(frozen=True)
class FinishedRun:
    """A finished run."""

    folder: RunFolder
    kind: str  # One of `KINDS`
    settings: Mapping[str, str]
    metrics: Mapping[str, Metric]
    images: str  # fingerprint of its images
    split: str  # fingerprint of which of them were held out


def read_finished(run: Path) -> FinishedRun:
    """Read a run from its files."""
    folder = RunFolder(run)
    kind, (config, data) = KINDS[folder.kind], folder.any_settings()
    with usable(folder.summary, "finish the run anew"):
        summary = folder.read_evaluated()
        metrics = dict(_metrics(kind, summary)) if summary else {}
    if not summary:
        raise UsageError(
            f"{folder.path} is not finished; finish it with --resume, or leave it out"
        )
    settings = {"data": data, **vars(config), **getattr(config, "options", {})}
    settings |= {name: summary[name] for name in SUMMARY_SETTINGS if name in summary}
    with usable(folder.data, "finish the run anew"):
        fingerprint = json.loads(folder.data.read_text(encoding="utf-8"))["fingerprint"]
        images, _, split = str(fingerprint).partition("-")
    return FinishedRun(
        folder=folder,
        kind=kind,
        settings={name: str(value) for name, value in settings.items() if name != "options"},
        metrics=metrics,
        images=images,
        split=split,
    )


def _metrics(kind: str, summary: Mapping[str, Any]) -> Iterator[tuple[str, Metric]]:
    """Yield all metrics of a run by name; those of what stands beside it say of what they are."""
    tables = summary["metrics"] if "metrics" in summary else summary["scores"]  # of a discovery
    for table, entries in tables.items():
        for entry in entries.values() if isinstance(entries, dict) else entries:
            metric = Metric(**entry)
            if table in OWN:
                yield metric.name, metric
            elif kind != TRAININGS or (table in TITLES and metric.name in OF_BASELINES):
                yield f"{TITLES.get(table, table)}: {metric.name}", metric


@dataclass(frozen=True)
class ComparedMetric:
    """A metric of several runs."""

    name: str
    values: tuple[Metric | None, ...]  # By run; None if it has none
    from_first: tuple[Difference | None, ...] = ()
    """By run: its difference from the run of the highest value, where it is known image by image;
    None of that run itself."""

    @property
    def comparable(self) -> bool:
        """Whether all runs measured it by the same protocol."""
        first, *others = [metric for metric in self.values if metric is not None]
        return all(first.compares_with(other) for other in others)

    @property
    def best(self) -> int | None:
        """The run that all others are clearly below, image by image, if there is one."""
        if not self.from_first:
            return None
        below = all(each is None or each.clear < 0 for each in self.from_first)
        return self.from_first.index(None) if below else None

    def rows(self, best: str) -> Iterator[tuple[str, ...]]:
        """Yield its name and values as text, the best in this form; and how far it is from all."""
        cells = ["-" if metric is None else str(metric) for metric in self.values]
        if self.best is not None:
            cells[self.best] = best.format(cells[self.best])
        yield self.name, *cells
        if self.from_first:
            differences = ["" if each is None else str(each) for each in self.from_first]
            yield f"{self.name}, from the highest", *differences

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        values = [metric and metric.to_dict() for metric in self.values]
        plain = {"name": self.name, "best": self.best, "values": values}
        paired = [each and asdict(each) for each in self.from_first]
        return plain | ({"from_first": paired} if paired else {})


def short_names(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the names of run folders, or whole paths if two are equal."""
    short = [run.folder.path.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.folder.path) for run in runs]


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """Runs of one kind side by side."""

    runs: tuple[FinishedRun, ...]
    metrics: tuple[ComparedMetric, ...]
    settings: Mapping[str, tuple[str, ...]]  # those that differ, by name: the value of each run
    notes: tuple[str, ...]  # caveats, a sentence each

    @property
    def names(self) -> list[str]:
        """Folder names of the runs, or whole paths if two are equal."""
        return short_names(self.runs)

    @override
    def records(self) -> list[Row]:
        """A row per metric: its name, and its value in each run."""
        rows = list[Row]()
        for each in self.metrics:
            values = [metric and metric.value for metric in each.values]
            rows.append({"metric": each.name, **dict(zip(self.names, values, strict=True))})
        return rows

    @override
    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "runs": [
                {"name": name, "path": str(run.folder.path.resolve())}
                for name, run in zip(self.names, self.runs, strict=True)
            ],
            "settings": {name: list(values) for name, values in self.settings.items()},
            "metrics": [metric.to_dict() for metric in self.metrics],
            "notes": list(self.notes),
        }

    @override
    def lines(self) -> list[str]:
        """Return an aligned text table and notes."""
        rows = [("", *self.names), *self._metric_rows("*{}"), *self._setting_rows()]
        return [*aligned(rows), *(f"note: {note}" for note in (*self.notes, NOTE))]

    def page(self) -> str:
        """Return an HTML page."""
        columns = ("", *self.names)
        in_words = Markup("<strong>{}</strong> (best)")  # for screen readers
        title = "Metrics with 95 % confidence intervals"
        frozen = any(run.folder.is_frozen for run in self.runs)
        kind = "runs" if frozen else self.runs[0].kind
        return render(
            Page(
                kicker="nearkin compare",
                title=f"{len(self.names)} {kind} compared",
                lead=", ".join(self.names),
                sections=(
                    ("Findings", (Findings(self.notes),)),
                    ("Metrics", (Table(title, columns, self._metric_rows(in_words), NOTE),)),
                    ("Settings", (Table("Different settings", columns, self._setting_rows()),)),
                    ("Training curves", tuple(self._curves())),
                ),
            )
        )

    def _metric_rows(self, best: str) -> tuple[tuple[str, ...], ...]:
        return tuple(row for metric in self.metrics for row in metric.rows(best))

    def _setting_rows(self) -> tuple[tuple[str, ...], ...]:
        return tuple((name, *map(_short, values)) for name, values in self.settings.items())

    def _curves(self) -> Iterator[Chart]:
        """Yield the curves of trainings, in as few charts as hold them."""
        if self.runs[0].kind != TRAININGS:
            return
        curves = [training_curves(run.folder) for run in self.runs]
        # The losses of different methods do not compare.
        for column in ["knn", "effective_rank"] + ["loss"] * ("method" not in self.settings):
            named = zip(self.names, curves, strict=True)
            charts = [(name, of[column]) for name, of in named if column in of]
            for start in range(0, len(charts), MAX_LINES):
                some = charts[start : start + MAX_LINES]
                lines = {name: chart.series[chart.title] for name, chart in some}
                yield replace(some[0][1], series=lines)


def _short(setting: str) -> str:
    """Without the folders of a Python file, and with six digits of a fraction."""
    if ".py:" in setting:
        return Path(setting).name
    return f"{float(setting):.6g}" if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", setting) else setting


def side_by_side(runs: Sequence[FinishedRun]) -> Comparison:
    """Compare runs of one kind."""
    from_first = {KNN: _knn_differences(runs)}
    metrics = tuple(
        ComparedMetric(
            name, tuple(run.metrics.get(name) for run in runs), from_first.get(name, ())
        )
        for name in dict.fromkeys(name for run in runs for name in run.metrics)
    )
    settings = {
        name: tuple(run.settings.get(name, "-") for run in runs)
        for name in dict.fromkeys(name for run in runs for name in run.settings)
    }
    if len({run.folder.kind for run in runs}) > 1:  # most settings of one kind are not of others
        settings = {name: of for name, of in settings.items() if name in WHAT or "-" not in of}
    different = {
        name: values for name, values in settings.items() if len(set(values)) > 1 or name == "seed"
    }
    return Comparison(tuple(runs), metrics, different, tuple(_notes(runs, metrics)))


def _knn_differences(runs: Sequence[FinishedRun]) -> tuple[Difference | None, ...]:
    """Compare kNN top-1 with the highest, where all have embeddings of the same test images."""
    if (
        {run.kind for run in runs} != {TRAININGS}
        or len({(run.images, run.split) for run in runs}) > 1
        or not all(KNN in run.metrics and run.folder.embeddings.exists() for run in runs)
        or not all(run.metrics[KNN].compares_with(runs[0].metrics[KNN]) for run in runs)
    ):
        return ()
    tables = [_train_and_test(run.folder.embeddings) for run in runs]
    scored = [(test.paths, test.class_names.tolist()) for _, test in tables]
    if any(each != scored[0] for each in scored) or not (tables[0][1].labels != UNLABELED).any():
        return ()
    metrics = [knn(*pair)[:1] for pair in tables]
    first = max(range(len(runs)), key=lambda row: metrics[row][0].value)

    def from_first(row: int) -> Difference | None:
        if row == first:
            return None
        both = {"encoder": row, "first": first}
        compared = differences(
            {name: tables[each] for name, each in both.items()},
            {name: metrics[each] for name, each in both.items()},
        )
        return compared["first"][0]

    return tuple(map(from_first, range(len(runs))))


def _train_and_test(path: Path) -> tuple[Embeddings, Embeddings]:
    """Return both parts of a run's embeddings, without the table that they are from."""
    stored = open_table(path).read()
    if not np.isin(stored.splits, ("train", "test")).any():
        raise CheckpointError(f"{path} does not say what is held out; {AGAIN}")
    return divided(stored, stored.splits)[0]


def _notes(runs: Sequence[FinishedRun], metrics: Sequence[ComparedMetric]) -> Iterator[str]:
    if len({run.images for run in runs}) > 1:
        yield "The runs are on different images: metrics do not compare, and no best is marked."
        return
    if len({run.split for run in runs}) > 1:
        yield (
            "The runs hold out different images, so differences are partly due to the split, and "
            "a test image of one run may be a training image of another."
        )
    files = [run.folder.embeddings for run in runs if run.kind == TRAININGS]
    labels = [stored_labels(file) for file in files if file.exists()]
    if any(each.get(path, label) != label for each in labels for path, label in labels[0].items()):
        yield "Images had other labels in some runs: metrics by labels do not compare."
    if other := ", ".join(metric.name for metric in metrics if not metric.comparable):
        yield f"Measured by different protocols, so these do not compare: {other}."
