"""What a number of an evaluation is: a value, its interval and its protocol; and a difference."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from nearkin.errors import DataError
from nearkin.metrics.intervals import Groups, Interval, paired_interval, score_interval

Setting = str | int | float
Protocol = Mapping[str, Setting]
"""How a number was measured: all that two numbers must have in common to be compared.

`method` comes first, a phrase. A number of things stands under their name, as in `training images:
1437`; other values under the name of a setting, as in `temperature: 0.07`.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Which images a classifier got right: what two are compared by, image by image."""

    rows: Int[np.ndarray, " n"]  # Positions of the images that were scored, among all test images
    correct: Bool[np.ndarray, " n"]
    groups: Groups = None  # Of these images


@dataclass(frozen=True, slots=True)
class Metric:
    """A number measured on images, with its 95 % confidence interval and its protocol."""

    name: str
    value: float
    low: float | None  # Lower end of the interval; None if the number has none
    high: float | None
    n: int  # Number of images that it is of
    effective_n: float | None  # Independent images that the interval is that of, if it is of some
    protocol: Protocol
    chosen: Protocol = field(default_factory=dict[str, Setting])
    """What was found on the way, such as a regularization; it may differ where numbers compare."""
    meaning: str = ""  # What the number says, a sentence for readers of a report
    outcome: Outcome | None = field(default=None, compare=False, repr=False)
    """Of a share of images that are right; not kept in JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `Metric(**values)` is the metric again, without its outcome."""
        names = ("name", "value", "low", "high", "n", "effective_n", "meaning")
        plain = {name: getattr(self, name) for name in names}
        return plain | {"protocol": dict(self.protocol), "chosen": dict(self.chosen)}

    @property
    def sentence(self) -> str:
        """The protocol in words, without a period."""
        described = {**self.protocol, **self.chosen}
        of, interval = str(described.pop("of", "images")), described.pop("interval", "")
        parts = [_phrase(name, value) for name, value in described.items()]
        text = ", ".join([*parts, f"{self.n} {of}"])
        if interval:
            text += f"; interval: {interval}"
        if self.effective_n is not None and round(self.effective_n) < self.n:
            text += f", of as many as {self.effective_n:.0f} independent images"
        return text

    def compares_with(self, other: "Metric") -> bool:
        """Whether both were measured in the same way, on as many images."""
        return (self.name, self.n, self.protocol) == (other.name, other.n, other.protocol)

    def of(self, features: str) -> "Metric":
        """Return the same with a protocol that says what features it is of."""
        return replace(self, protocol={**self.protocol, "features": features})

    def __str__(self) -> str:
        """The value and its interval, to three digits."""
        if self.low is None or self.high is None:
            return _short(self.value)
        return f"{_short(self.value)} [{_short(self.low)}, {_short(self.high)}]"


def _phrase(name: str, value: str | int | float) -> str:
    if name == "method":
        return str(value)
    if isinstance(value, int) and len(name) > 1:
        return f"{value} {name}"
    return f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value}"


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def share(
    name: str,
    correct: Bool[np.ndarray, " n"] | Float[np.ndarray, " n"],
    protocol: Protocol,
    *,
    groups: Groups = None,
    rows: Int[np.ndarray, " n"] | None = None,
    chosen: Protocol | None = None,
    meaning: str = "",
) -> Metric:
    """Return the share of images that are right, or the mean of a score from 0 to 1 of each.

    The interval is that of `score_interval`. `rows` are the positions of these images among all
    test images; None for all of them.
    """
    n, values = len(correct), correct.astype(np.float64)
    rows = np.arange(n) if rows is None else rows
    metric = with_interval(
        name, float(values.mean()) if n else 0.0, score_interval(values, groups), protocol,
        kind="Wilson", n=n, groups=groups, chosen=chosen, meaning=meaning,
    )  # fmt: skip
    if correct.dtype != bool:
        return metric
    return replace(metric, outcome=Outcome(rows, correct, groups))


def with_interval(
    name: str,
    value: float,
    interval: Interval,
    protocol: Protocol,
    *,
    kind: str,
    n: int,
    groups: Groups = None,
    chosen: Protocol | None = None,
    meaning: str = "",
) -> Metric:
    """Return a metric whose protocol names the kind of its interval, and what that leaves out."""
    how = kind if groups is not None else f"{kind}, images taken as independent"
    low, high = min(interval.low, value), max(interval.high, value)
    whole = {**protocol, "interval": how}
    effective = interval.effective_n and round(interval.effective_n, 1)
    return Metric(name, value, low, high, n, effective, whole, chosen or {}, meaning)


@dataclass(frozen=True, slots=True)
class Difference:
    """How two classifiers differ that were scored on the same images: the first to the second."""

    name: str  # Of the metric
    first: float  # Accuracies
    second: float
    low: float  # The 95 % interval of their difference
    high: float
    n: int  # Images that both were scored on
    effective_n: float | None  # Independent images that would tell as much

    @property
    def value(self) -> float:
        """The difference."""
        return self.first - self.second

    @property
    def clear(self) -> int:
        """1 if the first is clearly higher, -1 if it is clearly lower, else 0."""
        return (self.low > 0) - (self.high < 0)

    def __str__(self) -> str:
        """The difference and its interval, with signs."""
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def difference(first: Metric, second: Metric, variance: float = 0.0) -> Difference:
    """Compare two shares of right images, image by image.

    `variance` is that of the difference from what is not the sampling of these images.

    Raises:
        DataError: If they were not scored on the same images.
    """
    new, old = first.outcome, second.outcome
    if new is None or old is None or not np.array_equal(new.rows, old.rows):
        raise DataError(f"{first.name} was scored on different images")
    low, high, effective = paired_interval(
        new.correct & ~old.correct, old.correct & ~new.correct, new.groups, variance
    )
    return Difference(first.name, first.value, second.value, low, high, len(new.rows), effective)
