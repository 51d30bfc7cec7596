"""Exact duplicates by SHA-256, near-duplicates by a perceptual hash that pixels confirm.

An image is kept as the lowest frequencies of its brightness and color (DCT-II). The signs of the
lowest are its hash. Hashes that lie side by side in sorted tables are candidates; a candidate is
a near-duplicate if one image, or a section of it, is the other one at another brightness. Hashes
alone would not do: at the distance of a crop, thousands of drawings and digits have the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from jaxtyping import Float16, Float32, Int64, Shaped, UInt64
from PIL import Image

from nearkin.data.channels import preview
from nearkin.data.decode import as_image
from nearkin.data.images import Images, digest
from nearkin.data.index import by_range, indexed
from nearkin.data.labels import grouped
from nearkin.pace import ProgressCallback, ignore_progress

DIGEST: Final = 32  # Bytes of a SHA-256
SIDE: Final = 32  # Pixels a side that an image is reduced to before its frequencies are taken
KEPT: Final = 20  # Frequencies a side that are kept; a section has some of the higher ones
COMPARED: Final = 16  # Frequencies a side that are compared
COARSE: Final = 8  # Frequencies a side by which sections are aligned, and that are hashed
COLOR: Final = 4  # Frequencies a side of the two color differences
SMOOTH: Final = 3  # Frequencies a side that any sky has
LENGTH: Final = KEPT**2 + 2 * COLOR**2  # Numbers that are kept of an image

# Bounds of near-duplicates. Of 200 images each of CIFAR-10, Fashion-MNIST, Omniglot and Caltech,
# copies as JPEG of quality 35, at .7 of the size, 15 % brighter or cropped by 3 % a side stay
# below them in 97 % or more; see docs/benchmarks.md for what other images do.
MAX_REST: Final = 0.05  # Share of the variance in which a copy differs
FAR_REST: Final = 0.4  # The same after the first step towards a shifted copy
MAX_LEVELS: Final = 9.0  # Root mean square of the difference, in gray levels
MAX_DETAIL: Final = 0.15  # Share of the variance of detail
MIN_LEVELS: Final = 4.0  # Standard deviation below which an image shows too little to compare
MIN_DETAIL: Final = 1.0  # The same of its detail
MAX_CROP: Final = 0.12  # Share of the width or height that a section may lack

SHIFTED: Final = 0.16  # Share of the width and height that the middle of a shifted copy lacks
SECTION: Final = 0.06  # Share of the width and height that the section lacks which is hashed, too
TABLES: Final = 16  # Orders of the bits in which hashes are sorted
REACH: Final = 8  # Hashes behind each in such an order that are candidates
MAX_BITS: Final = 14  # Bits of 64 in which candidates differ
BLOCK: Final = 2**10  # Images or pairs whose frequencies are held as floats at a time

Pairs = Int64[np.ndarray, "pairs 2"]
Groups = Int64[np.ndarray, " images"]
Features = Float16[np.ndarray, "images length"]
Squares = Float32[np.ndarray, "batch _ _"]
Planes = tuple[Squares, Float32[np.ndarray, "batch 2 _ _"]]

_steps = np.arange(SIDE, dtype=np.float32) + 0.5 - SIDE / 2  # Pixels, from the center
_waves = np.arange(KEPT, dtype=np.float32) * np.float32(np.pi / SIDE)
_norms = np.where(_waves == 0, SIDE**-0.5, (SIDE / 2) ** -0.5).astype(np.float32)
_dct = np.cos((_steps[:, None] + SIDE / 2) * _waves) * _norms
_luma_chroma = np.array(
    [[0.299, 0.587, 0.114], [-0.1687, -0.3313, 0.5], [0.5, -0.4187, -0.0813]], np.float32
)  # of JPEG
_places = np.arange(KEPT)
_detail = np.logical_or.outer(_places >= SMOOTH, _places >= SMOOTH)
_detail[0] = _detail[:, 0] = False  # stripes and slopes, of which there are many


Signatures = Shaped[np.ndarray, " images"]
SIGNATURE: Final = np.dtype([("digest", f"V{DIGEST}"), ("features", np.float16, (LENGTH,))])
"""What an image is compared by: the SHA-256 of its content, and its lowest frequencies of
brightness and color. Zeros where it cannot be read."""


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Groups of duplicates."""

    groups: Groups
    """Each image's group: the first row of its duplicates and of the group it had before."""
    whole: Groups  # The same without near-duplicates: what is never divided
    num_exact: int  # Images with the bytes of an earlier one
    num_near: int  # Further images that look like an earlier one


def signatures(images: Images, on_progress: ProgressCallback = ignore_progress) -> Signatures:
    """Read or compute the `SIGNATURE` of each image; it is kept in an index."""
    what, compute = "looking for duplicates", partial(_signature, images)
    name = by_range("features", images)
    return indexed(images, name, SIGNATURE, compute, what, on_progress)[0]


def _signature(images: Images, row: int) -> tuple[bytes, np.ndarray]:
    content = images.stored(row)
    image = as_image(images.scaled(content), min_side=4 * SIDE)
    small = preview(np.asarray(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)))
    planes = np.moveaxis(small.astype(np.float32) @ _luma_chroma.T, -1, 0)
    luma, *chroma = _dct.T @ planes @ _dct
    parts = (luma, *(plane[:COLOR, :COLOR] for plane in chroma))
    features = np.concatenate([part.ravel() for part in parts]).astype(np.float16)
    return digest(content), features


def duplicates(images: Images, on_progress: ProgressCallback = ignore_progress) -> Duplicates:
    """Group exact and near-duplicates, and merge the groups that the images had.

    A plain image, or one without detail, is no near-duplicate.
    """
    known, own = signatures(images, on_progress), pairs_of(images.groups)
    exact = exact_groups(known)
    near = near_groups(known, on_progress)
    num_exact = len(images) - len(_firsts(exact))
    num_near = len(images) - num_exact - len(_firsts(near))
    return Duplicates(merged(near, own), merged(exact, own), num_exact, num_near)


def exact_groups(known: Signatures) -> Groups:
    """Return for each image the first row with the same content."""
    # An image that cannot be read has no digest and no duplicate.
    return grouped([own if any(own) else b"" for own in known["digest"].tolist()])


def near_groups(known: Signatures, on_progress: ProgressCallback = ignore_progress) -> Groups:
    """Return for each image the first row of its exact and near-duplicates, and of theirs."""
    groups, rng = exact_groups(known), np.random.default_rng(0)
    rows, hashes = _hashes(known["features"], _firsts(groups))
    different = np.zeros(0, np.int64)  # Pairs, as a number each, that were candidates
    for number in range(TABLES):
        on_progress(number, TABLES, "comparing images")
        pairs = rows[_candidates(hashes, rng.permutation(64))]
        pairs = pairs[groups[pairs[:, 0]] != groups[pairs[:, 1]]]
        keys = np.unique(pairs.min(axis=1) * len(groups) + pairs.max(axis=1))
        keys = np.setdiff1d(keys, different, assume_unique=True)
        pairs = np.stack(np.divmod(keys, len(groups)), axis=1)
        alike = similarity(known["features"], pairs) > 0
        different = np.union1d(different, keys[~alike])
        groups = merged(groups, pairs[alike])
    return groups


def divided(found: Duplicates, most: int) -> Groups:
    """Divide groups of more than `most` images in the order of their names.

    One scene in slow change is one group, though its ends have nothing in common: each image is
    a near-duplicate of the next. A piece has `most` images at most, unless it is one of the
    groups of exact duplicates, or those that the images had, which are never divided.
    """
    pieces, size = found.groups.copy(), np.bincount(found.groups)
    width = np.bincount(found.whole)
    order = np.lexsort((found.whole, found.groups))
    group, piece, held = -1, -1, 0
    for row in order[size[found.groups[order]] > most].tolist():
        if found.whole[row] == row:  # the first of what stays together
            if found.groups[row] != group or held + width[row] > most:
                group, piece, held = found.groups[row], row, 0
            held += int(width[row])
        pieces[row] = piece
    return pieces


def keep_one(
    known: Signatures, groups: Groups, order: Int64[np.ndarray, " images"]
) -> tuple[Groups, Float32[np.ndarray, " images"]]:
    """Return for each image the one that is kept in its place, and how similar they are.

    Images of a group are taken in this order: one is kept unless it is a duplicate of one that is
    kept already. So the ends of a chain, alike only by way of its middle, are both kept.
    """
    exact = exact_groups(known)
    keeper, similar = np.arange(len(groups)), np.ones(len(groups), np.float32)
    grouped = order[np.argsort(groups[order], kind="stable")]
    for left in np.split(grouped, np.flatnonzero(np.diff(groups[grouped])) + 1):
        while len(left) > 1:
            first, left = left[0], left[1:]
            pairs = np.stack([np.full(len(left), first), left], axis=1)
            score = np.where(exact[left] == exact[first], 1, similarity(known["features"], pairs))
            keeper[left[score > 0]], similar[left[score > 0]] = first, score[score > 0]
            left = left[score == 0]
    return keeper, similar


def _firsts(groups: Groups) -> Int64[np.ndarray, " firsts"]:
    return np.flatnonzero(groups == np.arange(len(groups)))


def pairs_of(groups: Groups) -> Pairs:
    """Return each image's row, and the first row of its group, whatever the group is called."""
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    return np.stack([np.arange(len(groups)), first[group]], axis=1)


def merged(groups: Groups, pairs: Pairs) -> Groups:
    """Return the groups, each named by its first row, once every pair of rows shares one."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    left, right = np.concatenate([pairs_of(groups), pairs]).T
    edges = coo_array((np.ones(len(left), bool), (left, right)), (len(groups),) * 2)
    return pairs_of(connected_components(edges, directed=False)[1].astype(np.int64))[:, 1]


def _hashes(
    features: Features, rows: Int64[np.ndarray, " rows"]
) -> tuple[Int64[np.ndarray, " visible"], UInt64[np.ndarray, " visible"]]:
    """Return the rows of images that show anything, and the hashes of each: the signs of 64 waves.

    One is of the whole image, the other of a section, which a cropped copy resembles more.
    """
    wave = np.add.outer(np.arange(KEPT), np.arange(KEPT)).ravel()
    lowest = np.argsort(wave, kind="stable")[1:65]
    section = _section(SECTION)
    visible, hashes = [rows[:0]], [np.zeros(0, np.uint64)]
    for block in np.array_split(rows, len(rows) // BLOCK + 1):
        luma, _ = _planes(features[block])
        flat = _flat(luma, KEPT)
        levels, detail = (np.sqrt(_dot(x, x)) / SIDE for x in (flat, luma * _detail))
        shows = (levels >= MIN_LEVELS) & (detail >= MIN_DETAIL)
        for whole in (luma[shows], section @ luma[shows] @ section.T):
            signs = whole.reshape(-1, KEPT**2)[:, lowest] > 0
            visible.append(block[shows])
            hashes.append(signs @ (np.uint64(1) << np.arange(64, dtype=np.uint64)))
    return np.concatenate(visible), np.concatenate(hashes)


def _candidates(hashes: UInt64[np.ndarray, " images"], bits: Int64[np.ndarray, " 64"]) -> Pairs:
    """Return positions of hashes that are close in this order of their bits, and in all bits."""
    keys = np.zeros_like(hashes)
    for place, bit in enumerate(bits.tolist()):
        keys |= (hashes >> np.uint64(bit) & np.uint64(1)) << np.uint64(place)
    order = np.argsort(keys, kind="stable")
    ordered, pairs = keys[order], [np.zeros((0, 2), np.int64)]
    for reach in range(1, min(REACH, len(keys) - 1) + 1):
        near = np.flatnonzero(np.bitwise_count(ordered[:-reach] ^ ordered[reach:]) <= MAX_BITS)
        pairs.append(np.stack([order[near], order[near + reach]], axis=1))
    return np.concatenate(pairs)


def similarity(features: Features, pairs: Pairs) -> Float32[np.ndarray, " pairs"]:
    """The correlation of near-duplicates, one aligned to the other; 0 of other pairs."""

    def compare(one: Planes, other: Planes) -> np.ndarray:
        return np.asarray(np.maximum(_inside(*one, *other), _inside(*other, *one)))

    return _compared(features, pairs, compare)


def mirrored(features: Features) -> Features:
    """The features of the mirror images: odd waves from left to right change their sign."""
    signs = np.where(np.arange(KEPT) % 2, np.float16(-1), np.float16(1))
    luma, chroma = np.tile(signs, KEPT), np.tile(signs[:COLOR], 2 * COLOR)
    return np.asarray(features * np.concatenate([luma, chroma]))


def shifted(features: Features, pairs: Pairs) -> Float32[np.ndarray, " pairs"]:
    """Return the correlation of pairs of which one's middle is in the other; 0 of others.

    So are images that were shifted by less than half of `SHIFTED`. Strokes of other people's
    digits may be, too: it is for pairs that are alike anyway.
    """
    section = _section(SHIFTED)
    tint = section[:COLOR, :COLOR]

    def compare(one: Planes, other: Planes) -> np.ndarray:
        luma, chroma = one
        middle = section @ luma @ section.T, tint @ chroma @ tint.T
        return _inside(*other, *middle, SHIFTED)

    return _compared(features, pairs, compare)


# OpenBLAS may say that a product is invalid which is not (numpy issues 13173 and 24067).
@np.errstate(invalid="ignore")
def _compared(
    features: Features, pairs: Pairs, compare: Callable[[Planes, Planes], np.ndarray]
) -> Float32[np.ndarray, " pairs"]:
    """Compare pairs, some at a time."""
    found = np.zeros(len(pairs), np.float32)
    for start in range(0, len(pairs), BLOCK):
        rows = slice(start, start + BLOCK)
        found[rows] = compare(*(_planes(features[pairs[rows, side]]) for side in (0, 1)))
    return found


def _section(share: float) -> Float32[np.ndarray, "_ _"]:
    """The matrix from frequencies of a side to those of its middle, which lacks this share."""
    return np.asarray(_warps(np.full(1, -share, np.float32), np.zeros(1, np.float32))[0][0])


def _planes(features: Features) -> Planes:
    """The frequencies of brightness, and of the two color differences."""
    numbers = features.astype(np.float32)
    luma = numbers[:, : KEPT**2].reshape(-1, KEPT, KEPT)
    return luma, numbers[:, KEPT**2 :].reshape(-1, 2, COLOR, COLOR)


def _dot(a: np.ndarray, b: np.ndarray) -> Float32[np.ndarray, " batch"]:
    return np.asarray((a * b).sum(axis=tuple(range(1, a.ndim))))


def _inside(
    luma: Squares, chroma: np.ndarray, luma_b: Squares, chroma_b: np.ndarray, start: float = 0.0
) -> Float32[np.ndarray, " batch"]:
    """The correlation with images of the second kind of a section of the first; 0 if they differ.

    Gauss-Newton steps find the section that resembles the lowest frequencies most, from the whole
    image or from its middle, which lacks a share `start` of it. A section lies within the image:
    what is merely shifted, as strokes of other people's digits are, is none.
    """
    shift = np.zeros((2, len(luma)), np.float32)
    zoom = shift - np.float32(start)
    target = _flat(luma_b, COARSE)
    columns = _columns(luma, zoom[:, :1], shift[:, :1])
    step = _solve(columns, target)
    rest = target - (columns @ step[..., None])[..., 0]
    # The first step towards a shift is far from its end.
    share, levels = (FAR_REST, np.inf) if start else (MAX_REST, (MAX_LEVELS * SIDE) ** 2)
    most = np.minimum(share * _dot(target, target), levels)
    likely = np.flatnonzero(_dot(rest, rest) <= most)
    found = np.zeros(len(luma), np.float32)
    luma, chroma, luma_b, chroma_b = (x[likely] for x in (luma, chroma, luma_b, chroma_b))
    target, step, zoom, shift = target[likely], step[likely], zoom[:, likely], shift[:, likely]
    for again in (True, True, False):
        move = (step[:, 1:] / np.maximum(step[:, :1], 0.3)).T
        zoom = (zoom + move[:2]).clip(-max(MAX_CROP, start), 0)
        shift = (shift + move[2:]).clip(zoom * SIDE / 2, -zoom * SIDE / 2)
        if again:
            step = _solve(_columns(luma, zoom, shift), target)
    rows, columns = (_warps(zoom[axis], shift[axis])[0] for axis in (0, 1))
    small = (slice(None), None, slice(COLOR), slice(COLOR))
    tint = rows[small] @ chroma @ columns[small].mT
    found[likely] = _correlation(rows @ luma @ columns.mT, tint, luma_b, chroma_b)
    return found


def _correlation(
    luma: Squares, chroma: np.ndarray, luma_b: Squares, chroma_b: np.ndarray
) -> Float32[np.ndarray, " batch"]:
    """The correlation of aligned images, at the brightness of the second; 0 if they differ."""
    seen, target = _flat(luma, COMPARED), _flat(luma_b, COMPARED)
    gain = _dot(seen, target) / (_dot(seen, seen) + 1)
    rest = target - gain[:, None] * seen
    color = chroma_b - gain[:, None, None, None] * chroma
    detail = _detail[:COMPARED, :COMPARED].ravel()[1:]
    share = _dot(rest, rest) / (_dot(target, target) + 1)
    alike = share <= MAX_REST
    alike &= _dot(rest * detail, rest) <= MAX_DETAIL * _dot(target * detail, target)
    for differing in (rest, color):
        alike &= _dot(differing, differing) <= (MAX_LEVELS * SIDE) ** 2
    return np.where(alike, np.sqrt(1 - share.clip(max=1)), 0).astype(np.float32)


def _flat(luma: Squares, side: int) -> Float32[np.ndarray, "batch _"]:
    """The lowest frequencies without the mean."""
    return luma[:, :side, :side].reshape(len(luma), side**2)[:, 1:]


def _warps(
    zoom: Float32[np.ndarray, " _"], shift: Float32[np.ndarray, " _"]
) -> tuple[Squares, Squares, Squares]:
    """Matrices from frequencies of a side to those of a section; derivatives by both numbers."""
    place = _steps * (1 + zoom[:, None]) + shift[:, None] + SIDE / 2
    phase = place[..., None] * _waves
    slope = -np.sin(phase) * (_norms * _waves)
    return (_dct.T @ (np.cos(phase) * _norms), _dct.T @ (_steps[:, None] * slope), _dct.T @ slope)


def _columns(
    luma: Squares, zoom: Float32[np.ndarray, "2 _"], shift: Float32[np.ndarray, "2 _"]
) -> Float32[np.ndarray, "batch _ 5"]:
    """Sections and their derivatives by zoom and shift of both axes, in coarse frequencies."""
    (rows, *of_rows), (columns, *of_columns) = (
        [each[:, :COARSE] for each in _warps(zoom[axis], shift[axis])] for axis in (0, 1)
    )
    left, right = rows @ luma, luma @ columns.mT
    by_zoom, by_shift = (
        (d_rows @ right, left @ d_columns.mT)
        for d_rows, d_columns in zip(of_rows, of_columns, strict=True)
    )
    parts = (rows @ right, *by_zoom, *by_shift)
    return np.stack([_flat(part, COARSE) for part in parts], axis=2)


def _solve(
    columns: Float32[np.ndarray, "batch _ 5"], target: Float32[np.ndarray, "batch _"]
) -> Float32[np.ndarray, "batch 5"]:
    """Least squares, with a little of a ridge where columns depend on one another."""
    scale = np.sqrt((columns**2).sum(axis=1)) + 1e-3
    unit = columns / scale[:, None]
    gram = unit.mT @ unit + 1e-3 * np.eye(columns.shape[2], dtype=np.float32)
    solved = np.linalg.solve(gram, unit.mT @ target[..., None])[..., 0]
    return np.asarray(solved / scale)
