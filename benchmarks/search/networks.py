"""Networks that the search compares beside those of the package; see `search.py`."""

from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from nearkin.networks.backbone import Block, conv_norm


def strided_resnet(stem: int, widths: tuple[int, ...], depth: int) -> nn.Sequential:
    """Blocks that halve the side by strides, `depth` per width."""
    layers: list[nn.Module] = [conv_norm(3, stem, 3), nn.ReLU(inplace=True)]
    for fan_in, fan_out in pairwise([stem, *widths]):
        layers.append(Block(fan_in, fan_out, stride=2))
        layers.extend(Block(fan_out, fan_out, stride=1) for _ in range(depth - 1))
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


strided = partial(strided_resnet, 32, (64, 128, 256), depth=1)  # `small` until the search


class Pooled(nn.Module):
    """Pool, then a residual block of stride 1: cheaper than one of stride 2, and smoother."""

    def __init__(self, fan_in: int, fan_out: int, pool: nn.Module) -> None:
        super().__init__()
        self.pool, self.block = pool, Block(fan_in, fan_out, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """Pool and run the block."""
        y: Tensor = self.block(self.pool(x))
        return y


def pooled(
    stem: int, widths: tuple[int, ...], pool: type[nn.Module] = nn.AvgPool2d, early: bool = True
) -> nn.Sequential:
    """Blocks behind 2x2 pooling; `early`: the stem is pooled before it is normalized."""
    layers: list[nn.Module] = [nn.Conv2d(3, stem, 3, padding=1, bias=False)]
    layers += [pool(2)] if early else []
    layers += [nn.BatchNorm2d(stem), nn.ReLU(inplace=True)]
    for number, (fan_in, fan_out) in enumerate(pairwise([stem, *widths])):
        before = nn.Identity() if early and number == 0 else pool(2)
        layers.append(Pooled(fan_in, fan_out, before))
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


early_avg = partial(pooled, 32, (64, 128, 256))
early_max = partial(pooled, 32, (64, 128, 256), nn.MaxPool2d)
late_avg = partial(pooled, 32, (64, 128, 256), early=False)
late_max = partial(pooled, 32, (64, 128, 256), nn.MaxPool2d, early=False)


def photo_resnet(stem: int, widths: tuple[int, ...]) -> nn.Sequential:
    """The same behind a stem that is pooled twice: a block sees a quarter of the image's side."""
    network = pooled(stem, widths)
    network.insert(4, nn.AvgPool2d(2))
    return network


photo3 = partial(photo_resnet, 32, (64, 128, 256))
photo4 = partial(photo_resnet, 32, (64, 128, 256, 512))
early48 = partial(pooled, 48, (96, 192, 384))
early24 = partial(pooled, 24, (48, 96, 192))
early512 = partial(pooled, 32, (64, 128, 512))
