"""How many operations a GPU is given, counted on the CPU: few are what keeps it busy.

Networks are on the device "meta", whose tensors have shapes and no numbers.
"""

import pytest
import torch
from builders import pixels
from small import Observed
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from nearkin.data.augmentations import views_of
from nearkin.data.batches import AT_ONCE, Batches
from nearkin.data.opening import open_images
from nearkin.data.order import Order
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import Branch

MOST_NODES = 2_000  # of a graph that is compiled in seconds; MoCo once had 11,000


def test_groups_of_batch_statistics_add_few_nodes_to_what_is_compiled():
    """Forward and backward of the encoder of MoCo's CIFAR-10 recipe, as the compiler gets them."""
    network = Branch(build_backbone("resnet18", 32), 0, 128, bn_groups=8)
    network.to("meta").train()
    parameters, buffers = dict(network.named_parameters()), dict(network.named_buffers())
    images = torch.empty(16, 3, 32, 32, device="meta").to(memory_format=torch.channels_last)

    def gradients(parameters, buffers, images):
        embedding = functional_call(network, {**parameters, **buffers}, (images,))
        return torch.autograd.grad(embedding.square().sum(), list(parameters.values()))

    traced = make_fx(gradients, select_decomp_table(), "fake")(parameters, buffers, images)
    assert 1_000 < len(traced.graph.nodes) <= MOST_NODES


MOST_OPERATIONS = 80  # for the views of a step; once 491, of which 83 were copies from the CPU


@pytest.mark.parametrize("preset", ["simclr_cifar", "moco_cifar", "asymmetric_cifar"])
def test_views_of_a_step_take_few_operations(preset):
    """Two views of CIFAR-10, of as many steps at once as on a GPU."""
    images, device = open_images(pixels(512, 32)), torch.device("cpu")
    order = Order(len(images), 64, seed=0)
    batches = Batches(images, views_of(preset), image_size=32, order=order, device=device)
    batches.steps_at_once = AT_ONCE
    given = []  # operations that a GPU would be given: all but views of memory
    with Observed(lambda operation, *_: given.append(not operation.is_view)):
        assert sum(1 for _ in batches.between(0, AT_ONCE)) == AT_ONCE
    assert 20 * AT_ONCE < sum(given) <= MOST_OPERATIONS * AT_ONCE
