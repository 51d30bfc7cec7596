"""A page in headless Chromium, a small map to show in it, and a server that keeps its promises."""

import io
import json
import shutil
import threading
from contextlib import contextmanager
from functools import cached_property, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from nearkin.report.page.html import document
from nearkin.report.page.map import Coloring, ImageMap, map_section, script

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PADDING = 36
WIDE = 20
"""Images in a row of the small map."""

in_a_browser = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
    pytest.mark.skipif(sync_playwright is None, reason="there is no playwright"),
]

HOSTILE = [
    "<img src=x onerror=alert(1)>.png",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "</script><script>alert(1)</script>",
    "</style></title></textarea><!--",
    "http://example.org/?a=1&lt;b",
    "a\nb\tc\x1b[31m\0",
    "\u202egnp.exe\u2066",
    "caf\udce9 \ud83d",
    "=cmd|' /C calc'!A0 {{7*7}} %2e%2e",
    "猫 كلب é",
    " ",
]


@contextmanager
def chromium():
    """One browser, for any number of pages."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def tile_color(number):
    return (12 * (number % WIDE), 16 * (number // WIDE) % 256, 120)


def sheet(tiles, columns):
    """Tiles side by side, as WebP."""
    side = tiles.shape[1]
    rows = -(-len(tiles) // columns)
    whole = np.zeros((rows * columns, side, side, 3), np.uint8)
    whole[: len(tiles)] = tiles
    grid = whole.reshape(rows, columns, side, side, 3).swapaxes(1, 2)
    file = io.BytesIO()
    Image.fromarray(grid.reshape(rows * side, columns * side, 3)).save(file, "webp", quality=80)
    return file.getvalue()


def small_map(names=None, count=300, **changes):
    """Images on a grid, each of one color of its own, and of neighbors drawn at random."""
    rng = np.random.default_rng(0)
    rows = np.arange(count)
    xy = np.stack([rows % WIDE, -(rows // WIDE)], axis=1).astype(np.float64)
    others = np.stack([rng.permutation(np.delete(rows, row))[:6] for row in rows])
    colors = np.array([tile_color(row) for row in rows], np.uint8)
    tiles = np.broadcast_to(colors[:, None, None], (count, 16, 16, 3))
    third = (3 * (rows % WIDE) // WIDE).astype(np.int64)
    score = np.where(rows < 3, np.nan, rows / count).astype(np.float32)
    parts = dict(
        number=10 + 2 * rows,
        names=tuple(names or (f"animals/{row:03d}.jpg" for row in rows)),
        xy=xy,
        neighbors=others,
        similarity=np.tile(np.linspace(0.95, 0.2, 6, dtype=np.float32), (count, 1)),
        colorings=(
            Coloring("Class", third, ("new-1", "new-2", "dog"), "What was found."),
            Coloring("Upper", (rows < count // 2).astype(np.int64) - 1, ("yes",)),
            Coloring("Score", score, (), "How sure."),
        ),
        sheets=tuple(sheet(tiles[start : start + 64], 8) for start in range(0, count, 64)),
        side=16,
        columns=8,
        per_sheet=64,
        total=count,
    )
    return ImageMap(**parts | changes)


def page_of(image_map, *, served=False, files=""):
    return document(
        title="What was learned",
        kicker="nearkin train",
        lead="A test.",
        sections=[("Map", map_section(image_map, files))],
        script=script(),
        served=served,
        files=bool(files),
    )


class OpenPage:
    """A page that is open in the browser."""

    def __init__(self, browser, address, *, width=1280, height=900, clock=False, **options):
        size = {"width": width, "height": height}
        self.context = browser.new_context(viewport=size, **options)
        self.page = self.context.new_page()
        self.requests, self.complaints = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        if clock:
            self.page.clock.install()
        self.page.goto(address)
        self.page.evaluate("document.getElementById('map-explorer').scrollIntoView()")
        self.settle()

    def settle(self):
        """Wait until the changes have been drawn."""
        self.page.evaluate(
            "() => new Promise((f) => requestAnimationFrame(() => requestAnimationFrame(f)))"
        )

    def until(self, truth):
        """Wait for it; the page's policy keeps a browser from asking again by itself."""
        for _ in range(500):
            if self.page.evaluate(truth):
                return
            self.page.wait_for_timeout(20)
        raise AssertionError(truth)

    def find(self, selector):
        return self.page.locator(selector)

    def text(self, selector):
        return self.find(selector).inner_text()

    def texts(self, selector):
        return self.find(selector).all_inner_texts()

    @property
    def live_text(self):
        return self.find("#map-live").text_content()

    @cached_property
    def box(self):
        return self.find("#map-canvas").bounding_box()

    def spot(self, image_map, row):
        """Where an image lies in the window while the whole map is shown."""
        low, high = image_map.xy.min(axis=0), image_map.xy.max(axis=0)
        size = np.array([self.box["width"], self.box["height"]])
        scale = ((size - 2 * PADDING) / (high - low)).min()
        x, y = (image_map.xy[row] - (low + high) / 2) * scale
        return self.box["x"] + size[0] / 2 + x, self.box["y"] + size[1] / 2 - y

    def click(self, image_map, row):
        self.page.mouse.click(*self.spot(image_map, row))
        self.settle()

    def pixels(self):
        """The window."""
        return np.asarray(Image.open(io.BytesIO(self.page.screenshot())).convert("RGB"))

    def color(self, x, y):
        self.page.mouse.move(2, 2)
        self.settle()
        return tuple(self.pixels()[round(y), round(x)].tolist())

    def turns(self, at, color):
        """Wait until a place has a color, nearly: thumbnails are stored with loss."""
        for _ in range(100):
            pixel = self.color(*at)
            if np.allclose(pixel, color, atol=12):
                return
            self.page.wait_for_timeout(20)
        raise AssertionError(f"{at} is {pixel}, not {color}")


class Stub(BaseHTTPRequestHandler):
    """Answers as the server of a page does, and records what is sent to it."""

    def __init__(self, held, *args):
        self.held = held
        super().__init__(*args)

    def do_GET(self):
        if self.path == "/":
            return self.answer(self.held["page"].encode(), "text/html; charset=utf-8")
        if self.path == "/classes":
            return self.reply(self.held["classes"])
        return self.answer(self.held["image"], "image/webp")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/search":
            self.held["searched"] = body
            return self.reply(self.held["search_result"])
        arguments = json.loads(body)
        self.held["requests"].append((self.path, arguments))
        if "refuse" in self.held:
            return self.reply({"error": self.held["refuse"]}, 409)
        return self.reply(getattr(self, self.path.strip("/"))(**arguments))

    def name(self, clusters, name):
        for one in self.held["classes"]["classes"]:
            if one["cluster"] in clusters:
                one["name"] = name
        return self.held["classes"]

    def split(self, numbers, name):
        classes = self.held["classes"]
        made = {"cluster": "new-9", "name": name, "kind": "novel", "size": len(numbers)}
        classes["classes"].append(made)
        classes["cluster_of"] |= {str(number): "new-9" for number in numbers}
        return classes

    def export(self, folder, numbers):
        return {"folder": f"/runs/1/exports/{folder}", "images": len(numbers or range(300))}

    def reply(self, value, status=200):
        self.answer(json.dumps(value).encode(), "application/json", status)

    def answer(self, content, kind, status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def serving(image_map):
    """The page of a map with a server behind it: its address, and all that the server holds."""
    clusters = [("new-1", "novel"), ("new-2", "novel"), ("dog", "known")]
    classes = [dict(cluster=name, name="", kind=kind, size=100) for name, kind in clusters]
    of = image_map.colorings[0].values.tolist()
    held = {
        "page": page_of(image_map, served=True),
        "image": sheet(np.full((1, 300, 300, 3), 90, np.uint8), 1),
        "classes": {
            "editable": True,
            "classes": classes,
            "cluster_of": {
                str(number): clusters[each][0]
                for number, each in zip(image_map.number.tolist(), of)
            },
        },
        "requests": [],
    }
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Stub, held)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", held
        server.shutdown()
        thread.join()
