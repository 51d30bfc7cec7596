"""Networks that the search compares with those of the package; see `search.py`."""

from functools import partial

from torch import nn

from nearkin.networks.backbone import half, small_resnet


def photo_resnet(stem: int, widths: tuple[int, ...]) -> nn.Sequential:
    """A small network whose stem is pooled twice: its blocks see a quarter of the image's side."""
    network = small_resnet(stem, widths)
    network.insert(4, half())
    return network


photo3 = partial(photo_resnet, 32, (64, 128, 256))
photo4 = partial(photo_resnet, 32, (64, 128, 256, 512))
small4 = partial(small_resnet, 32, (64, 128, 256, 512))
small48 = partial(small_resnet, 48, (96, 192, 384))
small24 = partial(small_resnet, 24, (48, 96, 192))
