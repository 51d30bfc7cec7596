"""What a browser and the server of a page say to each other."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

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
