"""`nearkin check`: counts, sizes, duplicates and proposed settings, before training."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from nearkin.config import TrainConfig
from nearkin.data.augmentations import Augment, views_of
from nearkin.data.batches import CenterCrops
from nearkin.data.duplicates import duplicates
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.data.split import duplicate_warnings
from nearkin.distributed import choose_device
from nearkin.errors import NearkinError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.measures import knn
from nearkin.run.reporter import Reporter, Silent
from nearkin.run.settings import describe, resolve, view_sides
from nearkin.training.fit import planned_epochs, seconds_per_epoch
from nearkin.training.session import build

TIMED_BATCH = 32  # for large images, where measuring a full batch takes minutes
MAX_THUMBNAILS = 2_000  # sampled images by which effects of augmentation are estimated


@dataclass(frozen=True)
class DataReport:
    """What `nearkin check` reports on images."""

    images: Images
    exact: int
    near: int
    warnings: tuple[str, ...]
    proposal: str  # The settings of `auto`, or why there are none, if training is impossible
    hours: float | None
    megabytes: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        counts = Counter(self.images.labels.tolist())
        return {
            "images": len(self.images),
            "formats": dict(self.images.formats),
            "classes": {name: counts[label] for label, name in enumerate(self.images.classes)},
            "width": _range(self.images.sizes[:, 0]),
            "height": _range(self.images.sizes[:, 1]),
            "bad": [{"path": bad.name, "reason": bad.reason} for bad in self.images.bad],
            "exact_duplicates": self.exact,
            "near_duplicates": self.near,
            "warnings": list(self.warnings),
            "proposal": self.proposal,
            "hours": self.hours,
            "megabytes": self.megabytes,
        }

    def lines(self) -> list[str]:
        """Return lines of text, for people."""
        values = self.to_dict()
        (low, middle, high), (least, median, most) = values["width"], values["height"]
        formats = ", ".join(f"{count} {kind}" for kind, count in values["formats"].items())
        lines = [
            f"images    {values['images']} ({formats})",
            f"width       {low} to {high} px, median {middle}",
            f"height      {least} to {most} px, median {median}",
            f"labels      {_summary(values['classes'])}",
            f"duplicates  {self.exact} exact, {self.near} near",
            f"unreadable  {len(self.images.bad)}",
            *(f"            {bad.name}: {bad.reason}" for bad in self.images.bad[:10]),
            *(f"note        {note}" for note in self.images.notes),
            *(f"warning     {warning}" for warning in self.warnings),
            f"proposal    {self.proposal}",
        ]
        if self.hours is not None:
            minutes = f"{max(1, round(self.hours * 60))} min"
            time = f"{self.hours:.1f} hours" if self.hours >= 1 else minutes
            lines.append(f"            about {time}, {self.megabytes:.0f} MB of disk")
        return lines


def _range(values: np.ndarray) -> tuple[int, int, int]:
    return int(values.min()), int(np.median(values)), int(values.max())


def _summary(classes: dict[str, int]) -> str:
    if not classes:
        return "none; they are not needed"
    counts = classes.values()
    return f"{len(classes)} classes of {min(counts)} to {max(counts)} images, for scoring only"


def check(
    data: Any,
    *,
    labels: str = "auto",
    scan: Literal["headers", "full"] = "headers",
    reporter: Reporter | None = None,
) -> DataReport:
    """Check images before training: counts, sizes, bad files, duplicates, proposed settings.

    Args:
        data: What `open_images` takes.
        labels: Where labels come from, as for `TrainConfig`.
        scan: `headers` opens every file, `full` decodes every image.
        reporter: Receives log lines and progress; None is silent.
    """
    on_progress = (reporter or Silent()).progress
    images = open_images(data, labels=labels, full=scan == "full", on_progress=on_progress)
    copies = duplicates(images, on_progress)
    warnings = duplicate_warnings(copies.num_exact, "exact", images)
    warnings += duplicate_warnings(copies.num_near, "near", images)
    hours, megabytes = None, None
    try:
        device = choose_device("auto")
        config = resolve(TrainConfig(), images, device)
        epochs, hours, megabytes = cost(config, images, device)
        warnings += augmentation_warnings(images, config.augment)
        proposal = describe(replace(config, epochs=epochs))
    except NearkinError as error:
        proposal = f"none: {error}"
    return DataReport(
        images, copies.num_exact, copies.num_near, tuple(warnings), proposal, hours, megabytes
    )


def cost(config: TrainConfig, images: Images, device: torch.device) -> tuple[int, float, float]:
    """Estimate the epochs and hours of a run on this machine, and its megabytes of disk."""
    batch = int(config.batch_size)
    batch = batch if images.is_small else min(TIMED_BATCH, batch)
    timed = replace(config, batch_size=batch, workers=0, cache="off")
    method, batches = build(timed, images, device)
    parts = [batches.resized(side) for side in view_sides(timed)]
    epoch_seconds = seconds_per_epoch(timed, method, parts)
    epochs = planned_epochs(config, epoch_seconds)
    weights = sum(tensor.nbytes for tensor in method.state_dict().values())
    features = 4 * method.backbone.feature_dim * len(images)
    copies = 3 * 3  # the newest three checkpoints, each with the optimizer's two moments
    return epochs, epochs * epoch_seconds / 3600, (copies * weights + features) / 1e6


def augmentation_warnings(images: Images, augment: Augment) -> list[str]:
    """Warn of augmentations that remove what distinguishes the classes, by kNN of thumbnails.

    That is color, where the mean color alone predicts the class, and orientation, where mirrored
    images are not recognized. Without labels there are no warnings.
    """
    view = views_of(augment, ("strong",))[0]
    sample = images.subset(np.flatnonzero(images.splits != "test")).spread(MAX_THUMBNAILS)
    small = torch.cat(list(CenterCrops(sample, 16))).float() / 255
    color = torch.cat([small.mean(dim=(2, 3)), small.std(dim=(2, 3))], dim=1)
    known = sample.labels[sample.labels >= 0]
    chance = np.bincount(known).max() / len(known) if len(known) else 1.0
    by_color = _accuracy(color, color, sample.labels)
    straight = _accuracy(small, small, sample.labels)
    mirrored = _accuracy(small, small.flip(3), sample.labels)
    warnings = []
    if (view.jitter * (view.hue + view.saturation) or view.gray) and by_color > (1 + chance) / 2:
        warnings.append(
            f"mean color alone predicts {by_color:.0%} of the labels, and augmentation {augment} "
            "changes it; try --augment characters"
        )
    if view.flip and mirrored < straight - 0.3:
        warnings.append(
            f"kNN on thumbnails predicts {straight:.0%} of the labels, but {mirrored:.0%} of "
            f"mirrored ones, as in writing, and augmentation {augment} flips; try --augment "
            "characters"
        )
    return warnings


def _accuracy(bank: torch.Tensor, queries: torch.Tensor, labels: np.ndarray) -> float:
    """Return the kNN accuracy of every second image by the others; 0 without labels."""
    mean = bank.flatten(1).mean(dim=0)
    train = Embeddings((bank.flatten(1)[::2] - mean).numpy(), labels[::2])
    test = Embeddings((queries.flatten(1)[1::2] - mean).numpy(), labels[1::2])
    try:
        return knn(train, test, k=20).value
    except NearkinError:
        return 0.0
