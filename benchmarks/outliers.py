"""Junk among the images that a discovery learns from: how much of it is flagged.

Images of another set, noise and blank images are 5 or 20 % of the unlabeled images. Their scores
are compared with those of all other unlabeled images, of known and of novel classes: AUROC with
Student's interval over seeds, the share of junk that is flagged, and the share of the others. The
rule stands beside the one of before, the distance to the tenth of the nearest images that were
learned from (Sun et al. 2022) with 99 % of them below its threshold. Rules see features and
labels alone, so nothing is trained.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from benchmarks.discovery.sets import CPU, SETS, Bench
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from benchmarks.shared.seeds import interval
from nearkin.classifier.features import UNTOUCHED, Extraction
from nearkin.classifier.reference import neighbors, outlier_auroc, reference_of
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import Encoder, load
from nearkin.types import UNLABELED

HOSTS: Final = ["digits", "omniglot", "fashion", "cifar10", "caltech"]
OPTIONS: Final = (
    Option("sets", HOSTS, "what is discovered", ["digits"]),
    Option("seeds", [6, 7, 8], "each draws novel classes and labels", [6, 7]),
    Option("shares", [0.05, 0.2], "of junk among unlabeled images", [0.2]),
    Option("junk", 500, "images of each kind, at the most", 60),
    Option("images", 4000, "of a set, at the most", 600),
)
OTHERS: Final = ("digits", "cifar10.npz", "fashion.npz")
SIDE: Final = 32

Features = Float[Tensor, "n dim"]
Judged = tuple[Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]
"""Distances, and which images are flagged."""


class Task(NamedTuple):
    """Images to learn from."""

    features: Features
    label: Int[np.ndarray, " n"]
    junk: Bool[np.ndarray, " n"]


def run(options: Namespace) -> Iterator[Row]:
    """Yield a row for each set, share, kind of junk and rule, and for all kinds together."""
    folder = Path(options.data)
    for name in options.sets:
        encoder = load(SETS[name].encoder.format(folder=folder, data=name))
        kinds = junk_of(name, folder, options.junk)
        junk = {kind: _encoded(encoder, images) for kind, images in kinds.items()}
        benches = [Bench(name, seed, folder) for seed in options.seeds]
        own = _encoded(encoder, benches[0].images)
        for share in options.shares:
            every: dict[str, list[Float[np.ndarray, "seeds 3"]]] = {rule: [] for rule in RULES}
            for kind, features in junk.items():
                tasks = [task(each, own, features, share, options.images) for each in benches]
                for rule, judge in RULES.items():
                    scores = np.array([_scores(each, *judge(each)) for each in tasks])
                    every[rule].append(scores)
                    yield _row(f"{name}, {share:.0%} {kind}, {rule}", scores)
            for rule, of_kinds in every.items():
                yield _row(f"{name}, {share:.0%} of any kind, {rule}", np.mean(of_kinds, axis=0))


def junk_of(name: str, folder: Path, count: int) -> Mapping[str, Images]:
    """Return so many images of other sets that are there, of noise, and blank ones.

    Half of the blank ones have the noise of a scanner, and half of all are gray.
    """
    rng, shape = np.random.default_rng(0), (count, SIDE, SIDE, 3)
    color = rng.integers(0, 256, (count, 1, 1, 3))
    color[::2] = color[::2, ..., :1]
    scanner = rng.integers(-3, 4, shape) * (np.arange(count) % 4 < 2)[:, None, None, None]
    found = {
        "noise": open_images(rng.integers(0, 256, shape, np.uint8)),
        "blanks": open_images((color + scanner).clip(0, 255).astype(np.uint8)),
    }
    for source in OTHERS:
        path = folder / source
        if source != SETS[name].data and (path.exists() or source == "digits"):
            images = open_images(str(path) if path.exists() else source)
            rows = np.sort(rng.permutation(len(images))[:count])
            found[f"{path.stem}"] = images.subset(rows)
    return found


def _encoded(encoder: Encoder, images: Images) -> Features:
    return Extraction(encoder, images, UNTOUCHED, CPU, 0).compute().features.center


def task(bench: Bench, own: Features, junk: Features, share: float, most: int) -> Task:
    """Return images of a set, with junk among the unlabeled ones."""
    given, rng = bench.task("gcd"), np.random.default_rng(bench.seed)
    rows = np.sort(rng.permutation(given.rows)[:most])
    label = given.label[rows]
    count = round(share / (1 - share) * int((label == UNLABELED).sum()))
    drawn = rng.permutation(len(junk))[:count]
    return Task(
        torch.cat([own[torch.from_numpy(rows)], junk[torch.from_numpy(drawn)]]),
        np.concatenate([label, np.full(len(drawn), UNLABELED)]),
        np.arange(len(rows) + len(drawn)) >= len(rows),
    )


def by_nearkin(task: Task) -> Judged:
    """Return the distances to the subspace of labeled images, and the outliers, of nearkin."""
    labeled, cluster = task.label != UNLABELED, task.label.clip(min=0)
    reference = reference_of(task.features, cluster, labeled, int(cluster.max()) + 1)
    return reference.distance(task.features), reference.outliers(task.features)


def by_neighbor(task: Task) -> Judged:
    """Return the distances to the tenth nearest image, and the farthest hundredth."""
    distance = 1 - neighbors(task.features, task.features, 10).similarity[:, -1]
    return distance, distance > np.quantile(distance, 0.99)


RULES: Final = {"nearkin": by_nearkin, "neighbor": by_neighbor}


def _scores(
    task: Task, distance: Float[np.ndarray, " n"], flagged: Bool[np.ndarray, " n"]
) -> tuple[float, float, float]:
    """Return the AUROC, the share of junk that is flagged, and the share of the others."""
    unlabeled = task.label == UNLABELED
    junk, distance, flagged = task.junk[unlabeled], distance[unlabeled], flagged[unlabeled]
    return outlier_auroc(distance, junk), flagged[junk].mean(), flagged[~junk].mean()


def _row(case: str, scores: Float[np.ndarray, "seeds 3"]) -> Row:
    mean, half = interval(scores[:, 0].tolist())
    recall, alarms = scores[:, 1:].mean(axis=0).tolist()
    more = {"flagged": recall, "of the others": alarms}
    return Row(
        case, mean, "AUROC", interval=(mean - half, mean + half), rounds=len(scores), more=more
    )
