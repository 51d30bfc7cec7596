"""Size, load time and frame time of a page with many images.

Times are measured by a script in the page, in headless Chromium without a GPU.

    python benchmarks/page.py
    python benchmarks/page.py --counts 20000 --width 1920 --height 1080
"""

import argparse
import io
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from nearkin.report.image_map import BLOCK, ONE_FILE, z_order
from nearkin.report.page.html import document
from nearkin.report.page.map import Coloring, ImageMap, map_section, script, write_files

SIDE: Final = 48
COLUMNS: Final = 16
PER_SHEET: Final = COLUMNS**2
CLASSES: Final = 100
NEIGHBORS: Final = 12
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


def panned(page: Page) -> None:
    """Drag the map around."""
    page.mouse.down()
    for step in range(60):
        page.mouse.move(500 + 4 * step, 500 + step)
    page.mouse.up()


def zoomed(page: Page) -> None:
    """Zoom in until points become images."""
    for _ in range(18):
        page.mouse.wheel(0, -40)


def frames(page: Page) -> list[float]:
    """Return the milliseconds of each frame since the last call."""
    page.wait_for_timeout(500)
    noted: list[tuple[float, float]] = page.evaluate("window.frames_.splice(0)")
    return [end - start for start, end in noted] or [0.0]


def measure(browser: Browser, file: Path, width: int, height: int) -> str:
    """Return the table row of a page."""
    page = browser.new_page(viewport={"width": width, "height": height})
    page.add_init_script(WATCHED)
    page.goto(file.as_uri())
    while not page.evaluate("window.frames_.length"):  # the page's policy forbids to wait in it
        page.wait_for_timeout(50)
    usable = page.evaluate("window.frames_[0][1]")
    page.evaluate("document.getElementById('map-view').scrollIntoView()")
    page.mouse.move(500, 500)
    frames(page)
    log = []
    for act in (panned, zoomed, panned):
        act(page)
        taken = sorted(frames(page))
        log.append(f"{median(taken):6.1f} {taken[-1 - len(taken) // 20]:6.1f}")
    page.close()
    return f"{usable / 1000:8.2f} s   " + "   ".join(log)


def main() -> None:
    """Print a line per number of images."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[2_000, 20_000, 1_000_000])
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=800)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    options = parser.parse_args()
    print("milliseconds of a frame: median and 95 of 100")
    print("images      file     usable   points moved     zoomed   images moved")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(
            executable_path=options.chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for count in options.counts:
            shown = images(count)
            page = document(
                title="Many images",
                kicker="benchmark",
                lead="",
                sections=[("Map", map_section(shown, "page_files"))],
                script=script(),
                files=bool(shown.per_file),
            )
            if shown.per_file:
                write_files(shown, Path(folder) / "page_files")
            file = Path(folder) / "page.html"
            file.write_text(page, encoding="utf-8")
            line = measure(browser, file, options.width, options.height)
            print(f"{count:8,} {file.stat().st_size / 1e6:6.1f} MB {line}", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
