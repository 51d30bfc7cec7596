"""The map of many images, whose names, neighbors and sheets are in files beside the page."""

import json
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from browser import (
    HOSTILE,
    Kept,
    OpenPage,
    page_of,
    running,
    serving,
    small_map,
    tile_color,
    written_out,
)

from nearkin.report.page.map import details, write_files

MANY = small_map([*HOSTILE, *(f"animals/{row:03d}.jpg" for row in range(12, 300))], per_file=64)


@pytest.fixture
def written(tmp_path):
    """A page and its folder, which can be moved together."""
    for name in ("made", "moved"):
        (tmp_path / name).mkdir()
    write_files(MANY, tmp_path / "made" / "page_files")
    page = page_of(MANY, files="page_files")
    (tmp_path / "made" / "page.html").write_text(page, encoding="utf-8")
    return (tmp_path / "made").rename(tmp_path / "moved" / "to here")


@pytest.fixture
def page(browser, written):
    page = OpenPage(browser, (written / "page.html").as_uri())
    yield page
    page.end()


def asked_for(page):
    return sorted({url.rpartition("/")[2] for url in page.requests if "page_files" in url})


def test_files_are_plain_text_and_the_same_each_time(written):
    files = {file.name for file in (written / "page_files").iterdir()}
    assert files == {f"{number}.{kind}" for number in range(5) for kind in ("js", "webp")}
    script = (written / "page_files" / "0.js").read_bytes()
    assert script.decode() == details(MANY, 0)
    assert script.isascii()
    assert b"<" not in script


def test_only_what_is_looked_at_is_loaded(page):
    page.until("document.getElementById('map-count').textContent === '300 images'")
    assert asked_for(page) == []
    page.click(MANY, 70)
    page.find("#map-panel h3").wait_for()
    assert page.text("#map-panel h3") == "animals/070.jpg"
    assert "1.js" in asked_for(page)
    tiles = page.find("#map-panel .map-tiles").first.locator("button")
    names = [MANY.names[other] for other in MANY.neighbors[70]]
    labels = [tile.get_attribute("aria-label").rsplit(", ", 1)[0] for tile in tiles.all()]
    assert [name for name in names if name.startswith("animals")] == [
        label for label in labels if label.startswith("animals")
    ]
    at = page.spot(MANY, 149)
    page.page.mouse.move(*at)
    page.find("#map-canvas").focus()
    for _ in range(10):
        page.page.mouse.wheel(0, -120)
        page.settle()
    page.turns(at, tile_color(149))
    assert "2.webp" in asked_for(page)


def test_names_are_found_and_sorted(page):
    page.find("#map-filter").fill("animals/29")
    page.until("document.getElementById('map-count').textContent === '10 of 300 images'")
    assert asked_for(page) == [f"{number}.js" for number in range(5)]
    page.find("#map-table summary").click()
    page.find("#map-table thead").get_by_text("Name").click()
    page.find("#map-table tbody").get_by_text("animals/299.jpg").wait_for()
    assert page.texts("#map-table tbody th") == [f"animals/{row}.jpg" for row in range(290, 300)]


def test_hostile_names_in_files_stay_text(page):
    for row, name in enumerate(HOSTILE):
        page.page.evaluate(f"location.hash = '#image={10 + 2 * row}'")
        title = "document.querySelector('#map-panel h3 bdi')?.textContent"
        page.until(f"{title} === {json.dumps(written_out(name))}")


def test_without_its_folder_the_page_says_what_to_do_and_goes_on_once_it_is_there(
    browser, written
):
    content = page_of(MANY, files="a%26b%20%25_files")
    (written / "page.html").write_text(content, encoding="utf-8")
    page = OpenPage(browser, (written / "page.html").as_uri())
    page.click(MANY, 70)
    page.find("#map-note").get_by_text("put the folder a&b %_files beside this page").wait_for()
    assert page.text("#map-count") == "300 images"
    search, number = page.find("#map-filter"), page.find("#map-count")
    search.fill("dog")  # classes are there
    number.get_by_text("90 of 300 images").wait_for()
    assert page.find("#map-panel h3").count() == 0
    (written / "page_files").rename(written / "a&b %_files")
    search.fill("animals/07")
    number.get_by_text("10 of 300 images").wait_for()
    page.click(MANY, 70)
    page.find("#map-panel h3").get_by_text("animals/070.jpg").wait_for()
    assert all("ERR_FILE_NOT_FOUND" in complaint for complaint in page.complaints)
    page.context.close()


def test_without_its_server_the_page_asks_for_no_folder(browser):
    with serving(Kept(MANY)) as server:
        page = OpenPage(browser, server.url)
        page.find("#map-labels kbd").first.wait_for()
    page.click(MANY, 70)
    page.find("#map-status").get_by_text("Is nearkin explore still running?").wait_for()
    assert "folder" not in page.text("#map-note")
    page.context.close()


def test_any_server_of_files_can_show_it(browser, written):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=written))
    with server, running(server):
        page = OpenPage(browser, f"http://127.0.0.1:{server.server_port}/page.html")
        page.click(MANY, 70)
        page.find("#map-panel h3").get_by_text("animals/070.jpg").wait_for()
        page.context.close()
    assert [line for line in page.complaints if "404" not in line] == []  # of favicon.ico


def test_points_of_many_images_are_small_and_all_drawn(browser, tmp_path):
    count, nobody = 200_000, np.zeros((200_000, 0), np.int64)
    many = small_map(
        [""] * count,
        count=300,
        number=np.arange(count),
        xy=np.random.default_rng(0).uniform(size=(count, 2)),
        neighbors=nobody,
        similarity=nobody.astype(np.float32),
        colorings=(),
        sheets=(),
        total=count,
        per_file=4_096,
    )
    (tmp_path / "page.html").write_text(page_of(many, files="page_files"), encoding="utf-8")
    page = OpenPage(browser, (tmp_path / "page.html").as_uri())
    x, y, width, height = (round(page.box[side]) for side in ("x", "y", "width", "height"))
    middle = page.pixels()[y + height // 4 : y + height // 2, x + width // 3 : x + width // 2]
    free = (middle == 255).all(axis=2).mean()
    assert 0.2 < free < 0.95  # neither a blot nor empty
    page.end()
