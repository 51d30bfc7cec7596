"""The protocols of an evaluation: which metrics each takes, chosen by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from nearkin.choices import FULL, Protocol
from nearkin.evaluation.attentive import ImageViews, attentive_probe
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import (
    CPU,
    TEST,
    clusters,
    few_shot,
    geometry,
    knn,
    knn_grid,
    linear_probe,
    retrieval,
    view_retrieval,
)
from nearkin.metrics.metric import Metric
from nearkin.schema import check_value


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is measured: training and test embeddings, and what else some metrics need."""

    train: Embeddings
    test: Embeddings
    seed: int
    device: torch.device = CPU  # Of kNN and the linear probe, which take longest
    images: ImageViews | None = None  # Where they are at hand, not only features
    scored: str = TEST  # What the test embeddings are of, in words


METRICS: Final[Mapping[str, Callable[[Inputs], list[Metric]]]] = {
    "kNN top-1": lambda of: knn(of.train, of.test, device=of.device),
    "kNN": lambda of: knn_grid(of.train, of.test),
    "linear probe": lambda of: [linear_probe(of.train, of.test, seed=of.seed, device=of.device)],
    "attentive probe": lambda of: attentive_probe(of.images, of.train, of.test, seed=of.seed),
    "few-shot": lambda of: few_shot(of.train, of.test, seed=of.seed),
    "retrieval": lambda of: retrieval(of.train, of.test),
    "clusters": lambda of: clusters(of.test, seed=of.seed),
    "view retrieval": lambda of: view_retrieval(of.test, of.scored),
    "geometry": lambda of: geometry(of.test, of.scored),
}
"""What takes metrics together or, for a reason given under its title, not at all."""
GEOMETRY: Final = ("view retrieval", "geometry")  # For which a second view is encoded
PROTOCOLS: Final[Mapping[str, tuple[str, ...]]] = {
    "quick": ("kNN top-1", "linear probe", "clusters", *GEOMETRY),
    "knn": ("kNN",),
    "linear": ("linear probe",),
    "attentive": ("attentive probe",),
    "fewshot": ("few-shot",),
    "retrieval": ("retrieval",),
    "labelfree": GEOMETRY,
}
"""The metrics of each of `nearkin.choices.Protocol`, but for `full`."""


def chosen(protocol: Sequence[Protocol]) -> tuple[str, ...]:
    """Return the metrics of protocols by name, each once; `full` is all.

    Raises:
        UsageError: If there is no such protocol.

    >>> chosen(["linear", "retrieval"])
    ('linear probe', 'retrieval')
    """
    names = check_value("protocol", protocol, Sequence[Protocol])
    taken = PROTOCOLS if FULL in names else names
    return tuple(dict.fromkeys(title for name in taken for title in PROTOCOLS[name]))
