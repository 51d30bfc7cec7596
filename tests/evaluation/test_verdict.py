"""The verdict on a training from a start: its rule, its words, and what it is decided by."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from types_checked import unchecked

from nearkin.errors import DataError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import Evaluation, evaluate_tables
from nearkin.evaluation.metrics import knn, knn_refits, view_retrieval
from nearkin.evaluation.verdict import StartComparison, differences, kept
from nearkin.metrics.intervals import jackknife
from nearkin.metrics.metric import Difference, difference, share


def differing(metric="kNN top-1", value=0.0, low=-0.02, high=0.02, second=0.5):
    return Difference(metric, second + value, second, low, high, 1000, 1000.0)


def verdict(*found, collapsed=False):
    return StartComparison(found, collapsed)


@pytest.mark.parametrize(
    ("value", "low", "high", "expected"),
    [
        (0.05, 0.02, 0.08, "helped"),
        (-0.05, -0.08, -0.02, "worse"),
        (0.05, -0.01, 0.11, "no difference"),
        (-0.05, -0.11, 0.01, "no difference"),
        (0.004, 0.001, 0.007, "no difference"),  # clear, but less than another seed makes
        (-0.004, -0.007, -0.001, "no difference"),
    ],
)
def test_knn_decides_whatever_the_probe_says(value, low, high, expected):
    probe = differing("linear probe", -value, -high, -low)
    comparison = verdict(probe, differing(value=value, low=low, high=high))
    assert comparison.verdict == expected
    assert comparison.to_dict()["decided_by"] == "kNN top-1"
    assert f"({value:+.3f} [{low:+.3f}, {high:+.3f}])" in comparison.text
    assert any("linear probe" in finding for finding in comparison.findings())
    assert any("not the seed" in finding for finding in comparison.findings())


@pytest.mark.parametrize(
    ("first", "second", "expected"), [(0.35, 0.34, "helped"), (0.34, 0.35, "worse")]
)
def test_a_difference_of_one_point_is_enough_in_any_digits(first, second, expected):
    """The first minus the second is 0.00999999999999995."""
    value = first - second
    low, high = value - 0.005, value + 0.005
    assert verdict(differing(value=value, low=low, high=high, second=second)).verdict == expected


def test_without_labels_nothing_but_harm_is_known():
    for value, low, high, collapsed, expected in (
        (0.3, 0.2, 0.4, False, "unknown"),  # what is trained for got better: no news of classes
        (0.0, -0.1, 0.1, False, "unknown"),
        (-0.3, -0.4, -0.2, False, "worse"),
        (0.3, 0.2, 0.4, True, "worse"),
    ):
        comparison = verdict(differing("view retrieval", value, low, high), collapsed=collapsed)
        assert comparison.verdict == expected
        unknown = "cannot be known without labeled test images" in comparison.text
        assert unknown == (expected == "unknown")
        assert "recognized from another view" in comparison.text
        assert ("collapsed" in comparison.text) == collapsed
    nothing = verdict()  # that could be compared
    assert nothing.verdict == "unknown"
    assert nothing.text == "cannot be known without labeled test images"
    assert nothing.findings() == []
    assert verdict(collapsed=True).verdict == "worse"


def test_with_labels_a_collapse_is_said_and_decides_nothing():
    comparison = verdict(differing(value=0.1, low=0.05, high=0.15), collapsed=True)
    assert comparison.verdict == "helped"
    assert "collapsed" in comparison.text


def test_too_few_images_for_a_verdict_are_said_and_the_start_named_where_it_is_better():
    wide = verdict(differing(value=0.02, low=-0.1, high=0.14)).text
    assert "1,000 test images cannot tell whether it is -0.100 or +0.140" in wide
    assert "cannot tell" not in verdict(differing(low=-0.008, high=0.009)).text
    worse = verdict(differing(value=-0.1, low=-0.2, high=-0.05))
    start = Path("runs/x/start.safetensors")
    assert worse.line(start) == (
        "verdict  made it worse: kNN top-1 0.400 against 0.500 of the start "
        "(-0.100 [-0.200, -0.050]); use the start: runs/x/start.safetensors"
    )
    assert "use the start" not in verdict(differing()).line(start)
    evaluation = Evaluation({}, {"encoder": []}, {}, {"start": worse.differences}, start=start)
    plain = evaluation.to_dict()
    assert plain["comparison"]["verdict"] == "worse"
    assert Evaluation.stored(plain, start).lines()[-1] == worse.line(start)


def features(vectors, labels=None, view=None, groups=None):
    none = np.full(len(vectors), -1)
    second = None if view is None else Embeddings(view, none, rows=np.arange(len(view)))
    return Embeddings(vectors, none if labels is None else labels, groups, second_view=second)


def clouds(noise, seed, n=300, dim=8):
    """Images of five classes, whose features are the mean of the class and noise."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 5
    means = 4 * np.eye(5, dim, dtype=np.float32)
    return means[labels] + (noise * rng.normal(size=(n, dim))).astype(np.float32), labels


def tables(new, old, labeled=True, view=0.1):
    """Training and test features of an encoder and its start, from the noise of each."""
    drawn = np.random.default_rng(3).normal(size=(300, 8)).astype(np.float32)

    def of(noise):
        (train, y), (test, y_test) = clouds(noise, 1), clouds(noise, 2)
        second = test + view * noise * drawn
        if not labeled:
            return features(train), features(test, view=second)
        return features(train, y), features(test, y_test, second)

    return {"encoder": of(new), "start": of(old)}


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [(1.0, 3.0, "helped"), (3.0, 1.0, "worse"), (2.0, 2.0, "no difference")],
)
def test_the_better_features_are_named(new, old, expected):
    evaluation = evaluate_tables(tables(new, old), seed=0)
    comparison = evaluation.comparison
    assert comparison.verdict == expected
    decisive = comparison.decisive
    (new, *_), (old, *_) = (evaluation.metrics[table] for table in ("encoder", "start"))
    assert new.name == old.name == "kNN top-1"
    assert (decisive.first, decisive.second) == (new.value, old.value)
    assert decisive.value == pytest.approx(new.value - old.value)
    compared = {d.name for d in comparison.differences}
    assert compared == {"kNN top-1", "linear probe", "view retrieval"}


@pytest.mark.parametrize("labeled", [True, False])
def test_a_start_that_is_kept_differs_in_nothing(labeled):
    comparison = evaluate_tables(tables(2.0, 2.0, labeled), seed=0).comparison
    assert {(each.low, each.high) for each in comparison.differences} == {(0, 0)}
    assert comparison.verdict == "no difference"
    assert "cannot" not in comparison.text


def test_without_a_start_or_the_same_images_there_is_no_verdict():
    encoder, other = tables(1.0, 3.0).values()
    evaluation = evaluate_tables(
        {"encoder": encoder, "untrained": other}, seed=0, protocol=["knn"]
    )
    assert evaluation.comparison is None
    assert "comparison" not in evaluation.to_dict()
    right = {n: share("kNN top-1", np.ones(n, bool), {}) for n in (300, 299)}
    with pytest.raises(DataError, match="different images"):
        difference(right[300], right[299])


def test_baselines_and_teachers_are_compared_image_by_image_too():
    better, worse = tables(1.0, 3.0).values()
    evaluation = evaluate_tables({"encoder": better, "pixels": worse, "teacher": better}, seed=0)
    pixels, teacher = (evaluation.differences[name] for name in ("pixels", "teacher"))
    assert [each.name for each in pixels] == ["kNN top-1", "linear probe", "view retrieval"]
    assert pixels[0].clear == 1
    assert teacher[0].clear == 0
    same, n = teacher[0].first, teacher[0].n
    assert evaluation.kept[0] == (
        f"keeps 1.000 of its teacher's kNN top-1: {same:.3f} of {same:.3f} ({teacher[0]}, {n} "
        "test images)"
    )
    assert len(evaluation.kept) == 2
    assert kept(replace(teacher[0], second=0.0)) == ""


@unchecked()
def test_equal_classifiers_are_called_different_as_rarely_as_the_level_says():
    """By comparing one's interval with the other's value it was 7.2 % on each side."""
    rng, clear = np.random.default_rng(0), []
    for _ in range(600):
        first, second = (share("kNN top-1", rng.random(300) < 0.9, {}) for _ in range(2))
        clear.append(difference(first, second).clear)
    assert 0.005 < np.mean(np.array(clear) == 1) < 0.045


def test_features_that_collapse_are_worse_without_any_label():
    both = tables(1.0, 1.0, labeled=False)
    collapsed = tuple(
        replace(each, vectors=1 + 1e-4 * each.vectors, second_view=None)
        for each in both["encoder"]
    )
    comparison = evaluate_tables(both | {"encoder": collapsed}, seed=0).comparison
    assert comparison.collapsed
    assert comparison.verdict == "worse"
    assert "features have collapsed" in comparison.text
    other = evaluate_tables(tables(1.0, 1.01, labeled=False), seed=0)
    assert other.comparison.verdict == "unknown"


def test_a_view_retrieves_its_own_image_or_one_of_its_group():
    x = np.eye(4, dtype=np.float32)
    view = x[[0, 1, 3, 2]] + 0.1  # the last two are taken for each other
    assert view_retrieval(features(x, view=view))[0].value == 0.5
    assert view_retrieval(features(x, view=view, groups=np.array([0, 1, 2, 2])))[0].value == 1
    assert view_retrieval(features(x)) == []
    x = np.ones((10, 4), np.float32)  # collapsed features retrieve one image
    assert view_retrieval(features(x, view=x))[0].value == 0.1


def test_refits_are_those_of_banks_without_a_whole_group():
    x, y = clouds(1.5, 4)
    groups = np.arange(300) // 100
    train, test = features(x, y, groups=groups), features(*clouds(1.5, 5))
    refits = knn_refits(train, test)
    rest = [train.subset(np.flatnonzero(groups != left_out)) for left_out in range(3)]
    assert {*refits.mean(axis=1).tolist()} == {knn(bank, test)[0].value for bank in rest}


def test_banks_of_other_numbers_of_images_are_independent_samples():
    """Even where both are divided into as many folds; see `jackknife`."""
    bank, test = tables(3.0, 3.0)["encoder"]
    both = {
        name: (bank.subset(np.arange(size)), test)
        for name, size in {"encoder": 60, "pixels": 50}.items()
    }
    new, old = (knn_refits(*pair).astype(float) for pair in both.values())
    assert new.shape == old.shape
    variance = jackknife(new) + jackknife(old)
    assert variance > 2 * jackknife(new - old)
    metrics = {name: knn(*pair)[:1] for name, pair in both.items()}
    (found,) = differences(both, metrics)["pixels"]
    expected = difference(*(each[0] for each in metrics.values()), variance)
    assert (found.low, found.high) == (expected.low, expected.high)


@unchecked()
def test_the_interval_holds_the_truth_about_other_banks_too():
    """Small banks, each drawn anew: without their variance the interval is far too short."""
    repeats, covered, variances = 80, np.zeros(2), []
    pool = {noise: clouds(noise, 9, n=4_000) for noise in (2.0, 3.0)}

    def drawn(seed):
        rng = np.random.default_rng(seed)
        bank, rows = rng.choice(2_000, 20, replace=False), rng.integers(2_000, 4_000, size=400)
        both = {
            name: tuple(features(x[chosen], y[chosen]) for chosen in (bank, rows))
            for name, (x, y) in zip(("encoder", "start"), pool.values(), strict=True)
        }
        metrics = {name: knn(*pair)[:1] for name, pair in both.items()}
        (one,) = differences(both, metrics)["start"]
        return one, difference(*(metrics[name][0] for name in both))

    results = [drawn(seed) for seed in range(repeats)]
    truth = np.mean([one.value for one, _ in results])
    for one, alone in results:
        covered += [each.low <= truth <= each.high for each in (one, alone)]
        variances.append(((one.value - one.low) / 1.96) ** 2)
    assert covered[0] / repeats > 0.88
    assert covered[1] / repeats < 0.85
    spread = np.std([one.value for one, _ in results])
    assert 0.8 * spread < np.mean(variances) ** 0.5 < 1.4 * spread  # nor is it far too long
