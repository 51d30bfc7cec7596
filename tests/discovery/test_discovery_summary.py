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

NOVEL = {
    "k-means": (0.5, 0.6, 0.7),
    "base loss": (0.6, 0.7, 0.8),
    "joint NCL": (0.61, 0.73, 0.79),
    "UNO": (0.6, 0.8, 0.7),
}
"""For seeds 1 to 3."""
CHOSEN = ("joint NCL", "UNO", "joint NCL")


def constant(name, file="compare.py"):
    """Of a script, read without an import of all that it needs."""
    for node in ast.parse((DISCOVERY / file).read_text()).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=key)]) | ast.AnnAssign(target=ast.Name(id=key))
            ) if key == name:
                return node.value
    raise KeyError(name)


COLUMNS = ast.literal_eval(constant("COLUMNS"))


def row(arm, seed, novel, **more):
    scores = {"all": novel / 2, "known": 0.9, "novel": novel, "aware": 0.8, "train": 0.3}
    chosen = int(CHOSEN[seed - 1] == arm)
    return {"mode": "ncd", "data": "clothes", "arm": arm, "seed": seed, "chosen": chosen} | (
        scores | more
    )


@pytest.fixture
def rows():
    return [row(arm, seed, of[seed - 1]) for seed in (1, 2, 3) for arm, of in NOVEL.items()]


def read(tmp_path, rows):
    cells = [[each.get(column, "") for column in COLUMNS] for each in rows]
    write_csv(tmp_path / "mixed.csv", COLUMNS, cells)
    return summarize.read(tmp_path / "mixed.csv")


def cells(markdown):
    """The tables of some Markdown: a list of rows of cells each, without the rule."""
    blocks = [block.splitlines() for block in markdown.split("\n\n") if block.startswith("|")]
    return [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in (block[0], *block[2:])]
        for block in blocks
    ]


def test_three_seeds_have_means_and_deviations_and_two_have_their_values(rows, tmp_path):
    (results,) = read(tmp_path, rows)
    ((header, *lines),) = cells(summarize.means(results))
    assert header == ["arm", "seeds", "all", "known", "novel", *header[5:]]
    assert lines[0][:3] == ["k-means", "3", "0.300 ± 0.050"]
    assert lines[1][3:5] == ["0.900 ± 0.000", "0.700 ± 0.100"]
    (results,) = read(tmp_path, [each for each in rows if each["seed"] > 1])
    ((_, *lines),) = cells(summarize.means(results))
    assert lines[0][1:3] == ["2", "0.300, 0.350"]


def test_what_was_chosen_is_a_line_of_its_own(rows, tmp_path):
    (results,) = read(tmp_path, rows)
    ((_, *lines),) = cells(summarize.means(results))
    assert [line[0] for line in lines] == [*NOVEL, summarize.AUTO]
    assert (
        lines[-1][4]
        == f"{np.mean([0.61, 0.8, 0.79]):.3f} ± {np.std([0.61, 0.8, 0.79], ddof=1):.3f}"
    )


def test_differences_are_taken_within_seeds(rows, tmp_path):
    ((header, first, *_),) = cells(summarize.differences(read(tmp_path, rows), "novel"))
    assert header[2:] == ["n", "mean", "95 % interval", "smallest", "largest", "positive"]
    low, high = summarize.interval([0.01, 0.03, -0.01])
    found = ["3", "+0.010", f"[{low:+.3f}, {high:+.3f}]", "-0.010", "+0.030", "2 of 3"]
    assert first == ["joint NCL minus base loss", "clothes", *found]


def test_a_seed_that_only_one_arm_has_is_not_compared(rows, tmp_path):
    rows = [each for each in rows if (each["arm"], each["seed"]) != ("base loss", 3)]
    ((_, first, *_),) = cells(summarize.differences(read(tmp_path, rows), "novel"))
    assert first[2:] == ["2", "+0.020", "", "+0.010", "+0.030", "2 of 2"]


def test_modes_and_data_sets_have_tables_of_their_own(rows, tmp_path):
    other = [row("k-means", 1, 0.4, data="letters"), row("SimGCD", 1, 0.5, mode="gcd")]
    printed = summarize.markdown(read(tmp_path, rows + other))
    titles = [line.removeprefix("#### ") for line in printed.splitlines() if line[:1] == "#"]
    assert titles == [
        "clothes, mode ncd", "letters, mode ncd",
        "Differences of all, mode ncd", "Differences of novel, mode ncd",
        "clothes, mode gcd",
        "Differences of all, mode gcd", "Differences of novel, mode gcd",
    ]  # fmt: skip


def test_the_interval_of_many_values_is_the_normal_one():
    values = np.random.default_rng(1).normal(0.2, 0.1, 400)
    half = NormalDist().inv_cdf(0.975) * values.std() / 20
    expected = values.mean() - half, values.mean() + half
    assert summarize.interval(values) == pytest.approx(expected, abs=0.05 * half)


def test_the_interval_of_three_values_reaches_to_the_outer_ones():
    """All draws are the smallest with probability 1/27, more than the 2.5 % left out."""
    assert summarize.interval([0.1, 0.5, 0.2]) == pytest.approx((0.1, 0.5))


def arms(node):
    """By mode: of a mapping of modes to mappings of arms."""
    return {
        mode.value: {arm.value for arm in of.keys}
        for mode, of in zip(node.keys, node.values, strict=True)
    }


def test_what_is_compared_is_measured():
    ours, theirs = arms(constant("ARMS")), arms(constant("ARMS", "official.py"))
    for mode, pairs in summarize.COMPARED.items():
        measured = {"k-means"} | ours[mode] | theirs[mode]
        assert {arm for pair in pairs for arm in pair} <= measured
    assert set(summarize.SCORES) <= set(COLUMNS)


def test_the_command_prints_a_file(rows, tmp_path, monkeypatch, capsys):
    read(tmp_path, rows)
    monkeypatch.setattr(sys, "argv", ["summarize.py", str(tmp_path / "mixed.csv")])
    summarize.main()
    assert "#### clothes, mode ncd" in capsys.readouterr().out
