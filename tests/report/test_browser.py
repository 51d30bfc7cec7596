"""The map in a real browser: what somebody sees, and what happens when they point or type."""

import csv
import re
from dataclasses import replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from browser import (
    HOSTILE,
    SMALL,
    Kept,
    OpenPage,
    linked_page,
    listen,
    page_of,
    running,
    serving,
    sheet,
    small_map,
    tile_color,
    written_out,
)

from nearkin.report.page.blocks import Chart, Facts, Page
from nearkin.report.page.html import render
from nearkin.report.page.map import Coloring
from nearkin.result import Frame

SMALL_CLASSES = (Coloring("Class", np.arange(len(HOSTILE)), tuple(map(str, range(len(HOSTILE))))),)
BLUE, OCHRE, GREEN = (37, 84, 195), (166, 130, 0), (0, 147, 124)
PAPER = (255, 255, 255)


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a map from a file, as a double-click does."""
    pages = []

    def opens(image_map=SMALL, after="", content=None, **options):
        file = tmp_path / "page.html"
        file.write_text(content or page_of(image_map), encoding="utf-8")
        pages.append(OpenPage(browser, file.as_uri() + after, **options))
        return pages[-1]

    yield opens
    for page in pages:
        page.end()
        assert len([url for url in page.requests if url.startswith("file:")]) == 1


def test_every_class_of_a_coloring_has_its_color_where_its_images_lie(opened):
    page = opened()
    colors = [page.color(*page.spot(SMALL, row)) for row in (21, 28, 38)]
    assert colors == [BLUE, OCHRE, GREEN]
    x, y = page.spot(SMALL, 21)
    assert page.color(x, y - 18) == PAPER  # between two images
    assert page.text("#map-count") == "300 images"
    assert page.texts("#map-legend bdi") == ["new-1", "new-2", "dog"]
    assert page.texts("#map-legend li span") == ["105", "105", "90"]
    page.find("#map-coloring").select_option(label="Upper")
    assert page.texts("#map-legend bdi") == ["yes", "unknown"]
    assert page.color(*page.spot(SMALL, 28)) == BLUE
    quiet = page.color(*page.spot(SMALL, 288))
    assert quiet not in (BLUE, OCHRE, GREEN, PAPER)
    page.find("#map-coloring").select_option(label="Score")
    assert page.text("#map-note") == "How sure."
    assert page.texts("#map-legend .ends span") == ["0.01", "1.00"]
    light = [sum(page.color(*page.spot(SMALL, row))) for row in (25, 105, 185, 285)]
    assert light == sorted(light, reverse=True)
    assert page.color(*page.spot(SMALL, 1)) == quiet
    page.find("#map-coloring").select_option(label="Class")
    page.page.emulate_media(color_scheme="dark")
    assert sum(page.color(x, y - 18)) < 150
    assert page.color(x, y) != BLUE
    page.page.emulate_media(color_scheme="light")
    assert page.color(x, y) == BLUE


def test_zoomed_in_points_become_images_and_dragging_moves_the_map(opened):
    page = opened()
    at = page.spot(SMALL, 149)
    assert page.color(*at) == OCHRE
    page.page.mouse.move(*at)
    scrolled = "document.documentElement.scrollTop"
    before = page.page.evaluate(scrolled)
    page.page.mouse.wheel(0, 60)  # past a map that nobody has turned to, the page scrolls
    page.until(f"{scrolled} > {before}")
    assert page.find("#map-hint").is_visible()
    page.page.evaluate(f"{scrolled} = {before}")
    page.find("#map-canvas").focus()
    for _ in range(6):
        page.page.mouse.wheel(0, -120)
        page.settle()
    page.turns(at, tile_color(149))
    page.find("#map-fit").click()
    page.turns(at, OCHRE)
    x, y = at
    page.page.mouse.move(x, y)
    page.page.mouse.down()
    page.page.mouse.move(x + 90, y + 50, steps=3)
    page.page.mouse.up()
    assert page.color(x + 90, y + 50) == OCHRE
    assert page.find("#map-panel h3").count() == 0


def expected(row):
    return [SMALL.names[other] for other in SMALL.neighbors[row].tolist()]


def near(page):
    tiles = page.find("#map-panel .map-tiles").first.locator("button")
    labels = [tile.get_attribute("aria-label") for tile in tiles.all()]
    return [label.rsplit(", ", 1) for label in labels]


def test_a_click_shows_the_image_its_neighbors_in_order_and_its_class_the_surest_first(opened):
    page = opened()
    page.click(SMALL, 47)
    assert page.text("#map-panel h3") == "animals/047.jpg"
    assert page.texts("#map-panel dd") == ["new-2", "yes", "0.157", "104"]
    names, similarity = zip(*near(page))
    assert list(names) == expected(47)
    assert similarity == ("0.95", "0.80", "0.65", "0.50", "0.35", "0.20")
    assert page.page.url.endswith("#image=104")
    assert page.texts("#map-panel h4") == ["Nearest neighbors", "More of new-2"]
    tiles = page.find("#map-panel .map-tiles").nth(1).locator("button")
    members = [row for row in range(300) if SMALL.colorings[0].values[row] == 1 and row != 47]
    assert tiles.count() == 24
    assert tiles.first.get_attribute("title") == SMALL.names[members[-1]]
    page.find("#map-panel").get_by_text("All 105 images in the grid").click()
    assert page.text("#map-grid h3") == "new-2: 105"
    assert page.find(".map-images button").count() == 105
    page.find("#map-show-grid").click()
    page.find("#map-panel .map-tiles").first.locator("button").nth(2).click()
    assert page.text("#map-panel h3") == expected(47)[2]
    assert [name for name, _ in near(page)] == expected(int(SMALL.neighbors[47, 2]))


def test_the_address_keeps_the_open_image_whose_tiles_are_those_of_the_images(opened):
    page = opened(after="#image=104")
    assert page.text("#map-panel h3") == "animals/047.jpg"
    assert page.find("#map-served").inner_html() == ""  # what needs a server
    assert page.find("input[type=file], form, #map-classes, #map-panel .map-where").count() == 0
    assert page.text("#map-panel").count("nearkin explore RUN shows") == 1
    boxes = [tile.bounding_box() for tile in page.find("#map-panel .tile").all()[:7]]
    for row, box in zip((47, *SMALL.neighbors[47].tolist()), boxes, strict=True):
        page.turns((box["x"] + box["width"] / 2, box["y"] + 10), tile_color(row))
    page.page.evaluate("location.hash = '#image=106'")
    page.settle()
    assert page.text("#map-panel h3") == "animals/048.jpg"
    page.page.evaluate("location.hash = '#image=9'")
    page.settle()
    assert page.text("#map-panel h3") == "animals/048.jpg"
    page.page.evaluate("location.hash = '#image=308'")  # of a region
    page.find("#map-panel h4").get_by_text("In its image").wait_for()
    assert page.text("#map-panel").count("nearkin explore RUN shows") == 2
    assert page.find("#map-panel img").count() == 0


def test_the_filter_and_the_legend_hide_and_show(opened):
    page = opened()
    page.find("#map-filter").fill("/04")
    page.settle()
    assert page.text("#map-count") == "10 of 300 images"
    assert page.color(*page.spot(SMALL, 47)) == OCHRE
    assert page.color(*page.spot(SMALL, 67)) == PAPER
    page.click(SMALL, 67)
    assert page.find("#map-panel h3").count() == 0
    page.find("#map-filter").fill("DOG")
    assert page.text("#map-count") == "90 of 300 images"
    page.find("#map-filter").fill("")
    page.settle()
    first = page.find(".map-entry").first
    first.click()
    assert first.get_attribute("aria-pressed") == "false"
    assert page.text("#map-count") == "195 of 300 images"
    assert page.color(*page.spot(SMALL, 21)) == PAPER
    first.click()
    assert page.color(*page.spot(SMALL, 21)) == BLUE
    page.find(".map-entry").nth(1).hover()  # while it is on a name, that stands out
    page.settle()
    x, y = page.spot(SMALL, 21)
    assert tuple(page.pixels()[round(y), round(x)]) != BLUE
    page.find("#map-legend").get_by_text("Hide all").click()
    assert page.text("#map-count") == "0 of 300 images"
    page.find("#map-legend").get_by_text("Show all").click()
    assert page.text("#map-count") == "300 images"


def test_the_table_is_sorted_and_turned_over(opened):
    page = opened()
    page.find("#map-table summary").click()
    names = "#map-table tbody th"
    assert page.texts(names)[:2] == ["animals/000.jpg", "animals/001.jpg"]
    assert page.find(names).count() == 50
    page.find("#map-table").get_by_text("Score").click()
    page.find("#map-table").get_by_text("Score").click()
    assert page.find("#map-table th[aria-sort=descending]").inner_text().startswith("Score")
    assert page.texts(names)[0] == "animals/299.jpg"
    for _ in range(5):
        page.find("#map-table").get_by_text("Next").click()
    assert page.texts(names)[-3:] == [f"animals/{row:03d}.jpg" for row in (0, 1, 2)]  # unknown
    page.find(names).last.locator("button").click()
    assert page.text("#map-panel h3") == "animals/002.jpg"


def draw_lasso(page, image_map, corners):
    """Half an image beyond the corners, so that they are inside."""
    points = np.array([page.spot(image_map, row) for row in corners])
    middle = points.mean(axis=0)
    points += np.sign(points - middle) * 12
    page.page.mouse.move(*points[-1])
    page.page.mouse.down()
    for point in points:
        page.page.mouse.move(*point, steps=4)
    page.page.mouse.up()
    page.settle()


def saved(page):
    with page.page.expect_download() as download:
        page.find("#map-selection").get_by_text("Save as CSV").click()
    text = Path(download.value.path()).read_bytes().decode("utf-8-sig", "surrogateescape")
    return list(csv.reader(text.splitlines(keepends=True)))


def test_a_lasso_or_shift_selects_what_is_inside_and_not_hidden(opened):
    page = opened()
    page.find("#map-lasso").click()
    draw_lasso(page, SMALL, (45, 48, 108, 105))
    inside = [row for row in range(300) if 2 <= row // 20 <= 5 and 5 <= row % 20 <= 8]
    assert page.text("#map-selection h3") == "16 images selected"
    assert page.live_text == "16 images selected."
    head, *rows = saved(page)
    assert head == ["number", "path", "class", "upper", "score"]
    assert sorted(int(row[0]) for row in rows) == [10 + 2 * row for row in inside]
    by_number = {row[0]: row[1:] for row in rows}
    assert by_number["104"] == ["animals/047.jpg", "new-2", "yes", "0.1566667"]
    page.find("#map-selection").get_by_text("Clear").click()
    assert not page.find("#map-selection").is_visible()
    page.find("#map-lasso").click()
    page.find(".map-entry").nth(1).click()
    page.page.keyboard.down("Shift")
    draw_lasso(page, SMALL, (45, 48, 108, 105))
    page.page.keyboard.up("Shift")
    assert page.text("#map-selection h3") == "8 images selected"
    assert page.find("#map-selection .map-tiles li").count() == 8


def test_shift_adds_to_a_selection_and_alt_removes_by_clicks_lassos_and_for_all_that_is_seen(
    opened,
):
    page = opened()

    def with_key(key, act, *arguments):
        page.page.keyboard.down(key)
        act(*arguments)
        page.page.keyboard.up(key)
        return int(page.text("#map-selection h3").split()[0])

    assert with_key("Shift", draw_lasso, page, SMALL, (0, 3, 43, 40)) == 12
    assert with_key("Shift", draw_lasso, page, SMALL, (42, 45, 85, 82)) == 12 + 12 - 2
    assert with_key("Alt", draw_lasso, page, SMALL, (0, 1, 21, 20)) == 22 - 4
    assert with_key("Shift", page.click, SMALL, 299) == 19
    assert with_key("Shift", page.click, SMALL, 299) == 19
    assert with_key("Alt", page.click, SMALL, 2) == 18
    page.find("#map-filter").fill("/00")
    page.find("#map-shown").click()
    assert page.text("#map-selection h3") == "10 images selected"
    page.find("#map-filter").fill("")
    for _ in range(3):
        page.find("#map-in").click()
    page.find("#map-shown").click()
    assert 10 < int(page.text("#map-selection h3").split()[0]) < 100  # what is in view


def test_filters_of_text_of_numbers_and_of_classes_hold_together(opened):
    page = opened()
    page.find(".map-entry").first.click()
    assert page.text("#map-count") == "195 of 300 images"
    page.find("#map-coloring").select_option(label="Score")
    assert page.text("#map-count") == "195 of 300 images"
    page.find("#map-legend input").first.fill("0.5")
    score, third = SMALL.colorings[2].values, SMALL.colorings[0].values
    shown = (third != 0) & (score >= 0.5)
    assert page.text("#map-count") == f"{shown.sum()} of 300 images"
    page.find("#map-legend input").nth(1).fill("0.86")  # of 32 bits, that of image 258 is more
    shown &= score <= 0.86
    assert shown[258]
    assert page.text("#map-count") == f"{shown.sum()} of 300 images"
    page.find("#map-filter").fill("/20")
    assert page.text("#map-count") == f"{shown[200:210].sum()} of 300 images"
    assert page.texts("#map-filters button") == ["Class: 1 hidden ✕", "Score: 0.5 to 0.86 ✕"]
    page.find("#map-filters button").first.click()
    page.find("#map-filters button").first.click()
    assert page.text("#map-count") == "10 of 300 images"
    page.find("#map-filter").fill("")
    page.find("#map-coloring").select_option(label="Class")
    page.find(".map-only").nth(2).click()
    assert page.text("#map-count") == "90 of 300 images"


def test_the_grid_pages_through_all_that_is_shown_by_mouse_and_by_keyboard(opened):
    page = opened()
    page.find("#map-show-grid").click()
    assert page.text("#map-grid h3") == "Visible images: 300"
    tiles = page.find(".map-images button")
    assert tiles.count() == 200
    page.find("#map-grid").get_by_text("Next").click()
    assert tiles.count() == 100
    assert tiles.first.get_attribute("title") == "animals/200.jpg"
    order = page.find("#map-grid select")
    order.focus()
    order.select_option(label="Score")
    page.until("document.activeElement.value === 'Score'")
    reverse = page.find("#map-grid").get_by_label("Reverse the order")
    reverse.click()
    page.until("document.activeElement.textContent === '▾'")
    assert tiles.first.get_attribute("title") == "animals/299.jpg"
    tiles.first.click()
    press = page.page.keyboard.press
    focused = "document.activeElement.title"
    press("ArrowRight")  # the panel goes along
    page.until(f"{focused} === 'animals/298.jpg'")
    page.find("#map-panel h3").get_by_text("animals/298.jpg").wait_for()
    press("ArrowDown")
    columns = 298 - int(page.page.evaluate(focused)[8:11])
    assert 2 < columns < 30
    press("ArrowUp")
    press("Space")
    press("PageDown")
    page.until(f"{focused} === 'animals/098.jpg'")
    assert tiles.count() == 100


def test_all_thumbnails_in_view_are_drawn_from_however_many_sheets(opened):
    """Of a sheet for every image, a grid and a zoomed map show more than are kept at a time."""
    middle, xy = SMALL.xy.mean(axis=0), SMALL.xy.copy()
    corner = np.array([23, 15])
    xy[[0, -1]] = middle - corner, middle + corner  # the others take half of the map
    colors = np.array([tile_color(row) for row in range(300)], np.uint8)
    sheets = tuple(sheet(np.tile(color, (1, 16, 16, 1)), 1) for color in colors)
    spread = replace(SMALL, xy=xy, sheets=sheets, columns=1, per_sheet=1)
    page = opened(spread)
    spots = [page.spot(spread, row) for row in range(1, 299)]
    center = page.box["x"] + page.box["width"] / 2, page.box["y"] + page.box["height"] / 2
    page.page.mouse.move(*center)
    page.find("#map-canvas").focus()
    for _ in range(3):
        page.page.mouse.wheel(0, -120)
    zoomed = np.exp(3 * 120 / 400) * (np.array(spots) - center) + center
    page.turns(zoomed[-1], tile_color(298))
    page.settle()
    x, y = zoomed.round().astype(int).T
    assert np.allclose(page.pixels()[y, x], colors[1:-1], atol=12)
    page.find("#map-show-grid").click()
    blank = (
        "Object.assign(document.createElement('canvas'), { width: 16, height: 16 }).toDataURL()"
    )
    tiles = "[...document.querySelectorAll('.map-images canvas')]"
    page.until(f"{tiles}.every((tile) => tile.toDataURL() !== {blank})")
    assert page.find(".map-images canvas").count() == 200


def test_the_grid_shows_what_is_selected_in_it(opened):
    page = opened()
    page.find("#map-show-grid").click()
    tiles = page.find(".map-images button")
    page.find("#map-grid select").select_option(label="Score")
    page.find("#map-grid").get_by_label("Reverse the order").click()
    tiles.nth(1).click()
    page.page.keyboard.press("Space")
    page.page.keyboard.press("PageDown")
    page.until("document.activeElement.title === 'animals/098.jpg'")
    page.page.keyboard.down("Shift")
    tiles.nth(4).click()
    page.page.keyboard.up("Shift")
    assert page.text("#map-selection h3") == "5 images selected"  # 298, and 98 to 95
    page.find("#map-selection").get_by_text("Show in grid").click()
    assert page.text("#map-grid h3") == "Selected images: 5"
    assert [tile.get_attribute("title")[8:11] for tile in tiles.all()] == [
        "298", "098", "097", "096", "095",
    ]  # fmt: skip
    page.find("#map-filter").fill("/29")
    page.until("document.querySelectorAll('.map-images button').length === 1")
    page.find("#map-grid").get_by_text("Show all visible").click()
    assert tiles.count() == 10
    tiles.nth(4).click(modifiers=["Shift"])  # while the cursor is at an image that is hidden
    assert page.text("#map-selection h3") == "6 images selected"


def test_the_map_can_have_the_whole_window(opened):
    page = opened()
    page.find("#map-full").click()
    box = page.find("#map-explorer").bounding_box()
    assert (box["x"], box["y"], box["width"], box["height"]) == (0, 0, 1280, 900)
    page.page.mouse.move(400, 500)
    page.page.mouse.wheel(0, -300)
    assert not page.find("#map-hint").is_visible()
    page.find("#map-canvas").focus()
    page.page.keyboard.press("Escape")
    assert page.find("#map-explorer").bounding_box()["height"] != 900


def test_all_can_be_done_by_keyboard_and_is_said_aloud(opened):
    page = opened()
    press = page.page.keyboard.press
    for _ in range(40):
        press("Tab")
        if page.page.evaluate("document.activeElement.id") == "map-canvas":
            break
    press("ArrowRight")
    first = re.fullmatch(r"animals/(\d+)\.jpg, Class: new-2", page.live_text)
    press("ArrowRight")
    press("ArrowDown")
    row = int(first[1]) + 21
    assert page.live_text.startswith(f"animals/{row:03d}.jpg, ")
    assert page.find("#map-tip").is_visible()
    press("Enter")
    assert page.text("#map-panel h3") == SMALL.names[row]
    assert page.live_text.startswith(f"Opened {SMALL.names[row]}")
    press("Tab")  # Close
    press("Tab")
    press("Enter")
    assert page.text("#map-panel h3") == expected(row)[0]
    press("Escape")
    assert page.find("#map-panel h3").count() == 0
    assert "#" not in page.page.url
    assert page.page.evaluate("document.activeElement.id") == "map-canvas"
    press("Space")
    assert page.live_text == "1 image selected."
    assert page.find("#map-selection .map-tiles button").get_attribute("title") == expected(row)[0]


def test_keys_zoom(opened):
    page = opened()
    page.find("#map-canvas").focus()
    at = page.spot(SMALL, 21)
    page.page.keyboard.press("+")
    assert page.color(*at) != BLUE
    page.page.keyboard.press("-")
    assert page.color(*at) == BLUE
    for key in (*"++++", "Home"):
        page.page.keyboard.press(key)
    page.turns(at, BLUE)


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_the_map_glides_unless_the_reader_wants_no_motion(opened, motion):
    one_sheet = small_map(count=60)
    page = opened(one_sheet, after="#image=10", reduced_motion=motion, clock=True)
    tile = page.find("#map-panel .tile").first.bounding_box()
    page.turns((tile["x"] + 5, tile["y"] + 5), tile_color(0))  # no image is decoded from now on
    page.page.clock.pause_at(2_000_000_000_000)

    def shot():
        return page.find("#map-canvas").screenshot()

    for _ in range(5):
        page.find("#map-in").click()
    page.page.clock.run_for(500)
    page.page.evaluate("location.hash = '#image=128'")
    page.page.clock.run_for(100)
    soon = shot()
    page.page.clock.run_for(500)
    assert (soon == shot()) == (motion == "reduce")


def strange(**changes):
    """A map with hostile names of images and classes."""
    count = len(HOSTILE)
    place = np.stack(np.divmod(np.arange(count), 4), axis=1).astype(np.float64)
    classes = Coloring("=Class", np.arange(count), tuple(HOSTILE), "".join(HOSTILE))
    parts = dict(names=HOSTILE, colorings=(classes,)) | changes
    return small_map(parts.pop("names"), count, xy=place, **parts)


def elements(page):
    """The kinds of elements that it consists of when all has been opened."""
    page.find("#map-table summary").click()
    page.page.keyboard.down("Shift")
    draw_lasso(page, strange(), (0, 3, 11, 8))
    page.page.keyboard.up("Shift")
    assert page.text("#map-selection h3") == "12 images selected"
    every = "[...document.querySelectorAll('*')].map((one) => one.tagName)"
    return set(page.page.evaluate(every))


def test_hostile_names_and_classes_stay_text_and_no_cell_of_a_table_is_a_formula(opened):
    page = opened(strange())
    for row, name in enumerate(HOSTILE):
        page.page.evaluate(f"location.hash = '#image={10 + 2 * row}'")
        page.settle()
        assert page.find("#map-panel h3 bdi").text_content() == written_out(name)
        assert page.find("#map-panel dd").first.text_content() == written_out(name)
    plain = strange(names=[str(row) for row in range(len(HOSTILE))], colorings=SMALL_CLASSES)
    assert elements(page) == elements(opened(plain, after="#image=10"))
    head, *rows = saved(page)
    assert head == ["number", "path", "'=class"]
    assert len(rows) == len(HOSTILE)
    assert not any(cell.startswith(tuple("=+-@\t\r")) for row in rows for cell in row)
    assert ["'" + HOSTILE[9]] * 2 in [row[1:] for row in rows]
    for text in ("<img", "e\u0301"):  # the second is composed in the name
        page.find("#map-filter").fill(text)
        assert page.text("#map-count") == "1 of 12 images"


def test_tiles_lead_to_the_map_and_classes_to_the_grid_in_the_frame_of_a_notebook(
    browser, tmp_path
):
    (tmp_path / "report.html").write_text(linked_page(), encoding="utf-8")
    cell = Frame(tmp_path / "report.html", 900)._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<!doctype html><title>1</title>{cell}", "utf-8")
    page = browser.new_page()
    requests, complaints = [], []
    listen(page, complaints, requests)
    page.goto((tmp_path / "notebook.html").as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("#images-to-look-at a").click()
    frame.locator("#map-panel h3").get_by_text("animals/047.jpg").wait_for()
    frame.locator("#map-panel .map-close").click()
    frame.locator("#new-1 a").get_by_text("All images of this class").click()
    frame.locator("#map-grid h3").get_by_text("new-2: 105").wait_for()
    assert frame.locator(".map-images button").count() == 105
    frame.locator("#new-1 figure a").click()  # back on the map
    frame.locator("#map-panel h3").get_by_text("animals/047.jpg").wait_for()
    assert not frame.locator("#map-grid").is_visible()
    assert not frame.locator("#known-1 table").is_visible()
    frame.locator("#known-classes .overview a").click()  # opens what is folded
    frame.locator("#known-1 table").wait_for()
    for place in ("%E0%A4%A", "dog"):  # the first is one that no link of ours says
        frame.locator("body").evaluate(f"() => {{ location.hash = '#class={place}' }}")
    frame.locator("#map-grid h3").get_by_text("dog: 90").wait_for()
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [page.url]
    page.close()


def test_on_paper_all_that_is_folded_is_there_and_no_control(opened):
    page = opened(content=linked_page()).page
    assert not page.locator("#known-1 table").is_visible()
    page.emulate_media(media="print")
    assert page.locator("#known-1 table").is_visible()
    assert page.locator("#map-legend li").last.is_visible()
    for control in (".map-bar", ".map-tools", "#map-legend .map-buttons", "#map-table", "nav"):
        assert not page.locator(control).is_visible(), control


def test_a_telephone_needs_no_sideways_scrolling(opened):
    """Long names are broken, and open tables scroll by themselves."""
    path = f"/{'long' * 30}"
    image_map = small_map([f"{path[1:]}{row}.jpg" for row in range(300)])
    series = {name: [(1, 0.123456789)] for name in ("kNN accuracy", "frozen start", "raw pixels")}
    sections = (
        ("Origin", (Facts("Encoder", (("Source", path),), folded=False),)),
        ("Training curves", (Chart("kNN", "epoch", "kNN", series),)),
        ("Settings", (Facts("All settings", (("encoder", path),)),)),
    )
    content = render(Page("nearkin train", "Encoder", "A test.", sections), image_map)
    page = opened(content=content, width=360, height=740).page
    page.evaluate("location.hash = '#image=104'")
    page.evaluate("for (const folded of document.querySelectorAll('details')) folded.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_twenty_thousand_images_fit_and_can_be_used(opened, tmp_path):
    count = 20_000
    rng = np.random.default_rng(0)
    rough = rng.integers(24, 232, (256, 12, 12, 3)).astype(np.uint8).repeat(4, 1).repeat(4, 2)
    one = sheet(rough, 16)
    sheets = (one,) * -(-count // 256)
    assert sum(map(len, sheets)) > 8_500_000  # as much as photographs take
    of, similarity = rng.integers(0, 100, count), rng.random((count, 12)).astype(np.float32)
    classes = tuple(f"class-{each:03d}" for each in range(100))
    large = small_map(
        [f"{classes[each]}/image-{row:05d}.jpg" for row, each in enumerate(of)],
        count=300,
        number=np.arange(count),
        xy=rng.normal(size=(count, 2)),
        neighbors=rng.integers(0, count, (count, 12)),
        similarity=similarity,
        colorings=(Coloring("Label", of, classes), Coloring("Score", similarity[:, 0])),
        sheets=sheets,
        side=48,
        columns=16,
        per_sheet=256,
        total=50_000,
    )
    page = opened(large, after="#image=19999")
    assert (tmp_path / "page.html").stat().st_size < 15_000_000
    assert page.text("#map-count") == "20,000 images"
    assert page.text("#map-panel h3").endswith("image-19999.jpg")
    assert "A sample of 20,000 of 50,000 images." in page.text("#map")


@pytest.fixture
def served(browser):
    """Opens the small map from a server: the page, and the site."""
    site = Kept(SMALL)
    with serving(site) as server:
        page = OpenPage(browser, server.url)
        page.find("#map-classes").wait_for()
        page.find("#map-classes summary").click()
        yield page, site
        page.end(f"http://127.0.0.1:{server.port}/")
    assert site.log == []


def name(page, cluster, text):
    row = page.find("#map-classes li").filter(has=page.page.get_by_text(cluster, exact=True))
    row.locator("input[type=text]").fill(text)
    row.get_by_text("Save").click()


def test_a_name_is_kept_over_a_reload(served):
    page, site = served
    assert page.texts("#map-classes bdi") == ["new-1", "new-2"]
    name(page, "new-1", "violins")
    page.find("#map-legend").get_by_text("violins").wait_for()
    assert site.requests == [("name", ["new-1"], "violins")]
    page.page.reload()
    page.find("#map-legend").get_by_text("violins").wait_for()
    assert page.texts("#map-legend bdi") == ["violins", "new-2", "dog"]
    assert page.color(*page.spot(SMALL, 21)) == BLUE
    page.find("#map-classes summary").click()
    name(page, "new-1", "")
    page.find("#map-legend").get_by_text("new-1").wait_for()


def test_classes_of_one_name_are_one(served):
    page, site = served
    page.find("#map-classes").get_by_text("Merge selected classes").click()
    merged = page.find("#map-classes input[placeholder='Name of the merged class']")
    merged.fill(" ")
    page.page.keyboard.press("Enter")
    page.find("#map-status").get_by_text("Type a name first.").wait_for()
    assert site.requests == []
    merged.fill("violins")
    page.find("#map-classes").get_by_text("Merge selected classes").click()
    page.find("#map-status").get_by_text("Select two or more classes").wait_for()
    for tick in page.find("#map-classes input[type=checkbox]").all():
        tick.check()
    page.find("#map-classes").get_by_text("Merge selected classes").click()
    page.find("#map-legend").get_by_text("violins").wait_for()
    assert site.requests == [("name", ["new-1", "new-2"], "violins")]
    assert page.texts("#map-legend bdi") == ["violins", "dog"]
    assert page.texts("#map-legend li span") == ["210", "90"]


def test_lists_and_links_and_filters_go_by_names_of_classes_not_by_their_numbers(served):
    page, _ = served
    page.find("#map-legend .map-entry").nth(2).click()  # hides dog
    page.page.evaluate("location.hash = '#class=new-2'")
    page.find("#map-grid h3").get_by_text("new-2: 105").wait_for()
    name(page, "new-1", "dog")
    page.until("document.querySelectorAll('#map-legend .map-entry').length === 2")
    assert page.text("#map-count") == "105 of 300 images"
    assert page.text("#map-grid h3") == "new-2: 105"
    page.find("#map-filters button").click()
    name(page, "new-2", "violas")
    page.find("#map-grid h3").get_by_text("new-2: 0").wait_for()
    page.page.evaluate("location.hash = '#class=new-2&'")  # as the page calls it
    page.find("#map-grid h3").get_by_text("violas: 105").wait_for()


def test_selected_images_become_a_class_or_files(served):
    page, site = served
    page.find("#map-lasso").click()
    draw_lasso(page, SMALL, (45, 48, 108, 105))
    page.find("#map-selection input[placeholder='Name of a new folder']").fill("some")
    page.find("#map-selection").get_by_text("Copy images").click()
    page.find("#map-status").get_by_text("16 images copied to /runs/1/exports/some").wait_for()
    page.find("#map-selection input[placeholder='Name of the new class']").fill("violas")
    page.find("#map-selection").get_by_text("Make a new class").click()
    page.find("#map-legend").get_by_text("violas").wait_for()
    (_, _, copied), (what, split, _) = site.requests
    assert what == "split"
    assert len(split) == 16
    assert copied == split
    assert page.texts("#map-legend li span") == ["97", "97", "90", "16"]
    page.find("#map-classes").get_by_text("Copy all images by class").click()
    page.find("#map-classes input[placeholder='Name of a new folder']").fill("all")
    page.find("#map-classes").get_by_text("Copy all images by class").click()
    page.find("#map-status").get_by_text("300 images copied").wait_for()
    assert site.requests[-1] == ("export", "all", None)


def test_keys_label_one_image_after_the_other_and_what_is_labeled_is_seen_and_kept(served):
    page, site = served
    name(page, "new-1", "cats")
    page.find("#map-legend").get_by_text("cats").wait_for()
    page.page.reload()
    page.find("#map-labels kbd").first.wait_for()
    assert page.texts("#map-labels button bdi") == ["cats", "dog"]
    page.find("#map-show-grid").click()
    page.find(".map-images button").nth(3).click()
    for key in "122":  # which moves on to the next each time
        page.page.keyboard.press(key)
    page.until("document.activeElement.title === 'animals/006.jpg'")
    page.find("#map-labels input").fill("horses")
    page.page.keyboard.press("Enter")
    page.find("#map-status").get_by_text("1 image labeled horses").wait_for()
    assert site.labels == {"16": "cats", "18": "dog", "20": "dog", "22": "horses"}
    assert page.texts("#map-labels button bdi") == ["cats", "dog", "horses"]
    page.page.keyboard.press("u")
    page.find("#map-status").get_by_text("The last label is undone").wait_for()
    assert site.labels == {"16": "cats", "18": "dog", "20": "dog"}
    suggested = page.find("#map-names option").all()
    assert [each.get_attribute("value") for each in suggested] == ["cats", "dog", "horses"]
    page.page.reload()
    page.find("#map-labels kbd").first.wait_for()
    assert page.texts("#map-labels button bdi") == ["dog", "cats"]  # the most used first
    page.find("#map-coloring").select_option(label="Your label")
    assert page.texts("#map-legend bdi") == ["cats", "dog", "unknown"]
    assert page.texts("#map-legend li span") == ["1", "2", "297"]
    assert page.color(*page.spot(SMALL, 3)) == BLUE
    page.find("#map-show-grid").click()
    assert page.texts(".map-images .labeled span") == ["cats", "dog", "dog"]


def proxied(port, prefix):
    """A server that has another one below some path, as JupyterLab has."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if not self.path.startswith(prefix):
                return self.send_error(404)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            behind = HTTPConnection("127.0.0.1", port)
            behind.request(
                self.command, self.path.removeprefix(prefix), body, dict(self.headers.items())
            )
            answer = behind.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.read())
            return behind.close()

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def test_a_page_works_behind_another_port_and_below_another_path(browser):
    site, prefix = Kept(SMALL), "/user/jane/proxy/8000"
    with serving(site) as server, proxied(server.port, prefix) as proxy, running(proxy):
        origin = f"http://localhost:{proxy.server_port}{prefix}"
        start = server.url.removeprefix(f"http://127.0.0.1:{server.port}")
        page = OpenPage(browser, origin + start)
        page.find("#map-labels kbd").first.wait_for()
        assert page.page.url == f"{origin}/"
        page.click(SMALL, 3)
        page.until("document.querySelector('#map-panel img').naturalWidth === 300")
        page.page.keyboard.press("1")
        page.find("#map-status").get_by_text("1 image labeled dog").wait_for()
        page.end(origin)
    assert site.labels == {"16": "dog"}


def test_selected_images_get_one_label_and_give_it_back(served):
    page, site = served
    site.labels["10"] = "horses"
    page.page.reload()
    page.find("#map-labels kbd").first.wait_for()
    page.find("#map-lasso").click()
    draw_lasso(page, SMALL, (0, 1, 21, 20))
    page.page.evaluate("location.hash = '#image=10'")
    page.find("#map-values").get_by_text("horses").wait_for()
    page.find("#map-labels button bdi").get_by_text("dog").click()
    page.find("#map-status").get_by_text("4 images labeled dog").wait_for()
    assert page.page.evaluate("document.activeElement.innerText").endswith("dog")
    page.find("#map-values").get_by_text("horses").wait_for(state="detached")
    assert set(site.labels.values()) == {"dog"}
    page.find("#map-labels").get_by_text("Remove label").click()
    page.find("#map-status").get_by_text("4 images without a label now").wait_for()
    assert site.labels == {}
    page.find("#map-labels").get_by_text("Undo").click()
    page.find("#map-status").get_by_text("The last label is undone").wait_for()
    assert set(site.labels.values()) == {"dog"}
    page.find("#map-labels").get_by_text("Undo").click()
    page.find("#map-selection h3").click()
    page.until("document.querySelector('#map-labels > button:last-child').disabled")
    assert site.labels == {"10": "horses"}


def test_what_the_server_refuses_is_told_as_text(served):
    page, site = served
    site.refusal = "another process writes <b>there</b>"
    name(page, "new-1", "violins")
    page.find("#map-status").get_by_text("another process writes <b>there</b>").wait_for()
    assert page.texts("#map-legend bdi") == ["new-1", "new-2", "dog"]
    assert page.complaints.pop().startswith("Failed to load resource")  # the browser's own words


def test_an_image_from_outside_is_searched_for_and_what_is_found_is_shown_large(served):
    page, site = served
    site.found = {
        "xy": [5.0, -5.0],
        "neighbors": [
            {"number": 104, "name": "animals/047.jpg", "label": "cat", "similarity": 0.93},
            {"number": 7, "name": HOSTILE[0], "label": "", "similarity": 0.5},
        ],
    }
    file = {"name": "mine.webp", "mimeType": "image/webp", "buffer": site.gray}
    page.find(".map-bar input[type=file]").set_input_files(file)
    page.find("#map-status").get_by_text("2 nearest neighbors found.").wait_for()
    assert site.requests == [("search", site.gray)]
    assert page.text("#map-panel h3") == "Your image"
    tiles = page.find("#map-panel .map-tiles li > *")
    assert [tile.get_attribute("title") for tile in tiles.all()] == [
        "animals/047.jpg, cat, 0.93",
        f"{HOSTILE[0]}, 0.50",
    ]
    assert page.find("#map-panel li img").get_attribute("src") == "image/7"
    tiles.first.click()
    assert page.text("#map-panel h3") == "animals/047.jpg"
    assert page.find("#map-panel img").get_attribute("src") == "image/104"
    page.until("document.querySelector('#map-panel img').naturalWidth === 300")
    assert ("image", 104) in site.shown


@pytest.mark.parametrize("how", [{}, {"color_scheme": "dark", "width": 360, "height": 740}])
def test_a_neighbors_number_shows_where_two_images_are_alike(browser, how):
    site = Kept(SMALL)
    other = int(SMALL.number[SMALL.neighbors[47, 1]])
    with serving(site) as server:
        page = OpenPage(browser, server.url, **how)
        page.page.evaluate("location.hash = '#image=104'")
        number = page.find("#map-panel .map-where").nth(1)
        number.focus()
        assert number.get_attribute("aria-label") == f"0.80, where {expected(47)[1]} is alike"
        page.page.keyboard.press("Enter")
        images = page.find("#map-likeness img")
        images.nth(1).wait_for()
        assert ("likeness", 104, other) in site.requests
        alts = [image.get_attribute("alt") for image in images.all()]
        names = "animals/047.jpg", expected(47)[1]
        assert alts == [f"Where {a} is like {b}" for a, b in (names, names[::-1])]
        assert "from -0.13 (violet) to 0.75 (yellow)" in page.text("#map-likeness .note")
        assert number.get_attribute("aria-pressed") == "true"
        (left, right) = (image.bounding_box() for image in images.all())
        assert left["y"] == right["y"]
        assert left["width"] == pytest.approx(left["height"], abs=1)
        assert page.page.evaluate("document.documentElement.scrollWidth") <= how.get("width", 1280)
        page.page.keyboard.press("Enter")  # hides it again
        assert images.count() == 0
        assert number.get_attribute("aria-pressed") == "false"
        site.refusal = "no <b>place</b>"
        number.click()
        page.find("#map-likeness").get_by_text("no <b>place</b>").wait_for()
        assert page.complaints.pop().startswith("Failed to load resource")
        page.end(f"http://127.0.0.1:{server.port}/")


def test_an_edit_of_classes_leaves_the_panel_as_it_was_but_for_them(served):
    page, site = served
    page.page.evaluate("location.hash = '#image=104'")
    number = page.find("#map-panel .map-where").nth(1)
    number.click()
    page.find("#map-likeness img").nth(1).wait_for()
    page.page.evaluate("window.before = document.querySelectorAll('#map-panel .map-where')[1]")
    cluster = page.text("#map-values dd >> nth=0")
    name(page, cluster, "violins")
    page.find("#map-values").get_by_text("violins").wait_for()
    page.find("#map-same-class").get_by_text("More of violins").wait_for()
    assert page.find("#map-likeness img").count() == 2
    assert page.page.evaluate(
        "window.before === document.querySelectorAll('#map-panel .map-where')[1]"
    )
    site.found = {"xy": None, "neighbors": []}
    file = {"name": "mine.webp", "mimeType": "image/webp", "buffer": site.gray}
    page.find(".map-bar input[type=file]").set_input_files(file)
    page.find("#map-panel").get_by_text("Your image").wait_for()
    name(page, "new-2", "violas")
    page.find("#map-legend").get_by_text("violas").wait_for()
    assert page.text("#map-panel h3") == "Your image"


def test_a_label_that_is_refused_is_of_no_key_and_is_not_undone(served):
    page, site = served
    box, status = page.find("#map-labels input"), page.find("#map-status")
    keys = page.texts("#map-labels button bdi")
    box.fill("cat")
    page.page.keyboard.press("Enter")
    status.get_by_text("Select unlabeled images, or move to one, first.").wait_for()
    assert site.requests == []
    page.find("#map-show-grid").click()
    page.find(".map-images button").nth(3).click()
    site.refusal = "the disk is full"
    box.fill("cat")
    page.page.keyboard.press("Enter")
    status.get_by_text("the disk is full").wait_for()
    assert page.complaints.pop().startswith("Failed to load resource")
    assert box.input_value() == "cat"
    assert page.texts("#map-labels button bdi") == keys
    assert page.find("#map-labels button").last.is_disabled()
    site.refusal = None
    page.find(".map-images button").nth(3).focus()
    page.page.keyboard.press("0")  # of no class
    page.page.keyboard.press("u")
    status.get_by_text("Nothing to undo.").wait_for()
    assert site.labels == {}


def test_edits_leave_the_place_in_lists_and_what_is_typed(served):
    page, _ = served
    page.find("#map-show-grid").click()
    page.find("#map-table summary").click()
    for section in ("#map-grid", "#map-table"):
        page.find(section).get_by_text("Next").click()
        page.find(section).get_by_text("Page 2 of").wait_for()
    page.find(".map-images button").nth(3).click(modifiers=["Shift"])
    folder = page.find("#map-selection input[placeholder='Name of a new folder']")
    folder.fill("half")
    page.page.evaluate("document.querySelector('#map-grid').scrollTop = 40")
    name(page, "new-1", "violins")
    page.find("#map-grid span").get_by_text("violins").first.wait_for()
    page.find("#map-table td").get_by_text("violins").first.wait_for()
    for section in ("#map-grid", "#map-table"):
        page.find(section).get_by_text("Page 2 of").wait_for()
    assert page.page.evaluate("document.querySelector('#map-grid').scrollTop") == 40
    assert folder.input_value() == "half"


def test_classes_stay_ticked_until_they_are_merged(served):
    page, site = served
    ticked = page.find("#map-classes input:checked")
    for tick in page.find("#map-classes input[type=checkbox]").all():
        tick.check()
    merged = page.find("#map-classes input[placeholder='Name of the merged class']")
    merged.fill("new-2")
    site.refusal = "new-2 is another class"
    page.find("#map-classes").get_by_text("Merge selected classes").click()
    page.find("#map-status").get_by_text("new-2 is another class").wait_for()
    assert page.complaints.pop().startswith("Failed to load resource")
    assert ticked.count() == 2
    assert merged.input_value() == "new-2"
    site.refusal = None
    name(page, "new-1", "violins")
    page.find("#map-legend").get_by_text("violins").wait_for()
    assert ticked.count() == 2
    merged.fill("violas")
    page.find("#map-classes").get_by_text("Merge selected classes").click()
    page.find("#map-status").get_by_text("are now violas").wait_for()
    assert ticked.count() == 0
    assert merged.input_value() == ""


def test_a_region_is_shown_in_its_image(served):
    page, site = served
    page.page.evaluate("location.hash = '#image=308'")
    shown = page.find("#map-panel img[src='whole/308']")
    shown.wait_for()
    page.until("[...document.querySelectorAll('#map-panel img')].every((one) => one.naturalWidth)")
    assert {("image", 308), ("whole", 308)} <= site.shown
    page.page.evaluate("location.hash = '#image=310'")
    page.find("#map-panel img[src='image/310']").wait_for()
    assert "In its image" not in page.texts("#map-panel h4")


def test_one_finger_scrolls_the_page_and_two_move_and_zoom_the_map(opened):
    page = opened(width=360, height=740, has_touch=True)
    fingers = page.context.new_cdp_session(page.page)

    def touch(kind, *points):
        places = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        fingers.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": places})

    where = "document.documentElement.scrollTop"
    before, x, y = page.page.evaluate(where), 180, page.box["y"] + 200
    drawn = "document.getElementById('map-canvas').toDataURL()"
    whole = page.page.evaluate(drawn)
    touch("Start", (x, y))
    for step in range(1, 11):
        touch("Move", (x, y - 12 * step))
    page.until(f"{where} > {before} + 60")
    page.page.wait_for_timeout(500)
    touch("Move", (x, y - 120))  # at rest, so that the page does not glide on
    touch("End")
    assert page.page.evaluate(drawn) == whole
    before, y = page.page.evaluate(where), page.find("#map-canvas").bounding_box()["y"] + 200
    touch("Start", (x - 20, y), (x + 20, y))
    for step in range(1, 11):
        touch("Move", (x - 20 - 5 * step, y), (x + 20 + 5 * step, y))
    touch("End")
    page.settle()
    assert page.page.evaluate(where) == before
    assert page.page.evaluate(drawn) != whole
