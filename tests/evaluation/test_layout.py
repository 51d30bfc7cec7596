"""The layout of images: the same every time, alike ones together, and new ones among their like."""

import numpy as np
import pytest
import torch
from builders import blobs

from nearkin.evaluation import layout
from nearkin.evaluation.layout import Layout, Places, place, placed, z_order
from nearkin.metrics.neighbors import nearest as similar


def tsne(features, neighbors=None):
    return Layout(features, neighbors).optimized()


def unit(features):
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def distances(places, others=None):
    others = places if others is None else others
    return np.linalg.norm(places[:, None] - others[None], axis=2)


def nearest(places, k):
    between = distances(places)
    np.fill_diagonal(between, np.inf)
    return np.argsort(between, axis=1)[:, :k]


@pytest.fixture(scope="module")
def mapped():
    features, group = blobs()
    return features, group, tsne(features)


def test_the_same_features_lie_at_the_same_places_to_the_bit_and_nothing_is_said(mapped, capfd):
    features, _, places = mapped
    before = features.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "FEW", 0)
        patch.setattr(layout, "available_cpus", lambda: 2)
        several = Layout(features)
    assert several.threads == 2
    np.testing.assert_array_equal(several.optimized(), places)
    np.testing.assert_array_equal(features, before)
    np.random.seed(1)  # the numbers of the caller are neither used nor spent
    np.testing.assert_array_equal(tsne(features), places)
    assert np.random.random() == np.random.RandomState(1).random()
    assert capfd.readouterr() == ("", "")


def test_groups_that_are_far_apart_stay_apart(mapped):
    _, group, places = mapped
    between = distances(places)
    same = group[:, None] == group[None]
    assert between[same].max() < between[~same].min()
    assert places.mean(axis=0) == pytest.approx([0, 0], abs=1e-6)


def test_lengths_change_nothing_and_turning_the_features_nothing_but_rounding(mapped):
    features, group, places = mapped
    lengths = np.random.default_rng(0).choice([0.25, 1, 8], (len(group), 1)).astype(np.float32)
    np.testing.assert_array_equal(tsne(features * lengths), places)
    turn = np.linalg.qr(np.random.default_rng(3).normal(size=(16, 16)))[0].astype(np.float32)
    turned = tsne(features @ turn)
    apart = np.corrcoef(distances(places).ravel(), distances(turned).ravel())[0, 1]
    assert apart > 0.99
    shared = [len(np.intersect1d(a, b)) for a, b in zip(nearest(places, 10), nearest(turned, 10))]
    assert np.mean(shared) > 9


def test_neighbors_on_the_map_are_neighbors_by_cosine(mapped):
    features, *_, places = mapped
    pairs = zip(nearest(unit(features), 10), nearest(places, 10))
    shared = [len(np.intersect1d(a, b)) for a, b in pairs]
    assert np.mean(shared) > 4  # of 10; by chance .8


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("dim", [1, 7])
def test_a_few_images_have_places_of_their_own(count, dim):
    features = np.random.default_rng(count).normal(size=(count, dim)).astype(np.float32)
    places = tsne(features)
    assert places.shape == (count, 2)
    assert np.isfinite(places).all()
    directions = np.unique(unit(features).round(5), axis=0)
    if count < 4:
        assert len(np.unique(places.round(9), axis=0)) == len(directions)


def test_images_that_are_all_alike_lie_on_one_place():
    for count, value in ((20, 0), (20, 3.7), (3, 1e9), (20, 1e-9)):
        features = np.full((count, 4), value, np.float32)
        np.testing.assert_array_equal(tsne(features), np.zeros((count, 2)))


def test_copies_and_an_image_without_a_direction_are_no_trouble(mapped):
    places = tsne(np.repeat(np.eye(2, 8, dtype=np.float32), 40, axis=0))
    assert np.isfinite(places).all()
    assert distances(places[:40], places[40:]).min() > 0
    features = mapped[0].copy()
    features[5] = 0
    assert np.isfinite(tsne(features)).all()


def test_an_image_of_the_map_is_placed_on_itself(mapped):
    features, _, places = mapped
    placed = place(features[::7] * 2, features, places)
    np.testing.assert_allclose(placed, places[::7], atol=1e-3 * np.abs(places).max())


def test_new_images_lie_among_their_like_and_the_map_does_not_move(mapped):
    features, group, places = mapped
    new, own = blobs(seed=0)
    new += 0.1 * np.random.default_rng(8).normal(size=new.shape).astype(np.float32)
    before = places.copy()
    placed = place(new, features, places)
    np.testing.assert_array_equal(places, before)
    assert (group[distances(placed, places).argmin(axis=1)] == own).mean() > 0.98
    np.testing.assert_allclose(place(new[3:4], features, places), placed[3:4], atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_new_images_have_places_on_maps_of_a_few(count):
    features, _ = blobs()
    places = tsne(features[:count])
    placed = place(features, features[:count], places)
    assert placed.shape == (120, 2)
    assert (placed.min(axis=0) >= places.min(axis=0) - 1e-9).all()
    assert (placed.max(axis=0) <= places.max(axis=0) + 1e-9).all()


def test_images_of_blocks_are_placed_by_their_landmarks_as_single_ones_are(mapped):
    features, group, _ = mapped
    among = np.arange(0, 120, 3)
    bank, xy = torch.from_numpy(features[among]), tsne(features[among])
    found = [each.numpy() for each in similar(bank, bank, 12, exclude_self=True)]
    own = Places(xy, *found)
    places = placed(torch.from_numpy(features).split(25), bank, own, among)
    for column, values in zip(places, own, strict=True):
        np.testing.assert_array_equal(column[among], values)
    others = np.setdiff1d(np.arange(120), among)
    np.testing.assert_array_equal(places.xy[others], place(features[others], features[among], xy))
    assert (group[among[places.neighbors[:, :3]]] == group[:, None]).mean() > 0.98
    cosine = np.einsum("nd,nkd->nk", unit(features), unit(features)[among[places.neighbors]])
    np.testing.assert_allclose(places.similarity, cosine, atol=1e-5)


def test_what_is_close_follows_each_other_along_the_curve():
    xy = np.random.default_rng(0).uniform(size=(4_096, 2))
    pieces = xy[z_order(xy)].reshape(64, 64, 2)
    assert np.ptp(pieces, axis=1).mean() < 0.25  # 64 squares of a side of an eighth
    np.testing.assert_array_equal(z_order(np.zeros((3, 2))), [0, 1, 2])
