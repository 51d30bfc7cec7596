"""Files that are written whole or not at all, and verified when they are read."""

import contextlib
import errno
import hashlib
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final
from uuid import uuid4

from nearkin.errors import CheckpointError, OutputError

NOT_SYNCED: Final = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF)
"""Of folders, of which some file systems keep no account."""
PARTIAL: Final = ".partial."  # Marks the temporary file of an atomic write: `.NAME.partial.NUMBER`
SEAL: Final = b"nearkin\n"
SEAL_SIZE: Final = len(SEAL) + 8 + hashlib.sha256().digest_size


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_unpacked(file: Any, most: int) -> None:
    """Raise some error for a zip that is damaged, or unpacks to more bytes than `most`."""
    with zipfile.ZipFile(file) as packed:
        unpacked = sum(member.file_size for member in packed.infolist())
    if 0 < most < unpacked:
        raise ValueError(f"it unpacks to {unpacked / 1e6:,.0f} MB, and {most / 1e6:,.0f} are free")


def read_arrays(file: Any, most: int) -> dict[str, Any]:
    """Read the arrays of an .npz; nothing is unpickled.

    Raises some error if it is damaged, or unpacks to more than `most` bytes; 0 for any number.
    """
    import numpy as np  # here, so that the command line starts without it

    check_unpacked(file, most)
    file.seek(0)
    with np.load(file, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


@contextlib.contextmanager
def usable(path: Path, remedy: str) -> Iterator[None]:
    """Turn any error in a `with` block that reads a file of a run into a CheckpointError.

    Its message has the reason, and `remedy`, which says what to do.
    """
    try:
        yield
    except Exception as error:  # of any kind: the file may hold anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{path} cannot be used ({reason}); {remedy}") from error


@contextlib.contextmanager
def writing(path: Path, remedy: str = "choose another -o") -> Iterator[None]:
    """Turn the system's error in a `with` block that writes a file into an OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}; {remedy}") from error


@contextlib.contextmanager
def creating(path: Path) -> Iterator[None]:
    """As `writing`, of a file that the user names: its folder is made if it is not there."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be made, whose folders may be missing, before it is written."""
    with writing(path):  # tried by a file without a name: permissions tell of no read-only disk
        TemporaryFile(dir=next(filter(os.path.lexists, path.absolute().parents))).close()


@contextlib.contextmanager
def whole(path: Path, *, lasting: bool = True) -> Iterator[Path]:
    """Yield a temporary name to write a file under, then rename it: an atomic write.

    If that fails, the old file is still there, and no temporary one. The bytes reach the disk
    before the name does, if it is to be `lasting`; many files that can be written again are not.
    """
    # Not the process id: two machines that share a disk may have the same.
    partial = path.with_name(f".{path.name}{PARTIAL}{uuid4().int}")
    try:
        yield partial
        if lasting:
            with partial.open("r+b") as file:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if lasting and hasattr(os, "O_DIRECTORY"):  # Windows cannot open a folder
        try:
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:  # not all file systems can; the file is in its place
            if error.errno not in NOT_SYNCED:
                raise


def write_whole(path: Path, *parts: bytes) -> None:
    """Write a file of these parts, whole or not at all."""
    with whole(path) as partial, partial.open("xb") as file:
        file.writelines(parts)


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_whole(path, text.encode("utf-8", "surrogateescape"))


def remove_partial(folder: Path) -> None:
    """Remove temporary files of killed processes from a folder that nobody writes to."""
    for partial in folder.glob(f"*{PARTIAL}[0-9]*"):
        if not partial.is_dir():  # a folder of an export, which may hold what it replaces
            partial.unlink(missing_ok=True)


def seal(content: bytes) -> bytes:
    """Return what ends a sealed file: "nearkin", the length of the content, and its SHA-256."""
    return SEAL + len(content).to_bytes(8, "big") + hashlib.sha256(content).digest()


def write_sealed(path: Path, content: bytes) -> None:
    """Write a file that is verified when it is read, whole or not at all."""
    write_whole(path, content, seal(content))


def read_sealed(path: Path) -> bytes | None:
    """Return the content of a sealed file; None if it is damaged, absent, or was never sealed."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:  # another rank has set it aside since it was listed
        return None
    content = raw[:-SEAL_SIZE]
    return content if raw[-SEAL_SIZE:] == seal(content) else None
