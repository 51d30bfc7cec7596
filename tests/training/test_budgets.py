"""How many operations a GPU is given, counted on the CPU: few are what keeps it busy.

Counts are of tensors on the device "meta", which have shapes and no numbers.
"""

import torch
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

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
