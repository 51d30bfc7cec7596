"""Holding images out: what is scored is never trained on."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int64

from nearkin.config import TrainConfig
from nearkin.data.duplicates import duplicates
from nearkin.data.images import Images, open_images
from nearkin.errors import DataError
from nearkin.pace import ProgressCallback, ignore_progress


def names_a_test_part(images: Images) -> bool:
    """Whether the data themselves say which images to score: some, but not all."""
    return bool(0 < (images.splits == "test").sum() < len(images))


def split(
    images: Images, share: float, seed: int
) -> tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " test"]]:
    """Divide the images into rows to train on and rows to score. Labels have no say in it.

    Where the data themselves name test images, those are scored, and all others trained on.
    Otherwise a group goes to the test side if a hash of the seed and its smallest name, spread
    evenly over 0...1, lies below `share`. So an image stays on its side when others come or
    go. A group that is larger than all that is to be held out always trains. Only where all
    this would leave a side empty does one group change over: the one with the most extreme hash
    or, where all are that large, a smallest one.

    Args:
        images: the images; no group is divided.
        share: how much to hold out, between 0 and 1.
        seed: another seed, another split.

    Raises:
        DataError: a side would be empty.
    """
    test = images.splits == "test" if names_a_test_part(images) else _drawn(images, share, seed)
    if test.all() or not test.any():
        raise DataError(
            f"{len(images)} images cannot be divided in two parts of {1 - share:g} and "
            f"{share:g}; give more images, or none that are all alike"
        )
    return np.flatnonzero(~test), np.flatnonzero(test)


def _drawn(images: Images, share: float, seed: int) -> Bool[np.ndarray, " images"]:
    # Rows are sorted by name, so the first row of a group holds its smallest name.
    _, first, group, size = np.unique(
        images.groups, return_index=True, return_inverse=True, return_counts=True
    )
    place = np.array([_place(images.names[row], seed) for row in first], np.float64)
    large = size > share * len(images)
    held_out = (place < share) & ~large
    if not held_out.any():
        held_out[np.lexsort((place, size * large))[0]] = True
    if held_out.all():
        held_out[place.argmax()] = False
    return held_out[group]


def _place(name: str, seed: int) -> float:
    """Where a name lies in 0...1, evenly spread over names and over seeds."""
    key = f"{seed}/{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(key).digest()[:8]) / 2**64


COMPARED: Final = 100_000
"""Images among which copies are looked for, at most: half a millisecond for each."""

NAMED: Final = 10
"""Unreadable images that an error names."""


@dataclass(frozen=True, eq=False)
class Parts:
    """All images of the data, and their two parts."""

    images: Images
    train_rows: np.ndarray
    test_rows: np.ndarray
    """Held out: scored, never trained on. Empty if nothing is held out."""
    num_exact: int = 0
    """Images that are exact copies of others, as far as was looked for them."""

    @cached_property
    def train(self) -> Images:
        """What is trained on."""
        return self.images.subset(self.train_rows)

    @cached_property
    def test(self) -> Images:
        """What is held out."""
        return self.images.subset(self.test_rows)

    @property
    def fingerprint(self) -> str:
        """Of the images and of which of them are trained on."""
        rows = hashlib.sha256(self.train_rows.tobytes()).hexdigest()
        return f"{self.images.fingerprint}-{rows}"

    def describe(self) -> str:
        """One line on the data."""
        images = self.images
        kinds = ", ".join(f"{count} {kind}" for kind, count in images.formats.items())
        side = np.median(images.sizes, axis=0).astype(int)
        labels = f"{len(images.classes)} classes, for scoring only" if images.classes else "none"
        bad = f"; {len(images.bad)} unreadable, see bad_files.csv" if images.bad else ""
        return (
            f"data   {len(images)} images ({kinds}), median {side[0]}x{side[1]} px; "
            f"labels: {labels}; {len(self.test)} held out for scoring{bad}"
        )


def copies(count: int, kind: str, images: Images) -> list[str]:
    """A warning of copies, if there are so many that they matter."""
    if count <= 0.05 * len(images):
        return []
    return [f"{count} {kind} duplicates: each is a negative that should not be one; remove them"]


def open_parts(
    data: Any,
    config: TrainConfig,
    on_progress: ProgressCallback = ignore_progress,
    on_open: Callable[[Images], None] = lambda _: None,
) -> Parts:
    """Open the data and hold a part of them out.

    Args:
        data: What `open_images` takes.
        config: How they are read and divided.
        on_progress: Receives how many files have been read.
        on_open: Receives the images before any are refused, to record the unreadable ones.

    Raises:
        DataError: If there are no images, or more than `max_bad` of them are unreadable.
    """
    images = open_images(
        data, labels=config.labels, full=config.scan == "full", on_progress=on_progress
    )
    on_open(images)
    refuse_bad(images, config.max_bad)
    return divide(images, config.val, config.seed, on_progress)


def refuse_bad(images: Images, most: float) -> None:
    """Refuse data of which too large a share cannot be read.

    Raises:
        DataError: Naming some of them.
    """
    bad, count = len(images.bad), len(images) + len(images.bad)
    if bad > most * count:
        first = ", ".join(f"{bad.name!r} ({bad.reason})" for bad in images.bad[:NAMED])
        more = f" and {bad - NAMED} more" if bad > NAMED else ""
        raise DataError(
            f"{bad} of {count} images are unreadable: {first}{more}; remove them, or allow more "
            "with --max-bad"
        )


def divide(
    images: Images, share: float, seed: int, on_progress: ProgressCallback = ignore_progress
) -> Parts:
    """Hold a share of the images out, or what the data themselves name.

    Where the data name no test part, groups of near-duplicates stay on one side: a burst that
    is split over both would be found again, and the score would be a lie. Among very many
    images they are not looked for, which is noted.
    """
    if names_a_test_part(images):
        return Parts(images, *split(images, share, seed))
    if share == 0:
        return Parts(images, np.arange(len(images)), np.zeros(0, np.int64))
    if len(images) > COMPARED:
        note = f"more than {COMPARED:,} images: copies are not looked for, and may be held out"
        images = replace(images, notes=(*images.notes, note))
        return Parts(images, *split(images, share, seed))
    found = duplicates(images, on_progress)
    grouped = replace(images, groups=found.groups)
    return Parts(grouped, *split(grouped, share, seed), found.num_exact)
