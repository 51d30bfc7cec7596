"""Finished runs side by side: what their files tell, as text, as plain values, and as a page."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
from markupsafe import Markup

from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import TITLES
from nearkin.evaluation.measures import Measure, knn, num_neighbors
from nearkin.evaluation.table import read_all
from nearkin.evaluation.verdict import DECISIVE, differences
from nearkin.files import usable
from nearkin.report.encoder_report import training_curves
from nearkin.report.page.html import BLOCKS, Chart, document, text
from nearkin.report.page.sections import Table, line_charts
from nearkin.run.folder import RunFolder
from nearkin.text import aligned
from nearkin.types import UNKNOWN

TRAININGS: Final = "trainings"
DISCOVERIES: Final = "discoveries"
CLASSIFICATIONS: Final = "classifications"
KINDS: Final = {
    "training": TRAININGS,
    "frozen encoder": TRAININGS,  # beside which they say whether training helped
    "discovery": DISCOVERIES,
    "classification": CLASSIFICATIONS,
}
"""What several runs of a kind are called."""
SUMMARY_SETTINGS: Final = ("novel", "nearkin", "torch", "python", "threads")
"""Entries of summary.json that count as settings."""
WHAT: Final = ("encoder", "method", "backbone", "init_from", "epochs")
"""Settings that say what a run is, beside runs that do not have them."""
FLOOR_MEASURES: Final = ("kNN top-1", "linear probe")  # measures whose floors are compared too
LOWER_IS_BETTER: Final = ("log-loss", "calibration error")  # measures whose best is not marked
Interval = tuple[float, float, float]
"""A value, and the ends of its interval."""
MAX_LINES: Final = 4  # in one chart: a page has no more line styles
NOTE: Final = (
    "The best is marked if its 95 % confidence interval excludes the next; for kNN top-1 of the "
    "same test images, if the paired intervals of the differences exclude 0. Intervals cover the "
    "sampling of images, not the random seed: for that, compare runs of several seeds."
)


@dataclass(frozen=True)
class FinishedRun:
    """A finished run."""

    folder: RunFolder
    kind: str  # One of `KINDS`
    settings: Mapping[str, str]
    measures: Mapping[str, Measure]
    images: str  # fingerprint of its images
    split: str  # fingerprint of which of them were held out
    seconds: float | None  # duration; None if the run was interrupted

    @property
    def time(self) -> str:
        """The duration as h:mm:ss, or ''."""
        return "" if self.seconds is None else str(timedelta(seconds=round(self.seconds)))


def read_finished(run: str | Path) -> FinishedRun:
    """Read a run from its files."""
    folder = RunFolder(Path(run))
    kind, (config, data) = KINDS[folder.kind], folder.any_settings()
    read = {TRAININGS: _of_training, DISCOVERIES: _of_discovery}.get(kind, _of_classification)
    with usable(folder.summary, "finish the run anew"):
        summary = folder.read_evaluated()
        measures = dict(read(summary)) if summary else {}
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
        measures=measures,
        images=images,
        split=split,
        seconds=_duration(folder.log),
    )


def _of_training(summary: Mapping[str, Any]) -> Iterator[tuple[str, Measure]]:
    for name, entry in summary["measures"]["encoder"].items():
        yield name, Measure(**entry)
    for floor, title in TITLES.items():
        for name in FLOOR_MEASURES:
            if name in (measures := summary["measures"].get(floor, {})):
                yield f"{title}: {name}", Measure(**measures[name])


def _of_discovery(summary: Mapping[str, Any]) -> Iterator[tuple[str, Measure]]:
    for approach, scores in summary["scores"].items():
        for entry in scores:
            prefix = "" if approach == "nearkin" else f"{approach}: "
            name = f"{prefix}{entry['name']}"
            yield name, Measure(**{**entry, "name": name})


def _of_classification(summary: Mapping[str, Any]) -> Iterator[tuple[str, Measure]]:
    for approach, measures in summary["measures"].items():
        for name, entry in measures.items():
            yield name if approach == "classifier" else f"{approach}: {name}", Measure(**entry)


def _duration(log: Path) -> float | None:
    """Seconds between the first and last line of the session that made the run."""
    sessions: list[list[str]] = []
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
        if " | writing " in line:
            sessions.append([])
        if sessions and line[:4].isdigit():
            sessions[-1].append(line)
    # Resuming a complete run adds a session that did nothing.
    working = [lines for lines in sessions if not any("already complete" in x for x in lines)]
    if not working or any("resuming after" in line for line in working[-1]):
        return None
    start, end = (datetime.fromisoformat(line[:19]) for line in (working[-1][0], working[-1][-1]))
    return (end - start).total_seconds()


@dataclass(frozen=True)
class ComparedMeasure:
    """A measure of several runs."""

    name: str
    values: tuple[Measure | None, ...]  # by run; None if it has none
    same_images: bool
    paired: tuple[Interval, ...] = ()
    """By run: how much worse the measure of the best is than that, image by image, where known."""

    @property
    def comparable(self) -> bool:
        """Whether all runs measured it by the same protocol on the same images."""
        protocols = {measure.protocol for measure in self.values if measure is not None}
        return self.same_images and len(protocols) == 1

    @property
    def best(self) -> int | None:
        """The best run, if the interval of its value excludes the next.

        Where the differences from it are known image by image, if these intervals exclude 0.
        """
        if self.paired:
            first = max(range(len(self.paired)), key=lambda run: self.paired[run][0])
            others = [high for run, (_, _, high) in enumerate(self.paired) if run != first]
            return first if max(others) < 0 else None
        ranked = sorted(
            (-measure.value, number, measure.low)
            for number, measure in enumerate(self.values)
            if measure is not None and measure.low is not None
        )
        if len(ranked) < 2 or not self.comparable or self.name.startswith(LOWER_IS_BETTER):
            return None
        (_, best, low), (next_value, *_) = ranked[:2]
        return best if -next_value < low else None

    def cells(self) -> list[str]:
        """Return the values as text; the best begins with `*`."""
        cells = ["-" if measure is None else str(measure) for measure in self.values]
        if self.best is not None:
            cells[self.best] = f"*{cells[self.best]}"
        return cells

    def difference_cells(self) -> list[str]:
        """Return how far each run is from the best, with a paired interval; that one is empty."""
        return [
            f"{value:+.3f} [{low:+.3f}, {high:+.3f}]" if (low, high) != (0, 0) else ""
            for value, low, high in self.paired
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        keys = ("value", "low", "high", "protocol")
        values = [m and {key: getattr(m, key) for key in keys} for m in self.values]
        plain = {"name": self.name, "best": self.best, "values": values}
        return plain | ({"paired": [list(each) for each in self.paired]} if self.paired else {})


def short_names(folders: Sequence[RunFolder]) -> list[str]:
    """Return the names of run folders, or whole paths if two are equal."""
    short = [folder.path.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder.path) for folder in folders]


@dataclass(frozen=True)
class Comparison:
    """Runs of one kind side by side."""

    runs: tuple[FinishedRun, ...]
    measures: tuple[ComparedMeasure, ...]
    settings: Mapping[str, tuple[str, ...]]  # those that differ, by name: the value of each run
    notes: tuple[str, ...]  # caveats, a sentence each

    @property
    def names(self) -> list[str]:
        """Folder names of the runs, or whole paths if two are equal."""
        return short_names([run.folder for run in self.runs])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "runs": [
                {"name": name, "path": str(run.folder.path.resolve()), "seconds": run.seconds}
                for name, run in zip(self.names, self.runs, strict=True)
            ],
            "settings": {name: list(values) for name, values in self.settings.items()},
            "measures": [measure.to_dict() for measure in self.measures],
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """Return an aligned text table and notes."""
        rows = [["", *self.names]]
        rows += self._measures()
        rows += [[name, *values] for name, values in self._settings()]
        return [*aligned(rows), *(f"note: {note}" for note in (*self.notes, NOTE))]

    def page(self) -> str:
        """Return an HTML page."""
        columns = ("", *self.names)
        measures = tuple((name, *map(_marked, cells)) for name, *cells in self._measures())
        title = "Measures with 95 % confidence intervals"
        rows = tuple((name, *values) for name, values in self._settings())
        settings = BLOCKS.results(Table("Different settings", columns, rows))
        return document(
            title=f"{len(self.names)} {self.runs[0].kind} compared",
            kicker="nearkin compare",
            lead=", ".join(self.names),
            sections=[
                ("Findings", BLOCKS.findings(self.notes)),
                ("Measures", BLOCKS.results(Table(title, columns, measures, NOTE))),
                ("Settings", settings),
                ("Training curves", line_charts(self._curves())),
            ],
        )

    def _measures(self) -> Iterator[list[str]]:
        for measure in self.measures:
            yield [measure.name, *measure.cells()]
            if measure.paired:
                yield [f"{measure.name}, from the best", *measure.difference_cells()]

    def _settings(self) -> list[tuple[str, tuple[str, ...]]]:
        times = tuple(run.time for run in self.runs)
        settings = [(name, tuple(map(_short, of))) for name, of in self.settings.items()]
        return settings + [("time", times)] * any(times)

    def _curves(self) -> list[Chart]:
        if self.runs[0].kind != TRAININGS:
            return []
        charts = {
            name: training_curves(run.folder)
            for name, run in zip(self.names, self.runs, strict=True)
        }
        # The losses of different methods do not compare.
        columns = ["knn", "effective_rank"] + ["loss"] * ("method" not in self.settings)
        return [chart for column in columns for chart in _merged(column, charts)]


def _short(setting: str) -> str:
    """Without the folders of a Python file, and with six digits of a fraction."""
    if ".py:" in setting:
        return Path(setting).name
    return f"{float(setting):.6g}" if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", setting) else setting


def _marked(cell: str) -> str:
    """Mark the best in words too, for screen readers."""
    if not cell.startswith("*"):
        return cell
    return Markup("<strong>{}</strong> (best)").format(text(cell.removeprefix("*")))


def _merged(column: str, charts: Mapping[str, Mapping[str, Chart]]) -> Iterator[Chart]:
    """One curve of several runs in as few charts as hold them."""
    curves = {name: of[column] for name, of in charts.items() if column in of}
    names = list(curves)
    for start in range(0, len(names), MAX_LINES):
        first = curves[names[start]]
        series = {
            name: curves[name].series[first.title] for name in names[start : start + MAX_LINES]
        }
        yield Chart(first.title, first.x_label, first.y_label, series, first.note)


def side_by_side(runs: Sequence[FinishedRun]) -> Comparison:
    """Compare runs of one kind."""
    names = dict.fromkeys(name for run in runs for name in run.measures)
    same_images = len({run.images for run in runs}) == 1
    paired = _paired_knn(runs) if same_images else ()
    measures = tuple(
        ComparedMeasure(
            name,
            tuple(run.measures.get(name) for run in runs),
            same_images,
            paired if name == DECISIVE else (),
        )
        for name in names
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
    return Comparison(tuple(runs), measures, different, tuple(_notes(runs, measures)))


def _paired_knn(runs: Sequence[FinishedRun]) -> tuple[Interval, ...]:
    """Differences of kNN top-1 from the best run, where all have embeddings of the same images."""
    values = [run.measures.get(DECISIVE) for run in runs]
    if (
        {run.kind for run in runs} != {TRAININGS}
        or len({run.split for run in runs}) > 1
        or len({measure and measure.protocol for measure in values}) > 1
        or not all(run.folder.embeddings.exists() for run in runs)
    ):
        return ()
    tables = [_train_and_test(read_all(run.folder.embeddings)) for run in runs]
    names, (_, first) = [[test.paths, test.class_names.tolist()] for _, test in tables], tables[0]
    if any(name != names[0] for name in names) or not (first.labels != UNKNOWN).any():
        return ()
    k = num_neighbors(len(tables[0][0].labeled()))
    measures = [[knn(train, test, k=k)] for train, test in tables]
    best = max(range(len(runs)), key=lambda run: measures[run][0].value)
    return tuple(
        _from_the_best(tables[run], tables[best], measures[run], measures[best], k)
        if run != best
        else (0.0, 0.0, 0.0)
        for run in range(len(runs))
    )


def _train_and_test(embeddings: Embeddings) -> tuple[Embeddings, Embeddings]:
    train, test = (embeddings.splits == split for split in ("train", "test"))
    return embeddings.subset(np.flatnonzero(train)), embeddings.subset(np.flatnonzero(test))


def _from_the_best(
    table: tuple[Embeddings, Embeddings],
    best: tuple[Embeddings, Embeddings],
    measures: list[Measure],
    of_best: list[Measure],
    k: int,
) -> Interval:
    tables, compared = {"encoder": table, "best": best}, {"encoder": measures, "best": of_best}
    (one,) = differences(tables, compared, "best", k=k)
    return one.difference, one.low, one.high


def _notes(runs: Sequence[FinishedRun], measures: Sequence[ComparedMeasure]) -> Iterator[str]:
    if len({run.images for run in runs}) > 1:
        yield "The runs are on different images: measures do not compare, and no best is marked."
        return
    if len({run.split for run in runs}) > 1:
        yield (
            "The runs hold out different images, so differences are partly due to the split, and "
            "a test image of one run may be a training image of another."
        )
    if other := ", ".join(measure.name for measure in measures if not measure.comparable):
        yield f"Different protocols, so no best is marked: {other}."
