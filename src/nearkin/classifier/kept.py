"""Features that outlive their run, in the user's cache folder: a second question costs seconds.

What is kept depends on the encoder (architecture, weights, preprocessing), on the images
(contents, sizes and times of the files), on the views, and on the programs that decode and
compute. Features of anything else have another folder, so that none is ever taken for another's.
Several processes may write the same: files are whole or not there.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import PIL
import torch
from jaxtyping import Float
from torch import Tensor, nn

from nearkin.data.images import PREFIX, Images
from nearkin.encoders.encoder import CUSTOM, Encoder, read_tensors
from nearkin.errors import CheckpointError
from nearkin.extensions import names_code
from nearkin.files import usable, whole
from nearkin.places import cache_folder

VERSION: Final = 2  # Of how features are computed; another version has other names
LIMIT: Final = 20 * 2**30  # Bytes of all kept features, but that those of the run at work stay
LIBRARIES: Final = {"nearkin", "torch", "torchvision", "timm", "transformers"}

Passes = Float[Tensor, "passes images dim"]
Found = tuple[Passes, dict[int, str]]
"""The features of some images, and the unreadable ones with the reason, by position."""


@dataclass(eq=False)
class KeptFeatures:
    """The folder of some features; None where they are kept nowhere."""

    folder: Path | None
    problem: str = ""  # Why they could not be written

    @classmethod
    def of(
        cls,
        encoder: Encoder,
        images: Images,
        views: Sequence[dict[str, Any] | int],
        computed: Sequence[str],
        aside: Path | None,
    ) -> "KeptFeatures":
        """Return the folder for these features, by all that they depend on.

        `views` are the numbers of the view, the seed and how many are drawn; empty for images as
        they are. `computed` says what computes them: the type of the device, the precision, the
        program. What may change unseen, or cannot be in the user's cache folder, is `aside`.
        """
        channels = encoder.preprocessing.applied(images).channels
        contents = hashlib.sha256()
        for column in (images.contents, images.num_bytes, images.modified, images.sizes):
            contents.update(column.tobytes())
        libraries = sorted({"torch", *_packages(encoder.backbone)} & LIBRARIES)
        described = [
            *(VERSION, encoder.digest, contents.hexdigest(), repr(channels), views),
            *(str(images.pixel_type), *computed, PIL.__version__),
            *(f"{name} {sys.modules[name].__version__}" for name in libraries),
        ]
        key = hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest()[:32]
        shared = _writable(cache_folder("features"))
        folder = aside if shared is None or _may_change(encoder, images) else shared
        problem = "" if shared else f"{cache_folder('features')} cannot be written"
        return cls(folder / key) if folder else cls(None, problem)

    def read(self, rows: range, passes: int, dim: int) -> Found | None:
        """Return what was written of these rows; None if nothing was, or the file is damaged."""
        if self.folder is None or not (path := _file(self.folder, rows)).exists():
            return None
        with suppress(CheckpointError), usable(path, "remove it"):
            metadata, tensors = read_tensors(path, "bad")
            bad = {int(row): str(reason) for row, reason in metadata.items()}
            features = tensors["features"]
            if (features.shape, features.dtype) != ((passes, len(rows), dim), torch.float32):
                raise ValueError("it is of other images")
            if not bad.keys() <= set(range(len(rows))):
                raise ValueError("it is of something else")
            return features, bad
        return None

    def write(self, rows: range, features: Passes, bad: dict[int, str]) -> None:
        """Keep features of these rows, and the unreadable ones by position, whole or not at all.

        Where that fails, features cost time again, nothing else.
        """
        from safetensors.torch import save_file

        if self.folder is None or self.problem:
            return
        tensors, metadata = {"features": features.contiguous()}, {"bad": json.dumps(bad)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole(_file(self.folder, rows)) as partial:
                save_file(tensors, partial, metadata=metadata)
        except OSError as error:
            self.problem = f"{self.folder} cannot be written ({error.strerror or error})"

    def trim(self) -> None:
        """Remove what has not been used for longest, until the rest fits into `LIMIT`."""
        if self.folder is None or self.folder.parent != cache_folder("features"):
            return
        used = list[tuple[float, int, Path]]()
        with suppress(OSError):  # nothing may be written there
            os.utime(self.folder)
        with suppress(OSError):  # another process may make room as well
            for folder in filter(Path.is_dir, self.folder.parent.iterdir()):
                size = sum(file.stat().st_size for file in folder.iterdir())
                used.append((folder.stat().st_mtime, size, folder))
        excess = sum(size for _, size, _ in used) - LIMIT
        for _, size, folder in sorted(used):
            if excess > 0 and folder != self.folder:
                shutil.rmtree(folder, ignore_errors=True)
                excess -= size


def _file(folder: Path, rows: range) -> Path:
    return folder / f"{rows.start:09d}.safetensors"


def _writable(folder: Path) -> Path | None:
    """Return a folder that files can be written to, made if it is not there; None otherwise."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None


def _may_change(encoder: Encoder, images: Images) -> bool:
    """Whether features may change unseen: by code of the user, or large files without a time."""
    backbone = str(encoder.details.get("backbone", CUSTOM))
    if backbone == CUSTOM or names_code(backbone) or _packages(encoder.backbone) - LIBRARIES:
        return True
    files = ~np.char.startswith(images.formats, "array")
    return bool((files & (images.modified == 0) & (images.num_bytes > PREFIX)).any())


def _packages(network: nn.Module) -> set[str]:
    """Return the packages that the code of a network is of."""
    return {type(module).__module__.partition(".")[0] for module in network.modules()}
