"""`nearkin explore` as people use it: a real run, a real process, and what is left in the folder."""

import base64
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import sys
from contextlib import contextmanager, suppress

import kills
import numpy as np
import pytest
from browser import OpenPage
from nearkin_command import run as call
from PIL import Image

import nearkin
from nearkin.classifier.assignments import COLUMNS
from nearkin.data.opening import open_images
from nearkin.data.preprocessing import Preprocessing
from nearkin.discovery.clusters import CLUSTER_COLUMNS
from nearkin.discovery.rounds import accepted_classes
from nearkin.encoders.encoder import load, write_encoder
from nearkin.metrics import attentive
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv, write_csv

HOSTILE = "<img src=x onerror=alert(1)>.png"
LIMIT = 240
"""Seconds that a process may take: far more than it does, for machines that do other things."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Photographs of which number 0 lies on its side and number 12 has a hostile name."""
    folder = tmp_path_factory.mktemp("data") / "photographs"
    (folder / "sub").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(12):
        noise = rng.integers(0, 256, (3, 4, 3), dtype=np.uint8)
        enlarged = Image.fromarray(noise).resize((96, 72), Image.Resampling.NEAREST)
        enlarged.save(folder / f"{number:02d}.png")
    turned = Image.new("RGB", (2400, 1200), "blue")
    turned.paste("red", (0, 0, 1200, 1200))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(folder / "00.jpg", exif=exif)
    shutil.copy(folder / "03.png", folder / HOSTILE)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    """A run; its data are a folder, a row per image."""
    out = tmp_path_factory.mktemp("runs") / "run"
    settings = "--epochs=1 --batch-size=8 --backbone=tiny --image-size=32 --workers=0 -q"
    assert call("train", data, "-o", out, "--optimizer=sgd", *settings.split()) == 0
    return out


def with_classes(folder):
    """Put down classes as a discovery leaves them, and nothing that was done to them since."""
    names = [f"{number:02d}.png" for number in range(12)]
    rows = [[name, f"new-{1 + (n > 5)}", 0.9, *[""] * 6, "core"] for n, name in enumerate(names)]
    write_csv(folder.assignments, COLUMNS, rows)
    rows = [[f"new-{number}", "", "novel", 6, *[""] * 6] for number in (1, 2)]
    write_csv(folder.clusters, CLUSTER_COLUMNS, rows)
    for left in (folder.to_label, *folder.path.glob("original-*.csv")):
        left.unlink(missing_ok=True)
    shutil.rmtree(folder.exports, ignore_errors=True)


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run that a test may spoil."""
    shutil.copytree(trained, tmp_path / "run")
    with_classes(RunFolder(tmp_path / "run"))
    return tmp_path / "run"


class Page:
    """What a browser does that has opened the address, cookies and all."""

    def __init__(self, process, log, url):
        self.process, self.log = process, log
        match = re.fullmatch(r"open (http://127\.0\.0\.1:(\d+))(/\?token=[0-9a-f]{32})", url)
        self.origin, self.port, self.start = match[1], int(match[2]), match[3]
        self.cookie = self.site = ""
        answer, _ = self._ask("GET", self.start)
        assert answer.status == 303
        self.cookie = answer.headers["Set-Cookie"].split(";")[0]
        self.site = re.search(r'data-site="(\w{16})"', self.get("/").decode())[1]

    def _ask(self, method, target, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        headers = {"Cookie": self.cookie, "Origin": self.origin, "X-Nearkin-Site": self.site}
        connection.request(method, target, body, headers)
        answer = connection.getresponse()
        return answer, answer.read()  # after which the server closes the connection

    def get(self, target, status=200):
        answer, content = self._ask("GET", target)
        assert answer.status == status
        return content

    def image(self, target):
        return Image.open(io.BytesIO(self.get(target)), formats=["WEBP"])

    def post(self, target, value, status=200):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        answer, content = self._ask("POST", target, body)
        assert answer.status == status, content
        return json.loads(content)

    def refused(self, target, value, status):
        return self.post(target, value, status)["error"]


@contextmanager
def started(*command):
    """A process of its own, and what it prints on standard error."""
    reading, writing = os.pipe()

    def print_there():
        os.environ["NO_COLOR"] = "1"
        sys.stderr = os.fdopen(writing, "w", buffering=1)

    process = kills.start([*map(str, command)], print_there)
    os.close(writing)
    with os.fdopen(reading) as log:
        try:
            yield process, log
        finally:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(process, signal.SIGKILL)
                kills.finish(process)


@contextmanager
def exploring(run):
    """The page of a process of its own."""
    with started("explore", run) as (process, log):
        url = log.readline().strip()
        assert url.startswith("open "), url + log.read()
        assert log.readline() == "Ctrl-C ends it\n"
        yield Page(process, log, url)


def ended(page, signal_):
    """The exit code, and what has been printed since the address."""
    os.kill(page.process, signal_)
    return kills.finish(page.process), page.log.read()


@pytest.fixture(scope="module")
def explored(trained, tmp_path_factory):
    """A run that is looked at by all tests that leave it as they found it, and its page."""
    folder = tmp_path_factory.mktemp("explored") / "run"
    shutil.copytree(trained, folder)
    with_classes(RunFolder(folder))
    with exploring(folder) as page:
        yield folder, page


@pytest.fixture
def page(explored):
    folder, page = explored
    with_classes(RunFolder(folder))
    return page


def test_images_are_shown_upright_and_no_larger_than_a_screen(page):
    upright = page.image("/image/0")
    assert upright.size == (800, 1600)
    assert upright.getpixel((400, 100))[0] > 200 > 50 > upright.getpixel((400, 100))[2]
    assert upright.getpixel((400, 1500))[2] > 200
    assert "exif" not in upright.info
    assert page.image("/image/4").size == (96, 72)
    page.get("/image/14", status=404)
    page.get("/whole/0", status=404)  # it is no region


def test_an_image_is_most_similar_to_itself_and_its_copy(page, data):
    response = page.post("/search", (data / "03.png").read_bytes())
    names = [near["name"] for near in response["neighbors"]]
    assert set(names[:2]) == {"03.png", HOSTILE}
    assert len(names) == 14
    assert np.isfinite(response["xy"]).all()
    itself = response["neighbors"][names.index("03.png")]
    assert itself.pop("similarity") == pytest.approx(1, abs=1e-5)
    assert itself == {"number": 4, "name": "03.png", "label": "new-1"}
    assert response["neighbors"][names.index(HOSTILE)]["label"] == ""


def drawn(uri):
    """The pixels of an image in a `data:` URI."""
    kind, _, content = uri.removeprefix("data:image/").partition(";base64,")
    with Image.open(io.BytesIO(base64.b64decode(content)), formats=[kind.upper()]) as image:
        return np.asarray(image).astype(int)


def test_two_images_are_yellow_where_they_are_alike_and_violet_where_they_are_not(
    page, data, trained
):
    encoder = load(trained)
    files = data / "03.png", data / "05.png"
    maps = nearkin.likeness(encoder, *files).numpy()
    answer = page.post("/likeness", {"number": 4, "other": 6})
    assert answer["low"] == pytest.approx(maps.min(), abs=1e-6)
    assert answer["high"] == pytest.approx(maps.max(), abs=1e-6)
    cell = 32 // maps.shape[1]
    for file, uri, own in zip(files, answer["images"], maps, strict=True):
        pixels = encoder.preprocessing.pixels(file.read_bytes())
        gray = np.asarray(Image.fromarray(pixels).convert("L"))
        heat = np.interp(own, (maps.min(), maps.max()), (0, 1))
        for row, column in np.ndindex(own.shape):
            y, x = (cell * at + cell // 2 for at in (row, column))
            color = 2 * drawn(uri)[y, x] - gray[y, x]
            if heat[row, column] > 0.9:
                assert color[0] > 200 > color[2] + 30, (row, column)
            if heat[row, column] < 0.1:
                assert color.max() < 100, (row, column)
    assert np.abs(drawn(answer["images"][0]) - drawn(answer["images"][1])).max() > 50
    twice = page.post("/likeness", {"number": 4, "other": 4})["images"]
    assert twice[0] == twice[1]


def test_images_that_are_not_there_are_compared_with_nothing(page):
    for number in (14, -1, 2**62, 10**30):
        for pair in ((number, 4), (4, number)):
            said = page.refused(
                "/likeness", dict(zip(("number", "other"), pair, strict=True)), 400
            )
            assert "from 0 to 13" in said
    for number in ("4", 4.5, None, [4], True):
        said = page.refused("/likeness", {"number": number, "other": 4}, 400)
        assert said.startswith("malformed request")


def test_a_region_is_framed_in_its_image(trained, tmp_path, data):
    boxed, out = tmp_path / "boxes.csv", tmp_path / "run"
    boxes = [(10, 20, 50, 60), (0, 0, 96, 72)]
    files = [shutil.copy(data / f"{number:02d}.png", tmp_path) for number in range(3)]
    rows = [(file, *box) for file in files for box in boxes]
    write_csv(boxed, ("path", "x0", "y0", "x1", "y1"), rows)
    assert call("embed", trained, boxed, "-o", out, "--workers=0", "-q") == 0
    with exploring(out) as page:
        assert page.image("/image/1").size == (40, 40)
        framed = np.asarray(page.image("/whole/1").convert("RGB")).astype(int)
        original = np.asarray(Image.open(data / "00.png").convert("RGB")).astype(int)
        assert framed.shape == original.shape
        assert framed[40, 9].min() > 200  # white around the box, and black around that
        assert framed[40, 8].max() < 60
        assert framed[60, 30].min() > 200
        assert framed[61, 30].max() < 60
        inside = np.abs(framed - original)[25:55, 15:45]
        assert inside.mean() < 8
        whole = np.asarray(page.image("/whole/0").convert("RGB"))
        assert whole[0].min() > 150  # of all of the image, at its edge
        page.get("/whole/6", status=404)
        assert len(page.post("/likeness", {"number": 0, "other": 1})["images"]) == 2
        (tmp_path / "01.png").write_bytes(b"no image any more")
        said = page.refused("/likeness", {"number": 0, "other": 2}, 400)
        assert said == "image 2 cannot be read (text, not an image); choose another"
        page.get("/whole/2", status=404)


def test_what_is_no_image_is_not_searched_for(page):
    for hostile in (b"", b"GIF89a", b"<svg onload=alert(1)>", b"%!PS\n", b"\0" * 10**6):
        assert "cannot be read" in page.refused("/search", hostile, 400), hostile[:20]


def test_classes_are_named_merged_and_split_in_the_run(page, explored):
    run, _ = explored
    page.post("/name", {"clusters": ["new-1"], "name": "squares"})
    assert set(accepted_classes(run).values()) == {"squares"}
    page.post("/split", {"numbers": [3, 4], "name": HOSTILE})
    now = page.post("/name", {"clusters": ["new-1", "new-2"], "name": "rest"})
    assert json.loads(page.get("/classes")) == now
    classes = [(row["name"], row["size"]) for row in now["classes"]]
    assert classes == [("rest", 4), ("rest", 6), (HOSTILE, 2)]
    assert list(now["cluster_of"].items())[:5] == [
        ("1", "new-1"), ("2", "new-1"), ("3", "new-3"), ("4", "new-3"), ("5", "new-1"),
    ]  # fmt: skip
    assert accepted_classes(run)["02.png"] == HOSTILE
    assert "came with a label" in page.refused("/split", {"numbers": [0], "name": ""}, 400)
    for number in (14, -1, 2**62):
        assert "from 0 to 13" in page.refused("/split", {"numbers": [number], "name": ""}, 400)


def labels_of(run):
    return {row["path"]: row["label"] for row in read_csv(RunFolder(run).to_label) if row["label"]}


def test_images_are_copied_by_class_into_the_run_and_nowhere_else(page, explored, data):
    exports = explored[0] / "exports"
    copied = page.post("/export", {"folder": "all", "numbers": None})
    assert copied == {"folder": str(exports / "all"), "images": 14}
    assert {path.name for path in (exports / "all").iterdir()} == {"new-1", "new-2", "unlabeled"}
    assert len(list((exports / "all" / "new-2").iterdir())) == 6
    assert (exports / "all/unlabeled/00.jpg").read_bytes() == (data / "00.jpg").read_bytes()
    page.post("/export", {"folder": "\u732b 2", "numbers": [4, 3, 4]})
    assert len(list((exports / "\u732b 2" / "new-1").iterdir())) == 2
    assert "exists already" in page.refused("/export", {"folder": "all", "numbers": [1]}, 409)
    for name in ("", ".", "..", "../x", "a/b", "/tmp/x", "a\0b", "-x", ".hidden", "a:b"):
        assert "no folder name" in page.refused("/export", {"folder": name, "numbers": [1]}, 400)
    assert {path.name for path in exports.iterdir()} == {"all", "\u732b 2"}


def test_a_run_may_be_a_strangers_and_be_deleted_while_it_is_shown(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (run / "exports").symlink_to(tmp_path / "elsewhere")
    with exploring(run) as page:
        assert "exists already" in page.refused("/export", {"folder": "all", "numbers": None}, 409)
        assert list((tmp_path / "elsewhere").iterdir()) == []
        html = page.get("/")
        assert HOSTILE.encode() not in html
        shutil.rmtree(run)
        assert page.get("/") == html
        assert page.image("/image/4").size == (96, 72)
        for name in ("/name", "/search"):
            assert page.refused(name, {"clusters": ["new-1"], "name": "x"}, 400)
        assert "encoder" in page.refused("/likeness", {"number": 1, "other": 4}, 400)
        assert json.loads(page.get("/classes"))["editable"] is False
        assert ended(page, signal.SIGINT) == (0, "")
    assert not run.exists()


def test_two_explore_one_run(page, explored):
    run, _ = explored
    before = RunFolder(run).clusters.read_bytes()
    with exploring(run) as other:
        assert page.cookie.split("=")[0] != other.cookie.split("=")[0]
        page.post("/name", {"clusters": ["new-1"], "name": "ours"})
        other.post("/name", {"clusters": ["new-2"], "name": "theirs"})
        assert ended(other, signal.SIGTERM) == (0, "")
    assert set(accepted_classes(run).values()) == {"ours", "theirs"}
    assert RunFolder(run).original_clusters.read_bytes() == before


def test_a_browser_may_do_on_the_page_all_that_the_page_needs(browser, page, data, explored):
    """Policy, cookie and origins are as real browsers want them."""
    window = OpenPage(browser, page.origin + page.start)
    window.find("#map-classes summary").click()
    row = window.find("#map-classes li").filter(has_text="new-1")
    row.locator("input[type=text]").fill("violins")
    row.get_by_text("Save").click()
    window.find("#map-status").get_by_text("new-1 is now violins").wait_for()
    window.page.reload()
    window.find("#map-legend").get_by_text("violins").wait_for()
    window.find("input[type=file]").set_input_files(data / "03.png")
    window.find("#map-panel h4").get_by_text("Nearest neighbors").wait_for()
    loaded = "[...document.querySelectorAll('#map-panel img')].every((one) => one.naturalWidth)"
    window.until(loaded)
    window.find("#map-canvas").focus()
    for key in ("ArrowRight", "Space"):
        window.page.keyboard.press(key)
    window.find("#map-labels").get_by_label("Label of the images").fill("cellos")
    window.find("#map-labels form button").click()
    window.find("#map-status").get_by_text("1 image labeled cellos").wait_for()
    assert "cellos" in labels_of(explored[0]).values()
    window.end(page.origin)


@pytest.fixture(scope="module")
def classified(tmp_path_factory, data, trained):
    """A classification whose encoder crops as other libraries do, and pools tokens of it."""
    folder = tmp_path_factory.mktemp("classified")
    encoder = load(trained)
    view = Preprocessing(32, "squash", 32)
    write_encoder(folder / "encoder.safetensors", encoder.backbone, encoder.details, view)
    rows = [[f"{number:02d}.png", "odd" if number % 2 else HOSTILE] for number in range(12)]
    write_csv(folder / "labels.csv", ("path", "label"), rows)
    how = {"labels": folder / "labels.csv", "train_layers": "attentive", "output": folder / "run"}
    how |= {"baselines": False, "workers": 0, "report": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attentive, "STEPS", 15)  # it is looked at, whatever it has learned
        nearkin.classify(folder / "encoder.safetensors", str(data), **how)
    return folder / "run"


def test_classes_of_a_classification_are_shown_and_not_edited(browser, classified, data):
    """They are the user's labels: search and export work, naming and splitting are refused."""
    with exploring(classified) as page:
        for target, of in (("/name", {"clusters": ["odd"]}), ("/split", {"numbers": [13]})):
            assert "classify again" in page.refused(target, of | {"name": "x"}, 400)
        nearest = page.post("/search", (data / "03.png").read_bytes())["neighbors"]
        assert {each["name"] for each in nearest[:2]} == {"03.png", HOSTILE}
        assert nearest[1]["similarity"] == pytest.approx(1, abs=1e-5)
        assert len(page.post("/likeness", {"number": 1, "other": 2})["images"]) == 2
        page.post("/export", {"folder": "all", "numbers": None})
        assert len(list((classified / "exports/all").glob("*/*"))) == 14
        window = OpenPage(browser, page.origin + page.start)
        window.find("#map-legend").get_by_text("odd").wait_for()
        assert not window.find("#map-classes").is_visible()
        window.find("input[type=file]").set_input_files(data / "03.png")
        window.find("#map-panel h4").get_by_text("Nearest neighbors").wait_for()
        window.find("#map-canvas").focus()
        for key in ("ArrowRight", "1", "u", "ArrowRight", "2"):
            window.page.keyboard.press(key)
        key = window.find("#map-labels button bdi").nth(1).inner_text()
        window.find("#map-status").get_by_text(f"1 image labeled {key}").wait_for()
        assert key in ("odd", HOSTILE)
        window.end(page.origin)
    assert [row["label"] for row in read_csv(classified / "to_label.csv")] == ["", key]


def test_labels_that_are_given_in_a_report_are_those_of_a_table_that_commands_take(
    browser, trained, data, tmp_path
):
    shutil.copytree(trained, tmp_path / "run")
    with exploring(tmp_path / "run") as page:
        assert page.post("/label", {"numbers": [1, 4], "name": "red"})["labels"].keys() == {
            "1",
            "4",
        }
        page.post("/label", {"numbers": [4, 5, 6], "name": "blue"})
        page.post("/label", {"numbers": [6], "name": ""})
        window = OpenPage(browser, page.origin + page.start)
        window.page.select_option("#map-coloring", label="Your label")
        assert window.texts("#map-legend bdi")[:2] == ["red", "blue"]
        window.end(page.origin)
    read = open_images(data, labels=str(tmp_path / "run" / "to_label.csv"), cache=False)
    given = {
        read.names[row]: read.classes[label] for row, label in enumerate(read.labels) if label >= 0
    }
    assert given == {read.names[1]: "red", read.names[4]: "blue", read.names[5]: "blue"}


def test_the_address_is_shown_where_progress_is_not(trained):
    for option in ("--quiet", "--json"):
        with started("explore", trained, option) as (_, log):
            assert re.match(r"open http://127\.0\.0\.1:\d+/\?token=", log.readline())


def test_the_folder_beside_a_page_is_not_filled_unasked(trained, data, tmp_path, refusal):
    mine, page = tmp_path / "page_files" / "0.js", tmp_path / "page.html"
    mine.parent.mkdir()
    mine.write_text("mine")
    table = [RunFolder(trained).embeddings, data]
    for source in ([trained], table):
        command = ["explore", *source, "-o", page, "--one-file", 3]
        assert f"{mine.parent} exists; choose another -o" in refusal(4, *command)
        assert not page.exists()
        assert call(*command[:-1], 100, "--overwrite") == 0  # one file needs no folder
        assert mine.read_text() == "mine"
        assert call(*command, "--overwrite") == 0
        assert mine.read_text() != "mine"
        mine.write_text("mine")
        page.unlink()


def test_a_port_in_use_ends_with_code_10_and_is_named(trained, refusal):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal(10, "explore", trained, "--port", port)
    assert line.startswith(f"error: cannot listen on port {port} of 127.0.0.1 (")
    assert line.endswith("; choose another --port, or leave it out to get one that is free")


def test_other_hosts_have_to_be_asked_for_and_what_is_no_run_is_refused(
    tmp_path, trained, refusal
):
    for host in ("192.168.1.7", "example.org", "127.0.0.2"):
        assert "--i-know" in refusal(2, "explore", trained, "--host", host)
    for host in ("0.0.0.0", "::", ""):
        refusal(2, "explore", trained, "--host", host, "--i-know")
    refusal(10, "explore", trained, "--host", "192.0.2.1", "--i-know")
    for url in ("hub.example.org", "ftp://hub", "https://", "https://hub/?a=1", "https://me@hub/"):
        assert "--url" in refusal(2, "explore", trained, "--url", url)
    refusal(2, "explore", tmp_path)
    refusal(3, "explore", trained, tmp_path / "nowhere")
