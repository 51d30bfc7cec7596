"""Views in a plain torch DataLoader, one image at a time and by the batch."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder

from nearkin.data.augmentations import views_of
from nearkin.data.batches import Batches
from nearkin.data.opening import open_images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.errors import UsageError
from nearkin.transforms import MEAN, STD, View, ViewTransform, normalize

EXAMPLE = Path(__file__).parents[1] / "examples" / "dataloader.py"
PLAIN = View(scale=(1.0, 1.0), ratio=(1.0, 1.0))
"""The whole of a square image."""


def samples(count=6, height=40, width=32, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def tensors(arrays):
    return torch.from_numpy(arrays).permute(0, 3, 1, 2)


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("form", [Image.fromarray, np.asarray, lambda a: tensors(a[None])[0]])
def test_an_image_becomes_a_tuple_of_views(form):
    image = form(samples(1)[0])
    views = ViewTransform("swav", ("strong", "weak", "small"), size=28)(image)
    assert [tuple(view.shape) for view in views] == [(3, 28, 28), (3, 28, 28), (3, 12, 12)]
    assert all(view.dtype == torch.float32 and view.isfinite().all() for view in views)


def test_a_batch_gets_the_views_of_its_images_one_by_one():
    arrays = samples()
    transform = ViewTransform("simclr", size=24)
    index = np.array([4, 0, 9, 2, 7, 5])
    for batch in (list(arrays), tensors(arrays), [Image.fromarray(each) for each in arrays]):
        together = transform(batch, index=index, seed=3, epoch=2)
        for row, image in enumerate(batch):
            alone = transform(image, index=index[row], seed=3, epoch=2)
            for view, all_views in zip(alone, together, strict=True):
                torch.testing.assert_close(view, all_views[row], atol=1e-5, rtol=1e-5)


def test_tensors_may_have_their_channels_last():
    arrays, transform = samples(), ViewTransform("simclr", size=24)
    last, first = torch.from_numpy(arrays), tensors(arrays)
    index = np.arange(len(arrays))
    assert equal(transform(last, index=index, seed=3), transform(first, index=index, seed=3))
    assert equal(transform(last[0], index=0, seed=3), transform(first[0], index=0, seed=3))


def test_the_views_of_an_index_are_those_of_a_run():
    arrays = samples(8, 16, 16)
    transform = ViewTransform("simclr_cifar", size=16)
    options = dict(
        image_size=16, sampler=RandomBatchSampler(8, 4, seed=5), device=torch.device("cpu")
    )
    batches = Batches.of(open_images(arrays), transform.views, **options)
    for epoch, batch in zip((0, 0, 1), batches.load(0, 3), strict=True):
        pixels = tensors(arrays)[batch.index]
        assert equal(transform(pixels, index=batch.index, seed=5, epoch=epoch), batch.views)
        drawn = {"seed": np.int64(5), "epoch": np.uint8(epoch)}
        assert equal(transform(pixels, index=batch.index, **drawn), batch.views)


def test_the_default_type_of_torch_changes_no_view():
    pixels, transform = tensors(samples()), ViewTransform("simclr", size=24)
    expected = transform(pixels, index=range(len(pixels)))
    torch.set_default_dtype(torch.float64)
    try:
        assert equal(transform(pixels, index=range(len(pixels))), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.needs("cuda")
def test_images_and_indices_may_be_on_a_device():
    pixels, transform = tensors(samples()).cuda(), ViewTransform("simclr", size=24)
    index = torch.arange(len(pixels))
    assert equal(transform(pixels, index=index.cuda()), transform(pixels, index=index))


def test_without_an_index_torchs_generator_decides():
    pixels = tensors(samples())
    transform = ViewTransform("simclr", size=24)
    torch.manual_seed(1)
    first, second = transform(pixels), transform(pixels)
    assert not equal(first, second)
    torch.manual_seed(1)
    assert equal(transform(pixels), first)


def test_values_are_from_0_to_1_unless_they_are_normalized():
    pixels = tensors(samples(2, 32, 32))
    (plain,) = ViewTransform([PLAIN], ("strong",), size=32, normalize=False)(pixels)
    torch.testing.assert_close(plain, pixels / 255)
    (view,) = ViewTransform([PLAIN], ("strong",), size=32)(pixels)
    torch.testing.assert_close(view, normalize(pixels / 255))
    assert len(MEAN) == len(STD) == 3


def test_the_whole_of_a_wide_image_is_in_a_view_of_all_of_it():
    pixels = tensors(samples(2, 16, 32))
    whole = View(scale=(1.0, 1.0), ratio=(2.0, 2.0))
    (view,) = ViewTransform([whole], ("strong",), size=16, normalize=False)(pixels)
    expected = F.interpolate(pixels / 255, (16, 16), mode="bilinear", antialias=True)
    torch.testing.assert_close(view, expected)


def test_the_interpolation_of_a_view_is_that_of_tensors_alone():
    (array,), part = samples(1), dict(scale=(0.3, 0.3), ratio=(1.0, 1.0))
    linear, cubic = (
        ViewTransform([View(interpolation=name, **part)], ("strong",), size=24, normalize=False)
        for name in ("bilinear", "bicubic")
    )
    for image in (array, Image.fromarray(array)):
        assert equal(linear(image, index=0), cubic(image, index=0))
    tensor = tensors(array[None])[0]
    assert not equal(linear(tensor, index=0), cubic(tensor, index=0))


@pytest.mark.parametrize("name", ["characters", "ncl_cifar", "simclr"])
def test_a_weak_view_is_cropped_shifted_and_flipped_only(name):
    """A shift stays: it is in the weak view of FixMatch, and is NCL's crop of a padded image."""
    strong, weak = views_of(name, ("strong", "weak"))
    kept = ("scale", "ratio", "flip", "translate", "whole_shifts", "interpolation", "size")
    assert all(getattr(weak, each) == getattr(strong, each) for each in kept)
    chances = ("jitter", "gray", "blur", "solarize", "rotate")
    assert not any(getattr(weak, each) for each in chances)
    assert (weak.translate > 0) == (name != "simclr")


def test_floats_gray_images_and_other_modes_are_images_too():
    transform = ViewTransform([PLAIN], ("strong",), size=32, normalize=False)
    array = samples(1, 32, 32)[0]
    color = transform(array)[0]
    assert torch.equal(transform(array.astype(np.float32) / 255)[0], color)
    assert torch.equal(transform(Image.fromarray(array).convert("RGBA"))[0], color)
    gray = array[..., 0]
    for image in (gray, gray[..., None], Image.fromarray(gray)):
        assert torch.equal(transform(image)[0], transform(np.stack([gray] * 3, axis=2))[0])
    tensor = tensors(array[None])[0]
    assert torch.equal(transform(tensor / 255)[0], transform(tensor)[0])
    assert transform(tensor[:1])[0].shape == (3, 32, 32)
    assert torch.equal(transform(tensor[0])[0], transform(tensor[:1])[0])


def test_what_is_no_image_is_told_in_words():
    image, transform = np.zeros((9, 9), np.uint8), ViewTransform(size=8)
    for wrong, message in (
        (np.stack([image] * 3), r"an array of shape \(3, 9, 9\); give \(height, width, 3\)"),
        (np.zeros((9, 0, 3), np.uint8), r"an array of shape \(9, 0, 3\)"),
        (np.zeros((9, 9, 3), np.int64), "an array of int64; give uint8, or floats from 0 to 1"),
        (np.full((9, 9, 3), np.nan), "floats from nan to nan; give values from 0 to 1"),
        (torch.zeros(9, 9, 4).byte(), r"shape \(1, 9, 9, 4\); give \(3, height, width\)"),
        (torch.zeros(9), r"a tensor of shape \(1, 9\)"),
        (torch.zeros(3, 9, 9).int(), "a tensor of torch.int32; give uint8"),
        (torch.full((3, 9, 9), -1.0), "floats from -1 to -1; .* not yet normalized"),
        ([], "a batch of no images"),
        ([torch.zeros(3, 9, 9), torch.zeros(3, 9, 8)], "tensors of several shapes"),
        ([torch.zeros(3, 9, 9), image], "or of tensors and other images"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            transform(wrong)


def test_wrong_settings_are_told_in_words():
    with pytest.raises(ValueError, match="2 indices for 6 images"):
        ViewTransform(size=8)(tensors(samples()), index=[1, 2])
    with pytest.raises(ValueError, match="size is 0 pixels"):
        ViewTransform(size=0)
    with pytest.raises(UsageError, match="unknown augmentation simcrl"):
        ViewTransform("simcrl")


class Pairs(Dataset):
    """Images of several sizes with a label and a name."""

    def __len__(self):
        return 8

    def __getitem__(self, row):
        return Image.fromarray(samples(1, 20 + row, 30, row)[0]), row, f"image {row}"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_makes_views_by_the_batch_and_keeps_what_comes_with_an_image(workers):
    transform = ViewTransform("simclr", size=16)
    torch.manual_seed(0)
    loader = DataLoader(Pairs(), batch_size=4, collate_fn=transform.collate, num_workers=workers)
    (views, labels, names), (others, _, _) = list(loader)
    assert [tuple(view.shape) for view in views] == [(4, 3, 16, 16)] * 2
    assert labels.tolist() == [0, 1, 2, 3]
    assert list(names) == [f"image {row}" for row in range(4)]
    assert not equal(views, others)
    assert len(transform.collate([image for image, *_ in map(Pairs().__getitem__, range(3))])) == 2


def folder(path):
    for row, array in enumerate(samples(18)):
        (path / str(row % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(path / str(row % 2) / f"{row}.png")
    return path


def test_it_is_a_transform_of_torchvisions_data_sets(tmp_path):
    data = ImageFolder(folder(tmp_path), transform=ViewTransform("moco_v2", size=16))
    views, labels = next(iter(DataLoader(data, batch_size=6)))
    assert [tuple(view.shape) for view in views] == [(6, 3, 16, 16)] * 2
    assert len(labels) == 6


def test_the_example_trains(tmp_path, capsys):
    main = runpy.run_path(str(EXAMPLE))["main"]
    assert np.isfinite(main(str(folder(tmp_path)), workers=0))
    assert capsys.readouterr().out.count("loss") == 2
