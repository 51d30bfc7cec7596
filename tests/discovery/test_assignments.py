"""Which class an image belongs to and how sure that is, recomputed image by image."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from discoveries import build_predictions, softmax, unit
from sklearn.datasets import load_digits

from nearkin.discovery.assignments import (
    COLUMNS,
    assign,
    describe_clusters,
    label_first,
    reference_of,
)
from nearkin.discovery.classifier import Calibration
from nearkin.tables import read_csv, write_csv
from nearkin.types import UNKNOWN

KNOWN, CLASSES, VIEWS = 2, 5, 8


def predict(features, probability, label, **options):
    return build_predictions(unit(np.asarray(features, float)), probability, label, **options)


def some(n=80, *, seed=0, dim=6):
    """Every third image has a label; the views are often of another opinion."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, CLASSES))
    label = np.where(np.arange(n) % 3 == 0, rng.integers(0, KNOWN, n), UNKNOWN)
    views = logits + rng.normal(size=(VIEWS, n, CLASSES))
    return predict(rng.normal(size=(n, dim)), softmax(logits), label, by_view=views.argmax(axis=2))


def heaps(sizes, *, labeled=10, dim=10):
    """Features around an axis for each class, images with labels first, all of them sure."""
    label = [c for c in range(KNOWN) for _ in range(labeled)]
    number = np.array(label + [c for c, size in enumerate(sizes) for _ in range(size)])
    features = 8 * np.eye(dim)[number] + np.random.default_rng(0).normal(size=(len(number), dim))
    label = np.array(label + [UNKNOWN] * sum(sizes))
    return predict(features, 0.02 + 0.9 * np.eye(len(sizes))[number], label)


def flags(predictions):
    return dict(zip(assign(predictions).paths, assign(predictions).flag))


@pytest.mark.parametrize("seed", range(3))
def test_the_columns_are_what_they_say(seed):
    predictions = some(seed=seed)
    assigned = assign(predictions)
    rows = [r for r in range(80) if predictions.label[r] == UNKNOWN]
    assert assigned.paths == [f"{r}.png" for r in rows]
    features, cluster = predictions.features, predictions.probability.argmax(axis=1)
    means = [unit(features[predictions.label == c].mean(axis=0)) for c in range(KNOWN)]
    for i, r in enumerate(rows):
        p = sorted(predictions.probability[r].tolist(), reverse=True)
        assert assigned.cluster[i] == cluster[r]
        assert assigned.score[i] == pytest.approx(p[0])
        assert assigned.margin[i] == pytest.approx(p[0] - p[1])
        assert assigned.entropy[i] == pytest.approx(-sum(x * math.log(x, CLASSES) for x in p))
        agree = sum(predictions.by_view[v, r] == cluster[r] for v in range(VIEWS))
        assert assigned.agreement[i] == pytest.approx(agree / VIEWS)
        others = sorted((x for x in rows if x != r), key=lambda x: -features[x] @ features[r])
        same = [cluster[x] == cluster[r] for x in others[:20]]
        assert assigned.purity[i] == pytest.approx(sum(same) / 20)
        likeness = [float(mean @ features[r]) for mean in means]
        assert assigned.nearest_known[i] == np.argmax(likeness)
        assert assigned.similarity[i] == pytest.approx(max(likeness))


def test_an_impossible_class_does_not_count_and_a_single_possible_one_is_certain():
    evenly = [[0.0, 0.0, 1 / 3, 1 / 3, 1 / 3]] * 3
    assigned = assign(predict(np.eye(3), evenly, [UNKNOWN] * 3))
    assert assigned.entropy == pytest.approx(1)
    assert assigned.margin == pytest.approx(0)
    for classes in (1, 3):
        only = np.eye(classes)[[classes - 1] * 4]
        assigned = assign(predict(np.eye(4), only, [UNKNOWN] * 4, num_known=classes - 1))
        for column, value in (("score", 1), ("margin", 1), ("entropy", 0), ("purity", 1)):
            np.testing.assert_array_equal(getattr(assigned, column), value)


def test_a_calibration_changes_how_sure_a_image_is_but_not_its_class():
    predictions = some()
    hot = Calibration(3.0, num_images=9, error_before=0.3, error_after=0.1)
    plain, calibrated = assign(predictions), assign(predictions, calibration=hot)
    np.testing.assert_array_equal(calibrated.cluster, plain.cluster)
    assert (calibrated.score < plain.score).all()
    assert (calibrated.entropy > plain.entropy).all()
    honest = hot.apply(predictions.probability)[predictions.label == UNKNOWN]
    np.testing.assert_allclose(calibrated.score, honest.max(axis=1))


def test_a_known_class_without_a_labeled_image_is_nobodys_nearest_and_without_labels_none_is():
    label = [0, 0, UNKNOWN, UNKNOWN]
    features = [[1, 0], [1, 0], [-1, 0.1], [-1, 0]]
    assigned = assign(predict(features, np.eye(CLASSES)[[0, 0, 2, 2]], label))
    assert assigned.nearest_known.tolist() == [0, 0]
    assert (assigned.similarity < -0.9).all()
    predictions = predict(np.eye(4), softmax(np.eye(4)), [UNKNOWN] * 4, num_known=0)
    assigned = assign(predictions)
    assert assigned.nearest_known.tolist() == [UNKNOWN] * 4
    assert np.isnan(assigned.similarity).all()
    assert "maybe-known" not in assigned.flag
    for row in assigned.table():
        named = dict(zip(COLUMNS, row))
        assert (named["nearest_known"], named["similarity"]) == ("", None)


def test_a_image_is_core_or_on_the_border_by_its_views_its_margin_and_its_neighbors():
    assert set(flags(heaps([12, 12, 30, 30, 30])).values()) == {"core"}
    predictions = heaps([0, 0, 30, 30, 30])
    predictions.by_view[:3, 20] = 4  # of class 2, and 5 of 8 views are left
    predictions.by_view[:2, 21] = 4  # 6 of 8: neither core nor border
    predictions.probability[23] = [0.0, 0.0, 0.55, 0.45, 0.0]
    predictions.probability[24] = [0.0, 0.0, 0.65, 0.35, 0.0]
    predictions.features[25] = predictions.features[60]  # of class 2, in the middle of class 3
    flag = flags(predictions)
    expected = ["border", "", "core", "border", "", ""]
    assert [flag[f"{row}.png"] for row in range(20, 26)] == expected


def test_a_image_that_lies_with_a_known_class_may_be_known():
    predictions = heaps([10, 0, 30, 30, 30])
    predictions.features[40] = predictions.features[0]  # assigned to class 2, looks like class 0
    assigned = assign(predictions)
    row = assigned.paths.index("40.png")
    assert assigned.classes[assigned.cluster[row]] == "new-1"
    assert assigned.classes[assigned.nearest_known[row]] == "animal 0"
    assert assigned.flag.count("maybe-known") == 1
    assert assigned.flag[row] == "maybe-known"


def test_a_image_does_not_vouch_for_itself():
    """With itself in the mean of its class of five, it would seem to be more like that."""
    novel = np.array([[0, 0, 1.0]] * 4 + [unit(np.array([0.72, 0, 0.70]))])
    to_known, to_own, to_others = (
        novel[4] @ unit(mean) for mean in ([1, 0, 0], novel.mean(axis=0), novel[:4].mean(axis=0))
    )
    assert to_own > to_known > to_others
    features = [[1.0, 0, 0]] * 3 + [[0.0, 1, 0]] * 3 + novel.tolist()
    label = [0] * 3 + [1] * 3 + [UNKNOWN] * 5
    assigned = assign(predict(features, np.eye(3)[[0] * 3 + [1] * 3 + [2] * 5], label))
    assert assigned.flag == ("core",) * 4 + ("maybe-known",)


def test_labels_of_images_that_were_not_learned_from_decide_nothing():
    """They are what known classes are scored on: no flag may depend on them."""
    predictions = some()
    learned = np.arange(80) % 2 == 0
    held_out = (predictions.label != UNKNOWN) & ~learned
    label = np.where(held_out, KNOWN - 1 - predictions.label, predictions.label)
    one, other = (
        assign(replace(predictions, label=each, learned=learned))
        for each in (predictions.label, label)
    )
    assert list(one.table()) == list(other.table())
    assert [c.nearest_known for c in describe_clusters(one)] == [
        c.nearest_known for c in describe_clusters(other)
    ]
    assert list(one.table()) != list(assign(predictions).table())


def test_tiny_is_below_five_or_a_tenth_of_the_usual():
    for sizes, tiny in (
        ([0, 0, 30, 30, 4], {4}),
        ([0, 0, 30, 30, 5], set()),
        ([0, 0, 80, 80, 7], {4}),
        ([0, 0, 80, 80, 8], set()),
        ([0, 0, 1, 1, 1], {2, 3, 4}),
        ([200, 200, 9, 9, 200], set()),  # the size of known ones says nothing about novel ones
        ([3, 0, 30, 30, 30], set()),  # a known class may have few
        ([3, 0, 0, 0, 0], set()),
        ([0, 0, 30, 0, 0], set()),  # empty classes are not usual ones
    ):
        assigned = assign(heaps(sizes, dim=12))
        flagged = np.array([flag == "tiny-cluster" for flag in assigned.flag])
        assert set(assigned.cluster[flagged].tolist()) == tiny, sizes
        assert flagged[np.isin(assigned.cluster, [*tiny])].all(), sizes


def pixels(classes, rows=slice(0, 40)):
    """Pixels of digits as features, and their classes."""
    x, y = load_digits(return_X_y=True)
    chosen = np.concatenate([np.flatnonzero(y == number)[rows] for number in classes])
    return x[chosen].astype(np.float32), y[chosen]


def test_an_image_is_compared_with_the_means_of_its_class_without_itself_and_of_the_others():
    features, cluster = pixels(range(4))
    reference = reference_of(features, cluster, 5)
    x = unit(features)
    nearest = []
    for row in range(len(x)):
        others = np.arange(len(x)) != row
        means = [unit(x[others & (cluster == number)].sum(axis=0)) for number in range(4)]
        nearest.append(max(mean @ x[row] for mean in means))
    whole = [unit(x[cluster == number].sum(axis=0)) for number in range(4)]
    np.testing.assert_allclose(reference.means[:4], whole, atol=1e-6)
    assert reference.min_similarity == pytest.approx(np.quantile(nearest, 0.01), abs=1e-6)
    assert not reference.means[4].any()


def test_new_images_of_the_classes_are_rarely_flagged_and_others_nearly_always():
    features, cluster = pixels(range(1, 10), slice(0, 120))
    reference = reference_of(features, cluster, 10)
    genuine, _ = pixels(range(1, 10), slice(120, None))
    rate = reference.unlike(torch.from_numpy(genuine)).mean()
    assert 0 < rate < 0.05
    transposed = genuine.reshape(-1, 8, 8).transpose(0, 2, 1).reshape(genuine.shape)
    assert reference.unlike(torch.from_numpy(transposed)).mean() > 0.9
    features, cluster = pixels(range(2), slice(0, 9))  # which are too few to say anything
    assert not reference_of(features, cluster, 2).unlike(torch.from_numpy(-features)).any()


def test_an_image_like_no_class_is_flagged_whatever_else_it_is():
    predictions = heaps([12, 12, 30, 30, 30])
    unlike = np.arange(len(predictions.paths)) % 2 == 0
    flag = assign(replace(predictions, unlike=unlike)).flag
    expected = unlike[predictions.label == UNKNOWN].tolist()
    assert [each == "unlike" for each in flag] == expected
    assert "unlike" not in flags(predictions).values()


def test_no_image_without_a_label_gives_no_rows():
    assigned = assign(predict(np.eye(3), np.eye(3), [0, 1, 0]))
    assert [*assigned.paths, *assigned.flag, *assigned.table()] == []
    assert assigned.cluster.shape == assigned.purity.shape == assigned.similarity.shape == (0,)


def test_one_image_has_no_neighbors_and_equal_and_empty_features_are_no_reason_to_fail():
    assigned = assign(predict(np.eye(3), np.eye(3), [0, 1, UNKNOWN]))
    assert np.isnan(assigned.purity).all()
    assert assigned.flag == ("tiny-cluster",)
    assert dict(zip(COLUMNS, next(assigned.table())))["purity"] is None
    predictions = predict(np.ones((6, 3)), softmax(np.eye(6)[:, :4]), [0, 1] + [UNKNOWN] * 4)
    for features in (predictions.features, np.zeros((6, 3))):
        predictions.features[:] = features
        assigned = assign(predictions)
        for name in ("score", "margin", "entropy", "purity", "similarity"):
            assert np.isfinite(getattr(assigned, name)).all(), name


def test_the_least_certain_image_of_each_class_is_to_be_labeled_first():
    """Known classes take turns, and an image that is not learned from has none."""
    certain = np.array([0.9, 0.6, 0.5, 0.7, 0.8, 0.55])  # the margins: .8, .2, 0, .4, .6, .1
    probability = np.stack([certain, 1 - certain], axis=1)
    probability[3:5] = probability[3:5, ::-1]  # of the other class
    features = np.random.default_rng(0).normal(size=(6, 3))
    assignments = assign(predict(features, probability, np.full(6, UNKNOWN), num_known=2))
    learned = np.array([0, 1, 3, 4, 5])
    assert label_first(assignments, learned).tolist() == [5, 3, 1, 4, 0]


def test_a_typical_image_of_each_novel_class_is_to_be_labeled_before():
    """It is no image that is held out, though one is more typical, and an empty class has none."""
    angle = np.radians([10, 4, 5, 92, 80, 90])
    features = np.stack([np.cos(angle), np.sin(angle), np.zeros(6)], axis=1)
    margins = np.array([0.2, 0.8, 0.4, 0.1, 0.6, 0.3])
    probability = np.zeros((6, 4))
    for row, (number, margin) in enumerate(zip([1, 1, 1, 2, 2, 2], margins, strict=True)):
        probability[row, [number, 0]] = (1 + margin) / 2, (1 - margin) / 2
    assignments = assign(predict(features, probability, np.full(6, UNKNOWN), num_known=1))
    learned = np.array([0, 1, 3, 4, 5])  # not 2, the medoid of its class
    assert label_first(assignments, learned).tolist() == [1, 5, 3, 0, 4]


def test_the_table_holds_plain_values_of_four_digits(tmp_path):
    for dtype in (np.float32, np.float64):
        p = some()
        p = replace(p, probability=p.probability.astype(dtype), features=p.features.astype(dtype))
        assigned = assign(p)
        write_csv(tmp_path / "assignments.csv", COLUMNS, assigned.table())
        read = list(read_csv(tmp_path / "assignments.csv"))
        assert [row["path"] for row in read] == assigned.paths
        assert [row["cluster"] for row in read] == [p.classes[c] for c in assigned.cluster]
        for name in ("score", "margin", "entropy", "agreement", "purity", "similarity"):
            assert max(len(row[name].lstrip("-")) for row in read) <= len("0.1234")
            cells = [float(row[name]) for row in read]
            np.testing.assert_allclose(cells, getattr(assigned, name), atol=6e-5)
