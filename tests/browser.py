"""A page in headless Chromium, a small map to show in it, and a server that keeps its promises."""

import base64
import dataclasses
import io
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from builders import as_bytes
from msgspec.structs import replace
from PIL import Image

from nearkin.errors import OutputError
from nearkin.report.page.blocks import Cards, ClassView, Page, Tile, Tiles
from nearkin.report.page.html import policy, render
from nearkin.report.page.map import Coloring, ImageMap, script
from nearkin.report.server import Server
from nearkin.report.site import RunSite

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as BrowserPage

PADDING = 36
WIDE = 20
"""Images in a row of the small map."""

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


def written_out(name):
    """A hostile name as pages show it: with escapes for what cannot be seen."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


@contextmanager
def chromium() -> "Iterator[Browser]":
    """One browser, for any number of pages."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        path, options = shutil.which("chromium"), ["--no-sandbox"]
        browser = driver.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: "Browser", file: Path, *, width: int = 1280, **options
) -> "Iterator[BrowserPage]":
    """A page that is one file: it loads nothing else, and the browser complains of nothing."""
    complaints, requests = [], []
    with browser.new_context(viewport={"width": width, "height": 900}, **options) as context:
        page = context.new_page()
        listen(page, complaints, requests)
        page.goto(file.as_uri())
        yield page
    assert complaints == []
    assert [url for url in requests if not url.startswith(("data:", "blob:"))] == [file.as_uri()]


def listen(page: "BrowserPage", complaints: list[str], requests: list[str]) -> None:
    """Note what the browser complains of, and what it asks for."""
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))


def tile_color(number):
    return (12 * (number % WIDE), 16 * (number // WIDE) % 256, 120)


def sheet(tiles, columns):
    """Tiles side by side, as WebP."""
    side, rows = tiles.shape[1], -(-len(tiles) // columns)
    whole = np.zeros((rows * columns, side, side, 3), np.uint8)
    whole[: len(tiles)] = tiles
    grid = whole.reshape(rows, columns, side, side, 3).swapaxes(1, 2)
    image = Image.fromarray(grid.reshape(rows * side, columns * side, 3))
    return as_bytes(image, "WEBP", quality=80)


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
        similarity=np.tile(
            np.linspace(0.95, 0.2, 6, dtype=np.float32)[: others.shape[1]], (count, 1)
        ),
        regions=np.array([149]),
        colorings=(
            Coloring("Class", third, ("new-1", "new-2", "dog"), "What was found.", "class"),
            Coloring("Upper", (rows < count // 2).astype(np.int64) - 1, ("yes",)),
            Coloring("Score", score, (), "How sure.", "score"),
        ),
        sheets=tuple(sheet(tiles[start : start + 64], 8) for start in range(0, count, 64)),
        side=16,
        columns=8,
        per_sheet=64,
        total=count,
    )
    return ImageMap(**parts | changes)


def page_of(image_map, *, site="", files=""):
    page = Page("nearkin train", "What was learned", "A test.", ())
    return render(page, image_map, site=site, files=files)


SMALL = small_map()


def linked_page():
    """A discovery whose tiles, number 104 above all, are on the map."""
    gray = "data:image/webp;base64," + base64.b64encode(Kept(SMALL).gray).decode()
    tile = Tile("animals/047.jpg", gray, 0.9, number=104)
    view = ClassView("new-2", 105, tile, (tile,), on_map="new-2")
    known = replace(view, name="dog", on_map="dog")
    sections = (
        ("Findings", ()),
        ("Novel classes", (Cards("new", (view,), 300),)),
        ("Known classes", (Cards("known", (known,), 300),)),
        ("Images to look at", (Tiles("Label these first", "", (tile,)),)),
    )
    return render(Page("nearkin discover", "Animals", "A test.", sections), SMALL)


class OpenPage:
    """A page that is open in the browser."""

    def __init__(self, browser, address, *, width=1280, height=900, clock=False, **options):
        size = {"width": width, "height": height}
        self.context = browser.new_context(viewport=size, **options)
        self.page = self.context.new_page()
        self.requests, self.complaints = [], []
        listen(self.page, self.complaints, self.requests)
        if clock:
            self.page.clock.install()
        self.page.goto(address)
        self.page.evaluate("document.getElementById('map-explorer').scrollIntoView()")
        self.settle()

    def end(self, origin="file:"):
        """Close it: the browser has complained of nothing, and asked nobody else for anything."""
        self.context.close()
        assert self.complaints == []
        assert all(url.startswith((origin, "blob:")) for url in self.requests)

    def settle(self):
        """Wait until the changes have been drawn."""
        twice = "requestAnimationFrame(() => requestAnimationFrame(f))"
        self.page.evaluate(f"() => new Promise((f) => {twice})")

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

    def pixels(self, **options):
        """The window, or a part of it."""
        shot = self.page.screenshot(**options)
        return np.asarray(Image.open(io.BytesIO(shot)).convert("RGB"))

    def color(self, x, y):
        self.page.mouse.move(2, 2)
        self.settle()
        one = {"x": round(x), "y": round(y), "width": 1, "height": 1}
        return tuple(self.pixels(clip=one)[0, 0].tolist())

    def turns(self, at, color):
        """Wait until a place has a color, nearly: thumbnails are stored with loss."""
        for _ in range(100):
            pixel = self.color(*at)
            if np.allclose(pixel, color, atol=12):
                return
            self.page.wait_for_timeout(20)
        raise AssertionError(f"{at} is {pixel}, not {color}")


class Kept(RunSite):
    """A site of gray images, whose classes change as they are told, and that keeps count."""

    def __init__(self, image_map):
        unlabeled = Coloring("Your label", np.full(len(image_map.names), -1), role="label")
        colorings = (*image_map.colorings, unlabeled)
        image_map = dataclasses.replace(image_map, colorings=colorings)
        self.id = "7e57"
        self._page, self._is_edited = page_of(image_map, site=self.id, files="files"), False
        self._lock = threading.Lock()
        self.policy = policy(script(), served=True, files=bool(image_map.per_file))
        self.gray = sheet(np.full((1, 300, 300, 3), 90, np.uint8), 1)
        kinds = {"new-1": "novel", "new-2": "novel", "dog": "known"}.items()
        self.rows = [{"cluster": c, "name": "", "kind": kind, "size": 100} for c, kind in kinds]
        self.labels = {}
        names = [self.rows[of]["cluster"] for of in image_map.colorings[0].values.tolist()]
        self.cluster_of = dict(zip(map(str, image_map.number.tolist()), names, strict=True))
        self.requests, self.shown, self.log = [], set(), []
        self.refusal = self.found = None

    def image(self, number):
        self.shown.add(("image", number))
        return self.gray

    def whole(self, number):
        self.shown.add(("whole", number))
        return self.gray

    def classes(self):
        own = {"cluster_of": self.cluster_of, "labels": self.labels}
        return {"editable": True, "classes": self.rows, **own}

    def search(self, file):
        self.requests.append(("search", file))
        return self.found

    def likeness(self, number, other):
        self.asked("likeness", number, other)
        images = [f"data:image/webp;base64,{base64.b64encode(self.gray).decode()}"] * 2
        return {"images": images, "low": -0.125, "high": 0.75}

    def asked(self, *what):
        self.requests.append(what)
        if self.refusal:
            raise OutputError(self.refusal)

    def name(self, clusters, name):
        self.asked("name", clusters, name)
        for row in self.rows:
            if row["cluster"] in clusters:
                row["name"] = name
        return self.classes()

    def label(self, numbers, name):
        self.asked("label", numbers, name)
        self.labels |= {str(number): name for number in numbers}
        self.labels = {number: label for number, label in self.labels.items() if label}
        return {"labels": self.labels}

    def split(self, numbers, name):
        self.asked("split", numbers, name)
        made = {"cluster": "new-9", "name": name, "kind": "novel", "size": len(numbers)}
        self.rows.append(made)
        self.cluster_of |= {str(number): "new-9" for number in numbers}
        return self.classes()

    def export(self, folder, numbers):
        self.asked("export", folder, numbers)
        return {"folder": f"/runs/1/exports/{folder}", "images": len(numbers or range(300))}


@contextmanager
def running(server, serve=None) -> Iterator[None]:
    """Let a server answer in a thread of its own."""
    thread = threading.Thread(target=serve or server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@contextmanager
def serving(site, **options: object) -> Iterator[Server]:
    """The server of a page, whose log is kept by the site."""
    server = Server(log=site.log.append, **options)
    with server, running(server, partial(server.serve, site)):
        yield server
