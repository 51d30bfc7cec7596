"""Augmented views: their settings, the random parameters of each image, the pixels of a batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Float64, Int, Int64, Shaped, UInt8
from msgspec import Meta
from torch import Tensor

from nearkin.data.rng import uniform
from nearkin.distributed import to_device
from nearkin.errors import UsageError
from nearkin.schema import Fraction, Weight, described, suggestion, types_of

Interpolation = Literal["bilinear", "bicubic"]
Ratio = Annotated[float, Meta(ge=0.01, le=100)]

ATTEMPTS = 10  # Boxes that are tried before the largest central one is used


def between(
    u: Float64[np.ndarray, "..."], limits: tuple[float, float]
) -> Float64[np.ndarray, "..."]:
    """Scale uniform numbers from [0, 1) to the limits."""
    low, high = limits
    return low + (high - low) * u


def random_boxes(
    u: Float64[np.ndarray, "batch draws"],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    sizes: Float[np.ndarray, "batch 2"],
) -> Float64[np.ndarray, "batch 4"]:
    """Boxes (left, top, width, height) distributed as torchvision's `RandomResizedCrop`.

    In whole pixels. The first of `ATTEMPTS` boxes that fits is placed anywhere in the image; where
    none fits, the largest one of an allowed ratio lies at the center. `u` holds areas and ratios
    of the attempts, then the position.
    """
    width, height = sizes.T
    area = between(u[:, :ATTEMPTS], scale) * (width * height)[:, None]
    aspect = np.exp(between(u[:, ATTEMPTS:-2], (np.log(ratio[0]), np.log(ratio[1]))))
    sides = np.rint(np.sqrt(np.stack([area * aspect, area / aspect], axis=2)))
    fits = ((sides > 0) & (sides <= sizes[:, None])).all(axis=2)
    chosen = sides[np.arange(len(u)), fits.argmax(axis=1)]
    largest = np.rint(np.stack([height * ratio[1], width / ratio[0]], axis=1)).clip(1, sizes)
    any_fits = fits.any(axis=1, keepdims=True)
    side = np.where(any_fits, chosen, largest)
    free = sizes - side
    corner = np.where(any_fits, np.floor(u[:, -2:] * (free + 1)), free // 2)
    return np.concatenate([corner, side], axis=1)


Images = Float[Tensor, "batch channel height width"]
PerImage = Float[Tensor, " batch"]


def luminance(images: Images) -> Float[Tensor, "batch _ height width"]:
    """Luminance by ITU-R BT.601; what is not RGB stays as it is, channel by channel."""
    if images.shape[1] != 3:
        return images
    red, green, blue = images.split(1, dim=1)
    return torch.mul(red, 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def brightness(images: Images, factor: PerImage | Float[Tensor, "batch channel"]) -> Images:
    """Multiply by a factor from 0, which is black; 1 changes nothing."""
    return (images * factor.view(len(images), -1, 1, 1)).clamp_(0, 1)


def add_brightness(images: Images, amount: PerImage) -> Images:
    """Add a number, which changes dark images as much as light ones; 0 changes nothing."""
    return (images + _broad(amount)).clamp_(0, 1)


def contrast(images: Images, factor: PerImage) -> Images:
    """Move away from the image's mean luminance; factor 0 is uniform gray, 1 changes nothing.

    Of what is not RGB, each channel moves away from its own mean.
    """
    mean = luminance(images).mean(dim=(2, 3), keepdim=True)
    return torch.lerp(mean, images, _broad(factor)).clamp_(0, 1)


def saturation(images: Images, factor: PerImage) -> Images:
    """Move away from the pixel's gray; factor 0 is a gray image, 1 changes nothing."""
    return torch.lerp(luminance(images), images, _broad(factor)).clamp_(0, 1)


def hue(images: Images, turns: PerImage) -> Images:
    """Rotate the hue of HSV by this share of a full turn."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(dim=1)
    # Value and saturation stay, and with them the smallest and largest of the three channels:
    # only each channel's position between them changes, so no full conversion is needed.
    low = torch.minimum(torch.minimum(red, green), blue)
    high = torch.maximum(torch.maximum(red, green), blue)
    chroma = high - low
    sixths = torch.where(
        high == red,
        green - blue,
        torch.where(
            high == green, (blue - red).add_(chroma, alpha=2), (red - green).add_(chroma, alpha=4)
        ),
    ).div_(chroma.clamp(min=torch.finfo(chroma.dtype).tiny))
    sixths = sixths.add_(6 * turns[:, None, None]).remainder_(6)[:, None]
    pure = torch.tensor([[3, 1, -1], [2, -1, 2], [4, -1, 2]], dtype=images.dtype)
    center, slope, offset = to_device(pure, images.device)[:, :, None, None].unbind(dim=1)
    share = (sixths - center).abs_().mul_(slope).add_(offset).clamp_(0, 1)
    return share.mul_(chroma[:, None]).add_(low[:, None])


def grayscale(images: Images) -> Images:
    """The luminance in every channel."""
    return luminance(images).expand_as(images)


def solarize(images: Images) -> Images:
    """Invert what is not darker than the middle, 0.5."""
    return torch.where(images >= 0.5, 1 - images, images)


def _broad(factor: PerImage) -> Float[Tensor, "batch 1 1 1"]:
    return factor[:, None, None, None]


Squares = Float[Tensor, "batch channel side side"]


def separable(
    images: Images,
    rows: Float[Tensor, "batch tall height"],
    columns: Float[Tensor, "batch wide width"],
) -> Float[Tensor, "batch channel tall wide"]:
    """Apply one matrix along each image's height and another along its width."""
    across = torch.matmul(images.flatten(1, 2), columns.mT)
    return torch.matmul(rows[:, None], across.unflatten(1, images.shape[1:3]))


def resampling(
    start: PerImage,
    extent: PerImage,
    pixels: int,
    size: int,
    interpolation: Interpolation = "bilinear",
) -> Tensor:
    """Weights (batch, size, pixels) that resample an interval (shares) of a line of pixels.

    The bilinear or bicubic filter with antialiasing, as in Pillow's `resize`.
    """
    step = extent * pixels / size
    places = torch.arange(size, dtype=start.dtype, device=start.device) + 0.5
    centers = (start * pixels)[:, None] + step[:, None] * places
    grid = torch.arange(pixels, dtype=start.dtype, device=start.device) + 0.5
    reach = step.clamp(min=1)[:, None, None]
    distance = (centers[:, :, None] - grid).abs_() / reach
    weights = keys(distance) if interpolation == "bicubic" else (1 - distance).clamp_(min=0)
    return weights / weights.sum(dim=2, keepdim=True)


def keys(distance: Tensor) -> Tensor:
    """The cubic of Keys (1981) with a = -0.5, which is zero from a distance of two pixels on."""
    near = (1.5 * distance - 2.5) * distance.square() + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, far.where(distance < 2, 0))


def blur(images: Squares, sigma: PerImage) -> Squares:
    """Gaussian blur with a standard deviation in pixels, mirrored at the edges.

    The kernel is a tenth of the side, odd and at least 3 (Chen et al. 2020, appendix A).
    """
    side = images.shape[-1]
    radius = max(1, side // 20)
    taps = torch.arange(-radius, radius + 1, device=images.device)
    kernel = torch.softmax(-0.5 * (taps / sigma[:, None]).square(), dim=1)
    place = (torch.arange(side, device=images.device)[:, None] + taps).abs_()
    place = (side - 1) - (side - 1 - place).abs_()
    smooth = torch.einsum("nt,itj->nij", kernel, F.one_hot(place, side).to(kernel.dtype))
    return separable(images, smooth, smooth)


def warp(images: Squares, angle: PerImage, shift: Float[Tensor, "batch 2"]) -> Squares:
    """Rotate by degrees clockwise about the center, then shift; the edge is repeated outside."""
    turn = torch.deg2rad(angle)
    back = torch.stack([turn.cos(), turn.sin(), -turn.sin(), turn.cos()], dim=1).view(-1, 2, 2)
    origin = back @ (-2 * shift[:, :, None])  # the grid runs from -1 to 1
    grid = F.affine_grid(torch.cat([back, origin], dim=2), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def flip(images: Images) -> Images:
    """Swap left and right."""
    return images.flip(-1)


MEAN: Final = (0.485, 0.456, 0.406)
STD: Final = (0.229, 0.224, 0.225)  # Of red, green and blue in ImageNet

JITTER: Final = (brightness, contrast, saturation, hue, add_brightness)
NEUTRAL: Final = np.array([1.0, 1.0, 1.0, 0.0, 0.0])  # Strengths of `JITTER` that change nothing
LOWEST: Final = np.array([0.0, 0.0, 0.0, -0.5, -np.inf])
TURNS: Final = (0, 1, 2, 3, 0)  # A view has one kind of brightness, and four changes in all
ORDERS: Final = np.array(list(permutations(range(4))))
SLOTS: Final = 2 * ATTEMPTS + 2 + 14  # Uniform numbers per view, each with one fixed use


@dataclass(frozen=True, kw_only=True)
class View:
    """How one view of an image is made: crop, warp, jitter, gray, blur, solarize, flip.

    In that order. What has probability or strength 0 is left out and costs nothing.

    >>> View(flip=0.5, scale=(0.5, 1.0)).to_dict()
    {'scale': [0.5, 1.0], 'flip': 0.5}

    Raises:
        UsageError: If a value is of the wrong type or outside of its range.
    """

    kind: Annotated[str, Meta(min_length=1)] = "strong"
    """What a method asks for it by: strong, weak, small, gray, or a name of your own."""
    scale: tuple[Fraction, Fraction] = (0.2, 1.0)
    """Smallest and largest area of the crop, as a share of the image's, 0 to 1."""
    ratio: tuple[Ratio, Ratio] = (3 / 4, 4 / 3)
    """Smallest and largest width / height of the crop, 0.01 to 100."""
    flip: Fraction = 0.0
    """Probability of a horizontal flip."""
    jitter: Fraction = 0.0
    """Probability of color jitter: the four changes that follow, in random order."""
    brightness: Weight = 0.0
    """Pixels are multiplied by a factor from max(0, 1 - this) to 1 + this."""
    additive_brightness: bool = False
    """Whether a number from -brightness to brightness is added to pixels instead."""
    contrast: Weight = 0.0
    """Distances from the mean luminance are multiplied likewise."""
    saturation: Weight = 0.0
    """Distances from gray are multiplied likewise."""
    hue: Annotated[float, Meta(ge=0, le=0.5)] = 0.0
    """Largest change of hue either way, as a share of the color circle, 0 to 0.5."""
    gray: Fraction = 0.0
    """Probability of conversion to grayscale."""
    blur: Fraction = 0.0
    """Probability of a Gaussian blur; its kernel is a tenth of the view's side."""
    sigma: tuple[Weight, Weight] = (0.1, 2.0)
    """Smallest and largest standard deviation of the blur, in pixels of the view."""
    solarize: Fraction = 0.0
    """Probability that pixels of 0.5 or more are inverted."""
    translate: Fraction = 0.0
    """Largest shift across and down, as a share of the view's side, 0 to 1."""
    whole_shifts: bool = False
    """Whether shifts are whole pixels of the image: a fraction of one blurs a small image."""
    rotate: Annotated[float, Meta(ge=0, le=180)] = 0.0
    """Largest rotation either way, in degrees, 0 to 180."""
    size: Annotated[float, Meta(ge=0.05, le=1)] = 1.0
    """Side of the view, as a share of the run's image size, 0.05 to 1."""
    interpolation: Interpolation = "bilinear"
    """Of crops of small images, `bilinear` or `bicubic`; those of photos are always bicubic."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            object.__setattr__(self, entry.name, _checked(entry.name, getattr(self, entry.name)))

    @classmethod
    def from_dict(cls, values: Any) -> "View":
        """A view from its fields, as in a [[views]] table of a .toml file."""
        known = [entry.name for entry in fields(cls)]
        if not isinstance(values, dict):
            raise UsageError(f"{values!r} is no view; give a table of {', '.join(known)}")
        for key in values.keys() - set(known):
            raise UsageError(f"a view has no {key}.{suggestion(key, known)}")
        return cls(**{key: _checked(key, value) for key, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as TOML and JSON hold them."""
        changed = {key: value for key, value in vars(self).items() if value != getattr(View, key)}
        return {key: list(v) if isinstance(v, tuple) else v for key, v in changed.items()}


def _checked(name: str, value: Any) -> Any:
    """A field's value as floats, a list as a tuple; refused if it does not fit the field."""
    kind = types_of(View)[name]
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"a view's {name} is {value!r}; give {described(kind)}") from error
    if isinstance(converted, tuple) and converted[0] > converted[1]:
        raise UsageError(f"a view's {name} is {value!r}; give the smaller number first")
    return converted


@dataclass(frozen=True, slots=True)
class ViewParams:
    """The random parameters of one view of each image of a batch."""

    box: Float32[np.ndarray, "batch 4"]
    """Left, top, width and height of the crop, as shares of the image."""
    angle: Float32[np.ndarray, " batch"]  # Degrees, clockwise
    shift: Float32[np.ndarray, "batch 2"]  # To the right and down, as shares of the side
    jitter: Float32[np.ndarray, "batch 5"]  # Strengths of `JITTER`; `NEUTRAL` where there is none
    order: Int[np.ndarray, "batch 4"]  # Numbers of `TURNS`, first to last
    gray: Bool[np.ndarray, " batch"]
    sigma: Float32[np.ndarray, " batch"]
    """Standard deviation of the blur in pixels; 0 where there is none."""
    solarize: Bool[np.ndarray, " batch"]
    flip: Bool[np.ndarray, " batch"]
    gain: Float32[np.ndarray, "batch _"]
    """Factors of each channel of what is not RGB, 0 for one that is dropped; else of none."""

    @classmethod
    def joined(cls, parts: Sequence["ViewParams"]) -> "ViewParams":
        """The parameters of several batches, one after the other."""
        if len(parts) == 1:
            return parts[0]
        names = [entry.name for entry in fields(cls)]
        return cls(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})


def sample_view(
    view: View,
    sizes: Int[np.ndarray, "batch 2"],
    *,
    seed: int,
    epoch: int,
    index: Int64[np.ndarray, " batch"],
    number: int,
    num_channels: int = 3,
) -> ViewParams:
    """Sample one view of each image: a function of the seed, the epoch, the image and the number.

    Crops are whole pixels of images of these widths and heights. Of channels that are not RGB,
    each has a brightness of its own, and one is lost in place of all color.
    """
    own = 0 if num_channels == 3 else num_channels
    u = uniform(seed, epoch, index, number, SLOTS + (own and 1 + own))
    # Every parameter has its own slots, used or not: switching one on leaves the others alone.
    crop_u, u, gain_u = np.split(u, [2 * ATTEMPTS + 2, SLOTS], axis=1)
    factors = between(gain_u[:, 1:], (max(0.0, 1 - view.brightness), 1 + view.brightness))
    gain = np.where(u[:, :1] < view.jitter, factors, 1).astype(np.float32)
    if own:
        lost = np.flatnonzero((u[:, 2] < view.gray) & (own > 2))
        gain[lost, (gain_u[lost, 0] * own).astype(int)] = 0
        view = replace(view, brightness=0.0, saturation=0.0, hue=0.0, gray=0.0, solarize=0.0)
    sides = sizes.astype(float)
    box = random_boxes(crop_u, view.scale, view.ratio, sides) / np.tile(sides, 2)
    u_jitter, u_order, u_gray, u_blur, u_sigma, u_solarize, u_flip, u_angle = u[:, :8].T
    shift = between(u[:, 12:], (-view.translate, view.translate))
    if view.whole_shifts:
        farthest = np.rint(view.translate * sides)
        shift = (np.floor(u[:, 12:] * (2 * farthest + 1)) - farthest) / sides
    factor, amount = view.brightness, 0.0
    if view.additive_brightness:
        factor, amount = amount, factor
    strength = np.array([factor, view.contrast, view.saturation, view.hue, amount])
    lowest = np.maximum(NEUTRAL - strength, LOWEST)
    jitter = lowest + (NEUTRAL + strength - lowest) * u[:, 8:12][:, TURNS]
    return ViewParams(
        box=box.astype(np.float32),
        angle=between(u_angle, (-view.rotate, view.rotate)).astype(np.float32),
        shift=shift.astype(np.float32),
        jitter=np.where((u_jitter < view.jitter)[:, None], jitter, NEUTRAL).astype(np.float32),
        order=ORDERS[(u_order * len(ORDERS)).astype(int)],
        gray=u_gray < view.gray,
        sigma=np.where(u_blur < view.blur, between(u_sigma, view.sigma), 0).astype(np.float32),
        solarize=u_solarize < view.solarize,
        flip=u_flip < view.flip,
        gain=gain,
    )


def sample_views(
    views: Sequence[View], sizes: Int[np.ndarray, "batch 2"], **where: Any
) -> list[ViewParams]:
    """The parameters of each view of images of these widths and heights; see `sample_view`."""
    return [sample_view(view, sizes, number=n, **where) for n, view in enumerate(views)]


def crop(
    images: UInt8[Tensor, "batch channel height width"]
    | Float[Tensor, "batch channel height width"],
    box: Float32[np.ndarray, "batch 4"],
    size: int,
    interpolation: Interpolation = "bilinear",
) -> Float32[Tensor, "batch channel {size} {size}"]:
    """Crop each image by its own box and resample it, as Pillow's `resize(box=...)` does.

    Values of the result are from 0 to 1. A photograph is better cropped while it is decoded.
    """
    pixels = images.contiguous().float()
    if images.dtype == torch.uint8:
        pixels.div_(255)
    left, top, width, height = to_device(torch.from_numpy(box), images.device).unbind(dim=1)
    rows = resampling(top, height, images.shape[2], size, interpolation)
    columns = resampling(left, width, images.shape[3], size, interpolation)
    return separable(pixels, rows, columns).clamp_(0, 1)


def from_zero_to_one(pixels: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Pixels of 8 bits divided by 255; others are from 0 to 1 already."""
    return pixels / 255 if pixels.dtype == torch.uint8 else pixels


def augment(
    images: Shaped[Tensor, "batch channel side side"], params: ViewParams
) -> Float32[Tensor, "batch channel side side"]:
    """Apply everything but the crop: warp, jitter, gray, blur, solarize, flip.

    Pixels are of 8 bits, or in [0, 1]. The views are in [0, 1], and channels_last, the fastest
    layout for convolutions.
    """
    views = from_zero_to_one(images).clone(memory_format=torch.contiguous_format)
    for operation, mask, *strengths in _changes(params):
        rows = np.flatnonzero(mask)
        if len(rows):
            arrays = (rows, *(strength[rows] for strength in strengths))
            index, *own = (to_device(torch.from_numpy(each), images.device) for each in arrays)
            views[index] = operation(views[index], *own)
    return views.clamp_(0, 1).contiguous(memory_format=torch.channels_last)


def _changes(params: ViewParams) -> Iterator[tuple[Any, ...]]:
    """Operations in order, each with the images that it changes and its strengths."""
    yield warp, (params.angle != 0) | params.shift.any(axis=1), params.angle, params.shift
    yield brightness, (params.gain != 1).any(axis=1), params.gain
    # Each image has an order of its own, so each position takes four passes, over the images
    # that have this operation there.
    for turn in params.order.T:
        kinds = zip(JITTER, TURNS, NEUTRAL, params.jitter.T, strict=True)
        for operation, number, neutral, strength in kinds:
            yield operation, (turn == number) & (strength != neutral), strength
    yield grayscale, params.gray
    yield blur, params.sigma > 0, params.sigma
    yield solarize, params.solarize
    yield flip, params.flip


def input_statistics(num_channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and deviation that `normalize` assumes: ImageNet's, or those of no images.

    A network of others rescales its input; see `Backbone.rescale_input`.
    """
    if num_channels in (1, 3):
        return MEAN, STD
    return (0.5,) * num_channels, (0.25,) * num_channels


def normalize(
    images: Shaped[Tensor, "batch channel height width"],
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> Float[Tensor, "batch _ height width"]:
    """Subtract a mean from pixels of 8 bits, or from 0 to 1, and divide by a deviation.

    `statistics` are these two, by default `input_statistics`; of three numbers, one channel
    becomes three.
    """
    pixels = from_zero_to_one(images)
    values = torch.tensor(statistics or input_statistics(pixels.shape[1]), dtype=pixels.dtype)
    mean, std = to_device(values, pixels.device)[..., None, None]
    return pixels.sub(mean).div(std)
