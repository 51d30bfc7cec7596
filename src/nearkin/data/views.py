"""Views: how one is drawn, what was drawn for each image, and the pixels that come of it.

Parameters are numpy arrays, so loader workers can draw them too and no decision waits for an
accelerator. Pixels are computed by the batch, each image with parameters of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int64, UInt8
from torch import Tensor

from nearkin.data import transforms
from nearkin.data.draws import uniform
from nearkin.data.transforms import ATTEMPTS, between, random_boxes
from nearkin.distributed import sent
from nearkin.errors import UsageError

MEAN: Final = (0.485, 0.456, 0.406)
"""Of ImageNet's red, green and blue."""
STD: Final = (0.229, 0.224, 0.225)
"""Of ImageNet's red, green and blue."""

JITTER: Final = (transforms.brightness, transforms.contrast, transforms.saturation, transforms.hue)
NEUTRAL: Final = np.array([1.0, 1.0, 1.0, 0.0])
"""The strengths of `JITTER` that change nothing."""
LOWEST: Final = np.array([0.0, 0.0, 0.0, -0.5])
ORDERS: Final = np.array(list(permutations(range(len(JITTER)))))
SLOTS: Final = 2 * ATTEMPTS + 2 + 14
"""Uniform numbers per view, each with one fixed use, whatever is switched on."""


@dataclass(frozen=True, kw_only=True)
class View:
    """How one view of an image is drawn: crop, warp, jitter, gray, blur, solarize, flip.

    In that order. What has probability or strength 0 is left out and costs nothing.

    Raises:
        UsageError: If a value is outside of its range.
    """

    scale: tuple[float, float] = (0.2, 1.0)
    """Smallest and largest share of the image's area that is shown, 0 to 1."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width / height of what is shown, 0.01 to 100."""
    flip: float = 0.0
    """Probability that left and right are swapped."""
    jitter: float = 0.0
    """Probability of the four changes of color that follow, in an order of the image's own."""
    brightness: float = 0.0
    """Multiplies pixels by at most 1 + this, at least 1 - this or 0."""
    contrast: float = 0.0
    """Multiplies distances from the mean luminance likewise."""
    saturation: float = 0.0
    """Multiplies distances from gray likewise."""
    hue: float = 0.0
    """Turns hues by at most this share of the color circle either way, 0 to 0.5."""
    gray: float = 0.0
    """Probability that color is removed."""
    blur: float = 0.0
    """Probability of a Gaussian blur, its kernel a tenth of the side."""
    sigma: tuple[float, float] = (0.1, 2.0)
    """Smallest and largest standard deviation of the blur in pixels of the view."""
    solarize: float = 0.0
    """Probability that pixels not darker than 0.5 are inverted."""
    translate: float = 0.0
    """Moves the view by at most this share of its side, across and down, 0 to 1."""
    rotate: float = 0.0
    """Turns the view by at most this many degrees either way, 0 to 180."""
    side: float = 1.0
    """Side of the view as a share of the run's image size."""

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            ends = value if isinstance(value, tuple) else (value, value)
            if not low <= ends[0] <= ends[1] <= high:
                raise UsageError(f"a view's {name} is {value}; give {low:g} to {high:g}")


LIMITS: Final = {
    **dict.fromkeys(("flip", "jitter", "gray", "blur", "solarize", "scale", "translate"), (0, 1)),
    **dict.fromkeys(("brightness", "contrast", "saturation", "sigma"), (0, np.inf)),
    "hue": (0, 0.5),
    "ratio": (0.01, 100),
    "rotate": (0, 180),
    "side": (0.05, 1),
}


@dataclass(frozen=True, slots=True)
class Draws:
    """What was drawn for one view of each image of a batch."""

    box: Float32[np.ndarray, "batch 4"]
    """Left, top, width and height of the crop, as shares of the image."""
    angle: Float32[np.ndarray, " batch"]
    """Degrees, clockwise."""
    shift: Float32[np.ndarray, "batch 2"]
    """To the right and down, as shares of the side."""
    jitter: Float32[np.ndarray, "batch 4"]
    """Strengths of `JITTER`; `NEUTRAL` where there is none."""
    order: Int[np.ndarray, "batch 4"]
    """Places in `JITTER`, first to last."""
    gray: Bool[np.ndarray, " batch"]
    """Whether color is removed."""
    sigma: Float32[np.ndarray, " batch"]
    """Standard deviation of the blur in pixels; 0 where there is none."""
    solarize: Bool[np.ndarray, " batch"]
    """Whether bright pixels are inverted."""
    flip: Bool[np.ndarray, " batch"]
    """Whether left and right are swapped."""


def draw(
    view: View,
    *,
    seed: int,
    epoch: int,
    index: Int64[np.ndarray, " batch"],
    number: int,
    width: int | Int[np.ndarray, " batch"],
    height: int | Int[np.ndarray, " batch"],
) -> Draws:
    """Draw one view of each image: a function of seed, epoch, the image and the view's number.

    Args:
        view: What may happen.
        seed: The run's.
        epoch: Which pass over the data.
        index: Which images.
        number: Which view of the images.
        width: The images' widths in pixels; crops are whole pixels of them.
        height: The images' heights in pixels.
    """
    u = uniform(seed, epoch, index, number, SLOTS)
    place, u = np.split(u, [2 * ATTEMPTS + 2], axis=1)
    room = [np.broadcast_to(side, index.shape).astype(float) for side in (width, height)]
    box = random_boxes(place, view.scale, view.ratio, *room) / np.stack(room * 2, axis=1)
    jittered, order, gray, blurred, sigma, solarized, flipped, angle = u[:, :8].T
    strength = np.array([view.brightness, view.contrast, view.saturation, view.hue])
    lowest = np.maximum(NEUTRAL - strength, LOWEST)
    jitter = lowest + (NEUTRAL + strength - lowest) * u[:, 8:12]
    return Draws(
        box=box.astype(np.float32),
        angle=between(angle, (-view.rotate, view.rotate)).astype(np.float32),
        shift=between(u[:, 12:], (-view.translate, view.translate)).astype(np.float32),
        jitter=np.where((jittered < view.jitter)[:, None], jitter, NEUTRAL).astype(np.float32),
        order=ORDERS[(order * len(ORDERS)).astype(int)],
        gray=gray < view.gray,
        sigma=np.where(blurred < view.blur, between(sigma, view.sigma), 0).astype(np.float32),
        solarize=solarized < view.solarize,
        flip=flipped < view.flip,
    )


def crop(
    images: UInt8[Tensor, "batch channel height width"]
    | Float[Tensor, "batch channel height width"],
    box: Float32[np.ndarray, "batch 4"],
    size: int,
) -> Float32[Tensor, "batch channel {size} {size}"]:
    """Cut out each image's own box and resample it, as Pillow's `resize(box=...)` does.

    Meant for small images in memory; a photograph is better cropped while it is decoded.

    Args:
        images: Bytes, or floats from 0 to 1.
        box: Left, top, width and height as shares of the image.
        size: Side of the result in pixels.

    Returns:
        Values from 0 to 1.
    """
    pixels = images.contiguous().float()
    if images.dtype == torch.uint8:
        pixels.div_(255)
    left, top, width, height = sent(torch.from_numpy(box), images.device).unbind(dim=1)
    rows = transforms.triangle(top, height, images.shape[2], size)
    columns = transforms.triangle(left, width, images.shape[3], size)
    return transforms.separable(pixels, rows, columns).clamp_(0, 1)


def augment(
    images: Float32[Tensor, "batch channel side side"], draws: Draws
) -> Float32[Tensor, "batch channel side side"]:
    """What happens to views once they are cropped: warp, jitter, gray, blur, solarize, flip.

    Values are from 0 to 1, before and after. The result has channels last in memory, which
    convolutions are fastest with.
    """
    views = images.clone(memory_format=torch.contiguous_format)
    change = partial(_change, views)
    warped = (draws.angle != 0) | draws.shift.any(axis=1)
    change(transforms.warp, warped, draws.angle, draws.shift)
    for turn in draws.order.T:
        for place, operation in enumerate(JITTER):
            strength = draws.jitter[:, place]
            change(operation, (turn == place) & (strength != NEUTRAL[place]), strength)
    change(transforms.grayscale, draws.gray)
    change(transforms.blur, draws.sigma > 0, draws.sigma)
    change(transforms.solarize, draws.solarize)
    change(transforms.flip, draws.flip)
    return views.clamp_(0, 1).contiguous(memory_format=torch.channels_last)


def _change(
    views: Tensor,
    operation: Callable[..., Tensor],
    chosen: Bool[np.ndarray, " batch"],
    *parameters: Float32[np.ndarray, "batch ..."],
) -> None:
    """Apply an operation to the chosen images only, in place."""
    rows = np.flatnonzero(chosen)
    if len(rows):
        index = sent(torch.from_numpy(rows), views.device)
        given = (sent(torch.from_numpy(each[rows]), views.device) for each in parameters)
        views[index] = operation(views[index], *given)


def normalize(
    images: Float[Tensor, "batch channel height width"],
) -> Float[Tensor, "batch 3 height width"]:
    """Subtract ImageNet's mean and divide by its deviation; one channel becomes three."""
    mean, std = sent(torch.tensor([MEAN, STD], dtype=images.dtype), images.device)[..., None, None]
    return images.sub(mean).div(std)
