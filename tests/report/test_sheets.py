"""Sheets and curves: every name can be drawn, every image is where it belongs."""

import dataclasses

import numpy as np
import pytest
import torch
from builders import pixels_of
from PIL import Image

from nearkin.data.augmentations import augmentation
from nearkin.data.batches import Batches
from nearkin.data.opening import open_images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.errors import DataError, OutputError, UsageError
from nearkin.report.encoder_report import MAX_POINTS, training_curves
from nearkin.run import sheets
from nearkin.run.folder import RunFolder
from nearkin.run.sheets import contact_sheet, save_sheet, shortened

HOSTILE = (
    "$\\frac{$", "_hidden", "<b>bold</b>", "日本語", "a\nb\x1b[31m", "\u202egnp.exe", "x" * 300,
    "caf\udce9", "",
)  # fmt: skip


def run_of(tmp_path, rows):
    folder = RunFolder(tmp_path)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(str(row.get(name, "")) for name in columns) for row in rows]
    folder.metrics.write_text("\n".join([",".join(columns), *lines]) + "\n")
    return folder


def test_curves_are_columns_with_values_and_long_ones_are_means_of_a_few_steps(tmp_path):
    rows = [
        {"step": 1, "epoch": 0.5, "loss": 3.0},
        {"step": 2, "epoch": 1, "loss": 2.0, "knn": 0.7},
    ]
    charts = training_curves(run_of(tmp_path, rows))
    assert {name: dict(chart.series) for name, chart in charts.items()} == {
        "loss": {"Training loss": [(0.5, 3.0), (1.0, 2.0)]},
        "knn": {"kNN accuracy": [(1.0, 0.7)]},
    }
    rows = [{"epoch": step / 100, "loss": step} for step in range(1, 5001)]
    points = training_curves(run_of(tmp_path, rows))["loss"].series["Training loss"]
    assert len(points) == MAX_POINTS
    # 5,000 steps are 200 times 17 and 100 times 16.
    assert (*points[0], *points[-1]) == pytest.approx((0.09, 9.0, 49.925, 4992.5))


def test_a_shortened_name_is_short_and_can_be_seen():
    for name in HOSTILE:
        text = shortened(name, 20)
        assert len(text) <= 20
        assert text.isprintable()
        assert shortened(text, 20) == text


def test_captions_stand_below_their_images_and_never_run_into_the_next(tmp_path):
    columns = [torch.zeros(2, 3, 96, 96)] * 3
    plain = pixels_of(save_sheet(columns, tmp_path / "s.png"))
    captions = [[(name, "0.5") for name in HOSTILE[:3]], [(name,) for name in HOSTILE[6:9]]]
    written = pixels_of(save_sheet(columns, tmp_path / "s.png", captions=captions))
    assert written.shape[1] == plain.shape[1]
    cells = written.reshape(2, -1, 3, 100, 3).swapaxes(1, 2)
    np.testing.assert_array_equal(
        cells[:, :, :100], plain.reshape(2, 100, 3, 100, 3).swapaxes(1, 2)
    )
    strips = cells[:, :, 100:]
    assert (strips.min(axis=(2, 3, 4)) < 128).tolist() == [[True] * 3, [True, True, False]]
    assert (strips[:, :, :, [0, -1]] == 255).all()


def test_names_in_other_alphabets_are_written_in_letters(tmp_path):
    letters = "жλéא\uffff"  # the last one, which no font has, is drawn as a box
    columns = [torch.zeros(1, 3, 96, 96)] * len(letters)
    captions = [[(letter,) for letter in letters]]
    written = pixels_of(save_sheet(columns, tmp_path / "s.png", captions=captions))
    strips = written[100:].reshape(-1, len(letters), 100, 3).swapaxes(0, 1)
    assert (strips.min(axis=(1, 2, 3)) < 128).all()
    assert len({strip.tobytes() for strip in strips}) == len(letters)


def test_headings_stand_above_their_columns(tmp_path):
    columns = [torch.zeros(2, 3, 96, 96)] * 2 + [torch.zeros(2, 3, 40, 40)]
    plain = pixels_of(save_sheet(columns, tmp_path / "s.png"))
    headings = [["image"], ["epoch 1", "view 1"], []]
    written = pixels_of(save_sheet(columns, tmp_path / "s.png", headings=headings))
    np.testing.assert_array_equal(written[-len(plain) :], plain)
    strip = written[: -len(plain)].reshape(-1, 3, 100, 3)
    assert (strip.min(axis=(0, 2, 3)) < 128).tolist() == [True, True, False]
    black = np.flatnonzero((plain[:, 200:] == 0).all(axis=2).any(axis=0))
    assert (black.min(), black.max()) == (30, 69)  # a small image in the middle of its column


@pytest.fixture
def saved(monkeypatch):
    """What would be written on a sheet, and the side of the images in each column."""
    kept = {}

    def save_sheet(columns, path, **text):
        kept.update(text, sides=[column.shape[-1] for column in columns])
        return path

    monkeypatch.setattr(sheets, "save_sheet", save_sheet)
    return kept


def write_augmentations(views, side, path):
    sampler, device = RandomBatchSampler(20, 10, 0), torch.device("cpu")
    batches = Batches.of(digits(range(20)), views, image_size=16, sampler=sampler, device=device)
    sheets.augmentation_sheet(batches, path, side)


def test_each_column_of_the_augmentations_says_which_view_it_is(saved, tmp_path):
    large = augmentation("swav_cifar")[0]
    small = dataclasses.replace(large, size=0.5)
    write_augmentations((large, large, small), 16, tmp_path / "a.png")
    assert saved["headings"][:4] == [
        ["", "image"], ["epoch 1", "view 1"], ["epoch 1", "view 2"], ["epoch 1", "view 3", "(8 px)"],
    ]  # fmt: skip
    assert saved["headings"][-1] == ["epoch 4", "view 3", "(8 px)"]


def test_views_of_the_sheet_have_the_size_with_which_training_begins(saved, tmp_path):
    view = augmentation("swav_cifar")[0]
    write_augmentations((view, view), 12, tmp_path / "a.png")
    assert saved["sides"] == [16, *[12] * 8]
    assert saved["headings"][:2] == [["", "image"], ["epoch 1", "view 1", "(12 px)"]]


def digits(rows):
    return open_images("digits").subset(np.array(rows))


def tiles_of(path, columns, lines):
    """The tiles of a sheet of digits: rows, columns, 16, 16, 3."""
    sheet = pixels_of(path)
    cell = sheet.shape[1] // columns
    assert cell == 80
    rows = sheet.reshape(-1, cell + 15 * lines + 6, columns, cell, 3).swapaxes(1, 2)
    return rows[:, :, 8:72, 8:72][:, :, ::4, ::4]


def assert_shows(tiles, images, lines):
    """Compare the tiles of a sheet with images by their rows; None is a gray one."""
    for tiles_of_line, rows in zip(tiles, lines, strict=True):
        for tile, row in zip(tiles_of_line, rows, strict=True):
            assert np.abs(tile - (128 if row is None else images.read(row))).max() <= 1


def neighbors_of(image, *paths):
    return str(image), [(path, 0.9 - number / 10) for number, path in enumerate(paths)]


def test_a_contact_sheet_shows_each_query_and_its_neighbors(tmp_path):
    images = digits(range(20))
    Image.fromarray(images.read(3)).save(tmp_path / "a\nb.png")
    nearest = [
        neighbors_of(tmp_path / "a\nb.png", images.names[5], images.names[6]),
        neighbors_of(tmp_path / "a\nb.png", "gone.png", images.names[3]),
    ]
    path = contact_sheet(nearest, images, tmp_path / "sheet.png")
    assert_shows(tiles_of(path, 3, 2), images, [(3, 5, 6), (3, None, 3)])


def test_a_contact_sheet_of_other_images_or_another_kind_of_file_is_refused(tmp_path):
    images = digits(range(20))
    Image.fromarray(images.read(3)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match="none of the neighbors is among"):
        contact_sheet([neighbors_of(tmp_path / "a.png", "gone.png")], images, tmp_path / "s.png")
    near = [neighbors_of(tmp_path / "a.png", images.names[0])]
    for name, error, says in (
        ("a.png/sheet.png", OutputError, "File exists.*choose another output"),
        ("sheet.xbm", OutputError, "cannot write mode RGB as XBM"),
        ("sheet.unknown", UsageError, r"give a name that ends in \.png"),
        ("sheet", UsageError, r"give a name that ends in \.png"),
    ):
        with pytest.raises(error, match=f"cannot write .*{says}"):
            contact_sheet(near, images, tmp_path / name)
    gone = [neighbors_of(tmp_path / "gone.png", images.names[0])]
    with pytest.raises(FileNotFoundError):  # what is read is not what cannot be written
        contact_sheet(gone, images, tmp_path / "s.png")
