"""Photographs decoded once, at a bounded size, in memory or on disk, mapped by all workers."""

import hashlib
import mmap
import os
import shutil
import weakref
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import PIL
from jaxtyping import Int, Int64, UInt8
from PIL import Image, features

from nearkin.data.channels import named
from nearkin.data.decode import as_image
from nearkin.data.images import Images, in_bytes
from nearkin.errors import ResourceError, UsageError
from nearkin.files import whole
from nearkin.places import cache_folder

VERSION: Final = 1  # Of the files; another version has other names
DETAIL: Final = 2  # The shorter side of a cached image, in sides of a view
LONGEST: Final = 4  # Largest aspect ratio that is cached with all of that detail


def cached_sizes(
    sizes: Int[np.ndarray, "images 2"], image_size: int
) -> Int64[np.ndarray, "images 2"]:
    """Width and height of cached images: a function of nothing else.

    The shorter side has twice the pixels of a view, as many as a crop of a quarter of the area
    needs. No image is enlarged, and one longer than 4:1 is shrunk to the area of a 4:1 image.
    """
    side, area = DETAIL * image_size, sizes.prod(axis=1, dtype=np.int64)
    scale = np.minimum(side / sizes.min(axis=1), side * np.sqrt(LONGEST / area)).clip(max=1)
    return np.asarray(np.rint(sizes * scale[:, None]).clip(1).astype(np.int64))


def hold(path: Path) -> None:
    """Keep `make_room` of any process from removing a file as long as this process lives."""
    if path not in _held:
        _allow_open_files()
        with suppress(OSError):
            _held[path] = os.open(path, os.O_RDONLY)
            _lock(_held[path], "LOCK_SH")


_held: Final = dict[Path, int]()


def _allow_open_files() -> None:
    """Let this process open as many files as its user may: data may be thousands of tables."""
    with suppress(ImportError, OSError, ValueError):  # on Windows; of a system with another limit
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _lock(descriptor: int, kind: str) -> None:
    """Lock an open file, or raise an OSError; no lock is ever waited for."""
    try:
        import fcntl
    except ModuleNotFoundError:  # on Windows, which removes no file that is open
        return
    fcntl.flock(descriptor, getattr(fcntl, kind) | fcntl.LOCK_NB)


def make_room(folder: Path, limit: int) -> None:
    """Remove the oldest files, but those that are held, until those of a folder fit a limit."""
    files = list[tuple[int, int, str]]()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # another process makes room as well
                state = entry.stat()
                files.append((state.st_mtime_ns, state.st_size, entry.path))
    excess = sum(size for _, size, _ in files) - limit
    for _, size, path in sorted(files):
        if excess <= 0:
            return
        with suppress(OSError), open(path, "rb") as file:  # noqa: PTH123  (many thousands)
            _lock(file.fileno(), "LOCK_EX")
            Path(path).unlink()
            excess -= size


class Cache:
    """Reads photographs as pixels of their `cached_sizes`, and decodes each of them once.

    The pixels depend on the image and the image size alone, not on whether they lie in "ram" or on
    "disk". A checksum is written after the pixels of an image, and each process verifies it before
    its first use, so that a half written image is decoded again. Can be pickled: every process of
    this machine may open it as long as this one lives.
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
        """Bytes of all checksums and pixels."""
        return int(self.ends[-1])

    def _open(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        mapped = mmap.mmap(descriptor, self.num_bytes, prot=mmap.PROT_READ)
        self._bytes = np.frombuffer(mapped, np.uint8)
        self._verified = np.zeros(len(self.images), np.bool_)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._open(os.open(self.path, os.O_RDWR))

    def read(self, row: int) -> UInt8[np.ndarray, "_ _ 3"]:
        """An image's pixels, decoded (or a `BadImage`) unless a process has done so."""
        width, height = self.sizes[row].tolist()
        end, place = int(self.ends[row]), 4 * row  # of the pixels, and of their checksum
        start = end - 3 * width * height
        pixels = self._bytes[start:end]
        if not self._verified[row]:
            stored = self._bytes[place : place + 4].tobytes()
            if stored == bytes(4) or stored != _checksum(pixels):
                image = as_image(self.images.read(row), min_side=min(width, height))
                pixels = np.array(image.resize((width, height), Image.Resampling.BICUBIC))
                with suppress(OSError):  # a full disk costs time, nothing else
                    os.pwrite(self._descriptor, pixels.data, start)
                    os.pwrite(self._descriptor, _checksum(pixels), place)
                return pixels
            self._verified[row] = True
        return pixels.reshape(height, width, 3)

    def undecoded(self, rows: Int64[np.ndarray, " rows"]) -> list[int]:
        """Those of some rows whose pixels no process has written yet."""
        checksums = self._bytes[: 4 * len(self.images)].view(np.uint32)
        return [row for row in rows.tolist() if not checksums[row]]


def _checksum(pixels: np.ndarray) -> bytes:
    return zlib.crc32(pixels.data).to_bytes(4, "little")


def _in_memory(size: int) -> int:
    """The descriptor of an anonymous file in memory."""
    if not hasattr(os, "memfd_create"):
        raise UsageError("--cache ram needs Linux; give disk or off")
    descriptor: int = os.memfd_create("nearkin")
    os.truncate(descriptor, size)
    return descriptor


def _on_disk(images: Images, image_size: int, size: int) -> str:
    """The file for these images; older ones of the same data are removed."""
    decoders = f"{VERSION} {PIL.__version__} {features.version('jpg')}"
    known = hashlib.sha256(f"{images.fingerprint} {image_size} {decoders} ".encode())
    known.update(images.modified.tobytes())
    data = hashlib.sha256(in_bytes(images.key)).hexdigest()[:16]
    path = cache_folder("images") / f"{data}-{known.hexdigest()[:32]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.stat().st_size != size:
            for old in path.parent.glob(f"{data}-*"):
                old.unlink(missing_ok=True)
            with whole(path) as own:
                own.touch()
                os.truncate(own, size)
    except OSError as error:
        raise ResourceError(
            f"{path.parent}: cannot be written ({error}); use --cache off"
        ) from error
    return str(path)


MIN_RATIO: Final = {"ram": 1, "disk": 8}
"""Ratio of the pixels of photographs to cached ones from which on a cache is sure to be faster.

From memory, crops of photographs of 300 x 200 px take .6 of the time at 48 and 64 px, where the
ratios are 4 and 2.4, and .7 at 96 px, where it is 1.1 (docs/benchmarks.md).
"""


def cache_for(images: Images, image_size: int, *, memory: int, disk: int) -> str:
    """The value of `--cache auto`, by the free bytes: ram, disk or off.

    In memory, where the cached pixels take at most half of the free bytes; or else on such a disk,
    if the photographs are much larger than their cached pixels.
    """
    if images.held_side(image_size) or images.channels or (images.formats == "array").all():
        return "off"
    cached = int(cached_sizes(images.sizes, image_size).prod(axis=1).sum())
    pixels = images.sizes.prod(axis=1, dtype=np.int64).sum()
    for place, free in (("ram", memory), ("disk", disk)):
        if pixels >= MIN_RATIO[place] * cached and 3 * cached <= free / 2:
            return place
    return "off"


def check_cache(cache: str, images: Images) -> None:
    """Refuse to cache images of other pixels than it holds."""
    if images.channels and cache in ("ram", "disk"):
        raise UsageError(
            f"--cache {cache} holds RGB of 8 bits, and images have {named(images.pixel_type)}; "
            "give --cache off"
        )


def free_disk() -> int:
    """Free bytes on the disk of the cache; 0 if there is none."""
    folder = cache_folder("images")
    while not os.path.exists(folder):  # noqa: PTH110  (also where it may not be entered)
        folder = folder.parent
    return shutil.disk_usage(folder).free if folder.is_dir() else 0
