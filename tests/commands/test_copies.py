"""`nearkin duplicates` and `nearkin select`, on photographs with planted copies."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import chromium, in_a_browser
from PIL import Image, ImageEnhance

import nearkin
from nearkin.cli import main
from nearkin.data.opening import open_images
from nearkin.data.recognize import class_names
from nearkin.discovery.assignments import LABEL_COLUMNS
from nearkin.encoders.encoder import write_encoder
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import read_all, write_embeddings
from nearkin.networks.backbone import build_backbone
from nearkin.tables import read_csv

CALTECH = Path(__file__).parents[3] / "shared" / "data" / "caltech99" / "caltech99.tar"
NUM = 80
EDITS = {
    "exact": lambda image: image,
    "pixels": lambda image: image,
    "jpeg": lambda image: image,
    "smaller": lambda image: image.resize((image.width * 7 // 10, image.height * 7 // 10)),
    "cropped": lambda image: image.crop((6, 5, image.width - 5, image.height - 4)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.1),
}
"""By which the first images are copied, four of each kind."""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Photographs of Caltech-99, and the kind of each planted copy by the path of both."""
    if not CALTECH.exists():
        pytest.skip("Caltech-99 is not there")
    folder, kinds = tmp_path_factory.mktemp("planted"), dict[tuple[str, str], str]()
    with tarfile.open(CALTECH) as archive:
        members = [m for m in archive if m.isfile() and m.name.startswith("train/")]
        for number, member in enumerate(members[:: len(members) // NUM][:NUM]):
            content = archive.extractfile(member).read()
            path = folder / member.name.removeprefix("train/")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            if number < 4 * len(EDITS):
                kind = list(EDITS)[number % len(EDITS)]
                copy = path.with_name(f"{path.stem}-{kind}.{'png' if kind == 'pixels' else 'jpg'}")
                with Image.open(io.BytesIO(content)) as image:
                    EDITS[kind](image.convert("RGB")).save(copy, quality=60)
                if kind == "exact":
                    copy.write_bytes(content)
                names = sorted(str(each.relative_to(folder)) for each in (path, copy))
                kinds[names[0], names[1]] = kind
    return folder, kinds


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """An untrained encoder: copies look alike to it, too."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("encoder") / "encoder.safetensors"
    write_encoder(file, build_backbone("tiny", 64), {"backbone": "tiny", "image_size": 64})
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
    written = {"output": "copies.csv", "page": "copies.html"}
    result = nearkin.duplicates(
        encoder,
        planted[0],
        vectors=vectors,
        precision=0.9,
        apply=planted[0] / "kept.csv",
        workers=0,
        **{name: folder / file for name, file in written.items()},
    )
    return result, folder


def why(found):
    """What is said of each pair, by the path of both."""
    return {tuple(sorted((copy.path, copy.of))): copy.why for copy in found.dropped}


# Copies


def test_planted_copies_are_found_and_told_apart(planted, found):
    told = why(found[0])
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
    assert 40 <= estimate.num <= 60  # half of those with another image
    value, low, high = estimate.precision
    assert 0.75 < low < value <= high
    assert estimate.by_edit["re-encoded as JPEG, quality 40 to 90"] > 0.9


def test_copies_are_copied_into_a_new_folder(planted, vectors, tmp_path, monkeypatch, capsys):
    found = nearkin.duplicates(vectors, planted[0], threshold=0.9995, apply=tmp_path / "kept")
    kept = sum(path.is_file() for path in (tmp_path / "kept").rglob("*"))
    assert kept == found.num_images - len(found.dropped)
    monkeypatch.setenv("NEARKIN_PRECISION", "bf16")  # of trainings
    assert main(["duplicates", str(vectors), "--threshold=.9995", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {copy["path"] for copy in printed["copies"] if copy["action"] == "drop"}


def test_an_index_leads_to_the_same_copies(planted, vectors, tmp_path):
    pytest.importorskip("faiss")
    index = tmp_path / "vectors.faiss"
    nearkin.build_index(vectors, index)
    exact = nearkin.duplicates(vectors, planted[0], threshold=0.9995)
    found = nearkin.duplicates(vectors, planted[0], threshold=0.9995, index=index)
    assert found.copies == exact.copies
    (right, total) = found.index_recall
    assert right == total >= len(exact.dropped)


def test_a_coded_index_finds_planted_copies_and_clusters_larger_than_its_shortlist(
    tmp_path, monkeypatch
):
    pytest.importorskip("faiss")
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


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("mark", [pytest.param(None, marks=in_a_browser)])
def test_the_page_shows_pairs_in_a_browser(found, width, mark):
    del mark
    with chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": 900})
        complaints = []
        page.on("console", lambda message: complaints.append(message.text))
        page.goto((found[1] / "copies.html").as_uri())
        pairs = page.locator("#least-similar-copies .pairs li, #further-copies .pairs li")
        assert pairs.count() == len(found[0].dropped)
        assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        first = pairs.first.inner_text()
        least = min(found[0].dropped, key=lambda copy: copy.similarity)
        assert f"{least.similarity:.4f}" in first
        assert least.path in first
        assert least.of in first
        boxes = [image.bounding_box() for image in pairs.first.locator("img").all()]
        assert boxes[0]["y"] == boxes[1]["y"]
        assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"] + 3
        assert page.locator("#not-copies .pairs li").count() > 10
        assert complaints == []


# Selection


@pytest.fixture(scope="module")
def classified(tmp_path_factory, planted, encoder):
    """A classification by the labels of sixty images, and its folder."""
    out = tmp_path_factory.mktemp("classified") / "run"
    images = open_images(planted[0], labels="none")
    table = out.parent / "labels.csv"
    lines = [f"{name},{'ab'[number % 2]}" for number, name in enumerate(images.names[:60])]
    table.write_text("\n".join(["path,label", *lines]) + "\n")
    nearkin.classify(
        planted[0], out=out, labels=table, from_run=encoder, baselines=False, workers=0
    )
    return out, set(images.names[:60])


def selected(*arguments):
    return main(["select", *map(str, arguments)])


def test_a_selection_is_a_table_to_label_and_labels_count_in_the_next_round(vectors, tmp_path):
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    assert selected(vectors, "--num=10", "-o", first) == 0
    rows = list(read_csv(first))
    assert tuple(rows[0]) == LABEL_COLUMNS
    assert [row["label"] for row in rows] == [""] * 10
    assert nearkin.select(vectors, num=10).paths == tuple(row["path"] for row in rows)
    labels = "\n".join(f"{row['path']},cat" for row in rows[:6])
    unlabeled = "\n".join(f"{row['path']}," for row in rows[6:])
    first.write_text(f"path,label\n{labels}\n{unlabeled}\n")
    assert selected(vectors, "--num=50", "-o", second, "--labeled", first) == 0
    again = {row["path"] for row in read_csv(second)}
    assert len(again) == 50
    assert not again & {row["path"] for row in rows[:6]}


@pytest.mark.slow
def test_uncertain_images_are_those_of_the_least_margins_that_have_no_label(classified, tmp_path):
    out, learned = classified
    file = tmp_path / "selected.csv"
    assert selected(out, "--num=8", "--rule=uncertain", "-o", file) == 0
    rows = list(read_csv(file))
    every = read_all(out / "embeddings.parquet")
    held_out = {every.paths[row] for row in np.flatnonzero(every.splits == "test")}
    margins = [row for row in read_csv(out / "assignments.csv") if row["path"] not in held_out]
    for name in {row["cluster"] for row in rows}:
        chosen = [float(row["margin"]) for row in rows if row["cluster"] == name]
        of_class = [float(row["margin"]) for row in margins if row["cluster"] == name]
        assert chosen == sorted(of_class)[: len(chosen)]
    mixed = nearkin.select(out, num=9, rule="mixture")
    assert mixed.num_labeled > 40
    assert not set(mixed.paths) & learned
    assert sum(path in {row["path"] for row in rows} for path in mixed.paths) >= 3


# Bad input

BAD = {
    "threshold": ("duplicates VECTORS --threshold 1.5", 2, "not above 0 and at most 1"),
    "precision": ("duplicates RUN DATA --precision 0", 2, "not above 0 and at most 1"),
    "both": ("duplicates VECTORS --threshold .9 --precision .9", 2, "give one"),
    "no encoder": ("duplicates VECTORS DATA", 2, "or a --threshold"),
    "no images": ("duplicates VECTORS --threshold .9 --page new.html", 2, "give DATA, too"),
    "no data": ("duplicates dinov2-small", 2, "no images of its own; give DATA"),
    "other images": ("duplicates VECTORS OTHER --threshold .9", 3, "are not among these"),
    "table exists": ("duplicates VECTORS --threshold .9 -o OLD", 4, "may have been edited"),
    "list exists": ("duplicates VECTORS DATA --threshold .9 --apply OLD", 4, "choose another"),
    "no table": ("duplicates VECTORS --threshold .9 -o copies.txt", 2, "ends in .csv"),
    "inside": ("duplicates VECTORS DATA --threshold .9 --apply DATA/new", 2, "lies inside"),
    "broken": ("duplicates BROKEN --threshold .9", 5, "cannot be used"),
    "no vectors": ("duplicates none.parquet --threshold .9", 2, "does not exist"),
    "foreign index": ("duplicates VECTORS --threshold .9 --index OLD", 5, "cannot be used"),
    "two vectors": ("duplicates VECTORS --in VECTORS --threshold .9", 2, "give one of them"),
    "too many": ("select VECTORS --num 1000 -o new.csv", 2, "only 104 images"),
    "none": ("select VECTORS --num 0 -o new.csv", 2, "at least 1"),
    "no classifier": ("select VECTORS --num 3 --rule uncertain -o new.csv", 2, "no classifier"),
    "edited": ("select VECTORS --num 3 -o OLD", 4, "may have been edited"),
    "not a table": ("select VECTORS --num 3 -o new.parquet", 2, "ends in .csv"),
    "labels of others": ("select VECTORS --num 3 -o new.csv --labeled OLD", 3, "are called"),
    "broken table": ("select BROKEN --num 3 -o new.csv", 5, "cannot be used"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_writes_nothing(
    case, planted, encoder, vectors, tmp_path, monkeypatch, capsys
):
    command, code, part = BAD[case]
    if case == "foreign index":
        pytest.importorskip("faiss", reason="faiss is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.csv").write_text("path,label\nsomebody.jpg,cat\n")
    (tmp_path / "broken.parquet").write_bytes(vectors.read_bytes()[:5000])
    (tmp_path / "other").mkdir()
    Image.new("RGB", (20, 20)).save(tmp_path / "other" / "one.png")
    places = {
        "VECTORS": vectors, "RUN": encoder, "DATA": planted[0], "OLD": "old.csv",
        "BROKEN": "broken.parquet", "OTHER": "other",
    }  # fmt: skip
    words = command.split()
    for word, place in places.items():
        words = [
            str(place) + each[len(word) :] if each.startswith(word) else each for each in words
        ]
    assert main(words) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert part in error
    assert {path.name for path in tmp_path.iterdir()} == {"old.csv", "broken.parquet", "other"}
