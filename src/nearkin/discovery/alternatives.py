"""The ends of the interval of the number of novel classes: what the last stage finds with them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from nearkin.discovery.clusters import class_silhouettes
from nearkin.metrics.metric import Metric
from nearkin.report.page.blocks import Table


@dataclass(frozen=True)
class Alternative:
    """A number of novel classes, in figures that need no truth."""

    novel: int
    sizes: tuple[int, ...]  # Unlabeled images of each novel class, largest first
    silhouette: float | None
    """Mean over the classes that have one, from -1 to 1, by the features of the frozen encoder:
    those that are learned differ from number to number. None with fewer than two classes."""
    seed_agreement: float | None
    """Mean adjusted Rand index of two trainings that differ in the seed; None if trained once."""
    known: Metric | None  # Accuracy on held-out images of known classes; None without any

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"known": self.known and self.known.to_dict()}


def describe(
    features: Float[np.ndarray, "images dim"],
    by_seed: Sequence[Int[np.ndarray, " images"]],
    *,
    num_known: int,
    num_novel: int,
    known: Metric | None,
) -> Alternative:
    """Describe what was found with a number of novel classes.

    Args:
        features: Of all unlabeled images, by the frozen encoder.
        by_seed: Their classes by each seed, novel ones from `num_known` on; the first is shown.
        num_known: Known classes.
        num_novel: Novel classes.
        known: Accuracy on held-out images of known classes by the first seed.
    """
    from sklearn.metrics import adjusted_rand_score

    first = by_seed[0]
    sizes = np.bincount(first, minlength=num_known + num_novel)[num_known:]
    silhouettes = class_silhouettes(features, first).values()
    similar = [float(adjusted_rand_score(*pair)) for pair in combinations(by_seed, 2)]
    return Alternative(
        num_novel,
        tuple(sorted(sizes.tolist(), reverse=True)),
        fmean(silhouettes) if silhouettes else None,
        fmean(similar) if similar else None,
        known,
    )


def table(alternatives: Sequence[Alternative], chosen: int) -> Table:
    """Return a row for each number, from the least."""
    rows = [
        (
            f"{each.novel} (the result)" if each.novel == chosen else str(each.novel),
            f"{each.sizes[0]} to {each.sizes[-1]}",
            *("" if x is None else f"{x:.3f}" for x in (each.silhouette, each.seed_agreement)),
            "" if each.known is None else str(each.known),
        )
        for each in sorted(alternatives, key=lambda each: each.novel)
    ]
    return Table(
        "The ends of the interval",
        ("novel classes", "images of each", "silhouette", "seed agreement", "known, held out"),
        tuple(rows),
        "The last stage was trained with each of these numbers too. Silhouette: mean over the "
        "classes, by the features of the encoder. Seed agreement: adjusted Rand index between "
        "trainings. To take another number, use its command among the next steps.",
    )
