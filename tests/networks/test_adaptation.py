"""Drop path, gradient checkpointing, LoRA, and networks at another size than their own."""

import copy

import numpy as np
import pytest
import torch
import torchvision
from timm.layers import DropPath as TimmDropPath
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from nearkin.encoders.encoder import Encoder, load, resized, write_encoder
from nearkin.errors import UsageError
from nearkin.networks.backbone import build_backbone, native
from nearkin.networks.blocks import checkpoint_blocks
from nearkin.networks.branch import Branch, as_backbone, frozen_copy, set_chunk_size
from nearkin.networks.drop_path import DropPath, set_drop_path
from nearkin.networks.input_size import patch_size, resize_input
from nearkin.networks.lora import add_lora, merged


def vit(depth: int = 4, **options) -> VisionTransformer:
    sizes = dict(img_size=16, patch_size=4, embed_dim=16, num_heads=2, num_classes=0)
    return VisionTransformer(depth=depth, **sizes | options)


def rates(body: nn.Module) -> list[float]:
    return [module.rate for module in body.modules() if isinstance(module, DropPath)]


NETWORKS = {
    "own": lambda: build_backbone("small", 16).body,
    "resnet": lambda: build_backbone("timm/resnet18", 32).body,
    "vit": vit,
    "convnext": lambda: build_backbone("timm/convnext_atto", 32).body,
    "torchvision": lambda: build_backbone("torchvision:convnext_tiny", 32).body,
}
BLOCKS = {"own": 3, "resnet": 8, "vit": 4, "convnext": 12, "torchvision": 18}


@pytest.mark.parametrize("name", NETWORKS)
def test_drop_path_rises_in_a_line_to_the_top_block_and_leaves_the_state(name):
    body, blocks, side = NETWORKS[name](), BLOCKS[name], 16 if name == "vit" else 32
    keys = list(body.state_dict())
    twice = 2 if name == "vit" else 1  # attention and perceptron
    set_drop_path(body, 0.3, name)
    expected = [0.3 * block / (blocks - 1) for block in range(1, blocks)]
    assert rates(body) == pytest.approx([rate for rate in expected for _ in range(twice)])
    assert list(body.state_dict()) == keys
    x = torch.randn(8, 3, side, side)
    torch.manual_seed(0)
    dropped, whole = body.train()(x), body.eval()(x)
    assert dropped.shape == whole.shape
    assert not torch.allclose(dropped, whole)


def test_rates_that_a_network_is_built_with_stay_and_draw_like_all_others():
    body = vit(drop_path_rate=0.2)
    set_drop_path(body, None, "vit")
    expected = np.repeat(np.linspace(0, 0.2, 4)[1:], 2)
    assert rates(body) == pytest.approx(expected)
    assert not any(isinstance(module, TimmDropPath) for module in body.modules())
    set_drop_path(body, 0.0, "vit")
    assert rates(body) == []


def test_a_branch_is_dropped_for_whole_images_and_keeps_its_mean():
    drop, x = DropPath(0.25), torch.rand(4000, 3, 2) + 0.5
    torch.manual_seed(0)
    dropped = drop(x)
    kept = dropped[:, 0, 0] > 0
    assert torch.equal(dropped, x * torch.where(kept, 1 / 0.75, 0.0)[:, None, None])
    # Four standard deviations of a mean of 4000 draws.
    assert abs(kept.double().mean().item() - 0.75) < 4 * (0.25 * 0.75 / 4000) ** 0.5
    assert drop.eval()(x) is x


def test_momentum_encoders_drop_nothing_and_networks_without_residual_branches_have_none():
    body = vit()
    set_drop_path(body, 0.3, "vit")
    branch = Branch(as_backbone(body, 16), 8)
    assert {rate > 0 for rate in rates(branch)} == {True}
    assert {*rates(frozen_copy(branch))} == {0.0}
    assert max(rates(branch)) == 0.3
    plain = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    set_drop_path(plain, None, "plain")
    set_drop_path(plain, 0.0, "plain")
    with pytest.raises(UsageError, match="backbone plain has no drop path"):
        set_drop_path(plain, 0.1, "plain")


@pytest.mark.parametrize(("name", "chunk"), [("vit", 0), ("vit", 4), ("convnext", 0)])
def test_activations_computed_again_give_the_same_gradients(name, chunk):
    torch.manual_seed(0)
    body = NETWORKS[name]()
    set_drop_path(body, 0.3, name)
    size = 16 if name == "vit" else 32
    plain = Branch(as_backbone(body, size), 8).train()
    again = copy.deepcopy(plain)
    checkpoint_blocks(again.backbone.body, name)
    assert list(again.state_dict()) == list(plain.state_dict())
    images = torch.randn(8, 3, size, size)
    for branch in (plain, again, copied := copy.deepcopy(again)):
        if chunk:
            set_chunk_size(branch, chunk, 8)
        torch.manual_seed(5)
        branch(images).square().sum().backward()
    for branch in (again, copied):
        for (key, p), q in zip(plain.named_parameters(), branch.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), key
        for key, value in plain.state_dict().items():
            assert torch.equal(value, branch.state_dict()[key]), key


def test_blocks_keep_their_input_alone():
    def held(body):
        sizes = []

        def pack(x):
            sizes.append(x.nelement())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            body(torch.randn(2, 3, 16, 16))
        return sum(sizes)

    body = vit(depth=8)
    before = held(body)
    checkpoint_blocks(body, "vit")
    assert held(body) < before / 4


@pytest.mark.parametrize("name", ["own", "resnet", "torchvision"])
def test_networks_that_timm_cannot_run_again_are_refused(name):
    with pytest.raises(UsageError, match=f"blocks of the backbone {name} again"):
        checkpoint_blocks(NETWORKS[name](), name)


def moved(backbone):
    """Let all that learns depart from where it starts."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in backbone.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return backbone


def test_lora_starts_at_the_features_of_the_network_and_merges_into_its_weights(tmp_path):
    backbone = as_backbone(vit(), 16, name="custom").eval()
    x = torch.randn(4, 3, 16, 16)
    before, keys = backbone(x), list(backbone.body.state_dict())
    weights = {name: p.clone() for name, p in backbone.body.named_parameters()}
    add_lora(backbone, 3, 16)
    assert torch.equal(backbone(x), before)
    learning = {name for name, p in backbone.named_parameters() if p.requires_grad}
    assert learning
    assert all("lora_" in name for name in learning)
    assert {name.split(".")[-4] for name in learning} == {"qkv", "proj", "fc1", "fc2"}
    moved(backbone)
    plain = merged(backbone)
    assert not torch.allclose(backbone(x), before, atol=1e-3)
    assert torch.allclose(plain(x), backbone(x), atol=1e-5)
    assert list(plain.body.state_dict()) == keys
    delta = plain.body.blocks[0].attn.qkv.weight - weights["blocks.0.attn.qkv.weight"]
    a, b = (
        getattr(backbone.body.blocks[0].attn.qkv, f"lora_{each}")["default"].weight
        for each in "AB"
    )
    assert torch.allclose(delta, b @ a, atol=1e-6)
    assert torch.linalg.matrix_rank(delta) == 3
    write_encoder(tmp_path / "e.safetensors", plain, {"backbone": "custom", "image_size": 16})
    written = load(tmp_path / "e.safetensors", backbone=vit())
    assert torch.allclose(written(x), backbone(x), atol=1e-5)


def test_a_layer_whose_weights_are_read_from_outside_gets_no_lora():
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.called = nn.Linear(12, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = x.flatten(1)
            return self.called(nn.functional.linear(x, self.read.weight))

    backbone = as_backbone(Read(), 2)
    add_lora(backbone, 2, 2)
    learning = {name for name, p in backbone.body.named_parameters() if p.requires_grad}
    assert learning == {f"called.lora_{each}.default.weight" for each in "AB"}


def test_position_embeddings_at_another_size_are_those_of_timms_own_loading(tmp_path):
    name = "timm:vit_tiny_patch16_224"
    torch.manual_seed(0)
    own = native(f"{name}?depth=1", 224)
    details = {"backbone": f"{name}?depth=1", "image_size": 224}
    write_encoder(tmp_path / "start.safetensors", as_backbone(own, 224), details)
    half = load(tmp_path / "start.safetensors", image_size=112)
    fresh = native(f"{name}?depth=1", 112)
    fresh.load_state_dict(checkpoint_filter_fn(own.state_dict(), fresh))
    assert fresh.pos_embed.shape == (1, 7 * 7 + 1, 192)
    state = fresh.state_dict()
    assert state.keys() == half.backbone.body.state_dict().keys()
    for key, value in half.backbone.body.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert half.preprocessing.image_size == 112
    assert half.details["backbone"] == details["backbone"]


def test_torchvisions_transformer_takes_another_size():
    body = torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=3)
    body.heads = nn.Identity()
    assert patch_size(body) == 8
    resize_input(body, 48, "vit")
    assert body.encoder.pos_embedding.shape == (1, 37, 16)
    assert body(torch.randn(2, 3, 48, 48)).shape == (2, 16)
    with pytest.raises(UsageError, match="of 8 px that vit takes; give image_size 48 or"):
        resize_input(body, 50, "vit")


def test_an_encoder_at_another_size_can_be_built_again_from_its_name(tmp_path):
    for name, own, size, word in (
        ("timm/vit_tiny_patch16_224", 32, 96, "timm/vit_tiny_patch16_224?built_for=32"),
        ("timm/vit_tiny_patch16_224", 64, 96, "timm/vit_tiny_patch16_224"),
        ("resnet18", 32, 64, "resnet18?built_for=32"),
        ("tiny", 16, 24, "tiny"),
        ("timm/eva02_tiny_patch14_224", 224, 112, "timm/eva02_tiny_patch14_224?built_for=224"),
    ):
        start = build_backbone(name, own)
        first, second = (tmp_path / f"{each}.safetensors" for each in "ab")
        write_encoder(first, start, {"backbone": name, "image_size": own})
        other = load(first, image_size=size)
        assert other.details["backbone"] == word
        write_encoder(second, other.backbone, other.details, other.preprocessing)
        again, x = load(second), torch.randn(1, 3, size, size)
        assert torch.equal(again(x), other(x)), word
        assert patch_size(again.backbone.body) == patch_size(start.body)


def test_windows_are_as_many_as_another_size_has_and_weights_for_one_size_alone_refused():
    name = "timm:swin_tiny_patch4_window7_224?depths=[1,1]&embed_dim=24&num_heads=[2,2]"
    larger = resized(Encoder(build_backbone(name, 56), 56, {"backbone": name}), 112)
    assert larger(torch.randn(1, 3, 112, 112)).shape == (1, 48)
    body = build_backbone("timm/vit_tiny_patch16_224", 16).body
    for size in (8, 12):  # views of less than a patch
        assert body(torch.randn(1, 3, size, size)).shape == (1, 192)
    name = "timm:mixer_s32_224"  # mixes as many patches as there are
    start = Encoder(build_backbone(name, 224), 224, {"backbone": name})
    with pytest.raises(UsageError, match="for images of 224 px, and do not fit those of 96 px"):
        resized(start, 96)
