"""The map of a run: its images in the order of their sheets, and where it is computed."""

import io
from contextlib import suppress

import numpy as np
import pytest
from builders import blobs, pixels
from PIL import Image

from nearkin.data.opening import open_images
from nearkin.errors import CheckpointError
from nearkin.evaluation import layout
from nearkin.evaluation.embeddings import embeddings_of
from nearkin.evaluation.layout import EarlyMap, z_order
from nearkin.evaluation.table import read_embeddings
from nearkin.evaluation.vectors import write_embeddings
from nearkin.report.image_map import colorings, image_map, sheets_in_order
from nearkin.run.folder import RunFolder
from nearkin.tables import write_csv


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


def test_a_map_is_given_up_when_its_run_ends_early(embedded, monkeypatch):
    folder, images = embedded("run")
    early, computed = EarlyMap(folder, images), layout._computed

    def late(*arguments):
        arguments[-1].wait(60)
        return computed(*arguments)

    monkeypatch.setattr(layout, "_computed", late)  # or it may be done before the run ends
    with suppress(KeyboardInterrupt), early:
        early.start()
        raise KeyboardInterrupt
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


def test_tables_of_classes_that_lack_something_are_named(embedded):
    folder, images = embedded("run")
    stored = read_embeddings(folder.embeddings, images)
    heading, assigned = ("cluster", "name", "kind"), ("path", "cluster", "score")
    classes = [("new-1", "", "novel"), ("new-2", "twos", "novel")]
    found = [(name, f"new-{1 + row % 2}", 0.5) for row, name in enumerate(images.names)]
    for clusters, assignments, says in (
        ((heading, classes), (assigned, found), ""),
        ((heading, classes[:1]), (assigned, found), "has no row of new-2; put it back"),
        ((heading[:2], [row[:2] for row in classes]), (assigned, found), "has no column kind"),
        ((heading, classes), (assigned[:1], [row[:1] for row in found]), "has no column cluster"),
    ):
        write_csv(folder.clusters, *clusters)
        write_csv(folder.assignments, *assignments)
        if not says:
            assert colorings(folder, stored, np.arange(120))[0].classes == ("new-1", "twos")
            continue
        with pytest.raises(CheckpointError, match=says):
            colorings(folder, stored, np.arange(120))
