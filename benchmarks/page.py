"""Size, load time and frame time of a page with many images.

    python -m benchmarks page [--counts 20000] [--width 1920] [--height 1080]

Times are measured by a script in the page, in headless Chromium without a GPU. Needs
`pip install playwright` and Chromium.
"""

import io
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from playwright.sync_api import Page as BrowserPage

from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from nearkin.evaluation.layout import BLOCK, z_order
from nearkin.report.image_map import ONE_FILE
from nearkin.report.page.blocks import Page
from nearkin.report.page.html import render
from nearkin.report.page.map import Coloring, ImageMap, write_files

SIDE: Final = 48
COLUMNS: Final = 16
PER_SHEET: Final = COLUMNS**2
CLASSES: Final = 100
NEIGHBORS: Final = 12
OPTIONS: Final = (
    Option("counts", [2_000, 20_000, 1_000_000], "numbers of images", quick=[200]),
    Option("width", 1280, "of the window"),
    Option("height", 800, "of the window"),
    Option("chromium", shutil.which("chromium") or "", "the browser's program"),
)
WATCHED: Final = """
window.frames_ = [];
const asked = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (draw) => asked((now) => {
  const start = performance.now();
  draw(now);
  window.frames_.push([start, performance.now()]);
});
"""
"""Records the start and end of each frame."""


def sheet(rng: np.random.Generator) -> bytes:
    """Make tiles with the detail of photos: 440 bytes each."""
    shape = (COLUMNS * SIDE // 4, COLUMNS * SIDE // 4, 3)
    rough = rng.integers(24, 232, shape).astype(np.uint8)
    file = io.BytesIO()
    whole = Image.fromarray(rough).resize((COLUMNS * SIDE,) * 2, Image.Resampling.NEAREST)
    whole.save(file, "webp", quality=80)
    return file.getvalue()


def images(count: int) -> ImageMap:
    """Make a map of `count` images of a hundred classes."""
    rng = np.random.default_rng(0)
    of = rng.integers(0, CLASSES, count)
    middle = rng.normal(scale=8, size=(CLASSES, 2))
    names = tuple(f"class-{each:03d}" for each in range(CLASSES))
    sheets = [sheet(rng) for _ in range(4)]
    xy = middle[of] + rng.normal(size=(count, 2))
    if count > ONE_FILE:  # as a page has them
        order = z_order(xy)
        of, xy = of[order], xy[order]
    return ImageMap(
        number=np.arange(count),
        names=tuple(f"{names[each]}/image-{row:06d}.jpg" for row, each in enumerate(of)),
        xy=xy,
        neighbors=rng.integers(0, count, (count, NEIGHBORS)),
        similarity=rng.random((count, NEIGHBORS)).astype(np.float32),
        regions=np.zeros(0, np.int64),
        colorings=(
            Coloring("Label", of, names),
            Coloring("Correct", of % 2, ("correct", "incorrect")),
            Coloring("Score", rng.random(count).astype(np.float32)),
        ),
        sheets=tuple(sheets[at % 4] for at in range(-(-count // PER_SHEET))),
        side=SIDE,
        columns=COLUMNS,
        per_sheet=PER_SHEET,
        total=count,
        per_file=BLOCK if count > ONE_FILE else 0,
    )


def panned(page: BrowserPage) -> None:
    """Drag the map around."""
    page.mouse.down()
    for step in range(60):
        page.mouse.move(500 + 4 * step, 500 + step)
    page.mouse.up()


def zoomed(page: BrowserPage) -> None:
    """Zoom in until points become images."""
    for _ in range(18):
        page.mouse.wheel(0, -40)


def frames(page: BrowserPage) -> list[float]:
    """Return the milliseconds of each frame since the last call."""
    page.wait_for_timeout(500)
    noted: list[tuple[float, float]] = page.evaluate("window.frames_.splice(0)")
    return [end - start for start, end in noted] or [0.0]


def measure(case: str, browser: Browser, file: Path, width: int, height: int) -> Iterator[Row]:
    """Open a page and use it."""
    page = browser.new_page(viewport={"width": width, "height": height})
    page.add_init_script(WATCHED)
    page.goto(file.as_uri())
    while not page.evaluate("window.frames_.length"):  # the page's policy forbids to wait in it
        page.wait_for_timeout(50)
    yield Row(f"{case}, file", file.stat().st_size / 1e6, "MB")
    yield Row(f"{case}, usable", page.evaluate("window.frames_[0][1]") / 1000)
    page.evaluate("document.getElementById('map-view').scrollIntoView()")
    page.mouse.move(500, 500)
    frames(page)
    acts = {"points moved": panned, "zoomed": zoomed, "images moved": panned}
    for name, act in acts.items():
        act(page)
        taken = sorted(frames(page))
        most = {"95 of 100 below": taken[-1 - len(taken) // 20]}
        yield Row(f"{case}, {name}", median(taken), "ms", more=most)
    page.close()


def write(count: int, folder: Path) -> Path:
    """Write a page of so many images."""
    shown = images(count)
    page = render(Page("benchmark", "Many images", "", ()), shown, files="page_files")
    if shown.per_file:
        write_files(shown, folder / "page_files")
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    return file


def run(options: Namespace) -> Iterator[Row]:
    """Measure a page for each number of images."""
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(
            executable_path=options.chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for count in options.counts:
            file = write(count, Path(folder))
            yield from measure(f"{count} images", browser, file, options.width, options.height)
        browser.close()
