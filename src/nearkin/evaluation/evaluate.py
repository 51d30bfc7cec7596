"""All measures of an encoder, beside their floors: raw pixels and the untrained network."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from nearkin.config import TrainConfig
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches, CenterCrops
from nearkin.data.images import Images
from nearkin.data.order import Order
from nearkin.data.rng import seeded
from nearkin.data.split import Split
from nearkin.data.views import normalize
from nearkin.errors import DataError, DivergedError
from nearkin.evaluation.clusters import clusters
from nearkin.evaluation.embeddings import Embeddings, embeddings_of, encode, encode_images
from nearkin.evaluation.encoder import Encoder
from nearkin.evaluation.geometry import geometry, geometry_rows
from nearkin.evaluation.knn import knn, num_neighbors
from nearkin.evaluation.measure import Measure, known
from nearkin.evaluation.probe import linear_probe
from nearkin.objectives import unit
from nearkin.pace import ProgressCallback, ignore_progress, tracked, under
from nearkin.run.settings import named_backbone

# Columns that are headed by another name than their own.
TITLES = {"untrained": "untrained encoder", "pixels": "raw pixels"}
SIDE = 32  # Larger images are shrunk to this many pixels a side
PIECE = 1024  # Images that are converted at once
PIXEL_BANK = 50_000  # Training images, at most, whose raw pixels are measured; evenly spread


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The measures of each table of features: `encoder`, `untrained`, `pixels`."""

    sizes: Mapping[str, int]  # Number of images of each split
    measures: Mapping[str, list[Measure]]  # By table of features
    left_out: Mapping[str, str]  # What could not be measured, and why

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        measures = {
            table: {measure.name: asdict(measure) for measure in column}
            for table, column in self.measures.items()
        }
        return {"sizes": self.sizes, "measures": measures, "left_out": self.left_out}

    def rows(self) -> list[list[str]]:
        """Return cells of text: a heading, then a row per measure and a column per table."""
        columns = [{m.name: str(m) for m in measures} for measures in self.measures.values()]
        names = dict.fromkeys(name for column in columns for name in column)
        heading = ["measure", *(TITLES.get(table, table) for table in self.measures)]
        return [heading, *([name, *(c.get(name, "-") for c in columns)] for name in names)]


def evaluate_features(
    train: Embeddings,
    test: Embeddings,
    *,
    seed: int,
    k: int = 200,
    on_progress: ProgressCallback = ignore_progress,
) -> tuple[list[Measure], dict[str, str]]:
    """Measure test embeddings, with training embeddings as the bank and the training set.

    The test labels decide nothing but the scores.

    Returns:
        The measures, and why others could not be taken, by name.
    """
    view = test.second_view
    for table in (train, test, view):
        if table is not None and not np.isfinite(table.vectors).all():
            row = int((~np.isfinite(table.vectors)).any(axis=1).nonzero()[0][0])
            raise DivergedError(
                f"the features of image {row} are not finite numbers; "
                "go back to an encoder from before its training diverged"
            )
    second_view = (view.tensor, view.rows) if view is not None else ()
    known = (train.tensor, train.labels, test.tensor, test.labels)
    attempts: dict[str, Callable[[], list[Measure]]] = {
        "kNN top-1": lambda: [knn(*known, k=k)],
        "linear probe": lambda: [linear_probe(*known, seed=seed, groups=train.groups)],
        "clusters": lambda: clusters(test.tensor, test.labels, seed=seed),
        "geometry": lambda: geometry(test.tensor, *second_view),
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


def evaluate_tables(
    tables: Mapping[str, tuple[Embeddings, Embeddings]],
    *,
    seed: int,
    k: int = 200,
    on_progress: ProgressCallback = ignore_progress,
) -> Evaluation:
    """Take the same measures of several tables of features of the same images.

    The first of `tables` is the encoder's, whose numbers of images are reported; the others are
    the floors it has to beat. Each has training and test features.
    """
    measures: dict[str, list[Measure]] = {}
    left_out: dict[str, str] = {}
    parts = zip(("train", "test"), next(iter(tables.values())), strict=True)
    sizes = {part: len(features.labels) for part, features in parts}
    for name, (train, test) in tables.items():
        measures[name], reasons = evaluate_features(
            train, test, seed=seed, k=k, on_progress=under(name, on_progress)
        )
        left_out |= reasons
    return Evaluation(sizes, measures, left_out)


def mean_pixels(images: UInt8[np.ndarray, "n h w 3"]) -> Float[Tensor, " d"]:
    """Return the mean training image, flattened as in `pixels`."""
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


def evaluate_split(
    encoder: Encoder,
    split: Split,
    config: TrainConfig,
    *,
    network: nn.Module | None,
    device: torch.device,
    on_progress: ProgressCallback = ignore_progress,
) -> tuple[Evaluation, Embeddings]:
    """Measure an encoder on images that are already open and split.

    Images that cannot be read count nowhere.

    Returns:
        The measures, and the encoder's embeddings of all images, normalized, in their order.
    """
    with seeded(config.seed, torch.device("cpu")):  # the network that training started from
        untrained = Encoder(named_backbone(config, network), encoder.image_size, {})
    workers = int(config.workers)

    def encode_part(encoder: Encoder, part: Images, text: str) -> Embeddings:
        progress = under(text, on_progress)
        return encode_images(encoder, part, device=device, workers=workers, on_progress=progress)

    images = {"train": split.train} | ({"test": split.test} if len(split.test) else {})
    encoded = {name: encode_part(encoder, part, "encoder") for name, part in images.items()}
    # The floors are measured on the very images that the encoder could read.
    images = {name: images[name].subset(part.rows) for name, part in encoded.items()}
    floor = {
        name: encode_part(untrained, part, "untrained network") for name, part in images.items()
    }
    tables = {
        "encoder": _tables(encoder, encoded, images, config, device),
        "untrained": _tables(untrained, floor, images, config, device),
        "pixels": _pixel_tables(images, workers, on_progress),
    }
    k = num_neighbors(int(known(encoded["train"].labels).sum()))
    evaluation = evaluate_tables(tables, seed=config.seed, k=k, on_progress=on_progress)
    return evaluation, _joined(split, encoded)


def _tables(
    encoder: Encoder,
    encoded: Mapping[str, Embeddings],
    images: Mapping[str, Images],
    config: TrainConfig,
    device: torch.device,
) -> tuple[Embeddings, Embeddings]:
    """Training and test embeddings, the latter with a second view of some of the images."""
    name = "test" if "test" in encoded else "train"
    # Where nothing is held out, training images are a test of nothing but geometry.
    test = encoded[name] if name == "test" else encoded[name].unlabeled()
    view = _second_view(encoder, images[name], config, device)
    return encoded["train"], replace(test, second_view=view)


def _second_view(
    encoder: Encoder, images: Images, config: TrainConfig, device: torch.device
) -> Embeddings:
    """Embeddings of some of the images, augmented as in training: they should hardly differ."""
    chosen = geometry_rows(len(images))
    some = images.subset(chosen)
    batches = Batches(
        some,
        views_of(config.augment, ("strong",)),
        image_size=encoder.image_size,
        order=Order(len(some), 1, config.seed),
        device=device,
    )
    rows = np.arange(len(some))
    pieces = np.array_split(rows, range(256, len(some), 256))
    features = encode(encoder, (normalize(batches.views(0, piece)[0]) for piece in pieces))
    own = np.setdiff1d(rows, list(batches.bad))  # the others show another image's view
    return embeddings_of(some.subset(own), features.numpy()[own], chosen[own])


def _pixel_tables(
    images: Mapping[str, Images], workers: int, on_progress: ProgressCallback = ignore_progress
) -> tuple[Embeddings, Embeddings]:
    train = images["train"].spread(PIXEL_BANK)
    test = images.get("test", train)
    bank, queries = pixel_features(train, test, workers, on_progress)
    scored = embeddings_of(test, queries.numpy())
    scored = scored if "test" in images else scored.unlabeled()
    return embeddings_of(train, bank.numpy()), scored


def pixel_features(
    train: Images, test: Images, workers: int, on_progress: ProgressCallback = ignore_progress
) -> tuple[Float[Tensor, "train d"], Float[Tensor, "test d"]]:
    """Raw pixels as features, less the mean of the first."""
    decoded = []
    for part in (train,) if test is train else (train, test):
        crops = CenterCrops(part, SIDE, workers=workers)
        read = tracked(crops, len(part), "raw pixels", on_progress)
        decoded.append(torch.cat(list(read)).movedim(1, 3).numpy())
    mean = mean_pixels(decoded[0])
    features = [pixels(part, mean) for part in decoded]
    return features[0], features[-1]


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


def rows_of(summary: Mapping[str, Any]) -> list[str]:
    """Format the measures of a run's summary.json as lines."""
    measures = {
        table: [Measure(**entry) for entry in column.values()]
        for table, column in summary["measures"].items()
    }
    return table_lines(Evaluation(summary["sizes"], measures, summary["left_out"]))


def table_lines(evaluation: Evaluation) -> list[str]:
    """Format measures as aligned columns, then what could not be measured, and why."""
    rows = evaluation.rows()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
    notes = [f"{name}: not measured, {why}" for name, why in evaluation.left_out.items()]
    return [*(line.rstrip() for line in lines), *notes]
