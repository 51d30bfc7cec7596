"""All measures of an encoder beside those of its floors."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nearkin.evaluation.measure import Measure

TITLES = {"untrained": "untrained encoder", "pixels": "raw pixels"}
"""Columns that are headed by another name than their own."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was found about each table of features: `encoder`, `untrained`, `pixels`."""

    sizes: Mapping[str, int]
    """Number of images of each split."""
    measures: Mapping[str, list[Measure]]
    """By table of features."""
    left_out: Mapping[str, str]
    """What could not be measured, and why."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "sizes": dict(self.sizes),
            "measures": {
                table: {measure.name: asdict(measure) for measure in measures}
                for table, measures in self.measures.items()
            },
            "left_out": dict(self.left_out),
        }

    def rows(self) -> list[list[str]]:
        """A table as text: a heading, then a row per measure, a column per table of features."""
        columns = [{m.name: str(m) for m in measures} for measures in self.measures.values()]
        names = dict.fromkeys(name for column in columns for name in column)
        heading = ["measure", *(TITLES.get(table, table) for table in self.measures)]
        return [heading, *([name, *(c.get(name, "-") for c in columns)] for name in names)]
