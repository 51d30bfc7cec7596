"""Connections: not more than a number at once, none of which may take its time to ask."""

import io
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import BaseRequestHandler, TCPServer, ThreadingMixIn
from typing import Any, Final

import msgspec
from typing_extensions import Buffer, override

from nearkin.errors import DataError, NearkinError, PortError, UsageError
from nearkin.report.page.site import CHANGES, Refused, Reply, Site, refusal, values

LINGER: Final = 1.0
"""Seconds to take in, and throw away, what a client still sends after it was answered: it reads
no answer on a connection that is closed in its face."""


class Received(io.RawIOBase):
    """What arrives on a connection, up to a moment after which nothing is waited for.

    A timeout of the socket alone starts anew with every byte, which the slow send one by one.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until = time.monotonic()

    def allow(self, seconds: float) -> None:
        """Wait for so long from now on, whatever there was before."""
        self._until = time.monotonic() + seconds

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(memoryview(buffer))


class Connections(ThreadingMixIn, TCPServer):
    """A TCP server with a thread for each connection, up to a number of them.

    Where there are more, the one is closed that has said least for longest; if all have asked
    their question, the new one. To end means to finish what is being answered and no more.

    Args:
        address: Host and port; port 0 is any that is free.
        handler: Answers; it calls `heard` once it knows the question.
        most: How many connections there are at once.
        log: Hears one line about what should not have happened.

    Raises:
        PortError: If nothing can listen there.
    """

    allow_reuse_address = os.name == "posix"  # elsewhere, two servers could share a port
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handler: Callable[[Any, Any, Any], BaseRequestHandler],
        *,
        most: int,
        log: Callable[[str], None],
    ) -> None:
        self.log = log
        self._most = most
        self._waiting: dict[socket.socket, bool] = {}
        """Open connections, the oldest first, and whether each has yet to ask."""
        self._guard = threading.Lock()
        host, port = address
        try:
            super().__init__(address, handler)
        except (OSError, OverflowError, TypeError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise PortError(
                f"cannot listen on port {port} of {host} ({why}); choose another --port, or leave "
                "it out to get one that is free"
            ) from error

    def heard(self, connection: socket.socket) -> None:
        """Note that a connection has asked."""
        with self._guard:
            if connection in self._waiting:
                self._waiting[connection] = False

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            full = len(self._waiting) >= self._most
            slow = next((one for one, waiting in self._waiting.items() if waiting), None)
            if full and slow is not None:
                del self._waiting[slow]
                _end(slow)
            admitted = not full or slow is not None
            if admitted:
                self._waiting[request] = True
        if admitted:
            super().process_request(request, client_address)
        else:
            self.close_request(request)

    @override
    def shutdown_request(self, request: Any) -> None:
        until = time.monotonic() + LINGER
        with suppress(OSError):
            request.shutdown(socket.SHUT_WR)
            request.settimeout(LINGER)
            while time.monotonic() < until and request.recv(2**16):
                pass
        self.close_request(request)

    @override
    def close_request(self, request: Any) -> None:
        with self._guard:
            self._waiting.pop(request, None)
        super().close_request(request)

    @override
    def server_close(self) -> None:
        with self._guard:
            for connection in self._waiting:
                _end(connection)
        super().server_close()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # a client that went away is nobody's error
            self.log(f"a bug in nearkin: {type(error).__name__}: {error}")


def _end(connection: socket.socket) -> None:
    """Whoever waits for it in another thread then waits no longer."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


LOOPBACK: Final = ("127.0.0.1", "localhost")
"""What the browsers of a computer may call it."""
MOST_BYTES: Final = 32 * 2**20
"""Of what a browser sends."""
MOST_CONNECTIONS: Final = 64
PATIENCE: Final = 10.0
"""Seconds for the head of a request."""
TRANSFER: Final = 300.0
"""Seconds for an answer, and for what is sent by those who have the token."""
START: Final = "/?token="
PICTURE: Final = re.compile("/(image|thumbnail)/(0|[1-9][0-9]{0,8})")
FIXED: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",  # tomorrow, another run may be shown at the same address
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Connection": "close",
}
"""Headers of every answer."""


class Server(Connections):
    """Listens at `url`, and serves a site there.

    Args:
        host: Where to listen; of what is no loopback address, the only name it answers to.
        port: 0 is any that is free.
        patience: Seconds for the head of a request.
        log: Hears one line about what should not have happened.

    Raises:
        PortError: If nothing can listen there.
    """

    site: Site

    def __init__(
        self,
        *,
        host: str = LOOPBACK[0],
        port: int = 0,
        patience: float = PATIENCE,
        log: Callable[[str], None],
    ) -> None:
        super().__init__((host, port), Handler, most=MOST_CONNECTIONS, log=log)
        self.patience = patience
        self.port = int(self.server_address[1])
        self.token = secrets.token_hex(16)
        self.cookie = f"nearkin-{self.port}"  # browsers send cookies to all ports of a host
        names = LOOPBACK if host in LOOPBACK else (host,)
        self.hosts = frozenset(f"{name}:{self.port}" for name in names)
        self.url = f"http://{host}:{self.port}{START}{self.token}"

    def serve(self, site: Site) -> None:
        """Answer whoever asks, until interrupted or shut down."""
        self.site = site
        self.serve_forever()


class Handler(BaseHTTPRequestHandler):
    """Answers the one request of a connection."""

    server: Server

    @override
    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._received = Received(self.connection)
        self._received.allow(self.server.patience)
        self.rfile = io.BufferedReader(self._received)

    def do_GET(self) -> None:
        """Show something."""
        self._answer(self._shown)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        """Look for something, or change it."""
        self._answer(self._done)

    def _answer(self, answered: Callable[[], Reply]) -> None:
        self.server.heard(self.connection)
        try:
            self._refuse_foreign()
            reply = self._started() or answered()
        except Refused as error:
            reply = refusal(error.status, str(error))
        except NearkinError as error:
            mistaken = isinstance(error, UsageError | DataError)
            status = HTTPStatus.BAD_REQUEST if mistaken else HTTPStatus.CONFLICT
            reply = refusal(status, str(error))
        except Exception as error:
            self.server.log(f"error: a bug in nearkin: {type(error).__name__}: {error}")
            reply = refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "a bug in nearkin; see the terminal")
        self._send(reply)

    def _refuse_foreign(self) -> None:
        """Refuse what no browser sends to this server on behalf of its own page."""
        plain = f"{self.command} {self.path} {self.request_version}"  # the parser mends others
        if (
            self.requestline != plain
            or self.headers.defects
            or "Transfer-Encoding" in self.headers
        ):
            raise Refused(HTTPStatus.BAD_REQUEST, "no such request is understood")
        (host, *more) = self.headers.get_all("Host") or [""]
        if more or host not in self.server.hosts:  # a name that somebody else may have made
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, "this is another host")
        if self.command == "POST" and (
            self.headers.get_all("Origin") != [f"http://{host}"]
            or self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin"
        ):
            raise Refused(HTTPStatus.FORBIDDEN, "only the page itself may ask for that")

    def _started(self) -> Reply | None:
        """Turn the token of the start address into the cookie that all else must have."""
        if self.command != "POST" and self.path.startswith(START):
            if self._is_token(self.path.removeprefix(START)):
                cookie = f"{self.server.cookie}={self.server.token}"
                headers = {
                    "Location": "/",
                    "Set-Cookie": f"{cookie}; HttpOnly; SameSite=Strict; Path=/",
                }
                return Reply(b"", "text/plain", HTTPStatus.SEE_OTHER, headers=headers)
        elif any(map(self._is_token, self._cookies())):
            return None
        log = "no access; open the address that nearkin explore has printed"
        raise Refused(HTTPStatus.FORBIDDEN, log)

    def _cookies(self) -> list[str]:
        """Every value of the cookie of this server, among those of others, which may be odd."""
        sent = [one for header in self.headers.get_all("Cookie", []) for one in header.split(";")]
        pairs = [one.strip().partition("=") for one in sent]
        return [value for name, _, value in pairs if name == self.server.cookie]

    def _is_token(self, said: str) -> bool:
        return secrets.compare_digest(said.encode(), self.server.token.encode())

    def _shown(self) -> Reply:
        site = self.server.site
        if self.path == "/":
            policy = f"{site.policy()}; frame-ancestors 'none'"
            return Reply(site.page().encode(), "text/html; charset=utf-8", policy=policy)
        if self.path == "/classes":
            return values(site.classes())
        if asked := PICTURE.fullmatch(self.path):
            size, number = asked.groups()
            found = (site.image if size == "image" else site.thumbnail)(int(number))
            if found is not None:
                return Reply(found, "image/webp")
        raise Refused(HTTPStatus.NOT_FOUND, "there is no such thing here")

    def _done(self) -> Reply:
        if self.path == "/search":
            return values(self.server.site.search(self._body()))
        if self.path not in CHANGES:
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such thing here")
        try:
            change = msgspec.json.decode(self._body(), type=CHANGES[self.path])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            log = f"the request is not understood: {error}"
            raise Refused(HTTPStatus.BAD_REQUEST, log) from error
        return values(change.made(self.server.site))

    def _body(self) -> bytes:
        lengths = self.headers.get_all("Content-Length", [])
        if not lengths:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "say how long it is")
        if len(lengths) > 1 or not re.fullmatch("[0-9]{1,18}", lengths[0]):
            raise Refused(HTTPStatus.BAD_REQUEST, "no such request is understood")
        length = int(lengths[0])
        if length > MOST_BYTES:
            most = f"{MOST_BYTES >> 20} MiB"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"send no more than {most}")
        self._received.allow(TRANSFER)
        try:
            body = self.rfile.read(length)
        except OSError:
            body = b""
        if len(body) < length:
            raise Refused(HTTPStatus.BAD_REQUEST, "the request did not arrive whole")
        return body

    def _send(self, reply: Reply) -> None:
        self.request_version = self.protocol_version  # to an older one, no headers would be sent
        self.close_connection = True
        self.connection.settimeout(TRANSFER)
        self.send_response_only(reply.status)
        own = {
            "Content-Type": reply.kind,
            "Content-Length": str(len(reply.content)),
            "Content-Security-Policy": reply.policy,
        }
        for name, value in {**FIXED, **own, **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.content)

    @override
    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """What the parser of requests refuses, which includes other methods."""
        self._send(refusal(HTTPStatus(code), HTTPStatus(code).phrase))

    @override
    def log_message(self, *_: object) -> None:
        """Nothing: the address of a request may hold the token."""
