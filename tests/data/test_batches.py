"""Batches are functions of the step: of nothing that happened before, and of no worker."""

import shutil
from dataclasses import replace

import builders
import loaders
import numpy as np
import pytest
import torch
from loaders import same
from PIL import Image

import nearkin
from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches, CenterCrops, center_crops, growing
from nearkin.data.decode import center
from nearkin.data.opening import open_images
from nearkin.data.preprocessing import Preprocessing
from nearkin.data.rng import uniform
from nearkin.data.samplers import PlannedBatchSampler, RandomBatchSampler
from nearkin.data.views import crop, normalize
from nearkin.errors import DataError, UsageError
from nearkin.types import UNLABELED

CPU = torch.device("cpu")


def small_images(count=40):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, 12, 12, 3), dtype=np.uint8)


def batches(data, *, batch_size=8, seed=0, size=12, workers=0, preset="simclr_cifar", views=2):
    images = open_images(data, cache=False)
    order = RandomBatchSampler(len(images), batch_size, seed)
    kinds = views_of(preset, ("strong",) * min(views, 2), more=views > 2)[:views]
    return Batches.of(images, kinds, image_size=size, sampler=order, device=CPU, workers=workers)


def views_in(made, epoch, rows):
    views, _ = next(made.planned([(epoch, rows)]))
    return views


def crops_in(made, epoch, rows):
    """What a worker prepares of these images."""
    planned = PlannedBatchSampler([(epoch, rows)], made.sampler.seed)
    return replace(made.dataset, sampler=planned)[0]


def test_views_depend_on_the_seed_and_the_epoch_and_on_no_step_before():
    rows = np.arange(8)
    made = batches(small_images())
    first, again = views_in(made, 0, rows), views_in(made, 0, rows)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], views_in(made, 1, rows)[0])
    assert not torch.equal(first[0], views_in(batches(small_images(), seed=1), 0, rows)[0])
    assert not torch.equal(first[0], first[1])
    straight = list(made.load(0, 12))
    assert all(map(same, batches(small_images()).load(7, 12), straight[7:]))


@pytest.mark.parametrize("preset", ["simclr_cifar", "swav", "characters"])
def test_views_that_are_made_together_are_those_of_each_step(preset):
    """Over the end of an epoch, and from any step."""
    one_by_one = batches(small_images(), preset=preset)
    together = replace(one_by_one, steps_at_once=3)
    for start in (0, 4):
        pairs = zip(together.load(start, 12), one_by_one.load(start, 12), strict=True)
        assert all(same(*pair) for pair in pairs)


def test_a_batch_holds_the_views_the_index_and_no_label():
    data = (small_images(), np.arange(40) % 3)
    batch = next(batches(data).load(0, 1))
    assert [view.shape for view in batch.views] == [(8, 3, 12, 12)] * 2
    assert batch.index.tolist() == RandomBatchSampler(40, 8, 0).rows(0).tolist()
    assert (batch.label == UNLABELED).all()
    multi_crop = next(batches(small_images(), preset="swav", views=8).load(0, 1))
    assert [view.shape[-1] for view in multi_crop.views] == [12, 12, 5, 5, 5, 5, 5, 5]


def test_a_photograph_that_turns_bad_is_replaced_alike_with_any_number_of_workers(
    photographs, tmp_path
):
    folder = shutil.copytree(photographs, tmp_path / "copy")
    made = [batches(folder, batch_size=4, size=32, workers=workers) for workers in (0, 1, 2)]
    (folder / "03.jpg").write_bytes(b"\xff\xd8 rotten")
    (folder / "05.jpg").unlink()
    alone, *helped = (list(each.load(0, 6)) for each in made)
    assert all(all(map(same, batches_of_workers, alone)) for batches_of_workers in helped)
    assert all(set(each.bad) == {3, 5} for each in made)
    assert not any(np.isin([3, 5], batch.index).any() for batch in alone)


@pytest.mark.parametrize("size", [(60, 20), (24, 60), (64, 48)])
def test_all_parts_of_small_images_that_are_not_square_are_seen(size):
    """As of photographs: each view shows what its box covers of the whole image."""
    width, height = size
    thirds = np.zeros((64, height, width, 3), np.uint8)
    for color, columns in enumerate(np.array_split(np.arange(width), 3)):
        thirds[:, :, columns, color] = 255
    made = batches(thirds, size=20, preset="moco_v2")
    rows = np.arange(64)
    boxes = made.dataset.sample(0, rows)[0].box
    pixels = crops_in(made, 0, rows).views[0].numpy().argmax(axis=-1)
    left, span = boxes[:, 0, None], boxes[:, 2, None]
    expected = np.floor(3 * (left + span * (np.arange(20) + 0.5) / 20)).clip(0, 2)
    assert (pixels[:, 10] == expected).mean() > 0.95
    held = crop(made.pixels, boxes, 20).numpy().argmax(axis=1)
    assert (held == pixels).mean() > 0.95
    counts = np.bincount(held.ravel()) / held.size
    assert counts.min() > 0.2


@pytest.mark.parametrize("size", [16, 64, 96])
def test_small_square_images_are_seen_up_to_their_borders_at_any_size(size):
    """Not only the center that evaluation sees at 64 pixels and more."""
    framed = np.full((8, 32, 32, 3), 255, np.uint8)
    framed[:, 2:-2, 2:-2] = 0
    made = batches(framed, size=size)
    whole = crop(made.pixels, np.tile(np.float32([0, 0, 1, 1]), (8, 1)), size)
    for edge in (whole[:, :, 0], whole[:, :, -1], whole[..., 0], whole[..., -1]):
        assert edge.min() > 0.9


@pytest.fixture
def small_folder(tmp_path):
    """Forty small files, of which two turn bad once they were listed."""
    for number, pixels in enumerate(small_images()):
        Image.fromarray(pixels).save(tmp_path / f"{number:02d}.png")
    images = open_images(tmp_path, cache=False)
    (tmp_path / "07.png").write_bytes(b"rotten")
    (tmp_path / "31.png").unlink()
    return images


def test_a_small_image_that_turns_bad_is_replaced_by_the_rule_for_photographs(small_folder):
    order = RandomBatchSampler(40, 8, seed=3)
    kinds = views_of("simclr_cifar")
    made = Batches.of(small_folder, kinds, image_size=12, sampler=order, device=CPU)
    assert made.bad == {7: "text, not an image", 31: "unreadable"}
    batch_rows = np.concatenate([batch.index.numpy() for batch in made.load(0, 10)])
    planned = np.concatenate([order.rows(step) for step in range(10)])
    replaced = np.flatnonzero(np.isin(planned, [7, 31]))
    assert len(replaced) == 4  # both, in each of two epochs
    for place in replaced:
        draws = uniform(3, int(place) // 40, planned[[place]], 255, 8)[0] * 40
        planned[place] = next(row for row in draws.astype(int) if row not in (7, 31))
    assert batch_rows.tolist() == planned.tolist()
    rows = np.array([7, 31, 0])
    loaded = crops_in(made, 1, rows)
    from_memory = zip(views_in(made, 1, rows), views_in(made, 1, loaded.rows), strict=True)
    assert all(torch.equal(bad, good) for bad, good in from_memory)


def test_a_run_without_a_readable_image_or_a_full_batch_stops(small_folder, tmp_path):
    with pytest.raises(DataError, match="40 images do not fill a batch of 41"):
        batches(small_images(), batch_size=41)
    for file in tmp_path.iterdir():
        file.unlink()
    made = loaders.batches(small_folder, 8, 12)
    with pytest.raises(DataError, match=r"\.png and 8 images drawn in its place cannot be read"):
        next(made.load(0, 1))


def test_large_arrays_are_cropped_like_the_same_images_in_files(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (9, 80, 70, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    of_array, of_files = (batches(data, batch_size=4, size=32) for data in (pixels, tmp_path))
    assert of_array.pixels is None
    assert all(map(same, of_array.load(0, 4), of_files.load(0, 4)))


def test_workers_that_are_not_forks_load_the_same(photographs, forkserver):
    before = torch.get_rng_state()
    alone, helped = (
        list(batches(photographs, batch_size=4, size=32, workers=workers).load(0, 2))
        for workers in (0, 1)
    )
    assert all(map(same, alone, helped))
    images = open_images(photographs, cache=False)
    crops = torch.cat(list(CenterCrops(images, 32, batch_size=7, workers=1)))
    assert torch.equal(crops, torch.cat(list(CenterCrops(images, 32))))
    assert torch.equal(torch.get_rng_state(), before)  # the global one is left alone


def test_pixels_come_in_order_and_unreadable_ones_are_gray_and_listed(photographs, tmp_path):
    folder = shutil.copytree(photographs, tmp_path / "copy")
    images = open_images(folder, cache=False)
    (folder / "02.jpg").write_bytes(b"")
    (folder / "09.jpg").unlink()
    for workers in (0, 2):
        source = CenterCrops(images, 32, batch_size=5, workers=workers)
        crops = torch.cat(list(source))
        assert source.bad == {2: "empty file", 9: "unreadable"}
        assert crops.shape == (12, 3, 32, 32)
        assert (crops[[2, 9]] == 128).all()
        assert (crops[8].permute(1, 2, 0).numpy() == center(images.read(8), 32)).all()
        assert torch.equal(torch.cat(list(source)), crops)  # may be had again


def test_networks_are_shown_pixels_with_imagenets_mean_and_deviation():
    pixels = torch.arange(256, dtype=torch.uint8).expand(1, 3, 2, 256)
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    torch.testing.assert_close(normalize(pixels) * std + mean, pixels / 255, rtol=0, atol=1e-6)


def test_arrays_are_cropped_together_as_they_are_one_by_one():
    rows = [3, 5, 38]
    for view in (
        Preprocessing(12),
        Preprocessing(10),
        Preprocessing(12, crop="center", resize_to=12),
        Preprocessing(12, crop="center", resize_to=14),
        Preprocessing(12, crop="squash", resize_to=12),
    ):
        for channels in (1, 3):
            images = open_images(small_images()[..., :channels], cache=False)
            together, bad = center_crops(images, rows, view)
            one_by_one = np.stack([view.pixels(images.read(row)) for row in rows])
            assert together.dtype == np.uint8
            assert not bad
            np.testing.assert_array_equal(together, one_by_one, err_msg=str(view))
            together[:] = 0  # a copy: the images stay
            assert images.read(3).any()


def sides(parts, start, stop):
    return [
        tuple(view.shape[-1] for view in batch.views)
        for batch in growing(parts, start, stop, total=7)
    ]


def test_each_part_of_training_has_its_size_whichever_step_it_starts_at():
    made = batches(builders.pixels(24, 96), size=64, preset="swav", views=3)
    parts = [made.resized(side) for side in (32, 48, 64)]
    whole = [(32, 32, 14)] * 2 + [(48, 48, 21)] * 2 + [(64, 64, 27)] * 3
    assert sides(parts, 0, 7) == whole
    for start in range(7):
        assert sides(parts, start, 7) == whole[start:]
    assert sides(parts, 1, 4) == whole[1:4]


def test_a_smaller_view_shows_what_the_larger_one_shows():
    """Averaged to the same size, the views of both sizes differ by what resampling loses."""
    for side, size in ((48, 48), (96, 64)):
        made = batches(builders.pixels(24, side), size=size, preset="simclr")
        assert (made.pixels is not None) == (side == 48)  # in memory, and as from files
        half = made.resized(size // 2)
        for large, little in zip(made.load(0, 3), half.load(0, 3), strict=True):
            assert large.index.tolist() == little.index.tolist()
            for a, b in zip(large.views, little.views, strict=True):
                assert 2 * b.shape[-1] == a.shape[-1]
                rows = zip(torch.nn.functional.avg_pool2d(a, 2).flatten(1), b.flatten(1))
                alike = [torch.corrcoef(torch.stack(row))[0, 1].item() for row in rows]
                assert np.median(alike) > 0.8


def test_sizes_of_no_whole_number_of_patches_are_refused(tmp_path):
    settings = {"backbone": "timm:test_vit2", "image_size": 32, "epochs": 1}
    with pytest.raises(UsageError, match=r"images of 20 px .*; give view_sizes 16 or 32"):
        nearkin.train(
            builders.pixels(16, 32), output=tmp_path / "run", view_sizes=[32, 20], **settings
        )


@pytest.mark.parametrize(("method", "num_views"), [("moco", 2), ("sigreg", 4)])
def test_a_run_whose_views_grow_resumes_exactly(tmp_path, method, num_views):
    settings = {"method": method, "num_views": num_views, "view_sizes": [8, 12, 16]}
    settings |= {"batch_size": 16, "backbone": "tiny", "epochs": 3, "save_every": 5}
    settings |= {"evaluate_every": 0, "val": 0.0}
    made = nearkin.train(
        builders.pixels(64, 16), output=tmp_path / "run", report=False, **settings
    )
    assert made.summary["image_size"] == 16
    run = made.folder
    expected = run.encoder.read_bytes()
    for late in (run.checkpoints / "ckpt-00000012.pt", run.summary, run.encoder):
        late.unlink()
    nearkin.train(builders.pixels(64, 16), output=run.path, resume=True, report=False, **settings)
    assert run.encoder.read_bytes() == expected
    log = run.log.read_text()
    assert "resuming after step 10 of 12" in log
    assert "views of 8,12,16 px" in log
