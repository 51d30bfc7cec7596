"""What views are made of: crops, color, blurs, flips, rotations; each image in its own way."""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor

from nearkin.distributed import sent

ATTEMPTS = 10
"""Boxes tried before the largest central one is taken."""


def between(
    u: Float64[np.ndarray, "..."], limits: tuple[float, float]
) -> Float64[np.ndarray, "..."]:
    """Carry uniform numbers from [0, 1) to between the limits."""
    low, high = limits
    return low + (high - low) * u


def random_boxes(
    u: Float64[np.ndarray, "batch draws"],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    width: Float[np.ndarray, " batch"],
    height: Float[np.ndarray, " batch"],
) -> Float64[np.ndarray, "batch 4"]:
    """Boxes of whole pixels with the distribution of torchvision's `RandomResizedCrop`.

    The area is uniform and the logarithm of the aspect ratio too; the first of `ATTEMPTS` boxes
    that fits is put anywhere in the image, and where none fits, the largest one of an allowed
    ratio is put at the center.

    Args:
        u: Uniform numbers: areas and ratios of the attempts, then the place, left and top.
        scale: Smallest and largest share of the image's area.
        ratio: Smallest and largest width / height.
        width: The images' widths in pixels.
        height: The images' heights in pixels.

    Returns:
        Left, top, width and height of each box, in pixels.
    """
    area = between(u[:, :ATTEMPTS], scale) * (width * height)[:, None]
    aspect = np.exp(between(u[:, ATTEMPTS:-2], (np.log(ratio[0]), np.log(ratio[1]))))
    sides = np.rint(np.sqrt(np.stack([area * aspect, area / aspect], axis=2)))
    room = np.stack([width, height], axis=1)
    fits = ((sides > 0) & (sides <= room[:, None])).all(axis=2)
    chosen = sides[np.arange(len(u)), fits.argmax(axis=1)]
    largest = np.rint(np.stack([height * ratio[1], width / ratio[0]], axis=1)).clip(1, room)
    found = fits.any(axis=1, keepdims=True)
    side = np.where(found, chosen, largest)
    corner = np.where(found, np.floor(u[:, -2:] * (room - side + 1)), (room - side) // 2)
    return np.concatenate([corner, side], axis=1)


Images = Float[Tensor, "batch channel height width"]
PerImage = Float[Tensor, " batch"]


def luminance(images: Images) -> Float[Tensor, "batch 1 height width"]:
    """How bright each pixel is to the eye (ITU-R BT.601)."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, dim=1)
    gray = torch.mul(red, 0.2989)
    return gray.add_(green, alpha=0.587).add_(blue, alpha=0.114)


def brightness(images: Images, factor: PerImage) -> Images:
    """Multiply by a factor from 0, which is black; 1 changes nothing."""
    return (images * _broad(factor)).clamp_(0, 1)


def contrast(images: Images, factor: PerImage) -> Images:
    """Move away from the image's mean luminance; factor 0 is uniform gray, 1 changes nothing."""
    mean = luminance(images).mean(dim=(1, 2, 3), keepdim=True)
    return torch.lerp(mean, images, _broad(factor)).clamp_(0, 1)


def saturation(images: Images, factor: PerImage) -> Images:
    """Move away from the pixel's gray; factor 0 is a gray image, 1 changes nothing."""
    return torch.lerp(luminance(images), images, _broad(factor)).clamp_(0, 1)


def hue(images: Images, turns: PerImage) -> Images:
    """Turn the hue of HSV around the color circle by this share of a full turn.

    Value and saturation stay, so the smallest and largest of a pixel's three channels stay as
    well, and only where each channel lies between them has to be found again.
    """
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(dim=1)
    low = torch.minimum(torch.minimum(red, green), blue)
    high = torch.maximum(torch.maximum(red, green), blue)
    chroma = high - low
    sixths = torch.where(
        high == red,
        green - blue,
        torch.where(
            high == green,
            (blue - red).add_(chroma, alpha=2),
            (red - green).add_(chroma, alpha=4),
        ),
    ).div_(chroma.clamp(min=torch.finfo(chroma.dtype).tiny))
    sixths = sixths.add_(6 * turns[:, None, None]).remainder_(6)[:, None]
    pure = torch.tensor([[3, 1, -1], [2, -1, 2], [4, -1, 2]], dtype=images.dtype)
    center, slope, offset = sent(pure, images.device)[:, :, None, None].unbind(dim=1)
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


def triangle(start: PerImage, extent: PerImage, pixels: int, size: int) -> Tensor:
    """Weights that sample `size` places of an interval of a line of pixels.

    The bilinear filter, as wide as a sample where samples are wider than pixels. The same
    numbers as in Pillow's `resize`.

    Args:
        start: Where each interval begins, as a share of the line.
        extent: Its length, as a share of the line.
        pixels: Pixels of the line.
        size: Samples to take.

    Returns:
        A matrix of (size, pixels) per image, whose rows sum to 1.
    """
    step = extent * pixels / size
    places = torch.arange(size, device=start.device) + 0.5
    centers = (start * pixels)[:, None] + step[:, None] * places
    grid = torch.arange(pixels, device=start.device) + 0.5
    reach = step.clamp(min=1)[:, None, None]
    weights = (1 - (centers[:, :, None] - grid).abs_() / reach).clamp_(min=0)
    return weights / weights.sum(dim=2, keepdim=True)


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
    """Rotate about the center, then move; what comes in from outside repeats the edge.

    Args:
        images: Square images.
        angle: Degrees, clockwise.
        shift: To the right and down, as shares of the side.
    """
    turn = torch.deg2rad(angle)
    back = torch.stack([turn.cos(), turn.sin(), -turn.sin(), turn.cos()], dim=1).view(-1, 2, 2)
    origin = back @ (-2 * shift[:, :, None])  # the grid runs from -1 to 1
    grid = F.affine_grid(torch.cat([back, origin], dim=2), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def flip(images: Images) -> Images:
    """Swap left and right."""
    return images.flip(-1)
