"""Whether features follow a column, and what classes owe to it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from types_checked import unchecked

from nearkin.errors import UsageError
from nearkin.evaluation.column import ColumnTest, Known, column_test, remove_column
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.metrics import predict


def parts(seed=0, follow=1.5, related=0.8, n=600, dim=10):
    """Features of three classes and two cameras, of which each class has one more often."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, n)
    camera = np.where(rng.random(n) < related, labels % 2, rng.integers(0, 2, n))
    x = rng.normal(size=(n, dim)) + 2 * np.eye(3, dim)[labels] + follow * np.eye(2, dim, 4)[camera]
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    values, train = np.where(camera, "b", "a"), np.arange(n) < 400

    def part(rows):
        return Embeddings(x[rows], labels[rows], classes=("0", "1", "2"))

    return (part(train), part(~train)), (values[train], values[~train])


def test_a_column_that_features_follow_is_found_and_what_classes_lose_by_it():
    (train, test), values = parts()
    found = column_test("camera", (train, test), values, seed=0)
    assert found.followed
    assert (
        found.metrics[0].value
        == (predict(train.tensor, values[0], test.tensor) == values[1]).mean()
    )
    assert found.metrics[0].value > found.chance + 0.05
    metrics = {metric.name: metric.value for metric in found.metrics}
    right = 0
    for value in ("a", "b"):  # by images of the other camera alone
        bank, rows = values[0] != value, values[1] == value
        predicted = predict(train.tensor[bank], train.labels[bank], test.tensor[rows])
        right += (predicted == test.labels[rows]).sum()
    assert metrics["kNN top-1, other camera"] == pytest.approx(right / len(test))
    assert found.loss.high < 0
    assert metrics["kNN of camera, removed"] < metrics["kNN of camera"] - 0.03
    assert metrics["kNN top-1, other camera, camera removed"] > metrics["kNN top-1, other camera"]
    assert any("features follow it" in line for line in found.lines())
    value, chance = 100 * found.metrics[0].value, 100 * found.chance
    assert found.sentence == (
        f"kNN predicts camera for {value:.1f} % of the test images ({chance:.1f} % by chance "
        "within classes)"
    )
    assert ColumnTest.stored(json.loads(json.dumps(found.to_dict()))) == found


@unchecked()
def test_what_is_not_there_is_seldom_found_though_classes_tell_the_column():
    p = [Known.of("x", *parts(s, follow=0, n=500)).tested(s).p for s in range(60)]
    assert np.mean(np.array(p) <= 0.05) <= 0.1  # 3 of 60 are expected


@unchecked()
def test_images_of_one_group_are_asked_once():
    """Each group is of one camera and of one place: its images are all right, or all wrong."""
    p = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        groups = np.arange(300) // 10
        x = rng.normal(size=(30, 6))[groups] + 0.1 * rng.normal(size=(300, 6))
        x, values = x.astype(np.float32), np.array(["a", "b"])[rng.integers(0, 2, 30)][groups]
        cut = groups < 15
        of = [
            Embeddings(x[rows], np.zeros(rows.sum(), np.int64), groups[rows]).unlabeled()
            for rows in (cut, ~cut)
        ]
        p.append(Known.of("camera", (of[0], of[1]), (values[cut], values[~cut])).tested(0).p)
    assert np.mean(np.array(p) <= 0.05) <= 0.1


def test_a_column_of_one_value_is_refused_and_labels_are_not_needed():
    (train, test), values = parts()
    with pytest.raises(UsageError, match="column site has 1 values among the training images"):
        column_test("site", (train, test), (np.full(400, "x"), values[1]), seed=0)
    found = column_test("camera", (train.unlabeled(), test.unlabeled()), values, seed=0)
    assert found.followed
    assert (found.loss, found.removal, len(found.metrics)) == (None, (), 2)
    assert found.lines()[1].startswith("kNN top-1 with camera removed: not measured, it needs ")


def test_no_more_neighbors_are_named_than_a_bank_has():
    pair, values = parts()
    rows = np.flatnonzero(np.arange(len(pair[0])) < 30)
    few = (pair[0].subset(rows), pair[1]), (values[0][rows], values[1])
    most = np.unique(few[1][0], return_counts=True)[1].max()
    other, any_value = Known.of("camera", *few).across(0)
    assert (other.protocol["k"], any_value.protocol["k"]) == (min(20, most),) * 2
    assert most < 20


def test_classes_are_not_asked_where_training_images_are_of_one():
    (train, test), values = parts()
    for labels, others in ((np.zeros_like(train.labels), test), (train.labels, test.unlabeled())):
        pair = replace(train, labels=labels), others
        found = column_test("camera", pair, values, seed=0)
        assert found.followed
        assert (found.loss, found.removal, len(found.metrics)) == (None, (), 2)


def test_classes_are_not_asked_across_values_where_labeled_images_have_one():
    (train, test), values = parts()
    labels = np.where(values[0] == "a", train.labels, -1)
    pair = Embeddings(train.vectors, labels, classes=train.classes), test
    found = column_test("camera", pair, values, seed=0)
    assert found.loss is None
    assert "by images of another camera: none, as all labeled" in found.lines()[1]
    assert [each.name for each in found.removal] == ["kNN top-1", "linear probe"]


def test_what_is_left_of_a_removed_column_is_asked_of_images_that_the_projection_has_not_seen():
    """In as many dimensions as images, what has been seen would be predicted far below chance."""
    rng, held_out = np.random.default_rng(0), np.arange(200) >= 140
    x = rng.normal(size=(200, 384)).astype(np.float32)
    values, labels = rng.choice(["a", "b"], 200), rng.integers(0, 3, 200)
    features = Embeddings(x, labels, classes=("0", "1", "2")).normalized()
    without, lines = remove_column("camera", features, values, held_out, seed=0)
    pair = tuple(features.subset(np.flatnonzero(part)) for part in (~held_out, held_out))
    tested = column_test("camera", pair, (values[~held_out], values[held_out]), seed=0)
    left = next(each for each in tested.metrics if each.name == "kNN of camera, removed")
    assert f"kNN predicts it for {left} of 60 held-out images" in lines[0]
    assert left.value > 0.4
    assert lines[1] == f"kNN top-1 with camera removed: {tested.removal[0]}"
    others = np.where(held_out, rng.permutation(labels), labels)
    again, _ = remove_column(
        "camera", Embeddings(features.vectors, others, classes=("0", "1", "2")), values, held_out,
        seed=0,
    )  # fmt: skip
    assert (again.vectors == without.vectors).all()
