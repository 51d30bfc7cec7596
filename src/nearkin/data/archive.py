"""Pictures in a .zip, .tar or .tar.gz, read in place: nothing is ever extracted."""

import gzip
import io
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from nearkin.data.sources import BadFile, Listing, Stat, is_hidden, is_picture, no_pictures
from nearkin.errors import DataError

ARCHIVES: Final = (".zip", ".tar", ".tar.gz", ".tgz")
MAX_UNPACKED: Final = 2**30
"""A .tar.gz has no index, so it is unpacked into memory, up to this many bytes."""


class Member(NamedTuple):
    """Where in the archive a file lies."""

    offset: int
    """Of a zip member, its local header; of a tar member, its first byte."""
    packed: int
    """Its bytes in the archive."""
    bytes: int
    zipped: bool = False
    deflated: bool = False


@dataclass(frozen=True)
class Archive:
    """Reads members of an archive, each time through a file handle of its own."""

    data: Path | bytes
    members: dict[str, Member]

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The member's first `limit` bytes, or all of it.

        Raises:
            OSError: the archive is gone or damaged there.
        """
        member = self.members[name]
        size = member.bytes if limit is None else min(limit, member.bytes)
        with (
            io.BytesIO(self.data) if isinstance(self.data, bytes) else self.data.open("rb") as file
        ):
            try:
                return _read(file, member, size)
            except (struct.error, zlib.error, ValueError, OverflowError, MemoryError) as error:
                raise OSError("damaged in the archive") from error


def _read(file: io.BufferedIOBase, member: Member, size: int) -> bytes:
    file.seek(member.offset)
    if member.zipped:
        # The lengths of name and extra field may differ from the central directory's.
        mark, *lengths = struct.unpack("<4s22xHH", file.read(30))
        if mark != b"PK\3\4":
            raise OSError("no file begins there in the archive")
        file.seek(sum(lengths), io.SEEK_CUR)
    if not member.deflated:
        return file.read(size)
    return zlib.decompressobj(-zlib.MAX_WBITS).decompress(file.read(member.packed), size)


def list_archive(path: Path) -> Listing:
    """Find the pictures in an archive.

    Refused, that is listed as bad, are members with an absolute name, a '..' or the name of an
    earlier one, links, devices, encrypted ones and those of an unusual compression.

    Raises:
        DataError: it is damaged, too large to unpack, or holds no pictures.
    """
    path = path.resolve()
    data, found = _open(path)
    members: dict[str, Member] = {}
    bad: list[BadFile] = []
    others: list[str] = []
    for name, member, refusal in found:
        if not is_picture(name):
            others.append(name)
        elif refusal or name in members:
            bad.append(BadFile(name, refusal or "duplicate name", member.bytes))
        else:
            members[name] = member
    if not members and not bad:
        raise no_pictures(str(path), others)
    modified = path.stat().st_mtime_ns
    files = {name: Stat(member.bytes, modified) for name, member in members.items()}
    return Listing(str(path), Archive(data, members), files, bad)


def _open(path: Path) -> tuple[Path | bytes, list[tuple[str, Member, str]]]:
    """What to read from, and each visible file's name, place and reason to refuse it."""
    try:
        if path.suffix.lower() == ".zip":
            return path, list(_zip_members(path))
        data = path if path.suffix.lower() == ".tar" else _unpack(path)
        return data, list(_tar_members(data))
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise DataError(f"{path}: not a readable archive ({error}); pack it again") from error


def _unpack(path: Path) -> bytes:
    with gzip.open(path) as file:
        data = file.read(MAX_UNPACKED + 1)
    if len(data) > MAX_UNPACKED:
        raise DataError(
            f"{path}: over {MAX_UNPACKED >> 20} MiB unpacked, too much for a compressed tar, "
            "which is read into memory; give it as .tar or .zip"
        )
    return data


def _zip_members(path: Path) -> Iterator[tuple[str, Member, str]]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            deflated = info.compress_type == zipfile.ZIP_DEFLATED
            refusal = _refusal(info.orig_filename)
            if stat.S_ISLNK(info.external_attr >> 16):
                refusal = "link"
            elif info.flag_bits & 1:
                refusal = "encrypted"
            elif not deflated and info.compress_type != zipfile.ZIP_STORED:
                refusal = "unusual compression"
            sizes = info.compress_size, info.file_size
            if not info.is_dir() and not is_hidden(_plain(info.filename)):
                place = Member(info.header_offset, *sizes, zipped=True, deflated=deflated)
                yield _plain(info.filename), place, refusal


def _tar_members(data: Path | bytes) -> Iterator[tuple[str, Member, str]]:
    with (
        io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as file,
        tarfile.open(fileobj=file, mode="r:") as archive,
    ):
        for info in archive:
            regular = info.isreg() and not info.issparse()
            refusal = _refusal(info.name) if regular else "link, device or sparse file"
            if not info.isdir() and not is_hidden(_plain(info.name)):
                yield _plain(info.name), Member(info.offset_data, info.size, info.size), refusal


def _plain(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _refusal(name: str) -> str:
    parts = name.replace("\\", "/").split("/")
    unsafe = name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or "\0" in name
    return "name leaves the archive" if unsafe else ""
