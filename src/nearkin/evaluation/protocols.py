"""The protocols of an evaluation: which measures each takes, chosen by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from nearkin.errors import DataError, UsageError
from nearkin.evaluation.attentive import attentive_probe
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.measures import (
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
from nearkin.evaluation.robustness import robustness
from nearkin.evaluation.views import ImageViews

LIDAR_IMAGES, LIDAR_VIEWS = 1_000, 10  # Test images at the most, and views of each
QUICK: Final = "quick"
FULL: Final = "full"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is measured: training and test embeddings, and what else some measures need."""

    train: Embeddings
    test: Embeddings
    k: int  # Of the quick kNN
    seed: int
    image_views: ImageViews | None = None  # Where the images are at hand, not only features

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


@dataclass(frozen=True, slots=True)
class Protocol:
    """A named choice of measures."""

    summary: str  # For the help of the command
    entries: tuple[Entry, ...]


def _lidar(of: Inputs) -> list[Measure]:
    return lidar_rank(of.views.augmented(LIDAR_IMAGES, LIDAR_VIEWS), len(of.test))


KNN = Entry("kNN top-1", lambda of: [knn(of.train, of.test, k=of.k)], compared=True)
LINEAR = Entry(
    "linear probe", lambda of: [linear_probe(of.train, of.test, seed=of.seed)], compared=True
)
CLUSTERS = Entry("clusters", lambda of: clusters(of.test, seed=of.seed))
GEOMETRY = (
    Entry("view retrieval", lambda of: view_retrieval(of.test), compared=True),
    Entry("RankMe", lambda of: smooth_rank(of.test)),
    Entry("alpha-ReQ", lambda of: spectral_decay(of.test)),
    Entry("geometry", lambda of: geometry(of.test)),
)
LIDAR = Entry("LiDAR", _lidar, needs_images=True)

PROTOCOLS: Final[Mapping[str, Protocol]] = {
    QUICK: Protocol(
        "kNN, linear probe, clusters, geometry, RankMe and alpha-ReQ",
        (KNN, LINEAR, CLUSTERS, *GEOMETRY),
    ),
    "knn": Protocol(
        "kNN at k 10, 20, 100 and 200, temperatures .07 and .1, and by majority",
        (Entry("kNN", lambda of: knn_grid(of.train, of.test)),),
    ),
    "linear": Protocol("linear probe", (LINEAR,)),
    "attentive": Protocol(
        "attentive probe on the tokens before the pooling",
        (
            Entry(
                "attentive probe",
                lambda of: attentive_probe(of.views, of.train, of.test, seed=of.seed),
                needs_images=True,
            ),
        ),
    ),
    "fewshot": Protocol(
        "classifiers from 1, 2, 5 and 10 images per class, 10 draws each",
        (Entry("few-shot", lambda of: few_shot(of.train, of.test, seed=of.seed)),),
    ),
    "retrieval": Protocol(
        "mAP, mAP@R and recall@1 of test images among training images",
        (Entry("retrieval", lambda of: retrieval(of.train, of.test, seed=of.seed)),),
    ),
    "robustness": Protocol(
        "kNN and linear probe under 13 common corruptions",
        (
            Entry(
                "robustness",
                lambda of: robustness(of.train, of.views, k=of.k, seed=of.seed),
                needs_images=True,
            ),
        ),
    ),
    "labelfree": Protocol(
        "what needs no labels: view retrieval, geometry, RankMe, alpha-ReQ and LiDAR",
        (*GEOMETRY, LIDAR),
    ),
}


def chosen(protocol: str) -> tuple[Entry, ...]:
    """Return the entries of protocols by name, separated by commas, each once; `full` is all.

    Raises:
        UsageError: If there is no such protocol.

    >>> [entry.title for entry in chosen("linear,retrieval")]
    ['linear probe', 'retrieval']
    """
    names = [name.strip() for name in protocol.split(",")]
    for name in names:
        if name not in (*PROTOCOLS, FULL):
            near = get_close_matches(name, (*PROTOCOLS, FULL), 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(
                f"--protocol {name!r} is not one of {', '.join((*PROTOCOLS, FULL))}{meant}"
            )
    names = list(PROTOCOLS) if FULL in names else names
    entries = [entry for name in names for entry in PROTOCOLS[name].entries]
    return tuple({entry.title: entry for entry in entries}.values())
