"""The benchmarks run at their quick size, and their rows have one form; nothing timed is asserted."""

import itertools
import json
import math
import signal
import sys
import time

import numpy as np
import pytest
import torch

from benchmarks import gpu
from benchmarks.__main__ import main, measure, names
from benchmarks.discovery import tables
from benchmarks.shared.memory import Watch, alone
from benchmarks.shared.rows import Row, compared, interval_of, made_with
from benchmarks.shared.seeds import interval
from benchmarks.shared.turns import alternate, turns

KEYS = {
    "name", "case", "value", "unit", "against", "other", "ratio", "interval", "rounds", "more",
    "commit", "machine", "torch", "threads", "options",
}  # fmt: skip
QUICK = {
    "convolutions": {"tiny:8:4"},
    "duplicates": {"digits 32"},
    "objectives": {"info_nce", "info_nce, memory", "neighbors"},
}
"""Cheap ones, and some of their cases."""


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """A benchmark sets the threads of its process and of those that it starts."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_run_writes_rows_of_one_form(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rows.jsonl"
    rows = list(measure(name, ["--quick", "--rounds", "1", "-o", str(file)]))
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row.case for row in rows} >= QUICK[name]
    assert [row["case"] for row in kept] == [row.case for row in rows]
    for row in kept:
        assert set(row) == KEYS
        assert (row["name"], row["options"]["quick"]) == (name, True)
        assert math.isfinite(row["value"])
        assert (row["other"] is None) == (row["ratio"] is None) == (not row["against"])


def test_every_benchmark_says_in_a_line_what_it_measures(capsys):
    assert main([]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert set(names()) <= set(listed)
    assert all(text.endswith(".") for text in names().values())


def test_an_unknown_name_is_a_usage_error(capsys):
    assert main(["no_such"]) == 2
    assert "steps" in capsys.readouterr().out


def test_a_ratio_is_the_other_over_nearkin_round_by_round():
    row = compared("step", [1.0, 2.0, 4.0], [3.0, 4.0, 4.0], against="bare")
    assert (row.value, row.other, row.ratio, row.interval) == (2.0, 4.0, 2.0, (1.0, 3.0))
    assert compared("step", [1.0], [3.0], against="bare").interval is None


@pytest.mark.parametrize("n", [6, 9, 20])
def test_an_interval_of_order_statistics_covers_the_median_in_95_of_100(n):
    """Exactly, over which of n values lie below the median: all subsets are equally likely."""
    sizes = [math.comb(n, below) / 2**n for below in range(n + 1)]
    low, high = interval_of(range(n))
    covered = sum(share for below, share in enumerate(sizes) if low < below <= high)
    narrower = sum(share for below, share in enumerate(sizes) if low + 1 < below <= high - 1)
    assert narrower < 0.95 <= covered


def test_every_other_round_goes_backward():
    seen = []
    ways = {name: lambda name=name: float(len(seen.append(name) or seen)) for name in "abc"}
    laps = alternate(ways, 3)
    assert "".join(seen) == "abccbaabc"
    assert laps["a"] == [1.0, 6.0, 7.0]


def test_turns_time_each_call_but_the_first():
    now = itertools.count()
    calls = {"a": 0, "b": 0}

    def call(name):
        calls[name] += 1

    laps = turns({name: lambda name=name: call(name) for name in calls}, 2, lambda: next(now))
    assert laps == {"a": [1, 1], "b": [1, 1]}
    assert calls == {"a": 3, "b": 3}


def allocate(megabytes):
    return int(np.ones(megabytes * 2**20 // 8).sum())


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_memory_is_that_of_the_call_alone():
    cost = alone(allocate, 64)
    assert cost.result == 64 * 2**20 // 8
    assert cost.megabytes == pytest.approx(64, abs=4)  # the kernel counts pages in batches


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_watch_sees_what_is_held_while_it_looks():
    with Watch() as memory:
        held = np.ones(256 * 2**20 // 8)  # more than earlier tests may give back meanwhile
        while memory.megabytes - memory.before < 128:
            assert held.all()  # until it has looked
    assert memory.megabytes - memory.before < 512


def test_a_stage_of_the_gpu_plan_is_done_once_and_ends_with_its_limit_or_the_budget(tmp_path):
    def perform(name, module, limit, budget):
        stage = gpu.Stage(name, [module], limit)
        row = gpu.perform(stage, tmp_path, time.time() + budget)
        return row and row.more["exit code"]

    assert perform("short", "this", 60, 60) == 0
    assert perform("short", "this", 60, 60) is None
    assert "Zen" in (tmp_path / "short.log").read_text()
    assert perform("fails", "no_such_module", 60, 60) == 1
    assert perform("fails", "no_such_module", 60, 60) is None
    assert perform("endless", "http.server", 60, 0) is None
    killed = -signal.SIGKILL
    assert perform("endless", "http.server", 60, 0.5) == killed  # by the budget: again
    assert perform("endless", "http.server", 0.5, 60) == killed  # by its limit
    assert perform("endless", "http.server", 0.5, 60) is None


def test_a_row_says_what_it_was_made_with():
    made = made_with()
    assert set(made) == {"commit", "machine", "torch", "threads"}
    assert made["torch"] == torch.__version__


def test_a_line_has_both_figures_and_the_interval():
    row = Row("step", 0.5, "s", "bare", 0.4, 0.8, (0.7, 0.9), more={"steps": 3})
    assert " ".join(row.line().split()) == "step 0.5 s bare 0.4, ratio 0.80 [0.70, 0.90] steps 3"


def test_the_tables_of_discovery_are_those_of_the_rows_beside_it():
    """With Student's intervals: of .1, .2, .3 the half is 4.303 times .1 / 3 ** .5."""
    assert interval([0.1, 0.2, 0.3]) == pytest.approx((0.2, 4.302653 * 0.1 / 3**0.5))
    page = tables.PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->\n| " in page for name in tables.TABLES)
    assert tables.written(page) == page
