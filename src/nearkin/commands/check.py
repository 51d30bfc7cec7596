"""`nearkin check`: counts, sizes, duplicates and proposed settings, before training."""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from nearkin.config import TrainConfig
from nearkin.data import notes
from nearkin.data.augmentations import Augment, views_of
from nearkin.data.batches import CenterCrops, from_zero_to_one
from nearkin.data.duplicates import duplicates, leaks
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.data.split import duplicate_warnings, has_test_split, trained_or_scored
from nearkin.distributed import choose_device
from nearkin.errors import NearkinError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.leaks import Leaks
from nearkin.evaluation.metrics import knn
from nearkin.pace import count
from nearkin.run.auto import describe, resolve, view_sides
from nearkin.run.reporter import Reporter, Silent
from nearkin.training.length import planned_epochs, time_epoch
from nearkin.training.session import build

TIMED_BATCH = 32  # for large images, where measuring a full batch takes minutes
MAX_THUMBNAILS = 2_000  # sampled images by which effects of augmentation are estimated


@dataclass(frozen=True)
class Cost:
    """What a training takes on this machine, about."""

    epochs: int  # That are planned at the speed that was measured
    hours: float  # At that speed
    hours_alone: float  # Without other processes
    busy: str  # What these do, if that makes a difference
    megabytes: float  # Of disk

    def lines(self) -> list[str]:
        """Return lines of text, for people."""
        lines = [f"about {_time(self.hours)}, {self.megabytes:.0f} MB of disk"]
        if self.busy:
            lines.append(f"busy: {self.busy}; alone about {_time(self.hours_alone)}")
        return lines


def _time(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{max(1, round(hours * 60))} min"


@dataclass(frozen=True)
class DataReport:
    """What `nearkin check` reports on images."""

    images: Images
    exact: int
    near: int
    leaks: Leaks  # Of the test part that the data name
    warnings: tuple[str, ...]
    proposal: str  # The settings of `auto`, or why there are none, if training is impossible
    cost: Cost | None  # Of that training

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        counts = Counter(self.images.labels.tolist())
        return {
            "images": len(self.images),
            "formats": dict(self.images.format_counts),
            "classes": {name: counts[label] for label, name in enumerate(self.images.classes)},
            "width": _range(self.images.sizes[:, 0]),
            "height": _range(self.images.sizes[:, 1]),
            "parts": self.parts(),
            "bad": [{"path": bad.name, "reason": bad.reason} for bad in self.images.bad],
            "exact_duplicates": self.exact,
            "near_duplicates": self.near,
            "leaked": self.leaks.leaked,
            "notes": notes.plain(self.images.notes),
            "warnings": list(self.warnings),
            "proposal": self.proposal,
            **(asdict(self.cost) if self.cost else dict.fromkeys(Cost.__annotations__)),
        }

    def lines(self) -> list[str]:
        """Return lines of text, for people."""
        values = self.to_dict()
        (low, middle, high), (least, median, most) = values["width"], values["height"]
        formats = ", ".join(f"{number} {kind}" for kind, number in values["formats"].items())
        lines = [
            f"images    {values['images']} ({formats})",
            f"width       {low} to {high} px, median {middle}",
            f"height      {least} to {most} px, median {median}",
            f"labels      {_summary(values['classes'])}",
            f"parts       {_parts(values['parts'])}",
            f"duplicates  {self.exact} exact, {self.near} near",
            *_block("", [str(self.leaks)] if self.leaks.leaked else []),
            f"unreadable  {len(self.images.bad)}",
            *(f"            {bad.name}: {bad.reason}" for bad in self.images.bad[:10]),
            *_block("notes", notes.lines(self.images.notes)),
            *(f"warning     {warning}" for warning in self.warnings),
            f"proposal    {self.proposal}",
        ]
        cost = self.cost.lines() if self.cost else []
        return [*lines, *(f"            {line}" for line in cost)]

    def parts(self) -> dict[str, int]:
        """Count the images of each part that the data name; empty if `--val` decides."""
        if not has_test_split(self.images):
            return {}
        test = int((self.images.splits == "test").sum())
        return {"train": len(self.images) - test, "test": test}


def _block(name: str, entries: list[str]) -> list[str]:
    return [f"{'' if row else name:12}{entry}" for row, entry in enumerate(entries)]


def _range(values: np.ndarray) -> tuple[int, int, int]:
    return int(values.min()), int(np.median(values)), int(values.max())


def _summary(classes: dict[str, int]) -> str:
    if not classes:
        return "none; they are not needed"
    least, most = min(classes.values()), max(classes.values())
    each = f"{least}" if least == most else f"{least} to {most}"
    return f"{count(len(classes), 'class')} of {each} images, for scoring only"


def _parts(parts: dict[str, int]) -> str:
    if not parts:
        return "none in the data; --val holds some out"
    return f"{parts['train']} to train on, {parts['test']} to score, by the data's own names"


def check(
    data: Any,
    *,
    labels: str = "auto",
    scan: Literal["headers", "full"] = "headers",
    reporter: Reporter | None = None,
) -> DataReport:
    """Check images before training: counts, sizes, bad files, duplicates, proposed settings.

    Args:
        data: Images: a folder, a table, an archive or shards, or a name such as digits.
        labels: Where labels come from, as for `TrainConfig`.
        scan: `headers` opens every file, `full` decodes every image.
        reporter: Receives log lines and progress; None is silent.
    """
    on_progress = (reporter or Silent()).progress
    opened = open_images(data, labels=labels, full=scan == "full", on_progress=on_progress)
    images = trained_or_scored(opened)
    found = duplicates(images, on_progress)
    warnings = duplicate_warnings(found.num_exact, "exact", images)
    warnings += duplicate_warnings(found.num_near, "near", images)
    estimate = None
    try:
        device = choose_device("auto")
        config = resolve(TrainConfig(), images, device)
        estimate = cost(config, images, device)
        warnings += augmentation_warnings(images, config.augment)
        proposal = describe(replace(config, epochs=estimate.epochs))
    except NearkinError as error:
        proposal = f"none: {error}"
    return DataReport(
        images,
        found.num_exact,
        found.num_near,
        Leaks(len(leaks(found.groups, images.splits)), int((images.splits == "test").sum())),
        tuple(warnings),
        proposal,
        estimate,
    )


def cost(config: TrainConfig, images: Images, device: torch.device) -> Cost:
    """Estimate what a run takes on this machine, by timing a few steps."""
    batch = int(config.batch_size)
    batch = batch if images.is_small else min(TIMED_BATCH, batch)
    timed = replace(config, batch_size=batch, workers=0, cache="off")
    method, batches = build(timed, images, device)
    epoch = time_epoch(timed, method, [batches.resized(side) for side in view_sides(timed)])
    epochs = planned_epochs(config, epoch.seconds)
    hours, alone = (each * epochs / 3600 for each in (epoch.seconds, epoch.alone))
    weights = sum(tensor.nbytes for tensor in method.state_dict().values())
    features = 4 * method.backbone.feature_dim * len(images)
    copies = 3 * 3  # the newest three checkpoints, each with the optimizer's two moments
    return Cost(epochs, hours, alone, epoch.busy, (copies * weights + features) / 1e6)


def augmentation_warnings(images: Images, augment: Augment) -> list[str]:
    """Warn of augmentations that remove what distinguishes the classes, by kNN of thumbnails.

    That is color, where the mean color alone predicts the class, and orientation, where mirrored
    images are not recognized. Without labels there are no warnings.
    """
    view = views_of(augment, ("strong",))[0]
    train = images.splits != "test"
    sample = (images.subset(np.flatnonzero(train)) if train.any() else images).spread(
        MAX_THUMBNAILS
    )
    small = from_zero_to_one(torch.cat(list(CenterCrops(sample, 16))))
    color = torch.cat([small.mean(dim=(2, 3)), small.std(dim=(2, 3))], dim=1)
    known = sample.labels[sample.labels >= 0]
    chance = np.bincount(known).max() / len(known) if len(known) else 1.0
    by_color = _accuracy(color, color, sample.labels)
    straight = _accuracy(small, small, sample.labels)
    mirrored = _accuracy(small, small.flip(3), sample.labels)
    warnings = []
    recolors = sample.num_channels == 3 and (
        view.jitter * (view.hue + view.saturation) or view.gray
    )
    if recolors and by_color > (1 + chance) / 2:
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
        return knn(train, test)[0].value
    except NearkinError:
        return 0.0
