"""`nearkin check`: what there is to know about images before training on them."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from nearkin.config import TrainConfig
from nearkin.data.augmentations import Augment, views_of
from nearkin.data.batches import Batches, CenterCrops
from nearkin.data.duplicates import duplicates
from nearkin.data.images import Images, open_images
from nearkin.data.order import Order
from nearkin.data.rng import seeded
from nearkin.data.split import duplicate_warnings
from nearkin.distributed import choose_device
from nearkin.errors import NearkinError
from nearkin.evaluation.knn import knn
from nearkin.run.reporter import Reporter, Silent
from nearkin.run.settings.build import build_method, named_backbone, resolve, views_for
from nearkin.run.settings.describe import describe
from nearkin.training.fit import seconds_per_epoch

TIMED_BATCH = 32
"""Images per step when the cost of photographs is estimated: a full batch takes minutes."""
LOOKED_AT = 2_000  # Images, at most, that the looks at color and orientation need


@dataclass(frozen=True)
class Findings:
    """What was found about some images."""

    images: Images
    exact: int
    near: int
    warnings: tuple[str, ...]
    proposal: str
    """The settings `auto` comes to, in a line; why there are none, if training is impossible."""
    hours: float | None
    megabytes: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "images": len(self.images),
            "formats": dict(self.images.formats),
            "classes": self._classes(),
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

    def _classes(self) -> dict[str, int]:
        counts = Counter(self.images.labels.tolist())
        return {name: counts[label] for label, name in enumerate(self.images.classes)}

    def lines(self) -> list[str]:
        """The findings for people."""
        found = self.to_dict()
        (low, middle, high), (least, median, most) = found["width"], found["height"]
        formats = ", ".join(f"{count} {kind}" for kind, count in found["formats"].items())
        lines = [
            f"images    {found['images']} ({formats})",
            f"width       {low} to {high} px, median {middle}",
            f"height      {least} to {most} px, median {median}",
            f"labels      {_summary(found['classes'])}",
            f"duplicates  {self.exact} exact, {self.near} near",
            f"unreadable  {len(self.images.bad)}",
            *(f"            {bad.name}: {bad.reason}" for bad in self.images.bad[:10]),
            *(f"note        {note}" for note in self.images.notes),
            *(f"warning     {warning}" for warning in self.warnings),
            f"proposal    {self.proposal}",
        ]
        if self.hours is not None:
            lines.append(
                f"            about {_duration(self.hours)}, {self.megabytes:.0f} MB of disk"
            )
        return lines


def _range(values: np.ndarray) -> tuple[int, int, int]:
    return int(values.min()), int(np.median(values)), int(values.max())


def _summary(classes: dict[str, int]) -> str:
    if not classes:
        return "none; they are not needed"
    counts = classes.values()
    return f"{len(classes)} classes of {min(counts)} to {max(counts)} images, for scoring only"


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{max(1, round(hours * 60))} min"


def check(
    data: Any,
    *,
    labels: str = "auto",
    scan: Literal["headers", "full"] = "headers",
    reporter: Reporter | None = None,
) -> Findings:
    """Look at images: counts, sizes, bad files, duplicates, proposed settings.

    Args:
        data: What `open_images` takes.
        labels: Where labels come from, as for `TrainConfig`.
        scan: `headers` opens every file, `full` decodes every image.
        reporter: Receives log lines and progress; None is silent.
    """
    on_progress = (reporter or Silent()).progress
    images = open_images(data, labels=labels, full=scan == "full", on_progress=on_progress)
    found = duplicates(images, on_progress)
    warnings = duplicate_warnings(found.num_exact, "exact", images)
    warnings += duplicate_warnings(found.num_near, "near", images)
    hours, megabytes = None, None
    try:
        device = choose_device("auto")
        config = resolve(TrainConfig(), images, device)
        hours, megabytes = cost(config, images, device)
        warnings += erased(images, config.augment)
        proposal = describe(config)
    except NearkinError as error:
        proposal = f"none: {error}"
    return Findings(
        images, found.num_exact, found.num_near, tuple(warnings), proposal, hours, megabytes
    )


def cost(config: TrainConfig, images: Images, device: torch.device) -> tuple[float, float]:
    """How many hours a run takes here, and how many megabytes of disk."""
    with seeded(config.seed, torch.device("cpu")):
        method = build_method(config, named_backbone(config, None), images)
    method.to(device)
    batch = int(config.batch_size)
    batches = Batches(
        images,
        views_for(type(method), config.augment),
        image_size=int(config.image_size),
        order=Order(
            len(images), batch if images.is_small else min(TIMED_BATCH, batch), config.seed
        ),
        device=device,
    )
    hours = seconds_per_epoch(config, method, batches) * int(config.epochs) / 3600
    weights = sum(tensor.nbytes for tensor in method.state_dict().values())
    features = 4 * method.backbone.feature_dim * len(images)
    copies = 3 * 3  # the newest three checkpoints, each with the optimizer's two moments
    return hours, (copies * weights + features) / 1e6


def erased(images: Images, augment: Augment) -> list[str]:
    """Warnings that an augmentation erases what tells the classes of these images apart.

    Whether color alone names the classes, or a mirror image does no longer, is found by the
    nearest neighbors of thumbnails. Without labels nothing can be said.
    """
    view = views_of(augment, ("strong",))[0]
    shown = images.subset(np.flatnonzero(images.splits != "test")).spread(LOOKED_AT)
    small = torch.cat(list(CenterCrops(shown, 16))).float() / 255
    color = torch.cat([small.mean(dim=(2, 3)), small.std(dim=(2, 3))], dim=1)
    known = shown.labels[shown.labels >= 0]
    chance = np.bincount(known).max() / len(known) if len(known) else 1.0
    by_color = _accuracy(color, color, shown.labels)
    straight = _accuracy(small, small, shown.labels)
    mirrored = _accuracy(small, small.flip(3), shown.labels)
    warnings = []
    if (view.jitter * (view.hue + view.saturation) or view.gray) and by_color > (1 + chance) / 2:
        warnings.append(
            f"mean color alone tells {by_color:.0%} of the classes, and augmentation {augment} "
            "changes it; try --augment characters"
        )
    if view.flip and mirrored < straight - 0.3:
        warnings.append(
            f"thumbnails tell {straight:.0%} of the classes but {mirrored:.0%} once mirrored, as "
            f"in writing, and augmentation {augment} flips; try --augment characters"
        )
    return warnings


def _accuracy(bank: torch.Tensor, queries: torch.Tensor, labels: np.ndarray) -> float:
    """Accuracy of kNN for every second image by the others; 0 without labels."""
    mean = bank.flatten(1).mean(dim=0)
    known, asked = bank.flatten(1)[::2] - mean, queries.flatten(1)[1::2] - mean
    try:
        return knn(known, labels[::2], asked, labels[1::2], k=20).value
    except NearkinError:
        return 0.0
