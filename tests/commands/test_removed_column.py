"""`nearkin embed --ignore`: a column is removed from features, which nobody takes for others."""

import json
import shutil

import builders
import numpy as np
import pytest
import torch
from nearkin_command import run
from PIL import Image
from pyarrow import parquet

import nearkin
from nearkin.commands.explore import explore
from nearkin.data.opening import open_images
from nearkin.evaluation.column import Known, divided
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import knn
from nearkin.evaluation.table import open_table
from nearkin.metrics.erasure import leace
from nearkin.metrics.metric import difference
from nearkin.objectives import unit
from nearkin.tables import read_csv

BROKEN, UNKNOWN = 30, (3, 50)  # An image that cannot be read, and two of an unknown camera


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Digits of four classes; the second camera inverts, and has taken two classes more often."""
    folder = tmp_path_factory.mktemp("cameras")
    rng, lines = np.random.default_rng(0), ["path,label,split,camera,site"]
    for number, (pixels, label) in enumerate(zip(*builders.digits(40, classes=4), strict=True)):
        camera = "xy"[(label % 2) ^ (rng.random() < 0.3)]
        image = Image.fromarray(255 - pixels if camera == "y" else pixels)
        image.save(folder / f"{number:03}.png")
        split = "test" if number % 4 == 0 else "train"
        camera = "" if number in UNKNOWN else camera
        lines.append(f"{number:03}.png,{label},{split},{camera},here")
    builders.cut_short(folder / f"{BROKEN:03}.png")
    table = folder / "images.csv"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return table


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return builders.write_network(tmp_path_factory.mktemp("e") / "e.safetensors")


@pytest.fixture(scope="module")
def raw(table, encoder, tmp_path_factory):
    path = tmp_path_factory.mktemp("raw") / "raw.parquet"
    assert run("embed", encoder, table, "-o", path, "-q") == 0
    return path


@pytest.fixture(scope="module")
def removed(table, encoder, tmp_path_factory):
    path = tmp_path_factory.mktemp("removed") / "removed.parquet"
    assert run("embed", encoder, table, "-o", path, "--ignore", "camera", "-q") == 0
    return path


def cameras(table, names):
    known = {row["path"]: row["camera"] for row in read_csv(table)}
    return np.array([known[name] for name in names])


def held_out(names):
    return np.array([int(name[:3]) % 4 == 0 for name in names])


def test_the_features_are_those_that_leace_leaves_of_the_images_embedded(
    table, encoder, raw, removed
):
    """Fitted to those that are not held out."""
    before, after = open_table(raw), open_table(removed)
    names = before.texts("path")
    assert after.texts("path") == names
    assert f"{BROKEN:03}.png" not in names
    values = cameras(table, names)
    known = np.flatnonzero(values != "")
    assert len(known) == len(names) - len(UNKNOWN)
    known = known[~held_out(names)[known]]
    hot = torch.from_numpy(values[known, None] == np.array(["x", "y"])).float()
    classes = np.array(before.texts("label"))
    expected = unit(leace(before.gather()[known], hot, classes[known])(before.gather()))
    assert (after.gather() - expected).abs().max() < 1e-5
    assert (before.gather() - expected).abs().max() > 0.05
    found = nearkin.embed(encoder, table, ignore="camera", verbose=False)
    assert (found.tensor - expected).abs().max() < 1e-5
    assert found.removed == after.removed == "camera"
    assert found.encoder == after.encoder != before.encoder


@pytest.mark.parametrize("scored", ["val", "val and test"])
def test_it_is_fitted_to_the_images_that_evaluate_of_the_file_learns_from(
    scored, table, encoder, raw, tmp_path
):
    """Of a table without a test part too, and to none of a validation part beside one."""
    rows = list(read_csv(table))
    for number, row in enumerate(rows):
        if row["split"] == "test" and (scored == "val" or number % 8 == 0):
            row["split"] = "val"
    lines = [",".join([str(table.parent / row["path"]), *list(row.values())[1:]]) for row in rows]
    parts = tmp_path / "parts.csv"
    parts.write_text("\n".join([",".join(rows[0]), *lines]) + "\n", encoding="utf-8")
    found = nearkin.embed(encoder, parts, ignore="camera", verbose=False)
    names = [name.rpartition("/")[2] for name in found.paths]
    before, position = open_table(raw), open_table(raw).texts("path")
    x = before.gather()[[position.index(name) for name in names]]
    values = cameras(table, names)
    fitted = np.flatnonzero((values != "") & ~held_out(names))
    hot = torch.from_numpy(values[fitted, None] == np.array(["x", "y"])).float()
    expected = unit(leace(x[fitted], hot, found.labels[fitted])(x))
    assert (found.tensor - expected).abs().max() < 1e-5
    own = {row["path"]: row["split"] for row in rows}
    assert found.splits.tolist() == [own[name] for name in names]


def test_what_knn_predicts_of_it_before_and_after_is_said(table, encoder, raw, tmp_path, caplog):
    before, names = open_table(raw), open_table(raw).texts("path")
    found = nearkin.embed(encoder, table, output=tmp_path / "f.npz", ignore="camera")
    assert found.lines()[0].endswith(" features each, camera removed")
    with np.load(tmp_path / "f.npz") as file:
        assert file["nearkin.removed"].tolist() == ["camera"]
        assert (file["vector"] == found.vectors).all()
    values = cameras(table, names)
    known = np.flatnonzero(values != "")
    parts = np.where(held_out(names), "test", "train")
    images = open_images(str(table))
    position = {name: row for row, name in enumerate(images.names)}
    labels = images.labels[[position[name] for name in names]]
    accuracies, of_classes = [], []
    for of in (before.gather().numpy(), found.vectors):
        features = Embeddings(of, labels, splits=parts)
        pair = divided(features.subset(known), values[known])
        asked = Known.of("camera", *pair)
        accuracies.append((asked.accuracy, asked.tested(0)))
        of_classes.append(knn(*pair[0])[0])
    (was, tested), (now, _) = accuracies
    line = (
        f"camera removed: kNN predicts it for {now} of {now.n} held-out images, before for {was}, "
        f"by chance within classes for {tested.chance:.3f}"
    )
    assert line in caplog.text
    cost = difference(of_classes[1], of_classes[0])
    assert f"kNN top-1 with camera removed: {cost}" in caplog.text
    assert now.value < was.value - 0.1


def test_it_is_noted_in_the_file_and_said_by_whoever_reads_it(
    table, raw, removed, tmp_path, capsys
):
    assert parquet.read_schema(removed).metadata[b"nearkin.removed"] == b"camera"
    assert parquet.read_schema(raw).metadata[b"nearkin.removed"] == b""
    said = "features without camera, which is removed"
    for words in (
        ("evaluate", "FILE", "--protocol", "knn"),
        ("audit", "FILE"),
        ("select", "FILE", "--num", 3),
        ("duplicates", table, "--vectors", "FILE", "--threshold", 0.999),
    ):
        for file in (removed, raw):
            typed = [file if word == "FILE" else word for word in words]
            assert run(*typed) == 0, words
            assert (said in capsys.readouterr().err) == (file == removed), words
    evaluation = nearkin.evaluate(removed, verbose=False)
    assert evaluation.metrics["encoder"][0].protocol["features"].endswith(", camera removed")
    audited = nearkin.audit(removed, verbose=False)
    assert audited.lines()[0].endswith(" test images, camera removed")
    explore(removed, table, output=tmp_path / "map.html", verbose=False)
    assert "has written, camera removed." in (tmp_path / "map.html").read_text(encoding="utf-8")


def test_other_features_are_not_compared_with_those(
    table, encoder, raw, removed, tmp_path, refuses
):
    part = tmp_path / "part"
    part.mkdir()
    lines = table.read_text(encoding="utf-8").splitlines(keepends=True)
    for line in lines[1:101]:
        shutil.copy(table.parent / line[:7], part)
    (part / "images.csv").write_text("".join(lines[:101]), encoding="utf-8")
    other = tmp_path / "other.parquet"
    words = ("-o", other, "--ignore", "camera", "-q")
    assert run("embed", encoder, part / "images.csv", *words) == 0
    of_image = "camera is removed from these features, and not from those of other images"
    two = "or of one with a column removed from each"
    commands = (
        ("neighbors E IMAGE --vectors REMOVED", 5, of_image),
        ("duplicates TABLE --encoder E --vectors REMOVED --precision 0.9", 5, of_image),
        ("evaluate REMOVED --bank RAW", 5, two),
        ("evaluate REMOVED --bank OTHER", 5, two),
        ("audit --train RAW --test REMOVED", 5, two),
    )
    names = {"E": encoder, "IMAGE": table.parent / "000.png", "OTHER": other}
    refuses(commands, **names, TABLE=table, RAW=raw, REMOVED=removed)
    found = nearkin.embed(encoder, table, ignore="camera", verbose=False)
    with pytest.raises(nearkin.errors.CheckpointError, match=of_image):
        nearkin.neighbors(encoder, [table.parent / "000.png"], vectors=found)


def test_what_cannot_be_removed_is_refused_before_anything_is_computed(
    table, encoder, tmp_path, refuses, digits_file
):
    alone = "--ignore camera removes a column from the features of one file; give -o FILE.parquet"
    commands = (
        ("embed E TABLE --ignore camera", 2, alone),
        ("embed E TABLE --ignore camera -o OUT/run", 2, alone),
        ("embed E TABLE --ignore camera -o OUT/shards --shard-size 9", 2, alone),
        ("embed E TABLE --ignore camera -o OUT/shards --engine ray", 2, alone),
        ("embed E TABLE --ignore site -o OUT/f.parquet", 2, "column site has 1 values among"),
        ("embed E TABLE --ignore hour -o OUT/f.parquet", 3, "no column 'hour'"),
        ("embed E DIGITS --ignore camera -o OUT/f.parquet", 2, "camera: there is no table"),
    )
    refuses(commands, E=encoder, TABLE=table, DIGITS=digits_file, OUT=tmp_path)
    assert not [*tmp_path.iterdir()]


def test_classes_are_removed_within_cameras_where_cameras_are_the_labels(
    table, encoder, raw, tmp_path
):
    """Which keeps the cameras: the mirror of what is done elsewhere."""
    rows = [row for row in read_csv(table) if row["camera"]]
    columns = ("camera", "label", "split")
    lines = [",".join([f"{table.parent / row['path']}", *map(row.get, columns)]) for row in rows]
    swapped = tmp_path / "swapped.csv"
    swapped.write_text("\n".join(["path,label,species,split", *lines]) + "\n", encoding="utf-8")
    found = nearkin.embed(encoder, swapped, ignore="species", verbose=False)
    names = [name.rpartition("/")[2] for name in found.paths]
    before, position = open_table(raw), open_table(raw).texts("path")
    x = before.gather()[[position.index(name) for name in names]]
    species = np.array(before.texts("label"))[[position.index(name) for name in names]]
    hot = torch.from_numpy(species[:, None] == np.unique(species)).float()
    train = np.flatnonzero(~held_out(names))
    expected = unit(leace(x[train], hot[train], found.labels[train])(x))
    assert (found.tensor - expected).abs().max() < 1e-5


def test_json_has_what_is_removed(table, encoder, tmp_path, capsys):
    words = ("embed", encoder, table, "-o", tmp_path / "f.parquet", "--json")
    assert run(*words, "--ignore", "camera") == 0
    assert json.loads(capsys.readouterr().out)["removed"] == "camera"
    assert run(*words, "--overwrite") == 0
    assert "removed" not in json.loads(capsys.readouterr().out)
