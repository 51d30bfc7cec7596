"""Small residual networks for small pictures: minutes on a laptop's processor, not days."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override


def conv_norm(fan_in: int, fan_out: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias and its batch norm."""
    conv = nn.Conv2d(fan_in, fan_out, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(fan_out))


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2016, figure 2)."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(fan_in, fan_out, 3, stride)
        self.second = conv_norm(fan_out, fan_out, 3)
        same = fan_in == fan_out and stride == 1
        self.shortcut = nn.Identity() if same else conv_norm(fan_in, fan_out, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    @override
    def forward(self, x: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch _ _ _"]:
        y: Tensor = self.relu(self.second(self.relu(self.first(x))) + self.shortcut(x))
        return y


def small_resnet(stem: int, widths: Sequence[int]) -> nn.Sequential:
    """A residual network with one block per width, each of which halves the side."""
    layers: list[nn.Module] = [conv_norm(3, stem, 3), nn.ReLU(inplace=True)]
    for fan_in, fan_out in pairwise([stem, *widths]):
        layers.append(Block(fan_in, fan_out, stride=2))
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


SMALL: dict[str, Callable[[], nn.Module]] = {
    "tiny": partial(small_resnet, 32, (64, 128)),
    "small": partial(small_resnet, 32, (64, 128, 256)),
}
"""`tiny` is for pictures of up to 16 px, `small` for those below 64 px."""
