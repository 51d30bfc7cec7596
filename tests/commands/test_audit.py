"""`nearkin audit`: one call on a folder, a table and vectors, and what it refuses."""

import json
import re
from dataclasses import replace
from shutil import make_archive

import builders
import numpy as np
import pyarrow as pa
import pytest
from nearkin_command import run
from pyarrow import parquet

import nearkin
from nearkin.data.opening import open_images
from nearkin.errors import DataError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.vectors import write_embeddings
from nearkin.tables import read_csv


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photographs of two classes in two parts; four test images are training images."""
    folder, crops = tmp_path_factory.mktemp("audit") / "photos", builders.photographs(80)
    for number, image in enumerate(crops):
        part, label = ("test" if number % 4 == 3 else "train"), "ab"[number % 2]
        path = folder / part / label / f"{number * 7:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        if number in (0, 1, 4, 5):
            copy = folder / "test" / label / f"copy-{number:03}.png"
            copy.parent.mkdir(parents=True, exist_ok=True)
            image.save(copy)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return builders.write_network(tmp_path_factory.mktemp("e") / "e.safetensors", size=32)


@pytest.fixture(scope="module")
def whole(photos, encoder):
    """What is found in them."""
    return nearkin.audit(photos, encoder=encoder, verbose=False)


def test_the_repaired_split_is_data_with_no_group_on_both_sides(photos, encoder, tmp_path):
    table, page = tmp_path / "repaired.csv", tmp_path / "audit.html"
    words = ["--encoder", encoder, "-o", table, "--page", page, "-q"]
    assert run("audit", photos, *words) == 0
    rows = list(read_csv(table))
    assert [*rows[0]] == ["path", "split", "label", "group"]
    images = open_images(str(table))
    assert len(images) == len(rows) == 84
    assert images.classes == ("a", "b")
    of_test = images.groups[images.splits == "test"]
    assert not np.isin(of_test, images.groups[images.splits == "train"]).any()
    moved = [row["path"] for row in rows if "copy-" in row["path"]]
    assert len(moved) == 4
    assert {row["split"] for row in rows if row["path"] in moved} == {"train"}
    text = page.read_text(encoding="utf-8")
    assert "same bytes" in text
    again = nearkin.audit(str(table), encoder=encoder, verbose=False)
    assert again.leaks.found == ()
    assert again.price.owed == ()


def test_json_and_python_say_the_same(photos, encoder, whole, capsys):
    assert run("audit", photos, "--encoder", encoder, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(whole.to_dict()))
    leaks = [row for row in whole.records() if row["finding"] == "leak: same bytes"]
    names = [(row["path"].rpartition("-")[2], row["of"][-7:]) for row in leaks]
    assert sorted(names) == [(f"{n:03}.png", f"{7 * n:03}.png") for n in (0, 1, 4, 5)]
    assert printed["sizes"] == {"train": 60, "test": 24}
    assert (printed["repaired"], printed["bad"]) == ({"train": 64, "test": 20}, {})
    assert f"from {printed['leaks']['decoys']} training images without a dup" in whole.lines()[2]
    assert whole.lines()[1].startswith("leaks   4 of 24 test images (16.7%)")


def test_two_folders_are_two_parts(photos, encoder, whole):
    sets = {"train": photos / "train", "test": photos / "test"}
    found = nearkin.audit(**sets, encoder=encoder, verbose=False)
    assert len(found.leaks.found) == len(whole.leaks.found) == 4
    assert found.price.every[0].value == whole.price.every[0].value


def features(n=200, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 2
    x = rng.normal(size=(n, 6)) + 2 * np.eye(2, 6)[labels]
    x[150:156] = x[:6]
    names = [f"{row}.jpg" for row in range(n)]
    splits = np.where(np.arange(n) < 150, "train", "test")
    return Embeddings(x.astype(np.float32), labels, paths=names, classes=("a", "b"), splits=splits)


def test_features_serve_as_well_as_images(tmp_path):
    whole = features()
    found = nearkin.audit(whole, verbose=False)
    assert [leak.why for leak in found.leaks.found[:6]] == ["same vector"] * 6
    for name, rows in (("train", np.arange(150)), ("test", np.arange(150, 200))):
        write_embeddings(tmp_path / f"{name}.parquet", whole.subset(rows))
    sets = {name: tmp_path / f"{name}.parquet" for name in ("train", "test")}
    two = nearkin.audit(**sets, verbose=False)
    second = json.dumps(two.to_dict()).replace("test: ", "")  # as of images; see union
    assert json.loads(second) == json.loads(json.dumps(found.to_dict()))
    with pytest.raises(UsageError, match="output is a table of images, and two tables of"):
        nearkin.audit(**sets, output=tmp_path / "r.csv", verbose=False)
    write_embeddings(tmp_path / "whole.parquet", whole)
    nearkin.audit(tmp_path / "whole.parquet", output=tmp_path / "r.csv", verbose=False)
    rows = {row["path"]: row for row in read_csv(tmp_path / "r.csv")}
    assert (rows["150.jpg"]["split"], rows["150.jpg"]["group"]) == ("train", "0.jpg")


def test_images_of_one_path_in_two_tables_of_features_are_two(tmp_path):
    whole, sets = features(), {name: tmp_path / f"{name}.parquet" for name in ("train", "test")}
    whole = replace(whole, paths=[f"{row % 150}.jpg" for row in range(200)])
    for name, rows in (("train", np.arange(150)), ("test", np.arange(150, 200))):
        write_embeddings(sets[name], whole.subset(rows))
    found = nearkin.audit(**sets, verbose=False)
    leaks = [row for row in found.records() if row["finding"] == "leak: same vector"]
    pairs = {(row["path"], row["of"]) for row in leaks}
    assert pairs == {(f"test: {row}.jpg", f"{row}.jpg") for row in range(6)}


def with_columns(path, embeddings, **columns):
    write_embeddings(path, embeddings)
    table = parquet.read_table(path)
    for name, cells in columns.items():
        table = table.append_column(name, pa.array(cells))
    parquet.write_table(table, path)
    return path


def test_leaks_are_found_and_repaired_where_their_price_cannot_be_measured(tmp_path):
    """Of training images of one class, of one image, or where all share groups with test ones."""
    of, names = features(), ("one", "all", "single")
    one, linked, single = (tmp_path / f"{name}.parquet" for name in names)
    camera = ["xy"[row % 3 % 2] for row in range(200)]
    labels = np.where(np.arange(200) < 150, 0, of.labels)
    with_columns(one, replace(of, labels=labels), camera=camera)
    found = nearkin.audit(one, ignore="camera", verbose=False)
    assert len(found.leaks.found) == 6
    assert (found.repaired != found.audited.embeddings.splits).sum() == 6
    why = "the linear probe needs labeled training images of two classes or more"
    assert f"price   not measured, {why}" in found.lines()
    assert (found.price, found.to_dict()["left_out"]) == (None, {"price": why})
    assert found.page("").sections
    few = "kNN top-1 with camera removed: not measured, it needs labeled test images"
    assert any(few in line for line in found.lines())
    evaluation = nearkin.evaluate(one, ignore="camera", verbose=False)
    assert evaluation.left_out["linear probe"] == why
    assert [each.name for each in evaluation.column.metrics] == [
        "kNN of camera",
        "kNN of camera, removed",
    ]

    groups = [str(min(row, row % 150) % 50) for row in range(200)]
    write_embeddings(linked, replace(of, group_names=groups))
    found = nearkin.audit(linked, verbose=False)
    assert found.left_out["price"].startswith("150 of 150 training images share a group with a")
    assert (
        len(np.intersect1d(*(found.groups[found.repaired == p] for p in ("train", "test")))) == 0
    )

    rows = np.append(0, np.arange(150, 200))
    write_embeddings(single, of.subset(rows))
    found = nearkin.audit(single, verbose=False)
    assert [(leak.test, leak.train) for leak in found.leaks.found] == [(1, 0)]
    assert found.left_out["price"]


def patients(photos, table, *parts):
    """Write a table of photographs, four of each patient; a patient's images are of these parts."""
    lines = ["path,label,group,split"]
    for row, path in enumerate(x for x in sorted(photos.rglob("*.png")) if "copy-" not in x.name):
        of_patient = parts[row // 4 % len(parts)]
        lines.append(f"{path},{'ab'[row % 2]},p{row // 4},{of_patient[row % len(of_patient)]}")
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lines


def test_groups_stay_what_they_are_where_images_are_left_out(photos, encoder, tmp_path):
    how = {"encoder": encoder, "verbose": False}
    lines = patients(photos, tmp_path / "all.csv", ["val"], ["train"], ["test"], ["train"])
    bad = photos.parent / "000.png"  # it comes first, and is of a patient of the training part
    bad.write_bytes((photos / "train/a/000.png").read_bytes()[:2000])
    (tmp_path / "all.csv").write_text("\n".join([*lines, f"{bad},a,p1,train"]))
    (tmp_path / "some.csv").write_text("\n".join(x for x in lines if not x.endswith(",val")))
    found, some = (nearkin.audit(tmp_path / f"{n}.csv", **how) for n in ("all", "some"))
    assert len(found.audited) == len(some.audited) == 60
    plain = found.to_dict()
    assert [*plain["bad"]] == [name for name in plain["bad"] if name.endswith("000.png")] != []
    assert found.groups.tolist() == some.groups.tolist()
    assert (found.repaired == some.audited.embeddings.splits).all()  # each is in one part


def test_groups_of_features_do_too(tmp_path):
    whole = features()
    splits = np.where(np.arange(200) < 20, "val", whole.splits)
    whole = replace(whole, splits=splits, group_names=[f"p{row // 5}" for row in range(200)])
    write_embeddings(tmp_path / "all.parquet", whole)
    write_embeddings(tmp_path / "some.parquet", whole.subset(np.arange(20, 200)))
    found, some = (
        nearkin.audit(tmp_path / f"{n}.parquet", verbose=False) for n in ("all", "some")
    )
    assert found.groups.tolist() == some.groups.tolist()
    assert (found.groups == np.arange(180) // 5 * 5).all()


@pytest.fixture(scope="module")
def grouped(photos, encoder, tmp_path_factory):
    """A table of patients, of whom every third is in both parts, and its audit."""
    table = tmp_path_factory.mktemp("grouped") / "all.csv"
    patients(photos, table, ["train", "test"], ["train"], ["test"])
    found = nearkin.audit(table, encoder=encoder, verbose=False)
    assert (found.repaired != found.audited.embeddings.splits).sum() == 2 * 7
    return table, found


def test_patients_in_two_tables_are_those_of_one(grouped, encoder, tmp_path):
    table, found = grouped
    lines = table.read_text().splitlines()
    sets = {part: tmp_path / f"{part}.csv" for part in ("train", "test")}
    for part, path in sets.items():
        path.write_text("\n".join(x for x in lines if x.endswith(("split", part))))
    two = nearkin.audit(**sets, encoder=encoder, verbose=False)
    for each in (two, found):
        assert np.unique(each.groups, return_counts=True)[1].tolist() == [4] * 20
    assert (two.repaired != two.audited.embeddings.splits).sum() == 2 * 7


def test_features_have_the_groups_of_their_images(grouped, encoder, tmp_path):
    table, found = grouped
    file, repaired, shards = tmp_path / "v.parquet", tmp_path / "r.csv", tmp_path / "shards"
    made = nearkin.embed(encoder, table, output=file, verbose=False)
    nearkin.embed_shards(encoder, table, output=shards, shard_size=30, verbose=False)
    for vectors in (file, made, shards):
        audit = nearkin.audit(vectors, output=repaired, overwrite=True, verbose=False)
        assert audit.groups.tolist() == found.groups.tolist()
        assert {row["group"] for row in read_csv(repaired)} == {f"p{n}" for n in range(20)}
        evaluation = nearkin.evaluate(vectors, protocol=["knn"], verbose=False)
        metric = evaluation.metrics["encoder"][0]
        assert metric.effective_n < metric.n
        assert "independent" not in metric.protocol["interval"]
    # Groups without a name of their own are called by their first image.
    unnamed = replace(made, group_names=(), groups=np.array([7, 7, *range(8, 86)]))
    assert nearkin.audit(unnamed, verbose=False).groups.tolist() == [0, 0, *range(2, 80)]
    # Other programs write numbers.
    numbers = pa.array([None if row == 3 else row // 4 for row in range(80)])
    columns = parquet.read_table(file)
    columns = columns.set_column(columns.column_names.index("group"), "group", numbers)
    parquet.write_table(columns, tmp_path / "n.parquet")
    metric = nearkin.evaluate(tmp_path / "n.parquet", bank=file).metrics["encoder"][0]
    assert metric.effective_n < metric.n == 80


OMITTED = "left out: 50 images of the validation part: the test part is scored"
SCORED = "substituted: the validation part, of 50 images, is scored: there is no test part"


def notes_of(caplog):
    """The lines that say what was decided about the data."""
    lines = [line for line in caplog.messages if line.startswith(("left out", "substituted"))]
    caplog.clear()
    return lines


def test_vectors_without_a_label_are_said_to_be_left_out(tmp_path, caplog):
    table, whole = tmp_path / "v.parquet", features()
    labels = np.where(np.arange(200) % 10, whole.labels, -1)
    splits = np.repeat(["train", "test"], (120, 80))
    write_embeddings(table, replace(whole, labels=labels, splits=splits))
    assert nearkin.evaluate(table, protocol=["knn"]).sizes == {"train": 108, "test": 72}
    assert notes_of(caplog) == ["left out: 20 vectors without a label"]


@pytest.mark.parametrize(
    ("words", "sizes", "note"),
    [
        (["train", "validation", "Test"], (100, 50), OMITTED),
        (["Train", "training", "test_set"], (150, 50), ""),
        (["", "", "test"], (150, 50), ""),
        (["train", "", "val"], (150, 50), SCORED),
        (["", "valid", "test"], (100, 50), OMITTED),
    ],
)
def test_features_are_divided_by_any_word_for_a_split(words, sizes, note, tmp_path, caplog):
    table, whole = tmp_path / "v.parquet", features()
    write_embeddings(table, replace(whole, splits=np.repeat(words, (100, 50, 50))))
    evaluation = nearkin.evaluate(table, protocol=["knn"])
    assert evaluation.sizes == dict(zip(("train", "test"), sizes, strict=True))
    assert notes_of(caplog) == [note] * bool(note)
    assert nearkin.audit(table).to_dict()["sizes"] == evaluation.sizes
    assert notes_of(caplog) == [note] * bool(note)
    assert nearkin.select(table, num=1, verbose=False).num_unlabeled == sizes[0]


def test_features_of_a_part_of_another_name_are_refused_not_learned_from(tmp_path):
    table, words = tmp_path / "v.parquet", np.repeat(["train", "holdout", "test"], (100, 50, 50))
    write_embeddings(table, replace(features(), splits=words))
    for command, more in (
        (nearkin.audit, {}),
        (nearkin.evaluate, {"protocol": ["knn"]}),
        (nearkin.select, {"num": 1}),
    ):
        with pytest.raises(
            DataError, match=r"v\.parquet: split 'holdout'; say train, val or test"
        ):
            command(table, **more, verbose=False)


@pytest.fixture(scope="module")
def cameras(photos, tmp_path_factory):
    """A table of the photographs with columns for camera, site and part."""
    rng, lines = np.random.default_rng(0), ["path,label,fold,camera,site"]
    for number, path in enumerate(sorted(photos.rglob("*.png"))):
        if "copy-" not in path.name:
            fold, camera = ("test" if number % 3 == 0 else "train"), "xy"[rng.integers(2)]
            lines.append(f"{path},{path.parent.name},{fold},{camera},here")
    table = tmp_path_factory.mktemp("cameras") / "cameras.csv"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return table


def test_an_encoder_that_was_trained_on_test_images_is_named(photos, cameras, tmp_path):
    """A split of one's own knows nothing of the one that the encoder's run had."""
    quick = {"backbone": "tiny", "image_size": 16, "batch_size": 8, "epochs": 1}
    run = nearkin.train(photos, output=tmp_path / "run", **quick, device="cpu", verbose=False)
    found = nearkin.audit(cameras, encoder=run, split="fold", verbose=False)
    seen = [row for row in read_csv(cameras) if "train" in row["path"] and row["fold"] == "test"]
    assert found.to_dict()["encoder_trained_on"] == len(seen) == 20
    assert "was trained on 20 of 27 test images" in str(found)
    own = nearkin.audit(photos, encoder=run, verbose=False)
    assert own.to_dict()["encoder_trained_on"] == 0, "copies of training images are leaks"
    file = tmp_path / "features.parquet"
    nearkin.embed(run, photos, output=file, verbose=False)
    unknown = nearkin.audit(file, verbose=False)
    assert unknown.to_dict()["encoder_trained_on"] is None
    assert "encoder" not in str(own)


def test_columns_name_parts_and_what_is_to_be_ignored(cameras, encoder, tmp_path):
    page, how = tmp_path / "audit.html", {"encoder": encoder, "split": "fold", "verbose": False}
    found = nearkin.audit(cameras, **how, ignore="camera", page=page)
    text = page.read_text(encoding="utf-8")
    assert f"{found.column.sentence}." in text  # below the map, which has the cameras first
    assert re.search(r'<option value="0"[^>]*>camera</option>', text)
    nearkin.audit(cameras, **how, page=page, overwrite=True)
    assert "map-coloring" not in page.read_text(encoding="utf-8")
    rows = list(read_csv(cameras))
    assert found.to_dict()["sizes"]["test"] == sum(row["fold"] == "test" for row in rows)
    assert found.column.column == "camera"
    assert 0 < found.column.p <= 1
    assert any("camera: " in line for line in found.lines())


def test_evaluate_takes_the_column_too(cameras, encoder, tmp_path):
    how = {"ignore": "camera", "protocol": ["knn"], "verbose": False}
    evaluation = nearkin.evaluate(encoder, str(cameras), **how)
    plain = evaluation.to_dict()["column"]
    assert plain["metrics"]["kNN of camera"]["n"] == evaluation.sizes["test"]
    assert any(line.startswith("camera: ") for line in evaluation.lines())
    camera = ["xy"[row % 3 % 2] for row in range(200)]
    with_columns(tmp_path / "c.parquet", features(), camera=camera)
    of_vectors = nearkin.evaluate(tmp_path / "c.parquet", **how)
    assert of_vectors.column.metrics[0].n == 50
    assert nearkin.audit(tmp_path / "c.parquet", ignore="camera", verbose=False).column.chance > 0
    with pytest.raises(
        UsageError, match="labels is of images with an encoder, and these features are stored"
    ):
        nearkin.audit(tmp_path / "c.parquet", labels="folders", verbose=False)


def not_yet(*_, **__):
    raise AssertionError("this is computed before the column is looked at")


def test_a_column_that_tells_nothing_is_refused_before_anything_is_computed(
    cameras, encoder, tmp_path, monkeypatch
):
    steps = "audit.examine", "audit.of_images", "evaluate.features_of", "evaluate.evaluate_tables"
    for step in steps:
        monkeypatch.setattr(f"nearkin.commands.{step}", not_yet)
    file = with_columns(tmp_path / "v.parquet", features(), site=["here"] * 200)
    for call in (nearkin.audit, nearkin.evaluate):
        with pytest.raises(UsageError, match="column site has 1 values"):
            call(file, ignore="site", verbose=False)
        with pytest.raises(UsageError, match="column hour"):
            call(file, ignore="hour", verbose=False)
    with pytest.raises(UsageError, match="column site has 1 values"):
        nearkin.audit(cameras, encoder=encoder, split="fold", ignore="site", verbose=False)
    with pytest.raises(UsageError, match="column site has 1 values"):
        nearkin.evaluate(encoder, str(cameras), ignore="site", verbose=False)


def test_what_cannot_be_audited_is_refused_in_one_line(
    photos, cameras, encoder, tmp_path, refuses
):
    one = tmp_path / "one"
    builders.fill(one, *(f"{part}/a/{n}.png" for part in ("train", "test") for n in range(3)))
    same, old, whole = tmp_path / "same", tmp_path / "old.csv", photos / "train"
    for part in ("train", "test"):
        builders.fill(same / part, *(f"{c}/{n}.png" for c in "ab" for n in range(12)))
        builders.fill(
            tmp_path / "numbers" / part, *(f"{c}/{n}.png" for c in (-1, 0) for n in "ab")
        )
    old.write_text("mine")
    table = (
        ("audit", 2, "give DATA, or --train and --test"),
        ("audit PHOTOS --train PHOTOS --encoder E", 2, "give DATA, or --train and --test"),
        ("audit --train PHOTOS --test PHOTOS --split fold --encoder E", 2, "--split fold names"),
        ("audit --train WHOLE --test ZIP --encoder E -o new.csv", 2, "cannot be listed as data"),
        ("audit PHOTOS", 2, "these are images; give --encoder, too"),
        ("audit WHOLE --encoder E", 2, "the data have no test part"),
        ("audit ONE --encoder E --labels folders", 2, "all labels are of one class"),
        ("audit SAME --encoder E", 2, "all 24 test images are training images"),
        ("audit CAMERAS --encoder E --split fold --ignore site", 2, "column site has 1 values"),
        ("audit CAMERAS --encoder E --split camera", 3, "--split camera: split 'x'; say train"),
        ("audit CAMERAS --encoder E --split fold --ignore hour", 3, "no column 'hour'"),
        ("audit PHOTOS --encoder E --ignore camera", 2, "column camera: there is no table"),
        ("audit PHOTOS --encoder E --precision 1.5", 2, "--precision 1.5 is not above 0"),
        ("audit PHOTOS --encoder E -o OLD", 4, "--overwrite"),
        ("audit NUMBERS --encoder E -o new.csv", 3, "a table cannot hold the class '-1'"),
        ("audit PHOTOS --encoder E --page page.txt", 2, "cannot write page.txt"),
        ("evaluate E PHOTOS --ignore camera", 2, "column camera: there is no table"),
        ("evaluate E CAMERAS --ignore site", 2, "column site has 1 values"),
    )
    names = {"PHOTOS": photos, "WHOLE": whole, "ONE": one, "SAME": same, "OLD": old}
    names["NUMBERS"] = tmp_path / "numbers"
    names["ZIP"] = make_archive(str(tmp_path / "test"), "zip", photos / "test")
    refuses(table, **names, CAMERAS=cameras, E=encoder)
