"""Pictures about a run: what the augmentations do, and how training went."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nearkin.data.batches import Batches
from nearkin.data.centered import pixels
from nearkin.tables import read_csv

EXAMPLES = 8
DRAWS = 4
"""Epochs shown: each picture is drawn anew in every one of them."""


def augmentation_sheet(batches: Batches, path: Path) -> Path:
    """Show pictures of the first step beside the views that training will see of them.

    One row per picture: itself, then every view in each of the first epochs. Made before the
    first step, since a wrong augmentation is the commonest silent mistake.
    """
    from PIL import Image

    rows = np.sort(batches.order.rows(0))[:EXAMPLES]
    shown = batches.images.subset(rows)
    side = batches.sizes[0]
    columns = [next(pixels(shown, side)).float() / 255]
    for epoch in range(DRAWS):
        columns += [_fit(view.cpu(), side) for view in batches.views(epoch, rows)]
    tiles = torch.stack([_fit(column, side) for column in columns], dim=1)
    tiles = torch.nn.functional.pad(tiles, (2, 2, 2, 2), value=1.0)
    sheet = torch.cat([torch.cat(tuple(row), dim=2) for row in tiles], dim=1)
    image = Image.fromarray((sheet.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy())
    scale = max(1, 64 // side)
    image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST).save(path)
    return path


def _fit(view: Tensor, side: int) -> Tensor:
    """Views of any size as tiles of one size, on white."""
    missing = side - view.shape[-1]
    return torch.nn.functional.pad(view, (0, missing, 0, missing), value=1.0)


CURVES = {
    "loss": "Loss",
    "knn": "kNN accuracy (held out)",
    "effective_rank": "Effective rank of the embeddings",
    "feature_std": "Spread of the embeddings (1 = isotropic)",
}


def curves(metrics: Path, path: Path) -> Path:
    """Plot metrics.csv: loss, kNN accuracy and health over the epochs."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [{name: float(cell) for name, cell in row.items() if cell} for row in read_csv(metrics)]
    present = [name for name in CURVES if any(name in row for row in rows)]
    figure, axes = pyplot.subplots(1, len(present), figsize=(4 * len(present), 3), squeeze=False)
    for axis, name in zip(axes[0], present, strict=True):
        points = [(row["epoch"], row[name]) for row in rows if name in row]
        marker = "." if len(points) < 40 else ""
        axis.plot(*zip(*points, strict=True), linewidth=1.2, marker=marker)
        axis.set_title(CURVES[name], fontsize=10)
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
