"""Files of a store that is reached by a URL: listed once, read in blocks, kept in a cache folder.

fsspec opens the store. No message, file or log shows credentials that the URL holds.
"""

import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from nearkin.data.cache import make_room
from nearkin.data.images import in_bytes
from nearkin.errors import DataError, UsageError, redacted
from nearkin.files import write_whole
from nearkin.places import cache_folder, system_error

BLOCK: Final = 2**20
"""Bytes of a file of the cache, and of a request for it; a slow network has to send `THREADS` of
them within `TIMEOUT`."""
THREADS: Final = 16  # Requests of a process at once
ATTEMPTS: Final = 5
PAUSE = 1.0  # Seconds before the second attempt; each further one waits twice as long
TIMEOUT = 15.0
"""Seconds for one request. All attempts together take less than `batches.PATIENCE`."""
LISTING: Final = 1800.0  # Seconds for a list of all files
REMEMBERED: Final = 60.0  # Seconds during which what failed is not asked for again
STARTED: Final = time.time_ns()
TAGS: Final = (
    *("ETag", "etag", "md5Hash", "blob_id", "mtime"),
    *("LastModified", "Last-Modified", "updated", "last_modified", "modify", "modificationTime"),
    *("Digest", "Content-MD5"),
)
"""What stores say of a file that changes with its content: the first of these counts."""


class RemoteError(OSError):
    """A read that failed in all attempts; `reason` is unreachable, cut short, or not found."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def is_url(text: str) -> bool:
    """Whether this is the address of a store rather than a path."""
    return "://" in text


def cache_limit() -> int:
    """Bytes that the cache of blocks may hold, from $NEARKIN_REMOTE_CACHE, as 50G; 0 for none."""
    text = os.environ.get("NEARKIN_REMOTE_CACHE") or "20G"
    number, unit = (text[:-1], text[-1].upper()) if text[-1].isalpha() else (text, "")
    try:
        return int(float(number) * 1024 ** ["", "K", "M", "G", "T"].index(unit))
    except ValueError as error:
        raise UsageError(f"NEARKIN_REMOTE_CACHE {text!r} is no size; say 50G, or 0") from error


# Requests


@lru_cache
def _filesystem(store: str, process: int) -> Any:
    """Fsspec's access to a store; a fork needs one of its own."""
    del process
    try:
        from fsspec.config import conf
        from fsspec.core import url_to_fs

        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if store.startswith("s3"):  # attempts are counted in one place
            own = conf.get("s3", {}).get("config_kwargs", {})  # as of FSSPEC_S3
            options["config_kwargs"] = {**own, "retries": {"total_max_attempts": 1}}
        filesystem: Any = url_to_fs(store, **options)[0]
    except ImportError:
        raise UsageError(
            f"{store.partition('://')[0]}:// needs a library: pip install 'nearkin[remote]' for "
            "s3 and https, gcsfs for gs, adlfs for abfs"
        ) from None
    except ValueError:
        raise UsageError(
            f"{redacted(store)}: not a kind of store that is known; give s3, gs, https"
        ) from None
    if hasattr(filesystem, "retries"):
        filesystem.retries = 1
    return filesystem


def _store(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}/"


def _request(url: str, what: str, seconds: float, **options: Any) -> Any:
    """One call of fsspec, which ends after that time where the store can be waited for."""
    filesystem = _filesystem(_store(url), os.getpid())
    path = filesystem._strip_protocol(url)
    if not getattr(filesystem, "async_impl", False):
        return getattr(filesystem, what)(path, **options)
    from fsspec.asyn import sync

    return sync(filesystem.loop, getattr(filesystem, f"_{what}"), path, timeout=seconds, **options)


def _problem(error: BaseException | None) -> str:
    """What is wrong, in words of our own: those of a library may show secrets."""
    chain = list[BaseException]()
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__
    names = " ".join(type(each).__name__ for each in chain)
    statuses = {getattr(each, "status", None) for each in chain} - {None}
    if statuses & {401, 403} or "Permission" in names or "Credentials" in names:
        return "forbidden"
    if re.search("[Cc]onnect|Timeout|Payload", names) or statuses - {404, 410}:
        return "unreachable"  # before the next, which fsspec makes of anything
    return "not found" if "NotFound" in names else "unreachable"


def _attempts(url: str, what: str, seconds: float, **options: Any) -> Any:
    """The answer to a request that is repeated while the store does not answer; RemoteError."""
    size = options.get("end", 0) - options.get("start", 0)
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE * 2 ** (attempt - 1) if attempt else 0)
        try:
            answer = _request(url, what, seconds, **options)
        except UsageError:
            raise
        except Exception as error:  # each store has errors of its own
            problem = _problem(error)
        else:
            if not size or len(answer) == size:
                return answer
            if len(answer) > size:
                raise DataError(
                    f"{redacted(url)}: the server sends no parts of files (HTTP ranges); use "
                    "another server, or copy the data here"
                )
            problem = "cut short"
        if problem in ("forbidden", "not found"):
            break
    raise RemoteError(problem) from None


def _ask(url: str, what: str, seconds: float = 0.0, **options: Any) -> Any:
    """What a store says of its files, or one line of a DataError."""
    try:
        return _attempts(url, what, seconds or TIMEOUT, **options)
    except RemoteError as error:
        advice = {
            "forbidden": "access denied; set the credentials of the store in the environment",
            "not found": "nothing is there; check the spelling",
        }
        no_answer = "the store does not answer; check the address and the network, and try again"
        raise DataError(f"{redacted(url)}: {advice.get(error.reason, no_answer)}") from None


_failed: dict[tuple[str, int], tuple[float, str]] = {}  # When, and why, by address and place
_fetched: dict[str, tuple[str, int]] = {}  # The last that came, address and place, by store


def _fetch(url: str, start: int, stop: int) -> bytes:
    """These bytes of a file: a RemoteError if only it fails, a DataError if the store does."""
    when, reason = _failed.get((url, start), (-REMEMBERED, ""))
    if time.monotonic() - when < REMEMBERED:
        raise RemoteError(reason)
    try:
        content: bytes = _attempts(url, "cat_file", TIMEOUT, start=start, end=stop)
    except RemoteError as error:
        problem = ""
        if error.reason == "unreachable" and not _answers(url):
            problem = "the store does not answer any more"
        if error.reason == "forbidden" and _denies_all(url):
            problem = "access is denied by now, so set credentials that last"
        if problem:
            raise DataError(
                f"{redacted(_store(url))}: {problem}; what is done is kept: give the same command "
                "again, a run's with --resume"
            ) from None
        _failed[url, start] = time.monotonic(), error.reason
        raise
    _fetched[_store(url)] = url, start
    return content


def _denies_all(url: str) -> bool:
    """Whether the store denies what it has given before, as where credentials have expired."""
    if (last := _fetched.get(_store(url))) is None:
        return False
    try:
        _attempts(last[0], "cat_file", TIMEOUT, start=last[1], end=last[1] + 1)
    except RemoteError as error:
        return error.reason == "forbidden"
    return False


def _answers(url: str) -> bool:
    """Whether the store says anything at all, be it that access is denied."""
    try:
        _request(_store(url), "info", TIMEOUT)
    except Exception as error:
        return _problem(error) != "unreachable"
    return True


# Files


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a store, read like one of this machine; for messages, `str` shows no secret."""

    url: str = field(repr=False)
    size: int
    tag: int  # Another one when the content is another

    def __str__(self) -> str:
        return redacted(self.url)

    @property
    def name(self) -> str:
        """The last part of the address; those of web pages alone have a query or a fragment."""
        address = str(self) if self.url.startswith("http") else self.url
        return address.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """From the last dot of the name on."""
        return Path(self.name).suffix

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """The file as one for reading, of bytes."""
        assert mode == "rb", mode
        return io.BufferedReader(_Raw(self), BLOCK)

    def read(self, offset: int, count: int) -> bytes:
        """These bytes, of the blocks that hold them; a RemoteError if they cannot be had."""
        stop = min(offset + count, self.size)
        if stop <= offset:
            return b""
        if not cache_limit():
            return _fetch(self.url, offset, stop)
        return b"".join(self._part(number, offset, stop) for number in blocks(offset, stop))

    def _part(self, number: int, offset: int, stop: int) -> bytes:
        """The bytes of one block between these places of the file."""
        first, last = number * BLOCK, min((number + 1) * BLOCK, self.size)
        start, end = max(offset - first, 0), min(stop, last) - first
        path = self.path(number)
        with suppress(OSError), path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == last - first:
                file.seek(start)
                return file.read(end - start)
        block = _fetch(self.url, first, last)
        _keep(path, block)
        return block[start:end]

    @property
    def version(self) -> int:
        """What a copy is kept by; where the store gives no tag, copies are of this start alone."""
        return self.tag or STARTED

    def path(self, number: int) -> Path:
        """Where a block lies in the cache, if it does."""
        parts = urlsplit(self.url)
        address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        known = f"{address}\0{self.size}\0{self.version}\0{BLOCK}\0{number}"
        return cache_folder("remote") / hashlib.sha256(in_bytes(known)).hexdigest()[:40]


File = Path | RemoteFile  # Of this machine, or of a store


def written_at(state: os.stat_result) -> int:
    """When a file was last written, in nanoseconds; where that is left out, when it changed.

    Archives without times give all files the time 0, whatever their contents.
    """
    return state.st_mtime_ns or state.st_ctime_ns


def state_of(file: File) -> tuple[int, int]:
    """Bytes of a file, and a number that changes with its content."""
    if isinstance(file, RemoteFile):
        return file.size, file.tag
    state = file.stat()
    return state.st_size, written_at(state)


@contextmanager
def readable(file: File, what: str, remedy: str, *errors: type[Exception]) -> Iterator[None]:
    """Say in one line that a file cannot be read or, by one of these errors, is no `what`."""
    try:
        yield
    except RemoteError as error:
        raise DataError(f"{file}: cannot be read ({error.reason}); try again") from error
    except UsageError:  # of the size of the cache; it is a ValueError, too
        raise
    except errors as error:
        reason = " ".join(str(error).split())
        damaged = DataError(f"{file}: not a readable {what} ({reason}); {remedy}")
        raise system_error(error) or damaged from error


def blocks(offset: int, stop: int) -> range:
    """The numbers of the blocks that hold the bytes between two places of a file."""
    return range(offset // BLOCK, -(-stop // BLOCK))


def warm(needed: Iterable[tuple[RemoteFile, int]]) -> None:
    """Fetch blocks of files into the cache at once; what fails shows when it is read."""
    missing = [(file, n) for file, n in needed if cache_limit() and not file.path(n).exists()]

    def touch(place: tuple[RemoteFile, int]) -> None:
        file, number = place
        with suppress(RemoteError):
            file.read(number * BLOCK, 1)

    if missing:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(touch, missing))


class _Raw(io.RawIOBase):
    def __init__(self, file: RemoteFile) -> None:
        self.file, self.position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + (0, self.position, self.file.size)[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        content = self.file.read(self.position, len(buffer))
        buffer[: len(content)] = content
        self.position += len(content)
        return len(content)


# The cache of blocks

_bytes_written = 0  # By this process, since it last made room


def _keep(path: Path, block: bytes) -> None:
    """Write a block of the cache; a full or read-only disk costs time, nothing else."""
    global _bytes_written
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, block)
    except OSError:
        return
    _bytes_written += len(block)
    if _bytes_written > cache_limit() // 64:
        _bytes_written = 0
        make_room(path.parent, cache_limit())


# Listings


def remote_file(url: str) -> RemoteFile:
    """A file by its address; a DataError if the store has none."""
    return _described(url, _ask(url, "info"))


def file_or_folder(url: str) -> RemoteFile | None:
    """The same; None if files lie below the address: over HTTP, if that is an HTML page."""
    if url.endswith("/") and url.startswith("http"):
        return None
    info = _ask(url, "info")
    is_folder = info["type"] == "directory" or info.get("mimetype") == "text/html"
    return None if is_folder else _described(url, info)


def remote_files(urls: Mapping[str, str]) -> dict[str, RemoteFile]:
    """Files of addresses by name, asked for at once."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(urls, pool.map(remote_file, urls.values()), strict=True))


def files_below(
    root: str, select: Callable[[str], bool]
) -> tuple[dict[str, RemoteFile], list[str]]:
    """The files below an address whose path below it is selected, by it; and all other paths."""
    root = root.rstrip("/")
    if root.startswith("http"):  # a page of links gives no sizes
        linked = (path.removeprefix(f"{root}/") for path in _linked(f"{root}/"))
        names = [unquote(path, errors="surrogateescape") for path in linked]
        files = remote_files({name: address(root, name) for name in names if select(name)})
    else:
        listing: Mapping[str, Any] = _ask(root, "find", LISTING, detail=True)
        start = _filesystem(_store(root), os.getpid())._strip_protocol(root).rstrip("/") + "/"
        infos = {path.removeprefix(start): info for path, info in listing.items()}
        names = [*infos]
        files = {n: _described(f"{root}/{n}", info) for n, info in infos.items() if select(n)}
    return files, [name for name in names if name not in files]


def address(root: str, name: str) -> str:
    """The address of a file below another one; over HTTP, with its name percent-encoded."""
    return f"{root}/{quote(name, errors='surrogateescape') if root.startswith('http') else name}"


def _linked(page: str) -> Iterator[str]:
    """The files that an HTML page, and the pages below it, lead to."""
    for entry in _ask(page, "ls", detail=True):
        path = str(entry["name"])
        if path.startswith(page) and path != page:
            yield from _linked(path) if path.endswith("/") else [path]


def _described(url: str, info: Mapping[str, Any]) -> RemoteFile:
    if info.get("size") is None:
        raise DataError(f"{redacted(url)}: the store gives no size; copy the data here")
    tag = next((str(info[name]) for name in TAGS if info.get(name)), "")
    number = int.from_bytes(hashlib.sha256(tag.encode()).digest()[:8]) >> 1 if tag else 0
    return RemoteFile(url, int(info["size"]), number)
