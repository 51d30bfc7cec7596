"""All measures of an encoder, beside their floors: its start, an untrained network, pixels."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nearkin.config import Augment
from nearkin.data.batches import CenterCrops
from nearkin.data.images import Images
from nearkin.data.split import Split
from nearkin.encoders.encoder import Encoder
from nearkin.errors import DataError, DivergedError
from nearkin.evaluation.embeddings import Embeddings, embeddings_of, encode_images
from nearkin.evaluation.kept import KeptShare, kept_shares, plain_shares, stored_shares
from nearkin.evaluation.measures import Measure, geometry_rows, num_neighbors
from nearkin.evaluation.protocols import ENTRIES, QUICK, Entry, Inputs, chosen
from nearkin.evaluation.verdict import StartComparison, compare_with_start, stored_comparison
from nearkin.evaluation.views import ImageViews, pixel_encoder, second_view
from nearkin.objectives import unit
from nearkin.pace import ProgressCallback, ignore_progress, tracked, under
from nearkin.tables import aligned
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
PIECE: Final = 1024  # Images of raw pixels that are centered at once


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The measures of each table of features: `encoder`, `teacher`, `start`, `untrained`, ..."""

    sizes: Mapping[str, int]  # Number of images of each split
    measures: Mapping[str, list[Measure]]  # By table of features
    left_out: Mapping[str, str]  # What could not be measured, of all tables or of one, and why
    comparison: StartComparison | None = None  # With the start of the training, if it had one
    kept: tuple[KeptShare, ...] = ()  # Of the accuracy of its teacher, if it had one

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        measures = {
            table: {measure.name: measure.to_dict() for measure in column}
            for table, column in self.measures.items()
        }
        plain = {"sizes": self.sizes, "measures": measures, "left_out": self.left_out}
        plain |= {"comparison": self.comparison.to_dict()} if self.comparison else {}
        return plain | plain_shares(self.kept)

    def rows(self) -> list[list[str]]:
        """Return cells of text: a heading, then a row per measure and a column per table."""
        columns = [{m.name: str(m) for m in measures} for measures in self.measures.values()]
        names = dict.fromkeys(name for column in columns for name in column)
        heading = ["measure", *(TITLES.get(table, table) for table in self.measures)]
        return [heading, *([name, *(c.get(name, "-") for c in columns)] for name in names)]

    def lines(self, start: Path | None = None) -> list[str]:
        """Format the measures as aligned columns, then what could not be measured, and why.

        The last line is the verdict on a training that had a start; `start` is the file of that.
        """
        notes = [f"{name}: not measured, {why}" for name, why in self.left_out.items()]
        verdict = [self.comparison.line(start)] if self.comparison else []
        return [*aligned(self.rows()), *notes, *map(str, self.kept), *verdict]


def lines(summary: Mapping[str, Any], start: Path | None = None) -> list[str]:
    """Summarize a training in lines: its measures beside their floors, and the verdict."""
    measures = {
        table: [Measure(**entry) for entry in column.values()]
        for table, column in summary["measures"].items()
    }
    comparison = stored_comparison(summary)
    kept = stored_shares(summary)
    evaluation = Evaluation(summary["sizes"], measures, summary["left_out"], comparison, kept)
    return evaluation.lines(start)


def evaluate_tables(
    tables: Mapping[str, tuple[Embeddings, Embeddings]],
    *,
    seed: int,
    k: int = 200,
    protocol: str = QUICK,
    image_views: Mapping[str, ImageViews] | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> Evaluation:
    """Take the same measures of several tables of features of the same images.

    The first of `tables` is the encoder's, whose numbers of images are reported; the others are
    the floors it has to beat. Each has training and test embeddings: the first are the bank of
    kNN and what the probe learns from. The labels of test images decide nothing but the scores.
    If one of the floors is the `start` of a training, the encoder is compared with it image by
    image. One that is the `teacher` is compared with it likewise.

    `protocol` names what is measured, see `nearkin.evaluation.protocols`. For measures that need
    more than features, `image_views` has the images of each table.
    """
    entries = chosen(protocol)
    taken: dict[str, dict[str, list[Measure]]] = {}
    missing: dict[str, dict[str, str]] = {}
    for name, (train, test) in tables.items():
        for embeddings in (train, test, test.second_view):
            _check_finite(embeddings)
        views = (image_views or {}).get(name)
        inputs = Inputs(train, test, k, seed, views)
        taken[name], missing[name] = _measured(inputs, entries, under(name, on_progress))
    measures = {name: [*chain.from_iterable(each.values())] for name, each in taken.items()}
    elsewhere = {title for each in taken.values() for title, found in each.items() if found}
    left_out: dict[str, str] = {}
    for name, reasons in missing.items():
        for title, why in reasons.items():
            of_one = f"{title} of {TITLES.get(name, name)}" if title in elsewhere else title
            left_out.setdefault(of_one, why)
    train, test = next(iter(tables.values()))
    evaluation = Evaluation({"train": len(train), "test": len(test)}, measures, left_out)
    if not set(ENTRIES[QUICK]) <= set(entries):
        return evaluation  # the verdict is on the same measures always
    comparison = compare_with_start(tables, measures, k=k)
    kept = kept_shares(tables, measures, k=k)
    return replace(evaluation, comparison=comparison, kept=kept)


def _measured(
    inputs: Inputs, entries: Iterable[Entry], on_progress: ProgressCallback
) -> tuple[dict[str, list[Measure]], dict[str, str]]:
    """Take the measures of one table of features; also return what could not be, and why."""
    measures, left_out, entries = dict[str, list[Measure]](), dict[str, str](), tuple(entries)
    for done, entry in enumerate(entries):
        on_progress(done, len(entries), entry.title)
        try:
            taken = entry.measure(inputs)
        except DataError as error:
            left_out[entry.title] = str(error)
        else:
            if not entry.compared:  # in the verdict, which looks at outcomes
                taken = [replace(measure, outcome=None) for measure in taken]
            measures[entry.title] = taken
    on_progress(len(entries), len(entries), "measured")
    return measures, left_out


def _check_finite(embeddings: Embeddings | None) -> None:
    finite = np.isfinite(embeddings.vectors).all(axis=1) if embeddings is not None else np.ones(1)
    if not finite.all():
        raise DivergedError(
            f"the features of image {finite.argmin()} are not finite numbers; "
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
    protocol: str = QUICK,
    table: str = "encoder",
    features: Mapping[str, Embeddings] | None = None,
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
        on_progress: Receives the progress.

    Returns:
        The measures, and the encoder's embeddings of all images, normalized, in their order.
    """
    entries = chosen(protocol)  # a wrong name is refused before anything is computed
    images = {"train": split.train} | ({"test": split.test} if len(split.test) else {})
    parts_of = partial(_encode_parts, seed=seed, workers=workers, augment=augment, device=device)
    rows = {"train": split.train_rows, "test": split.test_rows}
    computed = {name: (of, rows) for name, of in (features or {}).items()}
    encoded = parts_of(encoder, images, computed.get(table), on_progress=under(table, on_progress))
    # The floors are measured on the very images that the encoder could read.
    images = {name: images[name].subset(part.rows) for name, part in encoded.items()}
    rows |= {name: rows[name][part.rows] for name, part in encoded.items()}
    tables = {table: encoded}
    for name, floor in floors.items():
        progress = under(TITLES.get(name, name), on_progress)
        tables[name] = parts_of(floor, images, computed.get(name), on_progress=progress)
    tables["pixels"] = _raw_pixels(images, workers, on_progress)
    views = {}
    if any(entry.needs_images for entry in entries):
        views = _image_views(
            {table: encoder, **floors},
            images,
            seed=seed,
            workers=workers,
            augment=augment,
            device=device,
            on_progress=on_progress,
        )
    k = num_neighbors(len(encoded["train"].labeled()))
    pairs = {name: _train_and_test(parts) for name, parts in tables.items()}
    evaluation = evaluate_tables(
        pairs,
        seed=seed,
        k=k,
        protocol=protocol,
        image_views=views,
        on_progress=on_progress,
    )
    sizes = {name: len(part) for name, part in encoded.items()}  # no test where none is held out
    return replace(evaluation, sizes=sizes), _joined(split, encoded)


def _encode_parts(
    encoder: Encoder,
    images: Mapping[str, Images],
    computed: tuple[Embeddings, Mapping[str, np.ndarray]] | None = None,
    *,
    seed: int,
    workers: int,
    augment: Augment,
    device: torch.device,
    on_progress: ProgressCallback,
) -> dict[str, Embeddings]:
    """Embeddings of each part; of the last, which is scored, also a second view of some images.

    `computed` has those of all images, where there are any, and the rows of each part in them.
    """
    encode_part = partial(
        encode_images, encoder, device=device, workers=workers, on_progress=on_progress
    )
    if computed is None:
        encoded = {name: encode_part(part) for name, part in images.items()}
    else:
        features, rows = computed
        encoded = {name: _chosen(features, part, rows[name]) for name, part in images.items()}
    scored = list(images)[-1]
    readable = images[scored].subset(encoded[scored].rows)
    chosen = geometry_rows(len(readable))
    view = second_view(encoder, readable, chosen, seed=seed, augment=augment, device=device)
    return encoded | {scored: replace(encoded[scored], second_view=view)}


def _image_views(
    encoders: Mapping[str, Encoder],
    images: Mapping[str, Images],
    *,
    seed: int,
    workers: int,
    augment: Augment,
    device: torch.device,
    on_progress: ProgressCallback,
) -> dict[str, ImageViews]:
    """Return the images of each table with its encoder, raw pixels included."""
    train, few = images["train"], images["train"].spread(PIXEL_BANK)
    # Where nothing is held out there are no labels to score with; see `_train_and_test`.
    test = images.get("test", replace(train, labels=np.full_like(train.labels, UNKNOWN)))
    tables = {name: (encoder, train) for name, encoder in encoders.items()}
    tables["pixels"] = pixel_encoder(few, SIDE, workers), few
    return {
        name: ImageViews(
            encoder, bank, test, seed, workers, augment, device, under(name, on_progress)
        )
        for name, (encoder, bank) in tables.items()
    }


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
        features.append(pixels.flatten(1).float().div_(255))
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
