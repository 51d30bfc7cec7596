"""Rounds of discovery: classes that were named, and images that were labeled, become known."""

import shutil
import tomllib
from pathlib import Path
from unicodedata import normalize

import pytest
from discoveries import (
    LEAST,
    LEAST_NCD,
    bytes_of,
    held_out,
    hungarian,
    names,
    once,
    rows,
    strict_json,
    table,
    write_rows,
)
from nearkin_command import run

from nearkin.classifier.assignments import COLUMNS
from nearkin.config import DiscoverConfig
from nearkin.data.labels import numbered
from nearkin.data.opening import open_images
from nearkin.data.split import split_images
from nearkin.discovery.clusters import CLUSTER_COLUMNS
from nearkin.discovery.data import open_discovery_data
from nearkin.discovery.rounds import Accepted, accepted, accepted_classes
from nearkin.errors import DataError
from nearkin.labels.known import label_images
from nearkin.run.folder import RunFolder
from nearkin.tables import read_csv, write_csv


@pytest.fixture
def edited(discovery, tmp_path):
    """A copy of a discovery, for a user to write into."""
    return Path(shutil.copytree(discovery, tmp_path / "accepted"))


@pytest.fixture
def labeled_parts(flat, labels):
    """The images with the labels of that discovery, and those that are held out of them."""
    return split_images(label_images(open_images(str(flat)), str(labels)), 0.1, 0)


def name(run_folder, chosen):
    """Write names into the column name of clusters.csv, as a user would."""
    clusters = rows(run_folder / "clusters.csv")
    named = [row | {"name": chosen.get(row["cluster"], row["name"])} for row in clusters]
    write_rows(run_folder / "clusters.csv", named)


def label(run_folder, label, number):
    """Label the first images of to_label.csv, as a user would; their paths."""
    asked = rows(run_folder / "to_label.csv")
    labeled = [row | {"label": label} for row in asked[:number]]
    write_rows(run_folder / "to_label.csv", labeled + asked[number:])
    return [row["path"] for row in labeled]


def be_sure(run_folder):
    """Let the digits 3 be sure images of a novel class, as a longer training would."""
    assignments = rows(run_folder / "assignments.csv")
    for row in assignments:
        row["flag"] = "core" if row["path"].startswith("3-") else ""
        row["cluster"] = "new-1" if row["flag"] else row["cluster"]
    write_rows(run_folder / "assignments.csv", assignments)
    return "new-1", {row["path"] for row in assignments if row["flag"]}


def going_on(out, *typed):
    """The notes of a run that has stopped before its summary, and goes on: those of before."""
    notes = strict_json(out / "summary.json")["notes"]
    (out / "summary.json").unlink()
    assert run(*typed, "-o", out, "--resume") == 0
    assert strict_json(out / "summary.json")["notes"] == notes
    return notes


def test_named_classes_become_known_ones_round_by_round(edited, flat, tmp_path):
    first, second, third = edited, tmp_path / "second", tmp_path / "third"
    cluster, core = be_sure(first)
    name(first, {cluster: "a digit of my own"})
    single, other = label(first, "another digit", 2)
    core -= {single, other}
    again = once("discover", flat, *LEAST)
    assert run(*again, "-o", second, "--accept", first) == 0
    known = ["digit 0", "digit 1", "digit 2", "a digit of my own", "another digit"]
    learned = core - held_out(first)  # a guess about an image is no true label of it
    labels = dict.fromkeys(learned, known[3]) | dict.fromkeys((single, other), known[4])
    assert sorted(strict_json(second / "summary.json")["known"]) == sorted(known)
    assert names(second) == names(first) - labels.keys()
    assert {row["path"]: row["label"] for row in rows(second / "accepted.csv")} == labels
    # The encoder, what it sees and what is held out are those of the first round.
    assert tomllib.loads((second / "config.toml").read_text())["encoder"] == str(first)
    assert bytes_of(second, "encoder.safetensors") == bytes_of(first, "encoder.safetensors")
    assert "images were kept in" in (second / "train.log").read_text()
    assert held_out(second) == held_out(first)
    # What was named in the first round is known in the third, without the folder of the first.
    shutil.rmtree(first)
    notes = going_on(second, *again, "--accept", first)
    assert f"labels of {len(labels)} images of 2 classes" in notes[-1]["text"]
    last, *_ = label(second, "a last digit", 1)
    typed = once(*again, "-o", third, "--accept", second, "--classes", 0, "--report")
    assert run(*typed) == 0
    assert sorted(strict_json(third / "summary.json")["known"]) == sorted([*known, "a last digit"])
    assert names(third) == names(second) - {last}
    assert strict_json(third / "summary.json")["novel"] == 0
    assert {row["kind"] for row in rows(third / "clusters.csv")} == {"known"}
    assert "No novel class" in (third / "report.html").read_text(encoding="utf-8")
    assert run("predict", third, flat, "-o", tmp_path / "new.csv") == 0


def test_a_round_searches_the_classes_that_are_left(discovery, edited, flat, tmp_path, refusal):
    """Those of the round before that nobody has named; config.toml says how many these are.

    Of fewer images than classes that is refused.
    """
    sure, _ = be_sure(edited)
    name(edited, {sure: "three"})
    found = {row["cluster"] for row in rows(edited / "assignments.csv")}
    left = len({cluster for cluster in found if cluster.startswith("new-")} - {sure})
    again = once("discover", flat, *LEAST, "--accept", edited, "--classes", "auto")
    assert run(*again, "-o", tmp_path / "next") == 0
    assert strict_json(tmp_path / "next" / "summary.json")["novel"] == left
    assert tomllib.loads((tmp_path / "next" / "config.toml").read_text())["classes"] == left
    fresh = Path(shutil.copytree(discovery, tmp_path / "fresh"))  # of two novel classes
    learned = sorted(names(fresh) - held_out(fresh))
    table(fresh / "to_label.csv", [(path, "digit 0") for path in learned[1:]])
    line = refusal(3, *once(*again, "--accept", fresh), "-o", tmp_path / "other")
    assert "1 unlabeled image to learn from, and --classes 2 takes 2" in line


def finished_by_hand(folder, written, named):
    """The two tables of a discovery, written as a discovery writes them."""
    folder.mkdir()
    blank = [""] * (len(COLUMNS) - 3)
    assigned = [(path, cluster, *blank, flag) for path, cluster, flag in written]
    write_csv(folder / "assignments.csv", COLUMNS, assigned)
    blank = [""] * (len(CLUSTER_COLUMNS) - 3)
    novel = [(cluster, name, "novel", *blank) for cluster, name in named]
    write_csv(folder / "clusters.csv", CLUSTER_COLUMNS, novel)
    (folder / "config.toml").write_text('kind = "discover"\ndata = "d"\nknown = "a,b"\n')
    return folder


def test_only_sure_images_of_named_classes_are_accepted_and_exact_copies_share_a_label(
    tmp_path, flat
):
    written = [("1.png", "new-1", "core"), ("2.png", "new-1", "border")]
    written += [("3.png", "new-2", "core"), ("4.png", "new-3", "core"), ("5.png", "new-3", "")]
    named = [("new-1", " cat "), ("new-2", ""), ("new-3", "cat")]
    folder = finished_by_hand(tmp_path / "run", written, named)
    assert accepted_classes(folder) == {"1.png": "cat", "4.png": "cat"}
    data = Path(shutil.copytree(flat, tmp_path / "images"))
    shutil.copy(data / "4-00.png", data / "4-same.png")
    folder = finished_by_hand(tmp_path / "copies", [], [("new-1", "")])
    table(folder / "to_label.csv", [("4-00.png", "four")])
    given = accepted(folder, split_images(open_images(str(data)), 0.1, 0), "data")
    assert given.labels == {"4-00.png": "four", "4-same.png": "four"}


def test_a_stray_of_a_class_that_is_found_elsewhere_leaves_its_cluster_to_be_found(
    tmp_path, parts
):
    """Whether labels or a name make that class known; a label of a new class finds a cluster."""
    strays = {"0-00.png": "zero", "1-00.png": "four", "2-00.png": "two"}
    written = [(path, f"new-{number}", "") for number, path in enumerate(strays, 1)]
    named = [("new-1", ""), ("new-2", ""), ("new-3", ""), ("new-4", "four")]
    folder = finished_by_hand(tmp_path / "run", [*written, ("4-00.png", "new-4", "")], named)
    Accepted({"0-01.png": "zero"}).write(RunFolder(folder))
    table(folder / "to_label.csv", strays.items())
    assert accepted(folder, parts, "data").num_left == 2


def test_of_a_new_class_of_few_labels_none_is_held_out(tmp_path, flat, labels, parts):
    stray = next(name for name in parts.test.names if int(name[0]) > 2)
    folder = finished_by_hand(tmp_path / "run", [(stray, "new-1", "")], [("new-1", "")])
    table(folder / "to_label.csv", [(stray, "heron")])
    config = DiscoverConfig(labeled=str(labels), accept=str(folder))
    found = open_discovery_data(str(flat), config)
    learned = {found.images.names[row] for row in found.parts.train_rows}
    assert stray in learned
    assert set(parts.test.names) - learned  # others are


def test_names_that_a_spreadsheet_would_take_for_formulas_are_read_as_they_were_written(tmp_path):
    """Those of images, and those of known classes that a table could not hold as they are."""
    paths = ["-1.png", "+1.png", "=1.png", "@1.png", "'1.png", "'-1.png"]
    known, _ = numbered(["-a", "b"])
    written = [(path, known[0], "core") for path in paths]
    folder = finished_by_hand(tmp_path / "run", written, [(known[0], "c")])
    assert [dict(row)["name"] for row in read_csv(folder / "clusters.csv")] == ["c"]
    assert accepted_classes(folder) == dict.fromkeys(paths, "c")


def test_a_class_without_a_sure_image_stays_unknown_and_that_is_said(edited, labeled_parts):
    """Only if another one has some; else there is nothing to go on with."""
    sure, _ = be_sure(edited)
    name(edited, {"new-2": "vague"})
    with pytest.raises(DataError, match="no image of a class with a name is flagged as core"):
        accepted(edited, labeled_parts, "labels.csv")
    name(edited, {sure: "clear"})
    given = accepted(edited, labeled_parts, "labels.csv")
    assert set(given.labels.values()) == {"clear"}
    assert ("left out", 1, ("vague",)) in [(n.decision, n.count, n.examples) for n in given.notes]


def test_what_cannot_be_accepted_is_refused(discovery, flat, encoder, tmp_path, refusal):
    settings = ["discover", flat, "-o", tmp_path / "run", "--encoder", encoder, *LEAST]
    for no_discovery in (tmp_path / "missing", encoder):
        refusal(2, *settings, "--accept", no_discovery)
    assert "names no class" in refusal(2, *settings, "--accept", discovery)
    assert not (tmp_path / "run" / "stages").exists()
    named = [("new-1", "cat"), ("new-1", "dog")]
    folder = finished_by_hand(tmp_path / "twice", [("1.png", "new-1", "core")], named)
    with pytest.raises(DataError, match="'new-1' is named 'cat' and, in another row, 'dog'"):
        accepted_classes(folder)


COPIES = "'4-00.png' ('four') and '4-same.png' ('five'), which are exact copies"
CONTRADICTIONS = [
    ({"digit 0": "zero"}, {}, [], 3, "the known class 'digit 0' is named 'zero'"),
    ({"new-1": "new-2"}, {}, [], 3, "'new-1' is named 'new-2', which is another class"),
    ({}, {"4-00.png": "new-1"}, [], 3, "'4-00.png' is labeled 'new-1', a class without a name"),
    ({}, {"0-00.png": "nought"}, [], 3, "is labeled 'digit 0' by"),
    ({}, {"9-00.png": "nine"}, [], 3, "labels none of these images"),
    ({}, {"4-00.png": "four", "4-same.png": "five"}, [], 3, COPIES),
    (
        {"new-1": "four"},
        {},
        ["--labeled", "few.csv"],
        3,
        "few.csv, such as 'digit 2'; give the earlier",
    ),
    ({"new-1": "four"}, {}, ["--mode", "ncd"], 2, "--mode ncd does not hold"),
    ({"new-1": "four"}, {}, ["--val", "0.3"], 2, "was made with --val 0.1"),
    ({"new-1": "four"}, {}, ["--overwrite"], 2, "would remove"),
]
"""Names of classes, labels of images, options; the exit code, and what is said."""


def test_names_and_labels_that_contradict_are_refused_and_nothing_is_lost(
    discovery, flat, tmp_path, monkeypatch, refusal
):
    monkeypatch.chdir(tmp_path)
    copied = Path(shutil.copytree(flat, "images"))
    shutil.copy(flat / "4-00.png", copied / "4-same.png")
    edited = Path(shutil.copytree(discovery, "accepted"))
    table(Path("few.csv"), [("0-00.png", "digit 0"), ("1-00.png", "digit 1")])
    for clusters, images, more, code, says in CONTRADICTIONS:
        for file_name in ("clusters.csv", "to_label.csv"):
            shutil.copy(discovery / file_name, edited)
        name(edited, clusters)
        with (edited / "to_label.csv").open("a", encoding="utf-8") as file:
            file.writelines(f"{path},{each},,,\n" for path, each in images.items())
        data = copied if "4-same.png" in images else flat
        before = {path: path.read_bytes() for path in edited.iterdir() if path.is_file()}
        typed = ["-o", "accepted" if "--overwrite" in more else "run", "--accept", "accepted"]
        assert says in refusal(code, "discover", data, *typed, *LEAST, *more)
        assert not Path("run", "stages").exists()
        left = {path: path.read_bytes() for path in edited.iterdir() if path.is_file()}
        assert left == before, says


def test_a_name_typed_in_two_letters_is_the_class_that_labels_write_in_one(edited, labeled_parts):
    """As macOS types accents."""
    sure, _ = be_sure(edited)
    name(edited, {sure: normalize("NFD", "café")})
    given = accepted(edited, labeled_parts, "labels.csv")
    assert set(given.labels.values()) == {"café"}


def test_after_novel_classes_alone_unlabeled_images_are_never_of_the_first_known_ones(
    flat, labels, encoder, tmp_path
):
    """However many rounds follow, and also of a class that was named since; nor in the scores."""
    first, second, third = (tmp_path / each for each in ("first", "second", "third"))
    least = [*LEAST_NCD, "--labeled", labels, "--encoder", encoder]
    assert run("discover", flat, "-o", first, *least, "--mode", "ncd") == 0
    excluded = [{"path": "", "class": f"digit {number}"} for number in range(3)]
    assert rows(first / "excluded.csv") == excluded
    truth = {path.name: f"digit {path.name[0]}" for path in flat.iterdir()}
    truth |= dict.fromkeys(label(first, "a new digit", 2), "a new digit")
    for before, after in ((first, second), (second, third)):
        typed = [*LEAST, "--accept", before, "--truth", table(tmp_path / "t.csv", truth.items())]
        assert run("discover", flat, "-o", after, *typed) == 0
        shutil.rmtree(before)
        assert rows(after / "excluded.csv") == excluded
        found = {row["path"]: row["cluster"] for row in rows(after / "assignments.csv")}
        assert not {"digit 0", "digit 1", "digit 2"} & {*found.values()}
        pairs = [(truth[path], found[path]) for path in found.keys() - held_out(after)]
        scores = strict_json(after / "summary.json")["scores"]["nearkin"]
        stated = {each["name"]: each["value"] for each in scores}
        assert stated["GCD accuracy, all, train"] == pytest.approx(hungarian(*zip(*pairs)))
        truth |= dict.fromkeys(label(after, "another digit", 1), "another digit")
