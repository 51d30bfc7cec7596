"""Which class an image belongs to and how sure that is, recomputed image by image."""

import math
from dataclasses import replace

import numpy as np
import pytest
from discoveries import build_predictions, learned, softmax, unit

from nearkin.classifier import assignments as module
from nearkin.classifier.assignments import COLUMNS, NUMBERS
from nearkin.classifier.calibration import Calibration, calibrated
from nearkin.tables import read_csv, write_csv
from nearkin.types import UNLABELED

KNOWN, CLASSES, VIEWS = 2, 5, 8


def predict(features, probability, label, **options):
    return build_predictions(unit(np.asarray(features, float)), probability, label, **options)


def some(n=80, *, seed=0, dim=6):
    """Every third image has a label; the views are often of another opinion."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, CLASSES))
    label = np.where(np.arange(n) % 3 == 0, rng.integers(0, KNOWN, n), UNLABELED)
    views = logits + rng.normal(size=(VIEWS, n, CLASSES))
    return predict(rng.normal(size=(n, dim)), softmax(logits), label, by_view=views.argmax(axis=2))


def heaps(sizes, *, labeled=10, dim=10):
    """Features around an axis for each class, images with labels first, all of them sure."""
    label = [c for c in range(KNOWN) for _ in range(labeled)]
    number = np.array(label + [c for c, size in enumerate(sizes) for _ in range(size)])
    features = 8 * np.eye(dim)[number] + np.random.default_rng(0).normal(size=(len(number), dim))
    label = np.array(label + [UNLABELED] * sum(sizes))
    return predict(features, 0.02 + 0.9 * np.eye(len(sizes))[number], label)


def assign(predictions, calibration=None):
    """As the run that has learned from these very images would assign them."""
    return module.assign(predictions, learned(predictions), calibration)


def flags(predictions, reference=None):
    assigned = module.assign(predictions, reference or learned(predictions))
    return dict(zip(assigned.paths, assigned.flag))


@pytest.mark.parametrize("seed", range(3))
def test_the_columns_are_what_they_say(seed):
    predictions = some(seed=seed)
    assigned = assign(predictions)
    rows = [r for r in range(80) if predictions.label[r] == UNLABELED]
    assert assigned.paths == [f"{r}.png" for r in rows]
    features, cluster = predictions.features, predictions.probability.argmax(axis=1)
    own = np.where(predictions.label == UNLABELED, cluster, predictions.label)
    means = [unit(features[predictions.label == c].mean(axis=0)) for c in range(KNOWN)]
    for i, r in enumerate(rows):
        p = sorted(predictions.probability[r].tolist(), reverse=True)
        assert assigned.cluster[i] == cluster[r]
        assert assigned.score[i] == pytest.approx(p[0])
        assert assigned.margin[i] == pytest.approx(p[0] - p[1])
        assert assigned.entropy[i] == pytest.approx(-sum(x * math.log(x, CLASSES) for x in p))
        agree = sum(predictions.by_view[v, r] == cluster[r] for v in range(VIEWS))
        assert assigned.view_agreement[i] == pytest.approx(agree / VIEWS)
        others = sorted((x for x in range(80) if x != r), key=lambda x: -features[x] @ features[r])
        same = [own[x] == cluster[r] for x in others[:20]]
        assert assigned.neighbor_agreement[i] == pytest.approx(sum(same) / 20)
        likeness = [float(mean @ features[r]) for mean in means]
        assert assigned.nearest_known[i] == np.argmax(likeness)
        assert assigned.similarity[i] == pytest.approx(max(likeness))


def test_an_impossible_class_does_not_count_and_a_single_possible_one_is_certain():
    evenly = [[0.0, 0.0, 1 / 3, 1 / 3, 1 / 3]] * 3
    assigned = assign(predict(np.eye(3), evenly, [UNLABELED] * 3))
    assert assigned.entropy == pytest.approx(1)
    assert assigned.margin == pytest.approx(0)
    for classes in (1, 3):
        only = np.eye(classes)[[classes - 1] * 4]
        assigned = assign(predict(np.eye(4), only, [UNLABELED] * 4, num_known=classes - 1))
        certain = {"score": 1, "margin": 1, "entropy": 0, "neighbor_agreement": 1}
        for column, value in certain.items():
            np.testing.assert_array_equal(getattr(assigned, column), value)


def test_a_calibration_changes_how_sure_a_image_is_but_not_its_class():
    predictions = some()
    hot = Calibration(3.0, num_images=9, error_before=0.3, error_after=0.1)
    plain, heated = assign(predictions), assign(predictions, hot)
    np.testing.assert_array_equal(heated.cluster, plain.cluster)
    assert (heated.score < plain.score).all()
    assert (heated.entropy > plain.entropy).all()
    honest = calibrated(predictions.probability, hot)[predictions.label == UNLABELED]
    np.testing.assert_allclose(heated.score, honest.max(axis=1))


def test_a_known_class_without_a_labeled_image_is_nobodys_nearest_and_without_labels_none_is():
    label = [0, 0, UNLABELED, UNLABELED]
    features = [[1, 0], [1, 0], [-1, 0.1], [-1, 0]]
    assigned = assign(predict(features, np.eye(CLASSES)[[0, 0, 2, 2]], label))
    assert assigned.nearest_known.tolist() == [0, 0]
    assert (assigned.similarity < -0.9).all()
    predictions = predict(np.eye(4), softmax(np.eye(4)), [UNLABELED] * 4, num_known=0)
    assigned = assign(predictions)
    assert assigned.nearest_known.tolist() == [UNLABELED] * 4
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
    label = [0] * 3 + [1] * 3 + [UNLABELED] * 5
    assigned = assign(predict(features, np.eye(3)[[0] * 3 + [1] * 3 + [2] * 5], label))
    assert [flag == "maybe-known" for flag in assigned.flag] == [False] * 4 + [True]


def test_a_row_depends_on_its_image_and_on_what_was_learned_alone():
    """Not on the images that are asked about with it, nor on labels that were not learned from."""
    predictions = some()
    rows = np.arange(0, 80, 2)
    reference = learned(predictions, rows)
    together = list(module.assign(predictions, reference).table())
    unlabeled = np.flatnonzero(predictions.label == UNLABELED)
    for row, expected in zip(unlabeled, together, strict=True):
        alone = replace(
            predictions,
            paths=(predictions.paths[row],),
            probability=predictions.probability[[row]],
            by_view=predictions.by_view[:, [row]],
            features=predictions.features[[row]],
            label=predictions.label[[row]],
            distance=predictions.distance[[row]],
            outlier=predictions.outlier[[row]],
        )
        assert list(module.assign(alone, reference).table()) == [expected]
    held_out = (predictions.label != UNLABELED) & ~np.isin(np.arange(80), rows)
    label = np.where(held_out, KNOWN - 1 - predictions.label, predictions.label)
    other = module.assign(replace(predictions, label=label), reference)
    assert list(other.table()) == together


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


def test_an_image_like_no_class_is_flagged_whatever_else_it_is():
    predictions = heaps([12, 12, 30, 30, 30])
    far = np.arange(len(predictions.paths)) % 2 == 0
    flag = assign(replace(predictions, outlier=far)).flag
    assert [each == "outlier" for each in flag] == far[predictions.label == UNLABELED].tolist()
    assert "outlier" not in flags(predictions).values()


def test_no_image_without_a_label_gives_no_rows():
    assigned = assign(predict(np.eye(3), np.eye(3), [0, 1, 0]))
    assert [*assigned.paths, *assigned.flag, *assigned.table()] == []
    columns = assigned.cluster, assigned.neighbor_agreement, assigned.similarity
    assert {column.shape for column in columns} == {(0,)}


def test_equal_and_empty_features_are_no_reason_to_fail():
    predictions = predict(np.ones((6, 3)), softmax(np.eye(6)[:, :4]), [0, 1] + [UNLABELED] * 4)
    for features in (predictions.features, np.zeros((6, 3))):
        predictions.features[:] = features
        assigned = assign(predictions)
        for name in ("score", "margin", "entropy", "neighbor_agreement", "similarity"):
            assert np.isfinite(getattr(assigned, name)).all(), name


def test_the_table_holds_plain_values_of_four_digits(tmp_path):
    for dtype in (np.float32, np.float64):
        p = some()
        p = replace(p, probability=p.probability.astype(dtype), features=p.features.astype(dtype))
        assigned = assign(p)
        write_csv(tmp_path / "assignments.csv", COLUMNS, assigned.table())
        read = list(read_csv(tmp_path / "assignments.csv"))
        assert [row["path"] for row in read] == assigned.paths
        assert [row["cluster"] for row in read] == [p.classes[c] for c in assigned.cluster]
        for name in NUMBERS:
            assert max(len(row[name].lstrip("-")) for row in read) <= len("0.1234")
            cells = [float(row[name]) for row in read]
            np.testing.assert_allclose(cells, getattr(assigned, name), atol=6e-5)
