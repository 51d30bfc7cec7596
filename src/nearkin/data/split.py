"""Holding images out: what is scored is never trained on."""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int64

from nearkin.config import Config, EmbedConfig, TrainConfig
from nearkin.data.duplicates import duplicates
from nearkin.data.images import Images
from nearkin.data.notes import Note
from nearkin.data.opening import open_images
from nearkin.errors import DataError
from nearkin.pace import ProgressCallback, count, ignore_progress

MAX_COMPARED: Final = 100_000
"""Images among which near-duplicates are searched, at most: it takes half a millisecond each."""

NAMED: Final = 10  # Unreadable images that an error names


@dataclass(frozen=True, eq=False)
class Split:
    """All images of the data, and which of them are trained on and held out."""

    images: Images
    train_rows: np.ndarray
    test_rows: np.ndarray  # Held out: scored, never trained on. Empty if nothing is held out.
    num_exact: int = 0  # Images that are exact copies of others, among those that were compared
    seed: int | None = None  # It decided which are held out, if the data themselves do not

    @cached_property
    def train(self) -> Images:
        """The images to train on."""
        return self.images.subset(self.train_rows)

    @cached_property
    def test(self) -> Images:
        """The images that are held out."""
        return self.images.subset(self.test_rows)

    @property
    def fingerprint(self) -> str:
        """A hash of the images and of which of them are trained on."""
        rows = hashlib.sha256(self.train_rows.tobytes()).hexdigest()
        return f"{self.images.fingerprint}-{rows}"

    @property
    def splits(self) -> np.ndarray:
        """The part that each image is in: train or test."""
        return np.where(np.isin(np.arange(len(self.images)), self.test_rows), "test", "train")

    def without(self, bad_rows: Collection[int]) -> "Split":
        """The same images less those that turned out unreadable."""
        keep = np.setdiff1d(np.arange(len(self.images)), sorted(bad_rows))
        train, test = (
            np.flatnonzero(np.isin(keep, rows)) for rows in (self.train_rows, self.test_rows)
        )
        return replace(self, images=self.images.subset(keep), train_rows=train, test_rows=test)

    def describe(self) -> str:
        """Describe the data in one line."""
        images = self.images
        kinds = ", ".join(f"{count} {kind}" for kind, count in images.formats.items())
        side = np.median(images.sizes, axis=0).astype(int)
        labels = f"{len(images.classes)} classes, for scoring only" if images.classes else "none"
        bad = f"; {len(images.bad)} unreadable, see bad_files.csv" if images.bad else ""
        return (
            f"data   {len(images)} images ({kinds}), median {side[0]}x{side[1]} px; "
            f"labels: {labels}; {len(self.test)} held out for scoring{bad}"
        )


def open_split(
    data: Any,
    config: TrainConfig | EmbedConfig,
    on_progress: ProgressCallback = ignore_progress,
    on_open: Callable[[Images], None] = lambda _: None,
) -> Split:
    """Open the data and hold images out; `on_open` gets the images before any are refused."""
    images = open_readable(data, config, config.labels, on_progress, on_open)
    return split_images(images, config.val, config.seed, on_progress)


def open_readable(
    data: Any,
    config: Config,
    labels: str = "auto",
    on_progress: ProgressCallback = ignore_progress,
    on_open: Callable[[Images], None] = lambda _: None,
) -> Images:
    """Open the data by the settings of a run; see `open_split`.

    Raises:
        DataError: If more images than the settings allow cannot be read, naming some of them.
    """
    images = open_images(data, labels=labels, full=config.scan == "full", on_progress=on_progress)
    on_open(images)
    bad, count = len(images.bad), len(images) + len(images.bad)
    if bad > config.max_bad * count:
        first = ", ".join(f"{bad.name!r} ({bad.reason})" for bad in images.bad[:NAMED])
        more = f" and {bad - NAMED} more" if bad > NAMED else ""
        raise DataError(
            f"{bad} of {count} images are unreadable: {first}{more}; remove them, or allow more "
            "with --max-bad"
        )
    return images


def split_images(
    images: Images, share: float, seed: int, on_progress: ProgressCallback = ignore_progress
) -> Split:
    """Hold a share of the images out, or the test images that the data themselves name.

    Where the data name none, groups of near-duplicates stay on one side: a burst on both sides
    would find itself again, and inflate the score. Above `MAX_COMPARED` images they are not
    searched for, which the images' notes say.
    """
    if has_test_split(images):
        return Split(images, *split_rows(images, share, seed))
    if share == 0:
        return Split(images, np.arange(len(images)), np.zeros(0, np.int64))
    if len(images) > MAX_COMPARED:
        text = f"the search for copies, which may be held out: more than {MAX_COMPARED:,} images"
        images = images.noted(Note("left out", text, len(images)))
        return Split(images, *split_rows(images, share, seed), seed=seed)
    copies = duplicates(images, on_progress)
    grouped = replace(images, groups=copies.groups)
    return Split(grouped, *split_rows(grouped, share, seed), copies.num_exact, seed)


def has_test_split(images: Images) -> bool:
    """Return whether the data themselves name which images to score: some, but not all."""
    return bool(0 < (images.splits == "test").sum() < len(images))


def split_rows(
    images: Images, share: float, seed: int
) -> tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " test"]]:
    """Divide the images into rows to train on and rows to score, regardless of labels.

    Where the data themselves name test images, those are scored, and all others trained on.
    Otherwise a group is held out if a hash of the seed and its smallest name, uniform in 0...1,
    lies below `share`. So an image stays on its side when others come or go. A group larger than
    the whole share always trains. Only where this would leave a side empty does one group change
    over: the one with the most extreme hash or, where all are that large, a smallest one.
    """
    test = images.splits == "test" if has_test_split(images) else _held_out(images, share, seed)
    if test.all() or not test.any():
        raise DataError(
            f"{count(len(images), 'image')} cannot be divided in two parts of {1 - share:g} and "
            f"{share:g}; give more images, or none that are all alike"
        )
    return np.flatnonzero(~test), np.flatnonzero(test)


def _held_out(images: Images, share: float, seed: int) -> Bool[np.ndarray, " images"]:
    # Rows are sorted by name, so the first row of a group holds its smallest name.
    _, first, group, size = np.unique(
        images.groups, return_index=True, return_inverse=True, return_counts=True
    )
    position = np.array([_position(images.names[row], seed) for row in first], np.float64)
    large = size > share * len(images)
    held_out = (position < share) & ~large
    if not held_out.any():
        held_out[np.lexsort((position, size * large))[0]] = True
    if held_out.all():
        held_out[position.argmax()] = False
    return held_out[group]


def _position(name: str, seed: int) -> float:
    """Hash a name and a seed to a number, uniform in 0...1."""
    key = f"{seed}/{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(key).digest()[:8]) / 2**64


def duplicate_warnings(count: int, kind: str, images: Images) -> list[str]:
    """Warn of duplicates, if there are enough to matter."""
    if count <= 0.05 * len(images):
        return []
    return [f"{count} {kind} duplicates: each is a negative that should not be one; remove them"]
