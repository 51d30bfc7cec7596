"""Everything that can be said about features, whatever labels there are."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from nearkin.errors import DataError
from nearkin.evaluation.clusters import clusters
from nearkin.evaluation.features import Features
from nearkin.evaluation.geometry import geometry
from nearkin.evaluation.knn import knn
from nearkin.evaluation.measure import Measure
from nearkin.evaluation.probe import linear_probe
from nearkin.objectives import unit
from nearkin.pace import ProgressCallback, ignore_progress, under

TITLES = {"untrained": "untrained encoder", "pixels": "raw pixels"}
"""Columns that are headed by another name than their own."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was found about each table of features: `encoder`, `untrained`, `pixels`."""

    sizes: Mapping[str, int]
    """Number of images of each split."""
    measures: Mapping[str, list[Measure]]
    """By table of features."""
    left_out: Mapping[str, str]
    """What could not be measured, and why."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "sizes": dict(self.sizes),
            "measures": {
                table: {measure.name: asdict(measure) for measure in measures}
                for table, measures in self.measures.items()
            },
            "left_out": dict(self.left_out),
        }

    def rows(self) -> list[list[str]]:
        """A table as text: a heading, then a row per measure, a column per table of features."""
        columns = [{m.name: str(m) for m in measures} for measures in self.measures.values()]
        names = dict.fromkeys(name for column in columns for name in column)
        heading = ["measure", *(TITLES.get(table, table) for table in self.measures)]
        return [heading, *([name, *(c.get(name, "-") for c in columns)] for name in names)]


def evaluate_features(
    train: Features,
    test: Features,
    *,
    seed: int,
    k: int = 200,
    temperature: float = 0.1,
    on_progress: ProgressCallback = ignore_progress,
) -> tuple[list[Measure], dict[str, str]]:
    """Measure test features with the help of training features.

    Args:
        train: The bank of kNN, and what the linear probe learns from.
        test: What is scored. Its labels decide nothing but the scores.
        seed: Decides held-out images, starts of k-means and resampling.
        k: Neighbors of kNN.
        temperature: Of the votes of kNN.
        on_progress: Hears what is measured.

    Returns:
        The measures, and why others could not be taken, by name.
    """
    known = (train.vectors, train.labels, test.vectors, test.labels)
    attempts: dict[str, Callable[[], list[Measure]]] = {
        "kNN top-1": lambda: [knn(*known, k=k, temperature=temperature)],
        "linear probe": lambda: [linear_probe(*known, seed=seed, groups=train.groups)],
        "clusters": lambda: clusters(test.vectors, test.labels, seed=seed),
        "geometry": lambda: geometry(test.vectors, test.other_view, test.seen),
    }
    measures: list[Measure] = []
    left_out: dict[str, str] = {}
    for done, (name, attempt) in enumerate(attempts.items()):
        on_progress(done, len(attempts), name)
        try:
            measures += attempt()
        except DataError as error:
            left_out[name] = str(error)
    on_progress(len(attempts), len(attempts), "measured")
    return measures, left_out


def evaluate(
    tables: Mapping[str, tuple[Features, Features]],
    *,
    seed: int,
    k: int = 200,
    temperature: float = 0.1,
    on_progress: ProgressCallback = ignore_progress,
) -> Evaluation:
    """The same measures for several tables of features of the same images.

    Args:
        tables: Training and test features by name: `encoder`, whose numbers of images are
            reported, and the floors it has to beat.
        seed: See `evaluate_features`, as for `k` and `temperature`.
        k: Neighbors of kNN.
        temperature: Of the votes of kNN.
        on_progress: Hears what is measured.
    """
    measures: dict[str, list[Measure]] = {}
    left_out: dict[str, str] = {}
    parts = zip(("train", "test"), next(iter(tables.values())), strict=True)
    sizes = {part: len(features.labels) for part, features in parts}
    for name, (train, test) in tables.items():
        measures[name], reasons = evaluate_features(
            train,
            test,
            seed=seed,
            k=k,
            temperature=temperature,
            on_progress=under(name, on_progress),
        )
        left_out |= reasons
    return Evaluation(sizes, measures, left_out)


SIDE = 32
"""Larger images are shrunk to this many pixels a side."""
PIECE = 1024
"""Images that are converted at once."""


def mean_pixels(images: UInt8[np.ndarray, "n h w 3"]) -> Float[Tensor, " d"]:
    """The mean image of the training images, flattened as in `pixels`."""
    total = torch.stack([piece.double().sum(dim=0) for piece in _pieces(images)]).sum(dim=0)
    return (total / len(images)).float()


def pixels(
    images: UInt8[np.ndarray, "n h w 3"], mean: Float[Tensor, " d"]
) -> Float[Tensor, "n d"]:
    """Raw pixels as features: unit vectors of what differs from the mean training image.

    Args:
        images: RGB. Sides above 32 pixels are shrunk to 32 by averaging areas.
        mean: What `mean_pixels` gives for the training images, whichever images these are.
    """
    features = torch.empty(len(images), len(mean))
    for rows, piece in zip(features.split(PIECE), _pieces(images), strict=True):
        rows.copy_(unit(piece - mean))
    return features


def _pieces(images: UInt8[np.ndarray, "n h w 3"]) -> Iterator[Float[Tensor, "piece d"]]:
    """Flattened images, some at a time: as float32, all at once could be too many."""
    size = [min(side, SIDE) for side in images.shape[1:3]]
    for start in range(0, len(images), PIECE):
        piece = torch.tensor(images[start : start + PIECE]).movedim(3, 1).float() / 255
        yield F.interpolate(piece, size=size, mode="area").flatten(1)
