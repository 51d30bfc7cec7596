"""Batches are functions of the step: of nothing that happened before, and of no worker."""

import numpy as np
import pytest
import torch
from PIL import Image

from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.centered import pixels, to_network
from nearkin.data.images import open_images
from nearkin.data.order import Order
from nearkin.errors import DataError
from nearkin.types import UNKNOWN

CPU = torch.device("cpu")


def small_pictures(count=40):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, 12, 12, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(0)
    for number in range(12):
        noise = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((160, 120)).save(folder / f"{number:02d}.jpg")
    return folder


def batches(data, *, batch_size=8, seed=0, size=12, workers=0, preset="simclr_cifar", views=2):
    images = open_images(data)
    order = Order(len(images), batch_size, seed)
    kinds = views_of(preset, views)
    return Batches(images, kinds, image_size=size, order=order, device=CPU, workers=workers)


def assert_same(a, b):
    assert torch.equal(a.index, b.index)
    assert all(torch.equal(x, y) for x, y in zip(a.views, b.views, strict=True))


def test_an_epoch_shows_every_picture_at_most_once_and_the_next_in_another_order():
    order = Order(num_images=43, batch_size=10, seed=0)
    epochs = [[order.rows(4 * epoch + step) for step in range(4)] for epoch in range(2)]
    seen = [np.concatenate(epoch) for epoch in epochs]
    assert all(len(set(rows.tolist())) == 40 for rows in seen)
    assert seen[0].tolist() != seen[1].tolist()
    assert [order.epoch(step) for step in (0, 3, 4)] == [0, 0, 1]


def test_any_step_can_be_had_without_the_steps_before_it():
    made = batches(small_pictures())
    straight = list(made.between(0, 12))
    for step, batch in zip(range(7, 12), batches(small_pictures()).between(7, 12), strict=True):
        assert_same(batch, straight[step])


def test_views_depend_on_the_seed_and_the_epoch():
    rows = np.arange(8)
    made = batches(small_pictures())
    first, again = made.views(0, rows), made.views(0, rows)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], made.views(1, rows)[0])
    assert not torch.equal(first[0], batches(small_pictures(), seed=1).views(0, rows)[0])
    assert not torch.equal(first[0], first[1])


def test_a_batch_holds_the_views_the_index_and_no_label():
    data = (small_pictures(), np.arange(40) % 3)
    batch = next(batches(data).between(0, 1))
    assert [view.shape for view in batch.views] == [(8, 3, 12, 12)] * 2
    assert batch.index.tolist() == Order(40, 8, 0).rows(0).tolist()
    assert (batch.label == UNKNOWN).all()


def test_multi_crop_gives_views_of_their_own_size():
    made = batches(small_pictures(), preset="swav", views=8)
    batch = next(made.between(0, 1))
    assert [view.shape[-1] for view in batch.views] == [12, 12, 96, 96, 96, 96, 96, 96]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_photographs(photographs, workers):
    alone = list(batches(photographs, batch_size=4, size=32).between(0, 6))
    helped = list(batches(photographs, batch_size=4, size=32, workers=workers).between(0, 6))
    for a, b in zip(alone, helped, strict=True):
        assert_same(a, b)


def test_loading_leaves_the_global_random_state_alone(photographs):
    before = torch.get_rng_state()
    list(batches(photographs, batch_size=4, size=32, workers=1).between(0, 2))
    list(batches(small_pictures()).between(0, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_photograph_that_turns_bad_is_replaced_alike_with_any_number_of_workers(
    photographs, tmp_path
):
    import shutil

    folder = shutil.copytree(photographs, tmp_path / "copy")
    made = [batches(folder, batch_size=4, size=32, workers=workers) for workers in (0, 2)]
    (folder / "03.jpg").write_bytes(b"\xff\xd8 rotten")
    (folder / "05.jpg").unlink()
    alone, helped = (list(each.between(0, 6)) for each in made)
    for a, b in zip(alone, helped, strict=True):
        assert_same(a, b)
    for each in made:
        assert set(each.bad) == {3, 5}
    assert not any(np.isin([3, 5], batch.index).any() for batch in alone)


def test_pictures_that_do_not_fill_a_batch_are_refused():
    with pytest.raises(DataError, match="40 pictures do not fill a batch of 41"):
        batches(small_pictures(), batch_size=41)


def test_pixels_come_in_order_and_unreadable_ones_are_gray(photographs, tmp_path):
    import shutil

    folder = shutil.copytree(photographs, tmp_path / "copy")
    images = open_images(folder)
    (folder / "02.jpg").write_bytes(b"")
    shown = torch.cat(list(pixels(images, 32, batch_size=5)))
    assert shown.shape == (12, 3, 32, 32)
    assert (shown[2] == 128).all()
    network = to_network(shown)
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    torch.testing.assert_close(network * std + mean, shown / 255, rtol=0, atol=1e-6)
