"""Changes of color, each image with its own strength.

As torchvision defines them for float images, value for value. Images have one channel, where
saturation, hue and gray change nothing, or three: red, green, blue, from 0 to 1.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from nearkin.distributed import sent

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
