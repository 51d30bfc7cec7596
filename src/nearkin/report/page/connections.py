"""Connections: not more than a number at once, none of which may take its time to ask."""

import io
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from socketserver import BaseRequestHandler, TCPServer, ThreadingMixIn
from typing import Any, Final

from typing_extensions import Buffer, override

from nearkin.errors import PortError

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
        told: Hears one line about what should not have happened.

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
        told: Callable[[str], None],
    ) -> None:
        self.told = told
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
            self.told(f"a bug in nearkin: {type(error).__name__}: {error}")


def _end(connection: socket.socket) -> None:
    """Whoever waits for it in another thread then waits no longer."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
