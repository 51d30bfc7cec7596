"""Images of three colors, and a network of few weights that tells them apart."""

import numpy as np
import torch
from torch import nn

from nearkin.data.opening import open_images
from nearkin.data.split import Split
from nearkin.encoders.encoder import Encoder
from nearkin.networks.branch import as_backbone


class Tiny(nn.Module):
    """A network of 8 features that notes how many images it has seen."""

    def __init__(self, seed: int):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, stride=4)
        weights = np.random.default_rng(seed).normal(0, 0.2, self.conv.weight.shape)
        self.conv.weight.data = torch.from_numpy(weights).float()
        nn.init.zeros_(self.conv.bias)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.conv(x).mean(dim=(2, 3))


def tiny(seed: int = 0, name: str = "tiny") -> Encoder:
    """An encoder of images of 16 pixels."""
    encoder = Encoder(as_backbone(Tiny(seed), 16), 16, {"backbone": name})
    encoder.backbone.body.seen = 0  # but for the trial that tells the number of features
    return encoder


def colors(side: int = 16) -> Split:
    """36 images of three colors, with noise; the last twelve are the test."""
    rng = np.random.default_rng(0)
    labels = np.arange(36) % 3
    mean = np.array([[200, 40, 40], [40, 200, 40], [40, 40, 200]])[labels]
    pixels = mean[:, None, None] + rng.normal(0, 30, (36, side, side, 3))
    images = open_images((pixels.clip(0, 255).astype(np.uint8), labels))
    return Split(images, np.arange(24), np.arange(24, 36))
