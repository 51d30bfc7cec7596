"""The summary of the discovery comparison: its tables say what the rows say."""

import ast
import importlib
import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from nearkin.tables import write_csv

DISCOVERY = Path(__file__).parents[2] / "benchmarks" / "discovery"
sys.path.append(str(DISCOVERY))
summarize = importlib.import_module("summarize")

TRAIN = {
    "k-means": (0.5, 0.6, 0.7, 0.4, 0.45),
    "base": (0.6, 0.7, 0.8, 0.5, 0.65),
    "NCL": (0.61, 0.73, 0.79, 0.54, 0.7),
}
"""For seeds 1 to 3 of the first split, and 1 and 2 of another."""
PAIRS = (("first", 1), ("first", 2), ("first", 3), ("odd", 1), ("odd", 2))


def constant(name):
    """Of compare.py, read without an import of all that it needs."""
    for node in ast.parse((DISCOVERY / "compare.py").read_text()).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=key)]) | ast.AnnAssign(target=ast.Name(id=key))
            ) if key == name:
                return node.value
    raise KeyError(name)


COLUMNS = ast.literal_eval(constant("COLUMNS"))


def write(path, rows):
    cells = [[row.get(column, "") for column in COLUMNS] for row in rows]
    write_csv(path, COLUMNS, cells)
    return path


@pytest.fixture
def ncd(tmp_path):
    rows = []
    for number, (split, seed) in enumerate(PAIRS):
        for arm, scores in TRAIN.items():
            row = {"mode": "ncd", "split": split, "seed": seed, "arm": arm, "known_test": 0.9}
            row |= {"train": scores[number], "test": scores[number] / 2}
            rows.append(row | ({} if arm == "k-means" else {"k_means": 0.3}))
    return write(tmp_path / "clothes.csv", rows)


@pytest.fixture
def gcd(tmp_path):
    rows = [
        {"mode": "gcd", "split": "first", "seed": seed, "arm": arm, "train": 0.1 * seed}
        | {"train_known": 0.8, "train_novel": 0.25, "test": 0.5}
        for seed in (1, 2, 3)
        for arm in ("k-means", "SimGCD", "SimGCD, clusters")
    ]
    return write(tmp_path / "clothes-gcd.csv", rows)


def cells(markdown):
    """The tables of some Markdown: a list of rows of cells each, without the rule."""
    blocks = [block.splitlines() for block in markdown.split("\n\n") if block.startswith("|")]
    return [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in (block[0], *block[2:])]
        for block in blocks
    ]


def test_a_split_of_three_seeds_has_means_and_deviations_and_one_of_two_has_its_values(ncd):
    (results,) = summarize.read(ncd)
    ((header, *lines),) = cells(summarize.means(results, "first"))
    assert header == ["arm", "n", "train", "test", "k-means after", "known"]
    assert lines[0] == ["k-means", "3", "0.600 ± 0.100", "0.300 ± 0.050", "", "0.900 ± 0.000"]
    assert lines[1][:4] == ["base", "3", "0.700 ± 0.100", "0.350 ± 0.050"]
    assert lines[1][4] == "0.300 ± 0.000"
    ((_, *lines),) = cells(summarize.means(results, "odd"))
    assert lines[2][:3] == ["NCL", "2", "0.540, 0.700"]
    assert lines[2][3:] == ["0.270, 0.350", "0.300, 0.300", "0.900, 0.900"]


def test_differences_are_taken_within_pairs_over_all_splits_and_over_the_first(ncd):
    (results,) = summarize.read(ncd)
    ((header, everywhere, first),) = cells(summarize.differences(results, "train"))
    assert header[2:] == ["n", "mean", "95 % interval", "smallest", "largest", "positive"]
    of = np.array([0.01, 0.03, -0.01, 0.04, 0.05])
    low, high = summarize.interval(of)
    assert everywhere == [
        "NCL minus base", "all", "5", "+0.024", f"[{low:+.3f}, {high:+.3f}]", "-0.010", "+0.050",
        "4 of 5",
    ]  # fmt: skip
    assert first[:4] == ["NCL minus base", "first", "3", "+0.010"]
    assert first[5:] == ["-0.010", "+0.030", "2 of 3"]


def without(results, **those):
    rows = [row for row in results.rows if not those.items() <= row.items()]
    return summarize.Results(results.name, results.mode, rows)


def test_a_pair_that_only_one_arm_has_is_not_compared(ncd):
    results = without(*summarize.read(ncd), split="odd", seed="2", arm="base")
    ((_, everywhere, _),) = cells(summarize.differences(results, "train"))
    assert everywhere[2:4] == ["4", "+0.018"]


def test_an_arm_of_the_first_split_alone_is_not_in_the_others_and_is_compared_once(ncd, tmp_path):
    results = without(*summarize.read(ncd), split="odd", arm="NCL")
    ((_, *lines),) = cells(summarize.means(results, "odd"))
    assert [line[0] for line in lines] == ["k-means", "base"]
    ((_, *lines),) = cells(summarize.differences(results, "train"))
    assert [line[1:3] for line in lines] == [["first", "3"]]
    assert cells(summarize.by_seed(results))[0][-1] == ["odd", "2", "0.450", "0.650", ""]
    summarize.draw(tmp_path / "train.png", [results])


def test_two_differences_have_no_interval(ncd):
    results = without(*summarize.read(ncd), seed="3")
    ((_, _, first),) = cells(summarize.differences(results, "train"))
    assert first[2:] == ["2", "+0.020", "", "+0.010", "+0.030", "2 of 2"]


def test_the_interval_of_many_values_is_the_normal_one():
    values = np.random.default_rng(1).normal(0.2, 0.1, 400)
    half = NormalDist().inv_cdf(0.975) * values.std() / 20
    expected = values.mean() - half, values.mean() + half
    assert summarize.interval(values) == pytest.approx(expected, abs=0.05 * half)


def test_the_interval_of_three_values_reaches_to_the_outer_ones():
    """All draws are the smallest with probability 1/27, more than the 2.5 % left out."""
    assert summarize.interval([0.1, 0.5, 0.2]) == pytest.approx((0.1, 0.5))


def test_every_seed_has_a_line_and_every_arm_a_column(ncd, gcd):
    header, *lines = cells(summarize.markdown(*summarize.read(ncd)))[-1]
    assert header == ["split", "seed", *TRAIN]
    assert lines[1] == ["first", "2", "0.600", "0.700", "0.730"]
    assert [(split, int(seed)) for split, seed, *_ in lines] == list(PAIRS)
    _, *lines = cells(summarize.markdown(*summarize.read(gcd)))[-1]
    assert lines[2] == ["first", "3", *["0.300 / 0.800 / 0.250"] * 3]


def test_mode_gcd_tells_known_from_novel(gcd):
    (header, *lines), (_, difference), _ = cells(summarize.markdown(*summarize.read(gcd)))
    assert header == ["arm", "n", "All", "Known", "Novel", "test"]
    everything = ["0.200 ± 0.100", "0.800 ± 0.000", "0.250 ± 0.000", "0.500 ± 0.000"]
    arms = ("k-means", "SimGCD", "SimGCD, clusters")
    assert lines == [[arm, "3", *everything] for arm in arms]
    assert difference[:4] == ["SimGCD, clusters minus SimGCD", "first", "3", "+0.000"]


def test_what_is_compared_and_drawn_is_measured():
    arms = {key.value for name in ("ARMS", "GCD_ARMS") for key in constant(name).keys}
    assert {arm for pair in summarize.COMPARED for arm in pair} <= arms
    assert set(ast.literal_eval(constant("SEEDS"))) == set(summarize.MARKERS)
    assert set(summarize.MARKERS) == set(summarize.COLORS)
    scores = {column for columns in summarize.COLUMNS.values() for column in columns}
    assert scores <= set(COLUMNS)


def test_the_command_prints_every_file_and_draws(ncd, gcd, tmp_path, monkeypatch, capsys):
    plot = tmp_path / "train.png"
    monkeypatch.setattr(sys, "argv", ["summarize.py", str(ncd), str(gcd), "--plot", str(plot)])
    summarize.main()
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("## ")]
    assert titles == ["## clothes, mode ncd", "## clothes-gcd, mode gcd"]
    assert plot.read_bytes().startswith(b"\x89PNG")
