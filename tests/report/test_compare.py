"""Runs side by side."""

import json
import re
from dataclasses import asdict

import numpy as np
import pytest
from nearkin_command import run as call

from nearkin.commands.compare import compare
from nearkin.config import DiscoverConfig, EmbedConfig, TrainConfig
from nearkin.errors import CheckpointError, OutputError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.vectors import write_embeddings
from nearkin.metrics.metric import Metric, difference, share
from nearkin.run.folder import RunFolder


def metric(name, value, low=None, high=None, how="kNN, k 20"):
    return Metric(name, value, low, high, 100, None, {"method": how}).to_dict()


def training(path, knn=0.9, half=0.02, *, how="kNN, k 20", fingerprint="aa-bb", **settings):
    folder = RunFolder(path)
    folder.path.mkdir()
    folder.write_settings(TrainConfig(**settings), "/data/flowers")
    top = metric("kNN top-1", knn, knn - half, knn + half, how)
    untrained = metric("kNN top-1", 0.3, 0.25, 0.35)
    folder.write_summary(
        {
            "torch": "2.12", "threads": 1, "sizes": {}, "left_out": {},
            "metrics": {
                "encoder": {"kNN top-1": top, "mean cosine": metric("mean cosine", knn)},
                "untrained": {"kNN top-1": untrained},
            },
        }
    )  # fmt: skip
    folder.data.write_text(json.dumps({"train": 9, "test": 1, "fingerprint": fingerprint}))
    folder.metrics.write_text(f"step,epoch,loss,knn\n1,1,3.0,0.5\n2,2,2.0,{knn}\n")
    return path


def discovery(path, value, novel=3):
    folder = RunFolder(path)
    folder.path.mkdir()
    folder.classifier.touch()
    folder.write_settings(DiscoverConfig(known=["a", "b"]), "/data/flowers")
    ours = metric("accuracy", value, value - 0.01, value + 0.01, "matched")
    folder.write_summary({"novel": novel, "scores": {"nearkin": [ours], "k-means": [ours]}})
    folder.data.write_text(json.dumps({"fingerprint": "aa-bb"}))
    return path


def of(result, name):
    return next(each for each in result.to_dict()["metrics"] if each["name"] == name)


def test_only_settings_that_differ_are_shown_and_seeds_always(tmp_path):
    runs = [training(tmp_path / "a", lr=0.1), training(tmp_path / "b", lr=0.2, method="byol")]
    comparison = compare(runs)
    assert comparison.to_dict()["settings"] == {
        "method": ["simclr", "byol"], "lr": ["0.1", "0.2"], "seed": ["0", "0"],
    }  # fmt: skip
    assert comparison.notes == ()
    assert comparison.names == ["a", "b"]


def test_settings_are_shown_short_and_kept_whole(tmp_path):
    rates, methods = (0.03 * 256**0.5 / 7, 1e-5), ("/somewhere/far/own.py:Mine", "moco")
    both = zip(rates, methods)
    comparison = compare([training(tmp_path / m[-4:], lr=lr, method=m) for lr, m in both])
    assert comparison.to_dict()["settings"]["lr"] == [str(rate) for rate in rates]
    cells = {line.split()[0]: line.split()[1:] for line in comparison.lines()}
    assert cells["lr"] == ["0.0685714", "1e-05"]
    assert cells["method"] == ["own.py:Mine", "moco"]


def test_intervals_alone_mark_no_best(tmp_path):
    """Two intervals that exclude each other's value are no test of a difference."""
    for values in ((0.9, 0.8, 0.85), (0.9, 0.89)):
        runs = [training(tmp_path / f"{values} {n}", x) for n, x in enumerate(values)]
        comparison = compare(runs)
        assert of(comparison, "kNN top-1")["best"] is None, values
        assert not [line for line in comparison.lines() if "*" in line], values


def test_numbers_that_were_found_in_other_ways_have_a_note(tmp_path):
    runs = [training(tmp_path / "a", 0.9), training(tmp_path / "b", 0.5, how="kNN, k 5")]
    comparison = compare(runs)
    assert of(comparison, "kNN top-1")["best"] is None
    note = "Measured by different protocols, so these do not compare: kNN top-1."
    assert comparison.notes == (note,)


@pytest.mark.parametrize(
    ("fingerprint", "note"), [("cc-bb", "on different images"), ("aa-cc", "hold out different")]
)
def test_runs_on_other_images_or_other_parts_are_compared_with_a_note(tmp_path, fingerprint, note):
    runs = [training(tmp_path / "a"), training(tmp_path / "b", 0.1, fingerprint=fingerprint)]
    comparison = compare(runs, output=tmp_path / "compare.html")
    assert note in " ".join(comparison.notes)
    assert note in " ".join(comparison.lines())
    assert note in (tmp_path / "compare.html").read_text()


def test_discoveries_are_compared_with_their_baselines(tmp_path):
    comparison = compare([discovery(tmp_path / "a", 0.7, 3), discovery(tmp_path / "b", 0.9, 4)])
    assert [each["value"] for each in of(comparison, "accuracy")["values"]] == [0.7, 0.9]
    assert of(comparison, "k-means: accuracy")["best"] is None
    assert comparison.settings["novel"] == ("3", "4")


def test_what_does_not_compare_is_refused_in_one_line(tmp_path):
    a, b = training(tmp_path / "a"), discovery(tmp_path / "b", 0.5)
    unfinished, damaged, strange = (training(tmp_path / name) for name in "cde")
    RunFolder(unfinished).summary.unlink()
    RunFolder(damaged).summary.write_text("{}{")
    RunFolder(strange).data.write_text("[]")
    for runs, error, message in (
        ([a], UsageError, "give two or more different runs"),
        ([], UsageError, "give two or more different runs"),
        ([a, a / ".." / "a"], UsageError, "two or more different runs"),
        ([a, b], UsageError, "a training and .*b a discovery"),
        ([a, unfinished], UsageError, "c is not finished"),
        ([a, tmp_path / "absent"], UsageError, "is no run folder"),
        ([a, damaged], CheckpointError, r"summary\.json cannot be used"),
        ([a, strange], CheckpointError, r"data\.json cannot be used"),
    ):
        with pytest.raises(error, match=message) as raised:
            compare(runs)
        assert "\n" not in str(raised.value)
    with pytest.raises(OutputError, match="cannot write"):
        compare([a, training(tmp_path / "f")], output=tmp_path / "a" / "config.toml" / "c.html")


def test_the_page_has_the_tables_and_the_curves_and_names_only_as_text(tmp_path):
    first = tmp_path / "<script>alert(1)<"
    runs = [training(first, 0.9, 0.01), *(training(tmp_path / f"r{n}", 0.5) for n in range(4))]
    compare(runs, output=tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;" in page
    assert "0.900 [0.890, 0.910]" in page
    # Five runs are more than the kinds of line: two charts of each curve.
    titles = re.findall(r"<h3>([^<]*)</h3>", page)
    assert (titles.count("Training loss"), titles.count("kNN accuracy")) == (2, 2)
    other = training(tmp_path / "other", method="byol")
    compare([runs[0], other], output=tmp_path / "other.html")
    content = (tmp_path / "other.html").read_text()
    assert "<h3>Training loss</h3>" not in content
    assert "<h1>2 trainings compared</h1>" in content
    RunFolder(other).write_settings(EmbedConfig(), "/data/flowers")
    compare([runs[0], other], output=tmp_path / "frozen.html")
    assert "<h1>2 runs compared</h1>" in (tmp_path / "frozen.html").read_text()


def test_from_the_command_line(tmp_path, capsys):
    runs = [training(tmp_path / "a", 0.9), training(tmp_path / "b", 0.5)]
    assert call("compare", *runs) == 0
    assert "0.900" in capsys.readouterr().out
    assert call("compare", *runs, "--json", "-o", tmp_path / "c.html") == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["name"] == "a"
    assert (tmp_path / "c.html").exists()
    assert call("compare", runs[0]) == 2


def with_embeddings(path, wrong, *, names="img", **settings):
    """A training whose kNN is wrong about so many of its 400 test images, and right otherwise."""
    run = training(path, 1 - wrong / 400, **settings)
    labels = np.arange(800) % 4
    vectors = np.eye(4, dtype=np.float32)[labels]
    vectors[400 : 400 + wrong] = np.roll(vectors[400 : 400 + wrong], 1, axis=1)
    rng = np.random.default_rng(0)
    vectors += 0.01 * rng.normal(size=vectors.shape).astype(np.float32)
    table = Embeddings(
        vectors, labels, rows=np.arange(800), paths=[f"{names}{row:03}" for row in range(800)],
        classes=("a", "b", "c", "d"), splits=np.repeat(["train", "test"], 400),
    )  # fmt: skip
    write_embeddings(RunFolder(run).embeddings, table)
    return run


def test_runs_on_the_same_test_images_are_compared_image_by_image(tmp_path):
    runs = [with_embeddings(tmp_path / str(wrong), wrong) for wrong in (60, 40, 44)]
    one = of(compare(runs), "kNN top-1")
    right = {wrong: np.arange(400) >= wrong for wrong in (60, 40, 44)}
    for run, wrong in enumerate((60, 44)):
        both = (share("kNN top-1", right[n], {}) for n in (wrong, 40))
        expected = asdict(difference(*both))
        found = one["from_first"][2 * run]
        assert {n: found[n] for n in ("low", "high")} == pytest.approx(
            {n: expected[n] for n in ("low", "high")}, abs=1e-9
        )
    assert one["from_first"][1] is None
    assert one["best"] == 1  # .90 [.88, .92] and .89 overlap, but four images decide
    compare(runs, output=tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text()
    assert re.findall(r"<strong>(\S+) [^<]*</strong> \(best\)", page) == ["0.900"]
    assert [line.count("*") for line in compare(runs).lines()[:3]] == [0, 1, 0]
    cells = compare(runs).lines()[2].split("  ")
    assert cells[0] == "kNN top-1, from the highest"
    assert "-0.010 [" in compare(runs).lines()[2]


def test_without_the_same_test_images_there_is_no_difference_from_the_best(tmp_path):
    same = with_embeddings(tmp_path / "a", 60)
    for name, settings in {
        "names": {"names": "other"}, "split": {"fingerprint": "aa-cc"}, "how": {"how": "k 5"},
    }.items():  # fmt: skip
        other = with_embeddings(tmp_path / name, 40, **settings)
        assert "from_first" not in of(compare([same, other]), "kNN top-1")
    absent = training(tmp_path / "absent", 0.5)
    assert "from_first" not in of(compare([same, absent]), "kNN top-1")
