"""What `nearkin audit` finds of planted leaks, cameras and wrong labels, beside cleanlab.

    python -m benchmarks audit --data DATA --sets cifar10 --count 4000

`count` images of each set are drawn, a quarter of them for the test. Of that, 1, 5 and 20 % become
edited copies of training images. In `cases` smaller splits with leaks, intervals of what accuracy
owes to them are compared with the mean over all. A camera (tint, blur, JPEG) has taken some
classes more often than others, or all alike. 5 and 10 % of the labels are made wrong, and sought
by cleanlab, where installed, by the same votes.
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps

from benchmarks.discovery.sets import LITE0
from benchmarks.shared.datasets import as_jpeg
from benchmarks.shared.options import Option, folder_of
from benchmarks.shared.rows import Row
from nearkin.auditing.data import Audited
from nearkin.auditing.labels import Voters, check_labels
from nearkin.auditing.leaks import find_leaks
from nearkin.classifier.features import UNTOUCHED, Extraction
from nearkin.data.decode import as_image
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import load
from nearkin.evaluation.column import SURE, Known, column_test
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import knn
from nearkin.metrics.metric import Difference, difference
from nearkin.objectives import unit
from nearkin.pace import ignore_progress

OPTIONS: Final = (
    Option("sets", ["digits"], "data sets; others than digits lie in --data"),
    Option("count", 4_000, "images of a set", quick=300),
    Option("cases", 40, "splits with leaks, and columns without a meaning", quick=3),
    Option("seed", 0, "of the images that are drawn, and of what is planted"),
    Option("image-size", 64, "side of the images of EfficientNet-Lite0"),
)
SETS: Final = {
    "digits": ("digits", "{folder}/runs/digits"),
    "fashion": ("{folder}/fashion_mnist.npz", "{folder}/runs/fashion"),
    "cifar10": ("{folder}/cifar10.npz", LITE0),
    "caltech": ("{folder}/caltech99.tar", LITE0),
}
CPU: Final = torch.device("cpu")


def _cropped(image: Image.Image) -> Image.Image:
    box = (0.05 * image.width, 0.05 * image.height, 0.95 * image.width, 0.95 * image.height)
    return image.resize(image.size, Image.Resampling.BICUBIC, box)


def _shifted(image: Image.Image) -> Image.Image:
    x, y = (max(1, round(0.06 * side)) for side in image.size)
    pixels = np.pad(np.asarray(image), ((y, 0), (x, 0), (0, 0)), "edge")
    return Image.fromarray(pixels[: image.height, : image.width])


EDITS: Final[Mapping[str, Callable[[Image.Image], Image.Image]]] = {
    "copy": lambda image: image,
    "crop": _cropped,
    "shift": _shifted,
    "JPEG": lambda image: as_jpeg(image, 50),
    "mirror": ImageOps.mirror,
}


def camera(image: Image.Image) -> Image.Image:
    """Return an image as another camera takes it."""
    soft = image.filter(ImageFilter.GaussianBlur(0.0125 * max(image.size)))
    tinted = np.asarray(soft) * np.array([1.12, 1.0, 0.85])
    return as_jpeg(Image.fromarray(tinted.clip(0, 255).astype(np.uint8)), 50)


class Planted:
    """Images of a set, of which a quarter is for the test, with copies and with another camera."""

    def __init__(self, name: str, options: Namespace, folder: Path) -> None:
        data, encoder = (text.format(folder=folder_of(options)) for text in SETS[name])
        every = open_images(data)
        rng = np.random.default_rng(options.seed)
        rows = rng.permutation(len(every))[: options.count]
        self.labels, self.classes = every.labels[rows], every.classes
        self.num_test = len(rows) // 4
        for number, row in enumerate(rows.tolist()):
            stored = as_image(every.stored(row))
            assert isinstance(stored, Image.Image)
            image = stored.convert("RGB")
            kinds = {"original": lambda image: image, "camera": camera}
            kinds |= EDITS if self.num_test <= number < self.num_test * 5 // 4 else {}
            for kind, edit in kinds.items():
                (folder / kind).mkdir(exist_ok=True)
                edit(image).save(folder / kind / f"{number:06}.png")
        self.images = open_images(folder, labels="none", cache=False)
        size: int | Literal["auto"] = options.image_size if SETS[name][1] == LITE0 else "auto"
        extracted = Extraction(load(encoder, image_size=size), self.images, UNTOUCHED, CPU, 0)
        self.vectors = unit(extracted.compute().features.center).numpy()
        self.row = {name: row for row, name in enumerate(self.images.names)}

    def of(self, kind: str, numbers: np.ndarray) -> np.ndarray:
        """Return the rows of these images of a kind."""
        return np.array([self.row[f"{kind}/{n:06}.png"] for n in numbers.tolist()], np.int64)

    def audited(self, train: np.ndarray, test: np.ndarray) -> Audited:
        """Return these rows as two parts."""
        rows = np.sort(np.concatenate([train, test]))
        names = [self.images.names[row] for row in rows.tolist()]
        labels = self.labels[[int(name.rpartition("/")[2][:-4]) for name in names]]
        splits = np.where(np.isin(rows, test), "test", "train")
        embeddings = Embeddings(
            self.vectors[rows], labels, paths=names, classes=self.classes, splits=splits
        )
        return Audited(embeddings, self.images.subset(rows))

    def leaking(self, share: float, train: np.ndarray, test: np.ndarray) -> Audited:
        """Return a split of these images, of whose test this share is edited copies."""
        num, kinds = round(share * len(test)), list(EDITS)
        own = train[train < self.num_test * 5 // 4][:num]
        copies = [self.of(kinds[n % len(kinds)], own[n : n + 1])[0] for n in range(len(own))]
        others = self.of("original", test[len(own) :])
        return self.audited(self.of("original", train), np.append(others, copies).astype(np.int64))


def leaks(name: str, planted: Planted, share: float) -> Iterator[Row]:
    """Yield how many planted leaks are found, by kind, and how many others are."""
    test, train = np.split(np.arange(len(planted.labels)), [planted.num_test])
    audited = planted.leaking(share, train, test)
    found = find_leaks(audited, 0.99, 0, ignore_progress)
    names = audited.embeddings.paths
    kinds = [names[row].partition("/")[0] for row in audited.test_rows.tolist()]
    hits = [names[leak.test].partition("/")[0] for leak in found.found]
    true = sum(kind in EDITS for kind in hits)
    more: dict[str, Any] = {
        f"recall {kind}": hits.count(kind) / max(1, kinds.count(kind)) for kind in EDITS
    }
    others = len(hits) - true
    more |= {"other images found": others, "test": len(kinds), "threshold": found.threshold}
    recall = true / max(1, sum(kind in EDITS for kind in kinds))
    yield Row(f"{name} leaks {share:.0%}", recall, "recall", more=more)


def prices(name: str, planted: Planted, options: Namespace) -> Iterator[Row]:
    """Yield how often the interval of what kNN owes to leaks holds the mean of all cases."""
    found, true = list[Difference](), list[Difference]()
    for case in range(options.cases):
        rng = np.random.default_rng(case)
        test = rng.permutation(planted.num_test)[: min(300, planted.num_test)]
        train = planted.num_test + rng.permutation(len(planted.labels) - planted.num_test)[:900]
        audited = planted.leaking(0.15, train, test)
        names = audited.embeddings.paths
        numbers = np.array([int(name.rpartition("/")[2][:-4]) for name in names])
        groups = find_leaks(audited, 0.99, case, ignore_progress).groups
        found.append(owed(audited, groups))
        true.append(owed(audited, np.unique(numbers, return_inverse=True)[1]))
    truth = float(np.mean([each.value for each in true]))
    held = float(np.mean([each.low <= truth <= each.high for each in found]))
    more = {"estimated": float(np.mean([each.value for each in found])), "true": truth}
    yield Row(f"{name} price", held, "held", more=more | {"cases": options.cases})


def owed(audited: Audited, groups: np.ndarray) -> Difference:
    """Return what kNN owes to leaks, as `price` does; a linear classifier takes far longer."""
    embeddings = replace(audited.embeddings, groups=groups)
    train, test = (embeddings.subset(rows) for rows in (audited.train_rows, audited.test_rows))
    linked = np.isin(groups[audited.train_rows], groups[audited.test_rows])
    rest = train.subset(np.flatnonzero(~linked))
    return difference(knn(train, test)[0], knn(rest, test)[0])


def cameras(name: str, planted: Planted, options: Namespace) -> Iterator[Row]:
    """Yield what is said of cameras that go along with classes, and of none."""
    false, originals = [], planted.of("original", np.arange(len(planted.labels)))
    for case in range(options.cases):
        rng = np.random.default_rng(case)
        values = np.array(["x", "y"])[rng.integers(0, 2, len(planted.labels))]
        cut, every = planted.num_test, labeled(planted, originals)
        train, test = every.subset(np.arange(cut, len(values))), every.subset(np.arange(cut))
        known = Known.of("camera", (train, test), (values[cut:], values[:cut]))
        false.append(known.tested(case).p <= SURE)
    yield Row(f"{name} no camera", float(np.mean(false)), "found", more={"cases": options.cases})
    for share in (0.6, 0.8, 0.95):
        rng = np.random.default_rng(options.seed)
        usual = planted.labels % 2 == 1
        other = np.where(rng.random(len(usual)) < share, usual, ~usual)
        numbers = np.arange(len(usual))
        by = np.where(other, planted.of("camera", numbers), planted.of("original", numbers))
        every, cut = labeled(planted, by), planted.num_test
        values = np.where(other, "new", "old")
        pair = every.subset(numbers[cut:]), every.subset(numbers[:cut])
        tested = column_test("camera", pair, (values[cut:], values[:cut]), seed=0)
        more = {metric.name: metric.value for metric in tested.metrics} | {"chance": tested.chance}
        yield Row(f"{name} camera {share}", tested.p, "p", more=more)


def labeled(planted: Planted, rows: np.ndarray) -> Embeddings:
    """Return features of these rows, in the order of the images."""
    return Embeddings(planted.vectors[rows], planted.labels, classes=planted.classes)


def wrong_labels(name: str, planted: Planted, options: Namespace, share: float) -> Iterator[Row]:
    """Yield F1, precision and recall of labels made wrong, and those of cleanlab."""
    rng, num = np.random.default_rng(options.seed), len(planted.classes)
    every = labeled(planted, planted.of("original", np.arange(len(planted.labels))))
    wrong = rng.random(len(every)) < share
    labels = np.where(wrong, (every.labels + rng.integers(1, num, len(every))) % num, every.labels)
    own = np.arange(len(every))
    check = check_labels(replace(every, labels=labels), own, own, 1)
    assert check is not None
    found = np.isin(own, [doubt.row for doubt in check.doubts])
    more = figures("", found, wrong)
    more |= {"said precision": check.precision[0], "said recall": check.recall}
    if find_spec("cleanlab"):
        votes = Voters.of(every.tensor, own, own).votes(labels, num).astype(np.float64)
        issues: Any = import_module("cleanlab.filter").find_label_issues
        for by in ("prune_by_noise_rate", "confident_learning", "both"):
            found = issues(
                labels, votes / votes.sum(axis=1, keepdims=True), filter_by=by, n_jobs=1
            )
            more |= figures(f"cleanlab {by} ", found, wrong)
    f1 = more.pop("F1")
    yield Row(f"{name} labels {share:.0%}", f1, "F1", more=more)


def figures(prefix: str, found: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    """Return precision, recall and F1."""
    both, num = float((found & wrong).sum()), int(found.sum())
    figures = {"precision": both / max(1, num), "recall": both / wrong.sum()}
    figures["F1"] = 2 * both / (num + wrong.sum())
    return {f"{prefix}{name}": float(value) for name, value in figures.items()}


def run(options: Namespace) -> Iterator[Row]:
    """Plant in each set, and look for it."""
    for name in options.sets:
        with tempfile.TemporaryDirectory() as folder:
            planted = Planted(name, options, Path(folder))
            for share in (0.0, 0.01, 0.05, 0.2):
                yield from leaks(name, planted, share)
            for share in (0.05, 0.1):
                yield from wrong_labels(name, planted, options, share)
            yield from prices(name, planted, options)
            yield from cameras(name, planted, options)
