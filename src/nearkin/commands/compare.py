"""`nearkin compare`: runs side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nearkin.errors import OutputError, UsageError
from nearkin.evaluation.measure import Measure
from nearkin.report.finished import DISCOVERIES, TRAININGS, Finished, finished
from nearkin.report.from_training import training_curves
from nearkin.report.page.report import Chart, Table
from nearkin.report.page.sections import comparison_page
from nearkin.tables import replace_text

LINES: Final = 4
"""In one chart; a page tells no more kinds of line apart."""
NOTE: Final = (
    "The best is marked where the next lies outside its 95 % interval. Intervals tell of the "
    "images that are scored; how much other seeds differ, only runs of other seeds tell."
)
OTHER_PICTURES: Final = (
    "The runs are on different images: their numbers do not compare, and no best is marked."
)


@dataclass(frozen=True)
class Compared:
    """A measure of all runs."""

    name: str
    of: tuple[Measure | None, ...]
    """That of each run, or nothing if it has none."""
    same_images: bool

    @property
    def alike(self) -> bool:
        """Whether it was found in the same way everywhere."""
        ways = {measure.protocol for measure in self.of if measure is not None}
        return self.same_images and len(ways) == 1

    @property
    def best(self) -> int | None:
        """The best run, if the interval of its value excludes the next."""
        ranked = sorted(
            (-measure.value, number)
            for number, measure in enumerate(self.of)
            if measure is not None and measure.low is not None
        )
        if len(ranked) < 2 or not self.alike:
            return None
        first = self.of[ranked[0][1]]
        assert first is not None
        assert first.low is not None
        return ranked[0][1] if -ranked[1][0] < first.low else None

    def cells(self) -> list[str]:
        """In words; the best begins with `*`."""
        said = ["-" if measure is None else str(measure) for measure in self.of]
        if self.best is not None:
            said[self.best] = f"*{said[self.best]}"
        return said


@dataclass(frozen=True)
class Comparison:
    """Some runs of one kind."""

    runs: tuple[Finished, ...]
    measures: tuple[Compared, ...]
    settings: Mapping[str, tuple[str, ...]]
    """Those that differ, by their name: that of each run."""
    notes: tuple[str, ...]
    """What to beware of, a sentence each."""

    @property
    def names(self) -> list[str]:
        """What the runs are called: their folders, or the whole paths if two are alike."""
        short = [run.folder.path.resolve().name for run in self.runs]
        return short if len(set(short)) == len(short) else [str(r.folder.path) for r in self.runs]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "runs": [
                {"name": name, "path": str(run.folder.path.resolve()), "seconds": run.seconds}
                for name, run in zip(self.names, self.runs, strict=True)
            ],
            "settings": {name: list(values) for name, values in self.settings.items()},
            "measures": [_plain(compared) for compared in self.measures],
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """For people."""
        rows = [["", *self.names]]
        rows += [[compared.name, *compared.cells()] for compared in self.measures]
        rows += [[name, *values] for name, values in self._settings()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return [*table, *(f"note: {note}" for note in (*self.notes, NOTE))]

    def page(self) -> str:
        """As HTML."""
        columns = ("", *self.names)
        measures = [(compared.name, *compared.cells()) for compared in self.measures]
        settings = Table("What differs", columns, tuple((n, *v) for n, v in self._settings()))
        return comparison_page(
            self.runs[0].kind,
            self.names,
            self.notes,
            Table("With 95 % intervals", columns, tuple(measures), NOTE),
            settings,
            self._curves(),
        )

    def _settings(self) -> list[tuple[str, tuple[str, ...]]]:
        """What differs, and the time that the runs took."""
        times = tuple(run.time for run in self.runs)
        return [*self.settings.items(), *([("time", times)] if any(times) else [])]

    def _curves(self) -> list[Chart]:
        if self.runs[0].kind != TRAININGS:
            return []
        curves = {
            name: training_curves(run.folder)
            for name, run in zip(self.names, self.runs, strict=True)
        }
        wanted = ["knn", "effective_rank"] + ["loss"] * ("method" not in self.settings)
        return [chart for column in wanted for chart in _together(column, curves)]


def _together(column: str, curves: Mapping[str, Mapping[str, Chart]]) -> list[Chart]:
    """Charts of one curve of several runs each."""
    some = {name: found[column] for name, found in curves.items() if column in found}
    names = list(some)
    return [
        Chart(
            chart.title,
            chart.x_label,
            chart.y_label,
            {name: some[name].series[chart.title] for name in names[start : start + LINES]},
            chart.note,
        )
        for start in range(0, len(names), LINES)
        for chart in [some[names[start]]]
    ]


def _plain(compared: Compared) -> dict[str, Any]:
    values = [
        None if m is None else {"value": m.value, "low": m.low, "high": m.high, "how": m.protocol}
        for m in compared.of
    ]
    return {"name": compared.name, "best": compared.best, "values": values}


def compare(runs: Sequence[str | Path], *, output: str | Path | None = None) -> Comparison:
    """Put finished runs of one kind side by side.

    Args:
        runs: Run folders, trainings or discoveries.
        output: Also write a page to this file.

    Raises:
        UsageError: If these are no two runs of one kind, or one of them is not finished.
        OutputError: If the page cannot be written.
    """
    if len({Path(run).resolve() for run in runs}) < max(2, len(runs)):
        raise UsageError("nothing to compare; give two runs or more, each of them once")
    found = [finished(run) for run in runs]
    kinds = {run.kind: run.folder.path for run in found}
    if len(kinds) > 1:
        raise UsageError(
            f"{kinds[TRAININGS]} is a training and {kinds[DISCOVERIES]} a discovery; give runs of "
            "one kind"
        )
    names = dict.fromkeys(name for run in found for name in run.measures)
    same = len({run.images for run in found}) == 1
    measures = tuple(
        Compared(name, tuple(run.measures.get(name) for run in found), same) for name in names
    )
    notes = tuple(_notes(found, measures)) if same else (OTHER_PICTURES,)
    made = Comparison(tuple(found), measures, _differing(found), notes)
    if output is not None:
        try:
            replace_text(Path(output), made.page())
        except OSError as error:
            raise OutputError(
                f"cannot write {output}: {error.strerror}; choose another -o"
            ) from error
    return made


def _differing(runs: Sequence[Finished]) -> dict[str, tuple[str, ...]]:
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: tuple(run.settings.get(name, "-") for run in runs) for name in names}
    return {name: of for name, of in values.items() if len(set(of)) > 1 or name == "seed"}


def _notes(runs: Sequence[Finished], measures: Sequence[Compared]) -> list[str]:
    notes = []
    if len({run.division for run in runs}) > 1:
        notes.append(
            "The runs hold out different images: part of the differences is that, and an image "
            "that one is scored on another may have been trained on."
        )
    other = ", ".join(measure.name for measure in measures if not measure.alike)
    if other:
        notes.append(f"Not measured in the same way everywhere, so no best is marked: {other}.")
    return notes
