"""`nearkin check`: what there is to know about pictures before training on them."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nearkin.config import TrainConfig
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.centered import pixels
from nearkin.data.duplicates import duplicates
from nearkin.data.images import Images, open_images
from nearkin.data.order import Order
from nearkin.distributed import choose_device
from nearkin.errors import NearkinError
from nearkin.evaluation.knn import knn
from nearkin.runs.build import build_method, named_backbone, resolve
from nearkin.runs.fit import seconds_per_epoch
from nearkin.runs.monitor import spread
from nearkin.runs.train import describe, with_precision

LOOKED_AT = 2_000
"""Pictures, at most, that the looks at color and orientation need."""


@dataclass(frozen=True)
class Findings:
    """What was found about some pictures."""

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
            "pictures": len(self.images),
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
            f"pictures    {found['pictures']} ({formats})",
            f"width       {low} to {high} px, median {middle}",
            f"height      {least} to {most} px, median {median}",
            f"labels      {_summary(found['classes'])}",
            f"duplicates  {self.exact} exact, {self.near} near",
            f"unreadable  {len(self.images.bad)}",
            *(f"            {bad.name}: {bad.reason}" for bad in self.images.bad[:10]),
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
    return f"{len(classes)} classes of {min(counts)} to {max(counts)} pictures, for scoring only"


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{max(1, round(hours * 60))} minutes"


def check(data: Any, *, labels: str = "auto", scan: str = "headers") -> Findings:
    """Look at pictures: counts, sizes, bad files, duplicates, proposed settings.

    Args:
        data: What `open_images` takes.
        labels: Where labels come from, as for `TrainConfig`.
        scan: `headers` opens every file, `full` decodes every picture.
    """
    images = open_images(data, labels=labels, full=scan == "full")
    found = duplicates(images)
    shares = [("exact", found.num_exact), ("near", found.num_near)]
    warnings = [
        f"{count} {kind} duplicates: each is a negative that should not be one; remove them"
        for kind, count in shares
        if count > 0.05 * len(images)
    ]
    proposal, hours, megabytes = "", None, None
    try:
        proposal, hours, megabytes = propose(images)
    except NearkinError as error:
        proposal = f"none: {error}"
    warnings += erased(images)
    exact, near = found.num_exact, found.num_near
    return Findings(images, exact, near, tuple(warnings), proposal, hours, megabytes)


def propose(images: Images) -> tuple[str, float, float]:
    """What `auto` comes to, how many hours it takes here, and how many megabytes of disk."""
    device = choose_device("auto")
    config = with_precision(resolve(TrainConfig(), images, device), device)
    torch.manual_seed(config.seed)
    method = build_method(config, named_backbone(config, None), len(images)).to(device)
    batches = Batches(
        images,
        views_of(config.augment, method.num_views),
        image_size=int(config.image_size),
        order=Order(len(images), int(config.batch_size), config.seed),
        device=device,
    )
    hours = seconds_per_epoch(config, method, batches) * int(config.epochs) / 3600
    weights = sum(tensor.nbytes for tensor in method.state_dict().values())
    features = 4 * method.backbone.feature_dim * len(images)
    return describe(config), hours, (3 * 2 * weights + features) / 1e6


def erased(images: Images) -> list[str]:
    """Warnings of augmentations that would erase what tells these pictures apart.

    With labels: what a picture's mean color alone, or its mirror image, says of its class.
    Without: whether the mean picture is far from its own mirror image.
    """
    shown = spread(images, LOOKED_AT)
    small = torch.cat(list(pixels(shown, 16))).float() / 255
    warnings = []
    if (small == small[:, :1]).all():
        return [*_orientation(small, shown.labels)]
    color = torch.cat([small.mean(dim=(2, 3)), small.std(dim=(2, 3))], dim=1)
    share = _accuracy(color - color.mean(dim=0), shown.labels)
    chance = _largest_class(shown.labels)
    if share is not None and share > chance + 0.5 * (1 - chance):
        warnings.append(
            f"color alone tells {share:.0%} of the classes: strong color jitter and gray would "
            "erase it; try --augment characters"
        )
    return [*warnings, *_orientation(small, shown.labels)]


def _orientation(small: torch.Tensor, labels: np.ndarray) -> list[str]:
    flat = small.flatten(1) - small.flatten(1).mean(dim=0)
    straight, mirrored = _accuracy(flat, labels), _accuracy(flat, labels, small.flip(3).flatten(1))
    if straight is not None and mirrored is not None:
        if mirrored < 0.6 * straight:
            return [
                f"mirrored pictures are told apart worse ({mirrored:.0%} for {straight:.0%}): "
                "flips may erase what matters, as in writing; try --augment characters"
            ]
        return []
    mean = small.mean(dim=0)
    spread_of_mean = (mean - mean.mean()).norm()
    if (
        spread_of_mean > 0.05 * mean.numel() ** 0.5
        and (mean - mean.flip(2)).norm() > spread_of_mean
    ):
        return ["the mean picture differs from its mirror image; are flips harmless here?"]
    return []


def _accuracy(
    features: torch.Tensor, labels: np.ndarray, queries: torch.Tensor | None = None
) -> float | None:
    """KNN accuracy of every second picture by the others; None without labels."""
    try:
        asked = features if queries is None else queries - queries.mean(dim=0)
        measure = knn(features[::2], labels[::2], asked[1::2], labels[1::2], k=20)
    except NearkinError:
        return None
    return measure.value


def _largest_class(labels: np.ndarray) -> float:
    known = labels[labels >= 0]
    return float(np.bincount(known).max() / len(known)) if len(known) else 1.0
