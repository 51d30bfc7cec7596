"""All metrics of an encoder, beside those of its start, an untrained network and raw pixels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from jaxtyping import Int64
from typing_extensions import override

from nearkin.choices import Protocol
from nearkin.config import Augment
from nearkin.data.images import Images
from nearkin.data.split import Split
from nearkin.encoders.encoder import Encoder
from nearkin.errors import DataError, DivergedError
from nearkin.evaluation.baselines import PIXEL_BANK, TITLES, pixel_features
from nearkin.evaluation.column import ColumnTest
from nearkin.evaluation.embeddings import Embeddings, embeddings_of, encode_images
from nearkin.evaluation.leaks import Leaks, find_leaks, stored_leaks
from nearkin.evaluation.metrics import CPU, GEOMETRY_IMAGES, TEST, geometry_rows
from nearkin.evaluation.protocols import ENTRIES, GEOMETRY, QUICK, Entry, Inputs, chosen
from nearkin.evaluation.verdict import StartComparison, differences, has_collapsed, kept
from nearkin.evaluation.views import ImageViews, second_view
from nearkin.metrics.metric import Difference, Metric
from nearkin.objectives.fused import blocks
from nearkin.pace import ProgressCallback, ignore_progress, under
from nearkin.result import Result, Row
from nearkin.text import aligned

PIECE: Final = 1024  # Images whose features are checked at once

Pair = tuple[Embeddings, Embeddings]
"""Training and test embeddings."""
Part = TypeVar("Part", Images, Embeddings)


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
        metrics = {
            table: [Metric(**entry) for entry in column.values()]
            for table, column in summary["metrics"].items()
        }
        return cls(
            summary["sizes"],
            metrics,
            summary["left_out"],
            stored_differences(summary),
            summary.get("comparison", {}).get("collapsed", False),
            stored_leaks(summary),
            start,
            ColumnTest.stored(summary["column"]) if "column" in summary else None,
        )

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


def stored_differences(summary: Mapping[str, Any]) -> dict[str, tuple[Difference, ...]]:
    """Return the differences that summary.json holds, by table."""
    plain = summary.get("differences", {})
    return {table: tuple(Difference(**each) for each in found) for table, found in plain.items()}


# Of features


def evaluate_tables(
    tables: Mapping[str, Pair],
    *,
    seed: int,
    protocol: Sequence[Protocol] = (QUICK,),
    images: Mapping[str, ImageViews] | None = None,
    device: torch.device = CPU,
    scored: str = TEST,
    on_progress: ProgressCallback = ignore_progress,
) -> Evaluation:
    """Take the same metrics of several tables of features of the same images.

    The first of `tables` is the encoder's, whose numbers of images are reported; the others are
    what it stands beside, and is compared with image by image. Each has training and test
    embeddings: the first are the bank of kNN and what the probe learns from. The labels of test
    images decide nothing but the scores.

    `protocol` names what is measured, see `nearkin.evaluation.protocols`. For metrics that need
    more than features, `images` has those of each table. `scored` says what the test images are.
    """
    metrics, reasons = dict[str, list[Metric]](), dict[str, dict[str, str]]()
    for name, (train, test) in tables.items():
        inputs = Inputs(train, test, seed, device, (images or {}).get(name), scored)
        progress = under(TITLES.get(name, name), on_progress)
        metrics[name], reasons[name] = _measured(inputs, chosen(protocol), progress)
    train, test = next(iter(tables.values()))
    evaluation = Evaluation(
        {"train": len(train), "test": len(test)}, metrics, _left_out(reasons, len(tables))
    )
    if not set(ENTRIES[QUICK]) <= set(chosen(protocol)):
        return evaluation  # the verdict is on the same metrics always
    # It is on the encoder, also where the table of its projector's embedding comes first.
    compared = {name: column for name, column in metrics.items() if name != "embedding"}
    collapsed = "start" in compared and has_collapsed(compared)
    return replace(evaluation, differences=differences(tables, compared), collapsed=collapsed)


def _left_out(reasons: Mapping[str, Mapping[str, str]], tables: int) -> dict[str, str]:
    """Return what was not measured, by its title; with the table, where it is not of all."""
    left_out = dict[str, str]()
    for name, of in reasons.items():
        for title, why in of.items():
            everywhere = sum(title in other for other in reasons.values()) == tables
            key = title if everywhere else f"{title} of {TITLES.get(name, name)}"
            left_out.setdefault(key, why)
    return left_out


def _measured(
    inputs: Inputs, entries: Sequence[Entry], on_progress: ProgressCallback
) -> tuple[list[Metric], dict[str, str]]:
    """Take the metrics of one table of features; and why not, by what could not be measured."""
    for embeddings in (inputs.train, inputs.test, inputs.test.second_view):
        _check_finite(embeddings)
    metrics, reasons = list[Metric](), dict[str, str]()
    for done, entry in enumerate(entries):
        on_progress(done, len(entries), entry.title)
        try:
            metrics += entry.measure(inputs)
            reasons |= entry.missing(inputs)
        except DataError as error:
            reasons[entry.title] = str(error)
    on_progress(len(entries), len(entries), "measured")
    return metrics, reasons


def _check_finite(embeddings: Embeddings | None) -> None:
    for rows in blocks(0 if embeddings is None else len(embeddings), PIECE):
        assert embeddings is not None
        finite = np.isfinite(embeddings.vectors[rows]).all(axis=1)
        if not finite.all():
            raise DivergedError(
                f"the features of {_called(embeddings, rows.start + int(finite.argmin()))} are "
                "not finite numbers; "
                "go back to an encoder from before its training diverged"
            )


def _called(embeddings: Embeddings, row: int) -> str:
    return repr(embeddings.paths[row]) if embeddings.paths else f"image {row}"


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
    protocol: Sequence[Protocol] = (QUICK,),
    table: str = "encoder",
    features: Mapping[str, Embeddings] | None = None,
    on_encoded: Callable[[Embeddings], object] = lambda _: None,
    on_progress: ProgressCallback = ignore_progress,
) -> tuple[Evaluation, Embeddings]:
    """Measure an encoder on images that are already open and split.

    Images that cannot be read count nowhere.

    Args:
        encoder: What is measured.
        split: Training images, the bank of kNN and what the probe learns from, and test images.
        beside: Encoders that it stands beside, by the name of their table, such as `untrained`;
            raw pixels always follow them.
        seed: Decides what is drawn for probe, clusters and views.
        workers: Processes that decode photographs.
        augment: Augmentation of the second view of some images.
        device: Where to compute.
        protocol: What is measured; see `nearkin.evaluation.protocols`.
        table: Name of the encoder's table.
        features: Of all images of the split, as an encoder gives them, by the name of its table;
            computed here where they are missing.
        on_encoded: Receives the encoder's embeddings, before they are measured.
        on_progress: Receives the progress.

    Returns:
        The metrics, and the encoder's embeddings of all images, normalized, in their order.
    """
    chosen(protocol)  # a wrong name is refused before anything is computed
    parts = {"train": split.train, "test": split.test}
    parts = {name: part for name, part in parts.items() if len(part)}
    rows = {"train": split.train_rows, "test": split.test_rows}
    with_view = not set(GEOMETRY).isdisjoint(chosen(protocol))
    study, computed = _Study(parts, seed, workers, augment, device, with_view), features or {}
    of_table = under(TITLES.get(table, table), on_progress)
    encoded = study.encode(encoder, of_table, computed.get(table), rows)
    for part in encoded.values():
        _check_finite(part)
    embeddings = _joined(split, encoded)
    on_encoded(embeddings)
    # The others are measured on the very images that the encoder could read.
    readable = {name: parts[name].subset(part.rows) for name, part in encoded.items()}
    rows = {name: rows[name][part.rows] for name, part in encoded.items()}
    study = replace(study, parts=readable)
    tables, views = {table: encoded}, {table: study.views(encoder, of_table)}
    for name, other in beside.items():
        progress = under(TITLES.get(name, name), on_progress)
        tables[name] = study.encode(other, progress, computed.get(name), rows)
        views[name] = study.views(other, progress)
    tables["pixels"] = study.pixels(under(TITLES["pixels"], on_progress))
    evaluation = evaluate_tables(
        {name: _train_and_test(each) for name, each in tables.items()},
        seed=seed,
        protocol=protocol,
        images=views,
        device=device,
        scored=TEST if "test" in encoded else "training images",
        on_progress=on_progress,
    )
    # There is no test where none is held out.
    sizes = {"train": 0} | {name: len(part) for name, part in encoded.items()}
    leaked = split.leaked[encoded["test"].rows] if "test" in encoded else np.zeros(0, np.bool_)
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
    parts = {"train": images.spread(GEOMETRY_IMAGES)}
    study = _Study(parts, seed, workers, augment, device)
    pair = _train_and_test(study.encode(encoder, on_progress))
    inputs = Inputs(*pair, seed, device, scored="images")
    metrics, _ = _measured(inputs, ENTRIES["labelfree"], on_progress)
    return {metric.name: metric for metric in metrics}


@dataclass(frozen=True, eq=False)
class _Study:
    """The images that all tables of an evaluation are of, and how these are encoded."""

    parts: Mapping[str, Images]  # Of each split
    seed: int
    workers: int
    augment: Augment
    device: torch.device
    with_view: bool = True  # Whether a second view of some is needed

    def encode(
        self,
        encoder: Encoder,
        on_progress: ProgressCallback,
        computed: Embeddings | None = None,
        rows: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, Embeddings]:
        """Embeddings of each part; of the last, which is scored, also the second view of some.

        `computed` are features of all images, in which the parts are at these `rows`.
        """
        encoded = {
            name: encode_images(
                encoder, part, device=self.device, workers=self.workers, on_progress=on_progress
            )
            if computed is None or rows is None
            else _chosen(computed, part, rows[name])
            for name, part in self.parts.items()
        }
        if not self.with_view:
            return encoded
        scored = list(self.parts)[-1]
        readable = self.parts[scored].subset(encoded[scored].rows)
        view = second_view(
            encoder,
            readable,
            geometry_rows(len(readable)),
            seed=self.seed,
            augment=self.augment,
            device=self.device,
        )
        return encoded | {scored: replace(encoded[scored], second_view=view)}

    def pixels(self, on_progress: ProgressCallback) -> dict[str, Embeddings]:
        """Raw pixels of each part; of many training images, those of some."""
        parts = {
            name: part.spread(PIXEL_BANK) if name == "train" else part
            for name, part in self.parts.items()
        }
        features = pixel_features(parts.values(), self.workers, on_progress)
        return {
            name: embeddings_of(part, pixels.numpy())
            for (name, part), pixels in zip(parts.items(), features, strict=True)
        }

    def views(self, encoder: Encoder, on_progress: ProgressCallback) -> ImageViews:
        """The images with their encoder."""
        train, test = _both(self.parts)
        return ImageViews(encoder, train, test, self.workers, self.device, on_progress)


def _chosen(
    features: Embeddings, images: Images, rows: Int64[np.ndarray, " images"]
) -> Embeddings:
    """Of the features of all images, those of a part, which is at these rows of them."""
    own = np.flatnonzero(np.isin(rows, features.rows))
    vectors = features.vectors[np.searchsorted(features.rows, rows[own])]
    bad = {name: features.bad[name] for name in images.names if name in features.bad}
    return embeddings_of(images.subset(own), vectors, own, bad)


def _train_and_test(parts: Mapping[str, Embeddings]) -> Pair:
    """Where nothing is held out, training images are a test of nothing but geometry."""
    train, test = _both(parts)
    return train, test if "test" in parts else train.unlabeled()


def _both(parts: Mapping[str, Part]) -> tuple[Part, Part]:
    """Return the training images and what is scored; all are scored if they are of one part."""
    scored = list(parts.values())[-1]
    return parts.get("train", scored.subset(np.zeros(0, np.int64))), scored


def _joined(split: Split, encoded: Mapping[str, Embeddings]) -> Embeddings:
    """Both splits as one table, in the order of the data."""
    places = {"train": split.train_rows, "test": split.test_rows}
    rows = np.concatenate([places[name][part.rows] for name, part in encoded.items()])
    order = rows.argsort()
    vectors = np.concatenate([part.vectors for part in encoded.values()])[order]
    bad = {name: why for part in encoded.values() for name, why in part.bad.items()}
    joined = embeddings_of(split.images.subset(rows[order]), vectors, rows[order], bad)
    splits = np.repeat(list(encoded), [len(part) for part in encoded.values()])
    return replace(joined, splits=splits[order]).normalized()
