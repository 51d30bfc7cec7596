"""Views against Pillow and torchvision, image by image, and what must hold for any of them."""

import re
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as TF
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torchvision.transforms import ColorJitter, RandomResizedCrop

from nearkin.data import views as transforms
from nearkin.data.augmentations import AUGMENTATIONS, SMALL, augmentation, views_of
from nearkin.data.views import MEAN, STD, View, ViewParams, augment, crop, normalize, sample_view
from nearkin.errors import UsageError

CLOSE = 1e-5
"""Some eighty roundings of float32 near 1, as references round elsewhere; a byte is 4e-3."""
EVERYTHING = View(
    flip=0.5, jitter=0.8, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.5, gray=0.2,
    blur=0.5, solarize=0.2, translate=0.1, rotate=20.0,
)  # fmt: skip


def samples(count: int, size: int = 32, channels: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


def sampled(view: View, count: int, size: int = 32, **changes) -> ViewParams:
    sides = [changes.pop(side, size) for side in ("width", "height")]
    sizes = np.stack([np.broadcast_to(side, count) for side in sides], axis=1)
    defaults = dict(seed=0, epoch=0, index=np.arange(count), number=0)
    return sample_view(view, sizes, **defaults | changes)


def only(params: ViewParams, row: int) -> ViewParams:
    return ViewParams(**{each.name: getattr(params, each.name)[[row]] for each in fields(params)})


def assert_close(ours, theirs, tolerance: float = CLOSE) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("channels", [1, 3])
def test_color_is_changed_as_torchvision_does(channels):
    images = samples(9, channels=channels)
    images[0, :, :8] = 0  # hue and saturation of black, white and gray are nobody's
    images[0, :, 8:16] = 1
    images[0, :, 16:24] = 0.5
    images[1] = images[1].round()  # two or three equal channels
    for ours, reference, low, high in (
        (transforms.brightness, TF.adjust_brightness, 0.0, 2.0),
        (transforms.contrast, TF.adjust_contrast, 0.0, 2.0),
        (transforms.saturation, TF.adjust_saturation, 0.0, 2.0),
        (transforms.hue, TF.adjust_hue, -0.5, 0.5),
        (transforms.add_brightness, lambda x, amount: (x + amount).clamp(0, 1), -1.0, 1.0),
    ):
        strength = torch.linspace(low, high, 9)
        expected = [reference(x, s.item()) for x, s in zip(images, strength)]
        assert_close(ours(images, strength), torch.stack(expected))


def test_gray_flipped_and_solarized_as_torchvision_does():
    images = samples(4)
    images[0, 0, 0, 0] = 0.5
    assert_close(transforms.grayscale(images), TF.rgb_to_grayscale(images, num_output_channels=3))
    assert_close(transforms.solarize(images), TF.solarize(images, 0.5))
    assert torch.equal(transforms.flip(images), TF.hflip(images))


def test_each_image_is_blurred_with_its_own_sigma():
    sigma = torch.tensor([0.1, 0.9, 2.0])
    for size, kernel in ((8, 3), (32, 3), (64, 7), (96, 9), (224, 23)):
        images = samples(3, size)
        expected = [TF.gaussian_blur(x, kernel, s.item()) for x, s in zip(images, sigma)]
        assert_close(transforms.blur(images, sigma), torch.stack(expected))


def test_warp_is_torchvisions_affine_on_a_image_with_repeated_edges():
    """The tolerance is that of sampling places: their rounding times 32 pixels."""
    images, pad = samples(4), 32
    angle = torch.tensor([0.0, 15.0, -40.0, 90.0])
    shift = torch.tensor([[0.25, -0.125], [0.0, 0.0], [0.125, 0.25], [-0.0625, 0.0]])
    padded = TF.pad(images, [pad], padding_mode="edge")
    usual = dict(scale=1.0, shear=[0.0, 0.0], interpolation=TF.InterpolationMode.BILINEAR)
    turned = [
        TF.affine(x, angle=a.item(), translate=(32 * s).int().tolist(), **usual)
        for x, a, s in zip(padded, angle, shift)
    ]
    expected = [TF.center_crop(x, [32, 32]) for x in turned]
    assert_close(transforms.warp(images, angle, shift), torch.stack(expected), 2e-4)


BOXES = np.array([[0, 0, 32, 32], [3, 5, 20, 11], [31, 0, 1, 32], [8, 8, 16, 24]], np.float32)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_crops_are_pillows_both_larger_and_smaller_and_the_whole_is_itself(interpolation):
    images, how = samples(4), Image.Resampling[interpolation.upper()]
    for size in (8, 20, 32, 64):
        expected = [
            Image.fromarray(channel.numpy()).resize((size, size), how, box=(x, y, x + w, y + h))
            for image, (x, y, w, h) in zip(images, BOXES.tolist())
            for channel in image
        ]
        expected = torch.from_numpy(np.stack(expected)).view(4, 3, size, size)
        assert_close(crop(images, BOXES / 32, size, interpolation), expected.clamp(0, 1))
    pixels, whole = (images * 255).to(torch.uint8), np.tile(np.float32([0, 0, 1, 1]), (4, 1))
    for memory in (torch.contiguous_format, torch.channels_last):
        itself = crop(pixels.to(memory_format=memory), whole, 32, interpolation)
        assert torch.equal(itself, pixels / 255)


def test_enlarged_crops_are_torchvisions():
    """But for the outermost half pixel, where torchvision cannot see beside the box."""
    images = samples(4)
    ours = crop(images, BOXES / 32, 64)
    for row, (x, y, w, h) in enumerate(BOXES.astype(int).tolist()):
        theirs = TF.resized_crop(images[row], y, x, h, w, [64, 64], antialias=False)
        edge_x, edge_y = (int(np.ceil(32 / side)) if side < 32 else 0 for side in (w, h))
        inner = np.s_[:, edge_y : 64 - edge_y, edge_x : 64 - edge_x]
        assert_close(ours[row][inner], theirs[inner])


def test_boxes_are_distributed_like_torchvisions():
    for width, height, *scale in (
        (32, 32, 0.08, 1.0),
        (500, 375, 0.2, 1.0),
        (40, 200, 0.5, 1.0),
        (7, 3, 0.05, 0.14),
    ):
        view, count = View(scale=tuple(scale)), 3000
        box = sampled(view, count, width=width, height=height).box
        pixels = box.astype(float) * [width, height, width, height]
        assert np.allclose(pixels, pixels.round(), atol=1e-3)
        torch.manual_seed(0)
        canvas = torch.empty(1, height, width)
        theirs = [RandomResizedCrop.get_params(canvas, scale, view.ratio) for _ in range(count)]
        top, left, tall, wide = np.array(theirs).T
        x, y, w, h = pixels.round().T
        assert abs((w * h).mean() - (tall * wide).mean()) < 0.02 * width * height
        assert abs(np.log(w / h).mean() - np.log(wide / tall).mean()) < 0.02
        for ours, reference in [(x, left), (y, top), (w, wide), (h, tall), (w * h, tall * wide)]:
            assert stats.ks_2samp(ours, reference).pvalue > 1e-3, (width, height)


@settings(max_examples=50)
@given(width=st.integers(1, 300), height=st.integers(1, 300), seed=st.integers(0, 1000))
def test_boxes_lie_in_the_image(width, height, seed):
    view = View(scale=(0.0, 1.0), ratio=(0.01, 100.0))
    left, top, wide, tall = sampled(view, 20, width=width, height=height, seed=seed).box.T
    assert min(left.min(), top.min()) >= 0
    assert min(wide.min(), tall.min()) > 0
    assert max((left + wide).max(), (top + tall).max()) <= 1 + 1e-6
    sizes = np.array([[20, 300, width], [90, 30, height]])  # drawn together, and one alone
    together = sampled(view, 3, width=sizes[0], height=sizes[1], seed=seed)
    alone = sampled(view, 3, width=width, height=height, seed=seed)
    assert np.array_equal(together.box[2], alone.box[2])


def test_strengths_are_distributed_like_torchvisions():
    view = View(jitter=1.0, brightness=0.4, contrast=1.5, saturation=0.8, hue=0.3)
    ours = sampled(view, 2000)
    torch.manual_seed(0)
    jitter = ColorJitter(0.4, 1.5, 0.8, 0.3)
    limits = (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
    theirs = [ColorJitter.get_params(*limits) for _ in range(2000)]
    for place in range(4):
        reference = [params[1 + place] for params in theirs]
        assert stats.ks_2samp(ours.jitter[:, place], reference).pvalue > 1e-3
    counts = np.unique(ours.order, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3


def test_additive_brightness_is_distributed_as_in_the_code_of_byol_and_simclr():
    """A uniform number from -brightness to brightness, in the place of the factor."""
    view = View(jitter=0.8, brightness=0.4, contrast=0.4, additive_brightness=True)
    ours = sampled(view, 4000)
    jittered = ours.jitter[:, 1] != 1
    assert (ours.jitter[:, 0] == 1).all()
    assert ((ours.jitter[:, 4] != 0) == jittered).all()
    assert abs(jittered.mean() - 0.8) < 0.03
    amounts = ours.jitter[jittered, 4]
    assert stats.kstest(amounts, stats.uniform(-0.4, 0.8).cdf).pvalue > 1e-3
    assert amounts.std() == pytest.approx(0.4 / 3**0.5, rel=0.03)
    large = sampled(View(jitter=1.0, brightness=1.5, additive_brightness=True), 4000).jitter[:, 4]
    assert stats.kstest(large, stats.uniform(-1.5, 3.0).cdf).pvalue > 1e-3


def test_probabilities_are_kept_and_ranges_filled():
    params = sampled(EVERYTHING, 4000)
    shares = {name: getattr(params, name).mean() for name in ("flip", "gray", "solarize")}
    shares |= {"jitter": (params.jitter[:, 0] != 1).mean(), "blur": (params.sigma > 0).mean()}
    for name, share in shares.items():
        assert abs(share - getattr(EVERYTHING, name)) < 0.03, name  # over four deviations
    params = sampled(replace(EVERYTHING, blur=1.0), 4000)
    for values, low, high in ((params.angle, -20, 20), (params.sigma, 0.1, 2.0)):
        assert low <= values.min() < low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) < values.max() <= np.float32(high)


def test_shifts_are_whole_pixels_all_alike_in_number():
    """As AutoNovel and NCL draw them: 4 pixels of 32 are -4 to 4, each as often."""
    shift = sampled(View(translate=4 / 32, whole_shifts=True), 9000).shift * 32
    for across_or_down in shift.T:
        pixels, count = np.unique(across_or_down, return_counts=True)
        assert pixels.tolist() == list(range(-4, 5))
        assert np.abs(count - 1000).max() < 130  # over four deviations


def test_a_shift_moves_pixels_and_blurs_none():
    images = samples(64)
    view = replace(AUGMENTATIONS["ncl_cifar"][0], flip=0.0)
    params = sampled(view, 64)
    shifted = augment(crop(images, params.box, 32), params)
    pixels, place = np.rint(params.shift * 32).astype(int), np.arange(32)
    for image, moved, (right, down) in zip(images, shifted, pixels):
        rows, columns = (place - down).clip(0, 31), (place - right).clip(0, 31)
        assert_close(moved, image[:, rows][:, :, columns], 2e-4)


def test_what_is_drawn_is_uncorrelated():
    """Every operation has numbers of its own; by chance 4,000 params correlate to about 0.06."""
    always = replace(EVERYTHING, jitter=1.0, blur=1.0)
    params = sampled(always, 4000, size=1000)
    area = params.box[:, 2] * params.box[:, 3]
    single = [area, params.angle, params.gray, params.sigma, params.solarize, params.flip]
    columns = np.column_stack([*single, params.shift, params.jitter[:, :4], params.order[:, 0]])
    correlation = np.corrcoef(columns.T) - np.eye(columns.shape[1])
    assert np.abs(correlation).max() < 0.08


def test_switching_one_operation_off_moves_no_other():
    everything = sampled(EVERYTHING, 50)
    plain = sampled(replace(EVERYTHING, jitter=0.0, blur=0.0, rotate=0.0), 50)
    for name in ("box", "shift", "gray", "solarize", "flip"):
        assert np.array_equal(getattr(everything, name), getattr(plain, name)), name


def test_views_differ_by_image_seed_epoch_and_number():
    images = samples(8)
    for changed in ("seed", "epoch", "number"):
        a, b = (augment(images, sampled(EVERYTHING, 8, **{changed: value})) for value in (0, 1))
        assert ((a - b).abs().amax(dim=(1, 2, 3)) > 0.01).all(), changed
    images = samples(1).expand(32, -1, -1, -1)  # every copy is drawn for itself
    for view in (EVERYTHING, SMALL, *AUGMENTATIONS["byol"]):
        params = sampled(view, 32)
        views = augment(crop(images, params.box, 32), params)
        assert all(not torch.allclose(a, b, atol=1e-3) for a, b in pairwise(views))


def one_by_one(image: torch.Tensor, params: ViewParams) -> torch.Tensor:
    """What `augment` should make of one image, in the words of torchvision or of BYOL's code."""

    def brightness(image: torch.Tensor, factor: float) -> torch.Tensor:
        return (TF.adjust_brightness(image, factor) + params.jitter[0, 4].item()).clamp(0, 1)

    operations = [brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue]
    for place in params.order[0]:
        image = operations[place](image, params.jitter[0, place].item())
    if params.gray[0]:
        image = TF.rgb_to_grayscale(image, num_output_channels=3)
    if params.sigma[0] > 0:
        image = TF.gaussian_blur(image, 3, params.sigma[0].item())
    if params.solarize[0]:
        image = TF.solarize(image, 0.5)
    return TF.hflip(image) if params.flip[0] else image


@pytest.mark.parametrize("additive", [False, True])
def test_a_view_is_what_torchvision_makes_of_each_image(additive):
    """Order included. Solarizing is a jump, so pixels within rounding of 0.5 do not count."""
    images, view = samples(64), replace(EVERYTHING, translate=0.0, rotate=0.0)
    params = sampled(replace(view, additive_brightness=additive), 64)
    assert params.jitter[:, 4].any() == additive
    before = images.clone()
    ours = augment(images, params)
    assert torch.equal(images, before)  # what is given is not written to
    theirs = torch.stack([one_by_one(x, only(params, row)) for row, x in enumerate(images)])
    at_the_jump = torch.from_numpy(params.solarize)[:, None, None, None] & (ours > 0.5 - 1e-4)
    assert at_the_jump.float().mean() < 0.001
    assert_close(ours[~at_the_jump], theirs[~at_the_jump])


@settings(max_examples=25)
@given(rows=st.lists(st.integers(0, 15), min_size=1, max_size=16))
def test_an_image_gets_the_same_view_in_any_company(rows):
    """Up to the last bits, which some processors' matrix products owe to the batch's size."""
    images, view = samples(16), replace(EVERYTHING, solarize=0.0)
    params = sampled(view, 16)
    everyone = augment(crop(images, params.box, 32), params)
    index = np.array(rows)
    again = sampled(view, len(index), index=index)
    chosen = augment(crop(images[index], again.box, 32), again)
    assert_close(chosen, everyone[index])


def test_probability_zero_leaves_the_image_as_it_is():
    strong = View(brightness=0.8, contrast=0.8, saturation=0.8, hue=0.5)
    for channels in (1, 3):
        images = samples(4, channels=channels)
        assert torch.equal(augment(images, sampled(strong, 4)), images)
        assert torch.equal(augment(images, sampled(View(jitter=1.0), 4)), images)


def test_one_channel_is_a_gray_image():
    """Color changes treat it as they treat three equal channels."""
    gray = samples(16, channels=1)
    params = sampled(replace(EVERYTHING, solarize=0.0), 16)
    three = augment(gray.expand(-1, 3, -1, -1), params)
    one = augment(gray, params)
    assert one.shape == gray.shape
    assert_close(three, one.expand(-1, 3, -1, -1), 2e-4)  # luminance weights sum to 0.9999
    assert normalize(one).shape == three.shape


@settings(max_examples=25)
@given(
    name=st.sampled_from([*AUGMENTATIONS]),
    size=st.integers(8, 64),
    stored=st.integers(1, 64),
    channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**32),
)
def test_any_view_is_finite_and_between_0_and_1(name, size, stored, channels, seed):
    images = (samples(3, stored, channels, seed) * 255).to(torch.uint8)
    for number, view in enumerate(AUGMENTATIONS[name]):
        params = sampled(view, 3, stored, seed=seed, number=number)
        views = augment(crop(images, params.box, size), params)
        assert views.shape == (3, channels, size, size)
        assert views.is_contiguous(memory_format=torch.channels_last)
        assert 0 <= views.min() <= views.max() <= 1  # and so none is NaN


def test_normalize_is_torchvisions_and_keeps_the_layout():
    views = augment(samples(2), sampled(SMALL, 2))
    assert_close(normalize(views), TF.normalize(views, MEAN, STD))
    assert normalize(views).is_contiguous(memory_format=torch.channels_last)


def test_a_method_gets_as_many_views_as_it_asks_for():
    for name, count in (("simclr", 2), ("moco_v1", 1), ("byol", 2), ("byol", 1), ("swav", 2)):
        expected = (AUGMENTATIONS[name] * (2 if name == "simclr" else 1))[:count]
        assert views_of(name, ("strong",) * count) == expected, (name, count)
    # Multi-crop takes all further views that there are.
    assert views_of("swav", more=True) == AUGMENTATIONS["swav"]
    assert views_of("simclr", more=True) == views_of("simclr")
    strong, weak = views_of("simclr", ("strong", "weak"))  # which is crop and flip only
    assert strong == AUGMENTATIONS["simclr"][0]
    assert (weak.jitter, weak.gray, weak.blur, weak.solarize, weak.rotate) == (0, 0, 0, 0, 0)
    assert (weak.scale, weak.flip) == (strong.scale, strong.flip)
    small = AUGMENTATIONS["swav"][2]
    assert views_of("swav", ("strong", "small")) == (AUGMENTATIONS["swav"][0], small)


def test_views_are_values_of_python_and_of_toml(tmp_path):
    own = View(kind="anchor", scale=(0.9, 1.0), flip=0.5, size=0.5)
    gray = View(gray=1.0)
    assert views_of([own, gray], ("anchor", "strong", gray)) == (own, gray, gray)
    path = tmp_path / "views.toml"
    anchor = 'kind = "anchor"\nscale = [0.9, 1]\nflip = 0.5\nsize = 0.5'
    path.write_text(f"[[views]]\n{anchor}\n[[views]]\ngray = 1\n")
    assert augmentation(str(path)) == (own, gray)
    for views in AUGMENTATIONS.values():
        assert augmentation([view.to_dict() for view in views]) == views


def test_views_that_are_wrong_are_told_in_words(tmp_path):
    path = tmp_path / "views.toml"
    for text, message in (
        ("", "0 views; give 1 to 64"),
        ("views = 3", "view 1: 3 is no view; give a table of kind, scale"),
        ("[[view]]", "unknown key view; give"),
        ("[[views]]\nflop = 0.5", "view 1: a view has no flop. Did you mean flip?"),
        ("[[views]]\nflip = true", "view 1: a view's flip is True; give a number"),
        ("[[views]]\nscale = 0.5", "a view's scale is 0.5; give 2 numbers from 0 to 1"),
        ('[[views]]\nkind = ""', "a view's kind is ''; give text"),
        ("[[views]]\nadditive_brightness = 3", "additive_brightness is 3; give true or false"),
        ("[[views]", "cannot read the views of"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=re.escape(message)):
            augmentation(str(path))
    for name, kinds, message in (
        ("simclr", ("strong", "anchor"), "simclr has 0 anchor views, and the method needs 1"),
        ("byol", ("strong",) * 3, "byol has 2 strong views, and the method needs 3"),
        ("missing.toml", ("strong",), "cannot read the views of missing.toml"),
        ("simcrl", ("strong",), "unknown augmentation simcrl. Did you mean simclr?"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            views_of(name, kinds)


def test_a_view_out_of_range_is_refused():
    wrong = {"flip": 1.5, "jitter": -0.1, "ratio": (0.0, 1.0), "hue": 0.6, "size": -1.0}
    more = [("gray", float("nan")), ("scale", (0.9, 0.2)), ("scale", (0.2, 2.0))]
    for name, value in (*wrong.items(), *more):
        with pytest.raises(UsageError, match=f"a view's {name} is .*; give "):
            View(**{name: value})
