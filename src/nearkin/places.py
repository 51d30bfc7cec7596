"""Paths that users give: the home folder, and what the system does not let us look at."""

import errno
import os
from pathlib import Path
from typing import Final

from nearkin.errors import DataError, NearkinError, ResourceError

NO_WAY: Final = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
NO_HANDLES: Final = (errno.EMFILE, errno.ENFILE)
TOO_MANY_OPEN: Final = (
    "too many open files; allow more with `ulimit -n 4096`, or give fewer --workers"
)


def user_path(text: str | Path) -> Path:
    """A path as a user means it: a leading `~` is the home folder, unless a file has that name."""
    path = Path(text)
    if str(path).startswith("~") and not os.path.lexists(path):
        try:
            return path.expanduser()
        except RuntimeError:  # no such user, or a user without a home
            return path
    return path


def cache_folder(kind: str) -> Path:
    """The user's own folder for one kind of data that can be computed again.

    A user without a home has none: below a file that always exists, nothing can be made.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        root = Path(os.devnull)
    return root / "nearkin" / kind


def is_file(path: Path | str) -> bool:
    """Whether this is a file; where nobody can tell, see `exists`, it is none."""
    return os.path.isfile(path)  # noqa: PTH113  (that of a Path raises)


def exists(path: Path) -> bool:
    """Whether a file or folder is there.

    Raises:
        DataError: If nobody can tell: a folder on the way may not be entered, a name is too long.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise system_error(error) or error from error
    return True


def system_error(error: Exception) -> NearkinError | None:
    """The one line for what the system refuses; None if that is no matter of paths or limits."""
    if not isinstance(error, OSError):
        return None
    if error.errno in NO_HANDLES:
        return ResourceError(TOO_MANY_OPEN)
    if error.errno in NO_ROOM:
        where = error.filename or "the output"
        return ResourceError(f"no room left to write {where}; make room, then try again")
    if error.errno in NO_WAY and error.filename:
        reason = str(error.strerror).lower()
        return DataError(f"{error.filename}: {reason}; give a path that this user may use")
    return None
