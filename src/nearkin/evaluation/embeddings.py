"""`Embeddings`, the table of features of images, and how it is computed by an encoder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, Shaped
from torch import Tensor
from typing_extensions import override

from nearkin.data.batches import CenterCrops
from nearkin.data.images import Images, picked
from nearkin.encoders.inference import Inference, encode_pixels
from nearkin.errors import DataError, UsageError
from nearkin.objectives import unit
from nearkin.pace import ProgressCallback, count, ignore_progress, tracked
from nearkin.result import Result, Row
from nearkin.types import UNLABELED

SHARD: Final = 1024  # Images in a shard of features, at least, on a CPU
MOST_SHARDS: Final = 64
COLUMNS: Final = ("vectors", "labels", "groups", "rows", "splits", "paths", "group_names")
"""Fields of `Embeddings` that have a value for each image."""


@dataclass(frozen=True, eq=False, repr=False)
class Embeddings(Result):
    """Features of images, with what is known of each image: one row per image.

    Metrics need only `vectors`, `labels` and `groups`; the rest may be left out.
    """

    vectors: Float32[np.ndarray, "n dim"]
    """As the encoder gives them, or of length one; see `normalized`."""
    labels: Int[np.ndarray, " n"]  # Class numbers, positions in `classes`; -1 where unknown
    groups: Int[np.ndarray, " n"] | None = None
    """Images of one group (a person, a burst) are never split when something is chosen."""
    rows: Int[np.ndarray, " rows"] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Each image's position among those that were to be encoded."""
    paths: Sequence[str] = ()
    classes: Sequence[str] = ()  # The class names
    splits: Shaped[np.ndarray, " splits"] = field(default_factory=lambda: np.zeros(0, np.str_))
    """`train` or `test`; empty where the data name no split."""
    bad: Mapping[str, str] = field(default_factory=dict[str, str])
    """Paths of images that cannot be read, which have no row, with the reason."""
    second_view: "Embeddings | None" = None
    """Features of an augmented view of some of the images; its `rows` say which."""
    encoder: str = ""  # The digest of the encoder; empty where unknown
    removed: str = ""  # The column, such as camera, that `embed` has removed; empty for none
    group_names: Sequence[str] = ()
    """What the data call the group of each image, '' for none; empty where they name no group."""

    def __post_init__(self) -> None:
        """Refuse columns of other lengths, and labels that are no classes' numbers.

        Names in an array, as of a label encoder, become a tuple.
        """
        for name in ("paths", "classes", "group_names"):
            if isinstance(names := getattr(self, name), np.ndarray):
                object.__setattr__(self, name, tuple(names.tolist()))
        if not isinstance(self.vectors, np.ndarray) or self.vectors.ndim != 2:
            raise UsageError("the vectors are no array with a row per image; give one of NumPy")
        for name in COLUMNS[1:]:
            column = getattr(self, name)
            if name == "groups" and column is None:
                continue
            if name not in ("paths", "group_names") and not isinstance(column, np.ndarray):
                raise UsageError(f"the {name} are no array; give one of NumPy")
            if len(column) != len(self) and (name == "labels" or len(column)):
                raise UsageError(f"{len(self)} vectors, but {len(column)} {name}; give one each")
        self._check_labels()

    def _check_labels(self) -> None:
        kind, low, high = self.labels.dtype.kind, *_extent(self.labels)
        if kind not in "iu" or low < UNLABELED or (self.classes and high >= len(self.classes)):
            raise UsageError(
                f"labels from {low} to {high} are no numbers of {len(self.classes)} classes; "
                f"count from 0, with {UNLABELED} for images without a label"
            )

    def __len__(self) -> int:
        return len(self.vectors)

    @override
    def lines(self) -> list[str]:
        """How many images and features there are, and which images are left out."""
        images, dim = self.vectors.shape
        without = f", {self.removed} removed" if self.removed else ""
        left_out = (f"left out {name!r}: {reason}" for name, reason in self.bad.items())
        return [f"{count(images, 'image')}, {dim} features each{without}", *left_out]

    @override
    def to_dict(self) -> dict[str, Any]:
        """The numbers of images and features, what is removed, and unreadable images."""
        images, dim = self.vectors.shape
        plain = {"images": images, "features": dim, "bad": dict(self.bad)}
        return plain | {"removed": self.removed} if self.removed else plain

    @override
    def records(self) -> list[Row]:
        """A row per image: its path, split, label and vector."""
        splits = self.splits.tolist() or [""] * len(self)
        columns = (self.paths or [""] * len(self), splits, self.class_names.tolist(), self.vectors)
        names = ("path", "split", "label", "vector")
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    @property
    def tensor(self) -> Float[Tensor, "n dim"]:
        """The vectors as a tensor, without a copy."""
        return torch.from_numpy(self.vectors)

    @property
    def class_names(self) -> Shaped[np.ndarray, " n"]:
        """Each image's class name, its number where classes have no names; empty where unknown."""
        classes = self.classes or map(str, range(_extent(self.labels)[1] + 1))
        names: np.ndarray = np.array([*classes, ""], np.str_)[self.labels]
        return names

    @property
    def named_groups(self) -> list[str]:
        """Each image's group as the data call it.

        Else by its first image or, without paths, by number; '' of one by itself.
        """
        names = list(self.group_names) or [""] * len(self)
        if self.groups is None:
            return names
        number, first, group, size = np.unique(
            self.groups, return_index=True, return_inverse=True, return_counts=True
        )
        own = [self.paths[row] for row in first.tolist()] if self.paths else map(str, number)
        called = [name if many else "" for name, many in zip(own, size > 1, strict=True)]
        for each, name in zip(group[::-1].tolist(), names[::-1], strict=True):
            called[each] = name or called[each]  # In the end that of the first image with one
        return [called[each] for each in group.tolist()]

    def subset(self, rows: Shaped[np.ndarray, " rows"] | Sequence[int]) -> "Embeddings":
        """Return the images at these positions, in that order, without their second view.

        A mask of booleans selects, too.
        """
        taken = np.arange(len(self))[np.asarray(rows, None if len(rows) else np.int64)]
        columns: dict[str, Any] = {name: getattr(self, name) for name in COLUMNS}
        for name, column in columns.items():
            if column is not None and len(column):
                is_array = isinstance(column, np.ndarray)
                columns[name] = column[taken] if is_array else picked(column, taken)
        return replace(self, **columns, second_view=None)

    def labeled(self) -> "Embeddings":
        """Return the images that have a label."""
        rows = np.flatnonzero(self.labels != UNLABELED)
        return self if len(rows) == len(self) else self.subset(rows)

    def normalized(self) -> "Embeddings":
        """Return the same with vectors of length one."""
        return replace(self, vectors=unit(self.tensor).numpy())

    def unlabeled(self) -> "Embeddings":
        """Return the same without labels."""
        return replace(self, labels=np.full_like(self.labels, UNLABELED))


Pair = tuple[Embeddings, Embeddings]
"""Training and test embeddings."""


def _extent(labels: Shaped[np.ndarray, " n"]) -> tuple[Any, Any]:
    """The least and the greatest label; of no image, `UNLABELED`."""
    return (labels.min(), labels.max()) if len(labels) else (UNLABELED, UNLABELED)


def embeddings_of(
    images: Images,
    vectors: Float32[np.ndarray, "n dim"],
    rows: Int[np.ndarray, " n"] | None = None,
    bad: Mapping[str, str] | None = None,
) -> Embeddings:
    """Join features with what is known of their images, in their order; `rows` None is all."""
    return Embeddings(
        vectors,
        images.labels,
        images.groups,
        np.arange(len(images)) if rows is None else rows,
        images.names,
        images.classes,
        images.splits,
        bad or {},
        group_names=images.group_names,
    )


def images_per_shard(count: int, device: torch.device) -> int:
    """Return how many images a shard of features has: what a kill loses at most.

    On a CPU that is about a minute's work; on a GPU, starting to decode a shard takes longer than
    computing a small one.

    >>> [images_per_shard(count, torch.device("cpu")) for count in (10_000, 100_000)]
    [1024, 2048]
    >>> images_per_shard(10_000, torch.device("cuda"))
    16384
    """
    least = SHARD if device.type == "cpu" else 16 * SHARD
    return least * math.ceil(count / (MOST_SHARDS * least))


def encode_images(
    by: Inference,
    images: Images,
    *,
    workers: int,
    on_progress: ProgressCallback = ignore_progress,
    allow_none: bool = False,
) -> Embeddings:
    """Compute the features of those images that can be read, in float32.

    Raises:
        DataError: If there are no images, or none that can be read and not `allow_none`.
    """
    pixels = CenterCrops(images, by.preprocessing, batch_size=by.batch_size, workers=workers)
    pieces = tracked(pixels, len(images), "features", on_progress)
    features = encode_pixels(by.network, pieces, by.device)
    if len(pixels.bad) == len(images) and not allow_none:
        raise DataError(f"none of the {len(images)} images can be read; look at the files")
    rows = np.delete(np.arange(len(images)), sorted(pixels.bad))
    bad = {images.names[row]: reason for row, reason in sorted(pixels.bad.items())}
    return embeddings_of(images.subset(rows), features.numpy()[rows], rows, bad)
