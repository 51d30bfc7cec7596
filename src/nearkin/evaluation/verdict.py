"""An encoder against others, image by image: its baselines, its teacher, and its start.

Whether training helped is decided by one metric, so that no second one can be looked at until some
difference shows: kNN top-1, for which nothing is trained. Without labels it is view retrieval,
which can only tell of harm: it is what contrastive methods are trained for, and says nothing about
classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from nearkin.evaluation.embeddings import Pair
from nearkin.evaluation.metrics import KNN, knn_refits
from nearkin.metrics.intervals import jackknife
from nearkin.metrics.metric import Difference, Metric, difference

Verdict = Literal["helped", "no difference", "worse", "unknown"]
Tables = Mapping[str, Pair]
"""Training and test embeddings, by table: the encoder's first, then `start` and others."""
Metrics = Mapping[str, Sequence[Metric]]
"""What was measured of each table."""

WITHOUT_LABELS: Final = "view retrieval"  # The metric that can tell of harm where there are none
COMPARED: Final = (KNN, "linear probe", WITHOUT_LABELS)
MATTERS: Final = 0.01  # The smallest difference that counts, however clear it is: a convention
SAYS: Final[Mapping[Verdict, str]] = {
    "helped": "helped",
    "no difference": "made no difference",
    "worse": "made it worse",
    "unknown": "cannot be known without labeled test images",
}
COLLAPSED: Final = 0.1  # Share of the start's spread below which features have collapsed
SPREAD: Final = ("effective rank", "feature std")  # Metrics that a collapse brings near 0
PROTOCOL: Final = (
    "paired over the same images, score interval of Tango 1998 with the effective number of "
    "images in groups and, for kNN, the jackknife variance of its bank; it covers the sampling of "
    "images, not the seed of the training"
)


def differences(tables: Tables, metrics: Metrics) -> dict[str, tuple[Difference, ...]]:
    """Compare the first table with each other one, by those metrics of `COMPARED` that both have.

    Raises:
        DataError: If two were not scored on the same images.
    """
    shares = {
        table: {metric.name: metric for metric in column if metric.outcome is not None}
        for table, column in metrics.items()
    }
    first, *others = metrics
    refits = {
        table: knn_refits(*tables[table]).astype(np.float64)
        for table, of in shares.items()
        if others and KNN in of
    }

    def bank_variance(other: str) -> float:
        """Variance of a difference of kNN from which training images happen to be there."""
        if len(tables[first][0]) == len(tables[other][0]):
            return jackknife(refits[first] - refits[other])
        # One bank is a part of the other, as of raw pixels; they are taken as independent.
        return jackknife(refits[first]) + jackknife(refits[other])

    def compared(other: str, name: str) -> Difference:
        """One difference, which is exactly 0 where both are the same encoder."""
        variance = bank_variance(other) if name == KNN else 0.0
        found = difference(shares[first][name], shares[other][name], variance)
        parts = zip(tables[first], tables[other], strict=True)
        same = all(np.array_equal(mine.vectors, theirs.vectors) for mine, theirs in parts)
        return replace(found, low=0.0, high=0.0) if same and not found.value else found

    return {
        other: tuple(
            compared(other, name)
            for name in COMPARED
            if name in shares[first] and name in shares[other]
        )
        for other in others
    }


def has_collapsed(metrics: Metrics) -> bool:
    """Whether the features of the first table have collapsed, those of the start being spread."""
    new, old = (
        {m.name: m.value for m in metrics[name]} for name in (next(iter(metrics)), "start")
    )
    return any(
        name in new and name in old and new[name] < COLLAPSED * old[name] for name in SPREAD
    )


def sign(of: Difference) -> int:
    """1 if the first is better, -1 if it is worse, 0 if that is not clear or too little."""
    # Rounded: 0.35 - 0.34 is less than 0.01 in binary.
    return of.clear if round(abs(of.value), 9) >= MATTERS else 0


@dataclass(frozen=True, slots=True)
class StartComparison:
    """An encoder beside the start of its training, and the verdict."""

    differences: tuple[Difference, ...]
    collapsed: bool  # Whether its features have collapsed, those of the start being spread

    @property
    def decisive(self) -> Difference | None:
        """The difference that decides, if there is any."""
        by_name = {each.name: each for each in self.differences}
        return by_name.get(KNN, by_name.get(WITHOUT_LABELS))

    @property
    def verdict(self) -> Verdict:
        """What training has done."""
        decisive = self.decisive
        # An interval of width 0 is that of the start itself: nothing differs, with labels or not.
        if decisive is not None and (decisive.name == KNN or decisive.low == decisive.high):
            signs: Mapping[int, Verdict] = {1: "helped", 0: "no difference", -1: "worse"}
            return signs[sign(decisive)]
        lost = decisive is not None and sign(decisive) < 0
        return "worse" if lost or self.collapsed else "unknown"

    @property
    def text(self) -> str:
        """The verdict in words, with the numbers behind it."""
        verdict, decisive = self.verdict, self.decisive
        collapse = ["and the features have collapsed"] if self.collapsed else []
        if decisive is None:
            return ", ".join([SAYS[verdict], *collapse])
        text = f"{SAYS[verdict]}: {_beside_start(decisive)}"
        negligible = decisive.low > -MATTERS and decisive.high < MATTERS
        if verdict == "no difference" and not negligible:
            text += (
                f"; {decisive.n:,} test images cannot tell whether it is "
                f"{decisive.low:+.3f} or {decisive.high:+.3f}"
            )
        if decisive.name == WITHOUT_LABELS:
            text += f", so an image is recognized from another view of it {_often(decisive)}"
        return ", ".join([text, *collapse])

    def findings(self) -> list[str]:
        """What else the metrics tell, a sentence each."""
        decisive = self.decisive
        others = [each for each in self.differences if each is not decisive]
        findings = [f"{_meaning(each)}: {_beside_start(each)}." for each in others]
        if decisive is not None:
            findings.append(
                f"The interval covers the sampling of the {decisive.n:,} images, but not the "
                "seed of the training: another seed may end elsewhere."
            )
        return findings

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; the differences are beside them."""
        return {
            "verdict": self.verdict,
            "text": self.text,
            "decided_by": self.decisive and self.decisive.name,
            "collapsed": self.collapsed,
            "smallest_difference": MATTERS,
            "protocol": PROTOCOL,
        }

    def line(self, start: Path | None = None) -> str:
        """Return the verdict as the last line of a log; `start` is the file of the start."""
        advice = f"; use the start: {start}" if start and self.verdict == "worse" else ""
        return f"verdict  {self.text}{advice}"


def _beside_start(of: Difference) -> str:
    return f"{of.name} {of.first:.3f} against {of.second:.3f} of the start ({of})"


def _often(of: Difference) -> str:
    return {1: "more often", 0: "as often as before", -1: "less often"}[sign(of)]


def _meaning(of: Difference) -> str:
    """Return what a difference beside the decisive one says."""
    if of.name == WITHOUT_LABELS:
        return f"An image is recognized from another view of it {_often(of)}"
    changes = {1: "is higher", 0: "is not clearly different", -1: "is lower"}
    return f"The accuracy of a {of.name} {changes[sign(of)]}"


def kept(of: Difference) -> str:
    """Say how much of its teacher's accuracy a student keeps; empty where a teacher has none."""
    if not of.second or of.name == WITHOUT_LABELS:
        return ""
    return (
        f"keeps {of.first / of.second:.3f} of its teacher's {of.name}: {of.first:.3f} of "
        f"{of.second:.3f} ({of}, {of.n:,} test images)"
    )
