"""The same features in less time: by batch norms folded into convolutions, or by OpenVINO."""

import copy

import pytest
import timm
import torch
import torchvision
from sources import varied
from torch import nn

from nearkin.encoders.inference import by_openvino, fold_batch_norms

IMAGES = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def norms(network):
    return sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())


@pytest.mark.parametrize(
    ("build", "left"),
    [
        (lambda: torchvision.models.resnet18(), 0),
        (lambda: timm.create_model("efficientnet_lite0"), 0),  # norms with their activation
        (lambda: timm.create_model("tf_mobilenetv3_small_minimal_100"), 0),  # padded convolutions
        (lambda: torchvision.models.densenet121(), 62),  # norms before convolutions: not these
    ],
)
def test_features_are_the_same_without_norms(build, left):
    torch.manual_seed(0)
    network = varied(build(), 64)
    before = copy.deepcopy(network.state_dict())
    folded = fold_batch_norms(network, IMAGES[:1])
    assert norms(folded) == left < norms(network)
    with torch.no_grad():
        expected, actual = network(IMAGES), folded(IMAGES)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not network.training
    assert all(torch.equal(before[name], t) for name, t in network.state_dict().items())


def test_a_network_that_other_threads_run_or_copy_meanwhile_has_no_hooks():
    hooks = []

    class Look(nn.Module):
        def forward(self, images):
            hooks.extend(hook for m in network.modules() for hook in m._forward_hooks.values())
            return images

    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Look(), nn.Flatten())
    assert fold_batch_norms(varied(network, 64), IMAGES) is not network
    assert not hooks


class Twice(nn.Module):
    """Takes the output of a convolution before its norm as well, or one norm after each of two."""

    def __init__(self, shared):
        super().__init__()
        self.shared = shared
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, images):
        first = self.first(images)
        other = self.norm(self.second(images)) if self.shared else first
        return (self.norm(first) + other).mean((2, 3))


def test_what_is_used_twice_is_left_alone_and_a_network_without_norms():
    for shared in (False, True):
        torch.manual_seed(0)
        network = varied(Twice(shared), 64)
        assert fold_batch_norms(network, IMAGES[:1]) is network
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
    assert fold_batch_norms(network, IMAGES) is network


@pytest.mark.needs("openvino")
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


@pytest.mark.needs("openvino")
def test_what_openvino_computes_otherwise_or_not_at_all_is_left_to_torch():
    for network in (Kept(), Refused()):
        assert by_openvino(network, IMAGES) is None
