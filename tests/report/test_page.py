"""Pages are one file that shows whatever it is given as text, to everybody."""

import base64
import hashlib
import io
import os
import re
import shlex
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import get_args

import builders
import numpy as np
import pytest
from browser import HOSTILE, opened, written_out
from builders import confusion_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import UndefinedError
from msgspec.structs import replace
from PIL import Image

from nearkin.config import ClassifyConfig, DiscoverConfig, TrainConfig
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import CUSTOM
from nearkin.errors import CheckpointError
from nearkin.evaluation.embeddings import embeddings_of
from nearkin.report.encoder_report import command, license_findings, typed
from nearkin.report.image_map import thumbnails
from nearkin.report.page.blocks import (
    Block,
    Cards,
    Chart,
    ClassView,
    Command,
    Confusion,
    Facts,
    Findings,
    Listing,
    Page,
    Pairs,
    Paragraphs,
    Table,
    Tile,
    Tiles,
)
from nearkin.report.page.html import TEMPLATES, drawn, render, round_ticks, text
from nearkin.report.pages import page_of, store_page
from nearkin.run.folder import RunFolder

DOT = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="


def full(name="cat", uri=DOT):
    """A page with a block of every kind, in which every string from outside is `name`."""
    image = Tile(name, uri, 0.9876)
    view = ClassView(name, 30, image, (image,) * 3, (image,), 0.5, 0.25, -0.125, "", (name,), name)
    known = replace(view, nearest_known=f"{name}!")
    points = [(number, 0.1 * number) for number in range(2, 6)]
    two = {name: points, f"{name}2": points}
    results = Table(name, (name, name), ((name, name),), name)
    return page_with(
        ("Findings", [Findings((name,)), Paragraphs((name,))]),
        ("Novel classes", [Cards("new", (view,), 100)]),
        ("Known classes", [Cards("known", (known,), 100)]),
        (
            "Images to look at",
            [Tiles(name, name, (image,)), Pairs(name, ((image, image, "", name),))],
        ),
        ("Scores", [results, confusion_of([[20, 0], [10, 9]], (name, name), (name, name))]),
        ("Number of classes", [Chart(name, name, name, two, name, 3, (2, 4)), results]),
        ("Training curves", [Chart(name, name, name, {name: points})]),
        ("Protocol", [Listing(((name, ""),))]),
        ("Settings", [Command("Again:", name), Facts("All", ((name, name),))]),
        ("Next steps", [Listing(((name, name),), ordered=True)]),
        title=name,
        lead=name,
    )


def page_with(*sections, title="cats", lead="A test.", **more):
    blocks = tuple((heading, tuple(blocks)) for heading, blocks in sections)
    return Page("nearkin discover", title, lead, blocks, **more)


def showing(*blocks):
    return page_with(("Section", blocks))


def blocks_of(page):
    return [block for _, blocks in page.sections for block in blocks]


class Read(HTMLParser):
    """What a page consists of; fails where elements are not closed in turn."""

    def __init__(self, page):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names)
        self.elements.append((tag, dict(attrs)))
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def handle_comment(self, data):
        raise AssertionError(data)

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def texts_in(self, tag):
        return [data for parent, data in self.texts if parent == tag]

    def values(self, attribute):
        return [attrs[attribute] for _, attrs in self.elements if attribute in attrs]


def outline(page):
    """Elements and the names of their attributes, without what is written in them."""
    return [(tag, sorted(attributes)) for tag, attributes in Read(page).elements]


@cache
def plain():
    """The outline of a page whose names are harmless."""
    return outline(render(full("cat")))


PAGES = {
    "full": full(),
    "bare": page_with(),
    "empty class": showing(
        Cards("new", (ClassView("new-1", 0), ClassView("new-2", 1, score=float("nan"))), 1)
    ),
    "no images": showing(Cards("new", (), 0), Cards("known", (ClassView("dog", 0),), 0)),
}
every_page = pytest.mark.parametrize("content", PAGES.values(), ids=PAGES)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_anywhere_changes_nothing_but_the_text(name):
    page = render(full(name))
    assert outline(page) == plain()
    read = Read(page)
    assert written_out(name) in read.texts_in("bdi")
    assert written_out(name) in [attributes["alt"] for attributes in read.of("img")]
    assert page.encode("utf-8")


@settings(max_examples=10)
@given(st.text(st.characters(exclude_categories=()), min_size=1))
def test_any_name_changes_nothing_but_the_text(name):
    assert outline(render(full(name))) == plain()


def test_what_cannot_be_seen_is_written_out():
    for value in ("\u202egnp.exe", "a\nb", "\x1b[31m", "caf\udce9", "\u2028\ufeff\u200b"):
        assert text(value).isprintable()
        assert text(value).encode("latin-1").decode("unicode_escape") == value
    assert text("Größe 猫") == "Größe 猫"


def test_every_value_of_a_template_is_escaped_once():
    template = TEMPLATES.from_string('<p class="{{ a }}">{{ b }}{{ c }}</p>')
    assert template.render(a='"', b=text("<"), c="&\x1b") == '<p class="&quot;">&lt;&amp;\\x1b</p>'
    with pytest.raises(UndefinedError):
        template.render(a="", b="")


@every_page
def test_nothing_is_loaded_run_or_sent(content):
    page = render(content)
    read = Read(page)
    assert not re.search(r"https?:|//|@import|url\(", re.sub(r'src="data:[^"]*"', "", page))
    assert all(source.startswith("data:image/") for source in read.values("src"))
    assert all(target.startswith("#") for target in read.values("href"))
    tags = {tag for tag, _ in read.elements}
    assert not tags & {"script", "link", "iframe", "object", "embed", "form", "base", "input"}
    assert not any(name.startswith("on") for _, attrs in read.elements for name in attrs)
    assert not read.values("style")


@every_page
def test_the_policy_allows_this_style_and_images_in_the_page_and_nothing_else(content):
    page = render(content)
    metas = Read(page).of("meta")
    (policy,) = (meta["content"] for meta in metas if "http-equiv" in meta)
    (style,) = re.findall("<style>(.*?)</style>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    own = f"img-src data:; style-src 'sha256-{digest}'"
    assert policy == f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"
    assert page.index("Content-Security-Policy") < page.index("<style>")
    assert "<" not in style


@every_page
def test_pages_can_be_used_without_eyes_or_a_mouse(content):
    read = Read(render(content))
    assert read.of("html") == [{"lang": "en"}]
    assert len(read.of("main")) == len(read.of("h1")) == 1
    levels = [int(tag[1]) for tag, _ in read.elements if re.fullmatch(r"h\d", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all("alt" in image for image in read.of("img"))
    assert all(cell["scope"] in ("row", "col") for cell in read.of("th"))
    assert len(read.of("caption")) == len(read.of("table"))
    silent = [drawing for drawing in read.of("svg") if drawing.get("role") != "img"]
    assert all(drawing["aria-hidden"] == "true" for drawing in silent)
    assert len(read.of("summary")) == len(read.of("details"))


@every_page
def test_every_link_leads_somewhere_on_the_page(content):
    read = Read(render(content))
    ids = read.values("id")
    assert len(set(ids)) == len(ids)
    assert {target[1:] for target in read.values("href")} <= set(ids)
    sections = [attributes["id"] for attributes in read.of("section")]
    assert sections == [target[1:] for target in read.values("href")[: len(sections)]]


def test_the_image_of_a_class_is_shown_large_and_all_others_with_their_scores():
    read = Read(render(full()))
    assert len(read.of("figure")) == 2
    assert len(read.of("img")) == 2 * (1 + 1 + 3 + 1) + 1 + 2  # overview, medoid, core, border
    assert read.texts_in("span").count("0.99") == 2 * 4 + 1


def test_parts_without_content_are_left_out_and_not_in_the_contents():
    empty = (
        Findings(()), Paragraphs(()), Listing(()), Facts("All", ()), Tiles("", "", ()), Pairs("", ()),
        Cards("new", (), 0), Chart("Loss", "epoch", "loss", {}),
    )  # fmt: skip
    page = page_with(
        *((type(block).__name__, [block]) for block in empty), ("Left", [blocks_of(full())[0]])
    )
    assert Read(render(page)).texts_in("h2") == ["Left"]
    assert len(Read(render(full())).texts_in("h2")) == 10


def test_known_classes_can_be_opened_and_others_are_open():
    views = Cards("new", (ClassView("new-1", 3),), 5), Cards("known", (ClassView("dog", 2),), 5)
    page = render(showing(*views))
    assert page.index("<h3><bdi>new-1</bdi></h3>") < page.index("<summary><h3><bdi>dog</bdi>")
    assert ": 2 images" in " ".join(data for _, data in Read(page).texts)


def test_numbers_of_a_class_that_are_not_known_are_not_shown():
    def rows(**known):
        read = Read(render(showing(Cards("new", (ClassView("new-1", 30, **known),), 40))))
        return read.texts_in("th"), read.texts_in("td")

    assert rows()[0] == ["Images"]
    assert rows(score=float("nan"), nearest_known="new-1")[0] == ["Images"]
    names, cells = rows(score=0.5, seed_agreement=0.0, silhouette=-0.126, nearest_known="dog")
    assert names == ["Images", "Score", "Seed agreement", "Silhouette", "Nearest known class"]
    assert cells[::2] == ["30 (75%)", "0.50", "0.00", "-0.13", "dog"]


def test_a_class_it_may_be_one_with_is_linked_if_it_is_shown():
    views = ClassView("new-1", 3, merge=("new-2", "gone")), ClassView("new-2", 2)
    page = render(showing(Cards("new", views, 5)))
    assert '<a href="#new-2">new-2</a>, gone</td>' in page


def shades(counts):
    read = Read(render(showing(confusion_of(counts))))
    return [cell["class"] for cell in read.of("td")], read


def test_cells_of_the_confusion_matrix_are_shaded_by_their_share_of_the_true_class():
    classes, read = shades(((0, 1, 999), (5, 5, 0), (0, 0, 0), (1000, 2000, 0)))
    numbers = [0, 1, 10, 5, 5, 0, 0, 0, 0, 4, 7, 0]
    assert classes == [f"shade{number}" for number in numbers]
    assert read.texts_in("td") == ["1", "999", "5", "5", "1,000", "2,000"]


def test_a_matrix_too_large_to_be_seen_at_once_is_folded():
    for many in (20, 21):
        _, read = shades(tuple((1,) * many for _ in range(many)))
        assert (read.texts_in("summary") == ["Confusion matrix"]) == (many > 20)


def test_of_a_thousand_classes_the_largest_confusions_are_listed():
    rng = np.random.default_rng(0)
    counts = np.diag(np.full(1_000, 50)) + rng.integers(0, 2, (1_000, 1_000))
    counts[:, 7] = counts[8] = 0
    counts[7, 5], counts[3, 999] = 30, 40
    page = render(showing(confusion_of(counts)))
    assert len(page) < 100_000
    read = Read(page)
    assert read.texts_in("th")[4:6] == ["3", "7"]
    cells = read.texts_in("td")
    assert cells[:2] == ["999", "40"]
    assert cells[2] == f"{40 / counts[3].sum():.0%}"
    assert len(cells) == 3 * 100
    # The classes behind those that are matched are no classes of one name.
    apart = Confusion(("a", "b"), ("a", "new-1"), 1, ((0, 0, 9), (1, 1, 5)))
    assert apart.largest(9) == [(1, 1, 5)]


@given(
    st.lists(st.floats(-1e9, 1e9).map(lambda x: x + 0.0), min_size=1)
    | st.lists(st.integers(-1000, 1000), min_size=1)
)
def test_ticks_are_few_even_and_enclose_the_values(values):
    ticks = round_ticks(values)
    assert 2 <= len(ticks) <= 8
    steps = np.diff(ticks)
    assert (steps > 0).all()
    np.testing.assert_allclose(steps, steps[0], rtol=1e-3)
    assert ticks[0] <= min(values) + 1e-6 * steps[0]
    assert max(values) - 1e-6 * steps[0] <= ticks[-1]
    if all(isinstance(value, int) for value in values):
        assert all(tick.is_integer() for tick in map(float, ticks))


def chart_of(series, **more):
    return Read(drawn(Chart("Loss", "epoch", "loss", series, **more)))


def places(read):
    (line,) = read.of("polyline")
    return [tuple(map(float, place.split(","))) for place in line["points"].split()]


def test_points_stand_where_their_values_are():
    read = chart_of({"loss": [(0, 10.0), (10, 0.0), (5, 2.5)]})
    (left, top), (middle, low), (right, bottom) = places(read)
    assert middle == pytest.approx((left + right) / 2)
    assert low == pytest.approx(bottom - 0.25 * (bottom - top))
    grid = [float(line["y1"]) for line in read.of("line")]
    assert {top, bottom} <= set(grid)
    ticks = [label for label in read.texts_in("text") if label not in ("loss", "epoch")]
    assert ticks == ["0", "2", "4", "6", "8", "10"] * 2


def test_points_that_are_not_finite_are_left_out_and_any_others_are_drawn():
    holes = [(0, 1.0), (1, float("nan")), (2, float("inf")), (3, 0.5)]
    assert len(places(chart_of({"loss": holes}))) == 2
    for series in ({}, {"loss": []}, {"loss": [(0, float("nan"))]}):
        assert drawn(Chart("Loss", "epoch", "loss", series)) == ""
    for points in ([(3, 0.7)], [(1, 0.7), (2, 0.7)], [(0, 1e-12), (1, 1 + 1e-12)]):
        assert np.isfinite(places(chart_of({"loss": points}))).all()


def test_the_chosen_number_is_marked_and_the_interval_lies_around_it():
    points = [(k, 0.1 * k) for k in range(2, 11)]
    read = chart_of({"fit": points}, chosen=5, interval=(4, 6))
    (mark,) = (line for line in read.of("line") if line["class"] == "mark")
    (band,) = read.of("rect")
    assert float(mark["x1"]) == places(read)[3][0]
    assert float(band["x"]) == places(read)[2][0]
    assert float(band["x"]) + float(band["width"]) == pytest.approx(places(read)[4][0])
    assert "chosen: 5" in read.texts_in("text")
    # An interval beyond the curve is inside the chart.
    (band,) = chart_of({"fit": [(2, 0.1), (3, 0.2)]}, chosen=9, interval=(9, 9)).of("rect")
    assert 0 < float(band["x"]) < 640
    assert float(band["width"]) > 0


def test_several_lines_differ_in_more_than_color_and_have_a_legend_and_a_table():
    points = [(0, 0.0), (1, 1.0)]
    read = chart_of(dict.fromkeys("abcd", points))
    assert len({line["class"] for line in read.of("polyline")}) == 4
    dots = read.of("path")
    assert len({dot["class"] for dot in dots}) == len({dot["d"] for dot in dots}) == 4
    assert read.texts_in("li") == list("abcd")
    assert chart_of({"a": points}).of("li") == []
    read = chart_of({"a": [(1, 0.5), (2, 0.25), (2, 0.75)], "b": [(2, 123456.0)]})
    assert read.texts_in("th") == ["epoch", "a", "b", "1", "2", "2"]
    assert read.texts_in("td") == ["0.5", "0.25", "1.235e+05", "0.75"]


def test_a_browser_shows_the_page_light_by_day_and_dark_by_night(browser, tmp_path):
    images = open_images("digits")
    uris = thumbnails(images, np.arange(40))
    samples = tuple(Tile(images.names[row], uri, 0.9) for row, uri in uris.items())
    view = ClassView("new-1", 40, samples[0], samples[:24], samples[24:36], 0.9)
    digits = page_with(("Classes", [Cards("new", (view,), 100)]), tiny=True)
    file, means = tmp_path / "page.html", {}
    file.write_text(render(digits), encoding="utf-8")
    for scheme in ("dark", "light"):
        with opened(browser, file, color_scheme=scheme) as page:
            shot = Image.open(io.BytesIO(page.screenshot())).convert("L")
        pixels = np.asarray(shot)
        means[scheme] = pixels[:, :20].mean(), pixels.std()
    assert means["dark"][0] < 40 < 230 < means["light"][0]
    assert min(spread for _, spread in means.values()) > 10


def test_a_browser_takes_hostile_names_for_text(browser, tmp_path):
    page, file = render(full("".join(HOSTILE))), tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    with opened(browser, file) as shown:
        assert Read(shown.content()).elements == Read(page).elements


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def stored_in(folder, content, config, data="digits"):
    """A page as a run has it that has stored this content."""
    folder.write_settings(config, str(data))
    store_page(folder, content)
    images = open_images(data)
    return page_of(folder, images, embeddings_of(images, np.zeros((len(images), 3), np.float32)))


def test_a_page_is_stored_with_names_that_are_not_utf_8(folder, tmp_path):
    names = [os.fsdecode(b"caf\xe9.png"), "b.png"]
    data = builders.fill(tmp_path / "data", *names)
    tiles = tuple(Tile(name, "", 0.5) for name in names)
    content = showing(Tiles("Least certain images", "", tiles))
    stored = stored_in(folder, content, ClassifyConfig(encoder="encoder"), data)
    (shown,) = blocks_of(stored)
    assert [tile.path for tile in shown.tiles] == names
    assert all(tile.uri.startswith("data:image/") for tile in shown.tiles)
    assert "caf\\udce9.png" in render(stored)


def test_every_block_is_stored_as_it_is(folder):
    stored = stored_in(folder, full(), ClassifyConfig(encoder="encoder"))
    kinds = [type(block) for block in blocks_of(stored)]
    assert kinds == [type(block) for block in blocks_of(full())]
    assert {*kinds} == {*get_args(Block)}
    kept = (Findings, Listing, Command, Table, Facts, Confusion)
    for stored_block, block in zip(blocks_of(stored), blocks_of(full()), strict=True):
        assert stored_block == block or not isinstance(block, kept)


def test_a_table_of_classes_without_their_names_is_named(folder):
    folder.assignments.write_text("path,cluster\n")
    folder.clusters.write_text("cluster,kind\nnew-1,novel\n")
    with pytest.raises(CheckpointError, match=r"clusters\.csv .*it has no column name"):
        stored_in(folder, full(), DiscoverConfig(known=["0"]))


def test_a_license_keeps_its_capitals():
    origin = {"source": "the hub", "license": "CC-BY-NC-4.0", "sha256": ""}
    (line,) = license_findings({"origin": origin})
    assert line.startswith("License CC-BY-NC-4.0: these weights are not for every use")


def test_next_steps_can_be_pasted_into_a_shell_whatever_a_folder_is_called():
    hostile = "/mnt/c/Users/Jane Doe/$(touch x)"
    assert shlex.split(typed("embed", hostile, hostile)) == ["nearkin", "embed", hostile, hostile]
    assert typed("embed", "arrays") == "nearkin embed DATA"
    encoder = "object:tiny-0123"
    assert typed("embed", encoder, "arrays") == "nearkin embed ENCODER DATA"
    own = TrainConfig(augment=[{"kind": "strong"}], lr=0.5)
    words = shlex.split(command("photos", own, Path("runs/a b/config.toml")))
    expected = ["train", "photos", "--config", "runs/a b/config.toml", "--lr", "0.5"]
    assert words == ["nearkin", *expected]
    passed = command("photos", TrainConfig(backbone=CUSTOM), Path("runs/a b/config.toml"))
    assert passed == "nearkin train photos --backbone BACKBONE"
