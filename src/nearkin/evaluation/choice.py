"""Label-free model selection: encoders ranked by what their features look like."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

from nearkin.choices import Criterion
from nearkin.result import Result, Row
from nearkin.text import aligned

CRITERIA: Final[Mapping[Criterion, str]] = {
    "effective-rank": "effective rank",
    "agreement": "neighbor agreement",
    "view-retrieval": "view retrieval",
}
"""The metric of each criterion; more is better."""


@dataclass(frozen=True, repr=False)
class Ranking(Result):
    """Encoders in the order of a criterion, the most promising first; no label was read."""

    by: Criterion
    values: Mapping[str, Mapping[str, float]]  # By encoder: its metrics by name, those it has
    protocol: str  # What they were measured on, of all alike
    notes: Sequence[str] = ()

    @property
    def order(self) -> list[str]:
        """Names of the encoders; those without the metric come last, equals as given."""
        name = CRITERIA[self.by]
        return sorted(self.values, key=lambda each: -self.values[each].get(name, float("-inf")))

    @property
    def best(self) -> str:
        """The first of the order."""
        return self.order[0]

    @override
    def records(self) -> list[Row]:
        """A row per encoder: its name and metrics."""
        return [{"name": name, **self.values[name]} for name in self.order]

    @override
    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        order = [{"name": name, "metrics": dict(self.values[name])} for name in self.order]
        return {"by": self.by, "order": order, "protocol": self.protocol, "notes": [*self.notes]}

    @override
    def lines(self) -> list[str]:
        """Return an aligned text table; the first column of metrics is the criterion."""
        chosen = CRITERIA[self.by]
        metrics = sorted(CRITERIA.values(), key=lambda name: name != chosen)
        rows = [
            [name, *(f"{of[metric]:.3f}" if metric in of else "-" for metric in metrics)]
            for name, of in ((name, self.values[name]) for name in self.order)
        ]
        notes = (f"measured on {self.protocol}", *self.notes)
        return [
            *aligned([[f"by {chosen}", *metrics], *rows]),
            *(f"note: {note}" for note in notes),
        ]
