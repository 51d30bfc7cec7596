"""EVA-02 and Perception Encoder by timm are what their authors' code computes, restated here.

No second library has them: open_clip builds both by timm. Sources: EVA-02/asuka/modeling_finetune.py
and EVA-CLIP/rei/eva_clip/eva_vit_model.py of baaivision/EVA; core/vision_encoder/pe.py and rope.py of
facebookresearch/perception_models.
"""

import pytest
import timm
import torch
from sources import varied
from torch.nn import functional as F

from nearkin.encoders.encoder import load

CLOSE = 1e-5  # of the largest feature: orders of summation differ
HEADS, SIDE, DIM = 3, 4, 48  # patches in a row, features of a token
SMALL = f"depth=2&embed_dim={DIM}&num_heads={HEADS}"


class Weights(dict):
    """Weights by timm's names, and what layers compute with them."""

    def linear(self, name, x):
        return F.linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))

    def norm(self, name, x, eps=1e-6):
        return F.layer_norm(x, x.shape[-1:], self[f"{name}.weight"], self[f"{name}.bias"], eps)

    def tokens(self, images, patch):
        x = F.conv2d(
            images, self["patch_embed.proj.weight"], self.get("patch_embed.proj.bias"), patch
        )
        x = x.flatten(2).mT
        return torch.cat([self["cls_token"].expand(len(x), -1, -1), x], 1) + self["pos_embed"]


def along(positions):
    """Angles of each position, by 10,000 to the power of - 2 i / d, for half of a head's features."""
    half = DIM // HEADS // 2
    frequencies = 10_000.0 ** (-torch.arange(0, half, 2) / half)
    return positions[:, None] * frequencies


def rotated(x, first, second):
    """Turn pairs of features of all tokens but the class token: by one direction, then the other."""
    angles = torch.cat([first, second], -1).reshape(SIDE * SIDE, -1)
    pairs = x[:, :, 1:].unflatten(-1, (-1, 2))
    real, imaginary = pairs.unbind(-1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    patches = torch.view_as_real(turned).flatten(-2)
    return torch.cat([x[:, :, :1], patches], 2)


def rows_and_columns(positions):
    angles = along(positions)
    shape = SIDE, SIDE, angles.shape[-1]
    return angles[:, None].expand(shape), angles[None].expand(shape)


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attention(q, k, v):
    scores = (q / q.shape[-1] ** 0.5) @ k.mT
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def eva(weights, images, patch, clip):
    """EVA-02: gated MLPs; positions are those of 16 patches in a row, rows before columns."""
    x = weights.tokens(images, patch)
    rows, columns = rows_and_columns(torch.arange(SIDE) / SIDE * 16)
    for block in ("blocks.0", "blocks.1"):
        y = weights.norm(f"{block}.norm1", x)
        if clip:
            q, k, v = (weights.linear(f"{block}.attn.{part}_proj", y) for part in "qkv")
        else:
            biases = (weights[f"{block}.attn.{part}_bias"] for part in "qv")
            q, k, v = F.linear(y, weights[f"{block}.attn.qkv.weight"]).chunk(3, -1)
            q, v = (part + bias for part, bias in zip((q, v), biases, strict=True))
        q, k, v = map(heads, (q, k, v))
        y = attention(rotated(q, rows, columns), rotated(k, rows, columns), v)
        y = weights.norm(f"{block}.attn.norm", y) if clip else y
        x = x + weights.linear(f"{block}.attn.proj", y)
        y = weights.norm(f"{block}.norm2", x)
        if clip:
            gate, value = (weights.linear(f"{block}.mlp.fc1_{part}", y) for part in "gx")
        else:
            gate, value = weights.linear(f"{block}.mlp.fc1", y).chunk(2, -1)
        y = F.silu(gate) * value
        y = weights.norm(f"{block}.mlp.norm", y) if clip else y
        x = x + weights.linear(f"{block}.mlp.fc2", y)
    if clip:
        return weights.norm("norm", x)[:, 0]
    return weights.norm("fc_norm", x[:, 1:].mean(1))


def perception_encoder(weights, images, patch):
    """PE-Core: positions from 1, the class token at 0, columns before rows; attention pooling."""
    x = weights.norm("norm_pre", weights.tokens(images, patch), 1e-5)
    rows, columns = rows_and_columns(torch.arange(SIDE) + 1.0)
    for block in ("blocks.0", "blocks.1"):
        y = weights.norm(f"{block}.norm1", x, 1e-5)
        q, k, v = map(heads, weights.linear(f"{block}.attn.qkv", y).chunk(3, -1))
        y = attention(rotated(q, columns, rows), rotated(k, columns, rows), v)
        x = x + weights.linear(f"{block}.attn.proj", y)
        y = weights.linear(f"{block}.mlp.fc1", weights.norm(f"{block}.norm2", x, 1e-5))
        x = x + weights.linear(f"{block}.mlp.fc2", F.gelu(y))
    x = weights.norm("norm", x, 1e-5)
    q = heads(weights.linear("attn_pool.q", weights["attn_pool.latent"].expand(len(x), -1, -1)))
    k, v = map(heads, weights.linear("attn_pool.kv", x).chunk(2, -1))
    x = weights.linear("attn_pool.proj", attention(q, k, v))
    y = weights.linear("attn_pool.mlp.fc1", weights.norm("attn_pool.norm", x, 1e-5))
    return (x + weights.linear("attn_pool.mlp.fc2", F.gelu(y)))[:, 0]


FAMILIES = {
    "EVA-02": (f"eva02_small_patch14_224?{SMALL}", 14, lambda *given: eva(*given, clip=False)),
    "EVA-02 CLIP": (f"eva02_base_patch16_clip_224?{SMALL}", 16, lambda *given: eva(*given, clip=True)),
    "Perception Encoder": (
        # timm stretches the positions of other sizes to those of the pretraining's; its authors do not.
        f"vit_pe_core_base_patch16_224?{SMALL}&attn_pool_num_heads={HEADS}&ref_feat_shape=[4,4]",
        16,
        perception_encoder,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_those_of_the_authors(family, tmp_path):
    name, patch, restated = FAMILIES[family]
    torch.manual_seed(0)
    size = SIDE * patch
    options = {"depth": 2, "embed_dim": DIM, "num_heads": HEADS, "img_size": size}
    more = {"attn_pool_num_heads": HEADS} if family == "Perception Encoder" else {}
    network = varied(timm.create_model(name.partition("?")[0], num_classes=0, **options, **more))
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    encoder = load(f"timm:{name}@{tmp_path / 'weights.pth'}", image_size=size)
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = restated(Weights(network.state_dict()), images, patch)
        actual = encoder(images)
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= CLOSE * expected.abs().max()
    assert (expected[0] - expected[1]).abs().max() > 100 * CLOSE * expected.abs().max()
