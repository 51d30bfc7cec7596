"""Evaluation: protocols kept, labels never peeked at, and an answer for whatever data there are."""

import json
import re
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch
from builders import normal
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import normalize
from torch import nn

from nearkin.data.opening import open_images
from nearkin.encoders.inference import encode
from nearkin.errors import DataError, DivergedError
from nearkin.evaluation import metrics as taken
from nearkin.evaluation.baselines import pixel_features
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import Evaluation, evaluate_tables
from nearkin.evaluation.metrics import clusters, geometry, knn, linear_probe
from nearkin.metrics.metric import Metric, share
from nearkin.metrics.probe import train_probe
from nearkin.objectives import unit


def measured(train, test):
    """The measures of one table of features, and why others could not be taken."""
    found = evaluate_tables({"encoder": (train, test)}, seed=0)
    return found.metrics["encoder"], found.left_out


def features(vectors, labels=None, second_view=None, rows=None):
    labels, view = np.full(len(vectors), -1) if labels is None else labels, None
    if second_view is not None:
        rows = np.arange(len(vectors)) if rows is None else rows
        view = Embeddings(second_view.numpy(), labels[rows], rows=rows)
    return Embeddings(vectors.numpy(), labels, second_view=view)


@pytest.fixture(scope="module")
def digits():
    """Real handwritten digits, as RGB images: 1437 for training, 360 for tests."""
    pixels, labels = load_digits(return_X_y=True)
    gray = torch.from_numpy((pixels * 255 / 16).astype(np.uint8))
    images, order = gray.repeat(1, 3) / 255, np.random.default_rng(0).permutation(len(labels))
    sides = order[:1437], order[1437:]
    centered = unit(images - images[sides[0]].mean(dim=0))
    return tuple(features(centered[rows], labels[rows]) for rows in sides)


@pytest.fixture(scope="module")
def table(digits):
    train, test = digits
    return (train.tensor, train.labels, test.tensor, test.labels)


def test_an_encoder_is_left_as_it_was_found_and_features_are_full_precision_and_can_be_learned_from():
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten())
    encoder[2].eval()  # someone froze a part
    images = normal(7, 3, 5, 5)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    together, apart = encode(encoder, [images]), encode(encoder, images.split(3))
    assert torch.allclose(together, apart, atol=1e-5)
    assert [module.training for module in encoder] == [True, True, False, True]
    assert all(torch.equal(before[name], x) for name, x in encoder.state_dict().items())
    assert together.shape == (7, 36)
    fails = nn.Linear(4, 2)
    with pytest.raises(RuntimeError):
        encode(fails, [images])
    assert fails.training
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).bfloat16()
    features = encode(encoder, [normal(6, 3, 2, 2).bfloat16()])
    assert features.dtype == torch.float32
    assert not features.requires_grad
    (features * torch.ones(5, requires_grad=True)).sum().backward()  # not an inference tensor


class ClassToken(nn.Module):
    """Gives a view of its tokens, whose memory `arrays` refers to."""

    arrays: ClassVar = []

    def forward(self, images):
        tokens = np.ones((len(images), 50, 4), np.float32)
        self.arrays.append(weakref.ref(tokens))
        return torch.from_numpy(tokens)[:, 0]


def test_of_each_batch_the_features_are_kept_and_nothing_else():
    network = ClassToken()

    def watched():
        for batch in torch.zeros(4, 2, 3, 1, 1):
            yield batch
            assert all(array() is None for array in network.arrays)

    assert torch.equal(encode(network, watched()), torch.ones(8, 4))


def test_raw_pixels_are_unit_vectors_of_what_differs_from_the_mean_of_the_first(monkeypatch):
    pixels = np.random.default_rng(0).integers(256, size=(8, 32, 32, 3), dtype=np.uint8)
    images = open_images(pixels)
    parts = [images.subset(np.arange(5)), images.subset(np.arange(5, 8))]
    flat = pixels.transpose(0, 3, 1, 2).reshape(8, -1) / 255
    expected = normalize(flat - flat[:5].mean(0))
    whole = pixel_features(parts, 0)
    assert np.allclose(torch.cat(whole).numpy(), expected, atol=1e-6)
    monkeypatch.setattr("nearkin.evaluation.baselines.PIECE", 2)
    assert all(map(torch.equal, whole, pixel_features(parts, 0)))


def test_features_that_are_not_finite_are_refused_and_no_images():
    vectors = normal(4, 2)
    vectors[2, 1] = torch.nan
    with pytest.raises(DivergedError, match="features of image 2 are not finite"):
        measured(*(features(x, np.zeros(4, int)) for x in (normal(4, 2), vectors)))
    named = Embeddings(vectors.numpy(), np.zeros(4, int), paths=[*"abcd"])
    with pytest.raises(DivergedError, match="features of 'c' are not finite"):
        measured(features(normal(4, 2), np.zeros(4, int)), named)
    with pytest.raises(DataError, match="no image to encode"):
        encode(nn.Identity(), [])


def test_digits_are_recognized_from_raw_pixels_by_their_neighbors(digits):
    headline, many = knn(*digits)
    assert 0.95 < headline.value < 0.99
    assert many.name == "kNN top-1, k 200"
    assert headline.low < headline.value < headline.high
    assert headline.sentence == (
        "weighted kNN by cosine, k 20, temperature 0.07, 1437 training images, 360 test images; "
        "interval: Wilson, images taken as independent"
    )


def test_votes_are_those_of_a_plain_search_weighted_by_similarity(table):
    bank, labels, queries, truth = table
    train, test = features(bank, labels), features(queries[:60], truth[:60])
    similarity, index = (
        KNeighborsClassifier(20, metric="cosine").fit(bank, labels).kneighbors(queries[:60])
    )
    weight = np.exp((1 - similarity) / 0.07)
    votes = np.array([np.bincount(labels[i], w, minlength=10) for i, w in zip(index, weight)])
    assert knn(train, test)[0].value == pytest.approx((votes.argmax(axis=1) == truth[:60]).mean())


def test_images_without_a_label_neither_vote_nor_count(table):
    bank, labels, queries, truth = table
    voting, counting = np.arange(len(labels)) % 3 > 0, np.arange(len(truth)) % 2 > 0
    train = features(bank, np.where(voting, labels, -1))
    hidden = knn(train, features(queries, np.where(counting, truth, -1)))
    train = features(bank[voting], labels[voting])
    assert hidden == knn(train, features(queries[counting], truth[counting]))


def test_k_does_not_depend_on_how_many_images_there_are_and_a_long_tail_keeps_its_neighbors():
    """Verified once: k 200 above 10,000 images gave the rare classes nothing."""
    bank = torch.eye(3)
    train, test = features(bank, np.array([4, 4, 9])), features(bank, np.array([4, 4, 7]))
    (metric,) = knn(train, test)
    assert metric.value == pytest.approx(2 / 3)
    assert metric.protocol["k"] == 3
    unseen = "1 test classes without any training image, which count as wrong"
    assert unseen in metric.sentence
    rng, axes = np.random.default_rng(0), np.eye(3, 40)

    def around(axis, cosine, n):
        other = np.pad(rng.normal(size=(n, 37)), ((0, 0), (3, 0)))
        other /= np.linalg.norm(other, axis=1, keepdims=True)
        return cosine * axes[axis] + (1 - cosine**2) ** 0.5 * other

    bank = [around(axis, 0.9, 12) for axis in range(3)] + [around(a, 0.75, 300) for a in range(3)]
    labels = np.concatenate([np.repeat([1, 2, 3], 12), np.zeros(900, int)])
    train = features(torch.from_numpy(np.concatenate(bank)).float(), labels)
    headline, many = knn(train, features(torch.from_numpy(axes).float(), np.array([1, 2, 3])))
    assert (headline.protocol["k"], many.protocol["k"]) == (20, 200)
    assert (headline.value, many.value) == (1, 0)


def test_digits_are_recognized_from_raw_pixels_by_a_linear_classifier(digits):
    measure = linear_probe(*digits, seed=0)
    assert 0.93 < measure.value < 0.99
    assert measure.low < measure.value < measure.high
    few = [part.subset(np.arange(100)) for part in digits]  # of Apple's GPU on the CPU
    expected = linear_probe(*few, seed=0).value
    assert linear_probe(*few, seed=0, device=torch.device("mps")).value == expected


def test_the_labels_of_the_test_images_decide_nothing_but_the_score(table):
    bank, labels, queries, truth = table[0][:200], table[1][:200], *table[2:]
    shuffled = np.random.default_rng(0).permutation(truth)
    train = features(bank, labels)
    honest = linear_probe(train, features(queries, truth), seed=0)
    lost = linear_probe(train, features(queries, shuffled), seed=0)
    assert lost.value < 0.3
    assert lost.sentence == honest.sentence
    choice = train_probe(bank, labels, seed=0).choice
    assert honest.chosen["C"] == choice.strength
    assert f"{choice.images} held-out training images chose it" in honest.sentence


def test_clusters_of_digits_are_those_of_scikit_learn(table):
    _, _, queries, truth = table
    measures = {measure.name: measure for measure in clusters(features(queries, truth), seed=0)}
    x = normalize(queries.numpy())
    reference = KMeans(10, n_init=10, random_state=0).fit_predict(x)
    assert 0.65 < measures["cluster accuracy"].value < 0.9
    nmi, ari = (f(truth, reference) for f in (normalized_mutual_info_score, adjusted_rand_score))
    assert measures["NMI"].value == pytest.approx(nmi, abs=0.06)
    assert measures["ARI"].value == pytest.approx(ari, abs=0.1)
    assert all(m.low < m.value < m.high and m.high - m.low < 0.25 for m in measures.values())


def test_clusters_do_not_depend_on_the_length_of_the_features(table):
    _, _, queries, truth = table
    length = torch.linspace(0.01, 100, len(queries))[:, None]
    for x in (queries, queries[:, :60]):
        plain = clusters(features(x, truth), seed=0)
        scaled = clusters(features(length * x, truth), seed=0)
        assert [m.value for m in scaled] == pytest.approx([m.value for m in plain], abs=0.02)


def test_clusters_far_apart_are_found_and_collapsed_features_give_the_largest_class():
    truth = np.repeat([5, 3, 8], 40)
    far = torch.eye(3).repeat_interleave(40, dim=0) + 0.01 * normal(120, 3)
    found = clusters(features(far, truth), seed=0)
    assert [m.value for m in found] == [1.0] * 3
    assert all(0.8 < m.low < 0.99 and m.high == 1 for m in found)  # none is certain
    truth = np.array([0] * 30 + [1] * 20)
    values = {m.name: m.value for m in clusters(features(torch.ones(50, 100), truth), seed=0)}
    assert values == {"cluster accuracy": 0.6, "NMI": 0.0, "ARI": 0.0}


def test_geometry_needs_no_labels_and_says_what_two_views_share():
    x = normal(300, 8)
    one = {m.name: m.value for m in geometry(features(x))}
    two = {m.name: m.value for m in geometry(features(x, second_view=2 * x))}
    assert list(one) == ["effective rank", "feature std", "mean cosine", "uniformity"]
    assert 7 < one["effective rank"] < 8
    assert two["alignment"] == pytest.approx(0, abs=1e-6)
    assert two["neighbor agreement"] == 1
    assert {name: two[name] for name in one} == one


def assert_geometry_of(few, whole, says):
    assert [m.value for m in geometry(whole)] == [m.value for m in geometry(few)]
    assert all(m.sentence.endswith(says) for m in geometry(whole))


def test_geometry_looks_at_evenly_spaced_images_or_at_those_with_a_second_view(monkeypatch):
    x, rows = normal(12, 3), np.array([1, 2, 5, 11])
    view = x[rows] + 1
    few, whole = features(x[rows], second_view=view), features(x, second_view=view, rows=rows)
    assert_geometry_of(few, whole, "4 of 12 test images")
    monkeypatch.setattr("nearkin.evaluation.metrics.GEOMETRY_IMAGES", 5)
    rows = taken.geometry_rows(12)
    assert rows.tolist() == [0, 2, 4, 7, 9]
    assert_geometry_of(features(x[rows]), features(x), "5 of 12 test images")


def test_without_labels_there_is_geometry_and_a_reason_for_the_rest():
    train = features(normal(40, 6))
    test = features(normal(40, 6, seed=1), second_view=normal(40, 6, seed=2))
    measures, left_out = measured(train, test)
    assert [m.name for m in measures][-2:] == ["alignment", "neighbor agreement"]
    assert measures[0].name == "view retrieval"
    assert len(measures) == 7
    assert set(left_out) == {"kNN top-1", "linear probe", "clusters"}
    assert all("label" in reason and "\n" not in reason for reason in left_out.values())


def test_a_single_class_is_recognized_but_cannot_be_probed_and_two_images_are_enough():
    one = np.zeros(40, int)
    measures, left_out = measured(features(normal(40, 6), one), features(normal(40, 6), one))
    assert measures[0].value == 1
    assert set(left_out) == {"linear probe", "clusters"}
    two = features(normal(2, 3), np.array([0, 1]), second_view=normal(2, 3, seed=1))
    measures, left_out = measured(two, two)
    assert len(measures) == 12
    assert not left_out


@pytest.fixture(scope="module")
def evaluation(digits):
    """Of 300 training images, and a baseline of 50 with tests without labels."""
    train, test = digits
    few, fewer = train.subset(np.arange(300)), train.subset(np.arange(50))
    return evaluate_tables({"encoder": (few, test), "pixels": (fewer, test.unlabeled())}, seed=0)


def test_the_table_shows_each_measure_with_its_interval_beside_its_baselines_and_survives_json(
    evaluation,
):
    heading, *rows = (re.split(r"  +", line) for line in evaluation.lines())
    assert heading == ["metric", "encoder", "raw pixels"]
    first = evaluation.metrics["encoder"][0]
    assert rows[0] == ["kNN top-1", f"{first.value:.3f} [{first.low:.3f}, {first.high:.3f}]", "-"]
    (last,) = (row for row in rows if row[0] == "uniformity")
    assert last[1] == last[2]
    plain = json.loads(json.dumps(evaluation.to_dict(), allow_nan=False))
    assert plain["sizes"] == {"train": 300, "test": 360}
    assert plain["metrics"]["encoder"]["NMI"]["value"] == evaluation.metrics["encoder"][4].value
    assert plain["metrics"]["encoder"]["effective rank"]["low"] is None
    lacking = {"kNN top-1", "linear probe", "clusters"}  # in one table: the other has labels
    assert set(plain["left_out"]) == {f"{title} of raw pixels" for title in lacking}
    assert str(share("top-1", np.arange(10) < 7, {})) == "0.700 [0.393, 0.913]"
    assert str(Metric("effective rank", 41.23, None, None, 9, None, {})) == "41.2"
    again = Evaluation.stored(json.loads(json.dumps(evaluation.to_dict())))
    assert again.lines() == evaluation.lines()


def test_protocols_name_classes_that_training_never_showed_and_fewer_images_of_a_baseline(
    digits, table
):
    train, test = (part.subset(np.arange(90)) for part in digits)
    fewer = train.subset(np.arange(50))
    measures = evaluate_tables({"encoder": (train, test), "pixels": (fewer, test)}, seed=0)
    assert measures.sizes == {"train": 90, "test": 90}
    assert measures.metrics["pixels"][0].protocol["training images"] == 50
    bank, labels, queries, truth = table
    known = np.flatnonzero(labels < 7)[:300]
    measures, _ = measured(features(bank[known], labels[known]), features(queries, truth))
    assert all("3 test classes" in m.sentence and m.value < 0.8 for m in measures[:3])
