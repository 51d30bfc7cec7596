"""`nearkin duplicates`, on photographs with planted copies."""

import json
from collections import Counter

import builders
import numpy as np
import pytest
import torch
from browser import opened
from nearkin_command import run
from PIL import Image, ImageEnhance, ImageOps
from pyarrow import parquet

import nearkin
from nearkin.data.labels import class_names
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import load, write_encoder
from nearkin.errors import DataError, UsageError
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
    written = {"output": folder / "duplicates.csv", "page": folder / "duplicates.html"}
    written["apply"] = planted[0] / "kept.csv"
    options = {"encoder": encoder, "vectors": vectors, "precision": 0.9, "workers": 0}
    return nearkin.duplicates(planted[0], **options, **written), folder


def test_planted_copies_and_nothing_else_are_found_without_an_encoder(planted):
    found = nearkin.duplicates(planted[0])
    told = {tuple(sorted((each.path, each.of))): each.why for each in found.dropped}
    why = {"exact": "same bytes"}
    expected = {pair: why.get(kind, "near-duplicate") for pair, kind in planted[1].items()}
    assert told.items() <= expected.items()
    assert len(told) >= len(expected) - 2  # of nothing but sky
    assert (found.threshold, found.estimate) == (None, None)


def test_features_find_more_than_pixels_do_and_are_told_apart(planted, vectors):
    found = nearkin.duplicates(planted[0], vectors=vectors, threshold=0.99)
    pixels = {(each.path, each.of) for each in nearkin.duplicates(planted[0]).dropped}
    more = {(each.path, each.of) for each in found.dropped if each.why == "similar features"}
    assert len(more) > 10
    assert not more & pixels
    assert min(each.similarity for each in found.dropped) >= 0.98
    kept = {each.path for each in found.duplicates if each.action == "keep"}
    assert {each.of for each in found.dropped} == kept  # not one that is dropped itself


def test_images_without_features_are_compared_by_pixels_and_counted(
    planted, vectors, tmp_path, log
):
    parquet.write_table(parquet.read_table(vectors).slice(0, 90), tmp_path / "some.parquet")
    given = {"vectors": tmp_path / "some.parquet", "threshold": 0.99, "verbose": log}
    found = nearkin.duplicates(planted[0], **given)
    without = found.num_images - 90
    assert f"left out: {without} images of which there are no features" in log.texts
    assert {each.why for each in found.dropped} > {"near-duplicate", "similar features"}


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
    rows = list(read_csv(folder / "duplicates.csv"))
    assert [(row["path"], row["action"], row["of"], row["why"]) for row in rows] == [
        (copy.path, copy.action, copy.of, copy.why) for copy in result.duplicates
    ]
    kept = open_images(planted[0] / "kept.csv")
    every = open_images(planted[0])
    assert set(every.names) - set(kept.names) == {copy.path for copy in result.dropped}
    labels = dict(zip(every.names, class_names(every), strict=True))
    assert class_names(kept) == [labels[name] for name in kept.names]
    assert len(every) == NUM + 4 * len(EDITS)  # nothing was deleted


def test_the_list_keeps_the_groups_of_a_table(planted, tmp_path):
    table, names = tmp_path / "t.csv", open_images(planted[0]).names
    rows = [f"{planted[0] / name},c,p{row // 3},train" for row, name in enumerate(names)]
    table.write_text("\n".join(["path,label,group,split", *rows]))
    nearkin.duplicates(table, apply=tmp_path / "kept.csv")
    before, after = open_images(table), open_images(tmp_path / "kept.csv")
    of_name = dict(zip(before.names, before.group_names, strict=True))
    assert len(after) < len(before)
    assert after.group_names == tuple(of_name[name] for name in after.names)


def test_precision_and_recall_are_of_images_that_did_not_choose_the_threshold(found):
    estimate = found[0].estimate
    assert 50 <= estimate.num <= 60  # half of those with another image
    value, low, high = estimate.precision
    assert 0.65 < low < value <= high
    assert estimate.by_edit["re-encoded as JPEG, quality 40 to 90"] > 0.9


def test_a_threshold_that_is_given_needs_no_number_of_images(trained_run):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    found = nearkin.duplicates(pixels, encoder=trained_run, threshold=0.9, workers=0)
    assert (found.threshold, found.estimate) == (0.9, None)


def test_nor_does_it_need_images_that_have_another(trained_run):
    """Twelve images, of which eleven are copies of one: two could be told from another."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    pixels = pixels[[0] * 11 + [1]]
    how = {"encoder": trained_run, "workers": 0, "verbose": False}
    found = nearkin.duplicates(pixels, threshold=0.99999, **how)
    assert (found.threshold, found.estimate) == (0.99999, None)
    assert len(found.dropped) >= 10
    with pytest.raises(DataError, match="too few to estimate a precision"):
        nearkin.duplicates(pixels, **how)


def test_channels_of_their_own_are_refused_before_features_are_computed(trained_run):
    pixels = np.random.default_rng(0).integers(0, 4000, (30, 16, 16, 3), dtype=np.uint16)
    with pytest.raises(UsageError, match="on images of 8 bits; give encoder, or a threshold"):
        nearkin.duplicates(pixels, encoder=trained_run, device="cuda:99")


def test_copies_are_copied_into_a_new_folder(planted, vectors, tmp_path, monkeypatch, capsys):
    found = nearkin.duplicates(planted[0], apply=tmp_path / "kept")
    kept = sum(path.is_file() for path in (tmp_path / "kept").rglob("*"))
    assert kept == found.num_images - len(found.dropped) < found.num_images
    monkeypatch.setenv("NEARKIN_PRECISION", "bf16")  # of trainings
    assert run("duplicates", planted[0], "--vectors", vectors, "--threshold=.9995", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert {each["path"] for each in printed["duplicates"] if each["action"] == "drop"}


def test_copies_stay_in_the_part_and_the_class_of_their_images(tmp_path, capsys):
    """Or training on them trains on the test part; what folders do not say is logged."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)
    lines = ["path,label,split,group"]
    for row, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{row:02}.png")
        part, label = ("train", "test", "")[row % 3], ("Cat", "a/b", "cat", "")[row // 6]
        lines.append(f"{row:02}.png,{'Cat' if part == 'test' else label},{part},{row // 2}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    assert run("duplicates", tmp_path / "t.csv", "--apply", tmp_path / "kept") == 0
    log, kept = capsys.readouterr().err, open_images(tmp_path / "kept", labels="folders")
    assert Counter(kept.splits.tolist()) == {"train": 16, "test": 8}
    assert kept.classes == ("Cat", "a-b", "cat-2", "images")
    assert "renamed: 2 classes, as their names are those of folders, such as 'a/b'" in log
    assert "left out: 24 images in groups, which folders do not say" in log
    assert "guessed: 4 images without a label, which the folder makes the class images" in log


def test_the_page_shows_pairs_in_a_browser(found, browser):
    for width in (360, 1280):
        with opened(browser, found[1] / "duplicates.html", width=width) as page:
            pairs = page.locator("#least-similar .pairs li, #further-duplicates .pairs li")
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
            assert page.locator("#no-duplicates .pairs li").count() > 10


REFUSED = [
    ("duplicates DATA --encoder RUN --threshold 1.5", 2, "not above 0 and at most 1"),
    ("duplicates DATA --encoder RUN --precision 0", 2, "not above 0 and at most 1"),
    ("duplicates DATA --encoder RUN --threshold .9 --precision .9", 2, "give one"),
    ("duplicates DATA --threshold .9", 2, "give --encoder or --vectors, too"),
    ("duplicates DATA --vectors VECTORS", 2, "or a --threshold"),
    ("duplicates none --vectors VECTORS", 2, "or a --threshold"),  # before images are opened
    ("duplicates other --vectors VECTORS --threshold .9", 3, "are not among these"),
    ("duplicates DATA -o old.csv", 4, "replace it with --overwrite"),
    ("duplicates DATA --apply old.csv", 4, "choose another"),
    ("duplicates digits --apply new.csv", 2, "give --apply a folder, for copies"),
    ("duplicates numbers --apply new.csv", 3, "2 classes '-1', '1.0': numbers are read as whole"),
    ("duplicates DATA -o copies.txt", 2, "ends in .csv"),
    ("duplicates DATA --apply DATA/new", 2, "lies inside"),
    ("duplicates DATA -o new.csv --apply ./new.csv", 2, "give each a file of its own"),
    ("duplicates DATA --vectors broken.parquet --threshold .9", 5, "cannot be used"),
    ("duplicates DATA --vectors none.parquet --threshold .9", 2, "does not exist"),
    ("duplicates DATA --encoder VECTORS --vectors VECTORS --threshold .9", 2, "give one of them"),
    ("duplicates none", 3, "none"),
]


def test_bad_input_is_one_line_and_writes_nothing(
    planted, encoder, vectors, tmp_path, monkeypatch, refuses
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.csv").write_text("path,label\nsomebody.jpg,cat\n")
    (tmp_path / "broken.parquet").write_bytes(vectors.read_bytes()[:5000])
    builders.fill(tmp_path / "other", "one.png")
    builders.fill(
        tmp_path / "numbers", *(f"{c}/{n}.png" for c in ("-1", "0", "1.0") for n in "ab")
    )
    refuses(REFUSED, VECTORS=vectors, RUN=encoder, DATA=planted[0])
    there = {"old.csv", "broken.parquet", "other", "numbers"}
    assert {path.name for path in tmp_path.iterdir()} == there
