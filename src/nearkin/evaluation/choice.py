"""Choice without labels: encoders ranked by what their features look like."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nearkin.choices import Criterion
from nearkin.text import aligned

CRITERIA: Final[Mapping[Criterion, tuple[str, Callable[[float], float]]]] = {
    "effective-rank": ("effective rank", float),
    "rankme": ("RankMe", float),
    "agreement": ("neighbor agreement", float),
    "view-retrieval": ("view retrieval", float),
    "lidar": ("LiDAR", float),
    "alpha-req": ("alpha-ReQ", lambda alpha: -abs(alpha - 1)),
}
"""The measure of each criterion, and how good its value is: alpha-ReQ is best at 1."""


@dataclass(frozen=True)
class Ranking:
    """Encoders in the order of a criterion, the most promising first; no label was read."""

    by: Criterion
    values: Mapping[str, Mapping[str, float]]  # By encoder: its measures by name, those it has
    protocol: str  # What they were measured on, of all alike
    notes: Sequence[str] = ()

    @property
    def order(self) -> list[str]:
        """Names of the encoders; those without the measure come last, equals as given."""
        name, quality = CRITERIA[self.by]
        key = {
            encoder: quality(of[name]) if name in of else float("-inf")
            for encoder, of in self.values.items()
        }
        return sorted(key, key=lambda encoder: -key[encoder])

    @property
    def best(self) -> str:
        """The first of the order."""
        return self.order[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        order = [{"name": name, "measures": dict(self.values[name])} for name in self.order]
        return {"by": self.by, "order": order, "protocol": self.protocol, "notes": [*self.notes]}

    def lines(self) -> list[str]:
        """Return an aligned text table; the first column of measures is the criterion."""
        chosen = CRITERIA[self.by][0]
        measures = sorted((name for name, _ in CRITERIA.values()), key=lambda name: name != chosen)
        rows = [
            [name, *(f"{of[measure]:.3f}" if measure in of else "-" for measure in measures)]
            for name, of in ((name, self.values[name]) for name in self.order)
        ]
        notes = (f"measured on {self.protocol}", *self.notes)
        return [
            *aligned([[f"by {chosen}", *measures], *rows]),
            *(f"note: {note}" for note in notes),
        ]
