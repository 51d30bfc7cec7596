"""Networks as OpenVINO computes them: torch's features, or none."""

import copy

import pytest
import timm
import torch
import torchvision
from sources import varied
from torch import nn

from nearkin.encoders.acceleration import by_openvino

pytestmark = pytest.mark.needs("openvino")
IMAGES = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_features_are_those_of_torch_for_any_number_of_images():
    for build in (
        lambda: torchvision.models.resnet18(),
        lambda: timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=64, depth=2),
    ):
        torch.manual_seed(0)
        network = varied(build(), 64).to(memory_format=torch.channels_last)
        before = copy.deepcopy(network.state_dict())
        compiled = by_openvino(network, IMAGES)
        assert compiled is not None
        for images in (IMAGES[:1], torch.cat([IMAGES, IMAGES + 1])):
            with torch.no_grad():
                expected, actual = network(images), compiled(images)
            assert actual.shape == expected.shape
            assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert all(torch.equal(before[name], t) for name, t in network.state_dict().items())


class Kept(nn.Module):
    """Computes a number outside of torch, which a trace keeps as it was for its own images."""

    def forward(self, images):
        return images.mean((2, 3)) + float(images[0].mean())


class Refused(nn.Module):
    def forward(self, images):
        return torch.linalg.eigvalsh(images.mean(1))


def test_what_openvino_computes_otherwise_or_not_at_all_is_left_to_torch():
    for network in (Kept(), Refused()):
        assert by_openvino(network, IMAGES) is None
