"""`nearkin evaluate`: what an encoder knows, beside raw pixels and the untrained network."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nearkin.config import TrainConfig
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.centered import pixels, to_network
from nearkin.data.images import Images
from nearkin.data.order import Order
from nearkin.data.views import normalize
from nearkin.distributed import available_cpus, choose_device
from nearkin.evaluation.encode import encode
from nearkin.evaluation.evaluate import evaluate as measure
from nearkin.evaluation.features import Features
from nearkin.evaluation.floors import SIDE, mean_pixels
from nearkin.evaluation.floors import pixels as pixel_features
from nearkin.evaluation.report import Evaluation
from nearkin.runs.build import named_backbone
from nearkin.runs.data import Parts, open_parts
from nearkin.runs.encoder import Encoder, load
from nearkin.runs.folder import RunFolder
from nearkin.types import UNKNOWN


def evaluate(
    run: str | Path, data: Any = None, *, network: nn.Module | None = None, device: str = "auto"
) -> Evaluation:
    """Measure a run's encoder.

    Args:
        run: A run folder.
        data: Other pictures than those of the run; they are split like those.
        network: The run's network, if it was given one from Python; untrained.
        device: Where to compute.

    Returns:
        kNN, linear probe, clusters and geometry of the encoder, of the untrained network and of
        raw pixels, each with its protocol and interval. Without labels, what can be said.
    """
    folder = RunFolder(Path(run))
    config, stored = folder.settings()
    encoder = load(folder.path, backbone=network)
    parts = open_parts(stored if data is None else data, config)
    return evaluate_parts(encoder, parts, config, network=network, device=choose_device(device))[0]


def evaluate_parts(
    encoder: Encoder,
    parts: Parts,
    config: TrainConfig,
    *,
    network: nn.Module | None,
    device: torch.device,
) -> tuple[Evaluation, Mapping[str, Tensor]]:
    """Measure an encoder on pictures that are already open and divided.

    Returns:
        The measures, and the encoder's features of the `train` and `test` part.
    """
    torch.manual_seed(config.seed)  # the untrained network is the one that training started from
    untrained = Encoder(named_backbone(config, network), encoder.image_size, {})
    test = parts.test if len(parts.test) else unlabeled(parts.train)
    tables = {
        "encoder": _tables(encoder, parts.train, test, config, device),
        "untrained": _tables(untrained, parts.train, test, config, device),
        "pixels": _pixel_tables(parts.train, test),
    }
    train_features, test_features = (part.vectors for part in tables["encoder"])
    features = {"train": train_features, "test": test_features[: len(parts.test)]}
    return measure(tables, seed=config.seed, k=num_neighbors(len(parts.train))), features


def unlabeled(images: Images) -> Images:
    """Pictures without their labels: what was trained on is no test of anything but geometry."""
    return replace(images, labels=np.full_like(images.labels, UNKNOWN))


def num_neighbors(bank: int) -> int:
    """The `k` of kNN: 200 as in the papers, or 20 where a class may not have 200 pictures."""
    return 200 if bank >= 10_000 else 20


def _tables(
    encoder: Encoder, train: Images, test: Images, config: TrainConfig, device: torch.device
) -> tuple[Features, Features]:
    encoder.to(device).to(memory_format=torch.channels_last)
    bank, queries = (
        encode(
            encoder,
            (
                to_network(batch.to(device))
                for batch in pixels(part, encoder.image_size, workers=available_cpus())
            ),
        )
        for part in (train, test)
    )
    return (
        Features(bank, train.labels, train.groups),
        Features(queries, test.labels, test.groups, _augmented(encoder, test, config, device)),
    )


def _augmented(
    encoder: Encoder, images: Images, config: TrainConfig, device: torch.device
) -> Tensor:
    """Features of one view of each picture, drawn as in training: what should hardly differ."""
    batches = Batches(
        images,
        views_of(config.augment, 1),
        image_size=encoder.image_size,
        order=Order(len(images), 1, config.seed),
        device=device,
    )
    rows = np.arange(len(images))
    pieces = np.array_split(rows, range(256, len(images), 256))
    return encode(encoder, (normalize(batches.views(0, piece)[0]) for piece in pieces))


def _pixel_tables(train: Images, test: Images) -> tuple[Features, Features]:
    shown = [
        torch.cat(list(pixels(part, SIDE, workers=available_cpus()))).movedim(1, 3).numpy()
        for part in (train, test)
    ]
    mean = mean_pixels(shown[0])
    bank, queries = (pixel_features(part, mean) for part in shown)
    return Features(bank, train.labels, train.groups), Features(queries, test.labels, test.groups)


def rows_of(summary: Mapping[str, Any]) -> list[str]:
    """The table of a run's summary.json, as lines."""
    from nearkin.evaluation.measure import Measure

    measures = {
        table: [Measure(**entry) for entry in found.values()]
        for table, found in summary["measures"].items()
    }
    return table_lines(Evaluation(summary["sizes"], measures, summary["left_out"]))


def table_lines(evaluation: Evaluation) -> list[str]:
    """Measures as aligned columns, then how the first of each was found and what is missing."""
    rows = evaluation.rows()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
    notes = [f"{name}: not measured, {why}" for name, why in evaluation.left_out.items()]
    return [*(line.rstrip() for line in lines), *notes]
