"""Measures of floors, stored in the user's cache: no training changes them.

They lie in $XDG_CACHE_HOME/nearkin/floors (by default ~/.cache), a file of some kilobytes for each
floor. Where that cannot be written, floors are measured each time.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch

from nearkin.config import Augment
from nearkin.data.augmentations import views_of
from nearkin.data.images import Images
from nearkin.distributed import device_name
from nearkin.encoders.encoder import CUSTOM, Encoder
from nearkin.evaluation.measures import Measure
from nearkin.evaluation.protocols import Entry
from nearkin.extensions import names_code
from nearkin.files import read_sealed, write_sealed
from nearkin.places import cache_folder

Taken = dict[str, list[Measure] | str]
"""Measures by the title of their entry, or why there are none."""

STORED: Final = ("untrained", "pixels")  # Floors that no training changes
FEWEST: Final = 1_000  # Images from which on floors are stored; fewer are measured in seconds
PACKAGE: Final = Path(__file__).parents[1]
# What computes a floor, beside the package itself.
LIBRARIES: Final = ("numpy", "pillow", "scikit-learn", "scipy", "timm", "torch", "torchvision")


def conditions(
    images: Images,
    rows: Mapping[str, np.ndarray],
    *,
    seed: int,
    augment: Augment,
    device: torch.device,
) -> str:
    """Return a digest of all that the measures of a floor depend on, but for the floor itself.

    The images with their labels and groups, the readable ones of each split, seed, augmentation,
    machine, the versions of the libraries, and the source of this package: with any change of it,
    floors are measured anew.
    """
    arrays = (images.modified, images.labels, images.groups, *rows.values())
    described = [
        *(images.fingerprint, images.key, *map(_digest, arrays)),
        *(list(rows), seed, repr(views_of(augment, ("strong",)))),
        *(device_name(device), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()),
        *([name, importlib.metadata.version(name)] for name in LIBRARIES),
        package_digest(PACKAGE),
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()).hexdigest()


@cache
def package_digest(package: Path) -> str:
    """Return the SHA-256 of all modules of a package."""
    whole = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        whole.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return whole.hexdigest()


def stored_file(name: str, floor: Encoder | None, conditions: str) -> Path | None:
    """Return the file of a floor, `None` being raw pixels; None if its measures are not stored.

    Those of a network of the user's own are not: nobody here knows whether its code has changed.
    """
    if name not in STORED or not conditions:
        return None
    backbone = str(floor.details["backbone"]) if floor else ""
    if backbone == CUSTOM or names_code(backbone):
        return None
    described = f"{name} {floor.digest if floor else ''} {conditions}"
    return cache_folder("floors") / f"{hashlib.sha256(described.encode()).hexdigest()[:32]}.json"


def stored_or_taken(
    path: Path, entries: Sequence[Entry], take: Callable[[Sequence[Entry]], Taken]
) -> Taken:
    """Return the measures in a file; those that are missing are taken, and added to it."""
    stored = _read(path)
    missing = [entry for entry in entries if entry.title not in stored]
    if missing:
        stored |= take(missing)
        _write(path, stored)
    return {entry.title: stored[entry.title] for entry in entries}


def _read(path: Path) -> Taken:
    content = None
    with suppress(OSError):
        content = read_sealed(path)  # none of a damaged file
    plain = json.loads(content) if content else {}
    return {
        title: of if isinstance(of, str) else [Measure(**values) for values in of]
        for title, of in plain.items()
    }


def _write(path: Path, taken: Taken) -> None:
    plain = {
        title: of if isinstance(of, str) else [measure.to_dict() for measure in of]
        for title, of in taken.items()
    }
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(path, json.dumps(plain).encode())
