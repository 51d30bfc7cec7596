"""Holding images out: what is scored is never trained on."""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from jaxtyping import Bool, Int64, Shaped, UInt64

from nearkin.data.duplicates import Duplicates, divided, duplicates
from nearkin.data.images import Images, in_bytes
from nearkin.data.notes import Note, note_on, noted
from nearkin.errors import DataError
from nearkin.pace import ProgressCallback, count, ignore_progress

MAX_COMPARED: Final = 1_000_000
"""Images among which near-duplicates are searched, at most: each is decoded, and takes 1 kB."""

MIN_PIECE: Final = 10  # Images of a piece of a group; smaller ones are little but edges
NEW: Final = -1  # The part of an image that no earlier run had


@dataclass(frozen=True, eq=False)
class StoredSplit:
    """Images that an earlier run has trained on or held out, which stay what they were.

    They are known again by their contents, whatever they are called by now.
    """

    names: Sequence[str]
    contents: UInt64[np.ndarray, " images"]
    held_out: Bool[np.ndarray, " images"]

    def parts(self, images: Images) -> Int64[np.ndarray, " images"]:
        """Whether each image was trained on (0) or held out (1); else `NEW`.

        Of images of the same contents on both sides the name decides, or they are trained on.
        """
        by_content, by_both = dict[int, int](), dict[tuple[str, int], int]()
        rows = (self.names, self.contents.tolist(), self.held_out.astype(int).tolist())
        for name, content, held_out in zip(*rows, strict=True):
            by_content[content] = min(held_out, by_content.get(content, held_out))
            by_both[name, content] = held_out
        keys = zip(images.names, images.contents.tolist(), strict=True)
        return np.array([by_both.get(key, by_content.get(key[1], NEW)) for key in keys], np.int64)


def stored_parts(
    splits: Iterable[StoredSplit | None], images: Images
) -> Int64[np.ndarray, " images"]:
    """The part of each image by several splits: what one has trained on, all have."""
    of_each = [np.full(len(images), NEW), *(each.parts(images) for each in splits if each)]
    parts = np.stack(of_each)
    return np.where((parts == 0).any(axis=0), 0, parts.max(axis=0))


@dataclass(frozen=True, eq=False)
class Split:
    """All images of the data, and which of them are trained on and held out."""

    images: Images
    train_rows: np.ndarray
    test_rows: np.ndarray  # Held out: scored, never trained on. Empty if nothing is held out.
    num_exact: int = 0  # Images that are exact copies of others, among those that were compared
    stored: StoredSplit | None = None
    """That of the run that goes on, or of the nearest earlier one."""
    gone: str = ""
    """The run of the encoder, where what it has trained on cannot be known any more."""

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
    def held_out(self) -> Bool[np.ndarray, " images"]:
        """Whether each image is held out."""
        return np.isin(np.arange(len(self.images)), self.test_rows)

    @property
    def splits(self) -> np.ndarray:
        """The part that each image is in: train or test."""
        return np.where(self.held_out, "test", "train")

    @property
    def leaked(self) -> Bool[np.ndarray, " test"]:
        """Whether a near-duplicate of each held-out image, or one of its group, is trained on."""
        groups = self.images.groups
        return np.isin(groups[self.test_rows], groups[self.train_rows])

    def without(self, bad_rows: Collection[int], notes: Iterable[Note] = ()) -> "Split":
        """The same images less those that turned out unreadable, with notes on them."""
        keep = np.setdiff1d(np.arange(len(self.images)), sorted(bad_rows))
        train, test = (
            np.flatnonzero(np.isin(keep, rows)) for rows in (self.train_rows, self.test_rows)
        )
        images = self.images.subset(keep).noted(*notes)
        return replace(self, images=images, train_rows=train, test_rows=test)

    def describe(self) -> str:
        """Describe the data in one line."""
        images = self.images
        formats = ", ".join(f"{count} {name}" for name, count in images.format_counts.items())
        size = np.median(images.sizes, axis=0).astype(int)
        labels = f"{len(images.classes)} classes, for scoring only" if images.classes else "none"
        bad = f"; {len(images.bad)} unreadable, see bad_files.csv" if images.bad else ""
        return (
            f"data   {len(images)} images ({formats}), median {size[0]}x{size[1]} px; "
            f"labels: {labels}; {len(self.test)} held out for scoring{bad}"
        )


def learned_and_scored(
    splits: Shaped[np.ndarray, " images"],
) -> tuple[Bool[np.ndarray, " images"], Bool[np.ndarray, " images"]]:
    """Which images are learned from, and which are scored: `test`, or `val` without it.

    Published numbers are of test parts; a validation part beside one is left out.
    """
    return ~np.isin(splits, ("val", "test")), np.asarray(splits == _scored_part(splits))


def _scored_part(splits: Shaped[np.ndarray, " images"]) -> str:
    return "val" if "val" in splits and "test" not in splits else "test"


def validation_notes(splits: Shaped[np.ndarray, " images"]) -> list[Note]:
    """Say what becomes of a validation part: scored without a test part, else left out."""
    num = int((splits == "val").sum())
    if num == len(splits):  # all are of one part, whatever its name
        return []
    if _scored_part(splits) == "val":
        text = f"the validation part, of {count(num, 'image')}, is scored: there is no test part"
        return note_on("substituted", num, text)
    text = f"{count(num, 'image')} of the validation part: the test part is scored"
    return note_on("left out", num, text)


def trained_or_scored(images: Images) -> Images:
    """The images without a validation part, or with it as test part if there is no other."""
    learned, scored = learned_and_scored(images.splits)
    images = images.noted(*validation_notes(images.splits))
    images = replace(images, splits=np.where(scored, "test", images.splits))
    if not (used := learned | scored).all():
        images = images.subset(np.flatnonzero(used))
    one_part = len(images) if (images.splits == "test").all() else 0
    text = f"all {one_part} images are of one part, to score; --val decides what is held out"
    return images.noted(*note_on("substituted", one_part, text))


def split_images(
    images: Images,
    share: float,
    seed: int,
    on_progress: ProgressCallback = ignore_progress,
    stored: Int64[np.ndarray, " images"] | None = None,
    found: Duplicates | None = None,
    *,
    chooses: bool = False,
) -> Split:
    """Hold a share of the images out, or the test images that the data themselves name.

    Where the data name none, groups of near-duplicates stay on one side: a burst on both sides
    would find itself again, and inflate the score. Larger groups are divided where they are most
    of the images, as frames of one scene are. Images whose part is `stored` stay in it, and new
    ones join those that they are near-duplicates of. Parts that the data name are kept even if
    groups are on both sides, see `Split.leaked`; but test images that were trained on before train
    again. `found` are the duplicates, if they are known already. Where none are held out they are
    searched only for what `chooses` by folds of the images, which divide no group either.
    """
    declared = has_test_split(images)
    part = np.full(len(images), NEW) if stored is None else stored
    if declared:
        images, part = _unseen(images, part)
    if not (share or declared or chooses or (part == 1).any()):
        return Split(images, np.arange(len(images)), np.zeros(0, np.int64))
    num_exact, found = 0, found or searched(images, on_progress)
    if found is None:
        text = f"the search for duplicates, which may be held out: over {MAX_COMPARED:,} images"
        images = images.noted(Note("left out", text, len(images)))
    else:
        num_exact, grouped = found.num_exact, replace(images, groups=found.groups)
        images = grouped if declared else _without_chains(grouped, found, share)
    held_out = part == 1 if declared else _joined(part, images, share, seed)
    if share and (part == NEW).all() and (held_out.all() or not held_out.any()):
        raise DataError(
            f"{count(len(images), 'image')} cannot be divided in two parts of {1 - share:g} and "
            f"{share:g}; give more images, or none that are all alike"
        )
    return Split(images, np.flatnonzero(~held_out), np.flatnonzero(held_out), num_exact)


def searched(images: Images, on_progress: ProgressCallback = ignore_progress) -> Duplicates | None:
    """The duplicates among images; None if there are too many images to search."""
    return duplicates(images, on_progress) if len(images) <= MAX_COMPARED else None


def _unseen(
    images: Images, part: Int64[np.ndarray, " images"]
) -> tuple[Images, Int64[np.ndarray, " images"]]:
    """The parts that the data name, less the test images that were trained on before."""
    test = images.splits == "test"
    seen = [images.names[row] for row in np.flatnonzero(test & (part == 0)).tolist()]
    text = (
        f"of {count(int(test.sum()), 'test image')}, which an earlier run has trained on: they "
        "count as training images, and are not scored"
    )
    return images.noted(*noted("substituted", seen, text)), np.where(test & (part != 0), 1, 0)


def _without_chains(images: Images, found: Duplicates, share: float) -> Images:
    """Divide groups larger than what is held out, if most of the images are in such groups.

    They would all train. Two pieces make up the share, so that few images are at an edge.
    """
    large = np.bincount(found.groups)[found.groups] > share * len(images)
    most = int(share * len(images) / 2)
    if most < MIN_PIECE or large.sum() <= len(images) / 2:
        return images
    pieces = divided(found, most)
    if (pieces == found.groups).all():
        return images
    text = (
        "images that are near-duplicates one after another are larger groups than --val holds "
        f"out; they are divided in the order of names, into {len(np.unique(pieces[large]))} "
        "groups, so that images at the edge of one have near-duplicates on the other side"
    )
    names = [images.names[row] for row in np.flatnonzero(large).tolist()]
    return replace(images, groups=pieces).noted(*noted("merged", names, text))


def _joined(
    part: Int64[np.ndarray, " images"], images: Images, share: float, seed: int
) -> Bool[np.ndarray, " images"]:
    """Which images are held out: where the part of some is decided, new ones join their group's.

    That is the part that trains, if it has both. A group without any is as good as new.
    """
    held_out = part == 1
    trained = np.isin(images.groups, images.groups[part == 0])
    with_test = np.isin(images.groups, images.groups[held_out]) & ~trained
    by_hash = _held_out(images, share, seed) & ~trained if share else np.zeros_like(held_out)
    return np.where(part == NEW, with_test | by_hash, held_out)


def has_test_split(images: Images) -> bool:
    """Whether the data themselves name which images to score: some, but not all."""
    return bool(0 < (images.splits == "test").sum() < len(images))


def _held_out(images: Images, share: float, seed: int) -> Bool[np.ndarray, " images"]:
    """Which images are held out, regardless of labels.

    A group is, if a hash of the seed and its smallest name lies below `share`. So an image without
    near-duplicates stays on its side when others come or go. A group larger than the whole share
    always trains. Only where this would leave a side empty does one group change over: the one
    with the most extreme hash or, where all are that large, a smallest one.
    """
    # Rows are sorted by name, so the first row of a group holds its smallest name.
    _, first, group = np.unique(images.groups, return_index=True, return_inverse=True)
    size = np.bincount(group)
    # A hash of the seed and that name, uniform in 0...1
    digests = (hashlib.sha256(in_bytes(f"{seed}/{images.names[row]}")).digest() for row in first)
    position = np.array([int.from_bytes(each[:8]) / 2**64 for each in digests], np.float64)
    large = size > share * len(images)
    held_out = (position < share) & ~large
    if not held_out.any():
        held_out[np.lexsort((position, size * large))[0]] = True
    if held_out.all():
        held_out[position.argmax()] = False
    return held_out[group]


def duplicate_warnings(count: int, which: str, images: Images) -> list[str]:
    """Warn of duplicates, exact or near, if there are enough to matter."""
    if count <= 0.05 * len(images):
        return []
    return [f"{count} {which} duplicates: each is a negative that should not be one; remove them"]
