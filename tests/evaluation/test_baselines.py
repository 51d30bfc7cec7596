"""What an encoder stands beside: raw pixels, and a network before any training."""

import numpy as np
import torch
from builders import pixels as random_pixels
from torch import nn

from nearkin.data.batches import CenterCrops
from nearkin.data.opening import open_images
from nearkin.data.preprocessing import Preprocessing
from nearkin.data.views import normalize
from nearkin.encoders.encoder import Encoder
from nearkin.evaluation.baselines import untrained
from nearkin.networks.branch import as_backbone

CPU = torch.device("cpu")


class Scaled(nn.Module):
    """A branch that is nearly off at first, as those of DINOv2 and CaiT."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.gamma = nn.Parameter(torch.full((8,), 1e-5))

    def forward(self, x):
        return (self.gamma * self.norm(self.conv(x)).relu().mean(dim=(2, 3))).flatten(1)


def pictures(n):
    return open_images(random_pixels(n))


def random_like(images, seed=0):
    torch.manual_seed(0)
    network = Scaled()
    view = Preprocessing(16)
    encoder = Encoder(as_backbone(network, 16), view, {"backbone": "scaled"})
    how = {"seed": seed, "device": CPU, "workers": 0, "network": network}
    return untrained(encoder, images, **how)


def test_batch_norms_have_the_statistics_of_training_images_and_branches_are_on():
    """Of a network as it is made, features of all images are alike to five digits."""
    images = pictures(40)
    encoder = random_like(images)
    body = encoder.backbone.body
    assert torch.equal(body.gamma, torch.ones(8))
    assert not body.norm.training
    assert body.norm.momentum == 0.1
    pixels = torch.cat(list(CenterCrops(images, encoder.preprocessing, workers=0)))
    with torch.no_grad():
        before = body.conv(normalize(pixels))
    torch.testing.assert_close(
        body.norm.running_mean, before.mean(dim=(0, 2, 3)), atol=1e-4, rtol=1e-3
    )
    with torch.no_grad():
        features = encoder.backbone(normalize(pixels))
    assert features.std(dim=0).mean() > 1e-3


def test_no_test_image_and_no_more_than_256_calibrate(monkeypatch):
    images, seen = pictures(300), []
    forward = Scaled.forward
    monkeypatch.setattr(Scaled, "forward", lambda self, x: seen.append(len(x)) or forward(self, x))
    random_like(images)
    assert 256 <= sum(seen) < 300
    first, again = (random_like(images, seed).backbone.state_dict() for seed in (1, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert np.isfinite(first["body.norm.running_var"].numpy()).all()
