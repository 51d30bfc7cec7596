"""Backbones by name, their stems and widths, and momentum encoders."""

import pytest
import torch
import torchvision
from torch import nn

from nearkin.errors import UsageError
from nearkin.networks.backbone import build_backbone
from nearkin.networks.blocks import network_parts
from nearkin.networks.branch import Branch, as_backbone, frozen_copy, mlp
from nearkin.networks.heads import CosineHead


def test_networks_by_name_give_the_features_they_say():
    for name, size, features in (
        ("tiny", 16, 128),
        ("small", 32, 256),
        ("resnet18", 32, 512),
        ("torchvision/mobilenet_v3_small", 64, 576),
        ("timm/resnet18", 32, 512),
        ("vit_tiny_patch16_224", 32, 192),
        ("vit_tiny_patch16_224", 96, 192),
        ("convnext_atto", 64, 320),
    ):
        backbone = build_backbone(name, size).eval()
        assert backbone.feature_dim == features, name
        assert backbone(torch.zeros(2, 3, size, size)).shape == (2, features)


def test_an_option_of_no_layer_is_refused():
    for sizes in ((), (8,)):
        with pytest.raises(TypeError, match="nrom"):
            Branch(build_backbone("tiny", 16), *sizes, nrom=False)


def test_small_images_are_not_shrunk_by_the_stem():
    for name in ("resnet18", "timm/resnet18"):
        small, large = (build_backbone(name, size).body for size in (32, 64))
        assert small.conv1.stride == (1, 1)
        assert isinstance(small.maxpool, nn.Identity)
        assert large.conv1.stride == (2, 2)


def test_a_name_two_libraries_have_means_torchvision_s_and_unknown_ones_are_refused():
    assert isinstance(build_backbone("resnet18", 64).body, torchvision.models.ResNet)
    with pytest.raises(UsageError, match=r"Did you mean resnet18\?"):
        build_backbone("resnet81", 32)


def test_any_network_can_be_a_backbone_and_keeps_its_mode():
    """Also that of frozen parts."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(2))
    for frozen in (False, True):
        network[1].train(not frozen)
        before = network[1].running_mean.clone()
        backbone = as_backbone(network, 16)
        assert backbone.feature_dim == 16  # flattened: 4 channels of 2 x 2
        assert [module.training for module in network] == [True, not frozen, True]
        assert network.training
        assert torch.equal(network[1].running_mean, before)


def test_networks_made_for_another_size_or_that_give_no_features_are_refused_in_one_line():
    names = {"vit_b_32": 100, "timm/swin_s3_tiny_224": 100, "timm/mixer_s32_224": 100}
    for name, size in (names | {"torchvision/alexnet": 8}).items():
        with pytest.raises(UsageError, match=f"{name} cannot take images of {size} px") as e:
            build_backbone(name, size)
        assert "\n" not in str(e.value)
    for result, message in [
        (lambda x: x.mean(), r"Gives gives \[\] for two images"),
        (lambda x: x.flatten()[:5][None], r"Gives gives \[1, 5\] for two images"),
        (lambda x: (x, x), "Gives gives tuple for two images"),
        (lambda x: x @ torch.ones(7, 7), "Gives cannot take images of 16 px"),
        (lambda x: x.features, "Gives cannot take images of 16 px"),
    ]:
        with pytest.raises(UsageError, match=message):
            as_backbone(Gives(result), 16)


class Gives(nn.Module):
    """A network whose result is not what a backbone's has to be."""

    def __init__(self, result):
        super().__init__()
        self.result = result

    def forward(self, images):
        return self.result(images)


def test_projectors_have_the_norms_they_are_asked_for_and_a_frozen_copy_is_apart():
    plain = mlp(6, 5, 4, norm=False)
    assert [type(layer) for layer in plain] == [nn.Linear, nn.ReLU, nn.Linear]
    full = mlp(6, 5, 4, last_norm=True)
    kinds = [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear, nn.BatchNorm1d]
    assert [type(layer) for layer in full] == kinds
    assert full[-1].weight is None
    assert [layer.bias is None for layer in full if isinstance(layer, nn.Linear)] == [True, True]
    branch = Branch(as_backbone(nn.Flatten(), 2), 8, 4)
    copy = frozen_copy(branch)
    assert not any(p.requires_grad for p in copy.parameters())
    with torch.no_grad():
        next(branch.parameters()).zero_()
    assert next(copy.parameters()).abs().sum() > 0


def test_parts_cover_a_network_in_order():
    bare = ("cls_token", "pos_embed", "class_token", "encoder.pos_embedding")
    for name, num_blocks, last in (
        ("small", 3, "8"),
        ("resnet18", 8, "layer4.1"),
        ("timm:vit_tiny_patch16_224", 12, "norm"),
        ("torchvision:vit_b_32", 12, "encoder.ln"),
        ("timm:convnext_atto", 12, "head"),
        ("torchvision:densenet121", 61, "features.norm5"),  # all in one row, with its stem
        ("torchvision:squeezenet1_1", 8, "features.12"),
        ("torchvision:vgg11", 0, "features.18"),
    ):
        body = build_backbone(name, 64).body
        parts = network_parts(body)
        assert sum(part.is_block for part in parts) == num_blocks
        assert parts[-1].name == last
        for parameter, _ in body.named_parameters():
            holders = [part for part in parts if parameter.startswith(f"{part.name}.")]
            assert len(holders) == (parameter not in bare), (name, parameter)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_classifiers_of_inner_layers_have_no_part_in_training(name):
    backbone = build_backbone(f"torchvision:{name}", 96).train()
    backbone(torch.rand(2, 3, 96, 96)).sum().backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())


def test_prototypes_start_at_the_length_of_the_official_weight_normalized_rows():
    """Rows of `nn.Linear` have length 1 / sqrt(3).

    A step of SGD turns them by the rate over the squared length: at sqrt(dim) they would hardly turn.
    """
    for dim in (256, 768):
        length = CosineHead(dim, 10, temperature=0.1).weight.norm(dim=1).mean().item()
        assert length == pytest.approx(3**-0.5, rel=0.05)
