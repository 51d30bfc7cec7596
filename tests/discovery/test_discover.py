"""What `nearkin discover` leaves: tables that fit each other, scores that follow from them."""

import html
import re
import tomllib
from collections import Counter

import numpy as np
import pytest
from discoveries import SHORT, discover, held_out, hungarian, rows, strict_json, words

from nearkin.choices import MODE_METHODS
from nearkin.classifier.assignments import COLUMNS
from nearkin.config import DiscoverConfig
from nearkin.discovery.clusters import CLUSTER_COLUMNS
from nearkin.discovery.features import NUM_VIEWS
from nearkin.discovery.report import lines
from nearkin.discovery.stages import OPTIONS
from nearkin.discovery.trials import candidates

KNOWN, EACH = 5, 16
LEFT = {
    "assignments.csv", "classifier.safetensors", "clusters.csv", "config.toml",
    "data.json", "encoder.safetensors", "images.csv", "report.html", "stages", "summary.json",
    "to_label.csv", "train.log",
}  # fmt: skip
MODES = {
    "gcd": words("--epochs 5"),
    "ncd": words("--epochs 8 --mode ncd --classes 3 --positive-rate 0.3"),
}


@pytest.fixture(scope="module")
def truth(arrays):
    """The class of each image by its name."""
    labels = np.load(arrays)["y"]
    return {f"{row:03d}": int(label) for row, label in enumerate(labels)}


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def finished(mode, tmp_path_factory, arrays, encoder):
    """A finished discovery of each mode, scored, with its page; read, never written."""
    out = tmp_path_factory.mktemp("runs") / mode
    settings = ["--known", "0,1,2,3,4", "--encoder", encoder, "--truth", "data", "--report"]
    assert discover(arrays, "-o", out, *settings, *SHORT, *MODES[mode]) == 0
    return out


def test_a_discovery_leaves_every_file_that_was_promised(finished, mode):
    assert {path.name for path in finished.iterdir()} >= LEFT
    stages = {path.name for path in (finished / "stages").iterdir()}
    assert stages >= {"trials", *(f"{MODE_METHODS[mode]}-{seed}" for seed in range(3))}
    assert "known" in stages  # features are narrow


def test_all_images_without_a_label_are_assigned_once_and_columns_hold_what_they_say(
    finished, mode, truth
):
    assignments = rows(finished / "assignments.csv")
    assert [row["path"] for row in assignments] == [n for n in truth if truth[n] >= KNOWN]
    assert list(assignments[0]) == list(COLUMNS)
    known = {str(number) for number in range(KNOWN)}
    count = strict_json(finished / "summary.json")["novel"]
    novel = {f"new-{number + 1}" for number in range(count)}
    assert {row["cluster"] for row in assignments} <= novel | (known if mode == "gcd" else set())
    for row in assignments:
        shares = [float(row[name]) for name in ("score", "margin", "entropy", "view_agreement")]
        assert all(0 <= share <= 1 for share in shares)
        assert 0 <= float(row["neighbor_agreement"]) <= 1
        assert float(row["margin"]) <= float(row["score"])
        assert (NUM_VIEWS * float(row["view_agreement"])).is_integer()
        assert row["nearest_known"] in known
        assert -1 <= float(row["similarity"]) <= 1
        assert row["flag"] in ("", "core", "border", "maybe-known", "tiny-cluster", "outlier")


def test_the_table_of_classes_counts_the_assignments_and_has_room_for_names(finished):
    table, by_path = rows(finished / "clusters.csv"), clusters_of(finished)
    assert list(table[0]) == list(CLUSTER_COLUMNS)
    full = {row["cluster"]: int(row["size"]) for row in table if int(row["size"])}
    assert full == Counter(by_path.values())
    assert {row["name"] for row in table} == {""}
    for row in table:
        assert row["kind"] == ("novel" if row["cluster"].startswith("new-") else "known")
        assert not row["medoid"] or by_path[row["medoid"]] == row["cluster"]
    kinds = Counter(row["kind"] for row in table)
    assert kinds["novel"] == strict_json(finished / "summary.json")["novel"]


def clusters_of(run):
    """The class of each assigned image by its name."""
    return {row["path"]: row["cluster"] for row in rows(run / "assignments.csv")}


def text_of(page):
    """What is read on a page, without its marks."""
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


def test_the_page_names_every_class_and_what_repeats_the_run(finished, arrays):
    text = text_of((finished / "report.html").read_text(encoding="utf-8"))
    assert all(row["cluster"] in text for row in rows(finished / "clusters.csv"))
    settings = tomllib.loads((finished / "config.toml").read_text())
    assert f"nearkin discover {arrays}" in text
    assert f"--encoder {settings['encoder']}" in text


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
    tried = map(str, candidates(DiscoverConfig(mode=mode, options={"positive_rate": 0.3})))
    assert summary["trials"].keys() == {*tried}
    assert summary["objective"] == MODE_METHODS[mode]
    if mode == "ncd":
        assert summary["options"] == {**OPTIONS["ncl"], "positive_rate": 0.3}
    else:
        assert summary["options"] == OPTIONS["simgcd"]
    baseline = {"gcd": "semi-supervised k-means", "ncd": "k-means"}[mode]
    assert set(summary["scores"]) == {"nearkin", baseline, f"{baseline}, pixels"}
    for scores in summary["scores"].values():
        for each in scores:
            assert 0 <= each["low"] <= each["value"] <= each["high"] <= 1 or "ARI" in each["name"]
            assert each["n"] > 0


def test_the_ends_of_an_estimated_interval_are_trained_and_shown_beside_the_result(finished, mode):
    summary = strict_json(finished / "summary.json")
    trained = {each["novel"]: each for each in summary["alternatives"]}
    if mode == "ncd":  # the number was given
        assert not trained
        return
    number, method = summary["number"], summary["objective"]
    assert set(trained) == {number["low"], number["chosen"], number["high"]}
    sizes = [each["size"] for each in summary["clusters"] if each["kind"] == "novel"]
    assert trained[number["chosen"]]["sizes"] == sorted(sizes, reverse=True)
    held_out = {each["name"]: each for each in summary["scores"]["nearkin"]}
    assert trained[number["chosen"]]["known"] == held_out["known classes, held out"]
    text = text_of((finished / "report.html").read_text(encoding="utf-8"))
    for novel, each in trained.items():
        assert len(each["sizes"]) == novel
        assert sum(each["sizes"]) <= summary["unlabeled"]
        assert -1 <= each["silhouette"] <= 1
        assert -1 <= each["seed_agreement"] <= 1
        stage = f"{method}-1" if novel == number["chosen"] else f"{method}-{novel}-classes-1"
        assert (finished / "stages" / stage / "metrics.csv").exists()
        assert f"{each['sizes'][0]} to {each['sizes'][-1]}" in text
        assert (f"--classes {novel}" in text) == (novel != number["chosen"])  # how to take another


def test_the_summary_counts_the_flags_and_says_how_many_held_out_images_are_like_no_class(
    finished, encoder
):
    summary, table = strict_json(finished / "summary.json"), rows(finished / "assignments.csv")
    flags = Counter(row["flag"] for row in table if row["flag"])
    assert summary["flags"] == dict(flags)
    stated, test = summary["outliers"]["held_out"], held_out(encoder)
    assert (stated["n"], stated["protocol"]["of"]) == (summary["held_out"], "held-out images")
    counted = sum(row["path"] in test for row in table if row["flag"] == "outlier")
    assert counted <= round(stated["value"] * summary["held_out"])  # some have a label
    assert 0 <= stated["low"] <= stated["value"] <= stated["high"] < 1
    text = text_of((finished / "report.html").read_text(encoding="utf-8"))
    assert f"{flags['outlier']} of {len(table)} unlabeled images are flagged as outliers" in text


def test_scores_are_printed_with_their_intervals_and_no_empty_table_where_there_are_none(finished):
    summary = strict_json(finished / "summary.json")
    found, heading, *table = lines(summary)
    assert heading.split()[0] == "metric"
    assert all(way in heading for way in summary["scores"])
    first = summary["scores"]["nearkin"][0]
    stated = f"{first['value']:.3f} [{first['low']:.3f}, {first['high']:.3f}]"
    assert table[0].split("  ")[0] == first["name"]
    assert stated in table[0]
    none = {way: [] for way in summary["scores"]}
    assert lines({**summary, "scores": none, "findings": []}) == [found]


def test_what_the_scores_of_novel_images_are_worth_is_measured(finished, mode, truth, encoder):
    """Restated from the table, on held-out images: those of the encoder's run."""
    stated = {e["name"]: e for e in strict_json(finished / "summary.json")["score_quality"]}
    assert {name.split()[0] for name in stated} <= {"ECE", "AUROC"}
    table = [row for row in rows(finished / "assignments.csv") if row["path"] in held_out(encoder)]
    ece = stated["ECE of the score, held out"]
    assert ece["n"] == sum(truth[row["path"]] >= KNOWN for row in table)
    assert ece["protocol"]["of"] == "held-out images of novel classes"
    assert 0 <= ece["low"] <= ece["value"] <= ece["high"] <= 1
    if mode == "ncd":  # in gcd, images of known classes have a part in the match
        true, predicted = zip(*((truth[row["path"]], row["cluster"]) for row in table))
        share = hungarian(true, predicted)
        mean = np.mean([float(row["score"]) for row in table])
        assert ece["value"] >= abs(mean - share) - 1e-3, "no bins have less error than their mean"
    text = text_of((finished / "report.html").read_text(encoding="utf-8"))
    assert f"On novel classes it is {ece['value']:.1%}." in text


@pytest.mark.parametrize("part", ["train", "held out"])
def test_scores_follow_from_the_table_and_the_truth(finished, mode, truth, encoder, part):
    """What is scored was held out by the encoder's run as well, and beats guessing."""
    name = {"gcd": "GCD accuracy, novel", "ncd": "task-aware accuracy"}[mode]
    scores = strict_json(finished / "summary.json")["scores"]["nearkin"]
    stated = {each["name"]: each for each in scores}
    value, number = (stated[f"{name}, {part}"][key] for key in ("value", "n"))
    test = held_out(encoder)
    pairs = [
        (truth[path], cluster)
        for path, cluster in clusters_of(finished).items()
        if (path in test) == (part == "held out")
    ]
    true, predicted = zip(*pairs)
    if part == "train":
        assert value == pytest.approx(hungarian(true, predicted), abs=1e-12)
        assert number == len(pairs)
        guessed = np.random.default_rng(0).integers(len(set(predicted)), size=(50, len(true)))
        chance = np.mean([hungarian(true, guess) for guess in guessed])
        assert value > chance + 0.1
        return
    if mode == "gcd":  # images of known classes are matched as well
        assert value <= hungarian(true, predicted) + 1e-12
    else:
        assert value == pytest.approx(hungarian(true, predicted), abs=1e-12)
        assert number == len(pairs)
    # Held-out images of known classes are scored by their own name.
    known, held = stated["known classes, held out"], [path for path in test if truth[path] < KNOWN]
    assert (known["n"], known["protocol"]["of"]) == (len(held), "held-out labeled images")
    assert round(known["value"] * len(held), 6) % 1 == 0


@pytest.mark.parametrize(
    "mode", [pytest.param("gcd", marks=pytest.mark.slow), "ncd"], indirect=True
)
def test_the_configuration_repeats_a_discovery_to_the_bit_whatever_the_hidden_labels(
    finished, mode, arrays, tmp_path
):
    """Other labels for all that is hidden: the same assignments."""
    stored = dict(np.load(arrays))
    labels = stored["y"].copy()
    hidden = np.flatnonzero(labels >= KNOWN)
    labels[hidden] = np.random.default_rng(3).permutation(labels[hidden])
    assert (labels != stored["y"]).sum() > 20
    other, out = tmp_path / "digits.npz", tmp_path / "run"
    np.savez(other, **stored | {"y": labels})
    settings = ["--config", finished / "config.toml", "--no-report", "-q"]
    assert discover(other, "-o", out, *settings) == 0
    for name in ("assignments.csv", "classifier.safetensors"):
        assert (out / name).read_bytes() == (finished / name).read_bytes(), name
    one, other = (strict_json(path / "summary.json") for path in (out, finished))
    assert one["options"] == other["options"]


def test_resuming_a_finished_discovery_changes_nothing(finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    before = {path: time for path, time in before.items() if path.suffix in (".csv", ".html")}
    settings = ["--config", finished / "config.toml", "--report", "--resume"]
    assert discover("-o", finished, *settings) == 0
    assert "already complete" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in before} == before
