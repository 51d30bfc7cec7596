"""The protocols of an evaluation: which measures each takes, chosen by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from nearkin.choices import FULL, Protocol
from nearkin.distributed import ALONE, Share
from nearkin.errors import DataError
from nearkin.evaluation.attentive import attentive_probe
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.measures import (
    CPU,
    Measure,
    clusters,
    few_shot,
    geometry,
    knn,
    knn_grid,
    lidar_rank,
    linear_probe,
    retrieval,
    smooth_rank,
    spectral_decay,
    view_retrieval,
)
from nearkin.evaluation.views import ImageViews
from nearkin.schema import check_value

LIDAR_IMAGES, LIDAR_VIEWS = 1_000, 10  # Test images at the most, and views of each
QUICK: Final = "quick"  # Every evaluation takes it unless told otherwise


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is measured: training and test embeddings, and what else some measures need."""

    train: Embeddings
    test: Embeddings
    k: int  # Of the quick kNN
    seed: int
    device: torch.device = CPU  # Of kNN and the linear probe, which take longest
    image_views: ImageViews | None = None  # Where the images are at hand, not only features
    share: Share = ALONE  # Of what takes longest: kNN, linear probe and clusters

    @property
    def views(self) -> ImageViews:
        """Further views of the test images; DataError where there are no images."""
        if self.image_views is None:
            raise DataError("it needs the images; there are only features")
        return self.image_views


@dataclass(frozen=True, slots=True)
class Entry:
    """Measures that are taken together or, for a reason given under `title`, not at all."""

    title: str
    measure: Callable[[Inputs], list[Measure]]
    needs_images: bool = False
    compared: bool = False  # Whether the verdict on a training from a start looks at them


def _lidar(of: Inputs) -> list[Measure]:
    return lidar_rank(of.views.augmented(LIDAR_IMAGES, LIDAR_VIEWS), len(of.test))


def _knn(of: Inputs) -> list[Measure]:
    return [knn(of.train, of.test, k=of.k, device=of.device, share=of.share)]


def _linear_probe(of: Inputs) -> list[Measure]:
    return [linear_probe(of.train, of.test, seed=of.seed, device=of.device, share=of.share)]


KNN = Entry("kNN top-1", _knn, compared=True)
LINEAR = Entry("linear probe", _linear_probe, compared=True)
CLUSTERS = Entry("clusters", lambda of: clusters(of.test, seed=of.seed, share=of.share))
GEOMETRY = (
    Entry("view retrieval", lambda of: view_retrieval(of.test), compared=True),
    Entry("RankMe", lambda of: smooth_rank(of.test)),
    Entry("alpha-ReQ", lambda of: spectral_decay(of.test)),
    Entry("geometry", lambda of: geometry(of.test)),
)
LIDAR = Entry("LiDAR", _lidar, needs_images=True)

ENTRIES: Final[Mapping[str, tuple[Entry, ...]]] = {
    "quick": (KNN, LINEAR, CLUSTERS, *GEOMETRY),
    "knn": (Entry("kNN", lambda of: knn_grid(of.train, of.test, of.share)),),
    "linear": (LINEAR,),
    "attentive": (
        Entry(
            "attentive probe",
            lambda of: attentive_probe(of.views, of.train, of.test, seed=of.seed),
            needs_images=True,
        ),
    ),
    "fewshot": (Entry("few-shot", lambda of: few_shot(of.train, of.test, seed=of.seed)),),
    "retrieval": (Entry("retrieval", lambda of: retrieval(of.train, of.test, seed=of.seed)),),
    "labelfree": (*GEOMETRY, LIDAR),
}
"""The measures of each of `nearkin.choices.Protocol`, but for `full`."""


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
