"""Does a discovery flag junk among the images that it learns from?

Images of another set, noise and blank images are 5 or 20 % of the unlabeled images. Their scores
are compared with those of all other unlabeled images, of known and of novel classes: AUROC, the
share of junk that is flagged (recall), and the share of the others (false alarms), each a mean
over seeds with Student's interval. Beside it stands the distance to the tenth of the nearest
images that were learned from (Sun et al. 2022), with the quantile of 99 % as its threshold.

The rules see features and labels alone, so that nothing is trained.
"""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from benchmarks.discovery.sets import CPU, SETS, Bench
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from nearkin.classifier.features import UNTOUCHED, Extraction
from nearkin.classifier.reference import neighbors, outlier_auroc, reference_of
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import load
from nearkin.metrics.intervals import mean_interval

OPTIONS: Final = (
    Option("sets", ["digits", "omniglot", "fashion", "cifar10", "caltech"], "hosts", ["digits"]),
    Option("seeds", [6, 7, 8], "of the classes that are novel", [6]),
    Option("junk", 200, "images of each kind; more are never needed", 60),
    Option("most", 3000, "images of a set", 600),
)
OTHERS: Final = ("digits", "cifar10", "fashion.npz")
SHARES: Final = (0.05, 0.2)
SIDE: Final = 32


class Scored(NamedTuple):
    """What a rule says of the unlabeled images."""

    auroc: float
    recall: float
    false_alarms: float


class Task(NamedTuple):
    """Images to learn from, junk last."""

    features: Float[Tensor, "n dim"]
    label: np.ndarray  # -1 for unlabeled ones
    junk: Bool[np.ndarray, " n"]


def run(options: Namespace) -> Iterator[Row]:
    """Yield a row for each set, share, kind of junk and rule."""
    folder = Path(options.data)
    for name in options.sets:
        kinds = junk_of(name, folder, options.junk)
        for share in SHARES:
            for kind, features in kinds.items():
                tasks = [task(Bench(name, s, folder), features, share, options.most)
                         for s in options.seeds]  # fmt: skip
                for rule, scored in (("subspace", by_subspace), ("neighbor", by_neighbor)):
                    yield row(f"{name}, {share:.0%} {kind}, {rule}", list(map(scored, tasks)))


def row(case: str, scores: list[Scored]) -> Row:
    """Return the means over seeds."""
    values = {
        key: [getattr(each, key) for each in scores] for key in ("recall", "false_alarms")
    }
    aurocs = [each.auroc for each in scores]
    interval = mean_interval(np.array(aurocs)) if len(aurocs) > 1 else None
    more = {key: float(np.mean(each)) for key, each in values.items()}
    return Row(case, float(np.mean(aurocs)), "AUROC", interval=interval, rounds=len(aurocs), more=more)


def junk_of(name: str, folder: Path, count: int) -> dict[str, Float[Tensor, "n dim"]]:
    """Return the features of each kind of junk by the encoder of a set."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)
    gray = np.repeat(rng.integers(0, 256, (count, 1, 1, 1)), 3, axis=3)
    color = np.where(np.arange(count)[:, None, None, None] % 2, gray, rng.integers(0, 256, (count, 1, 1, 3)))
    scanned = color + rng.integers(-3, 4, (count, SIDE, SIDE, 3)) * (rng.random((count, 1, 1, 1)) < 0.5)
    images = {"noise": open_images(noise), "blank": open_images(scanned.clip(0, 255).astype(np.uint8))}
    for source in OTHERS:
        if source != SETS[name].data and ((folder / source).exists() or source == "digits"):
            every = open_images(str(folder / source) if source != "digits" else source)
            images[source.split(".")[0]] = every.subset(np.sort(rng.permutation(len(every))[:count]))
    encoder = load(SETS[name].encoder.format(folder=folder, data=name))
    return {
        kind: Extraction(encoder, each, UNTOUCHED, CPU, 0).compute().features.center
        for kind, each in images.items()
    }


def task(bench: Bench, junk: Float[Tensor, "m dim"], share: float, most: int) -> Task:
    """Return the images of a set with junk among the unlabeled ones."""
    given, rng = bench.task("gcd"), np.random.default_rng(bench.seed)
    rows = np.sort(rng.permutation(given.rows)[:most])
    label = given.label[rows]
    count = round(share / (1 - share) * int((label < 0).sum()))
    drawn = torch.from_numpy(rng.permutation(len(junk))[:count])
    features = torch.cat([bench.center[torch.from_numpy(rows)], junk[drawn]])
    return Task(
        features,
        np.concatenate([label, np.full(len(drawn), -1)]),
        np.arange(len(features)) >= len(rows),
    )


def by_subspace(task: Task) -> Scored:
    """Score by the rule of nearkin."""
    labeled, cluster = task.label >= 0, task.label.clip(min=0)
    reference = reference_of(task.features, cluster, labeled, int(cluster.max()) + 1)
    return _scored(task, reference.distance(task.features), reference.max_distance)


def by_neighbor(task: Task) -> Scored:
    """Score by the nearest images that were learned from."""
    distance = 1 - neighbors(task.features, task.features, 10).similarity[:, -1]
    return _scored(task, distance, float(np.quantile(distance, 0.99)))


def _scored(task: Task, distance: np.ndarray, threshold: float) -> Scored:
    unlabeled = task.label < 0
    junk, distance = task.junk[unlabeled], distance[unlabeled]
    flagged = distance > threshold
    return Scored(outlier_auroc(distance, junk), flagged[junk].mean(), flagged[~junk].mean())
