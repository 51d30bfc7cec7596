"""`nearkin duplicates`, on photographs with planted copies."""

import json

import builders
import numpy as np
import pytest
import torch
from browser import opened
from nearkin_command import run
from PIL import Image, ImageEnhance, ImageOps

import nearkin
from nearkin.data.opening import open_images
from nearkin.data.recognize import class_names
from nearkin.encoders.encoder import load, write_encoder
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import write_embeddings
from nearkin.networks.backbone import build_backbone
from nearkin.tables import read_csv

SIDE = 96
NUM = 96
EDITS = {
    "exact": lambda image: image,
    "pixels": lambda image: image,
    "jpeg": lambda image: image,
    "smaller": lambda image: image.resize((SIDE * 7 // 10, SIDE * 7 // 10)),
    "cropped": lambda image: image.crop((3, 2, SIDE - 2, SIDE - 3)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.1),
}
"""By which the first images are copied, four of each kind."""


@pytest.fixture(scope="module")
def crops():
    """Photographs, and their negatives: not everything that is alike is a copy."""
    positives = builders.photographs(NUM // 2, SIDE)
    return [*positives, *map(ImageOps.invert, positives)]


@pytest.fixture(scope="module")
def planted(tmp_path_factory, crops):
    """A folder of them in four classes, and the kind of each planted copy by both paths."""
    folder, kinds = tmp_path_factory.mktemp("planted"), dict[tuple[str, str], str]()
    for number, image in enumerate(crops):
        path = folder / "abcd"[number % 4] / f"{number:02}.jpg"
        path.parent.mkdir(exist_ok=True)
        image.save(path, quality=95)
        if number < 4 * len(EDITS):
            kind = list(EDITS)[number % len(EDITS)]
            copy = path.with_name(f"{path.stem}-{kind}.{'png' if kind == 'pixels' else 'jpg'}")
            with Image.open(path) as decoded:
                EDITS[kind](decoded).save(copy, quality=60)
            if kind == "exact":
                copy.write_bytes(path.read_bytes())
            names = sorted(str(each.relative_to(folder)) for each in (path, copy))
            kinds[names[0], names[1]] = kind
    return folder, kinds


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, crops):
    """Random weights, with the statistics that their batch norms have of these photographs.

    Without them all images look alike to it: cosines are above .9999.
    """
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("encoder") / "encoder.safetensors"
    backbone, details = build_backbone("tiny", 64), {"backbone": "tiny", "image_size": 64}
    write_encoder(file, backbone, details)
    images = torch.stack([load(file).transform(image) for image in crops])
    for norm in backbone.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.momentum = None  # the mean, not a moving one
    with torch.no_grad():
        backbone.train()(images)
    write_encoder(file, backbone.eval(), details)
    return file


@pytest.fixture(scope="module")
def vectors(tmp_path_factory, planted, encoder):
    """What `embed` writes of them."""
    file = tmp_path_factory.mktemp("vectors") / "vectors.parquet"
    nearkin.embed(encoder, planted[0], output=file, workers=0)
    return file


@pytest.fixture(scope="module")
def found(tmp_path_factory, planted, encoder, vectors):
    """What is found at a precision of .9, and the folder of what is written."""
    folder = tmp_path_factory.mktemp("found")
    written = {"output": folder / "copies.csv", "page": folder / "copies.html"}
    written["apply"] = planted[0] / "kept.csv"
    options = {"vectors": vectors, "precision": 0.9, "workers": 0}
    return nearkin.duplicates(encoder, planted[0], **options, **written), folder


def test_planted_copies_are_found_and_told_apart(planted, found):
    told = {tuple(sorted((copy.path, copy.of))): copy.why for copy in found[0].dropped}
    exact = {"exact": "same bytes", "pixels": "same pixels"}
    for pair, kind in planted[1].items():
        if kind in ("exact", "pixels", "jpeg", "smaller"):
            assert told[pair] == exact.get(kind, "near copy"), pair
    assert len(told.keys() - planted[1].keys()) <= 2


def test_the_larger_image_is_kept_then_the_larger_file_then_the_first_name(planted, found):
    images = open_images(planted[0])
    row = {name: number for number, name in enumerate(images.names)}
    for copy in found[0].dropped:
        ours, theirs = (
            (-int(images.sizes[row[name]].prod()), -int(images.num_bytes[row[name]]), row[name])
            for name in (copy.of, copy.path)
        )
        assert ours < theirs


def test_the_table_says_what_was_found_and_the_list_is_data_without_the_copies(planted, found):
    result, folder = found
    rows = list(read_csv(folder / "copies.csv"))
    assert [(row["path"], row["action"], row["of"], row["why"]) for row in rows] == [
        (copy.path, copy.action, copy.of, copy.why) for copy in result.copies
    ]
    kept = open_images(planted[0] / "kept.csv")
    every = open_images(planted[0])
    assert set(every.names) - set(kept.names) == {copy.path for copy in result.dropped}
    labels = dict(zip(every.names, class_names(every), strict=True))
    assert class_names(kept) == [labels[name] for name in kept.names]
    assert len(every) == NUM + 4 * len(EDITS)  # nothing was deleted


def test_precision_and_recall_are_of_images_that_did_not_choose_the_threshold(found):
    estimate = found[0].estimate
    assert 50 <= estimate.num <= 60  # half of those with another image
    value, low, high = estimate.precision
    assert 0.75 < low < value <= high
    assert estimate.by_edit["re-encoded as JPEG, quality 40 to 90"] > 0.9


def test_copies_are_copied_into_a_new_folder(planted, vectors, tmp_path, monkeypatch, capsys):
    found = nearkin.duplicates(vectors, planted[0], threshold=0.9995, apply=tmp_path / "kept")
    kept = sum(path.is_file() for path in (tmp_path / "kept").rglob("*"))
    assert kept == found.num_images - len(found.dropped) < found.num_images
    monkeypatch.setenv("NEARKIN_PRECISION", "bf16")  # of trainings
    assert run("duplicates", vectors, "--threshold=.9995", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert {copy["path"] for copy in printed["copies"] if copy["action"] == "drop"}


@pytest.mark.needs("faiss")
def test_an_index_leads_to_the_same_copies(planted, vectors, tmp_path):
    index = tmp_path / "vectors.faiss"
    nearkin.build_index(vectors, index)
    exact = nearkin.duplicates(vectors, planted[0], threshold=0.9995)
    found = nearkin.duplicates(vectors, planted[0], threshold=0.9995, index=index)
    assert found.copies == exact.copies
    (right, total) = found.index_recall
    assert right == total >= len(exact.dropped) > 0


@pytest.mark.needs("faiss")
def test_a_coded_index_finds_planted_copies_and_clusters_larger_than_its_shortlist(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("nearkin.commands.index.FLAT", 100)
    rng, splits = np.random.default_rng(0), np.full(1500, "")
    x = rng.standard_normal((1500, 16)).astype(np.float32)
    x[500:540] = x[0]
    x[1000:1100] = x[100:200] + 0.1 * rng.standard_normal((100, 16))
    table, paths = tmp_path / "vectors.parquet", [f"{row:04}.jpg" for row in range(len(x))]
    write_embeddings(table, Embeddings(x, np.full(len(x), -1), paths=paths, splits=splits))
    nearkin.build_index(table, tmp_path / "vectors.faiss")
    found = nearkin.duplicates(table, threshold=0.95, index=tmp_path / "vectors.faiss")
    of = {int(copy.path[:-4]): int(copy.of[:-4]) for copy in found.dropped}
    assert [of.get(row) for row in range(500, 540)] == [0] * 40
    near = [of.get(row) == row - 900 for row in range(1000, 1100)]
    assert np.mean(near) > 0.9
    assert len(of) == 40 + sum(near)


def test_the_page_shows_pairs_in_a_browser(found, browser):
    for width in (360, 1280):
        with opened(browser, found[1] / "copies.html", width=width) as page:
            pairs = page.locator("#least-similar-copies .pairs li, #further-copies .pairs li")
            assert pairs.count() == len(found[0].dropped)
            loaded = "[...document.images].every(i => i.complete && i.naturalWidth > 0)"
            assert page.evaluate(loaded)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            first = pairs.first.inner_text()
            least = min(found[0].dropped, key=lambda copy: copy.similarity)
            for said in (f"{least.similarity:.4f}", least.path, least.of):
                assert said in first
            boxes = [image.bounding_box() for image in pairs.first.locator("img").all()]
            assert boxes[0]["y"] == boxes[1]["y"]
            assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"] + 3
            assert page.locator("#not-copies .pairs li").count() > 10


REFUSED = [
    ("VECTORS --threshold 1.5", 2, "not above 0 and at most 1"),
    ("RUN DATA --precision 0", 2, "not above 0 and at most 1"),
    ("VECTORS --threshold .9 --precision .9", 2, "give one"),
    ("VECTORS DATA", 2, "or a --threshold"),
    ("VECTORS --threshold .9 --page new.html", 2, "give DATA, too"),
    ("dinov2-small", 2, "no images of its own; give DATA"),
    ("VECTORS OTHER --threshold .9", 3, "are not among these"),
    ("VECTORS --threshold .9 -o OLD", 4, "may have been edited"),
    ("VECTORS DATA --threshold .9 --apply OLD", 4, "choose another"),
    ("VECTORS --threshold .9 -o copies.txt", 2, "ends in .csv"),
    ("VECTORS DATA --threshold .9 --apply DATA/new", 2, "lies inside"),
    ("BROKEN --threshold .9", 5, "cannot be used"),
    ("none.parquet --threshold .9", 2, "does not exist"),
    ("VECTORS --in VECTORS --threshold .9", 2, "give one of them"),
]


@pytest.fixture
def files(planted, encoder, vectors, tmp_path, monkeypatch):
    """What the words of the table stand for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.csv").write_text("path,label\nsomebody.jpg,cat\n")
    (tmp_path / "broken.parquet").write_bytes(vectors.read_bytes()[:5000])
    builders.fill(tmp_path / "other", "one.png")
    return {
        "VECTORS": vectors, "RUN": encoder, "DATA": planted[0], "OLD": "old.csv",
        "BROKEN": "broken.parquet", "OTHER": "other",
    }  # fmt: skip


def test_bad_input_is_one_line_and_writes_nothing(files, tmp_path, refusal):
    for command, code, part in REFUSED:
        words = [word.partition("/") for word in command.split()]
        typed = [f"{files.get(head, head)}{slash}{rest}" for head, slash, rest in words]
        assert part in refusal(code, "duplicates", *typed), command
    assert {path.name for path in tmp_path.iterdir()} == {"old.csv", "broken.parquet", "other"}


@pytest.mark.needs("faiss")
def test_a_file_that_is_no_index_is_refused(files, refusal):
    arguments = (files["VECTORS"], "--threshold=.9", "--index", files["OLD"])
    assert "cannot be used" in refusal(5, "duplicates", *arguments)
