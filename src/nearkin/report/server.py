"""The HTTP server of a run's page: one user, one request per connection, pages of other sites."""

import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import defstruct
from typing_extensions import override

from nearkin.errors import DataError, NearkinError, PortError, UsageError
from nearkin.report.pages import FILES
from nearkin.report.site import Json, RunSite

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")  # this computer, in its own browsers
MAX_BODY: Final = 32 * 2**20  # bytes of a request body
TIMEOUT: Final = 10.0  # seconds without a byte of a request
ANSWER_TIMEOUT: Final = 300.0  # seconds for an answer
# Seconds to discard what a client still sends after its answer. If the connection were closed at
# once, the client would see a reset instead of the answer.
LINGER: Final = 1.0
START: Final = "/?token="
HOST: Final = re.compile(r"(?ai)(\[[0-9a-f:]+\]|[\w.-]+)(?::[1-9][0-9]{0,4})?")
POLICY: Final = "Content-Security-Policy"
HEADERS: Final = {  # of every answer
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",  # tomorrow, another run may be served at the same address
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Connection": "close",
    POLICY: "default-src 'none'; base-uri 'none'; form-action 'none'",  # but that of the page
}
NUMBER: Final = "(0|[1-9][0-9]{0,8})"
CONTENT: Final = {  # by path: the method of RunSite that gives it by its number, and its type
    re.compile(f"/image/{NUMBER}"): ("image", "image/webp"),
    re.compile(f"/whole/{NUMBER}"): ("whole", "image/webp"),
    re.compile(rf"/{FILES}/{NUMBER}\.webp"): ("sheet", "image/webp"),
    re.compile(rf"/{FILES}/{NUMBER}\.js"): ("details", "text/javascript"),
}
# Each calls the method of RunSite of the same name, with its fields as arguments.
REQUESTS: Final = {
    "/name": defstruct("Name", [("clusters", list[str]), ("name", str)]),
    "/label": defstruct("Label", [("numbers", list[int]), ("name", str)]),
    "/split": defstruct("Split", [("numbers", list[int]), ("name", str)]),
    "/likeness": defstruct("Likeness", [("number", int), ("other", int)]),
    "/export": defstruct("Export", [("folder", str), ("numbers", list[int] | None)]),
}


class Refused(Exception):  # noqa: N818  (an answer, not a failure of the program)
    """A request that is answered with a status and a reason."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Reply:
    """An answer."""

    content: bytes
    kind: str
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def json_reply(values: Json, status: HTTPStatus = HTTPStatus.OK) -> Reply:
    """Return plain values as an answer."""
    return Reply(json.dumps(values).encode(), "application/json", status)


def error_reply(status: HTTPStatus, reason: str) -> Reply:
    """Return a reason, in one line, as an answer."""
    return json_reply({"error": " ".join(reason.split())}, status)


class Server(ThreadingMixIn, TCPServer):
    """Serves a site at `url`, with a thread per connection, until a change under way is done."""

    daemon_threads = True  # browsers open connections that they may never use
    allow_reuse_address = os.name == "posix"  # elsewhere, two servers could share a port
    request_queue_size = 128
    site: RunSite

    def __init__(
        self,
        *,
        host: str = LOOPBACK[0],
        port: int = 0,
        url: str = "",  # where a proxy has the page, if there is one
        log: Callable[[str], None],
    ) -> None:
        self.log, self.context = log, copy_context()
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), RequestHandler)
        except (OSError, OverflowError, TypeError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise PortError(
                f"cannot listen on port {port} of {host} ({why}); choose another --port, or leave "
                "it out to get one that is free"
            ) from error
        self.port = int(self.server_address[1])
        self.token = secrets.token_hex(16)
        self.cookie = f"nearkin-{self.port}"  # browsers send cookies to all ports of a host
        names = LOOPBACK if host in LOOPBACK else (host,)  # the only ones that are answered
        # Without the port, which is another where the server is reached through a forward.
        self.schemes = {_in_address(name).lower(): "http" for name in names}
        """How browsers reach each host that is answered."""
        base = url or f"http://{_in_address(host)}:{self.port}"
        proxy = urlsplit(base)
        self.schemes[_in_address(proxy.hostname or "")] = proxy.scheme
        self.url = f"{base.rstrip('/')}{START}{self.token}"

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer with messages in the words of the program that has opened the server."""
        handle = super().process_request_thread
        self.context.copy().run(handle, request, client_address)

    def serve(self, site: RunSite) -> None:
        """Answer requests until interrupted or shut down."""
        self.site = site
        try:
            self.serve_forever()
        finally:
            site.finish()

    @override
    def shutdown_request(self, request: Any) -> None:
        deadline = time.monotonic() + LINGER
        with suppress(OSError):
            request.shutdown(socket.SHUT_WR)
            request.settimeout(LINGER)
            while time.monotonic() < deadline and request.recv(2**16):
                pass
        self.close_request(request)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # a client that disconnects is no error
            self.log(f"a bug in nearkin: {type(error).__name__}: {error}")


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class RequestHandler(BaseHTTPRequestHandler):
    """Answers the one request of a connection."""

    server: Server
    timeout = TIMEOUT

    def do_GET(self) -> None:
        """Send the page, its classes or an image."""
        self._answer(self._get)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        """Search, compare two images, or change the run."""
        self._answer(self._post)

    def _answer(self, reply_to_page: Callable[[], Reply]) -> None:
        try:
            self._check_origin()
            reply = self._log_in() or reply_to_page()
        except Refused as error:
            reply = error_reply(error.status, str(error))
        except NearkinError as error:
            mistaken = isinstance(error, UsageError | DataError)
            status = HTTPStatus.BAD_REQUEST if mistaken else HTTPStatus.CONFLICT
            reply = error_reply(status, str(error))
        except Exception as error:
            self.server.log(f"error: a bug in nearkin: {type(error).__name__}: {error}")
            reply = error_reply(
                HTTPStatus.INTERNAL_SERVER_ERROR, "a bug in nearkin; see the terminal"
            )
        self._send(reply)

    def _check_origin(self) -> None:
        """Refuse what no browser sends to this server on behalf of its own page."""
        plain = f"{self.command} {self.path} {self.request_version}"  # the parser repairs others
        chunked = "Transfer-Encoding" in self.headers
        if self.requestline != plain or self.headers.defects or chunked:
            raise Refused(HTTPStatus.BAD_REQUEST, "malformed request")
        (host, *more) = self.headers.get_all("Host") or [""]
        name = HOST.fullmatch(host)
        # DNS rebinding: a name of somebody else
        if more or name is None or name[1].lower() not in self.server.schemes:
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, "this is another host")
        if self.command == "POST" and (
            self.headers.get_all("Origin") != [f"{self.server.schemes[name[1].lower()]}://{host}"]
            or self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin"
        ):
            raise Refused(HTTPStatus.FORBIDDEN, "only the page itself may send this")

    def _log_in(self) -> Reply | None:
        """Exchange the token of the start address for the cookie that all else requires."""
        if self.command != "POST" and self.path.startswith(START):
            if self._is_token(self.path.removeprefix(START)):
                cookie = f"{self.server.cookie}={self.server.token}"
                # Not Strict, or a link in the page of another site, as of JupyterLab, is refused.
                cookie += "; HttpOnly; SameSite=Lax; Path=/"
                # Relative, as a proxy may have put the page anywhere.
                headers = {"Location": ".", "Set-Cookie": cookie}
                return Reply(b"", "text/plain", HTTPStatus.SEE_OTHER, headers=headers)
        elif any(map(self._is_token, self._cookies())):
            return None
        reason = "no access; open the address that nearkin explore has printed"
        raise Refused(HTTPStatus.FORBIDDEN, reason)

    def _cookies(self) -> list[str]:
        """Every value of this server's cookie, among those of others, which may be malformed."""
        sent = [one for header in self.headers.get_all("Cookie", []) for one in header.split(";")]
        pairs = [one.strip().partition("=") for one in sent]
        return [value for name, _, value in pairs if name == self.server.cookie]

    def _is_token(self, value: str) -> bool:
        return secrets.compare_digest(value.encode(), self.server.token.encode())

    def _get(self) -> Reply:
        site = self.server.site
        if self.path == "/":
            own = {POLICY: f"{site.policy}; frame-ancestors 'none'"}
            return Reply(site.page.encode(), "text/html; charset=utf-8", headers=own)
        if self.path == "/classes":
            return json_reply(site.classes())
        for path, (method, kind) in CONTENT.items():
            if match := path.fullmatch(self.path):
                content = getattr(site, method)(int(match[1]))
                if content is not None:
                    return Reply(content, kind)
        raise Refused(HTTPStatus.NOT_FOUND, "not found")

    def _post(self) -> Reply:
        site = self.server.site
        # Numbers and names mean others in another run, or in this one with images added.
        if self.headers.get("X-Nearkin-Site") != site.id:
            raise Refused(HTTPStatus.CONFLICT, "this page is of an earlier server; reload it")
        if self.path == "/search":
            return json_reply(site.search(self._body()))
        if self.path not in REQUESTS:
            raise Refused(HTTPStatus.NOT_FOUND, "not found")
        try:
            request: Any = msgspec.json.decode(self._body(), type=REQUESTS[self.path])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, f"malformed request: {error}") from error
        return json_reply(getattr(site, self.path[1:])(**msgspec.structs.asdict(request)))

    def _body(self) -> bytes:
        lengths = self.headers.get_all("Content-Length", [])
        if not lengths:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing")
        if len(lengths) > 1 or not re.fullmatch("[0-9]{1,18}", lengths[0]):
            raise Refused(HTTPStatus.BAD_REQUEST, "malformed request")
        if (length := int(lengths[0])) > MAX_BODY:
            largest = f"larger than {MAX_BODY >> 20} MiB"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, largest)
        body = b""
        with suppress(OSError):
            body = self.rfile.read(length)
        if len(body) < length:
            raise Refused(HTTPStatus.BAD_REQUEST, "incomplete request")
        return body

    def _send(self, reply: Reply) -> None:
        self.request_version = self.protocol_version  # older ones would get no headers
        self.close_connection = True
        self.connection.settimeout(ANSWER_TIMEOUT)
        self.send_response_only(reply.status)
        own = {"Content-Type": reply.kind, "Content-Length": str(len(reply.content))}
        for name, value in {**HEADERS, **own, **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.content)

    @override
    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """Answer what the parser of requests refuses, such as other methods."""
        self._send(error_reply(HTTPStatus(code), HTTPStatus(code).phrase))

    @override
    def log_message(self, *_: object) -> None:
        """Log nothing: the address of a request may hold the token."""
