"""The classes that were found: their columns restated, and which of them may be one class."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from discoveries import build_predictions, learned, softmax, unit
from hypothesis import given
from hypothesis import strategies as st

from nearkin.classifier.assignments import assign as assign_by
from nearkin.classifier.assignments import typical
from nearkin.discovery import clusters as module
from nearkin.discovery.clusters import (
    CLUSTER_COLUMNS,
    cluster_table,
    describe_clusters,
    label_first,
    one_class,
)
from nearkin.tables import read_csv, write_csv
from nearkin.types import UNLABELED

KNOWN = 2


def predict(features, logits, label, num_known=KNOWN):
    return build_predictions(unit(features), softmax(logits), label, num_known, num_views=3)


def by_direction(x, directions, label, **options):
    """As a linear classifier would have it: the class is the nearest direction."""
    return predict(x, 10 * unit(x) @ unit(directions).T, label, **options)


def blobs(sizes, *, apart=6.0, dim=8, seed=0, labeled=10):
    """A blob for each class on an axis of its own; the first images of known ones labeled."""
    rng = np.random.default_rng(seed)
    number = [c for c in range(KNOWN) for _ in range(labeled)]
    number += [c for c, size in enumerate(sizes) for _ in range(size)]
    label = [c for c in range(KNOWN) for _ in range(labeled)] + [UNLABELED] * sum(sizes)
    axes = apart * np.eye(dim)[: len(sizes)]
    x = axes[number] + rng.normal(size=(len(number), dim))
    return by_direction(x, axes, label)


def assign(predictions):
    return assign_by(predictions, learned(predictions))


def describe(predictions, others=()):
    return describe_clusters(assign(predictions), learned(predictions), others)


def silhouette(x, cluster):
    """Rousseeuw 1987, with the distance 1 - cosine, image by image."""
    distance, values = 1 - x @ x.T, np.zeros(len(cluster))
    for i, own in enumerate(cluster):
        mates = [j for j in np.flatnonzero(cluster == own) if j != i]
        if mates:
            inside = distance[i, mates].mean()
            outside = min(distance[i, cluster == c].mean() for c in set(cluster) - {own})
            values[i] = (outside - inside) / max(inside, outside)
    return values


def jaccard(a, b):
    return len(a & b) / len(a | b)


def members(cluster):
    return [set(np.flatnonzero(cluster == c).tolist()) for c in np.unique(cluster)]


def test_the_columns_are_what_they_say():
    predictions = blobs([12, 0, 20, 30, 9], apart=2.0)
    assigned = assign(predictions)
    x = predictions.features[predictions.label == UNLABELED]
    rng = np.random.default_rng(5)
    others = [rng.permutation(9)[assigned.cluster], rng.integers(0, 4, len(x))]
    others[0][::4] = 3
    means = [predictions.features[predictions.label == c].mean(axis=0) for c in range(KNOWN)]
    values = silhouette(x, assigned.cluster)
    described = describe(predictions, others)
    assert [c.number for c in described] == sorted(set(assigned.cluster.tolist()))
    for cluster in described:
        own = np.flatnonzero(assigned.cluster == cluster.number)
        assert cluster.name == predictions.classes[cluster.number]
        assert cluster.kind == ("known" if cluster.number < KNOWN else "novel")
        assert cluster.size == len(own)
        assert cluster.score == pytest.approx(assigned.score[own].mean())
        assert cluster.silhouette == pytest.approx(values[own].mean())
        to_all = (x[own] @ x[own].T).sum(axis=1)
        assert to_all[own == cluster.medoid] == pytest.approx(to_all.max())
        best = [max(jaccard(set(own.tolist()), m) for m in members(o)) for o in others]
        assert cluster.seed_agreement == pytest.approx(sum(best) / 2)
        likeness = [unit(mean) @ x[own].mean(axis=0) for mean in means]
        assert cluster.nearest_known == predictions.classes[int(np.argmax(likeness))]


def test_classes_found_again_under_other_numbers_are_stable_and_halves_half_so():
    predictions = blobs([0, 0, 20, 30, 9])
    cluster = assign(predictions).cluster
    assert [c.seed_agreement for c in describe(predictions, [7 - cluster, cluster])] == [1, 1, 1]
    assert [c.seed_agreement for c in describe(predictions)] == [None, None, None]
    halved = np.where(np.arange(len(cluster)) < 10, 7, cluster)  # half of the first class
    assert [c.seed_agreement for c in describe(predictions, [halved])] == [0.5, 1, 1]


def test_many_images_are_thinned_out_evenly_for_the_silhouette(monkeypatch):
    predictions = blobs([0, 0, 300, 60, 10], apart=5.0)
    whole = [c.silhouette for c in describe(predictions)]
    monkeypatch.setattr(module, "SILHOUETTE_IMAGES", 180)
    assigned = assign(predictions)
    own = [np.flatnonzero(assigned.cluster == c) for c in (2, 3, 4)]
    assert [len(o) for o in own] == [300, 60, 10]
    drawn = np.concatenate([own[0][np.linspace(0, 299, 60).round().astype(int)], *own[1:]])
    x, cluster = predictions.features[predictions.label == UNLABELED], assigned.cluster[drawn]
    values = silhouette(x[drawn], cluster)
    thinned = [c.silhouette for c in describe(predictions)]
    assert thinned == pytest.approx([values[cluster == c].mean() for c in (2, 3, 4)])
    assert thinned == pytest.approx(whole, abs=0.05)


def test_the_most_typical_come_first_and_the_medoid_before_all():
    predictions = blobs([0, 0, 20, 30, 9], apart=2.0)
    assigned = assign(predictions)
    for cluster in describe(predictions):
        order = typical(assigned, cluster.number)
        assert order[0] == cluster.medoid
        assert sorted(order) == np.flatnonzero(assigned.cluster == cluster.number).tolist()
        x = predictions.features[predictions.label == UNLABELED][order]
        assert (np.diff(x @ unit(x.mean(axis=0))) <= 1e-12).all()


def test_classes_of_no_one_or_two_images_are_described():
    for sizes in ((0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 1, 1), (0, 0, 2, 1), (1, 0, 2, 2)):
        described = describe(blobs(sizes))
        assert [c.size for c in described] == [s for c, s in enumerate(sizes) if s or c >= KNOWN]
        several = sum(s > 0 for s in sizes) > 1
        for c in described:
            empty = c.size == 0
            assert (c.score is None) == (c.medoid is None) == (c.nearest_known == "") == empty
            assert (c.silhouette is not None) == (c.size >= 2 and several)
            assert c.silhouette is None or math.isfinite(c.silhouette)
            assert c.merge == ()


def test_a_dead_class_has_empty_cells(tmp_path):
    predictions = blobs([0, 0, 20, 0, 9])
    assigned = assign(predictions)
    described = describe(predictions, [assigned.cluster])
    write_csv(tmp_path / "clusters.csv", CLUSTER_COLUMNS, cluster_table(described, assigned))
    first, dead, _ = read_csv(tmp_path / "clusters.csv")
    filled = {name: cell for name, cell in dead.items() if cell}
    assert filled == {"cluster": "new-2", "kind": "novel", "size": "0"}
    assert first["cluster"] == "new-1"
    assert (first["name"], first["size"], first["seed_agreement"]) == ("", "20", "1.0")
    assert first["medoid"] == assigned.paths[described[0].medoid]
    assert float(first["silhouette"]) == round(described[0].silhouette, 4)


def test_without_labels_no_known_class_is_near_and_without_others_all_novel_ones_are_empty():
    x = np.random.default_rng(0).normal(size=(30, 4))
    described = describe(by_direction(x, np.eye(4), [UNLABELED] * 30, num_known=0))
    assert [c.nearest_known for c in described] == [""] * 4
    described = describe(predict(np.eye(4), np.eye(4), [0, 1, 0, 1]), [np.empty(0, dtype=int)])
    assert [(c.size, c.seed_agreement) for c in described] == [(0, None), (0, None)]


def halved(seed, *, dim=16, n=120, parts=((1, 0), (-1, 0))):
    """Three novel blobs, the last of them cut by a classifier with a direction for each part."""
    rng = np.random.default_rng(seed)
    axes = 8.0 * np.eye(dim)[:5]
    cut = [axes[4] + dim**0.5 * (p * np.eye(dim)[6] + q * np.eye(dim)[7]) for p, q in parts]
    number = np.repeat(np.arange(5), n)
    label = np.where((number < KNOWN) & (np.arange(5 * n) % 2 == 0), number, UNLABELED)
    x = axes[number] + rng.normal(size=(5 * n, dim))
    return by_direction(x, np.stack([*axes[:4], *cut]), label)


def suggested(predictions):
    return {c.name: set(c.merge) for c in describe(predictions) if c.merge}


def test_two_halves_of_one_blob_may_be_one_class_and_separate_blobs_may_not():
    for seed, dim in itertools.product(range(3), (8, 64, 256)):
        predictions = halved(seed, dim=dim)
        assert np.bincount(assign(predictions).cluster)[4:].min() > 20
        assert suggested(predictions) == {"new-3": {"new-4"}, "new-4": {"new-3"}}, (seed, dim)
    corners = [(math.cos(t), math.sin(t)) for t in (0, 2 * math.pi / 3, 4 * math.pi / 3)]
    names = {"new-3", "new-4", "new-5"}  # of three parts all may be one class
    for seed in range(3):
        suggestions = suggested(halved(seed, n=400, parts=corners))
        assert suggestions == {name: names - {name} for name in names}


def test_blobs_that_do_not_touch_are_kept_apart_even_if_each_is_the_others_second_choice():
    """A pair nearer to each other than to all else."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        axes = 20.0 * np.eye(8)[:4]
        axes[3] = axes[2] + 6 * np.eye(8)[3]
        number = np.repeat([0, 1, 2, 3], 60)
        x = axes[number] + rng.normal(size=(240, 8))
        predictions = by_direction(x, axes, [*number[:120], *[UNLABELED] * 120])
        second = predictions.probability[120:].argsort(axis=1)[:, -2]
        assert (second == np.repeat([3, 2], 60)).mean() > 0.9
        assert suggested(predictions) == {}


def test_halves_that_are_nobodys_second_choice_are_not_suggested():
    predictions = halved(0)
    p = predictions.probability
    p[:] = 0.8 * np.eye(6)[p.argmax(axis=1)] + 0.2 * np.eye(6)[0]
    assert suggested(predictions) == {}
    # Who is certain has no second choice.
    x = np.array([5.0, 0, 0]) + np.random.default_rng(0).normal(size=(80, 3))
    predictions = by_direction(x, np.array([[5, 2, 0], [5, -2, 0]]), [UNLABELED] * 80, num_known=0)
    assert suggested(predictions) == {"new-1": {"new-2"}, "new-2": {"new-1"}}
    predictions.probability[:] = np.eye(2)[predictions.cluster]
    assert suggested(predictions) == {}


def test_only_novel_classes_are_suggested_in_whatever_order_classes_and_images_are():
    """The halves get known numbers: what is known is two classes, however alike they look."""
    predictions = halved(0)
    label = np.where(predictions.label == UNLABELED, UNLABELED, predictions.label + 2)
    label = np.where(label < KNOWN, label, UNLABELED)
    swapped = predictions.probability[:, [4, 5, 0, 1, 2, 3]]
    assert suggested(replace(predictions, probability=swapped, label=label)) == {}
    predictions = halved(1)
    order, shuffled = [0, 1, 5, 3, 4, 2], np.random.default_rng(0).permutation(600)
    permuted = replace(
        predictions,
        probability=predictions.probability[shuffled][:, order],
        features=predictions.features[shuffled],
        label=predictions.label[shuffled],
    )
    assert suggested(permuted) == {"new-1": {"new-3"}, "new-3": {"new-1"}}


def test_collapsed_features_make_every_pair_of_second_choices_one_class():
    for value in (0.0, 1.0):
        predictions = blobs([0, 0, 20, 20])
        predictions.features[:] = value * unit(np.ones(8))
        predictions.probability[:, :KNOWN] = 0
        assert suggested(predictions) == {"new-1": {"new-2"}, "new-2": {"new-1"}}


def test_a_heap_cut_in_the_middle_is_one_class():
    rng = np.random.default_rng(0)
    heaps = [draw(size=4000) for draw in (rng.normal, rng.laplace, rng.uniform)]
    for heap, sd in itertools.product([*heaps, rng.triangular(-1, 0, 1, 4000)], (1.0, 5.0)):
        x = 7 + sd * (heap - np.median(heap))
        assert one_class(x[x > 7], x[x <= 7])


@given(seed=st.integers(0, 9), sizes=st.tuples(st.integers(200, 900), st.integers(200, 900)))
def test_two_heaps_are_one_class_only_if_they_are_near(seed, sizes):
    rng = np.random.default_rng(seed)
    a, b = (rng.normal(size=size) for size in sizes)
    assert one_class(a + 1.3, b - 1.3)
    assert one_class(1.3 - b, -1.3 - a)
    assert not one_class(a + 2.1, b - 2.1)
    assert one_class(a, a)
    assert one_class(b - 1, a + 1)  # even on the wrong sides


def plain(features, probability, label, num_known):
    return build_predictions(unit(features), probability, label, num_known)


def test_the_least_certain_image_of_each_class_is_to_be_labeled_first():
    """Known classes take turns, and an image that is not learned from has none."""
    certain = np.array([0.9, 0.6, 0.5, 0.7, 0.8, 0.55])  # the margins: .8, .2, 0, .4, .6, .1
    probability = np.stack([certain, 1 - certain], axis=1)
    probability[3:5] = probability[3:5, ::-1]  # of the other class
    features = np.random.default_rng(0).normal(size=(6, 3))
    assignments = assign(plain(features, probability, np.full(6, UNLABELED), num_known=2))
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
    assignments = assign(plain(features, probability, np.full(6, UNLABELED), num_known=1))
    learned = np.array([0, 1, 3, 4, 5])  # not 2, the medoid of its class
    assert label_first(assignments, learned).tolist() == [1, 5, 3, 0, 4]
