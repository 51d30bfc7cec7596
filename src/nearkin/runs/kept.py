"""What a frozen encoder sees of all pictures, as a file: computed once, read by every stage."""

import json
from pathlib import Path

import numpy as np
import torch

from nearkin.errors import CheckpointError
from nearkin.runs.trunk import Looks
from nearkin.training import sealed


def write_looks(path: Path, looks: Looks, bad: dict[int, str]) -> None:
    """Write features and the rows of unreadable pictures, whole or not at all."""
    from safetensors.torch import save

    state = {"center": looks.center.contiguous(), "views": looks.views.contiguous()}
    path.parent.mkdir(parents=True, exist_ok=True)
    sealed.write_whole(path, save(state, metadata={"bad": json.dumps(bad)}))


def read_looks(path: Path) -> tuple[Looks, dict[int, str]]:
    """What `write_looks` wrote.

    Raises:
        CheckpointError: If the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            bad = json.loads(file.metadata()["bad"])
            looks = Looks(file.get_tensor("center"), file.get_tensor("views"))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged; remove it, it will be made again") from error
    return looks, {int(row): reason for row, reason in bad.items()}


def rows_of(looks: Looks, keep: np.ndarray) -> Looks:
    """The looks at some pictures."""
    rows = torch.from_numpy(keep)
    return Looks(looks.center[rows], looks.views[:, rows])
