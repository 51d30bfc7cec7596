"""Retrieval: how early images of a query's class come among the most similar ones."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from nearkin.metrics.neighbors import held_at_once
from nearkin.objectives import unit
from nearkin.objectives.fused import blocks, product


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Scores of single queries; their means are mAP, mAP@R and recall@1."""

    rows: Int[np.ndarray, " scored"]  # The queries with a relevant image; the others have none
    average_precision: Float[np.ndarray, " scored"]
    average_precision_at_r: Float[np.ndarray, " scored"]
    first_correct: Bool[np.ndarray, " scored"]  # Whether the most similar images are relevant


def retrieve(
    bank: Float[Tensor, "bank dim"],
    bank_labels: Int[np.ndarray, " bank"],
    queries: Float[Tensor, "queries dim"],
    query_labels: Int[np.ndarray, " queries"],
    *,
    bank_groups: Int[np.ndarray, " bank"] | None = None,
    query_groups: Int[np.ndarray, " queries"] | None = None,
) -> Retrieval:
    """Rank the whole bank by cosine similarity to each query; images of its class are relevant.

    With R relevant images, at ranks r_1 < ... < r_R,

        AP = 1/R sum_i i / r_i,    AP@R = 1/R sum_{i: r_i <= R} i / r_i

    AP@R is that of Musgrave et al. 2020 (arXiv:2003.08505, section 3.2). Equally similar images
    share the last rank among them, as in scikit-learn's `average_precision_score`, and are the
    most similar ones together: nothing depends on their order. Images of a query's own group, such
    as a burst, are not ranked.

    Exact; in O(bank log bank) per query, and with few similarities in memory at once.
    """
    # Similarities, not the bank, are sorted by class, so that a class is one piece of them: a
    # copy more of the bank than its unit vectors may be too large.
    order = np.argsort(bank_labels, kind="stable")
    labels, bank = bank_labels[order], unit(bank)
    starts, ends = (np.searchsorted(labels, query_labels, side) for side in ("left", "right"))
    groups = None
    if bank_groups is not None and query_groups is not None:
        groups = bank_groups[order], query_groups
    scores: dict[int, tuple[float, float, bool]] = {}
    rows = max(1, held_at_once(bank.device) // max(len(bank), 1))
    for block in blocks(len(queries), rows):
        similarity = product(unit(queries[block]), bank.T).cpu().numpy()[:, order]
        if groups is not None:
            similarity[groups[1][block, None] == groups[0]] = -np.inf
        ascending = np.sort(similarity, axis=1)
        for row, place in enumerate(range(block.start, block.stop)):
            relevant = slice(int(starts[place]), int(ends[place]))
            score = _score(similarity[row, relevant], ascending[row])
            if score is not None:
                scores[place] = score
    ap, ap_at_r, first = zip(*scores.values(), strict=True) if scores else ((), (), ())
    return Retrieval(
        np.array(list(scores), np.int64),
        np.array(ap, np.float64),
        np.array(ap_at_r, np.float64),
        np.array(first, bool),
    )


def _score(
    relevant: Float32[np.ndarray, " relevant"], ascending: Float32[np.ndarray, " bank"]
) -> tuple[float, float, bool] | None:
    """Score one query: AP, AP@R, and whether the first is relevant; None without any relevant."""
    values = np.sort(relevant)
    values = values[values > -np.inf]
    if not len(values):
        return None
    rank = len(ascending) - np.searchsorted(ascending, values, "left")
    precision = (len(values) - np.searchsorted(values, values, "left")) / rank
    at_r = float(precision[rank <= len(values)].sum()) / len(values)
    return float(precision.mean()), at_r, bool(precision[-1] == 1)
