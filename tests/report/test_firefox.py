"""Reports in Firefox: the same page, from a file, in a notebook and from its server."""

import pytest
from browser import SMALL, Kept, linked_page, serving
from firefox import firefox

from nearkin.result import Frame

pytestmark = [pytest.mark.slow, pytest.mark.needs("firefox")]
HEADING = "document.querySelector('#map-panel h3')?.textContent"
WATCH = "window.wrong = []; window.addEventListener('error', (event) => wrong.push(event.message))"


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with firefox(tmp_path_factory.mktemp("profile")) as window:
        yield window


def test_a_file_is_shown_and_can_be_used(window, tmp_path):
    (tmp_path / "report.html").write_text(linked_page(), encoding="utf-8")
    window.open((tmp_path / "report.html").as_uri())
    window.run(WATCH)
    window.click("#images-to-look-at a")
    window.until(f"{HEADING} === 'animals/047.jpg'")
    window.click("#map-show-grid")
    assert window.run("return document.querySelectorAll('.map-images button').length") == 200
    window.click(".map-images button:nth-child(3)")
    window.until(f"{HEADING} === 'animals/002.jpg'")
    window.type(["\ue014", " "])  # to the right
    window.until("document.querySelector('#map-selection h3').textContent === '1 image selected'")
    window.until(f"{HEADING} === 'animals/003.jpg'")
    window.click(".map-entry")
    window.until("document.getElementById('map-count').textContent === '195 of 300 images'")
    window.click("#known-classes .overview a")
    assert window.run("return document.getElementById('known-1').open")
    assert window.run("return CSS.supports('selector(details::details-content)')")  # for print
    assert window.run("return window.wrong") == []


def test_a_point_of_the_map_is_drawn_and_clicked(window, tmp_path):
    (tmp_path / "report.html").write_text(linked_page(), encoding="utf-8")
    window.open((tmp_path / "report.html").as_uri())
    window.run("document.getElementById('map-explorer').scrollIntoView()")
    pixels = (
        "document.getElementById('map-canvas').getContext('2d').getImageData(0, 0, 2000, 2000)"
    )
    colors = f"return new Set(new Uint32Array({pixels}.data.buffer)).size"
    assert window.run(colors) > 4
    window.click("#map-canvas")
    window.type(["\ue014", "\ue007"])  # to the right, Enter
    window.until(f"{HEADING}?.startsWith('animals/')")


def test_a_notebook_has_it_in_a_frame(window, tmp_path):
    (tmp_path / "report.html").write_text(linked_page(), encoding="utf-8")
    cell = Frame(tmp_path / "report.html", 900)._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<!doctype html><title>1</title>{cell}", "utf-8")
    window.open((tmp_path / "notebook.html").as_uri())
    window.command("WebDriver:SwitchToFrame", id=0)
    window.click("#images-to-look-at a")
    window.until(f"{HEADING} === 'animals/047.jpg'")
    window.click("#new-1 p a")
    window.until("document.querySelector('#map-grid h3')?.textContent === 'new-2: 105'")
    window.command("WebDriver:SwitchToFrame", id=None)


def test_keys_label_images_of_a_served_page(window):
    site = Kept(SMALL)
    with serving(site) as server:
        window.open(server.url)
        window.until("document.querySelector('#map-labels kbd')")
        window.click("#map-show-grid")
        window.click(".map-images button:nth-child(4)")
        window.type(["1", "1"])
        window.until("document.querySelectorAll('.map-images .labeled').length === 2")
    assert site.labels == {"16": "dog", "18": "dog"}
