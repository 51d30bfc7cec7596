"""Many points drawn by the page and by WebGL libraries: first frame, frame times, size, memory.

The same points, embedded in a page in the same way, are drawn by the page's own script and by
bundles of npm packages, in turns. A script in the page moves the view for ten seconds: around, and
in and out up to four times. In headless Chromium without a GPU, WebGL is computed by the CPU
(SwiftShader).

    npm install regl-scatterplot @deck.gl/core @deck.gl/layers esbuild
    export NODE_PATH=node_modules
    npx esbuild benchmarks/points/regl.js --bundle --minify --outfile=regl.js
    npx esbuild benchmarks/points/deck.js --bundle --minify --outfile=deck.js
    python benchmarks/points.py regl.js deck.js
    python benchmarks/points.py --counts 20000 1000000 --turns 3
"""

import argparse
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from playwright.sync_api import Browser, Error, sync_playwright

from nearkin.report.image_map import BLOCK, ONE_FILE, z_order
from nearkin.report.page.html import document
from nearkin.report.page.map import Coloring, ImageMap, map_section, script

CLASSES: Final = 100
SECONDS: Final = 10
SWIFTSHADER: Final = ("--enable-unsafe-swiftshader", "--use-angle=swiftshader")
NO_GPU: Final = ("--disable-gpu",)
LIMIT: Final = 60  # seconds for the first frame, and for all others
WIDTH, HEIGHT = 1000, 700
COLORS: Final = (
    "#0067ad",
    "#e07b00",
    "#0b8f68",
    "#b04f8b",
    "#4aa8de",
    "#a68500",
    "#4a3aa0",
    "#a3341f",
)

OWN: Final = """
globalThis.mount = async () => (x, y, zoom) => {
  state.view = { x, y, scale: (box.height / 2) * zoom };
  redraw();
};
"""
"""Lets the driver move the page's own map, as its script hides all it has."""

DRIVER: Final = """
const frame = () => new Promise(requestAnimationFrame);
let look_ = null;
async function begin(mounted) {
  look_ = await mounted;
  await frame();
  await frame();
  globalThis.first_ = performance.now();
}
async function move(seconds) {
  const [start, times] = [performance.now(), []];
  for (let now = start; now < start + 1000 * seconds; ) {
    const at = (now - start) / 1000;
    const zoom = 4 ** (0.5 - 0.5 * Math.cos(at * Math.PI / 2));
    look_(0.4 * Math.sin(at), 0.3 * Math.cos(1.3 * at), zoom);
    const next = await frame();
    times.push(next - now);
    now = next;
  }
  globalThis.times_ = times.slice(1);
}
"""

GIVEN: Final = """
const json = JSON.parse(document.getElementById("images").textContent);
const array = ({ kind, data }) => {
  return new globalThis[kind](Uint8Array.from(atob(data), (c) => c.charCodeAt(0)).buffer);
};
const [xy, classes] = [array(json.xy), array(json.colorings[0].values)];
const of = Float32Array.from(classes, (value) => value % 8);
const x = Float32Array.from(of, (_, i) => xy[2 * i]);
const y = Float32Array.from(of, (_, i) => xy[2 * i + 1]);
"""


def points(count: int) -> ImageMap:
    """Make a map of `count` points of a hundred classes, in [-1, 1], without images."""
    rng = np.random.default_rng(0)
    of = rng.integers(0, CLASSES, count)
    xy = rng.normal(scale=0.3, size=(CLASSES, 2))[of] + rng.normal(scale=0.04, size=(count, 2))
    xy = np.clip(xy, -1, 1)
    if count > ONE_FILE:  # as a page has them
        order = z_order(xy)
        of, xy = of[order], xy[order]
    return ImageMap(
        number=np.arange(count),
        names=("",) * count,
        xy=xy,
        neighbors=np.zeros((count, 0), np.int64),
        similarity=np.zeros((count, 0), np.float32),
        colorings=(Coloring("Label", of, tuple(f"class-{each:03d}" for each in range(CLASSES))),),
        sheets=(),
        side=48,
        columns=16,
        per_sheet=256,
        total=count,
        per_file=BLOCK if count > ONE_FILE else 0,
    )


def own_page(shown: ImageMap) -> str:
    """Return the page as it is, but that the driver can move its map."""
    begin = "document.getElementById('map-view').scrollIntoView();\nbegin(mount());\n"
    code = script().removesuffix("})();\n") + OWN + "})();\n" + DRIVER + begin
    sections = [("Map", map_section(shown))]
    return document(title="Points", kicker="", lead="", sections=sections, script=code)


def library_page(shown: ImageMap, bundle: Path) -> str:
    """Return a page of nothing but a library's drawing of the same points."""
    section = str(map_section(shown))
    data = section[section.index('<script type="application/json"') :]
    size = 2 if shown.per_file else 4
    start = f"begin(mount(place, {{ x, y, of, colors: {list(COLORS)}, size: {size} }}));"
    code = bundle.read_text(encoding="utf-8").replace("</script", r"<\/script")
    return (
        f'<!doctype html><meta charset="utf-8"><body style="margin:0;background:#fff">'
        f'<div id="place" style="width:{WIDTH}px;height:{HEIGHT}px;position:relative"></div>{data}'
        f"<script>{code}</script>"
        f"<script>{DRIVER}{GIVEN}{start}</script>"
    )


def spent(parent: int) -> tuple[float, float]:
    """Return the CPU seconds and megabytes of the browsers below a process, shared pages once."""
    children: dict[int, list[tuple[int, list[str]]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            child, _, rest = stat.read_text().partition(" (")
            fields = rest.rpartition(") ")[2].split()
            children.setdefault(int(fields[1]), []).append((int(child), fields))
    below, seconds, kilobytes = [parent], 0.0, 0
    while below:
        for process, fields in children.get(below.pop(), []):
            below.append(process)
            with suppress(OSError):
                if "chrom" in Path(f"/proc/{process}/comm").read_text():
                    rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
                    kilobytes += int(rollup.split("Pss:")[1].split()[0])
                    seconds += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return seconds, kilobytes / 1024


def measure(browser: Browser, file: Path, shot: Path | None) -> dict[str, float]:
    """Return first frame and frame times in milliseconds, CPU time per frame, and megabytes.

    The mean: where frames queue up, many short intervals follow a very long one.
    """
    page = browser.new_page(
        viewport={"width": WIDTH + 400, "height": HEIGHT + 100},
        bypass_csp=True,  # waiting evaluates
    )
    page.on("pageerror", lambda error: print(file.name, error))
    page.set_default_timeout(1000 * LIMIT)
    page.goto(file.as_uri(), wait_until="commit")
    page.wait_for_function("globalThis.first_ > 0")
    before, _ = spent(os.getpid())
    page.evaluate(f"globalThis.times_ = null; move({SECONDS}); 0")
    page.wait_for_function("globalThis.times_ !== null", polling=500)
    after, megabytes = spent(os.getpid())
    times = sorted(page.evaluate("times_"))
    first = page.evaluate("first_")
    if shot:
        page.screenshot(path=shot)
    page.close()
    return {
        "first": first,
        "mean": sum(times) / len(times),
        "p95": times[-1 - len(times) // 20],
        "cpu": 1000 * (after - before) / len(times),
        "memory": megabytes,
    }


def main() -> None:
    """Print a line per way of drawing and number of points: the median of all turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("bundles", type=Path, nargs="*", help="scripts that define `mount`")
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    parser.add_argument("--no-gpu", action="store_true", help="without WebGL of any kind")
    parser.add_argument("--shots", type=Path, help="folder for a screenshot of each")
    options = parser.parse_args()
    print("points     drawn by    bundle  first frame  frame: mean  95 of 100  CPU time  memory")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        for count in options.counts:
            shown, pages = points(count), {}
            for bundle in (None, *options.bundles):
                name = bundle.stem if bundle else "own"
                pages[name] = Path(folder) / f"{name}-{count}.html"
                content = library_page(shown, bundle) if bundle else own_page(shown)
                pages[name].write_text(content, encoding="utf-8")
            log: dict[str, list[dict[str, float]]] = {name: [] for name in pages}
            for _ in range(options.turns):
                for name, file in pages.items():
                    flags = ["--no-sandbox", *(NO_GPU if options.no_gpu else SWIFTSHADER)]
                    browser = driver.chromium.launch(executable_path=options.chromium, args=flags)
                    shot = options.shots and options.shots / f"{file.stem}.png"
                    try:
                        log[name].append(measure(browser, file, shot))
                        print(f"  {name}: {log[name][-1]}", file=sys.stderr, flush=True)
                    except Error as error:
                        print(f"{name}: {error.message.splitlines()[0]}", flush=True)
                    browser.close()
            sizes = {bundle.stem: bundle.stat().st_size for bundle in options.bundles}
            for name, turns in log.items():
                if not turns:
                    continue
                taken = {key: median(turn[key] for turn in turns) for key in turns[0]}
                size = sizes.get(name, len(script().encode())) / 1000
                print(
                    f"{count:9,}  {name:10s} {size:6.0f} KB  {taken['first'] / 1000:9.2f} s"
                    f"  {taken['mean']:10.1f} ms {taken['p95']:7.1f} ms {taken['cpu']:6.1f} ms"
                    f"   {taken['memory']:5.0f} MB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
