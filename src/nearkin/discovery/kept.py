"""What a frozen encoder sees of all pictures, as a file: computed once, read by every stage."""

import json
from pathlib import Path

import numpy as np
import torch

from nearkin.discovery.trunk import Looks
from nearkin.evaluation.encoder import read_tensors
from nearkin.tables import usable, write_whole


def write_looks(path: Path, looks: Looks, bad: dict[int, str]) -> None:
    """Write features and the rows of unreadable pictures, whole or not at all."""
    from safetensors.torch import save

    state = {"center": looks.center.contiguous(), "views": looks.views.contiguous()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save(state, metadata={"bad": json.dumps(bad)}))


def read_looks(path: Path, count: int) -> tuple[Looks, dict[int, str]]:
    """What `write_looks` wrote.

    Args:
        path: The file.
        count: How many pictures it must be of.

    Raises:
        CheckpointError: If the file is damaged, or of other pictures.
    """
    with usable(path, "remove it, it will be made again"):
        noted, state = read_tensors(path, "bad")
        center, views = state["center"], state["views"]
        rows, _ = center.shape
        if views.ndim != 3 or views.shape[1:] != center.shape or rows != count:
            raise ValueError(f"features {list(center.shape)}, of views {list(views.shape)}")
        bad = {int(row): str(reason) for row, reason in noted.items()}
        if not bad.keys() <= set(range(rows)):
            raise ValueError(f"unreadable pictures beyond {rows}")
    return Looks(center, views), bad


def rows_of(looks: Looks, keep: np.ndarray) -> Looks:
    """The looks at some pictures."""
    rows = torch.from_numpy(keep)
    return Looks(looks.center[rows], looks.views[:, rows])
