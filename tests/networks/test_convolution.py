"""Convolutions of small maps: the gradient of their weights as products of matrices."""

import copy

import pytest
import torch
from torch import nn

from nearkin.networks.backbone import build_backbone
from nearkin.networks.convolution import multiply_small_maps, weight_gradient


@pytest.mark.parametrize("size", [(3, 3), (4, 7), (1, 1)])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [
        ((3, 3), (1, 1), (1, 1)), ((3, 3), (2, 2), (1, 1)), ((1, 1), (1, 1), (0, 0)),
        ((1, 1), (2, 2), (0, 0)), ((1, 3), (2, 1), (0, 1)), ((3, 1), (1, 3), (2, 0)),
    ],
)  # fmt: skip
def test_the_products_are_the_gradient_of_the_weights(size, kernel, stride, padding):
    x = torch.randn(4, 5, *size, dtype=torch.float64)
    convolve = nn.Conv2d(5, 6, kernel, stride, padding, bias=False, dtype=torch.float64)
    y = convolve(x)
    grad = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, convolve.weight, grad)
    torch.testing.assert_close(weight_gradient(x, grad, kernel, stride, padding), expected)


def gradients(network, x):
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = network(x)
    y.float().square().mean().backward()
    return y, {name: parameter.grad for name, parameter in network.named_parameters()}


def test_a_network_computes_the_same_and_nothing_else_of_it_changes():
    body = nn.Sequential(
        nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False),  # 16 positions, 64 channels: plain
        nn.BatchNorm2d(64),
        nn.Conv2d(64, 96, 3, padding=1, bias=False),  # by products from here on
        nn.ReLU(),
        nn.Conv2d(96, 128, 3, stride=2, padding=1, bias=False),
    ).to(memory_format=torch.channels_last)
    plain, x = copy.deepcopy(body), torch.randn(64, 3, 8, 8)
    multiply_small_maps(body)
    assert body.state_dict().keys() == plain.state_dict().keys()
    (y, mine), (expected, theirs) = gradients(body, x), gradients(plain, x)
    used = {type(node).__name__ for node in nodes(y.grad_fn)}
    assert "_ConvolutionBackward" in used
    assert torch.equal(y, expected), "the forward pass is oneDNN's, bit by bit"
    for name, grad in theirs.items():
        assert mine[name].dtype == torch.float32
        assert mine[name].stride() == body.get_parameter(name).stride()
        # Each rounds its sum to bfloat16's 8 bits once.
        torch.testing.assert_close(mine[name], grad, rtol=2**-6, atol=2**-6 * float(grad.std()))
    assert torch.equal(body(x), plain(x)), "float32 is left alone"
    assert not any("_Convolution" in type(node).__name__ for node in nodes(body(x).grad_fn))


def nodes(node):
    """The operations that a result came from."""
    seen, upcoming = set(), [node]
    while upcoming:
        node = upcoming.pop()
        if node is not None and node not in seen:
            seen.add(node)
            upcoming += [before for before, _ in node.next_functions]
    return seen


def test_what_is_no_plain_convolution_stays():
    class Own(nn.Conv2d):
        """Of the user."""

    others = nn.ModuleList(
        [
            nn.Conv2d(4, 4, 3, groups=2, bias=False),
            nn.Conv2d(4, 4, 3, dilation=2, bias=False),
            nn.Conv2d(4, 4, 3, padding="same", bias=False),
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", bias=False),
            nn.Conv2d(4, 4, 3),
            Own(4, 4, 3, bias=False),
        ]
    )
    kinds = [type(module) for module in others]
    multiply_small_maps(others)
    assert [type(module) for module in others] == kinds


@pytest.mark.parametrize("backbone", ["small", "resnet18"])
def test_the_gradients_of_a_backbone_point_where_those_of_onednn_do(backbone):
    torch.manual_seed(0)
    network = build_backbone(backbone, 24).train()
    plain, x = copy.deepcopy(network), torch.rand(32, 3, 24, 24)
    multiply_small_maps(network)
    (y, mine), (expected, theirs) = gradients(network, x), gradients(plain, x)
    assert torch.equal(y, expected)
    for name, grad in theirs.items():
        cosine = torch.cosine_similarity(mine[name].flatten(), grad.flatten(), dim=0)
        assert cosine > 0.999, name
