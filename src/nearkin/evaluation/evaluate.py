"""All measures of an encoder, beside their floors: its start, an untrained network, pixels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nearkin.choices import Protocol
from nearkin.config import Augment
from nearkin.data.batches import CenterCrops, from_zero_to_one
from nearkin.data.images import Images
from nearkin.data.split import Split
from nearkin.distributed import ALONE, Share
from nearkin.encoders.encoder import Encoder
from nearkin.errors import DataError, DivergedError
from nearkin.evaluation.embeddings import Embeddings, embeddings_of, encode_images
from nearkin.evaluation.floors import (
    FEWEST,
    Taken,
    conditions,
    stored_file,
    stored_or_taken,
)
from nearkin.evaluation.kept import KeptShare, kept_shares, plain_shares, stored_shares
from nearkin.evaluation.leaks import Leaks, find_leaks, stored_leaks
from nearkin.evaluation.measures import (
    CPU,
    GEOMETRY_IMAGES,
    Measure,
    geometry_rows,
    num_neighbors,
)
from nearkin.evaluation.protocols import ENTRIES, QUICK, Entry, Inputs, chosen
from nearkin.evaluation.verdict import StartComparison, compare_with_start, stored_comparison
from nearkin.evaluation.views import ImageViews, pixel_encoder, second_view
from nearkin.objectives import unit
from nearkin.objectives.fused import blocks
from nearkin.pace import ProgressCallback, ignore_progress, tracked, under
from nearkin.text import aligned
from nearkin.types import UNKNOWN

# Columns that are headed by another name than their own.
TITLES: Final = {
    "teacher": "teacher",
    "start": "frozen start",
    "untrained": "untrained encoder",
    "pixels": "raw pixels",
}
SIDE: Final = 32  # Raw pixels are those of crops of so many pixels a side
PIXEL_BANK: Final = 50_000  # Training images, at most, whose raw pixels are measured
PIECE: Final = 1024  # Images whose raw pixels are centered, or features checked, at once


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The measures of each table of features: `encoder`, `teacher`, `start`, `untrained`, ..."""

    sizes: Mapping[str, int]  # Number of images of each split
    measures: Mapping[str, list[Measure]]  # By table of features
    left_out: Mapping[str, str]  # What could not be measured, of all tables or of one, and why
    comparison: StartComparison | None = None  # With the start of the training, if it had one
    kept: tuple[KeptShare, ...] = ()  # Of the accuracy of its teacher, if it had one
    leaks: Leaks | None = None  # Of test images into the training part, if there are any
    start: Path | None = None  # The file of what the training started from, for the verdict

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        measures = {
            table: {measure.name: measure.to_dict() for measure in column}
            for table, column in self.measures.items()
        }
        plain = {"sizes": self.sizes, "measures": measures, "left_out": self.left_out}
        plain |= {"comparison": self.comparison.to_dict()} if self.comparison else {}
        plain |= {"leaks": asdict(self.leaks)} if self.leaks else {}
        return plain | plain_shares(self.kept)

    def rows(self) -> list[list[str]]:
        """Return cells of text: a heading, then a row per measure and a column per table."""
        columns = [{m.name: str(m) for m in measures} for measures in self.measures.values()]
        names = dict.fromkeys(name for column in columns for name in column)
        heading = ["measure", *(TITLES.get(table, table) for table in self.measures)]
        return [heading, *([name, *(c.get(name, "-") for c in columns)] for name in names)]

    def lines(self) -> list[str]:
        """Format the measures as aligned columns, then what could not be measured, and why.

        The last line is the verdict on a training that had a start.
        """
        notes = [f"{name}: not measured, {why}" for name, why in self.left_out.items()]
        verdict = [self.comparison.line(self.start)] if self.comparison else []
        leaks = [f"warning: {self.leaks}"] if self.leaks else []
        return [*aligned(self.rows()), *notes, *leaks, *map(str, self.kept), *verdict]


def lines(summary: Mapping[str, Any], start: Path | None = None) -> list[str]:
    """Summarize a training in lines: its measures beside their floors, and the verdict."""
    measures = {
        table: [Measure(**entry) for entry in column.values()]
        for table, column in summary["measures"].items()
    }
    comparison = stored_comparison(summary)
    parts = summary["sizes"], measures, summary["left_out"], comparison
    return Evaluation(*parts, stored_shares(summary), stored_leaks(summary), start).lines()


def evaluate_tables(
    tables: Mapping[str, tuple[Embeddings, Embeddings]],
    *,
    seed: int,
    k: int = 200,
    protocol: Sequence[Protocol] = (QUICK,),
    image_views: Mapping[str, ImageViews] | None = None,
    device: torch.device = CPU,
    share: Share = ALONE,
    on_progress: ProgressCallback = ignore_progress,
) -> Evaluation:
    """Take the same measures of several tables of features of the same images.

    The first of `tables` is the encoder's, whose numbers of images are reported; the others are
    the floors it has to beat. Each has training and test embeddings: the first are the bank of
    kNN and what the probe learns from. The labels of test images decide nothing but the scores.
    If one of the floors is the `start` of a training, the encoder is compared with it image by
    image. One that is the `teacher` is compared with it likewise.

    `protocol` names what is measured, see `nearkin.evaluation.protocols`. For measures that need
    more than features, `image_views` has the images of each table. With the share of a process,
    others measure the same tables at the same time.
    """
    taken = {}
    for name, (train, test) in tables.items():
        views = (image_views or {}).get(name)
        inputs = Inputs(train, test, k, seed, device, views, share)
        taken[name] = _measured(inputs, chosen(protocol), under(name, on_progress))
    return _evaluation(tables, taken, protocol, k)


def _evaluation(
    tables: Mapping[str, tuple[Embeddings, Embeddings]],
    taken: Mapping[str, Taken],
    protocol: Sequence[Protocol],
    k: int,
) -> Evaluation:
    """Join what was taken of each table, and compare the encoder with its start and its teacher.

    Tables of floors that were measured before may be missing.
    """
    measures = {
        name: [measure for of in each.values() if not isinstance(of, str) for measure in of]
        for name, each in taken.items()
    }
    elsewhere = {
        title
        for each in taken.values()
        for title, of in each.items()
        if isinstance(of, list) and of
    }
    left_out: dict[str, str] = {}
    for name, each in taken.items():
        for title, why in each.items():
            if isinstance(why, str):
                of_one = f"{title} of {TITLES.get(name, name)}" if title in elsewhere else title
                left_out.setdefault(of_one, why)
    train, test = next(iter(tables.values()))
    evaluation = Evaluation({"train": len(train), "test": len(test)}, measures, left_out)
    if not set(ENTRIES[QUICK]) <= set(chosen(protocol)):
        return evaluation  # the verdict is on the same measures always
    comparison = compare_with_start(tables, measures, k=k)
    shares = kept_shares(tables, measures, k=k)
    return replace(evaluation, comparison=comparison, kept=shares)


def _measured(inputs: Inputs, entries: Sequence[Entry], on_progress: ProgressCallback) -> Taken:
    """Take the measures of one table of features, or the reason why not."""
    for embeddings in (inputs.train, inputs.test, inputs.test.second_view):
        _check_finite(embeddings)
    taken = Taken()
    for done, entry in enumerate(entries):
        on_progress(done, len(entries), entry.title)
        try:
            measures = entry.measure(inputs)
        except DataError as error:
            taken[entry.title] = str(error)
        else:
            if not entry.compared:  # in the verdict, which looks at outcomes
                measures = [replace(measure, outcome=None) for measure in measures]
            taken[entry.title] = measures
    on_progress(len(entries), len(entries), "measured")
    return taken


def _check_finite(embeddings: Embeddings | None) -> None:
    if embeddings is None:
        return
    for rows in blocks(len(embeddings), PIECE):
        finite = np.isfinite(embeddings.vectors[rows]).all(axis=1)
        if not finite.all():
            raise DivergedError(
                f"the features of image {rows.start + finite.argmin()} are not finite numbers; "
                "go back to an encoder from before its training diverged"
            )


def evaluate_split(
    encoder: Encoder,
    split: Split,
    *,
    floors: Mapping[str, Encoder],
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
        floors: Encoders that it has to beat, by the name of their table, such as `untrained`;
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
        The measures, and the encoder's embeddings of all images, normalized, in their order.
    """
    entries = chosen(protocol)  # a wrong name is refused before anything is computed
    images = {"train": split.train} | ({"test": split.test} if len(split.test) else {})
    rows = {"train": split.train_rows, "test": split.test_rows}
    computed = {name: (of, rows) for name, of in (features or {}).items()}
    task = _Task(images, seed, workers, augment, device)
    progress = under(table, on_progress)
    encoded = task.encode(encoder, computed.get(table), progress)
    for part in encoded.values():
        _check_finite(part)
    embeddings = _joined(split, encoded)
    on_encoded(embeddings)
    # The floors are measured on the very images that the encoder could read.
    task = replace(
        task,
        images={name: images[name].subset(part.rows) for name, part in encoded.items()},
        k=num_neighbors(len(encoded["train"].labeled())),
    )
    rows |= {name: rows[name][part.rows] for name, part in encoded.items()}
    shared = ""
    if len(split.images) >= FEWEST:
        shared = conditions(split.images, rows, seed=seed, augment=augment, device=device)
    tables = {table: _train_and_test(encoded)}
    taken = {table: task.measure(encoder, tables[table], entries, progress)}
    for name, floor in {**floors, "pixels": None}.items():
        progress = under(TITLES.get(name, name), on_progress)
        path = None if name in computed else stored_file(name, floor, shared)
        if path:
            take = partial(task.take, floor, on_progress=progress)
            taken[name] = stored_or_taken(path, entries, take)
        else:
            tables[name] = task.table(floor, computed.get(name), progress)
            taken[name] = task.measure(floor, tables[name], entries, progress)
    evaluation = _evaluation(tables, taken, protocol, task.k)
    sizes = {name: len(part) for name, part in encoded.items()}  # no test where none is held out
    leaked = split.leaked[encoded["test"].rows] if "test" in encoded else np.zeros(0, np.bool_)
    leaks = find_leaks(leaked, evaluation.measures[table])
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
) -> dict[str, Measure]:
    """Take the measures of the protocol `labelfree`, by name; those that fail are missing.

    Of at most `GEOMETRY_IMAGES` images, evenly spread, whichever split they are of.
    """
    task = _Task({"train": images.spread(GEOMETRY_IMAGES)}, seed, workers, augment, device)
    taken = task.take(encoder, ENTRIES["labelfree"], on_progress)
    return {m.name: m for of in taken.values() if not isinstance(of, str) for m in of}


Computed = tuple[Embeddings, Mapping[str, np.ndarray]]
"""Features of all images, and the rows of each part in them."""


@dataclass(frozen=True, eq=False)
class _Task:
    """The images that all tables of an evaluation are of, and how these are measured.

    An encoder that is None is raw pixels.
    """

    images: Mapping[str, Images]  # Of each split
    seed: int
    workers: int
    augment: Augment
    device: torch.device
    k: int = 0  # Of kNN

    def take(
        self, floor: Encoder | None, entries: Sequence[Entry], on_progress: ProgressCallback
    ) -> Taken:
        """Compute the features of a floor, and measure them."""
        pair = self.table(floor, None, on_progress)
        return self.measure(floor, pair, entries, on_progress)

    def table(
        self, encoder: Encoder | None, computed: Computed | None, on_progress: ProgressCallback
    ) -> tuple[Embeddings, Embeddings]:
        """Training and test embeddings."""
        if encoder is None:
            return _train_and_test(_raw_pixels(self.images, self.workers, on_progress))
        return _train_and_test(self.encode(encoder, computed, on_progress))

    def measure(
        self,
        encoder: Encoder | None,
        pair: tuple[Embeddings, Embeddings],
        entries: Sequence[Entry],
        on_progress: ProgressCallback,
    ) -> Taken:
        """Take the measures of training and test embeddings."""
        views = None
        if any(entry.needs_images for entry in entries):
            views = self._views(encoder, on_progress)
        return _measured(
            Inputs(*pair, self.k, self.seed, self.device, views), entries, on_progress
        )

    def encode(
        self, encoder: Encoder, computed: Computed | None, on_progress: ProgressCallback
    ) -> dict[str, Embeddings]:
        """Embeddings of each part; of the last, which is scored, also a second view of some."""
        if computed is None:
            encode_part = partial(
                encode_images,
                encoder,
                device=self.device,
                workers=self.workers,
                on_progress=on_progress,
            )
            encoded = {name: encode_part(part) for name, part in self.images.items()}
        else:
            features, rows = computed
            parts = self.images.items()
            encoded = {name: _chosen(features, part, rows[name]) for name, part in parts}
        scored = list(self.images)[-1]
        readable = self.images[scored].subset(encoded[scored].rows)
        view = second_view(
            encoder,
            readable,
            geometry_rows(len(readable)),
            seed=self.seed,
            augment=self.augment,
            device=self.device,
        )
        return encoded | {scored: replace(encoded[scored], second_view=view)}

    def _views(self, encoder: Encoder | None, on_progress: ProgressCallback) -> ImageViews:
        """The images with their encoder; raw pixels have a mean of some training images."""
        train = self.images["train"]
        # Where nothing is held out there are no labels to score with; see `_train_and_test`.
        test = self.images.get("test", replace(train, labels=np.full_like(train.labels, UNKNOWN)))
        if encoder is None:
            train = train.spread(PIXEL_BANK)
            encoder = pixel_encoder(train, SIDE, self.workers)
        settings = self.seed, self.workers, self.augment, self.device
        return ImageViews(encoder, train, test, *settings, on_progress)


def _chosen(
    features: Embeddings, images: Images, rows: Int64[np.ndarray, " images"]
) -> Embeddings:
    """Of the features of all images, those of a part, which is at these rows of them."""
    own = np.flatnonzero(np.isin(rows, features.rows))
    vectors = features.vectors[np.searchsorted(features.rows, rows[own])]
    bad = {name: features.bad[name] for name in images.names if name in features.bad}
    return embeddings_of(images.subset(own), vectors, own, bad)


def _train_and_test(parts: Mapping[str, Embeddings]) -> tuple[Embeddings, Embeddings]:
    """Where nothing is held out, training images are a test of nothing but geometry."""
    return parts["train"], parts.get("test", parts["train"].unlabeled())


def _raw_pixels(
    images: Mapping[str, Images], workers: int, on_progress: ProgressCallback
) -> dict[str, Embeddings]:
    """Raw pixels of each part; of many training images, those of some."""
    parts = {**images, "train": images["train"].spread(PIXEL_BANK)}
    features = pixel_features(parts.values(), workers, on_progress)
    return {
        name: embeddings_of(part, pixels.numpy())
        for (name, part), pixels in zip(parts.items(), features, strict=True)
    }


def pixel_features(
    parts: Iterable[Images], workers: int, on_progress: ProgressCallback = ignore_progress
) -> list[Float[Tensor, "n d"]]:
    """Raw pixels as features: unit vectors of what differs from the mean image of the first."""
    features = []
    for part in parts:
        crops = CenterCrops(part, SIDE, workers=workers)
        pixels = torch.cat(list(tracked(crops, len(part), "raw pixels", on_progress)))
        features.append(from_zero_to_one(pixels.flatten(1)))
    mean = torch.from_numpy(features[0].numpy().mean(axis=0, dtype=np.float64)).float()
    for pixels in features:
        for piece in pixels.split(PIECE):  # in place: all once more could be too many
            piece.copy_(unit(piece - mean))
    return features


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
