"""Two sets of images as one, and exact copies among images."""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from nearkin.data import channels
from nearkin.data.decode import BadImage
from nearkin.data.images import COLUMNS, BadFile, Either, Images, digest, in_bytes, picked
from nearkin.data.labels import numbered
from nearkin.errors import DataError
from nearkin.types import UNLABELED


def union(first: Images, second: Images, prefix: str) -> Images:
    """Return the images of both: the first's under their names, the second's under prefix + name.

    Classes of one name become one; groups stay separate, whatever they are called.
    """
    added = [prefix + name for name in second.names]
    if first.pixel_type != second.pixel_type and len(first) and len(second):
        one, other = channels.named(first.pixel_type), channels.named(second.pixel_type)
        raise DataError(f"images are {one}, and others {other}; convert some of them")
    if duplicates := sorted(set(added).intersection(first.names)):
        raise DataError(
            f"{len(duplicates)} images have the names of others, such as {duplicates[0]!r}; "
            "rename them"
        )
    names = [*first.names, *added]
    rows = np.array(sorted(range(len(names)), key=lambda row: in_bytes(names[row])), np.int64)
    classes, number = numbered([*first.classes, *second.classes])
    shifted = np.where(second.labels < 0, UNLABELED, second.labels + len(first.classes))
    labels = np.append(number, UNLABELED)[np.concatenate([first.labels, shifted])]
    groups = np.concatenate([first.groups, second.groups + first.groups.max(initial=-1) + 1])
    _, start, group = np.unique(groups[rows], return_index=True, return_inverse=True)
    group_names = (*first.group_names, *second.group_names)
    second_bad = (BadFile(prefix + bad.name, bad.reason, bad.bytes) for bad in second.bad)
    pairs = {name: [getattr(first, name), getattr(second, name)] for name in COLUMNS}
    columns: dict[str, Any] = {name: np.concatenate(x)[rows] for name, x in pairs.items()}
    return Images(
        **columns | {"labels": labels[rows], "groups": start[group]},
        names=picked(names, rows),
        group_names=picked(group_names, rows),
        classes=classes,
        source=Either(first.source, second.source, len(first), rows),
        channels=first.channels,
        pixel_type=first.pixel_type,
        key="\0".join((first.key, prefix, second.key)) if first.key and second.key else "",
        bad=tuple(sorted((*first.bad, *second_bad), key=lambda bad: in_bytes(bad.name))),
        notes=first.notes + second.notes,
    )


def copies(images: Images, rows: Iterable[int]) -> list[list[int]]:
    """Return groups of exact copies of these rows (equal bytes, or pixels), rows ascending."""
    requested = set(rows)
    # Copies have the same size, in bytes and in pixels, so few images need to be read.
    sizes = list(zip(images.num_bytes.tolist(), *images.sizes.T.tolist(), strict=True))
    count, candidates = Counter(sizes), {sizes[row] for row in requested}
    groups: dict[tuple[object, ...], list[int]] = {}
    for row, size in enumerate(sizes):
        if size in candidates and count[size] > 1:
            with suppress(BadImage):
                groups.setdefault((size, digest(images.stored(row))), []).append(row)
    return [x for x in groups.values() if len(x) > 1 and not requested.isdisjoint(x)]
