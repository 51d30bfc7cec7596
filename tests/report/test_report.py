"""The report of a run, from its files: a training and a discovery, on real digits."""

import base64
import html
import json
import re
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from builders import contents, save_digits
from discoveries import rows, write_rows
from nearkin_command import run as call
from PIL import Image

import nearkin
from nearkin.commands.explore import explore
from nearkin.commands.run import Run
from nearkin.commands.sources import images_of, table_encoder
from nearkin.errors import CheckpointError, DataError, OutputError, UsageError
from nearkin.evaluation.metrics import knn_classes
from nearkin.evaluation.table import read_embeddings
from nearkin.evaluation.vectors import write_embeddings
from nearkin.metrics.metric import Metric
from nearkin.metrics.selection import balanced
from nearkin.report.image_map import image_map
from nearkin.report.site import RunSite
from nearkin.run.data import versions
from nearkin.run.folder import RunFolder


@pytest.fixture(scope="module")
def trained(trained_run, tmp_path_factory):
    """A copy of the run, whose page and map may be made anew."""
    return RunFolder(shutil.copytree(trained_run, tmp_path_factory.mktemp("runs") / "run"))


@pytest.fixture(scope="module")
def discovered(tmp_path_factory, digits_file, trained):
    out = tmp_path_factory.mktemp("runs") / "found"
    settings = "--known 0,1,2,3,4 --truth data --classes 5 --mode ncd --positive-rate 0.2"
    settings += " --epochs 1 --train-layers top --report -q"
    typed = ["discover", digits_file, "-o", out, "--encoder", trained.path, *settings.split()]
    assert call(*typed) == 0
    return RunFolder(out)


def packed(page):
    """What the page's map is made from."""
    (content,) = re.findall(r'<script type="application/json" id="images">(.*?)</script>', page)
    return json.loads(content)


def test_a_training_leaves_a_page_that_is_made_anew_to_the_byte(
    trained_run, trained, tmp_path, capsys
):
    left = (trained_run / "report.html").read_bytes()
    assert explore(trained_run, output=tmp_path / "page.html").read_bytes() == left
    assert call("explore", trained.path, "--write") == 0
    assert capsys.readouterr().out.strip() == str(trained.report.resolve())
    page = trained.report.read_bytes()
    trained.map.unlink()
    explore(trained.path, write=True)
    assert trained.report.read_bytes() == page


def test_a_training_without_a_page_gets_it_later(tmp_path):
    data = save_digits(tmp_path / "few.npz", 32, 8)
    settings = "--epochs 1 --batch-size 32 --backbone tiny --optimizer sgd --device cpu -q"
    folder = RunFolder(tmp_path / "run")
    typed = ["train", data, "-o", folder.path, *settings.split(), "--resume"]
    assert call(*typed) == call(*typed) == 0  # the second time, nothing is left to do
    assert folder.summary.exists()
    assert not folder.report.exists()
    assert not folder.map.exists()
    assert call(*typed, "--report") == 0
    assert folder.report.exists()


def test_the_page_says_what_was_measured_and_what_repeats_it(trained, digits_file):
    page = trained.report.read_text()
    encoder = trained.read_summary()["metrics"]["encoder"]
    assert f"{encoder['kNN top-1']['value']:.3f} [" in page
    for entry in encoder.values():
        assert html.escape(Metric(**entry).sentence, quote=False) in page
    (command,) = re.findall(r"<code>(nearkin train [^<]*)</code>", page)
    assert str(digits_file) in command
    assert "--epochs 2" in command
    assert "--batch-size 32" in command


def test_the_map_holds_every_image_with_its_nearest_ones(trained):
    images = images_of(trained)
    embeddings = read_embeddings(trained.embeddings, images)
    layout = image_map(trained, embeddings, images)
    assert layout.total == len(layout.names) == 200
    assert layout.names == tuple(images.names)
    cosine = embeddings.vectors.astype(np.float64) @ embeddings.vectors.T.astype(np.float64)
    np.fill_diagonal(cosine, -np.inf)
    best = -np.sort(-cosine, axis=1)[:, : layout.neighbors.shape[1]]
    np.testing.assert_allclose(np.take_along_axis(cosine, layout.neighbors, 1), best, atol=1e-6)
    np.testing.assert_allclose(layout.similarity, best, atol=1e-5)
    assert [one.name for one in layout.colorings] == ["Label", "Correct", "Split"]
    label, correct, split = layout.colorings
    assert [label.classes[number] for number in label.values] == [
        images.classes[number] for number in images.labels
    ]
    held_out = split.values == split.classes.index("test")
    assert ((correct.values >= 0) == held_out).all()


def test_votes_are_the_answers_behind_the_knn_accuracy(trained):
    embeddings = read_embeddings(trained.embeddings, images_of(trained))
    answers = knn_classes(embeddings)
    answered = answers != ""
    right = float((answers[answered] == embeddings.class_names[answered]).mean())
    measured = trained.read_summary()["metrics"]["encoder"]["kNN top-1"]["value"]
    assert right == pytest.approx(measured, abs=1e-12)


def test_a_sample_has_as_many_of_every_class_as_it_can():
    labels = np.repeat(["a", "b", "c", ""], [1000, 30, 5, 400])
    sample = balanced(labels, 100)
    assert len(sample) == len(set(sample.tolist())) == 100
    sizes = dict(zip(*np.unique(labels[sample], return_counts=True), strict=True))
    assert sizes == {"a": 33, "b": 30, "c": 5, "": 32}
    assert balanced(labels, 5000).tolist() == list(range(len(labels)))
    assert len(balanced(np.full(100, ""), 7)) == 7


def test_a_discovery_leaves_a_page_that_is_made_anew_to_the_byte(discovered):
    page = discovered.report.read_bytes()
    explore(discovered.path, write=True)
    assert discovered.report.read_bytes() == page
    names = [one["name"] for one in packed(page.decode())["colorings"]]
    assert names == ["Class", "Known or novel", "Score", "Ground truth", "Correct"]


def test_the_page_calls_classes_as_they_have_been_named(discovered, tmp_path):
    tables = (discovered.clusters, discovered.assignments)
    before, (first, *others) = [table.read_bytes() for table in tables], rows(discovered.clusters)
    try:
        write_rows(discovered.clusters, [first | {"name": "<b>sevens"}, *others])
        page = explore(discovered.path, output=tmp_path / "page.html").read_text()
        site = RunSite(discovered, images_of(discovered))
        assert "&lt;b&gt;sevens (new-1)" in site.page
        site.name(["new-1"], "eights")
        assert "eights (new-1)" in site.page
        of_first = [
            each["path"] for each in rows(discovered.assignments) if each["cluster"] == "new-1"
        ]
        numbers = [x for x, path in enumerate(images_of(discovered).names) if path in of_first]
        site.split(numbers[:3], "")
        sizes = dict(re.findall(r"<b>([^<]+)</b><span>(\d+) images</span>", site.page))
        new = f"new-{len(others) + 2}"
        assert (sizes["eights (new-1)"], sizes[new]) == (str(len(numbers) - 3), "3")
        site.split(numbers[3:], "")
        assert "<b>eights (new-1)</b>" not in site.page
    finally:
        for table, content in zip(tables, before, strict=True):
            table.write_bytes(content)
        discovered.original_clusters.unlink(missing_ok=True)
        discovered.original_assignments.unlink(missing_ok=True)
    assert "&lt;b&gt;sevens (new-1)" in page
    assert "<b>sevens" not in page
    assert "<b>sevens" in packed(page)["colorings"][0]["classes"]


def test_no_page_without_what_it_needs(trained, discovered, digits_file, tmp_path):
    with pytest.raises(UsageError, match="no run folder"):
        explore(tmp_path, write=True)
    with pytest.raises(UsageError):
        images_of(RunFolder(tmp_path / "nothing"))
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="choose another"):
        explore(trained.path, output=tmp_path / "file" / "page.html")
    with pytest.raises(DataError, match="no such"):
        explore(trained.path, tmp_path / "gone", write=True)
    content = discovered.page.read_bytes()
    discovered.page.write_bytes(content[:100])
    try:
        with pytest.raises(CheckpointError, match=r"page.json cannot be used"):
            explore(discovered.path, write=True)
    finally:
        discovered.page.write_bytes(content)
    with np.load(digits_file) as file:
        np.savez(tmp_path / "few.npz", x=file["x_train"][:40], y=file["y_train"][:40])
    with pytest.raises(DataError, match="give the images of the run"):
        explore(trained.path, tmp_path / "few.npz", write=True)


def test_images_that_are_gone_are_left_out_of_the_map(trained):
    images = images_of(trained)
    few = images.subset(np.arange(0, len(images), 2))
    layout = image_map(trained, read_embeddings(trained.embeddings, few), few)
    assert layout.names == tuple(few.names)
    assert layout.number.tolist() == list(range(len(few)))


def test_of_many_images_most_is_in_files_beside_the_page(trained, tmp_path):
    path = tmp_path / "a page.html"
    for again in ((), ("--overwrite",)):  # the folder of an earlier page is replaced with it
        path.unlink(missing_ok=True)
        assert call("explore", trained.path, "-o", path, "--one-file", "50", *again) == 0
        made = {file.name: file.read_bytes() for file in (tmp_path / "a page_files").iterdir()}
    assert made.keys() == {"0.js", "0.webp"}
    data = packed(path.read_text())
    assert (data["files"], data["perFile"]) == ("a%20page_files", 4_096)
    assert not data.keys() & {"details", "sheets"}
    shutil.copy(path, RunFolder(tmp_path).report)
    with pytest.raises(UsageError, match="which a notebook cannot load"):
        Run(RunFolder(tmp_path)).show()
    served = RunSite(trained, images_of(trained), one_file=50)
    assert served.details(0) == made["0.js"]
    assert served.sheet(0) == made["0.webp"]
    assert served.details(1) is served.sheet(1) is None
    assert packed(served.page)["files"] == "files"
    assert re.search("script-src 'sha256-[^']*' 'self';", served.policy)
    whole = RunSite(trained, images_of(trained))
    assert whole.details(0) is whole.sheet(9) is None
    assert "details" in packed(whole.page)


def test_the_search_of_a_discovery_finds_the_image_itself(discovered, tmp_path):
    """Its table has features above a layer that the encoder's file has not."""
    images, query = images_of(discovered), tmp_path / "query.png"
    Image.fromarray(images.read(7)).save(query)
    [found] = nearkin.neighbors(discovered.path, [query], top=1)
    assert found.neighbors[0].path == images.names[7]
    assert found.neighbors[0].similarity > 0.999
    site = RunSite(discovered, images, of_table=partial(table_encoder, discovered))
    assert site.search(query.read_bytes())["neighbors"][0]["number"] == 7
    with pytest.raises(CheckpointError, match="is of another encoder"):
        nearkin.neighbors(discovered.encoder, [query], vectors=discovered.embeddings)


def test_vectors_have_a_page_too(trained, digits_file, tmp_path, refusal):
    parts, page = tmp_path / "vectors", tmp_path / "page.html"
    assert call("embed", trained.path, digits_file, "-o", parts, "--shard-size", "64") == 0
    assert len(list(parts.glob("*.parquet"))) == 4
    assert call("explore", parts, digits_file, "-o", page, "--one-file", "50") == 0
    images = images_of(trained)
    run = image_map(trained, read_embeddings(trained.embeddings, images), images)
    shown = packed(page.read_text())
    number = np.frombuffer(base64.b64decode(shown["number"]["data"]), "<i2")
    xy = np.frombuffer(base64.b64decode(shown["xy"]["data"]), "<f4").reshape(-1, 2)
    np.testing.assert_allclose(xy, run.xy[number], rtol=1e-6)
    assert "200 images of vectors" in page.read_text()
    assert "nearkin explore</" in page.read_text(), "which has made it"
    assert [one["name"] for one in shown["colorings"]] == ["Label", "Split"]
    assert {file.name for file in (tmp_path / "page_files").iterdir()} == {"0.js", "0.webp"}
    assert "give their images, too, and the page as -o" in refusal(2, "explore", parts)
    refusal(4, "explore", parts, digits_file, "-o", page / "page.html")


def test_the_first_paragraph_says_what_labels_were_used_for(trained, tmp_path):
    assert "Labels are used only for the evaluation below." in trained.report.read_text()
    run = RunFolder(shutil.copytree(trained.path, tmp_path / "run"))
    config, data = run.settings()
    run.write_settings(replace(config, method="supervised", known=["3", "4"], epochs=1), data)
    assert (
        " for 1 epoch; 40 other images are held out. It learned from the labels of 2 known "
        "classes; all other labels are used only for the evaluation below."
    ) in " ".join(explore(run.path, write=True).read_text().split())


def test_the_page_names_the_versions_that_have_computed_the_run(trained, tmp_path):
    run = RunFolder(shutil.copytree(trained.path, tmp_path / "run"))
    summary = run.read_summary()
    assert versions().items() <= summary.items()
    run.write_summary(summary | {"torch": "0.4.1.post2"})
    page = explore(run.path, write=True).read_text()
    assert "0.4.1.post2" in page
    assert summary["torch"] not in page


def test_images_that_are_labeled_in_a_report_are_copied_by_these_labels(
    trained, discovered, tmp_path
):
    """Rather than by what was predicted of them, or by the labels of the data."""
    images = images_of(trained)
    number = images.names.index(rows(discovered.assignments)[0]["path"])
    for made in (trained, discovered):
        run = RunFolder(shutil.copytree(made.path, tmp_path / made.path.name))
        site = RunSite(run, images)
        site.label([number], "cellos")
        site.export("all", [number])
        (copied,) = contents(run.exports)
        assert copied.startswith("all/cellos/")


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [0, 1, 1, 2]], ids=["mixed", "twice"])
def test_features_in_another_order_than_their_images_have_no_page(
    order, trained, digits_file, tmp_path, refusal
):
    stored = read_embeddings(trained.embeddings, images_of(trained))
    table, page = tmp_path / "vectors.parquet", tmp_path / "page.html"
    write_embeddings(table, stored.subset(np.array(order)))
    line = refusal(3, "explore", table, digits_file, "-o", page)
    assert f"{stored.paths[1]!r} is not in the order of the images, or stands twice" in line
    assert not page.exists()
