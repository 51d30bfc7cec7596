"""Features of places in an image, and what pools them."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn

from nearkin.data.rng import seeded
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import Backbone
from nearkin.networks.tokens import AttentivePooling, TokenFeatures


def test_pooling_is_cross_attention_of_a_learned_query():
    with seeded(0, torch.device("cpu")):
        attention = nn.MultiheadAttention(12, 3, batch_first=True)
        tokens, query = torch.randn(5, 7, 12), torch.randn(1, 1, 12)
        nn.init.normal_(attention.in_proj_bias)
    expected, _ = attention(query.expand(5, 1, 12), tokens, tokens)
    q, k, v = attention.in_proj_weight.chunk(3)
    bias_q, _, bias_v = attention.in_proj_bias.chunk(3)
    queries = ((query[0, 0] @ q.T + bias_q) / 2.0).view(3, 4)  # the root of 4 numbers per head
    columns = torch.einsum("hd,hdc->ch", queries, k.view(3, 4, 12))
    pooling = AttentivePooling(torch.zeros(12), torch.ones(12), columns)
    pooled = pooling(tokens).unflatten(1, (3, 12))
    values = torch.einsum("bhc,hdc->bhd", pooled, v.view(3, 4, 12)).flatten(1) + bias_v
    torch.testing.assert_close(attention.out_proj(values), expected[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "size", "num_tokens", "pooled"),
    [
        ("tiny", 8, 4, "mean"),
        ("resnet18", 16, 4, "mean"),
        ("torchvision:resnet18", 64, 4, "mean"),
        ("torchvision:swin_t", 64, 4, "mean"),
        ("timm:convnext_atto", 64, 4, None),
        ("timm:swin_tiny_patch4_window7_224", 64, 4, "mean"),
        ("vit_tiny_patch16_224", 16, 17, "first"),
        ("torchvision:vit_b_32", 64, 5, "first"),
    ],
)
def test_pooled_tokens_are_the_features(name, size, num_tokens, pooled):
    with seeded(0, torch.device("cpu")):
        backbone = build_backbone(name, size).eval()
        backbone.rescale_input(torch.tensor([2.0, 1.0, 0.5]), torch.tensor([0.1, 0.2, 0.3]))
        images = torch.randn(3, 3, size, size)
    network = TokenFeatures(backbone, size)
    with torch.inference_mode():
        tokens, features = network(images), backbone(images)
    assert tokens.shape == (3, num_tokens, network.dim)
    if pooled:
        rebuilt = tokens.mean(dim=1) if pooled == "mean" else tokens[:, 0]
        torch.testing.assert_close(rebuilt, features, atol=1e-5, rtol=1e-4)


class Meeting(nn.Module):
    """Where two threads wait for each other, once they are to meet."""

    barrier = None

    def forward(self, images):
        if self.barrier:
            self.barrier.wait(timeout=60)
        return images


def test_tokens_are_those_of_the_images_that_were_given_whatever_other_threads_compute():
    parts = Meeting(), nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), Meeting(), nn.Flatten()
    network = TokenFeatures(Backbone(nn.Sequential(*parts), 4), 8)
    images = [torch.full((1, 3, 8, 8), value) for value in (0.0, 1.0)]
    with torch.no_grad():
        expected = [*map(network, images)]
        for part in (parts[0], parts[3]):
            part.barrier = Barrier(2)
        with ThreadPoolExecutor(2) as pool:
            found = pool.map(torch.no_grad()(network), images)
    assert all(map(torch.equal, found, expected))
