"""Files that cannot be read in place, such as Parquet, unpacked once into the cache folder."""

import errno
import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

from nearkin.data.cache import hold, make_room
from nearkin.data.images import in_bytes
from nearkin.data.remote import File, RemoteFile, state_of
from nearkin.errors import ResourceError
from nearkin.files import whole
from nearkin.places import cache_folder

SUFFIXES: Final = (".arrow", ".tar")  # Of what unpacked files become
ROOM: Final = 50 * 2**30  # Bytes of all unpacked files
NOT_WRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR)


def unpacked(file: File, suffix: str, write: Callable[[Any, Path], None]) -> Path:
    """What `write` has made of the open file in its present state, now or at an earlier start."""
    path = _copy(file, suffix)
    hold(path)
    if path.exists():
        return path
    with file.open("rb") as packed:
        write_unpacked(path, partial(write, packed))
    return kept(path)


def hold_copies(files: Iterable[File]) -> None:
    """Hold what there is of a data set, before any of its copies makes room for itself."""
    for file, suffix in product(files, SUFFIXES):
        with suppress(OSError):  # whoever reads the file tells why it cannot be
            hold(_copy(file, suffix))


def _copy(file: File, suffix: str) -> Path:
    state = (file.size, file.version) if isinstance(file, RemoteFile) else state_of(file)
    known = hashlib.sha256(in_bytes(f"{file} {state}")).hexdigest()
    return cache_folder("tables") / f"{known[:32]}{suffix}"


def write_unpacked(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file, whole or not at all; a ResourceError if the disk takes none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as new:
            write(new)
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        raise ResourceError(
            f"{path.parent}: a copy that can be read in place cannot be written here "
            f"({error.strerror}); make room, or point XDG_CACHE_HOME to another folder"
        ) from error


def kept(path: Path) -> Path:
    """Hold a file, and remove the oldest ones of others if there are more than `ROOM`."""
    hold(path)
    make_room(path.parent, ROOM)
    return path
