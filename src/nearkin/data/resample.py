"""Resampling, each image in its own way: crops, blurs, flips, rotations.

A crop and a Gaussian blur are the same to every row, and to every column: two small matrices per
image. As batched products they are no slower than gathering pixels, and shrinking averages
over all it covers, as Pillow does.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Images = Float[Tensor, "batch channel height width"]
Squares = Float[Tensor, "batch channel side side"]
PerImage = Float[Tensor, " batch"]


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
