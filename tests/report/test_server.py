"""The server of a page, asked by hostile clients through real sockets."""

import json
import re
import socket
import threading
from contextlib import suppress

import pytest
from browser import HOSTILE, serving

from nearkin.errors import DataError, OutputError, PortError, UsageError, as_typed_words
from nearkin.report.server import RequestHandler, Server
from nearkin.report.site import RunSite

PAGE = "<!doctype html><title>\u732b</title>"
POLICY = "default-src 'none'; script-src 'sha256-AAAA'"
PICTURES = 20


class Shop(RunSite):
    """A site that records its requests."""

    page = PAGE

    def __init__(self, name="7e57"):
        self.id = name
        self.requests = []
        self.error = None
        self._lock = threading.Lock()
        self.log = []
        self.policy = POLICY

    def image(self, number):
        self.requests.append(("image", number))
        return b"RIFF" if number < PICTURES else None

    whole = image

    def details(self, number):
        return b"nearkinDetails(0);" if not number else None

    def sheet(self, number):
        return b"RIFF" if number < PICTURES else None

    def search(self, encoded):
        return self.change("search", len(encoded))

    def classes(self):
        return {"classes": [{"cluster": "new-1", "name": name} for name in HOSTILE]}

    def name(self, clusters, name):
        return self.change("name", clusters, name)

    def split(self, numbers, name):
        return self.change("split", numbers, name)

    def export(self, folder, numbers):
        return self.change("export", folder, numbers)

    def change(self, *what):
        self.requests.append(what)
        if self.error:
            raise self.error
        return {"done": what[0]}


@pytest.fixture(scope="module")
def server():
    """A server that no request may break: all tests but a few ask this one."""
    with serving(Shop()) as server:
        yield server


@pytest.fixture
def site(server):
    site = server.site
    site.requests.clear()
    site.log.clear()
    site.error = None
    return site


def connected(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def received(connection):
    """All that comes until the server closes the connection."""
    data = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(2**16):
            data += more
    return data


def sent(server, request, *, end=False):
    """The answer to some bytes, after which nothing may come; None if there was none."""
    with connected(server) as connection:
        with suppress(ConnectionError):
            connection.sendall(request)
        if end:
            connection.shutdown(socket.SHUT_WR)
        return parsed(received(connection))


def parsed(answer):
    if not answer:
        return None
    head, _, content = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode("ascii").split("\r\n")
    pairs = [line.split(": ", 1) for line in lines]
    headers = dict(pairs)
    assert len(headers) == len(pairs)
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert re.fullmatch(r"HTTP/1\.0 \d{3} .+", status)
    return int(status.split()[1]), headers, content


def head(server, target="/", method="GET", **headers):
    """The lines of a request as the page itself would make it, but for some headers."""
    host = f"127.0.0.1:{server.port}"
    usual = {"Host": host, "Cookie": f"{server.cookie}={server.token}"}
    if method == "POST":
        usual |= {"Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        usual |= {"X-Nearkin-Site": server.site.id}
    changes = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {target} HTTP/1.1"]
    for name, value in {**usual, **changes}.items():
        values = value if isinstance(value, list) else [value] * (value is not None)
        lines += [f"{name}: {one}" for one in values]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def ask(server, target="/", method="GET", body=b"", **headers):
    if method == "POST":
        headers = {"Content_Length": str(len(body)), **headers}
    return sent(server, head(server, target, method, **headers) + body)


def post(server, target, value, **headers):
    return ask(server, target, "POST", json.dumps(value).encode(), **headers)


def error_of(answer, status):
    assert answer is not None
    code, headers, content = answer
    assert (code, headers["Content-Type"]) == (status, "application/json")
    (log,) = json.loads(content).values()
    assert log == " ".join(log.split())
    return log


def test_the_page_gets_what_it_asks_for(server, site):
    assert ask(server)[2].decode() == PAGE
    assert ask(server, "/image/7")[2] == ask(server, "/whole/7")[2] == b"RIFF"
    bodies = {
        "/name": {"clusters": ["new-1", "new-3"], "name": "violins"},
        "/split": {"numbers": [3, 8], "name": ""},
        "/export": {"folder": "all", "numbers": None},
    }
    for target, body in bodies.items():
        assert json.loads(post(server, target, body)[2]) == {"done": target[1:]}
    assert ask(server, "/search", "POST", b"image")[0] == 200
    assert site.requests[-4:] == [
        ("name", ["new-1", "new-3"], "violins"),
        ("split", [3, 8], ""), ("export", "all", None), ("search", 5),
    ]  # fmt: skip


def test_names_arrive_as_they_are_in_plain_ascii(server, site):
    """S12: what browsers make of them is up to the page."""
    content = ask(server, "/classes")[2]
    assert content.isascii()
    assert [row["name"] for row in json.loads(content)["classes"]] == HOSTILE


def test_headers_are_these_and_no_others(server, site):
    """S18."""
    fixed = {
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Connection": "close",
    }
    nothing = "default-src 'none'; base-uri 'none'; form-action 'none'"
    start = server.url.partition(str(server.port))[2]
    cookie = f"nearkin-{server.port}={server.token}; HttpOnly; SameSite=Lax; Path=/"
    expected = {
        "/": ("text/html; charset=utf-8", f"{POLICY}; frame-ancestors 'none'", {}),
        "/image/0": ("image/webp", nothing, {}),
        "/files/0.js": ("text/javascript", nothing, {}),
        "/files/0.webp": ("image/webp", nothing, {}),
        "/files/1.js": ("application/json", nothing, {}),
        "/files/../0.js": ("application/json", nothing, {}),
        "/classes": ("application/json", nothing, {}),
        "/nothing": ("application/json", nothing, {}),
        start: ("text/plain", nothing, {"Location": ".", "Set-Cookie": cookie}),
    }
    for target, (kind, policy, more) in expected.items():
        _, headers, content = ask(server, target)
        own = {"Content-Type": kind, "Content-Security-Policy": policy}
        assert headers == fixed | own | more | {"Content-Length": str(len(content))}
        assert sent(server, head(server, target, "HEAD")) == (ask(server, target)[0], headers, b"")


HOSTS = [
    "evil.example", "evil.example:{port}", "", None, "localhost.evil:{port}", "localhost.:{port}",
    "127.0.0.1.nip.io:{port}", "127.0.0.1:", "[::1", "[::2]:{port}", "127.0.0.1:-1",
    "0.0.0.0:{port}", "127.1:{port}", "2130706433:{port}", "me@127.0.0.1:{port}",
    "127.0.0.1:{port}, evil", "127.0.0.1:{port} ", "127.0.0.1:0{port}", "127.0.0.1:{port}/",
    "127.0.0.1:{port}\r\n evil", ["127.0.0.1:{port}", "127.0.0.1:{port}"],
    ["127.0.0.1:{port}", "evil"], ["evil", "127.0.0.1:{port}"],
]  # fmt: skip


def filled(server, value):
    """A header, or several, or None, with the port of the server in it."""
    templates = [value] if isinstance(value, str) else value
    return None if templates is None else [one.format(port=server.port) for one in templates]


def test_another_host_is_refused(server, site):
    """S13: it is how a page of a stranger's name would come by what is served here."""
    methods = [("GET", host) for host in HOSTS] + [("HEAD", HOSTS[0]), ("POST", HOSTS[0])]
    for method, host in methods:
        status, _, content = ask(server, "/image/1", method, Host=filled(server, host))
        assert (status, site.requests) == (421, []), (method, host)
        assert b"RIFF" not in content
    # All are this computer, also by a forward with another port, and by port 80 without it.
    for host in (
        "127.0.0.1:{}",
        "localhost:{}",
        "LocalHost:{}",
        "[::1]:{}",
        "localhost:1",
        "localhost",
    ):
        host = host.format(server.port)
        assert ask(server, Host=host)[0] == 200
        assert ask(server, "/search", "POST", Host=host, Origin=f"http://{host}")[0] == 200


ORIGINS = [
    "null", "http://evil.example", None, "https://127.0.0.1:{port}", "http://127.0.0.1",
    "http://127.0.0.1:1", "http://localhost:{port}", "http://127.0.0.1:{port}/", "",
    "http://127.0.0.1:{port}.evil", ["http://127.0.0.1:{port}", "http://evil.example"],
]  # fmt: skip


def test_only_the_page_may_change_anything(server, site):
    """S14: other pages' forms are sent without asking first, as text that happens to be JSON."""
    body, plain = {"clusters": ["new-1"], "name": "stolen"}, {"Content_Type": "text/plain"}
    foreign = [{"Origin": filled(server, origin)} for origin in ORIGINS]
    foreign += [{"Sec_Fetch_Site": where} for where in ("cross-site", "same-site", "none", "")]
    for headers in foreign:
        for target in ("/name", "/search"):
            error_of(post(server, target, body, **plain, **headers), 403)
            assert site.requests == [], headers
    assert post(server, "/name", body, **plain)[0] == 200  # the same, from the page
    assert site.requests == [("name", ["new-1"], "stolen")]


def test_other_methods_are_refused(server, site):
    headers = {"Access_Control_Request_Method": "POST", "Origin": "http://evil.example"}
    for method in ("OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "get"):
        error_of(ask(server, "/name", method, **headers), 501)
        assert site.requests == [], method


def test_without_the_token_nothing_is_told(server, site):
    """S15."""
    token, cookie = server.token, server.cookie
    assert re.fullmatch("[0-9a-f]{32}", token)
    wrong = ["", "0" * 32, token[:-1], f"{token}0"]
    values = [*wrong, token.upper(), "\xff\xfe"]
    cookies = [None, *(f"{cookie}={value}" for value in values), f"{cookie} ={token}"]
    cookies += [f"nearkin-1={token}", f'{{"a": "{token}"}}; {token}']
    elsewhere = {"Referer": server.url, "Authorization": f"token {token}", "X-Token": token}
    for headers in [{"Cookie": each} for each in cookies] + [{"Cookie": None, **elsewhere}]:
        for target in ("/", "/image/1", "/classes", f"/image/1?token={token}", "/nothing"):
            error_of(ask(server, target, **headers), 403)
        error_of(ask(server, "/search", "POST", b"image", **headers), 403)
        error_of(ask(server, f"/?token={token}", "POST", **headers), 403)
    for guess in [*wrong, f"{token}&x", f"%{ord(token[0]):x}{token[1:]}"]:
        error_of(ask(server, f"/?token={guess}", Cookie=None), 403)
        error_of(ask(server, f"/?token={guess}"), 403)
    assert site.requests == []


def test_the_start_address_gives_the_cookie_that_opens_the_page(server, site):
    target = server.url.removeprefix(f"http://127.0.0.1:{server.port}")
    status, headers, content = ask(server, target, Cookie=None)
    assert (status, headers["Location"], content) == (303, ".", b"")
    cookie = headers["Set-Cookie"].split(";")[0]
    assert ask(server, Cookie=f'theme="dark; {{; {cookie};other=1')[0] == 200
    assert ask(server, Cookie=["odd", cookie])[0] == 200


def test_two_servers_do_not_meet(server):
    """One browser sends the cookies of both to both."""
    one = server
    with serving(Shop()) as other:
        assert one.token != other.token
        both = f"{one.cookie}={one.token}; {other.cookie}={other.token}"
        assert ask(one, Cookie=both)[0] == ask(other, Cookie=both)[0] == 200
        error_of(ask(one, Cookie=f"{other.cookie}={other.token}"), 403)
        error_of(ask(one, Cookie=f"{one.cookie}={other.token}"), 403)


def test_a_page_of_an_earlier_server_changes_nothing():
    """The cookie of a port goes to whatever run is served there next."""
    with serving(Shop("first")) as first:
        pass
    later = Shop("later")
    with serving(later, port=first.port) as server:
        for page in ("first", None, ""):
            for target in ("/label", "/search"):
                answer = ask(server, target, "POST", b"{}", X_Nearkin_Site=page)
                assert "reload it" in error_of(answer, 409)
        assert later.requests == []
        assert ask(server, "/search", "POST", X_Nearkin_Site="later")[0] == 200


PATHS = [
    "../../etc/passwd", "%2e%2e%2fetc/passwd", "1\0", "1%00.png", "//etc/passwd", "-1", "+1", "%31",
    str(10**12), str(10**100), "1e3", "1.0", "0x1", "01", "1_0", " 1", "1 ", "1/", "1?", "1#", "",
    "\u0661".encode().decode("latin-1"), "\xb2", "1;a=b", "999999999", str(PICTURES), "1\t", "1\x0b",
]  # fmt: skip


def test_images_are_had_by_number_only(server, site):
    """S16."""
    for path in PATHS:
        for kind in ("image", "whole"):
            response = ask(server, f"/{kind}/{path}")
            assert response[0] == (400 if {" ", "\t", "\x0b"} & set(path) else 404), path
            assert b"RIFF" not in response[2]
    assert {number for _, number in site.requests} == {PICTURES, 999_999_999}


TARGETS = [
    "/../", "/image", "/Image/1", "//image/1", "/index.html", "/classes/", "/classes?",
    "/?", "/?x=1", "/.%2e/", "http://127.0.0.1/image/1", "http://evil.example/", "*", "image/1",
    "/%69mage/1", "/favicon.ico", "/search", "/name", "/static/../../x", "\0",
]  # fmt: skip


def test_there_is_nothing_else(server, site):
    for target in TARGETS:
        expected = 400 if target.startswith("//") else 404
        assert ask(server, target)[0] == expected, target
        if target not in ("/search", "/name"):
            assert ask(server, target, "POST", b"{}")[0] == expected, target
    assert site.requests == []


LINES = [
    "Transfer-Encoding: chunked", "Transfer-Encoding: identity", "transfer-encoding:\tchunked",
    "Content-Length: 0", "Content-Length: 5", "Content-Length : 0", "Content-Length", ": x",
    "Host : evil", "\x0bHost: evil", "Transfer-Encoding : chunked",
]  # fmt: skip


def test_a_request_whose_end_can_be_disputed_is_refused(server, site):
    """Beside the usual length; nothing that follows it is ever taken for a second request."""
    second = head(server, "/image/1")
    for line in LINES:
        request = head(server, "/search", "POST", Content_Length="0").replace(
            b"\r\n\r\n", f"\r\n{line}\r\n\r\n".encode()
        )
        error_of(sent(server, request + b"0\r\n\r\n" + second), 400)
        assert site.requests == [], line
    lasting = head(server, "/image/1", Connection="keep-alive")
    assert sent(server, lasting * 3)[2] == b"RIFF"
    assert site.requests == [("image", 1)]


def test_a_body_needs_a_length_that_is_a_plain_number_its_own_and_not_too_large(server, site):
    for length in ("+5", "-1", "0x5", "5, 5", "5 5", "", "1e1", "\xb2", "9" * 5000):
        error_of(ask(server, "/search", "POST", b"hello", Content_Length=length), 400)
        assert site.requests == [], length
    error_of(ask(server, "/search", "POST", Content_Length=None), 411)
    error_of(ask(server, "/search", "POST", Content_Length=str(32 * 2**20 + 1)), 413)
    error_of(ask(server, "/search", "POST", Content_Length=str(2**30)), 413)
    assert site.requests == []
    request = head(server, "/search", "POST", Content_Length="10") + b"half"
    error_of(sent(server, request, end=True), 400)
    assert site.requests == []
    assert ask(server, "/search", "POST", bytes(32 * 2**20))[0] == 200
    assert site.requests == [("search", 32 * 2**20)]


REQUESTS = [
    (b"GET /\r\n\r\n", 400), (b"GET / HTTP/0.9\r\n\r\n", 421), (b"GET / HTTP/2.0\r\n\r\n", 505),
    (b"GET / HTTP/1.1\r\n\r\n", 421), (b"GET /  HTTP/1.1\r\n\r\n", 400), (b"GET\r\n\r\n", 400),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505), (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
    (b"GET / HTTP/1.1.1\r\n\r\n", 400), (b"GET / http/1.1\r\n\r\n", 400),
    (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
    (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431),
    (b"GET / HTTP/1.1\r\nX: " + b"a" * 2**20 + b"\r\n\r\n", 431),
]  # fmt: skip


def test_what_is_no_request_is_refused(server, site):
    for request, status in REQUESTS:
        error_of(sent(server, request), status)
        assert ask(server)[0] == 200, request[:40]


BODIES = [
    b"", b"{", b"[]", b"null", b"7", b"\xff", b'"a"', b"[" * 100_000, b'{"a":' * 100_000,
    b'{"numbers": [1], "name": null}', b'{"numbers": [true], "name": ""}', b'{"numbers": [1]}',
    b'{"numbers": [1.5], "name": ""}', b'{"numbers": ["1"], "name": ""}', b'{"name": ""}',
    b'{"numbers": [NaN], "name": ""}', b'{"numbers": 3, "name": ""}', b'{"numbers": {}, "name": ""}',
    b'{"numbers": [1], "name": "\xff"}', b'{"numbers": [1], "name": "\\ud800"}',
]  # fmt: skip


def test_what_is_said_has_to_be_of_the_right_kind(server, site):
    for body in BODIES:
        error_of(ask(server, "/split", "POST", body), 400)
        assert (site.requests, site.log) == ([], []), body[:40]
    assert ask(server, "/split", "POST", b'{"numbers": [1], "name": ""}')[0] == 200


def test_what_goes_wrong_is_told_in_one_line(server, site):
    for error, status, says in (
        (UsageError("no such\nclass"), 400, "no such class"),
        (DataError("no image"), 400, "no image"),
        (OutputError("in use by process 7"), 409, "in use by process 7"),
        (RuntimeError("/home/me/secret"), 500, "a bug in nearkin; see the terminal"),
        (OSError("disk"), 500, "a bug in nearkin; see the terminal"),
    ):
        site.error = error
        site.log.clear()
        assert error_of(ask(server, "/search", "POST"), status) == says
        logged = f"error: a bug in nearkin: {type(error).__name__}: {error}"
        assert site.log == [logged] * (status == 500)


def test_what_goes_wrong_is_told_in_the_words_of_who_has_opened_the_server(server, site):
    with as_typed_words(), serving(Shop()) as typed:
        for opened, says in ((typed, "another -o"), (server, "another output")):
            opened.site.error = OutputError("cannot write x; choose another -o")
            answer = ask(opened, "/search", "POST")
            assert error_of(answer, 409) == f"cannot write x; choose {says}"


def test_the_slow_and_the_large_keep_nobody_from_being_answered(server, site, monkeypatch):
    """S17: fifty that never finish to ask, a claim of 1 GB, and a header without an end."""
    monkeypatch.setattr(RequestHandler, "timeout", 1.5)
    slow = [connected(server) for _ in range(50)]
    for place, connection in enumerate(slow):
        connection.sendall([b"G", b"GET / HTTP/1.1\r\nHost:", b""][place % 3])
    assert ask(server)[0] == 200  # while they wait
    for connection in slow:
        assert received(connection) == b""
        connection.close()
    large = head(server, "/search", "POST", Content_Length=str(2**30)) + b"x" * 1000
    error_of(sent(server, large), 413)
    error_of(sent(server, b"GET / HTTP/1.1\r\nX: " + b"a" * 2**20), 431)
    assert ask(server)[0] == 200
    assert site.log == []


class Thinking(Shop):
    """Answers no search before `go_on` is set."""

    def __init__(self):
        super().__init__()
        self.started, self.go_on = threading.Semaphore(0), threading.Event()

    def search(self, encoded):
        with self._lock:
            self.started.release()
            assert self.go_on.wait(60)
            return super().search(encoded)


def test_a_change_under_way_is_finished_before_the_end_and_no_other_begins():
    site = Thinking()
    # The second connection never asks for anything.
    with serving(site) as server, connected(server) as asking, connected(server):
        asking.sendall(head(server, "/search", "POST", Content_Length="0"))
        assert site.started.acquire(timeout=60)
        threading.Timer(0.2, site.go_on.set).start()
    assert site.requests == [("search", 0)]
    assert not site._lock.acquire(blocking=False)


def test_a_port_in_use_is_named_and_what_is_no_port_or_host():
    with serving(Shop()) as server:
        with pytest.raises(PortError, match=f"port {server.port} of 127.0.0.1 .*choose another"):
            Server(port=server.port, log=print)
        assert ask(server)[0] == 200
    with serving(Shop(), port=server.port) as again:
        assert again.port == server.port
    none = [("127.0.0.1", 70_000), ("127.0.0.1", -1), ("192.0.2.1", 0), ("\u2026" * 99, 0)]
    for host, port in none:
        with pytest.raises(PortError, match="cannot listen"):
            Server(host=host, port=port, log=print)


def test_another_host_has_to_be_called_by_its_name():
    """127.0.0.2 is this computer, too, and stands for an address that others can reach."""
    with serving(Shop(), host="127.0.0.2") as server:
        for name, status in (("127.0.0.2", 200), ("localhost", 421), ("127.0.0.1", 421)):
            with socket.create_connection(("127.0.0.2", server.port), timeout=60) as connection:
                connection.sendall(head(server, Host=f"{name}:{server.port}"))
                assert parsed(received(connection))[0] == status, name


def test_a_proxy_that_is_named_may_ask_in_its_own_name_and_scheme():
    hub, usual = "hub.example.org", {"Origin": "https://hub.example.org"}
    with serving(Shop(), url="https://Hub.example.org/user/jane/proxy/8000/") as server:
        start = f"https://Hub.example.org/user/jane/proxy/8000/?token={server.token}"
        assert server.url == start
        assert ask(server, Host=hub)[0] == ask(server)[0] == 200
        assert ask(server, Host="other.example.org")[0] == 421
        assert ask(server, "/search", "POST", b"image", Host=hub, **usual)[0] == 200
        assert ask(server, "/search", "POST", b"image")[0] == 200  # without it
        for origin in ("http://hub.example.org", "https://evil.example"):
            answer = ask(server, "/search", "POST", b"image", Host=hub, Origin=origin)
            error_of(answer, 403)


def test_nothing_is_printed_whatever_is_asked(server, site, capfd):
    for target in (server.url.partition(str(server.port))[2], "/\x1b[31m", "/?token=x", "\0"):
        ask(server, target)
    assert capfd.readouterr() == ("", "")
    assert site.log == []
