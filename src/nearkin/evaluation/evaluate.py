"""All metrics of an encoder, beside those of its start, an untrained network and raw pixels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from jaxtyping import Int
from typing_extensions import override

from nearkin.choices import Protocol
from nearkin.config import Augment
from nearkin.data.augmentations import measured_view
from nearkin.data.batches import Batches
from nearkin.data.images import Images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.data.split import Split
from nearkin.data.views import normalize
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.inference import encode, images_at_once, inference
from nearkin.errors import DataError, DivergedError
from nearkin.evaluation.attentive import ImageViews
from nearkin.evaluation.baselines import PIXEL_BANK, TITLES, pixel_features
from nearkin.evaluation.column import ColumnTest
from nearkin.evaluation.embeddings import Embeddings, Pair, embeddings_of, encode_images
from nearkin.evaluation.leaks import Leaks, find_leaks
from nearkin.evaluation.metrics import CPU, GEOMETRY_IMAGES, TEST, geometry_rows, large_ks
from nearkin.evaluation.protocols import GEOMETRY, METRICS, PROTOCOLS, Inputs, chosen
from nearkin.evaluation.verdict import StartComparison, differences, has_collapsed, kept
from nearkin.metrics.metric import Difference, Metric
from nearkin.objectives.fused import blocks
from nearkin.pace import ProgressCallback, ignore_progress, under
from nearkin.result import Result, Row
from nearkin.text import aligned

PIECE: Final = 1024  # Images whose features are checked at once


# What is measured


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation(Result):
    """The metrics of each table of features: the encoder's first, then those it stands beside."""

    sizes: Mapping[str, int]  # Number of images of each split
    metrics: Mapping[str, list[Metric]]  # By table of features
    left_out: Mapping[str, str]  # What could not be measured, of all tables or of one, and why
    differences: Mapping[str, tuple[Difference, ...]] = field(
        default_factory=dict[str, tuple[Difference, ...]]
    )
    """Of the first table to each other one, image by image."""
    collapsed: bool = False  # Whether the features have collapsed, those of a start being spread
    leaks: Leaks | None = None  # Of test images into the training part, if there are any
    start: Path | None = None  # The file of what the training started from, for the verdict
    column: ColumnTest | None = None  # Of a column that features are to ignore
    bad: Mapping[str, str] = field(default_factory=dict[str, str])
    """Paths of images that cannot be read, with the reason."""

    @classmethod
    def stored(cls, summary: Mapping[str, Any], start: Path | None = None) -> "Evaluation":
        """Return what `to_dict` has made plain, without the outcomes of single images."""
        names = {"sizes", "left_out", "differences", "leaks"} & summary.keys()
        metrics = {table: [*column.values()] for table, column in summary["metrics"].items()}
        plain = {name: summary[name] for name in names} | {"metrics": metrics}
        collapsed = summary.get("comparison", {}).get("collapsed", False)
        column = ColumnTest.stored(summary["column"]) if "column" in summary else None
        found = msgspec.convert(plain, cls)
        return replace(found, collapsed=collapsed, start=start, column=column)

    @property
    def comparison(self) -> StartComparison | None:
        """The encoder beside the start of its training, if it had one."""
        if "start" not in self.differences:
            return None
        return StartComparison(self.differences["start"], self.collapsed)

    @property
    def kept(self) -> list[str]:
        """What the encoder keeps of the accuracy of its teacher, if it had one."""
        return [text for each in self.differences.get("teacher", ()) if (text := kept(each))]

    @override
    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        metrics = {
            table: {metric.name: metric.to_dict() for metric in column}
            for table, column in self.metrics.items()
        }
        plain = {"sizes": self.sizes, "metrics": metrics, "left_out": self.left_out}
        plain["differences"] = {
            table: [asdict(each) for each in found] for table, found in self.differences.items()
        }
        plain |= {"comparison": self.comparison.to_dict()} if self.comparison else {}
        plain |= {"column": self.column.to_dict()} if self.column else {}
        plain |= {"bad": self.bad} if self.bad else {}
        return plain | ({"leaks": asdict(self.leaks)} if self.leaks else {})

    @override
    def records(self) -> list[Row]:
        """A row per table of features and metric, with the interval of 95 % confidence."""
        return [
            {"features": table, "metric": m.name, "value": m.value, "low": m.low, "high": m.high}
            for table, column in self.metrics.items()
            for m in column
        ]

    @override
    def lines(self) -> list[str]:
        """Format the metrics as aligned columns, then what could not be measured, and why.

        The last line is the verdict on a training that had a start.
        """
        notes = [f"{name}: not measured, {why}" for name, why in self.left_out.items()]
        verdict = [self.comparison.line(self.start)] if self.comparison else []
        leaks = [f"warning: {self.leaks}"] if self.leaks else []
        rows = metric_rows({TITLES.get(name, name): of for name, of in self.metrics.items()})
        column = self.column.lines() if self.column else []
        return [*aligned(rows), *notes, *leaks, *column, *self.kept, *verdict]


def metric_rows(columns: Mapping[str, Sequence[Metric]]) -> list[list[str]]:
    """Return cells of text: a heading, then a row per metric, `-` where a column has none."""
    cells = {title: {m.name: str(m) for m in column} for title, column in columns.items()}
    names = dict.fromkeys(name for of in cells.values() for name in of)
    rows = [[name, *(of.get(name, "-") for of in cells.values())] for name in names]
    return [["metric", *cells], *rows]


# Of features


def evaluate_tables(
    tables: Mapping[str, Pair],
    *,
    seed: int,
    protocol: Sequence[Protocol] = ("quick",),
    images: Mapping[str, ImageViews] | None = None,
    device: torch.device = CPU,
    scored: str = TEST,
    on_progress: ProgressCallback = ignore_progress,
) -> Evaluation:
    """Take the same metrics of several tables of features of the same images.

    The first of `tables` is the encoder's, whose numbers of images are reported; the others are
    what it stands beside, and is compared with image by image. The labels of test images decide
    nothing but the scores. `images` are for metrics that need more than features, by table, and
    `scored` says what the test images are.
    """
    titles = chosen(protocol)
    metrics, reasons = dict[str, list[Metric]](), dict[str, dict[str, str]]()
    for name, (train, test) in tables.items():
        inputs = Inputs(train, test, seed, device, (images or {}).get(name), scored)
        progress = under(TITLES.get(name, name), on_progress)
        metrics[name], reasons[name] = _measured(inputs, titles, progress)
    train, test = next(iter(tables.values()))
    sizes = {"train": len(train), "test": len(test)}
    evaluation = Evaluation(sizes, metrics, _left_out(reasons))
    if not set(PROTOCOLS["quick"]) <= set(titles):
        return evaluation  # the verdict is on the same metrics always
    # It is on the encoder, also where the table of its projector's embedding comes first.
    compared = {name: column for name, column in metrics.items() if name != "embedding"}
    collapsed = "start" in compared and has_collapsed(compared)
    return replace(evaluation, differences=differences(tables, compared), collapsed=collapsed)


def _left_out(reasons: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return what was not measured, by its title; with the table, where it is not of all."""
    left_out = dict[str, str]()
    for name, of in reasons.items():
        for title, why in of.items():
            everywhere = all(title in other for other in reasons.values())
            key = title if everywhere else f"{title} of {TITLES.get(name, name)}"
            left_out.setdefault(key, why)
    return left_out


def _measured(
    inputs: Inputs, titles: Sequence[str], on_progress: ProgressCallback
) -> tuple[list[Metric], dict[str, str]]:
    """Take the metrics of one table of features; and why not, by what could not be measured."""
    for embeddings in filter(None, (inputs.train, inputs.test, inputs.test.second_view)):
        _check_finite(embeddings)
    metrics, reasons = list[Metric](), dict[str, str]()
    for done, title in enumerate(titles):
        on_progress(done, len(titles), title)
        try:
            metrics += METRICS[title](inputs)
            reasons |= large_ks(inputs.train) if title == "kNN" else {}
        except DataError as error:
            reasons[title] = str(error)
    on_progress(len(titles), len(titles), "measured")
    return metrics, reasons


def _check_finite(embeddings: Embeddings) -> None:
    for rows in blocks(len(embeddings), PIECE):
        finite = np.isfinite(embeddings.vectors[rows]).all(axis=1)
        if not finite.all():
            row = rows.start + int(finite.argmin())
            name = repr(embeddings.paths[row]) if embeddings.paths else f"image {row}"
            raise DivergedError(
                f"the features of {name} are not finite numbers; go back to an encoder from "
                "before its training diverged"
            )


# Of encoders and images


def evaluate_split(
    encoder: Encoder,
    split: Split,
    *,
    beside: Mapping[str, Encoder],
    seed: int,
    workers: int,
    augment: Augment,
    device: torch.device,
    protocol: Sequence[Protocol] = ("quick",),
    table: str = "encoder",
    features: Mapping[str, Embeddings] | None = None,
    on_encoded: Callable[[Embeddings], object] = lambda _: None,
    on_progress: ProgressCallback = ignore_progress,
) -> tuple[Evaluation, Embeddings]:
    """Measure an encoder on images that are already open and split.

    It stands `beside` others, by the name of their table, and beside raw pixels. Images that
    cannot be read count nowhere. `features` are those of all images, by the name of their table;
    missing ones are computed. `on_encoded` receives the encoder's embeddings before they are
    measured. `augment` is of the second view of some images. For `protocol` see
    `nearkin.evaluation.protocols`.

    Returns:
        The metrics, and the encoder's embeddings of all images, normalized, in their order.
    """
    titles, computed = chosen(protocol), features or {}  # first of all, wrong names are refused

    def features_of(name: str, of: Encoder, on_progress: ProgressCallback) -> Embeddings:
        if name in computed:
            return computed[name]
        by = inference(of, device)
        return encode_images(by, split.images, workers=workers, on_progress=on_progress)

    whole = features_of(table, encoder, under(TITLES.get(table, table), on_progress))
    _check_finite(whole)
    embeddings = replace(whole, splits=split.splits[whole.rows]).normalized()
    # The others are measured on the very images that the encoder could read.
    readable = _readable(split, whole.rows)
    on_encoded(embeddings)
    scored = readable.test if len(readable.test) else readable.train
    with_view = not set(GEOMETRY).isdisjoint(titles)
    how: Any = {"seed": seed, "augment": augment, "device": device, "workers": workers}
    tables, views = dict[str, Pair](), dict[str, ImageViews]()
    for name, of in {table: encoder, **beside}.items():
        progress = under(TITLES.get(name, name), on_progress)
        view = second_view(of, scored, **how) if with_view else None
        views[name] = ImageViews(of, readable.train, scored, workers, device, progress)
        if name != table:
            whole = features_of(name, of, progress)  # one at a time: they may be large
        tables[name] = _divided(whole, split, embeddings.rows, view)
    del whole
    tables["pixels"] = _pixels(readable, workers, under(TITLES["pixels"], on_progress))
    evaluation = evaluate_tables(
        tables,
        seed=seed,
        protocol=protocol,
        images=views,
        device=device,
        scored=TEST if len(readable.test) else "training images",
        on_progress=on_progress,
    )
    # There is no test where none is held out.
    sizes = evaluation.sizes if len(readable.test) else {"train": len(readable.train)}
    leaked = split.leaked[np.isin(split.test_rows, embeddings.rows)]
    grouped = any(split.images.group_names)
    leaks = find_leaks(leaked, evaluation.metrics[table], grouped=grouped)
    return replace(evaluation, sizes=sizes, leaks=leaks), embeddings


def label_free(
    encoder: Encoder,
    images: Images,
    *,
    seed: int,
    workers: int,
    augment: Augment,
    device: torch.device,
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, Metric]:
    """Take the metrics of the protocol `labelfree`, by name; those that fail are missing.

    Of at most `GEOMETRY_IMAGES` images, evenly spread, whichever split they are of.
    """
    some = images.spread(GEOMETRY_IMAGES)
    by = inference(encoder, device)
    of = encode_images(by, some, workers=workers, on_progress=on_progress)
    how: Any = {"seed": seed, "augment": augment, "device": device, "workers": workers}
    view = second_view(encoder, some.subset(of.rows), **how)
    inputs = Inputs(of, replace(of, second_view=view), seed, device, scored="images")
    metrics, _ = _measured(inputs, GEOMETRY, on_progress)
    return {metric.name: metric for metric in metrics}


def second_view(
    encoder: Encoder,
    images: Images,
    *,
    seed: int,
    augment: Augment,
    device: torch.device,
    workers: int = 0,
) -> Embeddings:
    """Embeddings of some images, augmented as in training: they should hardly differ."""
    rows = geometry_rows(len(images))
    some, encoder = images.subset(rows), encoder.to(device)
    batches = Batches.of(
        encoder.preprocessing.applied(some),
        (measured_view(augment),),
        image_size=encoder.image_size,
        sampler=RandomBatchSampler(len(some), 1, seed),
        device=device,
        workers=workers,
    )
    size = images_at_once(encoder.image_size, device)
    pieces = np.array_split(np.arange(len(some)), range(size, len(some), size))
    views = batches.planned([(0, piece) for piece in pieces])
    features = encode(encoder.backbone, (normalize(view) for (view,), _ in views))
    own = np.setdiff1d(np.arange(len(some)), list(batches.bad))  # bad ones show another's view
    return embeddings_of(some.subset(own), features.numpy()[own], rows[own])


def _readable(split: Split, rows: Int[np.ndarray, " readable"]) -> Split:
    """Return a split of the images at these rows; DataError if a part of it has none left."""
    left = split.without(np.setdiff1d(np.arange(len(split.images)), rows).tolist())
    for opened, read in ((split.train, left.train), (split.test, left.test)):
        if len(opened) and not len(read):
            raise DataError(f"none of the {len(opened)} images can be read; look at the files")
    return left


def _divided(
    features: Embeddings,
    split: Split,
    readable: Int[np.ndarray, " readable"],
    second_view: Embeddings | None,
) -> Pair:
    """Return the readable training and test images of a table; a view is of what is scored."""
    train, test = (
        features.subset(np.isin(features.rows, np.intersect1d(rows, readable)))
        for rows in (split.train_rows, split.test_rows)
    )
    return train, replace(_scored(train, test), second_view=second_view)


def _scored(train: Embeddings, test: Embeddings) -> Embeddings:
    """Where nothing is held out, training images are a test of nothing but geometry."""
    return test if len(test) else train.unlabeled()


def _pixels(split: Split, workers: int, on_progress: ProgressCallback) -> Pair:
    """Return raw pixels of training and test images; of many training images, those of some."""
    parts = [part for part in (split.train.spread(PIXEL_BANK), split.test) if len(part)]
    features = [
        embeddings_of(part, pixels.numpy())
        for part, pixels in zip(parts, pixel_features(parts, workers, on_progress), strict=True)
    ]
    none = features[0].subset(())
    train = features[0] if len(split.train) else none
    return train, _scored(train, features[-1] if len(split.test) else none)
