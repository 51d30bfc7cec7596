"""Convolutions with a stride, trained in bfloat16 on a CPU by threads that do not spin."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from nearkin.config import TrainConfig
from nearkin.data.opening import open_images
from nearkin.networks.strided import StridedConv, weight_gradient, without_spinning
from nearkin.run.settings import resolve
from nearkin.training.session import build

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def trained(convolution, x, dtype):
    """Output and gradients."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        y = convolution(x)
    (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(each.grad for each in convolution.parameters())]


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(3, 2, 1), (1, 2, 0), (4, 4, 0), (7, 2, 3)]
)
def test_the_gradient_of_parts_is_that_of_all_images(threads, size, stride, padding, layout):
    x = torch.randn(7, 8, 16, 16).to(memory_format=layout)
    weight = torch.randn(16, 8, size, size, requires_grad=True)
    y = torch.nn.functional.conv2d(x, weight, None, stride, padding)
    grad = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, weight, grad)
    pairs = (stride, stride), (padding, padding)
    ours = weight_gradient(x, weight, grad, *pairs)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_the_convolution_learns_as_the_plain_one_does(threads, bias):
    plain = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=bias)
    network = nn.Sequential(copy.deepcopy(plain))
    without_spinning(network)
    (strided,) = network
    assert type(strided) is StridedConv
    x = torch.randn(8, 4, 10, 10)
    for dtype, close in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        plain.zero_grad()
        strided.zero_grad()
        for ours, theirs in zip(trained(strided, x, dtype), trained(plain, x, dtype), strict=True):
            assert ours.dtype == theirs.dtype
            assert float((ours - theirs).norm()) <= close * float(theirs.norm())


def test_with_one_thread_no_bit_changes():
    plain = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)
    strided = copy.deepcopy(plain)
    without_spinning(strided)
    x = torch.randn(8, 4, 10, 10)
    for ours, theirs in zip(
        trained(strided, x, torch.bfloat16), trained(plain, x, torch.bfloat16), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_only_plain_convolutions_with_a_stride_change_and_their_state_does_not():
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 3, stride=2, groups=2),
        nn.Conv2d(4, 4, 3, stride=2, dilation=2),
        nn.Conv2d(4, 4, 3, stride=2, padding=1, padding_mode="reflect"),
    )
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    without_spinning(network)
    assert [type(layer) is StridedConv for layer in network] == [True, *4 * [False]]
    after = network.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_training_has_them(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=pixels)
    images = open_images(str(tmp_path / "data.npz"))
    method, _ = build(resolve(TrainConfig(backbone="tiny"), images, CPU), images, CPU)
    convolutions = [each for each in method.modules() if isinstance(each, nn.Conv2d)]
    assert {type(each) is StridedConv for each in convolutions if max(each.stride) > 1} == {True}
