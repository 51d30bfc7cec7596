"""Whether training helped: an encoder against the one it started from, image by image.

One measure decides, so that no second one can be looked at until some difference shows: kNN top-1,
for which nothing is trained. Without labels it is view retrieval, which can only tell of harm: it
is what contrastive methods are trained for, and says nothing about classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Int

from nearkin.errors import DataError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.measures import Measure, knn_refits
from nearkin.measures.intervals import jackknife, paired_difference

Verdict = Literal["helped", "no difference", "worse", "unknown"]

DECISIVE: Final = "kNN top-1"  # The measure that decides where there are labels
WITHOUT_LABELS: Final = "view retrieval"  # The measure that can tell of harm where there are none
MATTERS: Final = 0.01  # The smallest difference that counts, however clear it is: a convention
SAYS: Final[Mapping[Verdict, str]] = {
    "helped": "helped",
    "no difference": "made no difference",
    "worse": "made it worse",
    "unknown": "cannot be known without labeled test images",
}
COLLAPSED: Final = 0.1  # Share of the start's spread below which features have collapsed
SPREAD: Final = ("effective rank", "feature std")  # Measures that a collapse brings near 0
PROTOCOL: Final = (
    "paired over the same test images, score interval of Tango 1998 with the design effect of "
    "groups and, for kNN, the jackknife variance of its bank; it covers the sampling of images, "
    "not the seed of the training"
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A measure of two encoders on the same images, and by how much they differ."""

    measure: str
    encoder: float  # Value of the encoder
    start: float  # Value of the encoder that training started from
    difference: float
    low: float  # Ends of the 95 % confidence interval of the difference
    high: float
    images: int  # Number of images that both were scored on

    @property
    def sign(self) -> int:
        """1 if the encoder is better, -1 if it is worse, 0 if that is not clear or too little."""
        if abs(self.difference) < MATTERS or self.low <= 0 <= self.high:
            return 0
        return 1 if self.difference > 0 else -1

    @property
    def negligible(self) -> bool:
        """Whether it is clear that the difference is too little to matter."""
        return self.low > -MATTERS and self.high < MATTERS

    def __str__(self) -> str:
        """The two values, their difference and its interval."""
        return (
            f"{self.measure} {self.encoder:.3f} against {self.start:.3f} of the start "
            f"({self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}])"
        )


@dataclass(frozen=True, slots=True)
class StartComparison:
    """An encoder beside the start of its training, and the verdict."""

    differences: tuple[Difference, ...]
    collapsed: bool  # Whether its features have collapsed, those of the start being spread

    @property
    def decisive(self) -> Difference | None:
        """The difference that decides, if there is any."""
        by_name = {each.measure: each for each in self.differences}
        return by_name.get(DECISIVE, by_name.get(WITHOUT_LABELS))

    @property
    def verdict(self) -> Verdict:
        """What training has done."""
        decisive = self.decisive
        if decisive is not None and decisive.measure == DECISIVE:
            signs: Mapping[int, Verdict] = {1: "helped", 0: "no difference", -1: "worse"}
            return signs[decisive.sign]
        lost = decisive is not None and decisive.sign < 0
        return "worse" if lost or self.collapsed else "unknown"

    @property
    def text(self) -> str:
        """The verdict in words, with the numbers behind it."""
        verdict, decisive = self.verdict, self.decisive
        parts = [SAYS[verdict], *([str(decisive)] if decisive is not None else [])]
        if decisive is None:
            return ", ".join([*parts, *self._collapse()])
        text = ": ".join(parts)
        if verdict == "no difference" and not decisive.negligible:
            text += (
                f"; {decisive.images:,} test images cannot tell whether it is "
                f"{decisive.low:+.3f} or {decisive.high:+.3f}"
            )
        if decisive.measure == WITHOUT_LABELS:
            text += f", so an image is recognized from another view of it {_often(decisive)}"
        return ", ".join([text, *self._collapse()])

    def _collapse(self) -> list[str]:
        return ["and the features have collapsed"] if self.collapsed else []

    def findings(self) -> list[str]:
        """What else the measures tell, a sentence each."""
        decisive = self.decisive
        others = [each for each in self.differences if each is not decisive]
        findings = [f"{_capital(_meaning(each))}: {each}." for each in others]
        if decisive is not None:
            findings.append(
                f"The interval covers the sampling of images, {decisive.images:,} of them for the "
                "test, but not the seed of the training: another seed may end elsewhere."
            )
        return findings

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "verdict": self.verdict,
            "text": self.text,
            "decided_by": self.decisive and self.decisive.measure,
            "differences": [asdict(difference) for difference in self.differences],
            "collapsed": self.collapsed,
            "smallest_difference": MATTERS,
            "protocol": PROTOCOL,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StartComparison":
        """Return what `to_dict` has made plain."""
        return cls(tuple(Difference(**x) for x in values["differences"]), values["collapsed"])

    def line(self, start: Path | None = None) -> str:
        """Return the verdict as the last line of a log; `start` is the file of the start."""
        advice = f"; use the start: {start}" if start and self.verdict == "worse" else ""
        return f"verdict  {self.text}{advice}"


def stored_comparison(summary: Mapping[str, Any]) -> StartComparison | None:
    """Return the comparison with the start that summary.json holds, if training had one."""
    stored = summary.get("comparison")
    return StartComparison.from_dict(stored) if stored else None


def _often(difference: Difference) -> str:
    return {1: "more often", 0: "as often as before", -1: "less often"}[difference.sign]


def _meaning(difference: Difference) -> str:
    """Return what a difference beside the decisive one says."""
    if difference.measure == WITHOUT_LABELS:
        return f"an image is recognized from another view of it {_often(difference)}"
    changes = {1: "is higher", 0: "is not clearly different", -1: "is lower"}
    return f"the accuracy of a {difference.measure} {changes[difference.sign]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


Tables = Mapping[str, tuple[Embeddings, Embeddings]]
"""Training and test embeddings, by table: `encoder`, `start`, and others."""


def compare_with_start(
    tables: Tables, measures: Mapping[str, Sequence[Measure]], *, k: int
) -> StartComparison | None:
    """Compare an encoder with its start, if that is among the tables that were measured.

    Arguments and errors are those of `differences`.
    """
    if "start" not in tables:
        return None
    new, old = ({one.name: one for one in measures[name]} for name in ("encoder", "start"))
    collapsed = any(
        name in new and name in old and new[name].value < COLLAPSED * old[name].value
        for name in SPREAD
    )
    return StartComparison(differences(tables, measures, "start", k=k), collapsed)


def differences(
    tables: Tables, measures: Mapping[str, Sequence[Measure]], other: str, *, k: int
) -> tuple[Difference, ...]:
    """Compare the table `encoder` with another one, by each share of right images.

    Args:
        tables: Features of the same images by each encoder.
        measures: What was measured of each table.
        other: Name of the other table.
        k: Number of neighbors of kNN.

    Raises:
        DataError: If the two were not scored on the same images.
    """
    others = {one.name: one for one in measures[other]}
    groups = tables["encoder"][1].groups
    compared = []
    for one in measures["encoder"]:
        if one.outcome is not None and one.name in others:
            variance = _bank_variance(tables, other, k) if one.name == DECISIVE else 0.0
            compared.append(_difference(one, others[one.name], groups, variance))
    return tuple(compared)


def _bank_variance(tables: Tables, other: str, k: int) -> float:
    """Variance of a difference of kNN from which training images happen to be there."""
    new, old = (knn_refits(*tables[name], k=k) for name in ("encoder", other))
    return jackknife(new.astype(np.float64) - old)


def _difference(
    one: Measure, other: Measure, groups: Int[np.ndarray, " n"] | None, variance: float
) -> Difference:
    """Compare one measure; `variance` is what the sampling of test images leaves out."""
    new, old = one.outcome, other.outcome
    if new is None or old is None or not np.array_equal(new.rows, old.rows):
        raise DataError("the two encoders were scored on different images")
    members = None if groups is None else groups[new.rows]
    value, low, high = paired_difference(
        new.correct, old.correct, groups=members, variance=variance
    )
    return Difference(one.name, one.value, other.value, value, low, high, len(new.rows))
