"""Labels that contradict an image's neighbors or its duplicates.

Confident learning (Northcutt, Jiang & Chuang. Confident learning: estimating uncertainty in
dataset labels. JAIR 2021), with the votes of the nearest other images as probabilities: they are
out of fold by themselves, and cost one search.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import TALLIED, TEMPERATURE, K
from nearkin.metrics.intervals import wilson
from nearkin.metrics.neighbors import nearest, tally
from nearkin.objectives.fused import blocks
from nearkin.pace import count
from nearkin.types import UNLABELED

PLANTED: Final = 0.05  # Share of the labels that are made wrong, to see how many are found
SPARE: Final = 20  # Further neighbors, in place of those of the image's own group
VOTERS: Final = 2**17  # Images that vote, at most: a search among all takes their square

Labels = Int[np.ndarray, " n"]
Scores = Float[np.ndarray, " n"]
Votes = Float[np.ndarray, "some classes"]
Wrong = Bool[np.ndarray, " n"]


class Doubt(NamedTuple):
    """An image whose label may be wrong."""

    row: int
    other: int  # The class that its neighbors vote for, or that its duplicate has
    score: float  # By how much the votes for it exceed those for the label, from 0 to 1
    duplicate: int = UNLABELED  # A duplicate with another label, if that is the reason


@dataclass(frozen=True)
class LabelCheck:
    """Doubtful labels, and how well the same check finds labels that are made wrong."""

    doubts: tuple[Doubt, ...]  # The surest first
    num_labels: int
    margin: float  # The least score; the one that finds labels made wrong best, by F1
    planted: int  # Further labels that were made wrong, at random
    recall: float  # The share of these that the check finds
    voters: int  # Images among which neighbors are sought
    precision: tuple[float, float, float]
    """Of all that it finds then, the share that was made wrong, with a 95 % interval. It is rather
    too low: labels that are wrong already count as right."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, without single images."""
        return {**vars(self), "doubts": len(self.doubts)}

    def sentences(self) -> list[str]:
        """How many there are, and how far to trust them."""
        value, low, high = self.precision
        pairs = sum(each.duplicate != UNLABELED for each in self.doubts)
        among = f" among {self.voters:,} images" if self.voters < self.num_labels else ""
        return [
            f"{len(self.doubts):,} of {self.num_labels:,} contradict their neighbors{among} or "
            f"({pairs:,}) a duplicate",
            f"of {count(self.planted, 'label')} made wrong, a share of {self.recall:.3f} is "
            f"found, with precision {value:.3f} [{low:.3f}, {high:.3f}]",
        ]


def check_labels(
    embeddings: Embeddings, duplicates: Labels, groups: Labels, seed: int
) -> LabelCheck | None:
    """Find labels that contradict neighbors of other groups, or duplicates.

    `groups` are those of duplicates and of other images of one source: these do not vote. Images
    without a label are left out. None where fewer than two classes have labels.
    """
    rows = np.flatnonzero(embeddings.labels != UNLABELED)
    classes, labels = np.unique(embeddings.labels[rows], return_inverse=True)
    if len(classes) < 2:
        return None
    voting = np.sort(np.random.default_rng(seed).permutation(len(rows))[:VOTERS])
    rng = np.random.default_rng(seed)
    voters = Voters.of(torch.from_numpy(embeddings.vectors[rows]), groups[rows], voting)
    margin = _best_margin(*_planted(voters, labels, rng))
    wrong, planted_score = _planted(voters, labels, rng)
    now = planted_score >= margin
    other, score = _doubtful(partial(voters.votes, labels, len(classes)), labels, len(classes))
    at = np.flatnonzero(score >= margin)
    columns = (each[at].tolist() for each in (rows, classes[other], score))
    found = [Doubt(row, of, round(by, 4)) for row, of, by in zip(*columns, strict=True)]
    found += _contradictions(rows, embeddings.labels, duplicates)
    doubts = {doubt.row: doubt for doubt in found}  # that a duplicate says more counts
    value = float(wrong[now].mean()) if now.any() else 0.0
    return LabelCheck(
        tuple(sorted(doubts.values(), key=lambda each: (-each.score, each.row))),
        len(rows),
        margin,
        int(wrong.sum()),
        float(now[wrong].mean()) if wrong.any() else 0.0,
        len(voting),
        (value, *wilson(value, float(now.sum()))),
    )


def _planted(voters: "Voters", labels: Labels, rng: np.random.Generator) -> tuple[Wrong, Scores]:
    """Make some labels wrong; return which, and how doubtful all are then."""
    num, wrong = int(labels.max()) + 1, rng.random(len(labels)) < PLANTED
    other = (labels + rng.integers(1, num, len(labels))) % num
    planted = np.where(wrong, other, labels)
    return wrong, _doubtful(partial(voters.votes, planted, num), planted, num)[1]


def _best_margin(wrong: Wrong, score: Scores) -> float:
    """Return the score from which on wrong labels are found best, by F1."""
    order = np.argsort(-score, kind="stable")
    right = np.cumsum(wrong[order])
    f1 = 2 * right / (np.arange(len(order)) + 1 + wrong.sum())
    return max(float(score[order[f1.argmax()]]), float(np.finfo(np.float32).eps))


@dataclass(frozen=True, eq=False)
class Voters:
    """The nearest images of each image, of other groups."""

    similarity: Float[Tensor, "n k"]  # Minus infinity for one that does not vote
    index: Int[Tensor, "n k"]

    @classmethod
    def of(
        cls, vectors: Float[Tensor, "n dim"], groups: Labels, voting: Int[np.ndarray, " voters"]
    ) -> "Voters":
        """Search the nearest images of each among those that vote."""
        rows, group = torch.from_numpy(voting), torch.from_numpy(groups)
        similarity, place = nearest(vectors[rows], vectors, K + SPARE + 1)
        index = rows[place]
        others = group[index] != group[:, None]
        votes = others & (others.cumsum(dim=1) <= K)
        return cls(similarity.masked_fill(~votes, -torch.inf), index)

    def votes(self, labels: Labels, num_classes: int, rows: slice = slice(None)) -> Votes:
        """Return the share of votes on some images for each class; zeros where nobody votes."""
        voter, near = torch.from_numpy(labels)[self.index[rows]], self.similarity[rows]
        scores = tally(near, voter, temperature=TEMPERATURE, num_classes=num_classes)
        return scores.nan_to_num(0.0).numpy()


def _doubtful(
    votes: Callable[[slice], Votes], labels: Labels, num_classes: int
) -> tuple[Labels, Scores]:
    """Return the class that an image is confidently of instead of its label, and the margin.

    It is confidently of a class with at least as many votes for it as images of that label have
    on average, and of several such of the one with the most (equation 1 of the paper). Without
    one, the margin is 0. `votes` are counted twice, of some images at a time: those of a million
    for 1,000 classes would take 4 GB.
    """
    own, best, most = (np.zeros(len(labels), dtype) for dtype in ("f4", "i8", "f4"))
    some = list(blocks(len(labels), max(1, TALLIED // num_classes)))
    for rows in some:
        own[rows] = np.take_along_axis(votes(rows), labels[rows, None], axis=1)[:, 0]
    sizes = np.bincount(labels, minlength=num_classes).clip(min=1)
    usual = np.bincount(labels, own, num_classes) / sizes
    for rows in some:
        confident = np.where(((of := votes(rows)) >= usual) & (of > 0), of, -1.0)
        best[rows], most[rows] = confident.argmax(axis=1), confident.max(axis=1)
    doubtful = (most >= 0) & (best != labels)
    return best, np.where(doubtful, most - own, 0.0).clip(0, 1)


def _contradictions(
    rows: Int[np.ndarray, " labeled"], labels: Labels, groups: Labels
) -> list[Doubt]:
    """Return images of groups with several labels: duplicates of which at least one is wrong."""
    order = rows[np.argsort(groups[rows], kind="stable")]
    found = list[Doubt]()
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if len(np.unique(labels[members])) > 1:
            for row in members.tolist():
                duplicate = int(members[labels[members] != labels[row]][0])
                found.append(Doubt(row, int(labels[duplicate]), 1.0, duplicate))
    return found
