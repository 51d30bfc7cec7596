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
    large_ks,
    linear_probe,
    retrieval,
    view_retrieval,
)
from nearkin.metrics.metric import Metric
from nearkin.schema import check_value

QUICK: Final = "quick"  # Every evaluation takes it unless told otherwise


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is measured: training and test embeddings, and what else some metrics need."""

    train: Embeddings
    test: Embeddings
    seed: int
    device: torch.device = CPU  # Of kNN and the linear probe, which take longest
    images: ImageViews | None = None  # Where they are at hand, not only features
    scored: str = TEST  # What the test embeddings are of, in words


@dataclass(frozen=True, slots=True)
class Entry:
    """Metrics that are taken together or, for a reason given under `title`, not at all."""

    title: str
    measure: Callable[[Inputs], list[Metric]]
    missing: Callable[[Inputs], dict[str, str]] = lambda _: {}
    """What is not among them, and why."""


LINEAR: Final = Entry(
    "linear probe", lambda of: [linear_probe(of.train, of.test, seed=of.seed, device=of.device)]
)
CLUSTERS: Final = Entry("clusters", lambda of: clusters(of.test, seed=of.seed))
GEOMETRY: Final = (
    Entry("view retrieval", lambda of: view_retrieval(of.test, of.scored)),
    Entry("geometry", lambda of: geometry(of.test, of.scored)),
)
RETRIEVAL: Final = Entry("retrieval", lambda of: retrieval(of.train, of.test))
FEW_SHOT: Final = Entry("few-shot", lambda of: few_shot(of.train, of.test, seed=of.seed))

ENTRIES: Final[Mapping[str, tuple[Entry, ...]]] = {
    "quick": (
        Entry("kNN top-1", lambda of: knn(of.train, of.test, device=of.device)),
        LINEAR,
        CLUSTERS,
        *GEOMETRY,
    ),
    "knn": (Entry("kNN", lambda of: knn_grid(of.train, of.test), lambda of: large_ks(of.train)),),
    "linear": (LINEAR,),
    "attentive": (
        Entry(
            "attentive probe",
            lambda of: attentive_probe(of.images, of.train, of.test, seed=of.seed),
        ),
    ),
    "fewshot": (FEW_SHOT,),
    "retrieval": (RETRIEVAL,),
    "labelfree": GEOMETRY,
}
"""The metrics of each of `nearkin.choices.Protocol`, but for `full`."""


def chosen(protocol: Sequence[Protocol]) -> tuple[Entry, ...]:
    """Return the entries of protocols by name, each once; `full` is all.

    Raises:
        UsageError: If there is no such protocol.

    >>> [entry.title for entry in chosen(["linear", "retrieval"])]
    ['linear probe', 'retrieval']
    """
    names = check_value("protocol", protocol, Sequence[Protocol])
    taken = ENTRIES if FULL in names else names
    entries = [entry for name in taken for entry in ENTRIES[name]]
    return tuple(dict.fromkeys(entries))
