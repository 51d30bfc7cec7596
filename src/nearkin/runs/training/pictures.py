"""Pictures about a run: what augmentations do, how training went, what is held alike."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from nearkin.data.batches import Batches
from nearkin.data.centered import Pixels
from nearkin.data.images import Images
from nearkin.measures.neighbors import nearest
from nearkin.runs.evaluation.embed import Embeddings
from nearkin.tables import read_numbers

EXAMPLES = 8
NEIGHBORS = 8
MIN_SIDE = 64
"""Smaller pictures are enlarged to about this many pixels, for people to see."""
DRAWS = 4
"""Epochs shown: each picture is drawn anew in every one of them."""


def augmentation_sheet(batches: Batches, path: Path) -> Path:
    """Show pictures of the first step beside the views that training will see of them.

    One row per picture: itself, then every view in each of the first epochs. Made before the
    first step, since a wrong augmentation is the commonest silent mistake.
    """
    rows = np.sort(batches.order.rows(0))[:EXAMPLES]
    side = batches.sizes[0]
    columns = [_shown(batches.images, rows, side)]
    for epoch in range(DRAWS):
        columns += [view.cpu() for view in batches.views(epoch, rows)]
    return save_sheet(columns, path)


def neighbor_sheet(train: Embeddings, test: Embeddings, size: int, path: Path) -> Path:
    """Show held-out pictures, each beside the training pictures it is most like.

    One row per picture: itself, then its nearest neighbors, most similar first.

    Args:
        train: The pictures to look among.
        test: The pictures to look for.
        size: Side in pixels of the tiles, at least.
        path: The file.
    """
    rows = np.linspace(0, len(test.vectors) - 1, min(EXAMPLES, len(test.vectors))).astype(int)
    bank, queries = torch.from_numpy(train.vectors), torch.from_numpy(test.vectors[rows])
    _, found = nearest(bank, queries, NEIGHBORS)
    side = max(size, MIN_SIDE)
    columns = [_shown(test.images, rows, side)]
    columns += [_shown(train.images, ranked.numpy(), side) for ranked in found.T]
    return save_sheet(columns, path)


def _shown(images: Images, rows: np.ndarray, side: int) -> Tensor:
    """Pictures in the order of `rows`, which may name one twice, in [0, 1]."""
    unique, places = np.unique(rows, return_inverse=True)
    return next(iter(Pixels(images.subset(unique), side)))[torch.from_numpy(places)] / 255


def save_sheet(columns: Sequence[Tensor], path: Path, labels: Sequence[str] = ()) -> Path:
    """Save columns of pictures as one, small ones enlarged and a column's own size kept.

    Args:
        columns: Pictures in [0, 1], of shape (rows, 3, side, side).
        path: The file.
        labels: What to write in front of each row.
    """
    side = max(column.shape[-1] for column in columns)
    tiles = torch.stack([_padded(column, side) for column in columns], dim=1)
    tiles = torch.nn.functional.pad(tiles, (2, 2, 2, 2), value=1.0)
    sheet = torch.cat([torch.cat(tuple(row), dim=2) for row in tiles], dim=1)
    image = Image.fromarray((sheet.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy())
    scale = max(1, MIN_SIDE // side)
    large = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    _labeled(large, labels).save(path)
    return path


def _labeled(sheet: Image.Image, labels: Sequence[str]) -> Image.Image:
    """The sheet with a label to the left of each of its rows, as wide as they need."""
    if not labels:
        return sheet
    font = ImageFont.load_default(14)
    margin = int(max(map(font.getlength, labels))) + 16
    wider = Image.new("RGB", (sheet.width + margin, sheet.height), "white")
    wider.paste(sheet, (margin, 0))
    draw, height = ImageDraw.Draw(wider), sheet.height / len(labels)
    for row, label in enumerate(labels):
        draw.text((8, (row + 0.5) * height), label, "black", font, anchor="lm")
    return wider


def _padded(view: Tensor, side: int) -> Tensor:
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

    rows = read_numbers(metrics)
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
