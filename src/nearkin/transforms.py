"""Augmented views as a transform for any `DataLoader`: one image at a time, or by the batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from nearkin.data.augmentations import AUGMENTATIONS, Augment, augmentation, views_of
from nearkin.data.decode import check_pixels, crops, is_channels_last, rgb_pixels
from nearkin.data.views import MEAN, STD, View, ViewParams, augment, crop, normalize, sample_views

__all__ = ["AUGMENTATIONS", "MEAN", "STD", "View", "ViewTransform", "augmentation", "normalize"]

ImageLike = Image.Image | np.ndarray | Tensor
ViewTensors = tuple[Float[Tensor, "*batch 3 _ _"], ...]


class ViewTransform:
    """Makes several augmented views of an image, or of each image of a batch.

    As a `transform`, it takes one image at a time:

        ImageFolder(root, transform=ViewTransform("simclr", size=96))    # ((view, view), label)

    By the batch it is several times as fast for small images, in the workers or on a device:

        DataLoader(ImageFolder(root), collate_fn=ViewTransform("simclr", size=96).collate)
        views = transform(images.cuda())              # uint8, batch x 3 x height x width

    Images are PIL images of any mode; arrays (height, width[, 3]) of uint8, or of floats from 0
    to 1; tensors (3, height, width) likewise. A batch is a list of these, or one tensor with a
    batch dimension. PIL images and arrays are cropped bicubically, tensors on their device by the
    `interpolation` of each `View`, which is bilinear by default; all with antialiasing.

    Without `index`, random numbers come from torch's generator, which a `DataLoader` seeds in
    each worker. With it, they are a function of (seed, epoch, index) alone, and of the size of
    the image: those that a nearkin run with that seed draws. Its pixels are the same for tensors
    of the size of its images; else they differ a little, as a run decodes photographs at a
    smaller scale and holds small images at the size of views.

    Args:
        augment: A name of `AUGMENTATIONS`, the path of a .toml file with [[views]], or views.
        views: The kinds of views to make, as a method declares them: "strong", "weak", "small",
            "gray", a name of the augmentation's own, or a `View`. By default two strong ones.
        size: Side in pixels of views of size 1.
        normalize: Subtract ImageNet's mean and divide by its standard deviation; otherwise
            values are from 0 to 1.

    Raises:
        UsageError: If there is no such augmentation, or it lacks a view.
    """

    def __init__(
        self,
        augment: Augment = "simclr",
        views: Sequence[str | View] = ("strong", "strong"),
        *,
        size: int = 224,
        normalize: bool = True,
    ) -> None:
        if size < 1:
            raise ValueError(f"size is {size} pixels; give 1 or more")
        self.views = views_of(augment, views)
        self.sizes = [max(1, round(view.size * size)) for view in self.views]
        self.normalize = normalize

    def __call__(
        self,
        images: ImageLike | Sequence[ImageLike],
        *,
        index: int | np.integer | Sequence[int] | np.ndarray | Tensor | None = None,
        seed: int = 0,
        epoch: int = 0,
    ) -> ViewTensors:
        """The views of an image, each (3, side, side), or of a batch, (batch, 3, side, side).

        Args:
            images: An image or a batch; see the class.
            index: The position of each image in its data set, for views that can be repeated.
            seed: Any integer; used with `index` only.
            epoch: Which pass over the data; used with `index` only.

        Raises:
            TypeError: If this is no image, or its values are of the wrong type.
            ValueError: If a shape, a value or the number of indices does not fit.
        """
        index = index.cpu() if isinstance(index, Tensor) else index
        single = not isinstance(images, list | tuple) and getattr(images, "ndim", 0) != 4
        batch = _batch([images] if single else images)  # type: ignore[list-item, arg-type]
        if index is None:
            seed, epoch = int(torch.randint(2**62, ())), 0
            rows = np.arange(len(batch))
        else:
            rows = np.atleast_1d(np.asarray(index, np.int64))
        if rows.shape != (len(batch),):
            raise ValueError(f"{rows.size} indices for {len(batch)} images; give one for each")
        heights_widths = [x.shape[-2:] if isinstance(x, Tensor) else x.shape[:2] for x in batch]
        sizes = np.array(heights_widths)[:, ::-1]
        sampled = sample_views(self.views, sizes, seed=seed, epoch=epoch, index=rows)
        views = [augment(self._crop(batch, n, params), params) for n, params in enumerate(sampled)]
        finished = [normalize(view) if self.normalize else view for view in views]
        return tuple(view[0] if single else view for view in finished)

    def collate(self, samples: Sequence[Any]) -> Any:
        """A `collate_fn`: samples (image, label, ...) become (views, labels, ...).

        Samples that are images alone become their views.
        """
        if not isinstance(samples[0], list | tuple):
            return self(list(samples))
        images, *others = zip(*samples, strict=True)
        return (self(list(images)), *(default_collate(list(column)) for column in others))

    def _crop(
        self, batch: list[np.ndarray] | Tensor, number: int, params: ViewParams
    ) -> Float[Tensor, "batch 3 _ _"]:
        size = self.sizes[number]
        if isinstance(batch, Tensor):
            return crop(batch, params.box, size, self.views[number].interpolation)
        boxes = params.box[:, None]
        cut = [crops(pixels, box, [size])[0] for pixels, box in zip(batch, boxes, strict=True)]
        return torch.from_numpy(np.stack(cut)).permute(0, 3, 1, 2) / 255


def _batch(images: Sequence[ImageLike] | np.ndarray | Tensor) -> list[np.ndarray] | Tensor:
    """RGB pixels of each image or, of tensors, one tensor (batch, 3, height, width)."""
    if isinstance(images, Tensor):
        return _tensors(images)
    if not len(images):
        raise ValueError("a batch of no images; give at least one")
    tensors = [image for image in images if isinstance(image, Tensor)]
    if not tensors:
        return [rgb_pixels(image) for image in images]
    shapes = {tuple(image.shape) for image in tensors}
    if len(shapes) > 1 or len(tensors) < len(images):
        raise ValueError(
            "a batch of tensors of several shapes, or of tensors and other images; give tensors "
            "of one shape, or PIL images"
        )
    return _tensors(torch.stack(tensors))


def _tensors(images: Tensor) -> Tensor:
    check_pixels(images, 4)
    if images.ndim == 3:
        return images[:, None].expand(-1, 3, -1, -1)
    first = images.movedim(-1, -3) if is_channels_last(images, 4) else images
    return first.expand(-1, 3, -1, -1)
