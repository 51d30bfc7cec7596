"""Two sets of pictures as one, and which pictures of a set are there twice."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nearkin.data.header import BadImage
from nearkin.data.images import Images
from nearkin.data.labels import Said, in_bytes
from nearkin.data.sources import BadFile, Source
from nearkin.errors import DataError
from nearkin.types import UNKNOWN


@dataclass(frozen=True)
class Either:
    """Reads each picture from the one of two sources that has it."""

    first: Source
    second: Source
    prefix: str
    """Stands before the names that the second source knows."""
    added: frozenset[str]
    """The names, with the prefix, of the second source's pictures."""

    def read(self, name: str, limit: int | None = None) -> bytes | np.ndarray:
        """The picture's bytes, or the first `limit` of them; or its pixels."""
        if name in self.added:
            return self.second.read(name.removeprefix(self.prefix), limit)
        return self.first.read(name, limit)


def union(first: Images, second: Images, prefix: str) -> Images:
    """The pictures of both: the first's under their names, the second's under prefix + name.

    Classes of one name become one; groups stay apart.

    Raises:
        DataError: A picture of the second would have the name of one of the first.
    """
    added = [prefix + name for name in second.names]
    twice = sorted(set(added).intersection(first.names))
    if twice:
        raise DataError(
            f"{len(twice)} pictures have the names of others, such as {twice[0]!r}; rename them"
        )
    names = [*first.names, *added]
    rows = np.array(sorted(range(len(names)), key=lambda row: in_bytes(names[row])), np.int64)
    classes, number = Said([*first.classes, *second.classes], [], []).numbered()
    shifted = np.where(second.labels < 0, UNKNOWN, second.labels + len(first.classes))
    labels = np.append(number, UNKNOWN)[np.concatenate([first.labels, shifted])]
    groups = np.concatenate([first.groups, second.groups + first.groups.max(initial=-1) + 1])
    _, start, group = np.unique(groups[rows], return_index=True, return_inverse=True)
    strays = (BadFile(prefix + bad.name, bad.reason, bad.bytes) for bad in second.bad)
    return Images(
        names=tuple(names[row] for row in rows),
        labels=labels[rows],
        groups=start[group],
        splits=np.concatenate([first.splits, second.splits])[rows],
        classes=classes,
        sizes=np.concatenate([first.sizes, second.sizes])[rows],
        num_bytes=np.concatenate([first.num_bytes, second.num_bytes])[rows],
        kinds=np.concatenate([first.kinds, second.kinds])[rows],
        modified=np.concatenate([first.modified, second.modified])[rows],
        source=Either(first.source, second.source, prefix, frozenset(added)),
        key="\0".join((first.key, prefix, second.key)) if first.key and second.key else "",
        bad=tuple(sorted((*first.bad, *strays), key=lambda bad: in_bytes(bad.name))),
        notes=first.notes + second.notes,
    )


def copies(images: Images, rows: Iterable[int]) -> list[list[int]]:
    """The rows of pictures that are exact copies of one another, for copies of these rows.

    Copies are files with the same SHA-256, or arrays with the same pixels. Only pictures of the
    same size as one of `rows`, in bytes and in pixels, are read. Unreadable ones have no copies.

    Returns:
        Ascending rows, two or more in each group, of which at least one is among `rows`.
    """
    asked = set(rows)
    looks = list(zip(images.num_bytes.tolist(), *images.sizes.T.tolist(), strict=True))
    count, sought = Counter(looks), {looks[row] for row in asked}
    alike: dict[tuple[object, ...], list[int]] = {}
    for row, look in enumerate(looks):
        if look in sought and count[look] > 1:
            try:
                held = images.read(row)
            except BadImage:
                continue
            pixels = held if isinstance(held, bytes) else held.tobytes()
            alike.setdefault((look, hashlib.sha256(pixels).digest()), []).append(row)
    return [group for group in alike.values() if len(group) > 1 and not asked.isdisjoint(group)]
