"""`nearkin discover` and `nearkin assign` as people use them: real files, real exit codes."""

import csv
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_digits

from nearkin.cli import main
from nearkin.config import OBJECTIVE_METHODS
from nearkin.data.labels import Annotations
from nearkin.data.opening import open_images
from nearkin.data.rng import permutation
from nearkin.data.split import split_images
from nearkin.discovery.assignments import CLUSTER_COLUMNS, COLUMNS, LABEL_COLUMNS
from nearkin.discovery.data import accepted_classes, accepted_labels
from nearkin.discovery.trials import OBJECTIVES, TRIED, Candidate
from nearkin.errors import DataError
from nearkin.run import settings as build
from nearkin.tables import read_csv

KNOWN, CLASSES, EACH = 5, 8, 16
LEFT = {
    "assignments.csv", "classes", "classifier.safetensors", "clusters.csv", "config.toml",
    "data.json", "encoder.safetensors", "images.csv", "report.html", "stages", "summary.json",
    "to_label.csv", "train.log",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def index(tmp_path_factory):
    """An index of images of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def digits(each, classes):
    """The first digits of each class, 8 by 8 pixels, mixed; and their classes."""
    dataset = load_digits()
    rows = [np.flatnonzero(dataset.target == number)[:each] for number in range(classes)]
    rows = np.random.default_rng(0).permutation(np.concatenate(rows))
    return np.rint(dataset.images[rows] * (255 / 16)).astype(np.uint8), dataset.target[rows]


def once(arguments):
    """What a command is told, of settings that are there twice the last."""
    log, place = {}, 0
    while place < len(arguments):
        word, *after = arguments[place : place + 2]
        paired = word.startswith("--") and after and not after[0].startswith("-")
        log[word if paired else place] = [word, *after] if paired else [word]
        place += 2 if paired else 1
    return [word for words in log.values() for word in words]


def run(*arguments):
    """The exit code of a command."""
    return main(once([str(argument) for argument in arguments]))


def words(text):
    return text.split()


def refused(capsys, *arguments):
    """The exit code of a command, and the one line that it prints on standard error."""
    capsys.readouterr()
    code = run(*arguments)
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert printed.out == ""
    return code, line.removeprefix("error: ")


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def strict_json(path):
    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def bytes_of(folder, *names):
    return [(folder / name).read_bytes() for name in names]


# Arrays with labels


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    """Digits 0 to 7 as an .npz; the numbers of its images are their names."""
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    pixels, labels = digits(EACH, CLASSES)
    np.savez(path, x=pixels, y=labels)
    return path


@pytest.fixture(scope="module")
def truth(arrays):
    """The class of each image by its name."""
    labels = np.load(arrays)["y"]
    return {f"{row:03d}": int(label) for row, label in enumerate(labels)}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, arrays):
    """A run whose encoder all discoveries stand on."""
    out = tmp_path_factory.mktemp("encoder") / "run"
    settings = words("--epochs 2 --batch-size 64 --backbone tiny --labels none -q")
    assert run("train", arrays, "-o", out, *settings) == 0
    return out


SHORT = words("-q --batch-size 16 --num-views 2 --known-epochs 10 --train-layers top")
FEW = [*SHORT, *words("--num-seeds 1 --no-baselines --epochs 2 --classes 2")]
LEAST = [*FEW, *words("--objective simgcd --entropy-weight 1")]
LEAST_NCD = [*FEW, *words("--objective ncl --pair-rate 1")]
MODES = {
    "gcd": words("--epochs 8 --num-seeds 2"),
    "ncd": words("--epochs 8 --num-seeds 1 --mode ncd --classes 3 --no-baselines"),
}


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def finished(mode, tmp_path_factory, arrays, encoder):
    """A finished discovery of each mode, scored; read, never written."""
    out = tmp_path_factory.mktemp("runs") / mode
    settings = ["--known", "0,1,2,3,4", "--from", encoder, "--truth", "data", *SHORT]
    assert run("discover", arrays, "-o", out, *settings, *MODES[mode]) == 0
    return out


def test_a_discovery_leaves_every_file_that_was_promised(finished, mode):
    assert {path.name for path in finished.iterdir()} >= LEFT
    assert (finished / "plots" / "class_count.png").exists() == (mode == "gcd")
    stages = {path.name for path in (finished / "stages").iterdir()}
    method = OBJECTIVE_METHODS[strict_json(finished / "summary.json")["objective"]]
    assert stages >= {"cached-features.safetensors", "known", "trials", f"{method}-0"}
    assert {"base-loss", "rank-statistics", f"{method}-1"} <= stages or mode == "ncd"


def test_all_images_without_a_label_are_assigned_once_and_no_others(finished, truth):
    assignments = rows(finished / "assignments.csv")
    paths = [row["path"] for row in assignments]
    assert paths == [name for name in truth if truth[name] >= KNOWN]
    assert list(assignments[0]) == list(COLUMNS)


def test_columns_hold_what_they_say(finished, mode):
    assignments = rows(finished / "assignments.csv")
    known = {str(number) for number in range(KNOWN)}
    novel = {
        f"new-{number + 1}" for number in range(strict_json(finished / "summary.json")["novel"])
    }
    assert {row["cluster"] for row in assignments} <= novel | (known if mode == "gcd" else set())
    for row in assignments:
        shares = [float(row[name]) for name in ("score", "margin", "entropy", "agreement")]
        assert all(0 <= share <= 1 for share in shares)
        assert 0 <= float(row["purity"]) <= 1
        assert float(row["margin"]) <= float(row["score"])
        assert float(row["agreement"]) in (0, 0.5, 1)  # two views
        assert row["nearest_known"] in known
        assert -1 <= float(row["similarity"]) <= 1
        assert row["flag"] in ("", "core", "border", "maybe-known", "tiny-cluster", "unlike")


def test_the_table_of_classes_counts_the_assignments_and_has_room_for_names(finished):
    table = rows(finished / "clusters.csv")
    assert list(table[0]) == list(CLUSTER_COLUMNS)
    sizes = Counter(row["cluster"] for row in rows(finished / "assignments.csv"))
    assert {row["cluster"]: int(row["size"]) for row in table if int(row["size"])} == dict(sizes)
    assert {row["name"] for row in table} == {""}
    by_path = {row["path"]: row["cluster"] for row in rows(finished / "assignments.csv")}
    for row in table:
        assert row["kind"] == ("novel" if row["cluster"].startswith("new-") else "known")
        assert not row["medoid"] or by_path[row["medoid"]] == row["cluster"]
    novel = [row for row in table if row["kind"] == "novel"]
    assert len(novel) == strict_json(finished / "summary.json")["novel"]


def test_every_class_with_images_has_a_sheet_that_can_be_opened(finished):
    full = {row["cluster"] for row in rows(finished / "clusters.csv") if int(row["size"])}
    assert {path.stem for path in (finished / "classes").iterdir()} == full
    for path in [*(finished / "classes").iterdir(), *(finished / "plots").iterdir()]:
        with Image.open(path) as sheet:
            sheet.load()
            assert min(sheet.size) > 8


class Read(HTMLParser):
    """All elements of a page, and whether each was closed."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.open, self.text = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br", "hr", "circle", "line", "path", "rect", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_one_file_that_loads_nothing(finished):
    page = (finished / "report.html").read_text(encoding="utf-8")
    read = Read(page)
    assert set(read.open) <= {"html", "body", "p", "li"}
    sources = [attrs["src"] for _, attrs in read.elements if "src" in attrs]
    assert len(sources) > 5
    assert all(source.startswith("data:image/") for source in sources)
    assert all(attrs.get("href", "#").startswith("#") for _, attrs in read.elements)
    assert not {tag for tag, _ in read.elements} & {"link", "iframe", "object"}
    assert not any("src" in attrs for tag, attrs in read.elements if tag == "script")
    rest = re.sub(r'"data:[^"]*"', "", page)
    assert not re.search(r"https?:|@import|url\(", rest)


def test_the_page_names_every_class_and_its_command_repeats_the_run(finished, arrays):
    text = " ".join(Read((finished / "report.html").read_text(encoding="utf-8")).text)
    for row in rows(finished / "clusters.csv"):
        assert row["cluster"] in text
    settings = tomllib.loads((finished / "config.toml").read_text())
    assert f"nearkin discover {arrays}" in text
    assert f"--from {settings['from_run']}" in text


def test_the_summary_is_whole_and_fits_the_tables(finished, mode, truth):
    summary = strict_json(finished / "summary.json")
    assert summary["command"] == "discover"
    assert summary["mode"] == mode
    assert summary["known"] == ["0", "1", "2", "3", "4"]
    assert summary["labeled"] == KNOWN * EACH
    assert summary["unlabeled"] == len(rows(finished / "assignments.csv"))
    assert summary["labeled"] + summary["unlabeled"] == len(truth)
    assert 0 < summary["held_out"] < len(truth) / 4
    sizes = {row["cluster"]: int(row["size"]) for row in rows(finished / "clusters.csv")}
    assert {each["name"]: each["size"] for each in summary["clusters"]} == sizes
    number = summary["number"]
    if mode == "ncd":
        assert (number, summary["novel"]) == (None, 3)
    else:
        assert summary["novel"] == number["chosen"]
        assert 1 <= number["low"] <= number["chosen"] <= number["high"]
        assert set(number["estimates"]) == {"linkage", "silhouette"}
    assert summary["trials"][chosen(summary)] == max(summary["trials"].values())
    assert {name.partition("-")[0] for name in summary["trials"]} == set(TRIED[mode])
    baselines = {"base loss", "rank statistics"} if mode == "gcd" else set()
    assert set(summary["scores"]) >= {"nearkin", "k-means"} | baselines
    for scores in summary["scores"].values():
        for each in scores:
            assert 0 <= each["low"] <= each["value"] <= each["high"] <= 1 or "ARI" in each["name"]
            assert "images" in each["protocol"]
    assert set(summary["agreement"]) == set(summary["scores"]) - {"nearkin"}


def test_the_summary_counts_the_flags_and_says_how_many_held_out_images_are_like_no_class(
    finished, encoder
):
    summary, table = strict_json(finished / "summary.json"), rows(finished / "assignments.csv")
    flags = Counter(row["flag"] for row in table if row["flag"])
    assert summary["flags"] == dict(flags)
    assert -1 < summary["min_similarity"] < 1
    stated, test = summary["unlike"], held_out(encoder)
    assert f"{summary['held_out']} held-out images" in stated["protocol"]
    counted = sum(row["path"] in test for row in table if row["flag"] == "unlike")
    assert counted <= round(stated["value"] * summary["held_out"])  # some have a label
    assert 0 <= stated["low"] <= stated["value"] <= stated["high"] < 1
    text = " ".join(Read((finished / "report.html").read_text(encoding="utf-8")).text)
    assert f"{flags['unlike']} of {len(table)} unlabeled images are flagged as unlike" in text


def chosen(summary):
    """The objective as trials are named."""
    objective = summary["objective"]
    return str(Candidate(objective, summary.get(OBJECTIVES[objective].setting)))


def held_out(encoder):
    """The images that the encoder's run held out."""
    from pyarrow import parquet

    table = parquet.read_table(encoder / "embeddings.parquet").to_pydict()
    return {
        path for path, part in zip(table["path"], table["split"], strict=True) if part == "test"
    }


def hungarian(true, predicted):
    """Share of images in the class that the best one-to-one match gives their cluster."""
    classes, y = np.unique(true, return_inverse=True)
    names, x = np.unique(predicted, return_inverse=True)
    count = np.zeros((len(classes), len(names)), int)
    np.add.at(count, (y, x), 1)
    return count[linear_sum_assignment(-count)].sum() / len(true)


@pytest.mark.parametrize("part", ["train", "held out"])
def test_scores_follow_from_the_table_and_the_truth(finished, mode, truth, encoder, part):
    """What is scored was held out by the encoder's run as well, and beats guessing."""
    name = {"gcd": "GCD accuracy, novel", "ncd": "task-aware accuracy"}[mode]
    scores = strict_json(finished / "summary.json")["scores"]["nearkin"]
    (stated,) = (each for each in scores if each["name"] == f"{name}, {part}")
    test = held_out(encoder)
    scored = [
        row
        for row in rows(finished / "assignments.csv")
        if (row["path"] in test) == (part == "held out")
    ]
    true, predicted = [truth[row["path"]] for row in scored], [row["cluster"] for row in scored]
    if mode == "gcd" and part == "held out":  # images of known classes are matched as well
        assert stated["value"] <= hungarian(true, predicted) + 1e-12
        return
    assert stated["value"] == pytest.approx(hungarian(true, predicted), abs=1e-12)
    assert f"{len(scored)} " in stated["protocol"]
    if part == "train":
        guessed = np.random.default_rng(0).integers(len(set(predicted)), size=(50, len(true)))
        chance = np.mean([hungarian(true, guess) for guess in guessed])
        assert stated["value"] > chance + 0.1


def test_held_out_images_of_known_classes_are_scored_by_their_own_name(finished, encoder, truth):
    scores = strict_json(finished / "summary.json")["scores"]["nearkin"]
    (known,) = (each for each in scores if each["name"] == "known classes, held out")
    held = [path for path in held_out(encoder) if truth[path] < KNOWN]
    assert known["protocol"].startswith(f"{len(held)} held-out labeled images")
    assert round(known["value"] * len(held), 6) % 1 == 0


# The same again


def test_the_configuration_repeats_a_discovery_to_the_bit_whatever_the_hidden_labels(
    finished, mode, arrays, tmp_path
):
    """Other labels for all that is hidden, and no baselines: the same assignments."""
    stored = np.load(arrays)
    labels = stored["y"].copy()
    hidden = np.flatnonzero(labels >= KNOWN)
    labels[hidden] = np.random.default_rng(3).permutation(labels[hidden])
    assert (labels != stored["y"]).sum() > 20
    other = tmp_path / "digits.npz"
    np.savez(other, x=stored["x"], y=labels)
    out = tmp_path / "run"
    settings = ["--config", finished / "config.toml", "-o", out, "--no-baselines", "-q"]
    assert run("discover", other, *settings) == 0
    names = ("assignments.csv", "classifier.safetensors")
    assert bytes_of(out, *names) == bytes_of(finished, *names)
    one, other = (strict_json(path / "summary.json") for path in (out, finished))
    assert chosen(one) == chosen(other)


def test_resuming_a_finished_discovery_changes_nothing(finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    before = {path: time for path, time in before.items() if path.suffix in (".csv", ".html")}
    settings = ["--config", finished / "config.toml", "-o", finished, "--resume"]
    assert run("discover", *settings) == 0
    assert "already complete" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_folder_with_a_discovery_is_refused_and_overwritten_if_asked(
    arrays, encoder, tmp_path, capsys
):
    out = tmp_path / "run"
    settings = ["discover", arrays, "-o", out, "--from", encoder, *LEAST]
    assert run(*settings, "--known", "0,1,2") == 0
    (out / "classes" / "mine.txt").write_text("mine")
    code, line = refused(capsys, *settings, "--known", "3,4,5")
    assert code == 4
    assert "--resume" in line
    assert "--overwrite" in line
    assert run(*settings, "--known", "3,4,5", "--overwrite") == 0
    assert strict_json(out / "summary.json")["known"] == ["3", "4", "5"]
    assert (out / "classes" / "mine.txt").read_text() == "mine"


def test_a_share_that_the_run_of_the_encoder_did_not_hold_out_is_refused(
    arrays, encoder, finished, tmp_path, capsys
):
    settings = ["discover", arrays, "-o", tmp_path / "run", "--from", encoder, *LEAST]
    code, line = refused(capsys, *settings, "--known", "0,1,2", "--val", "0.2")
    assert code == 2
    assert "was made with --val 0.1 of the same images" in line
    assert not (tmp_path / "run").exists()
    assert tomllib.loads((finished / "config.toml").read_text())["val"] == 0.1


def wait_for(condition, child):
    while not condition():
        assert child.poll() is None, "the run was over before it could be killed"
        time.sleep(0.01)


def test_a_discovery_that_is_killed_twice_ends_where_the_unbroken_one_ends(
    arrays, encoder, tmp_path
):
    """SIGKILL in the last stage's first training, SIGTERM in its second."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = ["--from", encoder, "--known", "0,1,2", "--mode", "ncd", *LEAST_NCD]
    settings += ["--epochs", 12, "--num-seeds", 2]
    command = ["discover", arrays, *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for stage, number, code in (
        ("ncl-0", signal.SIGKILL, -signal.SIGKILL),
        ("ncl-1", signal.SIGTERM, 143),
    ):
        typed = once([str(word) for word in [*command, "-o", broken, "--resume"]])
        metrics = broken / "stages" / stage / "metrics.csv"
        with subprocess.Popen([sys.executable, "-m", "nearkin", *typed], env=environment) as child:
            wait_for(lambda at=metrics: at.exists() and at.read_bytes().count(b"\n") > 2, child)
            child.send_signal(number)
        assert child.returncode == code
    assert not (broken / "assignments.csv").exists()
    assert run(*command, "-o", broken, "--resume") == 0
    assert run(*command, "-o", whole) == 0
    names = ["assignments.csv", "clusters.csv", "classifier.safetensors"]
    names += [f"stages/{stage}/metrics.csv" for stage in ("known", "ncl-0", "ncl-1")]
    assert bytes_of(broken, *names) == bytes_of(whole, *names)
    assert "resuming after step" in (broken / "train.log").read_text()


# Images in files


def save(folder, pixels):
    """Images as PNG files of these names."""
    for name, image in pixels.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def pixels():
    """Digits 0 to 4, by class."""
    images, labels = digits(16, 5)
    return {number: images[labels == number] for number in range(5)}


@pytest.fixture(scope="module")
def flat(tmp_path_factory, pixels):
    """All in one folder, without labels: digit 3's sixth image is called 3-05.png."""
    named = {f"{n}-{row:02d}.png": p for n, some in pixels.items() for row, p in enumerate(some)}
    return save(tmp_path_factory.mktemp("flat") / "images", named)


def table(path, written):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "label"), *written])
    return path


@pytest.fixture(scope="module")
def labels(tmp_path_factory, flat):
    """A table that labels half of the images of digits 0, 1 and 2."""
    written = [(f"{n}-{row:02d}.png", f"digit {n}") for n in range(3) for row in range(8)]
    return table(tmp_path_factory.mktemp("labels") / "labels.csv", written)


@pytest.fixture(scope="module")
def discovery(tmp_path_factory, flat, labels, encoder):
    """A discovery of images in a folder, with a table of labels; read, never written."""
    out = tmp_path_factory.mktemp("runs") / "run"
    copies = out.parent / "copies"
    settings = ["--labeled", labels, "--from", encoder, *LEAST, "--epochs", 20]
    assert run("discover", flat, "-o", out, *settings, "--copy-to", copies) == 0
    return out


def names(run_folder):
    return {row["path"] for row in rows(run_folder / "assignments.csv")}


def test_images_may_be_labeled_by_a_table(discovery, flat):
    everything = {path.name for path in flat.iterdir()}
    labeled = {f"{n}-{row:02d}.png" for n in range(3) for row in range(8)}
    assert names(discovery) == everything - labeled
    summary = strict_json(discovery / "summary.json")
    assert summary["known"] == ["digit 0", "digit 1", "digit 2"]
    assert summary["labeled"] == 24
    assert set(summary["scores"]["nearkin"][0]) == {"name", "value", "low", "high", "protocol"}


def test_images_may_be_labeled_by_class_folders_inside_the_data(pixels, encoder, tmp_path):
    data = tmp_path / "data"
    for number in range(3):
        save(
            data / "named" / f"digit {number}",
            {f"{r}.png": p for r, p in enumerate(pixels[number][:8])},
        )
    rest = {f"{n}-{r}.png": p for n in range(5) for r, p in enumerate(pixels[n][8:])}
    save(data / "rest", rest)
    out = tmp_path / "run"
    settings = ["--labeled", data / "named", "--from", encoder, *LEAST]
    assert run("discover", data, "-o", out, *settings) == 0
    assert names(out) == {f"rest/{name}" for name in rest}
    assert strict_json(out / "summary.json")["known"] == ["digit 0", "digit 1", "digit 2"]


def test_images_may_be_labeled_by_class_folders_outside_and_copies_are_recognized(
    pixels, flat, encoder, tmp_path
):
    """Of each class, four files are copies of the data and two are not."""
    elsewhere = tmp_path / "elsewhere"
    for number in range(3):
        folder = elsewhere / f"digit {number}"
        new = np.random.default_rng(number).integers(0, 9, (2, 8, 8), dtype=np.uint8)
        save(
            folder,
            {f"new{r}.png": p // 2 + n for r, (p, n) in enumerate(zip(pixels[number], new))},
        )
        for row in range(4):
            shutil.copy(flat / f"{number}-{row:02d}.png", folder / f"copy{row}.png")
    out = tmp_path / "run"
    settings = ["--labeled", elsewhere, "--from", encoder, *LEAST]
    assert run("discover", flat, "-o", out, *settings) == 0
    copied = {f"{number}-{row:02d}.png" for number in range(3) for row in range(4)}
    assert names(out) == {path.name for path in flat.iterdir()} - copied
    assert strict_json(out / "summary.json")["labeled"] == 3 * (4 + 2)


def test_copies_are_sorted_into_the_classes(discovery, flat):
    copies = discovery.parent / "copies"
    sizes = Counter(row["cluster"] for row in rows(discovery / "assignments.csv"))
    written = {folder.name: len(list(folder.iterdir())) for folder in copies.iterdir()}
    assert written == {name.replace(" ", "_"): size for name, size in sizes.items()}
    for row in rows(discovery / "assignments.csv"):
        copy = copies / row["cluster"].replace(" ", "_") / row["path"]
        assert copy.read_bytes() == (flat / row["path"]).read_bytes()


def test_a_discovery_with_copies_can_be_asked_for_again(discovery, flat, labels, encoder, capsys):
    """The copies of the first time do not stand in the way of the same command."""
    settings = ["--labeled", labels, "--from", encoder, *LEAST, "--epochs", 20]
    settings += ["--copy-to", discovery.parent / "copies", "--resume"]
    assert run("discover", flat, "-o", discovery, *settings) == 0
    assert "error" not in capsys.readouterr().err


def test_a_run_that_ended_while_it_copied_goes_on_with_another_folder(
    discovery, flat, labels, encoder, tmp_path, capsys
):
    out = Path(shutil.copytree(discovery, tmp_path / "run"))
    (out / "summary.json").unlink()
    settings = ["--labeled", labels, "--from", encoder, *LEAST, "--epochs", 20, "--resume"]
    copies = discovery.parent / "copies"
    code, line = refused(capsys, "discover", flat, "-o", out, *settings, "--copy-to", copies)
    assert code == 4
    assert "give a new folder" in line
    other = tmp_path / "copies"
    assert run("discover", flat, "-o", out, *settings, "--copy-to", other) == 0
    assert {path.name for path in other.rglob("*.png")} == names(out)


def test_images_that_cannot_be_read_are_listed_and_not_assigned(flat, labels, encoder, tmp_path):
    data = shutil.copytree(flat, tmp_path / "images")
    whole = (data / "4-00.png").read_bytes()
    (data / "cut.png").write_bytes(whole[: len(whole) * 2 // 3])
    (data / "text.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    out = tmp_path / "run"
    settings = ["--labeled", labels, "--from", encoder, *LEAST]
    assert run("discover", data, "-o", out, *settings) == 0
    assert {row["path"] for row in rows(out / "bad_files.csv")} == {"cut.png", "text.png"}
    everything = {path.name for path in data.iterdir()} - {"cut.png", "text.png"}
    labeled = {row["path"] for row in rows(labels)}
    assert names(out) == everything - labeled


def test_the_first_stage_learns_without_labels_if_no_encoder_is_given(
    pixels, tmp_path, monkeypatch
):
    """Nor does it see what is held out."""
    monkeypatch.setattr(build, "MOST_EPOCHS", 2)
    some = {f"{n}-{row}.png": p for n in range(4) for row, p in enumerate(pixels[n][:6])}
    data = save(tmp_path / "images", some)
    written = [(f"{n}-{row}.png", n) for n in (0, 1) for row in range(4)]
    labeled = table(tmp_path / "labels.csv", written)
    out = tmp_path / "run"
    settings = ["--labeled", labeled, "--val", 0.2, *LEAST]
    assert run("discover", data, "-o", out, *settings) == 0
    settings = tomllib.loads((out / "stages" / "features" / "config.toml").read_text())
    assert (settings["method"], settings["labels"], settings["known"]) == ("simclr", "none", "")
    held = strict_json(out / "summary.json")["held_out"]
    assert 0 < held == len(held_out(out / "stages" / "features"))
    own, final = (path / "encoder.safetensors" for path in (out / "stages" / "features", out))
    assert own.stat().st_size == pytest.approx(final.stat().st_size, rel=0.01)


# New images


def close(one, other):
    """Whether rows say the same of each image, but for rounding."""
    assert [row["path"] for row in one] == [row["path"] for row in other]
    assert [row["cluster"] for row in one] == [row["cluster"] for row in other]
    for name in ("score", "margin", "entropy"):
        a, b = (np.array([float(row[name]) for row in some]) for some in (one, other))
        np.testing.assert_allclose(a, b, atol=2e-4)


def unlike(table):
    return [row["path"] for row in table if row["flag"] == "unlike"]


def test_images_of_a_discovery_are_assigned_as_they_were(discovery, flat, tmp_path, capsys):
    table = tmp_path / "again.csv"
    assert run("assign", discovery, flat, "-o", table) == 0
    everything = rows(table)
    assert [row["path"] for row in everything] == sorted(path.name for path in flat.iterdir())
    known = rows(discovery / "assignments.csv")
    mine = [row for row in everything if row["path"] in names(discovery)]
    for name in ("path", "cluster", "score", "margin", "entropy", "agreement"):
        assert [row[name] for row in mine] == [row[name] for row in known]
    assert unlike(mine) == unlike(known)
    estimate = {line.rsplit(maxsplit=1)[0].strip(): int(line.rsplit(maxsplit=1)[1])
               for line in capsys.readouterr().out.splitlines()}  # fmt: skip
    assert estimate == Counter(row["cluster"] for row in everything)


def test_images_elsewhere_are_assigned_alike_and_those_that_cannot_be_read_are_listed(
    discovery, flat, tmp_path, capsys
):
    data = tmp_path / "others"
    for path in sorted(flat.iterdir())[::3]:
        (data / "deep").mkdir(parents=True, exist_ok=True)
        shutil.copy(path, data / "deep" / path.name)
    whole = (flat / "4-00.png").read_bytes()
    (data / "cut.png").write_bytes(whole[: len(whole) * 2 // 3])
    (data / "text.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    assert run("assign", discovery, data, "-o", tmp_path / "new.csv") == 0
    out = capsys.readouterr().out
    assert "cut.png" in out
    assert "text.png" in out
    new = rows(tmp_path / "new.csv")
    assert all(row["path"].startswith("deep/") for row in new)
    for row in new:
        row["path"] = row["path"].removeprefix("deep/")
    expected = {row["path"]: row for row in rows(discovery / "assignments.csv")}
    mine = [row for row in new if row["path"] in expected]
    assert len(mine) > 10
    close(mine, [expected[row["path"]] for row in mine])


def strangers(folder):
    """Images that are no digits: noise, in which no two neighbors are alike."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    save(folder, {f"noise-{row:02d}.png": image for row, image in enumerate(noise)})
    return folder


def test_images_like_no_class_are_flagged(discovery, tmp_path):
    data, table = strangers(tmp_path / "noise"), tmp_path / "new.csv"
    assert run("assign", discovery, data, "-o", table) == 0
    assert len(unlike(rows(table))) > 30
    own = rows(discovery / "assignments.csv")
    assert len(unlike(own)) < len(own) / 10


def test_a_classifier_without_a_reference_flags_nothing(discovery, flat, tmp_path):
    """As earlier discoveries have written it."""
    out = tmp_path / "run"
    shutil.copytree(discovery, out)
    path = out / "classifier.safetensors"
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["nearkin"])
    tensors = load_file(path)
    assert tensors.pop("reference.means").shape[0] == len(header["classes"])
    assert header.pop("min_similarity") < 1
    save_file(tensors, path, {"nearkin": json.dumps(header)})
    table, expected = tmp_path / "old.csv", tmp_path / "new.csv"
    assert run("assign", out, strangers(tmp_path / "noise"), "-o", table) == 0
    assert unlike(rows(table)) == []
    for each, file in ((out, table), (discovery, expected)):
        assert run("assign", each, flat, "-o", file) == 0
    kept = [[{**row, "flag": ""} for row in rows(file)] for file in (table, expected)]
    assert kept[0] == kept[1]


def test_a_single_image_can_be_assigned(discovery, flat, tmp_path, capsys):
    (tmp_path / "one").mkdir()
    shutil.copy(flat / "3-00.png", tmp_path / "one")
    assert run("assign", discovery, tmp_path / "one", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    expected = {each["path"]: each for each in rows(discovery / "assignments.csv")}["3-00.png"]
    assert (row["path"], row["cluster"]) == ("3-00.png", expected["cluster"])
    assert row["purity"] is None  # there is no other image


def test_new_images_are_copied_into_their_classes(discovery, flat, tmp_path):
    copies = tmp_path / "sorted"
    assert run("assign", discovery, flat, "-o", tmp_path / "new.csv", "--copy-to", copies) == 0
    for row in rows(tmp_path / "new.csv"):
        copy = copies / row["cluster"].replace(" ", "_") / row["path"]
        assert copy.read_bytes() == (flat / row["path"]).read_bytes()


def test_new_images_none_of_which_can_be_read_are_refused(discovery, flat, tmp_path, capsys):
    (tmp_path / "bad").mkdir()
    whole = (flat / "4-00.png").read_bytes()
    (tmp_path / "bad" / "cut.png").write_bytes(whole[: len(whole) * 2 // 3])
    code, line = refused(capsys, "assign", discovery, tmp_path / "bad")
    assert code == 3
    assert "cannot be read" in line


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "zeros"])
def test_a_damaged_classifier_is_one_line_and_exit_code_5(
    damage, discovery, flat, tmp_path, capsys
):
    for name in ("config.toml", "encoder.safetensors", "classifier.safetensors"):
        shutil.copy(discovery / name, tmp_path)
    path = tmp_path / "classifier.safetensors"
    whole = path.read_bytes()
    broken = {"cut": whole[: len(whole) // 2], "empty": b"", "text": b"no classifier",
              "zeros": bytes(len(whole))}[damage]  # fmt: skip
    path.write_bytes(broken)
    code, line = refused(capsys, "assign", tmp_path, flat)
    assert code == 5
    assert "classifier.safetensors cannot be used" in line


def test_without_a_finished_discovery_nothing_is_assigned(encoder, flat, tmp_path, capsys):
    for no_discovery in (encoder, tmp_path, tmp_path / "missing"):
        code, line = refused(capsys, "assign", no_discovery, flat)
        assert code == 2
        assert "nearkin discover" in line


def test_assigning_does_not_replace_the_data(discovery, flat, tmp_path, capsys):
    data = shutil.copytree(flat, tmp_path / "images")
    listed = tmp_path / "images.csv"
    listed.write_text("path\n" + "\n".join(f"images/{p.name}" for p in data.iterdir()) + "\n")
    before = listed.read_bytes()
    code, _ = refused(capsys, "assign", discovery, listed, "-o", listed)
    assert code == 2
    assert listed.read_bytes() == before
    code, line = refused(capsys, "assign", discovery, data, "--copy-to", data / "sorted")
    assert code == 2
    assert "lies inside" in line
    assert not (data / "sorted").exists()


# A second round


def name(run_folder, **chosen):
    """Write names into the column name of clusters.csv, as a user would."""
    clusters = rows(run_folder / "clusters.csv")
    for row in clusters:
        row["name"] = chosen.get(row["cluster"].replace("-", "_"), row["name"])
    with (run_folder / "clusters.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, CLUSTER_COLUMNS)
        writer.writeheader()
        writer.writerows(clusters)


def core_of(run_folder, cluster):
    return {
        row["path"]
        for row in rows(run_folder / "assignments.csv")
        if row["cluster"] == cluster and row["flag"] == "core"
    }


def be_sure(run_folder):
    """Flag the images of the largest novel class as core, as a longer training would."""
    assignments = rows(run_folder / "assignments.csv")
    novel = Counter(row["cluster"] for row in assignments if row["cluster"].startswith("new-"))
    (cluster, _), *_ = novel.most_common(1)
    for row in assignments:
        row["flag"] = "core" if row["cluster"] == cluster else ""
    with (run_folder / "assignments.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(assignments)
    return cluster, core_of(run_folder, cluster)


def test_named_classes_become_known_ones_round_by_round(discovery, flat, encoder, tmp_path):
    first = shutil.copytree(discovery, tmp_path / "first")
    cluster, core = be_sure(first)
    name(first, **{cluster.replace("-", "_"): "a digit of my own"})
    single, other = label(first, "another digit", 2)
    core -= {single, other}
    again = ["discover", flat, *LEAST, "--epochs", 20]
    second, third = tmp_path / "second", tmp_path / "third"
    assert run(*again, "-o", second, "--accept", first) == 0
    known = ["digit 0", "digit 1", "digit 2", "a digit of my own", "another digit"]
    learned = core - held_out_by(first)  # a guess about an image is no true label of it
    labels = dict.fromkeys(learned, known[3]) | dict.fromkeys((single, other), known[4])
    assert sorted(strict_json(second / "summary.json")["known"]) == sorted(known)
    assert names(second) == names(first) - labels.keys()
    assert {row["path"]: row["label"] for row in rows(second / "accepted.csv")} == labels
    # The encoder, what it sees and what is held out are those of the first round.
    assert tomllib.loads((second / "config.toml").read_text())["from_run"] == str(first)
    same = ["encoder.safetensors", "stages/cached-features.safetensors"]
    assert bytes_of(second, *same) == bytes_of(first, *same)
    assert "features: from" in (second / "train.log").read_text()
    assert held_out_by(second) == held_out_by(first)
    # What was named in the first round is known in the third, without the folder of the first.
    shutil.rmtree(first)
    last, *_ = label(second, "a last digit", 1)
    assert run(*again, "-o", third, "--accept", second, "--classes", 0) == 0
    assert sorted(strict_json(third / "summary.json")["known"]) == sorted([*known, "a last digit"])
    assert names(third) == names(second) - {last}
    assert strict_json(third / "summary.json")["novel"] == 0
    assert {row["kind"] for row in rows(third / "clusters.csv")} == {"known"}
    assert "No novel class" in (third / "report.html").read_text(encoding="utf-8")
    assert run("assign", third, flat, "-o", tmp_path / "new.csv") == 0


def label(run_folder, name, number):
    """Label the first images of to_label.csv, as a user would; their paths."""
    asked = rows(run_folder / "to_label.csv")
    for row in asked[:number]:
        row["label"] = name
    with (run_folder / "to_label.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, LABEL_COLUMNS)
        writer.writeheader()
        writer.writerows(asked)
    return [row["path"] for row in asked[:number]]


def held_out_by(run_folder):
    """The images that a run held out."""
    from pyarrow import parquet

    table = parquet.read_table(run_folder / "embeddings.parquet").to_pydict()
    sides = zip(table["path"], table["split"], strict=True)
    return {path for path, side in sides if side == "test"}


def finished_by_hand(folder, written, named):
    """The two tables of a discovery, written as a discovery writes them."""
    from nearkin.tables import write_csv

    folder.mkdir()
    blank = [""] * (len(COLUMNS) - 3)
    write_csv(
        folder / "assignments.csv",
        COLUMNS,
        [(path, cluster, *blank, flag) for path, cluster, flag in written],
    )
    blank = [""] * (len(CLUSTER_COLUMNS) - 2)
    write_csv(folder / "clusters.csv", CLUSTER_COLUMNS, [(c, n, *blank) for c, n in named])
    (folder / "config.toml").write_text('data = "d"\nknown = "a,b"\n')
    return folder


def test_only_sure_images_of_named_classes_are_accepted(tmp_path):
    written = [("1.png", "new-1", "core"), ("2.png", "new-1", "border"), ("3.png", "new-2", "core"),
               ("4.png", "new-3", "core"), ("5.png", "new-3", "")]  # fmt: skip
    folder = finished_by_hand(
        tmp_path / "run", written, [("new-1", " cat "), ("new-2", ""), ("new-3", "cat")]
    )
    assert accepted_classes(folder) == {"1.png": "cat", "4.png": "cat"}


@pytest.mark.parametrize("path", ["-1.png", "+1.png", "=1.png", "@1.png", "'1.png", "'-1.png"])
def test_images_with_names_that_a_spreadsheet_would_take_for_formulas_are_accepted(path, tmp_path):
    folder = finished_by_hand(tmp_path / "run", [(path, "new-1", "core")], [("new-1", "cat")])
    assert accepted_classes(folder) == {path: "cat"}


def test_what_cannot_be_accepted_is_refused(discovery, flat, encoder, tmp_path, capsys):
    settings = ["discover", flat, "-o", tmp_path / "run", "--from", encoder, *LEAST]
    for no_discovery in (tmp_path / "missing", encoder):
        code, _ = refused(capsys, *settings, "--accept", no_discovery)
        assert code == 2
    code, line = refused(capsys, *settings, "--accept", discovery)
    assert code == 2
    assert "names no class" in line
    assert not (tmp_path / "run" / "stages").exists()


@pytest.mark.parametrize(
    ("clusters", "images", "more", "code", "says"),
    [
        ({"digit 0": "zero"}, {}, [], 3, "the known class 'digit 0' is named 'zero'"),
        ({"new-1": "new-2"}, {}, [], 3, "'new-1' is named 'new-2', which is another class"),
        (
            {},
            {"4-00.png": "new-1"},
            [],
            3,
            "'4-00.png' is labeled 'new-1', a class without a name",
        ),
        ({}, {"0-00.png": "nought"}, [], 3, "is labeled 'digit 0' by"),
        ({}, {"9-00.png": "nine"}, [], 3, "labels none of these images"),
        (
            {},
            {"4-00.png": "four", "4-same.png": "five"},
            [],
            3,
            "'4-00.png' ('four') and '4-same.png' ('five'), which are exact copies",
        ),
        ({"new-1": "four"}, {}, ["--mode", "ncd"], 2, "--mode ncd does not hold"),
        ({"new-1": "four"}, {}, ["--val", "0.3"], 2, "was made with --val 0.1"),
        ({"new-1": "four"}, {}, ["--overwrite"], 2, "would remove"),
    ],
)
def test_names_and_labels_that_contradict_are_refused_and_nothing_is_lost(
    clusters, images, more, code, says, discovery, flat, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    accepted = Path(shutil.copytree(discovery, tmp_path / "accepted"))
    name(accepted, **{cluster.replace("-", "_"): each for cluster, each in clusters.items()})
    with (accepted / "to_label.csv").open("a", encoding="utf-8") as file:
        file.writelines(f"{path},{each},,,\n" for path, each in images.items())
    if "4-same.png" in images:
        flat = Path(shutil.copytree(flat, tmp_path / "images"))
        shutil.copy(flat / "4-00.png", flat / "4-same.png")
    before = {path: path.read_bytes() for path in accepted.iterdir() if path.is_file()}
    out = "accepted" if "--overwrite" in more else "run"
    exit_code, line = refused(
        capsys, "discover", flat, "-o", out, "--accept", "accepted", *LEAST, *more
    )
    assert says in line
    assert exit_code == code
    assert not Path("run", "stages").exists()
    assert {path: path.read_bytes() for path in accepted.iterdir() if path.is_file()} == before


def test_a_class_that_is_named_twice_is_refused(tmp_path):
    folder = finished_by_hand(
        tmp_path / "run", [("1.png", "new-1", "core")], [("new-1", "cat"), ("new-1", "dog")]
    )
    with pytest.raises(DataError, match="'new-1' is named 'cat' and, in another row, 'dog'"):
        accepted_classes(folder)


def test_exact_copies_share_the_label_of_a_single_image(flat, tmp_path):
    data = Path(shutil.copytree(flat, tmp_path / "images"))
    shutil.copy(data / "4-00.png", data / "4-same.png")
    folder = finished_by_hand(tmp_path / "run", [], [("new-1", "")])
    table(folder / "to_label.csv", [("4-00.png", "four")])
    labels, _ = accepted_labels(folder, split_images(open_images(str(data)), 0.1, 0), "data")
    assert labels == {"4-00.png": "four", "4-same.png": "four"}


def test_a_class_without_a_sure_image_stays_unknown_and_that_is_said(discovery, parts, tmp_path):
    """Only if another one has some; else there is nothing to go on with."""
    accepted = Path(shutil.copytree(discovery, tmp_path / "accepted"))
    be_sure(accepted)
    (sure,) = {row["cluster"] for row in rows(accepted / "assignments.csv") if row["flag"]}
    unsure = "new-1" if sure == "new-2" else "new-2"
    name(accepted, **{unsure.replace("-", "_"): "vague"})
    with pytest.raises(DataError, match="no image of a class with a name is flagged as core"):
        accepted_labels(accepted, parts, "labels.csv")
    name(accepted, **{sure.replace("-", "_"): "clear"})
    labels, notes = accepted_labels(accepted, parts, "labels.csv")
    assert set(labels.values()) == {"clear"}
    assert any("1 named classes is flagged as core, such as 'vague'" in each for each in notes)


# What cannot be carried out


@pytest.fixture(scope="module")
def parts(flat):
    """The images in a folder, and those that are held out of them."""
    return split_images(open_images(str(flat)), 0.1, 0)


@pytest.mark.parametrize("mode", ["gcd", "ncd"])
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("one class", "usable images are labeled as 'digit 0'; give at least two known classes"),
        ("all", "labels all 80 images, so nothing is left to discover"),
        ("all to learn from", "images to learn from have a label, so nothing is left to discover"),
        ("all but three", "3 unlabeled images to learn from, and counting classes takes 4"),
        ("one class held out", "all labeled images of 1 known class are held out ('digit 4')"),
    ],
)
def test_too_few_labels_or_images_are_refused_before_anything_is_trained(
    case, says, mode, flat, parts, tmp_path, capsys
):
    test = {parts.images.names[row] for row in parts.test_rows}
    learned = [name for name in parts.images.names if name not in test]
    assert {name[0] for name in test} > {"4"}
    labeled = {
        "one class": [name for name in learned if name[0] == "0"],
        "all": parts.images.names,
        "all to learn from": learned,
        "all but three": learned[3:],
        "one class held out": [n for n in learned if n[0] in "01"]
        + [name for name in test if name[0] == "4"],
    }[case]
    labels = table(tmp_path / "labels.csv", [(name, f"digit {name[0]}") for name in labeled])
    settings = ["--labeled", labels, "--mode", mode, "-q"]
    code, line = refused(capsys, "discover", flat, "-o", tmp_path / "run", *settings)
    assert says in line
    assert code == 3
    assert not (tmp_path / "run" / "stages").exists()


def test_one_labeled_image_of_each_class_is_enough(flat, parts, encoder, tmp_path):
    """Even if trials would hide all of them: nothing is tried then, and the log says so."""
    hidden = np.flatnonzero(permutation(0, 1, len(parts.images)) % 2 == 0)
    usable = [parts.images.names[row] for row in np.intersect1d(hidden, parts.train_rows)]
    first = {name[0]: name for name in reversed(usable)}
    written = [(first[digit], f"digit {digit}") for digit in "0123"]
    labels = table(tmp_path / "labels.csv", written)
    out = tmp_path / "run"
    settings = ["--labeled", labels, "--from", encoder, *FEW, "--classes", 1]
    assert run("discover", flat, "-o", out, *settings) == 0
    log = (out / "train.log").read_text(encoding="utf-8")
    assert "4 of 4 known classes have one image only" in log
    assert "too few labels of known classes to hide some" in log
    assert strict_json(out / "summary.json")["calibration"] is None


@pytest.fixture(scope="module")
def folders(tmp_path_factory, pixels):
    """Class folders of which some images of every class lie below."""
    root = tmp_path_factory.mktemp("folders") / "images"
    for number, label in enumerate(("cat", "dog", "eel", "fox")):
        save(root / label, {f"{row}.png": p for row, p in enumerate(pixels[number][:8])})
    return root


KNOWING = ["--known", "cat,dog"]
NCL = ["--mode", "ncd", "--objective", "ncl"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "either --labeled PATH, or --known A,B"),
        (["--known", "cat,dog", "--labeled", "x"], 2, "either --labeled PATH, or --known A,B"),
        (["--known", "cat"], 2, "at least two classes"),
        (["--known", "cat,cat"], 2, "each once"),
        (["--known", "cat,dgo"], 2, "Did you mean dog?"),
        (["--known", "cat,dog,eel,fox"], 2, "none is left to discover"),
        (["--labeled", "missing"], 3, "missing"),
        (["--labeled", "missing.csv"], 3, "missing.csv"),
        ([*KNOWING, "--classes", "-1"], 2, "--classes -1"),
        ([*KNOWING, "--classes", "0", "--mode", "ncd"], 2, "--classes 0 says there are none"),
        ([*KNOWING, "--classes", "0", "--objective", "uno"], 2, "--objective uno searches novel"),
        ([*KNOWING, "--classes", "many"], 2, "--classes"),
        ([*KNOWING, "--classes", "17"], 3, "17 novel classes among"),
        ([*KNOWING, "--from", "missing"], 2, "missing"),
        ([*KNOWING, "--method", "simclrr"], 2, "Did you mean simclr?"),
        ([*KNOWING, "--method", "ncl"], 2, "--method ncl learns from labels"),
        ([*KNOWING, "--mode", "both"], 2, "ncd"),
        ([*KNOWING, "--clases", "3"], 2, "Did you mean classes?"),
        ([*KNOWING, "--num-seed", "3"], 2, "Did you mean num_seeds?"),
        ([*KNOWING, "--objective", "simgcd", "--dim", "lots"], 2, "--dim lots"),
        ([*KNOWING, "--dim", "3"], 2, "--dim has an effect with --objective uno or --objective simgcd"),
        ([*KNOWING, *NCL, "--dim", "3"], 2, "unknown option --dim for ncl"),
        ([*KNOWING, "--objective", "ncl"], 2, "--objective ncl is not for --mode gcd"),
        ([*KNOWING, "--objective", "umo"], 2, 'Did you mean "uno"'),
        ([*KNOWING, "--num-views", "1"], 2, "--num-views 1"),
        ([*KNOWING, "--pair-rate", "-1"], 2, "--pair-rate -1"),
        ([*KNOWING, "--pair-rate", "1"], 2, "--pair-rate is a setting of joint_ncl and ncl; --mode gcd tries simgcd and uno"),
        ([*KNOWING, "--num-novel-classes", "2"], 2, "give --classes here"),
        ([*KNOWING, "--mode", "ncd", "--entropy-weight", "1"], 2, "--entropy-weight is a setting of simgcd"),
        ([*KNOWING, "--epochs", "0"], 2, "--epochs 0"),
        ([*KNOWING, "--lr-milestones", "late"], 2, "--lr-milestones late"),
        ([*KNOWING, "--batch-size", "1000"], 2, "--batch-size 1000"),
        ([*KNOWING, "--augment", "smcl"], 2, "smcl"),
        ([*KNOWING, "--device", "abacus"], 2, "device abacus"),
        ([*KNOWING, "--truth", "missing.csv"], 3, "missing.csv"),
        ([*KNOWING, "--accept", "missing"], 2, "missing"),
    ],
)  # fmt: skip
def test_what_cannot_be_carried_out_is_refused_before_anything_is_trained(
    arguments, code, says, folders, tmp_path, monkeypatch, capsys
):
    """Without an encoder at hand: the first stage would take its time."""
    monkeypatch.chdir(tmp_path)
    exit_code, line = refused(capsys, "discover", folders, "-o", "run", "-q", *arguments)
    assert says in line
    assert exit_code == code
    assert not Path("run", "stages").exists()


def test_labels_of_files_that_do_not_exist_are_refused(flat, tmp_path, capsys):
    written = [("0-00.png", "a"), ("1-00.png", "b"), ("9-00.png", "b")]
    labeled = table(tmp_path / "labels.csv", written)
    code, line = refused(
        capsys, "discover", flat, "-o", tmp_path / "run", "-q", "--labeled", labeled
    )
    assert code == 3
    assert "'9-00.png'" in line
    assert not (tmp_path / "run" / "stages").exists()


def test_known_classes_among_the_unlabeled_images_are_refused_where_all_are_to_be_novel(
    flat, labels, tmp_path, capsys
):
    truth = table(tmp_path / "truth.csv", [(p.name, f"digit {p.name[0]}") for p in flat.iterdir()])
    settings = ["--labeled", labels, "--truth", truth, "--mode", "ncd", "-q"]
    code, line = refused(capsys, "discover", flat, "-o", tmp_path / "run", *settings)
    assert code == 3
    assert "24 unlabeled images are of known classes" in line
    assert "--mode gcd" in line
    assert not (tmp_path / "run" / "stages").exists()


@pytest.mark.parametrize("inside", ["", "sorted", "cat/sorted"])
def test_copies_into_the_data_are_refused_before_anything_is_trained(
    inside, folders, tmp_path, capsys
):
    before = sorted(folders.rglob("*"))
    settings = ["-o", tmp_path / "run", "-q", *KNOWING, "--copy-to", folders / inside]
    code, line = refused(capsys, "discover", folders, *settings)
    assert code == 2
    assert "lies inside" in line
    assert not (tmp_path / "run" / "stages").exists()
    assert sorted(folders.rglob("*")) == before


def test_a_folder_for_copies_that_holds_something_is_refused_before_anything_is_trained(
    folders, tmp_path, capsys
):
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "mine.txt").write_text("mine")
    settings = ["-o", tmp_path / "run", "-q", *KNOWING, "--copy-to", tmp_path / "copies"]
    code, _ = refused(capsys, "discover", folders, *settings)
    assert code == 4
    assert not (tmp_path / "run" / "stages").exists()


WRONG = [
    ["--train-layers", "layer4"],
    ["--classes", "100"],
    ["--batch-size", "1000"],
    ["--augment", "smcl"],
    ["--from", "missing"],
    ["--truth", "missing.csv"],
    ["--dim", "lots"],
]


def test_refused_settings_do_not_stand_in_the_way_of_the_right_ones(
    folders, encoder, tmp_path, capsys
):
    settings = ["discover", folders, "-o", tmp_path / "run", *KNOWING, "--from", encoder, *LEAST]
    for wrong in WRONG:
        assert refused(capsys, *settings, *wrong)[0] in (2, 3), wrong
    assert run(*settings) == 0


def test_a_run_is_not_resumed_with_other_labels(
    discovery, flat, labels, encoder, tmp_path, capsys
):
    """Its number of classes, its trials and its stages have been computed from the first ones."""
    out, changed = Path(shutil.copytree(discovery, tmp_path / "run")), tmp_path / "labels.csv"
    (out / "summary.json").unlink()
    shutil.rmtree(out / "stages" / "simgcd-0")
    swapped = {"digit 0": "digit 1", "digit 1": "digit 0", "digit 2": "digit 2"}
    config = (out / "config.toml").read_text(encoding="utf-8")
    config = config.replace(str(labels), str(changed))
    (out / "config.toml").write_text(config, encoding="utf-8")
    written = [(row["path"], row["label"]) for row in rows(labels)]
    settings = ["--labeled", changed, "--from", encoder, *LEAST, "--epochs", 20, "--resume"]
    settings += ["--copy-to", tmp_path / "copies"]
    table(changed, [(path, swapped[name]) for path, name in written])
    code, line = refused(capsys, "discover", flat, "-o", out, *settings)
    assert code == 5
    assert "the labels have changed since the run was started" in line
    table(changed, written)
    assert run("discover", flat, "-o", out, *settings) == 0
    names = ["assignments.csv", "clusters.csv", "classifier.safetensors"]
    assert bytes_of(out, *names) == bytes_of(discovery, *names)


def test_what_is_held_out_stays_so_where_the_run_that_decided_it_is_gone(
    flat, labels, encoder, tmp_path
):
    """It was another seed than that of the discovery, so its settings do not say it."""
    gone = Path(shutil.copytree(encoder, tmp_path / "encoder"))
    first, second = tmp_path / "first", tmp_path / "second"
    config = (gone / "config.toml").read_text(encoding="utf-8")
    data = tomllib.loads(config)["data"]
    (gone / "config.toml").write_text(config.replace(data, str(flat)), encoding="utf-8")
    settings = ["discover", flat, *LEAST, "--seed", 3]
    assert run(*settings, "-o", first, "--labeled", labels, "--from", gone) == 0
    held_out = held_out_by(first)
    own = split_images(open_images(str(flat)), 0.1, 3)
    assert held_out != {own.images.names[row] for row in own.test_rows}
    shutil.rmtree(gone)
    (first / "summary.json").unlink()
    again = [*settings, "-o", first, "--labeled", labels, "--from", gone, "--resume"]
    assert run(*again) == 0
    assert held_out_by(first) == held_out
    label(first, "another digit", 2)
    assert run(*settings, "-o", second, "--accept", first) == 0
    assert held_out_by(second) == held_out
    # The images of a run are found again without the one that it started from.
    shutil.rmtree(first)
    assert run("report", second) == 0


def test_images_that_turn_out_unreadable_leave_enough_of_each_class(
    flat, labels, encoder, tmp_path, capsys
):
    """Headers promise enough; the pixels of a whole known class cannot be decoded."""
    data = Path(shutil.copytree(flat, tmp_path / "images"))
    for path in data.glob("2-0[0-7].png"):
        content = path.read_bytes()
        path.write_bytes(content[: content.index(b"IDAT") + 8])
    out = tmp_path / "run"
    settings = ["--labeled", labels, "--from", encoder, *LEAST, "--max-bad", "0.2"]
    code, line = refused(capsys, "discover", data, "-o", out, *settings)
    assert code == 3
    assert "all labeled images of 1 known class are held out ('digit 2') or cannot be read" in line
    assert {row["path"][0] for row in rows(out / "bad_files.csv")} == {"2"}
    assert not (out / "stages" / "known").exists()


def test_settings_of_another_discovery_are_not_resumed(discovery, flat, labels, encoder, capsys):
    settings = ["--labeled", labels, "--from", encoder, *LEAST, "--epochs", 21, "--resume"]
    before = hashlib.sha256((discovery / "config.toml").read_bytes()).digest()
    code, line = refused(capsys, "discover", flat, "-o", discovery, *settings)
    assert code == 2
    assert "--epochs 20 became 21" in line
    assert hashlib.sha256((discovery / "config.toml").read_bytes()).digest() == before


# All of a network


@pytest.mark.parametrize("layers", ["6", "6,top"])
def test_parts_of_a_network_may_learn_and_new_images_are_sorted_by_what_was_learned(
    folders, encoder, tmp_path, layers
):
    out = tmp_path / "run"
    settings = [*KNOWING, "--from", encoder, *LEAST, "--train-layers", layers, "--known-epochs", 1]
    assert run("discover", folders, "-o", out, *settings, "--epochs", 1) == 0
    from safetensors.numpy import load_file

    start, learned = (load_file(f / "encoder.safetensors") for f in (encoder, out))
    parameters = [key for key in start if key.endswith(("weight", "bias"))]
    moved = {key.split(".")[0] for key in parameters if (start[key] != learned[key]).any()}
    assert moved == {"6"}
    assert run("assign", out, folders, "-o", tmp_path / "again.csv") == 0
    again = {row["path"]: row for row in rows(tmp_path / "again.csv")}
    expected = rows(out / "assignments.csv")
    assert {row["path"].split("/")[0] for row in expected} == {"eel", "fox"}
    close([again[row["path"]] for row in expected], expected)


def test_scores_of_a_network_are_calibrated_by_trainings_of_that_network(
    tmp_path, pixels, encoder
):
    """With some known classes hidden; trials on top of the frozen one are not asked."""
    images, out = tmp_path / "images", tmp_path / "run"
    for number, label in enumerate(("ant", "bee", "cat", "dog", "eel")):
        save(images / label, {f"{row}.png": p for row, p in enumerate(pixels[number][:8])})
    settings = ["--known", "ant,bee,cat,dog", "--from", encoder, *LEAST, "--classes", 2]
    trained = [*settings, "--train-layers", "6", "--known-epochs", 1, "--epochs", 1]
    assert run("discover", images, "-o", out, *trained) == 0
    for stage in ("known", "class"):
        assert (out / "stages" / f"calibration-{stage}" / "metrics.csv").exists()
    (trial,) = (out / "stages" / "calibration").iterdir()
    frozen = out / "stages" / "trials" / trial.name
    calibration = json.loads((out / "summary.json").read_text())["calibration"]
    with np.load(trial) as used, np.load(frozen) as other:
        assert calibration["num_images"] == len(used["correct"])
        assert not np.array_equal(used["probability"], other["probability"])


def test_tables_are_read_as_they_were_written(tmp_path):
    """The names of known classes that a table could not hold as they are."""
    known, _ = Annotations(["-a", "b"], [], []).numbered()
    folder = finished_by_hand(tmp_path / "run", [("1.png", known[0], "core")], [(known[0], "c")])
    assert [dict(row)["name"] for row in read_csv(folder / "clusters.csv")] == ["c"]
    assert accepted_classes(folder) == {"1.png": "c"}
