"""What a browser and the server of a page say to each other."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, Protocol, runtime_checkable

Json = Mapping[str, Any]
"""Plain values."""

NOTHING: Final = "default-src 'none'; base-uri 'none'; form-action 'none'"
"""What may be loaded by an answer that is no page."""


class Refused(Exception):  # noqa: N818  (an answer, not a failure of the program)
    """A request that gets no more than a reason."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Reply:
    """An answer."""

    content: bytes
    kind: str
    status: HTTPStatus = HTTPStatus.OK
    policy: str = NOTHING
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def values(said: Json, status: HTTPStatus = HTTPStatus.OK) -> Reply:
    """Plain values as an answer."""
    return Reply(json.dumps(said).encode(), "application/json", status)


def refusal(status: HTTPStatus, reason: str) -> Reply:
    """A reason as an answer, in one line."""
    return values({"error": " ".join(reason.split())}, status)


@runtime_checkable
class Site(Protocol):
    """What is served. Its methods are called from several threads at once.

    A `UsageError` or a `DataError` is told as a mistake of the request, any other `NearkinError`
    as something that stands in the way.
    """

    def page(self) -> str:
        """The page, as HTML."""

    def policy(self) -> str:
        """What the page may load and run, as a Content-Security-Policy."""

    def image(self, number: int) -> bytes | None:
        """An image as WebP, large enough to be looked at; None if it cannot be read."""

    def thumbnail(self, number: int) -> bytes | None:
        """The same, small and square."""

    def search(self, encoded: bytes) -> Json:
        """What the image in a file is most similar to."""

    def classes(self) -> Json:
        """The classes that were found, with their names."""

    def name(self, cluster: str, name: str) -> Json:
        """Give a class a name or, if that is empty, take it away. Then `classes`."""

    def merge(self, clusters: list[str], name: str) -> Json:
        """Make classes one by giving them one name. Then `classes`."""

    def split(self, numbers: list[int], name: str) -> Json:
        """Make images a class of their own. Then `classes`."""

    def export(self, folder: str, numbers: list[int] | None) -> Json:
        """Copy images, or all of them, into a new folder, by class."""


@runtime_checkable
class Change(Protocol):
    """What a page can ask for besides images."""

    def made(self, site: Site) -> Json:
        """Do it, and tell what came of it."""


@dataclass(frozen=True)
class Name:
    """Name a class."""

    cluster: str
    name: str

    def made(self, site: Site) -> Json:
        """All classes."""
        return site.name(self.cluster, self.name)


@dataclass(frozen=True)
class Merge:
    """Make classes one."""

    clusters: list[str]
    name: str

    def made(self, site: Site) -> Json:
        """All classes."""
        return site.merge(self.clusters, self.name)


@dataclass(frozen=True)
class Split:
    """Make images a class."""

    numbers: list[int]
    name: str

    def made(self, site: Site) -> Json:
        """All classes."""
        return site.split(self.numbers, self.name)


@dataclass(frozen=True)
class Export:
    """Copy images."""

    folder: str
    numbers: list[int] | None

    def made(self, site: Site) -> Json:
        """Where they are."""
        return site.export(self.folder, self.numbers)


CHANGES: Final[Mapping[str, type[Change]]] = {
    "/name": Name,
    "/merge": Merge,
    "/split": Split,
    "/export": Export,
}
"""By the paths they are asked for at."""
