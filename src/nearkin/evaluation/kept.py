"""How much of its teacher's accuracy a student keeps, on the same test images."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from nearkin.evaluation.measures import Measure
from nearkin.evaluation.verdict import Difference, Tables, differences

COMPARED: Final = ("kNN top-1", "linear probe")
PROTOCOL: Final = (
    "accuracy of the student over that of its teacher, paired over the same test images: the "
    "interval of the difference as in verdicts, over the teacher's accuracy as measured"
)


@dataclass(frozen=True, slots=True)
class KeptShare:
    """A student's accuracy as a share of its teacher's."""

    measure: str
    student: float
    teacher: float
    share: float
    low: float  # Ends of the 95 % confidence interval of the share
    high: float
    images: int  # Number of images that both were scored on

    def __str__(self) -> str:
        """The share, its interval, and the two accuracies."""
        return (
            f"keeps {self.share:.3f} [{self.low:.3f}, {self.high:.3f}] of its teacher's "
            f"{self.measure} ({self.student:.3f} of {self.teacher:.3f}, {self.images:,} test "
            "images)"
        )


def kept_shares(
    tables: Tables, measures: Mapping[str, Sequence[Measure]], *, k: int
) -> tuple[KeptShare, ...]:
    """Compare an encoder with its teacher, if that is among the tables that were measured.

    A teacher that is never right has no share to keep. `k` is the number of neighbors of kNN.
    """
    if "teacher" not in tables:
        return ()
    compared = differences(tables, measures, "teacher", k=k)
    return tuple(map(_share, (x for x in compared if x.measure in COMPARED and x.start > 0)))


def _share(difference: Difference) -> KeptShare:
    teacher = difference.start
    share, low, high = (
        max(0.0, 1 + x / teacher) for x in (difference.difference, difference.low, difference.high)
    )
    student = difference.encoder
    return KeptShare(difference.measure, student, teacher, share, low, high, difference.images)


def stored_shares(summary: Mapping[str, Any]) -> tuple[KeptShare, ...]:
    """Return the shares that summary.json holds, if the run had a teacher."""
    return tuple(KeptShare(**each) for each in summary.get("kept", {}).get("shares", []))


def plain_shares(shares: Iterable[KeptShare]) -> dict[str, Any]:
    """Plain values of shares, for JSON; empty without any."""
    plain = [asdict(share) for share in shares]
    return {"kept": {"shares": plain, "protocol": PROTOCOL}} if plain else {}
