"""The map of images: the same every time, alike ones together, and new ones among their like."""

import io
from contextlib import suppress

import numpy as np
import pytest
import torch
from builders import pixels
from PIL import Image

from nearkin.data.opening import open_images
from nearkin.evaluation.embeddings import embeddings_of
from nearkin.evaluation.vectors import read_embeddings, write_embeddings
from nearkin.metrics.neighbors import nearest as similar
from nearkin.report.image_map import (
    EarlyMap,
    Layout,
    Places,
    image_map,
    place,
    placed,
    sheets_in_order,
    tsne,
    z_order,
)
from nearkin.run.folder import RunFolder


def blobs(per=30, groups=4, dim=16, spread=0.15, seed=0):
    """Groups of directions, and which group each belongs to."""
    rng = np.random.default_rng(seed)
    means = np.linalg.qr(rng.normal(size=(dim, groups)))[0].T
    group = np.repeat(np.arange(groups), per)
    vectors = means[group] + spread * rng.normal(size=(len(group), dim))
    return vectors.astype(np.float32), group


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
    np.testing.assert_array_equal(Layout(features, threads=2).optimized(), places)
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
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    shared = [len(np.intersect1d(a, b)) for a, b in zip(nearest(unit, 10), nearest(places, 10))]
    assert np.mean(shared) > 4  # of 10; by chance .8


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("dim", [1, 7])
def test_a_few_images_have_places_of_their_own(count, dim):
    features = np.random.default_rng(count).normal(size=(count, dim)).astype(np.float32)
    places = tsne(features)
    assert places.shape == (count, 2)
    assert np.isfinite(places).all()
    directions = np.unique(
        (features / np.linalg.norm(features, axis=1, keepdims=True)).round(5), axis=0
    )
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
    assert placed.min(axis=0) == pytest.approx(places.min(axis=0), abs=1e-3) or count > 1
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


def test_sheets_have_their_images_in_the_order_that_is_asked_for():
    images, order = open_images("digits"), np.array([40, 3, 1200, 17])
    (sheet,) = sheets_in_order(images, order, 16)
    pixels = np.asarray(Image.open(io.BytesIO(sheet)))
    for column, row in enumerate(order):
        tile = pixels[:, 16 * column : 16 * (column + 1)]
        assert np.abs(tile.astype(int) - images.read(row)).max() <= 1


@pytest.fixture
def embedded(tmp_path):
    """Make run folders of 120 images that have embeddings, and nothing else."""
    features, group = blobs()
    images = open_images((pixels(len(group), 8), group), cache=False)

    def make(name):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        write_embeddings(folder.embeddings, embeddings_of(images, features))
        return folder, images

    return make


def shown(folder, images, early=None, **limits):
    return image_map(folder, read_embeddings(folder.embeddings, images), images, early, **limits)


def test_of_many_images_landmarks_are_laid_out_and_are_everybodys_neighbors(embedded):
    folder, images = embedded("many")
    plain = shown(folder, images, landmarks=40)
    assert (plain.among, plain.per_file, len(plain.names)) == (40, 0, 120)
    assert len(np.unique(plain.neighbors)) <= 40
    in_files = shown(folder, images, landmarks=40, one_file=60)
    assert (in_files.among, in_files.per_file) == (40, 4_096)
    order = z_order(plain.xy)
    np.testing.assert_array_equal(in_files.number, order)
    np.testing.assert_array_equal(in_files.xy, plain.xy[order])
    np.testing.assert_array_equal(order[in_files.neighbors], plain.neighbors[order])
    np.testing.assert_array_equal(in_files.similarity, plain.similarity[order])
    assert in_files.names == tuple(plain.names[row] for row in order)
    label = in_files.colorings[0]
    assert [label.classes[number] for number in label.values] == [
        images.classes[number] for number in images.labels[order]
    ]
    (sheet,) = in_files.sheets
    pixels = np.asarray(Image.open(io.BytesIO(sheet)))  # lossless, as they are so small
    for place_, row in ((0, order[0]), (77, order[77])):
        top, left = 8 * (place_ // 16), 8 * (place_ % 16)
        np.testing.assert_array_equal(pixels[top : top + 8, left : left + 8], images.read(row))


def test_a_map_that_is_computed_beside_other_work_is_the_same(embedded):
    folder, images = embedded("beside")
    with EarlyMap(folder, images) as early:
        early.start()
        layout = shown(folder, images, early)
    stored = folder.map.read_bytes()
    np.testing.assert_array_equal(layout.xy, shown(*embedded("after")).xy)
    with EarlyMap(folder, images) as early:
        early.start()  # it is there
        early.wait()
    assert folder.map.read_bytes() == stored


def test_a_map_is_given_up_when_its_run_ends_early(embedded):
    folder, images = embedded("run")
    early = EarlyMap(folder, images)
    with suppress(KeyboardInterrupt), early:
        early.start()
        assert early.running
        raise KeyboardInterrupt
    assert not early.running
    assert not folder.map.exists()


def test_a_map_that_cannot_be_stored_early_is_computed_later(embedded):
    folder, images = embedded("run")
    with EarlyMap(folder, images) as early:
        early.start()
        folder.map.mkdir()  # so that no file can take its place
        early.wait()
        folder.map.rmdir()
        assert len(shown(folder, images, early).xy) == 120
    assert folder.map.exists()
