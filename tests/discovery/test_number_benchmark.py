"""The benchmark of the number of classes: its tasks are what their rows say."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from nearkin.types import UNKNOWN

DISCOVERY = Path(__file__).parents[2] / "benchmarks" / "discovery"
sys.path.append(str(DISCOVERY))
spec = importlib.util.spec_from_file_location("number_benchmark", DISCOVERY / "number.py")
benchmark = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = benchmark
spec.loader.exec_module(benchmark)


def data(classes=99, each=60):
    """The features are the class and the number within it."""
    label = np.repeat(np.arange(classes), each)
    x = np.stack([label, np.tile(np.arange(each), classes)], axis=1).astype(np.float32)
    return benchmark.DataSet(x, label, [f"class{n}" for n in range(classes)])


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("mode", ["ncd", "gcd"])
def test_a_task_has_the_classes_that_it_counts(mode, tail):
    every = data()
    for seed in range(6):
        task = benchmark.draw_task(every, "caltech", "report", mode, tail, seed)
        truth = task.x[:, 0].astype(int)
        assert len(np.unique(task.x, axis=0)) == len(task.x)
        labeled = task.label != UNKNOWN
        assert set(truth) <= set(every.classes("caltech", "report"))
        assert len(set(task.label[labeled])) == len(set(truth[labeled])) == task.known
        novel = set(truth) - set(truth[labeled])
        assert len(novel) == task.true
        assert set(truth[~labeled]) == (set(truth) if mode == "gcd" else novel)
        sizes = np.array([(truth[~labeled] == each).sum() for each in novel])
        assert tail or (sizes == sizes[0]).all()


def test_parts_share_no_classes_and_no_seeds():
    every = data()
    design, report = (set(every.classes("caltech", part)) for part in ("design", "report"))
    assert not design & report
    assert design | report == set(range(99))
    design, report = (
        {task["task"] for task in benchmark.tasks(part, ["caltech"])}
        for part in ("design", "report")
    )
    assert not design & report


def test_the_summary_says_errors_and_what_intervals_hold():
    row = {"data": "omniglot", "mode": "ncd", "tail": 0, "true": 10, "estimate": 12, "low": 8,
           "high": 20}  # fmt: skip
    three = {
        "three_rules": 5,
        "three_low": 5,
        "three_high": 9,
        "three_silhouette": 5,
        "three_dtc": 5,
        "three_gcd": 9,
    }
    lines = list(benchmark.summary([row, row | three]))
    assert "| omniglot, ncd | 2 | 20% | 0.18 | 100% |" in lines
    assert "| all | 2 | 20% | 0.18 | 100% |" in lines
    assert "| ncd, their median | 1 | 50% | 0.69 | 0% |" in lines
    assert "| ncd, gcd | 1 | 10% | 0.11 | 0% |" in lines
