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
from nearkin.data.batches import Batches
from nearkin.data.opening import open_images
from nearkin.data.samplers import RandomBatchSampler
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import Branch

MOST_NODES = 2_000  # of a graph that is compiled in seconds; MoCo once had 11,000


@pytest.mark.slow
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


MOST_OPERATIONS = 500  # for the two views of a step, the copies from the CPU included


@pytest.mark.parametrize("preset", ["simclr_cifar", "moco_cifar", "asymmetric_cifar"])
def test_views_of_a_step_take_few_operations(preset):
    images, device = open_images(pixels(512, 32)), torch.device("cpu")
    order = RandomBatchSampler(len(images), 64, seed=0)
    batches = Batches.of(images, views_of(preset), image_size=32, sampler=order, device=device)
    given = []  # operations that a GPU would be given: all but views of memory
    with Observed(lambda operation, *_: given.append(not operation.is_view)):
        next(batches.load(0, 1))
    assert 100 < sum(given) <= MOST_OPERATIONS
