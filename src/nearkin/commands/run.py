"""`Run`, a finished run: what the commands that make one return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nearkin.classification.outcome import lines as classification_lines
from nearkin.classifier.assignments import NUMBERS
from nearkin.discovery.report import lines as discovery_lines
from nearkin.encoders.encoder import Encoder, load
from nearkin.errors import UsageError
from nearkin.evaluation.evaluate import Evaluation
from nearkin.report.comparison import read_finished
from nearkin.result import Frame, Result, Row, Table
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv

if TYPE_CHECKING:
    from nearkin.commands.predict import PredictedClasses


@dataclass(frozen=True, repr=False)
class Run(Result):
    """A finished run. Every function that takes an encoder or a run folder takes it."""

    folder: RunFolder

    def __fspath__(self) -> str:
        """The run folder, for all that takes a path."""
        return str(self.path)

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def summary(self) -> Mapping[str, Any]:
        """All that was measured, as in summary.json."""
        return self.folder.read_summary()

    @property
    def metrics(self) -> Table:
        """A row per metric: its name, value, and the interval of 95 % confidence."""
        found = read_finished(self.path).metrics
        return Table(
            [
                {"metric": name, "value": each.value, "low": each.low, "high": each.high}
                for name, each in found.items()
            ]
        )

    @property
    def encoder(self) -> Encoder:
        """The encoder of the run, loaded; `nearkin.load` has more choices."""
        return load(self.path)

    @property
    def assignments(self) -> Table:
        """The rows of assignments.csv: the class of every image that was not learned from.

        Raises:
            UsageError: If the run is neither a discovery nor a classification.
        """
        if not self.folder.assignments.exists():
            raise UsageError(f"{self.path} has no classes; give a discovery or a classification")
        rows = map(dict[str, Any], read_csv(self.folder.assignments))
        return Table([row | {name: _number(row[name]) for name in NUMBERS} for row in rows])

    def predict(self, data: Any, **arguments: Any) -> "PredictedClasses":
        """Sort new images into the classes of the run; see `nearkin.predict`."""
        from nearkin.commands.predict import predict  # which needs what is here

        return predict(self, data, **arguments)

    def show(self, height: int = 900) -> Frame:
        """Return report.html in a frame, `height` pixels high, which a notebook shows.

        Raises:
            UsageError: If the run has no report, or one with files beside it.
        """
        if not self.folder.report.exists():
            raise UsageError(f"{self.path} has no report; `nearkin explore RUN --write` makes it")
        if '"perFile":' in self.folder.report.read_text(encoding="utf-8"):
            raise UsageError(
                f"{self.folder.report} has most images in files beside it, which a notebook "
                "cannot load; open it in a browser, or use `nearkin explore RUN`"
            )
        return Frame(self.folder.report, height)

    @override
    def to_dict(self) -> Mapping[str, Any]:
        """All that was measured, as in summary.json."""
        return self.summary

    @override
    def records(self) -> Sequence[Row]:
        """Those of `metrics`."""
        return self.metrics.rows

    @override
    def lines(self) -> list[str]:
        """Return the metrics as text, or what was discovered."""
        summary = self.summary
        if "clusters" in summary:
            return discovery_lines(summary)
        if summary.get("command") == "classify":
            return classification_lines(summary)
        return Evaluation.stored(summary, self.folder.start).lines()


def _number(cell: str) -> float | None:
    return float(cell) if cell else None
