"""Images that are files of a store, by their paths below an address."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from posixpath import normpath

import numpy as np
from jaxtyping import Int64

from nearkin.data.archives import forbidden, is_shard
from nearkin.data.folders import images_or_shards
from nearkin.data.images import BadFile, Images, Rows, Source, in_bytes, picked
from nearkin.data.labels import Row
from nearkin.data.listing import Listing, is_hidden, is_image, listed, not_read, require_files
from nearkin.data.members import Archives
from nearkin.data.remote import (
    RemoteFile,
    address,
    blocks,
    cache_limit,
    files_below,
    remote_files,
    warm,
)
from nearkin.data.tables import absent, by_name
from nearkin.errors import redacted


def list_store(url: str) -> Listing:
    """The same as `list_folder` for an address of a store, which knows neither links nor runs.

    The suffixes of names decide which files are images: to open others would cost requests.
    """
    root, others = url.rstrip("/"), list[str]()

    def wanted(name: str) -> bool:
        found = is_image(name) or (is_shard(name) and not is_hidden(name))
        if not found:
            others.append(name)
        return found

    files = files_below(root, wanted)
    images = {name: file for name, file in files.items() if is_image(name)}
    shards = {name: file for name, file in files.items() if name not in images}
    loose = replace(_objects(root, images), others=[*sorted(others, key=in_bytes), *shards])
    where = redacted(root)
    return require_files(images_or_shards(where, loose, shards), where)


def list_remote_table(table: RemoteFile, written: Sequence[tuple[str, Row]]) -> Listing:
    """The images that rows of a table in a store list, by paths relative to it, or addresses."""
    root = table.url.partition("?")[0].rpartition("/")[0]
    rows, _ = by_name(table, written, lambda name: normpath(name.removeprefix(f"{root}/")))
    if root.startswith("http"):  # which may have no list of its files
        files = remote_files({name: address(root, name) for name in rows})
    else:
        files = files_below(root, rows.__contains__)
    if missing := [name for name in rows if name not in files]:
        raise absent(table, missing, len(rows), redacted(root))
    return replace(_objects(root, files, rows), key=str(table))


def _objects(
    root: str, files: Mapping[str, RemoteFile], rows: Mapping[str, Row] | None = None
) -> Listing:
    reasons = {name: forbidden(name) or not_read(name) for name in files}
    names = [name for name in files if not reasons[name]]
    states = np.array([(files[n].size, files[n].tag) for n in names], np.int64).reshape(-1, 2)
    bad = [BadFile(name, reason, files[name].size) for name, reason in reasons.items() if reason]
    listing = listed(Objects(root, names, states), names, states, rows)
    return replace(listing, bad=bad, key=redacted(root))


@dataclass(frozen=True, eq=False)
class Objects(Source):
    """Reads files below an address of a store."""

    root: str
    names: Sequence[str]  # As the store spells them
    states: Int64[np.ndarray, "files 2"]  # Bytes and tag of each

    def read(self, row: int, limit: int | None = None) -> bytes:
        """The file's first `limit` bytes, or all of it."""
        file = self._file(row)
        return file.read(0, file.size if limit is None else limit)

    def only(self, rows: Rows) -> "Objects":
        """The source of these files alone."""
        return Objects(self.root, picked(self.names, rows), self.states[rows])

    def warm(self, rows: Iterable[int]) -> None:
        """Fetch these files at once."""
        files = map(self._file, rows)
        warm((file, number) for file in files for number in blocks(0, file.size))

    def _file(self, row: int) -> RemoteFile:
        url = address(self.root, self.names[row])
        return RemoteFile(url, *self.states[row].tolist())


def window_for(images: Images) -> int:
    """What `shuffle_window` is by itself: half of the cache, where shards in a store exceed it."""
    shards = images.source.files if isinstance(images.source, Archives) else ()
    total, limit = sum(s.size for s in shards if isinstance(s, RemoteFile)), cache_limit()
    return max(1, len(images) * limit // (2 * total)) if 0 < limit < total else 0
