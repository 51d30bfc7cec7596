"""Where there is room to keep decoded photographs: what `--cache auto` comes to."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from nearkin.data.cache import kept_sizes
from nearkin.data.images import Images
from nearkin.data.index import kept_folder
from nearkin.distributed import control_groups

PAYS: Final = {"ram": 4, "disk": 8}
"""Pixels of the photographs for each kept one, from which on keeping is faster than decoding."""


def cache_for(images: Images, image_size: int, *, memory: int, disk: int) -> str:
    """What `--cache auto` comes to: the place that is sure to pay.

    Photographs are kept if they are so much larger than what is kept of them that it saves
    more than a little: in memory, if half of what is free there holds them, or on the disk.

    Args:
        images: The pictures.
        image_size: Side of whole views in pixels.
        memory: Free bytes; see `free_memory`.
        disk: Free bytes; see `free_disk`.
    """
    if images.is_small or (images.kinds == "array").all():
        return "off"
    kept = int(kept_sizes(images.sizes, image_size).prod(axis=1).sum())
    pixels = images.sizes.prod(axis=1, dtype=np.int64).sum()
    for place, free in (("ram", memory), ("disk", disk)):
        if pixels >= PAYS[place] * kept and 3 * kept <= free / 2:
            return place
    return "off"


def free_disk() -> int:
    """Free bytes where pictures would be kept."""
    folder = kept_folder("pictures")
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
