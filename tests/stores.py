"""Stores over real HTTP: files of a dictionary, or another server behind a proxy that fails."""

import hashlib
import http.client
import io
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
from builders import encoded, tar
from pyarrow import parquet

OWN = ("content-length", "transfer-encoding", "connection", "date", "server")


def healthy(_method, _path):
    return ""


class Store:
    """Serves `files`, or what `upstream` answers.

    `fault(method, path)` says what goes wrong: "" nothing, "drop" no answer, "cut" half of it,
    "wait 3" seconds before it, or a status such as "503".
    """

    def __init__(self, files=None, upstream=None):
        self.files, self.upstream, self.fault = files or {}, upstream, healthy
        self.requests = []  # Method and path of each

    def answer(self, method, path, headers, body):
        """Status, headers and content."""
        if self.upstream:
            connection = http.client.HTTPConnection(*self.upstream)
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        name = unquote(path.partition("?")[0]).lstrip("/")
        if name in self.files:
            return self._file(self.files[name], headers.get("Range", ""))
        below = [other[len(name) :] for other in self.files if other.startswith(name)]
        if not below or not name.endswith("/"):
            return 404, [], b""
        entries = {other.partition("/")[0] + "/" * ("/" in other) for other in below}
        page = "".join(f'<a href="{quote(entry)}">{entry}</a>' for entry in sorted(entries))
        return 200, [("Content-Type", "text/html")], page.encode()

    def _file(self, content, wanted):
        headers = [("ETag", hashlib.sha256(content).hexdigest())]
        if not wanted:
            return 200, headers, content
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        return 206, headers, content[int(first) : int(last or len(content)) + 1]


class Faults:
    """Fails the first requests for each file with one of these parts in its name."""

    def __init__(self, fault, times, *parts):
        self.fault, self.times, self.parts, self.count = fault, times, parts, {}

    def __call__(self, method, path):
        if method != "GET" or (self.parts and not any(part in path for part in self.parts)):
            return ""
        self.count[path] = self.count.get(path, 0) + 1
        return self.fault if self.count[path] <= self.times else ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def respond(self):
        store = self.server.store
        store.requests.append((self.command, self.path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = store.fault(self.command, self.path)
        if fault.startswith("wait"):
            time.sleep(float(fault.split()[1]))
        if fault == "drop":
            self.close_connection = True
        elif fault.isdecimal():
            self.send(int(fault), [], b"", "")
        else:
            self.send(*store.answer(self.command, self.path, self.headers, body), fault)

    def send(self, status, headers, content, fault):
        length = {name.lower(): value for name, value in headers}.get("content-length")
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in OWN:
                self.send_header(name, value)
        if status != 204:
            head = self.command == "HEAD" and length
            self.send_header("Content-Length", length if head else str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)
        self.close_connection = self.close_connection or fault == "cut"

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = respond  # noqa: N815

    def handle(self):
        with suppress(OSError, ValueError):  # the other side has closed the connection
            super().handle()

    def log_message(self, *message):
        pass


@contextmanager
def serving(store):
    """The address that a store answers at."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close, server.store = True, False, store
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        yield "http://{}:{}".format(*server.server_address)
        server.shutdown()


def jpeg(seed, size=(90, 80)):
    return encoded(seed, size, "JPEG")


IMAGES = {f"{('cat', 'dog')[n % 2]}/{n:02}.jpg": jpeg(n, (80 + n, 70)) for n in range(8)}
PHOTOS = {f"photos/{name}": content for name, content in IMAGES.items()}
SHARDS = {
    f"shards/{n:06}.tar": tar((name, IMAGES[name]) for name in sorted(IMAGES)[n::2])
    for n in range(2)
}
LIST = b"path,label\n" + "".join(f"{name},{name[:3]}\n" for name in IMAGES).encode()
TABLE = pa.table({"image": list(IMAGES.values()), "label": [name[:3] for name in IMAGES]})
ARRAYS = {"x": np.zeros((4, 9, 9, 3), np.uint8), "y": np.arange(4)}


def written(write):
    """What a function writes into a file."""
    file = io.BytesIO()
    write(file)
    return file.getvalue()


FORMS = {
    "photos/": PHOTOS,
    "photos/cat/00.jpg": PHOTOS,
    "photos.tar": {"photos.tar": tar(IMAGES.items())},
    "shards/": SHARDS,
    "shards/{000000..000001}.tar": SHARDS,
    "photos/list.csv": PHOTOS | {"photos/list.csv": LIST},
    "table.parquet": {"table.parquet": written(lambda file: parquet.write_table(TABLE, file))},
    "arrays.npz": {"arrays.npz": written(lambda file: np.savez(file, **ARRAYS))},
}
