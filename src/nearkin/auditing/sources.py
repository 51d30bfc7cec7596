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
from jaxtyping import Bool, Float
from PIL import ExifTags
from torch import Tensor

from nearkin.auditing.data import SECOND, Audited, Rows
from nearkin.data.boxes import without_box
from nearkin.data.decode import opened
from nearkin.data.duplicates import Groups, merged, pairs_of
from nearkin.data.images import Images, read
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

Mask = Bool[np.ndarray, " _"]


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
    sample: int | None = None  # Images that it is tested on, if these are not all

    def line(self) -> str:
        """One line."""
        what = f"{self.kind}: {count(self.num_groups, 'group')} of {self.num_images:,} images"
        what += f", tested on {count(self.sample, 'image')}" if self.sample else ""
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
    tested_on = min(MOST, len(_testable(audited.embeddings.labels)))
    sample = tested_on if tested_on < len(audited) else None
    candidates = dict(_candidates(audited, progress))
    for kind, groups in candidates.items():
        tested = _tested(audited, groups, seed)
        if tested is None:
            continue
        several = (size := np.bincount(groups))[size > 1]
        sure = tested.p <= SURE / len(candidates)
        kept = sure and tested.value >= LIFT * tested.chance
        counts = len(several), int(several.sum())
        result = tested.value, tested.chance, tested.p
        proposals.append(Proposal(kind, *counts, *result, kept, sample))
        if kept:
            joined = merged(joined, pairs_of(groups))
    return proposals, joined


def _candidates(audited: Audited, progress: ProgressCallback) -> Iterator[tuple[str, Groups]]:
    """Yield kinds of groups, each image with the row of the first of its group."""
    names = [_numbered(without_box(without_part(path))) for path in audited.embeddings.paths]
    if audited.images is not None:
        capture = captures(audited.images, progress)
        camera, time = capture["camera"], capture["time"]
        yield "EXIF time and camera", _in_a_row(time != 0, camera, time, BURST, len(time))
        places = capture["place"].tolist()
        yield "GPS", grouped([str(place) if any(place) else "" for place in places])
    alike = grouped([f"{name}*" for name, _ in names])
    yield "file names without their last number", alike
    number = np.array([number for _, number in names])
    yield "file names in a row", _in_a_row(number >= 0, alike, number, 1, RUN)


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


def _in_a_row(known: Mask, kind: np.ndarray, number: Rows, gap: int, most: int) -> Groups:
    """Group known images of one kind, each within `gap` of the one before, at most so many."""
    rows = np.flatnonzero(known)
    rows = rows[np.lexsort((number[rows], kind[rows]))]
    apart = (np.diff(number[rows]) > gap) | (np.diff(kind[rows]) != 0)
    chain = np.append(0, apart.cumsum())[: len(rows)]
    place = np.arange(len(rows)) - np.searchsorted(chain, chain)
    groups = np.arange(len(known))
    groups[rows] = len(known) + (place % most == 0).cumsum()
    return pairs_of(groups)[:, 1]


# EXIF


def captures(images: Images, progress: ProgressCallback) -> np.ndarray:
    """Return what EXIF says of each image, as `CAPTURE`; it is kept in an index."""
    compute = partial(_capture, images)
    return indexed(images, "exif", CAPTURE, compute, "reading EXIF", progress)[0]


def _capture(images: Images, row: int) -> tuple[int, int, tuple[int, int]]:
    box = images.source.region(row)
    content = images.stored(row) if box is None else read(box.source, box.row)
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


# The test


def _tested(audited: Audited, groups: Groups, seed: int) -> PermutationTest | None:
    """Return the share of neighbors inside of the group, beside that by chance.

    None where too few images have others of their class inside and outside.
    """
    rng, labels = np.random.default_rng(seed), audited.embeddings.labels
    rows = _drawn(groups, labels, rng)
    classes, member = (np.unique(x[rows], return_inverse=True)[1] for x in (labels, groups))
    cell = np.unique(classes * len(rows) + member, return_inverse=True)[1]
    inside = np.bincount(cell)[cell] - 1
    outside = np.bincount(classes)[classes] - inside - 1
    has_both = (inside > 0) & (outside > 0)
    if has_both.sum() < FEWEST:
        return None
    neighbor = _nearest_of_class(torch.from_numpy(audited.embeddings.vectors[rows]), classes)

    def share_inside(order: Rows) -> float:
        own = member[order]
        return float((own[neighbor] == own)[has_both[order]].mean())

    return permutation_test(share_inside, classes, rng)


def _testable(labels: Rows) -> Rows:
    """Return the images that are labeled, if some are."""
    labeled = labels != UNLABELED
    return np.flatnonzero(labeled if labeled.any() else ~labeled)


def _drawn(groups: Groups, labels: Rows, rng: np.random.Generator) -> Rows:
    """Return the images that a proposal is tested on: of many, those of some groups."""
    rows = _testable(labels)
    order = rng.permutation(len(groups))[groups[rows]]
    return np.sort(rows[np.argsort(order, kind="stable")][:MOST])


def _nearest_of_class(vectors: Float[Tensor, "n dim"], classes: Rows) -> Rows:
    """Return the most similar other image of the same class of each; itself where it is alone."""
    found = np.arange(len(classes))
    for own in (np.flatnonzero(classes == each) for each in np.unique(classes)):
        if len(own) > 1:
            x = vectors[own]
            found[own] = own[nearest(x, x, 1, exclude_self=True)[1][:, 0].numpy()]
    return found
