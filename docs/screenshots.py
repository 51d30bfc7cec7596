"""The images of docs/look: pages of two runs on digits, photographed in Chromium.

    python docs/screenshots.py [FOLDER]      # needs chromium and the group test; some minutes

Trains and discovers in FOLDER (a temporary one by default) as the README says, so the images show
what a reader gets. The image of embedded photographs is made anew if FOLDER holds the run that
docs/pretrained.md describes, `caltech99-embedded`: weights and photographs are not in here.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

LOOK = Path(__file__).parent / "look"
IMAGE = 1200  # a seven with clear neighbors
PHOTOGRAPH = 349  # a lotus
TRAIN = ["train", "digits", "--epochs", "60", "--val", "0.2"]
DISCOVER = ["discover", "digits", "--known", "0,1,2,3,4", "--truth", "data"]


def runs(folder: Path) -> tuple[Path, Path]:
    """Train and discover, unless the folder holds both runs already."""
    trained, discovered = folder / "digits-simclr", folder / "digits-gcd"
    commands = {trained: TRAIN, discovered: [*DISCOVER, "--encoder", str(trained)]}
    for out, words in commands.items():
        if not (out / "report.html").exists():
            command = [sys.executable, "-m", "nearkin", *words, "-o", str(out)]
            subprocess.run(command, check=True)
    return trained, discovered


def photograph(page: Any, address: str, file: Path, *, dark: bool = False, zoom: int = 0) -> None:
    """Save what the window shows of a page's map."""
    page.emulate_media(color_scheme="dark" if dark else "light")
    page.goto("about:blank")  # or another image of the same page would not be opened
    page.goto(address)
    page.evaluate("document.getElementById('map-explorer').scrollIntoView()")
    for _ in range(zoom):
        page.mouse.wheel(0, -100)
    page.wait_for_timeout(1500)  # the map glides to its place, thumbnails are decoded
    page.screenshot(path=file)


def main() -> None:
    """Write the three images."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    trained, discovered = ((run / "report.html").resolve().as_uri() for run in runs(folder))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        photograph(page, f"{trained}#image={IMAGE}", LOOK / "neighbors.png")
        page.mouse.move(450, 400)
        photograph(page, trained, LOOK / "zoom.png", dark=True, zoom=8)
        photograph(page, discovered, LOOK / "discovery.png")
        embedded = folder / "caltech99-embedded" / "report.html"
        if embedded.exists():
            address = f"{embedded.resolve().as_uri()}#image={PHOTOGRAPH}"
            photograph(page, address, LOOK / "embedded.png")
        browser.close()


if __name__ == "__main__":
    main()
