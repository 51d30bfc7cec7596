"""`nearkin evaluate`: what an encoder knows, beside raw pixels and the untrained network."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nearkin.config import TrainConfig
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches, Pixels
from nearkin.data.images import Images
from nearkin.data.order import Order
from nearkin.data.split import Parts, open_parts
from nearkin.data.views import normalize
from nearkin.distributed import available_cpus, choose_device
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings, Encoded, encode, encode_images, table
from nearkin.evaluation.encoder import Encoder, load
from nearkin.evaluation.evaluate import SIDE, Evaluation, mean_pixels, pixels
from nearkin.evaluation.evaluate import evaluate as measure
from nearkin.evaluation.features import Features, known
from nearkin.evaluation.geometry import looked_at
from nearkin.evaluation.knn import num_neighbors
from nearkin.evaluation.measure import Measure
from nearkin.pace import ProgressCallback, ignore_progress, tracked, under
from nearkin.run.failures import foreseen
from nearkin.run.folder import RunFolder, data_name
from nearkin.run.reporter import Reporter, Silent
from nearkin.run.settings.build import named_backbone
from nearkin.training.loop import seeded
from nearkin.types import UNKNOWN

PIXEL_BANK = 50_000
"""Training images, at most, whose raw pixels are looked at; evenly spread among all."""


def evaluate(
    run: str | Path,
    data: Any = None,
    *,
    backbone: nn.Module | None = None,
    device: str = "auto",
    workers: int | Literal["auto"] = "auto",
    reporter: Reporter | None = None,
) -> Evaluation:
    """Measure a run's encoder.

    Args:
        run: A run folder.
        data: Other images than those of the run; they are split like those.
        backbone: The run's network, if it was given one from Python; untrained.
        device: Where to compute.
        workers: Processes that decode photographs; `auto`: one per processor.
        reporter: Who is told how it goes.

    Returns:
        kNN, linear probe, clusters and geometry of the encoder, of the untrained network and of
        raw pixels, each with its protocol and interval. Without labels, what can be said.

    Raises:
        UsageError: If this is no run, or one on arrays and `data` is None.
    """
    folder = RunFolder(Path(run))
    config, stored = folder.settings()
    if data is None and stored == data_name(None) and not Path(stored).exists():
        raise UsageError(f"{run} was trained on arrays, which it does not keep; pass them as data")
    config = replace(config, workers=available_cpus() if workers == "auto" else workers)
    encoder = load(folder.path, backbone=backbone)
    on_progress = (reporter or Silent()).progress
    parts = open_parts(stored if data is None else data, config, on_progress=on_progress)
    with foreseen():
        found, _ = evaluate_parts(
            encoder,
            parts,
            config,
            network=backbone,
            device=choose_device(device),
            on_progress=on_progress,
        )
    return found


def evaluate_parts(
    encoder: Encoder,
    parts: Parts,
    config: TrainConfig,
    *,
    network: nn.Module | None,
    device: torch.device,
    on_progress: ProgressCallback = ignore_progress,
) -> tuple[Evaluation, Embeddings]:
    """Measure an encoder on images that are already open and divided.

    Images that cannot be read count nowhere.

    Returns:
        The measures, and the encoder's features of both parts, in the order of the data.
    """
    with seeded(config.seed, torch.device("cpu")):  # the network that training started from
        untrained = Encoder(named_backbone(config, network), encoder.image_size, {})
    images = {"train": parts.train} | ({"test": parts.test} if len(parts.test) else {})
    encoded = _encode_parts(encoder, images, config, device, under("encoder", on_progress))
    readable = {name: part.images for name, part in encoded.items()}
    floor = _encode_parts(
        untrained, readable, config, device, under("untrained network", on_progress)
    )
    tables = {
        "encoder": _tables(encoder, encoded, config, device),
        "untrained": _tables(untrained, floor, config, device),
        "pixels": _pixel_tables(readable, int(config.workers), on_progress),
    }
    k = num_neighbors(int(known(readable["train"].labels).sum()))
    return measure(tables, seed=config.seed, k=k, on_progress=on_progress), _joined(parts, encoded)


def unlabeled(images: Images) -> Images:
    """Images without their labels: what was trained on is no test of anything but geometry."""
    return replace(images, labels=np.full_like(images.labels, UNKNOWN))


def _encode_parts(
    encoder: Encoder,
    images: Mapping[str, Images],
    config: TrainConfig,
    device: torch.device,
    on_progress: ProgressCallback,
) -> dict[str, Encoded]:
    """Features of the `train` part, and of the `test` part if there is one."""
    workers = int(config.workers)
    return {
        name: encode_images(encoder, part, device=device, workers=workers, on_progress=on_progress)
        for name, part in images.items()
    }


def _tables(
    encoder: Encoder, encoded: Mapping[str, Encoded], config: TrainConfig, device: torch.device
) -> tuple[Features, Features]:
    train = encoded["train"]
    test = encoded.get("test", replace(train, images=unlabeled(train.images)))
    other_view, seen = _second_view(encoder, test.images, config, device)
    return (
        Features(train.features, train.images.labels, train.images.groups),
        Features(test.features, test.images.labels, test.images.groups, other_view, seen),
    )


def _second_view(
    encoder: Encoder, images: Images, config: TrainConfig, device: torch.device
) -> tuple[Float[Tensor, "seen d"], Int[np.ndarray, " seen"]]:
    """Features of a view of some images, drawn as in training, and which images these are.

    The features should hardly differ from those of the images themselves.
    """
    chosen = looked_at(len(images))
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
    return features[torch.from_numpy(own)], chosen[own]


def _pixel_tables(
    readable: Mapping[str, Images], workers: int, on_progress: ProgressCallback = ignore_progress
) -> tuple[Features, Features]:
    train = readable["train"].spread(PIXEL_BANK)
    test = readable.get("test", unlabeled(train))
    bank, queries = pixel_features(train, test, workers, on_progress)
    return Features(bank, train.labels, train.groups), Features(queries, test.labels, test.groups)


def pixel_features(
    train: Images, test: Images, workers: int, on_progress: ProgressCallback = ignore_progress
) -> tuple[Float[Tensor, "train d"], Float[Tensor, "test d"]]:
    """Raw pixels as features, less the mean of the first."""
    shown = []
    for part in (train,) if test is train else (train, test):
        read = tracked(Pixels(part, SIDE, workers=workers), len(part), "raw pixels", on_progress)
        shown.append(torch.cat(list(read)).movedim(1, 3).numpy())
    mean = mean_pixels(shown[0])
    found = [pixels(part, mean) for part in shown]
    return found[0], found[-1]


def _joined(parts: Parts, encoded: Mapping[str, Encoded]) -> Embeddings:
    """Both parts as one table, in the order of the data."""
    places = {"train": parts.train_rows, "test": parts.test_rows}
    rows = np.concatenate([places[name][part.rows] for name, part in encoded.items()])
    order = rows.argsort()
    splits = np.repeat(list(encoded), [len(part.rows) for part in encoded.values()])
    features = torch.cat([part.features for part in encoded.values()])[torch.from_numpy(order)]
    bad = {name: why for part in encoded.values() for name, why in part.bad.items()}
    return table(parts.images.subset(rows[order]), features, splits[order].tolist(), bad)


def rows_of(summary: Mapping[str, Any]) -> list[str]:
    """The table of a run's summary.json, as lines."""
    measures = {
        table: [Measure(**entry) for entry in found.values()]
        for table, found in summary["measures"].items()
    }
    return table_lines(Evaluation(summary["sizes"], measures, summary["left_out"]))


def table_lines(evaluation: Evaluation) -> list[str]:
    """Measures as aligned columns, then what could not be measured, and why."""
    rows = evaluation.rows()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
    notes = [f"{name}: not measured, {why}" for name, why in evaluation.left_out.items()]
    return [*(line.rstrip() for line in lines), *notes]
