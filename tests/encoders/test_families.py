"""The same weights give the same features, whichever library has them: as their authors use them.

Each family is made by transformers, whose classes its authors wrote or checked, with random weights
that are written under timm's names; pooling, activations and statistics are what is compared.
"""

import re

import pytest
import timm
import torch
from sources import saved_by_transformers

from nearkin.data.views import MEAN
from nearkin.encoders.encoder import load, write_encoder
from nearkin.encoders.libraries import as_authors, timm_weights

CLOSE = 1e-5  # of the largest feature: orders of summation differ
VIT = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, image_size=64)
MLP = VIT | {"patch_size": 16, "intermediate_size": 192}
SMALL = "depth=2&embed_dim=48&num_heads=3"
STAGES = dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1])

FAMILIES = {
    "DINOv2": ("Dinov2", VIT | {"patch_size": 14, "image_size": 56}, f"vit_small_patch14_dinov2?{SMALL}"),
    "DINOv2 with registers": ("Dinov2WithRegisters", VIT | {"patch_size": 14, "image_size": 56}, f"vit_small_patch14_reg4_dinov2?{SMALL}"),
    "DINOv3": ("DINOv3ViT", MLP | dict(query_bias=False, value_bias=False, num_register_tokens=4), f"vit_small_patch16_dinov3?{SMALL}"),
    "CLIP": ("CLIPVision", MLP, f"vit_base_patch16_clip_224.openai?{SMALL}"),
    "SigLIP": ("SiglipVision", MLP, f"vit_base_patch16_siglip_224?{SMALL}"),
    "MAE": ("ViTMAE", MLP | {"layer_norm_eps": 1e-6}, f"vit_base_patch16_224.mae?{SMALL}"),
    "I-JEPA": ("IJepa", MLP | {"patch_size": 14, "image_size": 56}, f"vit_huge_patch14_gap_224?{SMALL}&mlp_ratio=4"),
    "AIMv2": ("Aimv2Vision", MLP | dict(patch_size=14, image_size=56, intermediate_size=132, use_head=False), f"aimv2_large_patch14_224?{SMALL}"),
    "ConvNeXt V2": ("ConvNextV2", STAGES, "convnextv2_atto?depths=[1,1,1,1]&dims=[8,16,24,32]"),
}  # fmt: skip

TIMM_NAMES = (
    (r"^.*layers?\.(\d+)\.", r"blocks.\1."),
    (r"(self_attn|attention)\.", "attn."),
    (r"attn\.(o|out)_proj", "attn.proj"),
    (r"(layernorm_before|layer_norm1|rms_norm1)", "norm1"),
    (r"(layernorm_after|layer_norm2|rms_norm2)", "norm2"),
    (r"ffn\.gate_proj", "mlp.fc1_g"),
    (r"ffn\.up_proj", "mlp.fc1_x"),
    (r"mlp\.up_proj", "mlp.fc1"),
    (r"(ffn|mlp)\.down_proj", "mlp.fc2"),
    (r"layer_scale(\d)\.lambda1", r"ls\1.gamma"),
    (r"^embeddings\.(cls_token|class_embedding)", "cls_token"),
    (r"^embeddings\.register_tokens", "reg_token"),
    (r"^embeddings\.patch_embed(dings?)?(\.projection)?\.", "patch_embed.proj."),
    (r"^embeddings\.rms_norm", "patch_embed.norm"),
    (r"^embeddings\.position_embeddings?(\.weight)?", "pos_embed"),
    (r"^pre_layrnorm", "norm_pre"),
    (r"^(post_layernorm|layernorm|rms_norm)\.", "norm."),
)
STAGE_NAMES = (
    (r"^embeddings\.patch_embeddings", "stem.0"),
    (r"^embeddings\.layernorm", "stem.1"),
    (r"^encoder\.stages", "stages"),
    (r"downsampling_layer", "downsample"),
    (r"\.layers\.(\d)", r".blocks.\1"),
    (r"dwconv", "conv_dw"),
    (r"\.layernorm", ".norm"),
    (r"pwconv(\d)", r"mlp.fc\1"),
    (r"grn", "mlp.grn"),
    (r"^layernorm", "head.norm"),
)


def renamed(state, names):
    new = {}
    for name, tensor in state.items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        new[name] = tensor
    return new


def stages_in_timms_names(model):
    """The weights of a ConvNeXt V2: timm's linear layers are convolutions."""
    state = renamed(model.state_dict(), STAGE_NAMES)
    linear = {n: t[..., None, None] for n, t in state.items() if "mlp.fc" in n and t.ndim == 2}
    return state | linear | {n: t.flatten() for n, t in state.items() if "grn" in n}


def blocks_in_timms_names(family, model):
    """The weights of a vision transformer: timm joins queries, keys and values."""
    whole = {n: t for n, t in model.state_dict().items() if "mask_token" not in n}
    head = {n.removeprefix("head."): t for n, t in whole.items() if n.startswith("head.")}
    state = renamed({n: t for n, t in whole.items() if not n.startswith("head.")}, TIMM_NAMES)
    for name in [name for name in state if "attn.q_proj" in name]:
        parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        state[name.replace("q_proj", "qkv")] = torch.cat(parts)
    for name in {"cls_token", "pos_embed"} & {*state}:
        state[name] = state[name].reshape(1, -1, 48)
    if family == "DINOv3":
        state = {re.sub(r"ls(\d)\.gamma", r"gamma_\1", n): t for n, t in state.items()}
    if family == "DINOv2 with registers":  # timm adds the first position to the class token
        state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
        state["pos_embed"] = state["pos_embed"][:, 1:]
    return state | pool_in_timms_names(head) if head else state


def pool_in_timms_names(head):
    """The weights of SigLIP's attention pooling: timm splits its queries off."""
    weight, bias = head.pop("attention.in_proj_weight"), head.pop("attention.in_proj_bias")
    pool = {"latent": head.pop("probe"), "q.weight": weight[:48], "q.bias": bias[:48]}
    pool |= {"kv.weight": weight[48:], "kv.bias": bias[48:]}
    pool |= renamed(head, ((r"attention\.out_proj", "proj"), (r"layernorm", "norm")))
    return {f"attn_pool.{name}": tensor for name, tensor in pool.items()}


def made(family, folder):
    """A model of a family, saved as transformers does and under timm's names: its two encoders."""
    kind, options, name = FAMILIES[family]
    size = options.get("image_size", 64)
    model = saved_by_transformers(folder / "model", kind, options, size)
    stages = family == "ConvNeXt V2"
    state = stages_in_timms_names(model) if stages else blocks_in_timms_names(family, model)
    torch.save(state, folder / "weights.pth")
    theirs = load(folder / "model")
    return theirs, load(f"timm:{name}@{folder / 'weights.pth'}", image_size=size)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_libraries_give_the_same_features(family, tmp_path):
    theirs, ours = made(family, tmp_path)
    images = torch.randn(
        3, 3, ours.image_size, ours.image_size, generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        expected, actual = theirs(images), ours(images)
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= CLOSE * expected.abs().max()
    assert (expected[0] - expected[1]).abs().max() > 100 * CLOSE * expected.abs().max()
    assert theirs.num_prefix_tokens == ours.num_prefix_tokens
    with torch.no_grad():
        tokens = [encoder.forward_features(images) for encoder in (theirs, ours)]
    assert tokens[0].shape == tokens[1].shape


def test_what_differs_from_the_library_is_said_and_kept(tmp_path):
    """The file of the encoder builds it again; options in a name are the user's."""
    for family, note in (("DINOv3", "class token"), ("CLIP", "QuickGELU"), ("SigLIP", "tanh")):
        folder = tmp_path / family
        folder.mkdir()
        _, encoder = made(family, folder)
        assert any(line.startswith("note ") and note in line for line in encoder.lines()), family
        copy = folder / "copy.safetensors"
        write_encoder(copy, encoder.backbone, encoder.details, encoder.preprocessing)
        images = torch.randn(2, 3, 64, 64)
        with torch.no_grad():
            assert torch.equal(load(copy)(images), encoder(images))
        assert load(copy).lines() == encoder.lines()
    kind = "timm:vit_small_patch16_dinov3?global_pool=avg"
    assert as_authors(kind) == (kind, [])
    assert as_authors("timm:resnet50.a1_in1k", timm_weights("timm:resnet50.a1_in1k"))[1] == []


def test_timms_notes_on_weights_are_printed():
    name = "timm:cspnext_l.rsb_a1_in1k"
    same, notes = as_authors(name, timm_weights(name))
    assert same == name
    assert any("CSPNeXt as in RTMDet" in note for note in notes)


def test_every_weight_that_was_trained_with_quick_gelu_gets_it():
    """34 in timm 1.0.31: by name, whatever else is said of them."""
    noted = [
        name
        for name in timm.list_pretrained("*clip*")
        if any("QuickGELU" in note for note in timm.get_pretrained_cfg(name).notes or ())
    ]
    assert len(noted) >= 30
    for name in noted:
        built, _ = as_authors(f"timm:{name}", timm_weights(f"timm:{name}"))
        assert "_clip_quickgelu_" in built, name
        assert timm.get_pretrained_cfg(built.removeprefix("timm:")).has_weights


def test_statistics_of_a_family_also_under_a_prefix(tmp_path):
    """As open_clip writes its image towers. MoCo v3's ViT is of no family with its own."""
    for name, mean in (
        ("vit_base_patch16_siglip_224", (0.5, 0.5, 0.5)),
        ("vit_base_patch32_clip_224", (0.48145466, 0.4578275, 0.40821073)),
        ("vit_base_patch16_224", MEAN),
    ):
        torch.manual_seed(0)
        options = "depth=1&embed_dim=48&num_heads=3"
        network = timm.create_model(name, num_classes=0, depth=1, embed_dim=48, num_heads=3)
        state = {f"visual.trunk.{key}": tensor for key, tensor in network.state_dict().items()}
        torch.save(state, tmp_path / "weights.pth")
        encoder = load(f"timm:{name}?{options}@{tmp_path / 'weights.pth'}")
        assert encoder.preprocessing.mean == mean
        assert "assumed" in encoder.lines()[1]
