"""Photographs decoded once, at one bounded size, and kept as bytes that all workers map."""

import hashlib
import mmap
import os
import re
import shutil
import weakref
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import PIL
from jaxtyping import Int, Int64, UInt8
from PIL import Image, features

from nearkin.data.decode import decode
from nearkin.data.images import Images
from nearkin.data.scan import cache_folder
from nearkin.distributed import control_groups
from nearkin.errors import ResourceError, UsageError

VERSION: Final = 1
"""Of what is kept; another version has other files."""
DETAIL: Final = 2
"""The shorter side of a kept image, in sides of a view."""
LONGEST: Final = 4
"""How many times as long as wide an image is kept with all of that detail."""


def cached_sizes(
    sizes: Int[np.ndarray, "images 2"], image_size: int
) -> Int64[np.ndarray, "images 2"]:
    """Width and height at which images are kept: a function of nothing else.

    The shorter side has twice the pixels of a view. So a crop of a quarter of the area is still
    cut from as many pixels as it gets, and smaller ones are enlarged. Nothing is enlarged to be
    kept, and what is longer than 4:1 is shrunk until it is no larger than that.

    Args:
        sizes: The images' widths and heights.
        image_size: Side of whole views in pixels.
    """
    side, area = DETAIL * image_size, sizes.prod(axis=1, dtype=np.int64)
    scale = np.minimum(side / sizes.min(axis=1), side * np.sqrt(LONGEST / area)).clip(max=1)
    kept: np.ndarray = np.rint(sizes * scale[:, None]).clip(1).astype(np.int64)
    return kept


class Cache:
    """Reads photographs as pixels of their `cached_sizes`, and decodes each of them once.

    What is read depends on the image and the image size alone: not on which process decoded
    it, nor when, nor where it is kept. A checksum is written behind the pixels of an image, and
    each process looks at it before it trusts them, so what was half written is decoded again.
    Can be pickled: every process of this machine may open it for as long as this one lives.

    Args:
        images: The photographs.
        image_size: Side of whole views in pixels.
        place: "ram" or "disk".

    Raises:
        UsageError: Memory cannot be shared like this here.
        ResourceError: The disk cannot be written.
    """

    def __init__(self, images: Images, image_size: int, place: str) -> None:
        self.images = images
        self.sizes = cached_sizes(images.sizes, image_size)
        self.ends = 4 * len(images) + np.cumsum(3 * self.sizes.prod(axis=1))
        """Where each image's pixels end; checksums of four bytes lie before all pixels."""
        path = _on_disk(images, image_size, self.num_bytes) if place == "disk" else None
        self._open(_in_memory(self.num_bytes) if path is None else os.open(path, os.O_RDWR))
        own = f"/proc/{os.getpid()}/fd/{self._descriptor}"  # also leads to what was removed
        self.path = path if path and not os.path.exists(own) else own  # noqa: PTH110

    @property
    def num_bytes(self) -> int:
        """How much there is to be kept."""
        return int(self.ends[-1])

    def _open(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        mapped = mmap.mmap(descriptor, self.num_bytes, prot=mmap.PROT_READ)
        self._kept = np.frombuffer(mapped, np.uint8)
        self._trusted = np.zeros(len(self.images), np.bool_)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._open(os.open(self.path, os.O_RDWR))

    def read(self, row: int) -> UInt8[np.ndarray, "_ _ 3"]:
        """An image's pixels, decoded unless somebody has done so.

        Raises:
            BadImage: It has to be decoded, and cannot be.
        """
        width, height = self.sizes[row].tolist()
        end, place = int(self.ends[row]), 4 * row
        start = end - 3 * width * height
        pixels = self._kept[start:end]
        if not self._trusted[row]:
            noted = self._kept[place : place + 4].tobytes()
            if noted == bytes(4) or noted != _checksum(pixels):
                pixels = self._decoded(row, width, height)
                with suppress(OSError):  # a full disk costs time, nothing else
                    os.pwrite(self._descriptor, pixels.data, start)
                    os.pwrite(self._descriptor, _checksum(pixels), place)
                return pixels
            self._trusted[row] = True
        return pixels.reshape(height, width, 3)

    def _decoded(self, row: int, width: int, height: int) -> UInt8[np.ndarray, "_ _ 3"]:
        held = self.images.read(row)
        image = (
            decode(held, min_side=min(width, height))
            if isinstance(held, bytes)
            else Image.fromarray(held)
        )
        return np.array(image.resize((width, height), Image.Resampling.BICUBIC))


def _checksum(pixels: np.ndarray) -> bytes:
    return zlib.crc32(pixels.data).to_bytes(4, "little")


def _in_memory(size: int) -> int:
    """The descriptor of a file that has no name and no disk."""
    if not hasattr(os, "memfd_create"):
        raise UsageError("--cache ram needs Linux; give disk or off")
    descriptor: int = os.memfd_create("nearkin")
    os.truncate(descriptor, size)
    return descriptor


def _on_disk(images: Images, image_size: int, size: int) -> str:
    """The file for these images; what was kept of the same data before is removed.

    Raises:
        ResourceError: It cannot be made.
    """
    decoders = f"{VERSION} {PIL.__version__} {features.version('jpg')}"
    known = hashlib.sha256(f"{images.fingerprint} {image_size} {decoders} ".encode())
    known.update(images.modified.tobytes())
    data = hashlib.sha256(images.key.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    path = cache_folder("images") / f"{data}-{known.hexdigest()[:32]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.stat().st_size != size:
            for old in path.parent.glob(f"{data}-*"):
                old.unlink(missing_ok=True)
            own = path.with_name(f"new-{os.getpid()}-{path.name}")
            own.touch()
            os.truncate(own, size)
            own.replace(path)
    except OSError as error:
        raise ResourceError(
            f"{path.parent}: cannot be written ({error}); use --cache off"
        ) from error
    return str(path)


PAYS: Final = {"ram": 4, "disk": 8}
"""Pixels of the photographs for each kept one, from which on keeping is faster than decoding."""


def cache_for(images: Images, image_size: int, *, memory: int, disk: int) -> str:
    """What `--cache auto` comes to: the place that is sure to pay.

    Photographs are kept if they are so much larger than what is kept of them that it saves
    more than a little: in memory, if half of what is free there holds them, or on the disk.

    Args:
        images: The images.
        image_size: Side of whole views in pixels.
        memory: Free bytes; see `free_memory`.
        disk: Free bytes; see `free_disk`.
    """
    if images.is_small or (images.kinds == "array").all():
        return "off"
    kept = int(cached_sizes(images.sizes, image_size).prod(axis=1).sum())
    pixels = images.sizes.prod(axis=1, dtype=np.int64).sum()
    for place, free in (("ram", memory), ("disk", disk)):
        if pixels >= PAYS[place] * kept and 3 * kept <= free / 2:
            return place
    return "off"


def free_disk() -> int:
    """Free bytes where images would be kept."""
    folder = cache_folder("images")
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that may be taken, of the machine and of the control group.

    Nothing where memory cannot be kept in, which takes Linux.

    Args:
        root: Where the system's own folders proc and sys are.
    """
    known = root / "proc/meminfo"
    free = re.search(r"MemAvailable:\s*(\d+)", known.read_text()) if known.exists() else None
    if free is None or not hasattr(os, "memfd_create"):
        return 0
    return min(1024 * int(free[1]), *_limits(root), 2**62)


def _limits(root: Path) -> Iterator[int]:
    """What the process's control groups, of version 1 or 2, and those around them allow."""
    groups, mounted = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    for group in control_groups(groups, mounted, "memory"):
        for file in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # not here, or "max"
                yield int((group / file).read_text(encoding="utf-8"))
