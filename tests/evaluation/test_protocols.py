"""Protocols of an evaluation: what each measures, beside floors, without ever peeking at labels."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from colors import colors, tiny
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from nearkin.choices import FULL, Protocol
from nearkin.data.augmentations import AUGMENTATIONS
from nearkin.data.split import Split
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.inference import inference
from nearkin.errors import DataError
from nearkin.evaluation import metrics
from nearkin.evaluation.attentive import ImageViews, attentive_probe
from nearkin.evaluation.embeddings import Embeddings, encode_images
from nearkin.evaluation.evaluate import evaluate_split, evaluate_tables, second_view
from nearkin.evaluation.metrics import few_shot, knn, knn_grid, retrieval
from nearkin.evaluation.protocols import METRICS, PROTOCOLS, chosen
from nearkin.metrics import attentive, probe
from nearkin.metrics.intervals import wilson
from nearkin.networks.branch import as_backbone
from nearkin.schema import choices
from nearkin.types import UNLABELED

CPU = torch.device("cpu")


def blobs(n, classes=4, dim=6, seed=0, spread=1.5):
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    centers = np.random.default_rng(99).normal(size=(classes, dim))
    vectors = (centers[labels] + spread * rng.normal(size=(n, dim))).astype(np.float32)
    return Embeddings(vectors, labels)


@pytest.fixture(scope="module", autouse=True)
def few():
    """Fewer draws and steps than there are, since each costs the same again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "DRAWS", 2)
        patch.setattr(probe, "STEPS", 30)
        patch.setattr(probe, "CHOICE_STEPS", 10)
        patch.setattr(attentive, "STEPS", 15)
        yield


def named(result):
    return {measure.name: measure for measure in result}


def test_each_name_of_the_settings_has_its_measures():
    assert [*PROTOCOLS, FULL] == list(choices(Protocol))
    assert set(chosen(["full"])) == set(METRICS)
    others = [title for title in PROTOCOLS["quick"] if title != "linear probe"]
    assert chosen(["linear", "quick", "linear"]) == ("linear probe", *others)


def test_nothing_else_is_measured_than_was_chosen_and_what_cannot_be_says_why():
    train, test = blobs(80), blobs(40, seed=1)

    def measured(protocol, test=test):
        result = evaluate_tables({"encoder": (train, test)}, seed=0, protocol=protocol.split(","))
        return [measure.name for measure in result.metrics["encoder"]], result.left_out

    names, left_out = measured("retrieval,fewshot")
    assert (names[0], names[-1]) == ("retrieval mAP", "10-shot logistic")
    assert len(names) == 3 + 8
    assert not left_out
    names, left_out = measured("attentive")
    assert not names
    assert set(left_out) == {"attentive probe"}
    assert all("these are features alone" in reason for reason in left_out.values())
    for protocol in ("knn", "fewshot", "retrieval"):
        names, left_out = measured(protocol, test.unlabeled())
        assert not names
        assert "labeled" in next(iter(left_out.values())), protocol


def test_the_grid_of_knn_is_one_search_with_the_results_of_many():
    train, test = blobs(250), blobs(60, seed=1)
    grid = named(knn_grid(train, test))
    assert len(grid) == 12
    for k in (10, 20, 100, 200):
        reference = KNeighborsClassifier(k, metric="cosine").fit(train.vectors, train.labels)
        expected = reference.score(test.vectors, test.labels)
        assert grid[f"kNN k {k}, majority"].value == pytest.approx(expected)
    headline = {
        f"kNN k {metric.protocol['k']}, t 0.07": metric.value for metric in knn(train, test)
    }
    assert len(headline) == 2
    assert all(grid[name].value == value for name, value in headline.items())
    assert len({metric.sentence for metric in grid.values()}) == 12


def test_no_more_neighbors_are_asked_than_there_are(monkeypatch):
    monkeypatch.setattr(metrics, "TALLIED", 7)  # several pieces
    train, test = blobs(25), blobs(10, seed=1)
    asked = {name.split(",")[0] for name in named(knn_grid(train, test))}
    assert asked == {"kNN k 10", "kNN k 20"}
    few = named(knn_grid(blobs(8), test))
    assert set(few) == {"kNN k 8, t 0.07", "kNN k 8, t 0.1", "kNN k 8, majority"}


def test_classes_far_apart_are_learned_from_one_image_and_those_with_too_few_are_counted():
    result = few_shot(blobs(80, spread=0.01), blobs(40, seed=1, spread=0.01), seed=0)
    assert [measure.value for measure in result] == [1.0] * 8
    # As sure as 40 test images make it, whatever the draws (once 1.000 [1.000, 1.000]).
    assert all((metric.low, metric.high) == pytest.approx(wilson(1.0, 40.0)) for metric in result)
    train = blobs(80)
    train = train.subset(np.flatnonzero((train.labels != 2) | (np.arange(80) < 12)))
    result = named(few_shot(train, blobs(40, seed=1), seed=0))
    assert "have fewer" not in result["2-shot logistic"].sentence
    assert "of unit vectors of what differs from the mean" in result["2-shot logistic"].sentence
    assert "1 classes that have fewer and give all" in result["5-shot logistic"].sentence


def test_few_shots_are_no_surer_than_their_test_images(monkeypatch):
    """Ten draws of all images there are have no variance; the test images have."""
    monkeypatch.setattr(metrics, "DRAWS", 5)
    train, test = blobs(40), blobs(50, seed=1)
    result = named(few_shot(train, test, seed=0))["10-shot class mean"]
    low, high = wilson(result.value, 50.0)
    assert (result.low, result.high) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize("measure", [knn_grid, few_shot, retrieval], ids=lambda m: m.__name__)
def test_no_label_of_a_test_image_moves_the_score_of_another(measure):
    train, test = blobs(90), blobs(60, seed=1)
    seed = {"seed": 0} if measure is few_shot else {}
    half, labels = np.arange(60) < 24, test.labels
    whole, first, second = (
        named(measure(train, Embeddings(test.vectors, np.where(rows, labels, UNLABELED)), **seed))
        for rows in (np.ones(60, bool), half, ~half)
    )
    for name, value in whole.items():
        assert value.value == pytest.approx(0.4 * first[name].value + 0.6 * second[name].value)


def test_images_of_the_own_group_are_not_retrieved_and_a_few_perfect_scores_are_not_certain():
    train, test = blobs(40, spread=0.01), blobs(4, seed=1, spread=0.01)
    measure = retrieval(train, test)[0]
    assert measure.value == pytest.approx(1)
    assert measure.low == pytest.approx(wilson(1.0, 4.0)[0])
    train = blobs(40)
    copies = Embeddings(train.vectors, train.labels, groups=np.arange(40))
    result = named(retrieval(copies, copies))
    assert named(retrieval(train, train))["retrieval recall@1"].value == 1
    assert result["retrieval recall@1"].value < 1


@pytest.fixture(scope="module")
def split():
    return colors(24)


def evaluated(split, protocol, beside=None):
    how = dict(beside=beside or {}, seed=0, workers=0, augment="simclr_cifar", device=CPU)
    return evaluate_split(tiny(), split, **how, protocol=protocol.split(","))[0]


@pytest.fixture(scope="module")
def full(split, few):
    return evaluated(split, "full", {"untrained": tiny()})


def test_all_tables_get_all_measures(full):
    names = {table: [m.name for m in column] for table, column in full.metrics.items()}
    assert names["encoder"] == names["untrained"]
    without = {"attentive probe", "linear probe, same images", "view retrieval", "alignment"}
    without |= {"neighbor agreement"}
    assert set(names["encoder"]) - set(names["pixels"]) == without
    assert set(full.left_out) == {"attentive probe of raw pixels", "kNN k 100, 200"}
    for measure in full.metrics["encoder"]:
        assert measure.low is None or measure.low <= measure.value <= measure.high
        assert np.isfinite(measure.value)
    json.dumps(full.to_dict(), allow_nan=False)


def test_quick_measures_are_the_same_among_others(split, full):
    quick = named(evaluated(split, "quick").metrics["encoder"])
    everything = named(full.metrics["encoder"])
    assert all(everything[name] == measure for name, measure in quick.items())


def views_of(encoder, split):
    return ImageViews(encoder, split.train, split.test, 0, CPU)


def test_a_second_view_without_changes_is_the_image_in_the_encoders_own_mean_and_deviation(split):
    plain, few = tiny(), split.test.spread(5)
    whole = [{"scale": [1.0, 1.0], "ratio": [1.0, 1.0]}]
    for numbers in ({}, {"mean": (0.5,) * 3, "std": (0.5,) * 3}):
        encoder = Encoder(plain.backbone, replace(plain.preprocessing, **numbers), plain.details)
        view = second_view(encoder, few, seed=0, augment=whole, device=CPU)
        image = encode_images(inference(encoder, CPU), few, workers=0)
        np.testing.assert_allclose(view.vectors, image.vectors, atol=1e-5)


def test_the_second_view_differs_from_the_image_and_is_drawn_by_the_seed(split):
    encoder, few = tiny(), split.test.spread(5)
    how = dict(augment="simclr_cifar", device=CPU)
    first, again, other = (
        second_view(encoder, few, seed=seed, **how).vectors for seed in (3, 3, 4)
    )
    plain = encode_images(inference(encoder, CPU), few, workers=0).vectors
    assert np.array_equal(first, again)
    own = [{**AUGMENTATIONS["simclr_cifar"][0].to_dict(), "kind": "own"}]  # of a user's method
    alone = second_view(encoder, few, seed=3, augment=own, device=CPU).vectors
    assert np.array_equal(first, alone)
    assert (first != other).any()
    assert (first != plain).any()


def test_where_nothing_is_held_out_nothing_is_scored(split):
    train = Split(split.images, np.arange(36), np.zeros(0, np.int64))
    result = evaluated(train, "attentive,labelfree")
    assert "attentive probe" in result.left_out
    names = {measure.name for measure in result.metrics["encoder"]}
    assert "alignment" in names
    assert not any("kNN" in name or "probe" in name for name in names)


def test_a_network_without_tokens_has_no_attentive_probe(split):
    class Flat(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, ::31]

    encoder = Encoder(as_backbone(Flat(), 16), 16, {"backbone": "flat"})
    both = [
        encode_images(inference(encoder, CPU), x, workers=0) for x in (split.train, split.test)
    ]
    with pytest.raises(DataError, match="neither tokens nor a feature map"):
        attentive_probe(views_of(encoder, split), *both, seed=0)


def test_an_attentive_probe_says_how_many_classes_of_test_images_it_has_never_seen(split):
    train, test = (
        encode_images(inference(tiny(), CPU), x, workers=0) for x in (split.train, split.test)
    )
    for labels, unseen in ((train.labels, None), (np.where(train.labels, train.labels, -1), 1)):
        found = attentive_probe(
            views_of(tiny(), split), replace(train, labels=labels), test, seed=0
        )
        assert [each.protocol.get(metrics.UNSEEN) for each in found] == [unseen, unseen]
        assert all(each.protocol["training images"] == (labels >= 0).sum() for each in found)
