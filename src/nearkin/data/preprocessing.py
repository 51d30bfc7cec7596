"""How an image becomes the input of a trained network: crop, size, interpolation, statistics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import lt
from typing import Any, Final, Literal, get_args

import numpy as np
from jaxtyping import Float, Shaped
from PIL import Image
from torch import Tensor

from nearkin.config import MAX_IMAGE_SIZE
from nearkin.data.channels import Channels, named
from nearkin.data.decode import CENTER, Pixels, PixelType, Planes, as_image, center
from nearkin.data.images import Images
from nearkin.data.notes import Note
from nearkin.data.views import MEAN, STD, normalize
from nearkin.errors import DataError
from nearkin.pace import count

Crop = Literal["box", "center", "squash"]
Interpolation = Literal["bicubic", "bilinear", "lanczos", "nearest"]
CropRounding = Literal["even", "down"]
RANGE: Final = ("low", "high")
NARROW: Final = 0.01  # Of an encoder's range, what images fill that look alike to it
LONGEST: Final = 32
"""Shorter sides of an image of which no more is enlarged before the crop: a scan line of 65,000
pixels would take gigabytes."""
OTHER: Final = "give an encoder that was trained on such images"
RESAMPLING = {name: Image.Resampling[name.upper()] for name in get_args(Interpolation)}


@dataclass(frozen=True)
class Preprocessing:
    """The evaluation view of a network, exactly as the library computes it that trained it.

    Wrong preprocessing costs accuracy without any error, so it travels with the weights.
    """

    image_size: int
    """Side in pixels of the square that the network gets."""
    crop: Crop = "box"
    """How the square is cut.

    `box`: as `nearkin.data.decode.center` does. `center`: the shorter side is resized to
    `resize_to`, then the center is cut out, as timm, torchvision and transformers do. `squash`:
    the same with both sides resized to `resize_to`, whatever the proportions.
    """
    resize_to: int = 0
    """Pixels before the crop; of no meaning with `box`."""
    interpolation: Interpolation = "bicubic"
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    crop_rounding: CropRounding = "even"
    """Where the crop begins if as many pixels are odd: as torchvision and timm round, half to
    even, or down, as transformers does."""
    low: tuple[float, ...] = ()
    """The values that become 0, channel by channel; without any, images are RGB of 8 bits."""
    high: tuple[float, ...] = ()
    """The values that become 1."""

    def __post_init__(self) -> None:
        """Refuse, by a ValueError, what no network was trained with."""
        if not 1 <= self.image_size <= MAX_IMAGE_SIZE:
            raise ValueError(
                f"its images of {self.image_size} px are not from 1 to {MAX_IMAGE_SIZE} px"
            )
        if self.crop not in get_args(Crop) or self.interpolation not in RESAMPLING:
            raise ValueError(f"its preprocessing is {self.crop}, {self.interpolation}")
        if self.crop_rounding not in get_args(CropRounding):
            raise ValueError(f"its crop is rounded {self.crop_rounding}")
        if self.crop != "box" and not self.image_size <= self.resize_to <= 4 * self.image_size:
            raise ValueError(f"it crops {self.image_size} px from {self.resize_to} px")
        numbers = (*self.mean, *self.std)
        count = len(self.low) or 3
        if {len(self.mean), len(self.std)} != {count} or not all(map(math.isfinite, numbers)):
            three = "three" if count == 3 else count
            raise ValueError(f"its mean and deviation are not {three} numbers each")
        if len(self.high) != len(self.low) or not all(map(lt, self.low, self.high)):
            raise ValueError("its range does not end above its beginning")
        if min(self.std) <= 0:
            raise ValueError("its deviation is not positive")

    @classmethod
    def of(cls, image_size: int, channels: Channels | None) -> "Preprocessing":
        """Nearkin's own, of images with these channels."""
        return cls(image_size, **(asdict(channels) if channels else {}))

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Preprocessing":
        """Read what `to_dict` gave; of many kinds of errors if it is damaged."""
        names = stored.keys() & {*RANGE} | {"mean", "std"}
        return cls(**{**stored, **{name: tuple(map(float, stored[name])) for name in names}})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = asdict(self)
        return values if self.low else {k: v for k, v in values.items() if k not in RANGE}

    @property
    def channels(self) -> Channels | None:
        """The range of its images, if they are not RGB of 8 bits."""
        return Channels(self.low, self.high, self.mean, self.std) if self.low else None

    def for_images(self, images: Images) -> "Preprocessing":
        """The same with the range of these images, where it has none and they do.

        Raises:
            DataError: If they have other channels.
        """
        if images.channels and not self.low and images.num_channels == len(self.mean):
            return replace(self, low=images.channels.low, high=images.channels.high)
        self.applied(images)
        return self

    def applied(self, images: Images) -> Images:
        """The same images, whose channels are scaled by its range.

        Without a range, gray images of more than 8 bits are scaled to 8, each as it would be
        alone or among others: uint16 by that type, other types by the image's own values.

        Raises:
            DataError: If they have other channels.
        """
        given = images.pixel_type if images.channels else None
        fits = bool(self.low) == bool(given) and images.num_channels == len(self.mean)
        gray = self._type_scaled_by(images)
        if len(images) and not fits and not gray:
            takes = (
                f"{len(self.low)} channels in a range of their own" if self.low else named(None)
            )
            raise DataError(f"images are {named(given)}, and the encoder takes {takes}; {OTHER}")
        return replace(images, channels=self.channels)

    def _type_scaled_by(self, images: Images) -> PixelType | None:
        """The type of gray images of more than 8 bits for which there is no range; else None."""
        given = images.pixel_type if images.channels else None
        return given if given and given.num_channels == 1 and not self.low else None

    def notes(self, images: Images) -> list[Note]:
        """A note on gray images without a range for them, or on values that hardly fill it."""
        given = self._type_scaled_by(images)
        if given is None:
            return self._narrow(images)
        how = "that type" if given.dtype == "uint16" else "the values of each"
        text = (
            f"{count(len(images), 'gray image')} of {given.dtype} are scaled by {how}, not by "
            "those of all, as the encoder of a run of nearkin embed or train scales them"
        )
        return [Note("guessed", text, len(images))]

    def _narrow(self, images: Images) -> list[Note]:
        """A note on images that an encoder with a range cannot tell apart."""
        if not images.channels or len(self.low) != len(images.channels.low):
            return []
        own, given = (np.array([x.low, x.high]) for x in (self, images.channels))
        inside = given.clip(*own)
        if ((inside[1] - inside[0]) > NARROW * (own[1] - own[0])).any():
            return []
        ends = (f"{x.min():.4g} to {x.max():.4g}" for x in (given, own))
        text = "values are {}, and the encoder takes {}: images look alike to it; scale them"
        return [Note("guessed", text.format(*ends), len(images))]

    def __str__(self) -> str:
        """Name all of it, as the log prints it."""
        shape = {
            "box": "center crop",
            "center": f"shorter side {self.resize_to} px, center crop",
            "squash": f"squashed to {self.resize_to} px, center crop",
        }
        columns = {"mean": self.mean, "std": self.std}
        if self.low:
            columns = {"from": self.low, "to": self.high, **columns}
        numbers = (f"{name} {', '.join(f'{x:.3f}' for x in of)}" for name, of in columns.items())
        cut = f"{self.image_size} px ({shape[self.crop]}, {self.interpolation})"
        return ", ".join([cut, *numbers])

    def resized(self, image_size: int) -> "Preprocessing":
        """Return the same for images of another size, resized in proportion before the crop."""
        resize_to = round(self.resize_to * image_size / self.image_size)
        return replace(self, image_size=image_size, resize_to=resize_to)

    def keeps(self, size: Sequence[int]) -> bool:
        """Whether images of this height and width are their own evaluation views."""
        whole = self.crop == "box" or self.resize_to == self.image_size
        return whole and tuple(size) == (self.image_size, self.image_size)

    @property
    def min_side(self) -> int:
        """Pixels that the shorter side of a JPEG must keep if it is decoded at a smaller scale."""
        if self.crop == "box":
            return math.ceil(self.image_size / CENTER)
        # Other libraries decode at full scale. Of what a smaller scale changes, hardly anything
        # is left after halving it.
        return 2 * self.resize_to

    def to_input(self, pixels: Shaped[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch _ _ _"]:
        """Normalize pixels, of 8 bits or from 0 to 1: what the network was trained on."""
        return normalize(pixels, (self.mean, self.std))

    def pixels(self, source: bytes | Pixels) -> Pixels:
        """Cut the evaluation view out of an image, encoded or decoded; `BadImage` as `decode`."""
        if isinstance(source, bytes) and self.channels:
            source = self.channels.scaled(source)
        if self.crop == "box":
            return center(source, self.image_size)
        image = as_image(source, min_side=self.min_side)
        # The roundings are torchvision's, of `Resize` and `CenterCrop`.
        size, short = (self.resize_to, self.resize_to), min(image.size)
        if self.crop == "center":
            image = _middle(image, LONGEST * short)
            width, height = image.size
            size = (self.resize_to * width // short, self.resize_to * height // short)
        if image.size != size:
            image = image.resize(size, RESAMPLING[self.interpolation])
        whole = round if self.crop_rounding == "even" else math.floor
        left, top = (whole((edge - self.image_size) / 2.0) for edge in size)
        return np.array(image.crop((left, top, left + self.image_size, top + self.image_size)))


def _middle(image: Image.Image | Planes, length: int) -> Image.Image | Planes:
    """Return the middle of an image that is longer: all of a line would be enlarged to a plane."""
    ends = [((edge - length) // 2, (edge + length) // 2) for edge in image.size]
    (left, right), (top, bottom) = (
        (first, last) if first > 0 else (0, edge)
        for (first, last), edge in zip(ends, image.size, strict=True)
    )
    return image.crop((left, top, right, bottom))
