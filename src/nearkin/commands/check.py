"""`nearkin check`: counts, sizes, duplicates and proposed settings, before training."""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import torch
from typing_extensions import override

from nearkin.commands.arguments import command
from nearkin.config import TrainConfig
from nearkin.data import notes
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.data.split import (
    duplicate_warnings,
    has_test_split,
    searched,
    split_images,
    trained_or_scored,
)
from nearkin.distributed import choose_device
from nearkin.errors import NearkinError
from nearkin.evaluation.augmentation import augmentation_warnings
from nearkin.evaluation.leaks import Leaks
from nearkin.pace import count
from nearkin.result import Result, Row
from nearkin.run.auto import describe, resolve, view_sides
from nearkin.run.failures import resource_errors
from nearkin.run.reporter import Reporter, reporter_of
from nearkin.training.length import Overhead, planned_epochs, time_epoch, time_filling
from nearkin.training.session import build
from nearkin.training.start import OPTIMIZER_COPIES

TIMED_BATCH: Final = 32  # Of large images, where measuring a full batch takes minutes


@dataclass(frozen=True)
class Cost:
    """What a training takes on this machine, about."""

    epochs: int  # That are planned at the speed that was measured
    hours: float  # At that speed
    megabytes: float  # Of disk

    def __str__(self) -> str:
        minutes = max(1, round(self.hours * 60))
        time = f"{self.hours:.1f} hours" if self.hours >= 1 else f"{minutes} min"
        return f"about {time}, {self.megabytes:.0f} MB of disk"


@dataclass(frozen=True, repr=False)
class DataReport(Result):
    """What `nearkin check` reports on images."""

    images: Images
    exact: int | None  # None of too many images to search for duplicates
    near: int | None
    leaks: Leaks  # Of the test part that the data name
    parts: dict[str, int]
    """Images that a training has to train on and to score; none if they cannot be divided."""
    warnings: tuple[str, ...]
    proposal: str  # The settings of `auto`, or why there are none, if training is impossible
    cost: Cost | None  # Of that training

    @override
    def records(self) -> list[Row]:
        """A row per class: its name and number of images."""
        counts = Counter(self.images.labels.tolist())
        named = enumerate(self.images.classes)
        return [{"class": name, "images": counts[label]} for label, name in named]

    @override
    def to_dict(self) -> dict[str, Any]:
        return {
            "images": len(self.images),
            "formats": dict(self.images.format_counts),
            "classes": {row["class"]: row["images"] for row in self.records()},
            "width": _range(self.images.sizes[:, 0]),
            "height": _range(self.images.sizes[:, 1]),
            "parts": self.parts,
            "bad": [{"path": bad.name, "reason": bad.reason} for bad in self.images.bad],
            "exact_duplicates": self.exact,
            "near_duplicates": self.near,
            "leaked": self.leaks.leaked,
            "notes": notes.plain(self.images.notes),
            "warnings": list(self.warnings),
            "proposal": self.proposal,
            **(asdict(self.cost) if self.cost else dict.fromkeys(Cost.__annotations__)),
        }

    @override
    def lines(self) -> list[str]:
        values = self.to_dict()
        (low, middle, high), (least, median, most) = values["width"], values["height"]
        found = "not searched" if self.exact is None else f"{self.exact} exact, {self.near} near"
        formats = ", ".join(f"{number} {kind}" for kind, number in values["formats"].items())
        lines = [
            f"images    {values['images']} ({formats})",
            f"width       {low} to {high} px, median {middle}",
            f"height      {least} to {most} px, median {median}",
            f"labels      {_summary(values['classes'])}",
            f"parts       {self._parts()}",
            f"duplicates  {found}",
            *_block("", [str(self.leaks)] if self.leaks.leaked else []),
            f"unreadable  {len(self.images.bad)}",
            *(f"            {bad.name}: {bad.reason}" for bad in self.images.bad[:10]),
            *_block("notes", notes.lines(self.images.notes)),
            *(f"warning     {warning}" for warning in self.warnings),
            f"proposal    {self.proposal}",
        ]
        return [*lines, f"            {self.cost}"] if self.cost else lines

    def _parts(self) -> str:
        if not self.parts:
            return "the images cannot be divided"
        named = has_test_split(self.images)
        why = "by the data's own names" if named else f"as by --val {TrainConfig.val}"
        return f"{self.parts['train']} to train on, {self.parts['test']} to score, {why}"


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


@command
def check(
    data: Any,
    *,
    labels: str = "auto",
    scan: Literal["headers", "full"] = "headers",
    verbose: bool | Reporter = True,
) -> DataReport:
    """Check images before training: counts, sizes, bad files, duplicates, proposed settings.

    Args:
        data: Images: a folder, a table, an archive or shards, or a name such as digits.
        labels: Where labels come from, as for `TrainConfig`.
        scan: `headers` opens every file, `full` decodes every image.
        verbose: Whether to show progress, or what receives it.
    """
    on_progress = reporter_of(verbose).progress
    opened = open_images(data, labels=labels, full=scan == "full", on_progress=on_progress)
    images = trained_or_scored(opened)
    found = searched(images, on_progress)
    exact, near, leaked, warnings = None, None, 0, list[str]()
    if found:
        exact, near = found.num_exact, found.num_near
        warnings = duplicate_warnings(exact, "exact", images)
        warnings += duplicate_warnings(near, "near", images)
    estimate, parts = None, dict[str, int]()
    try:
        with resource_errors():
            config = TrainConfig()
            split = split_images(images, config.val, config.seed, on_progress, found=found)
            images, train, leaked = split.images, split.train, int(split.leaked.sum())
            parts = {"train": len(train), "test": len(split.test_rows)}
            device = choose_device("auto")
            config = resolve(config, train, device)
            estimate = _cost(config, train, device)
            warnings += augmentation_warnings(train, config.augment)
            proposal = describe(replace(config, epochs=estimate.epochs))
    except NearkinError as error:
        proposal = f"none: {error}"
    return DataReport(
        images,
        exact,
        near,
        Leaks(leaked, int((images.splits == "test").sum()), grouped=any(images.group_names)),
        parts,
        tuple(warnings),
        proposal,
        estimate,
    )


def _cost(config: TrainConfig, images: Images, device: torch.device) -> Cost:
    """Estimate what a training takes on this machine, by timing a few steps."""
    batch = int(config.batch_size)
    timed = config if images.is_small else replace(config, batch_size=min(TIMED_BATCH, batch))
    method, batches = build(timed, images, device)
    parts = [batches.resized(side) for side in view_sides(timed)]
    filling, epoch = time_filling(timed, parts[0]), time_epoch(timed, method, parts)
    epochs = planned_epochs(config, epoch, Overhead(start=filling))
    weights = sum(tensor.nbytes for tensor in method.state_dict().values())
    checkpoints = 3 * (1 + OPTIMIZER_COPIES[config.optimizer]) * weights  # the newest three
    features = 4 * method.backbone.feature_dim * len(images)
    return Cost(epochs, (filling + epoch * epochs) / 3600, (checkpoints + features) / 1e6)
