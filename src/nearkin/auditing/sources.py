"""Images of one source, such as a burst: proposed from their files, tested against chance."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import ExifTags
from torch import Tensor

from nearkin.auditing.data import SECOND, Audited
from nearkin.data.decode import opened
from nearkin.data.duplicates import Groups, merged
from nearkin.data.images import Images
from nearkin.data.index import indexed
from nearkin.data.labels import grouped, split_of
from nearkin.metrics.neighbors import nearest
from nearkin.metrics.permutation import PermutationTest, permutation_test
from nearkin.pace import ProgressCallback, count
from nearkin.types import UNLABELED

BURST: Final = 60  # Seconds between images of one camera that may be of one burst
PLACE: Final = 1e-4  # Degrees of a square in which images are of one place: 11 m of latitude
RUN: Final = 10  # Images of a run of numbers, at the most
SURE: Final = 0.01  # The largest p, over the number of proposals, of a proposal that is kept
LIFT: Final = 2.0  # How many times chance the neighbors of one group must be
MOST: Final = 20_000  # Images that a proposal is tested on
FEWEST: Final = 10

CAPTURE: Final = np.dtype([("camera", "u8"), ("time", "i8"), ("place", "i8", 2)])
"""What EXIF says: a hash of the camera, seconds, and the square of `PLACE`; 0 where nothing."""


@dataclass(frozen=True)
class Proposal:
    """Groups of images that may be of one source, and whether the images bear it out."""

    kind: str  # What they are proposed from
    num_groups: int  # Groups of several images
    num_images: int  # That are in them
    share: float
    """Of images with others of their class inside and outside of the group, those whose nearest
    one of their class is inside."""
    chance: float  # The same where groups are shuffled within classes
    p: float  # How often shuffled groups reach the share
    kept: bool  # Whether its groups are taken for one source

    def line(self) -> str:
        """One line."""
        what = f"{self.kind}: {count(self.num_groups, 'group')} of {self.num_images:,} images"
        verdict = "one source each" if self.kept else "no more than by chance"
        return (
            f"{what}; the nearest image of the class is of the group for {self.share:.1%}, "
            f"{self.chance:.1%} by chance (p {self.p:.3f}): {verdict}"
        )


def find_sources(
    audited: Audited, seed: int, progress: ProgressCallback
) -> tuple[list[Proposal], Groups]:
    """Propose groups of one source, keep those that the features bear out, and join them.

    A proposal is kept if images have their nearest neighbor of the same class in their own group
    more often than if groups were shuffled within classes: `LIFT` times as often, and by a
    permutation test.
    """
    proposals, joined = list[Proposal](), np.arange(len(audited))
    candidates = dict(_candidates(audited, progress))
    for kind, groups in candidates.items():
        tested = _tested(audited, groups, seed)
        if tested is None:
            continue
        several = (size := np.bincount(groups))[size > 1]
        sure = tested.p <= SURE / len(candidates)
        kept = sure and tested.value >= LIFT * tested.chance
        counts = len(several), int(several.sum())
        proposals.append(Proposal(kind, *counts, tested.value, tested.chance, tested.p, kept))
        if kept:
            joined = merged(joined, np.stack([np.arange(len(groups)), groups], axis=1))
    return proposals, joined


def _candidates(audited: Audited, progress: ProgressCallback) -> Iterator[tuple[str, Groups]]:
    """Yield kinds of groups, each image with the row of the first of its group."""
    names = [_numbered(without_part(path)) for path in audited.embeddings.paths]
    if audited.images is not None:
        capture = captures(audited.images, progress)
        yield "EXIF time and camera", _bursts(capture)
        places = capture["place"].tolist()
        yield "GPS", grouped([str(place) if any(place) else "" for place in places])
    yield "file names without their last number", grouped([f"{name}*" for name, _ in names])
    yield "file names in a row", _runs(names)


def _first(values: Int[np.ndarray, " n"]) -> Groups:
    """Return the first row with the value of each row; its own for values below 0."""
    _, first, member = np.unique(values, return_index=True, return_inverse=True)
    return np.where(values < 0, np.arange(len(values)), first[member])


def without_part(path: str) -> str:
    """Return a name without what says of which part it is.

    >>> without_part("train/cat/017.jpg"), without_part("cat/test/018.jpg")
    ('cat/017.jpg', 'cat/018.jpg')
    """
    *folders, file = path.removeprefix(SECOND).split("/")
    return "/".join([*(folder for folder in folders if not split_of(folder)), file])


def _numbered(path: str) -> tuple[str, int]:
    """Return a name without its last number, and the number; the whole name and -1 without one.

    >>> _numbered("day2/shot_017.jpg"), _numbered("a.jpg")
    (('day2/shot_.jpg', 17), ('a.jpg', -1))
    """
    folder, _, file = path.rpartition("/")
    found = re.fullmatch(r"(.*?)(\d{1,18})(\D*)", file)
    if found is None:
        return path, -1
    return f"{folder}/{found[1]}{found[3]}".removeprefix("/"), int(found[2])


def _runs(names: Sequence[tuple[str, int]]) -> Groups:
    """Group names whose numbers follow each other, at most `RUN` of them."""
    order = sorted((name, number, row) for row, (name, number) in enumerate(names) if number >= 0)
    groups, first, length = np.arange(len(names)), -1, 0
    before = "", -1
    for name, number, row in order:
        follows = name == before[0] and number - before[1] <= 1 and length < RUN
        first, length = (first, length + 1) if follows else (row, 1)
        groups[row], before = first, (name, number)
    return _first(groups)


# EXIF


def captures(images: Images, progress: ProgressCallback) -> np.ndarray:
    """Return what EXIF says of each image, as `CAPTURE`; it is kept in an index."""
    read = partial(_capture, images)
    return indexed(images, "capture", CAPTURE, read, "reading EXIF", progress)[0]


def _capture(images: Images, row: int) -> tuple[int, int, tuple[int, int]]:
    content = images.stored(row)
    if not isinstance(content, bytes):
        return 0, 0, (0, 0)
    with opened(content) as image:
        exif = image.getexif()
        taken, gps = exif.get_ifd(ExifTags.IFD.Exif), exif.get_ifd(ExifTags.IFD.GPSInfo)
    tags = ExifTags.Base.Make, ExifTags.Base.Model, ExifTags.Base.BodySerialNumber
    camera = crc32(repr([exif.get(tag, taken.get(tag)) for tag in tags]).encode())
    time = 0
    with suppress(ValueError, TypeError):
        text = str(taken.get(ExifTags.Base.DateTimeOriginal, ""))
        time = int(
            datetime.strptime(text[:19], "%Y:%m:%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
        )
    place = 0, 0
    with suppress(LookupError, ValueError, TypeError, ArithmeticError):
        place = _square(gps[2], gps[1] == "S"), _square(gps[4], gps[3] == "W")
    return camera, time, place


def _square(degrees: Sequence[Any], negative: bool) -> int:
    """Return which square of `PLACE` an angle in degrees, minutes and seconds lies in, from 1."""
    angle = sum(float(each) / float(60**power) for power, each in enumerate(degrees))
    return 1 + round((180 - angle if negative else 180 + angle) / PLACE)


def _bursts(capture: np.ndarray) -> Groups:
    """Group images of one camera, each of which follows another within `BURST` seconds."""
    order = np.lexsort((capture["time"], capture["camera"]))
    ordered = capture[order]
    apart = (np.diff(ordered["time"]) > BURST) | (np.diff(ordered["camera"]) != 0)
    group = np.empty(len(order), np.int64)
    group[order] = np.append(0, np.cumsum(apart))[: len(order)]
    return _first(np.where(capture["time"] == 0, -1, group))


# The test


def _tested(audited: Audited, groups: Groups, seed: int) -> PermutationTest | None:
    """Return the share of neighbors inside of the group, beside that by chance.

    None where too few images have others of their class inside and outside.
    """
    rng, labels = np.random.default_rng(seed), audited.embeddings.labels
    rows = _drawn(groups, labels, rng)
    classes, member = labels[rows], np.unique(groups[rows], return_inverse=True)[1]
    cell = np.unique(np.stack([classes, member], axis=1), axis=0, return_inverse=True)[1].ravel()
    inside = np.bincount(cell)[cell] - 1
    outside = np.unique(classes, return_counts=True)[1][np.unique(classes, return_inverse=True)[1]]
    asked = (inside > 0) & (outside - inside > 1)
    if asked.sum() < FEWEST:
        return None
    neighbor = _nearest_of_class(torch.from_numpy(audited.embeddings.vectors[rows]), classes)

    def share_inside(order: Int[np.ndarray, " rows"]) -> float:
        own = member[order]
        return float((own[neighbor] == own)[asked[order]].mean())

    return permutation_test(share_inside, classes, rng)


def _drawn(
    groups: Groups, labels: Int[np.ndarray, " n"], rng: np.random.Generator
) -> Int[np.ndarray, " rows"]:
    """Return the images that are labeled, if some are; of many, those of some groups."""
    labeled = labels != UNLABELED
    rows = np.flatnonzero(labeled if labeled.any() else ~labeled)
    order = rng.permutation(len(groups))[groups[rows]]
    return np.sort(rows[np.argsort(order, kind="stable")][:MOST])


def _nearest_of_class(
    vectors: Float[Tensor, "n dim"], classes: Int[np.ndarray, " n"]
) -> Int[np.ndarray, " n"]:
    """Return the most similar other image of the same class of each; itself where it is alone."""
    found = np.arange(len(classes))
    for own in (np.flatnonzero(classes == each) for each in np.unique(classes)):
        if len(own) > 1:
            x = vectors[own]
            found[own] = own[nearest(x, x, 1, exclude_self=True)[1][:, 0].numpy()]
    return found
