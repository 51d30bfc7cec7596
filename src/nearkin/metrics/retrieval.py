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
    scores = np.full((len(queries), 3), np.nan)
    rows = max(1, held_at_once(bank.device) // max(len(bank), 1))
    for block in blocks(len(queries), rows):
        similarity = product(unit(queries[block]), bank.T).cpu().numpy()[:, order]
        if bank_groups is not None and query_groups is not None:
            similarity[query_groups[block, None] == bank_groups[order]] = -np.inf
        ascending = np.sort(similarity, axis=1)
        for row, place in enumerate(range(block.start, block.stop)):
            relevant = similarity[row, starts[place] : ends[place]]
            if len(ranked := relevant[relevant > -np.inf]):
                scores[place] = _score(ranked, ascending[row])
    scored = np.flatnonzero(~np.isnan(scores[:, 0]))
    ap, ap_at_r, first_correct = scores[scored].T
    return Retrieval(scored, ap, ap_at_r, first_correct == 1)


def _score(
    relevant: Float32[np.ndarray, " relevant"], ascending: Float32[np.ndarray, " bank"]
) -> tuple[float, float, bool]:
    """Score one query: AP, AP@R, and whether the most similar images are relevant."""
    values = np.sort(relevant)
    rank = len(ascending) - np.searchsorted(ascending, values, "left")
    precision = (len(values) - np.searchsorted(values, values, "left")) / rank
    at_r = float(precision[rank <= len(values)].sum()) / len(values)
    return float(precision.mean()), at_r, bool(precision[-1] == 1)
