"""Weighted k-nearest-neighbor classification."""

from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from nearkin.errors import DataError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.measure import Measure, accuracy, known, unseen
from nearkin.measures.neighbors import vote

TEMPERATURE: Final = 0.1  # Temperature of the votes in the papers


def num_neighbors(bank: int) -> int:
    """Return the `k` of kNN: 200 as in the papers, or 20 where classes may have fewer images."""
    return 200 if bank >= 10_000 else 20


def knn(
    bank: Float[Tensor, "bank dim"],
    bank_labels: Int[np.ndarray, " bank"],
    queries: Float[Tensor, "queries dim"],
    query_labels: Int[np.ndarray, " queries"],
    *,
    k: int = 200,
    temperature: float = TEMPERATURE,
) -> Measure:
    """Measure how often the vote of the `k` nearest images in the bank is right.

    The protocol of Wu et al. 2018 and of MoCo's CIFAR-10 demonstration. Images without a label
    are left out. Of classes with equal votes, the lowest number wins.
    """
    in_bank, scored = known(bank_labels), known(query_labels)
    if not in_bank.any() or not scored.any():
        raise DataError("kNN needs labeled training images and labeled test images")
    bank, queries, truth = bank[in_bank], queries[scored], query_labels[scored]
    classes = np.unique(bank_labels[in_bank])
    predicted = predict(bank, bank_labels[in_bank], queries, k=k, temperature=temperature)
    protocol = (
        f"weighted kNN by cosine, k {min(k, len(bank))}, temperature {temperature:g}, "
        f"bank of {len(bank)} training images, {len(queries)} test images"
    )
    return accuracy("kNN top-1", predicted == truth, protocol + unseen(classes, truth))


def predict(
    bank: Float[Tensor, "bank dim"],
    labels: Shaped[np.ndarray, " bank"],
    queries: Float[Tensor, "queries dim"],
    *,
    k: int,
    temperature: float = TEMPERATURE,
) -> Shaped[np.ndarray, " queries"]:
    """Return the label that wins each query's vote; of equals, the one that sorts first."""
    classes, numbers = np.unique(labels, return_inverse=True)
    scores = vote(bank, numbers, queries, k=k, temperature=temperature, num_classes=len(classes))
    return np.asarray(classes[scores.argmax(dim=1).cpu().numpy()])


def knn_classes(embeddings: Embeddings) -> Shaped[np.ndarray, " n"]:
    """Predict the class name of each labeled test image from its nearest training images.

    The predictions behind the kNN accuracy; empty for all other images.
    """
    names = embeddings.class_names
    labeled = known(embeddings.labels)
    train, test = (np.flatnonzero(labeled & (embeddings.splits == s)) for s in ("train", "test"))
    predicted = np.full(len(names), "", names.dtype)
    if len(train) and len(test):
        bank, queries = (torch.from_numpy(embeddings.vectors[rows]) for rows in (train, test))
        predicted[test] = predict(bank, names[train], queries, k=num_neighbors(len(train)))
    return predicted
