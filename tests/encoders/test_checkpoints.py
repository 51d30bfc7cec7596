"""Checkpoints of other code, by the names and the nesting that each of them writes."""

import argparse
import pathlib
import pickle
import re

import pytest
import timm
import torch
import torchvision
from builders import write_network
from safetensors.torch import save
from sources import offline, prefixed, refusal, shifted, varied
from torch import nn

import nearkin
from nearkin.encoders.checkpoints import has_small_stem
from nearkin.encoders.encoder import load, write_encoder
from nearkin.encoders.libraries import pooling, timm_view
from nearkin.errors import CheckpointError, UsageError
from nearkin.networks.backbone import native

IMAGES = torch.linspace(-1, 1, 2 * 3 * 64 * 64).sin().reshape(2, 3, 64, 64)
HEAD = {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}


@pytest.fixture(scope="module")
def resnet():
    network = varied(torchvision.models.resnet18())
    network.fc = nn.Identity()
    return network


def stored(encoder, folder):
    path = folder / "own.safetensors"
    write_encoder(path, encoder.backbone, encoder.details, encoder.preprocessing)
    return load(path)


NARROW = "timm:resnet18?channels=[8, 8, 16, 16]"


@pytest.fixture(scope="module")
def narrow():
    """A residual network whose checkpoints are small; its names are those of torchvision's."""
    return varied(timm.create_model("resnet18", num_classes=0, channels=[8, 8, 16, 16]))


@pytest.fixture(scope="module")
def vit():
    return varied(timm.create_model("vit_tiny_patch16_224", num_classes=0))


def numbered(network):
    """The names of `nn.Sequential(*network.children())`."""
    children = [name for name, _ in network.named_children()]
    places = {name: str(children.index(name)) for name in children}
    state = network.state_dict().items()
    return {".".join([places[n.split(".")[0]], *n.split(".")[1:]]): t for n, t in state}


def beside(own, other, **heads):
    return own | other | {f"{head}.{n}": t for head in heads.values() for n, t in HEAD.items()}


def residual_checkpoints(network):
    """What each training writes of a residual network, and what of it should be taken."""
    own, seq = network.state_dict(), numbered(network)
    other = shifted(own)
    adam = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}
    moco = beside(prefixed(other, "module.encoder_k."), prefixed(own, "module.encoder_q."),
                  fc="module.encoder_q.fc")  # fmt: skip
    moco["module.queue"] = torch.zeros(128, 64)
    v3 = beside(prefixed(own, "module.base_encoder."), prefixed(other, "module.momentum_encoder."),
                head="module.base_encoder.fc.0", predictor="module.predictor.0")  # fmt: skip
    return {
        "moco": {"arch": "resnet18", "state_dict": moco, "optimizer": adam, "epoch": 200},
        "moco v3": {"arch": "resnet18", "state_dict": v3},
        "simsiam": {"state_dict": beside(prefixed(own, "module.encoder."), {}, a="module.encoder.fc.0", b="module.predictor.0")},
        "swav": beside(prefixed(own, "module."), {}, a="module.projection_head.0", b="module.prototypes"),
        "barlow twins": {"model": beside(prefixed(own, "module.backbone."), {}, a="module.projector.0", b="module.bn")},
        "vicreg": own,
        "byol": {"online_network_state_dict": beside(prefixed(seq, "encoder."), {}, a="projetion.net.0"),
                 "target_network_state_dict": prefixed(shifted(seq), "encoder.")},
        "byol-pytorch": beside(prefixed(other, "target_encoder.net."), prefixed(own, "online_encoder.net."), a="online_predictor.0"),
        "lightly": {"state_dict": beside(prefixed(seq, "backbone."), prefixed(shifted(seq), "backbone_momentum."), a="projection_head.layers.0"),
                    "hyper_parameters": {"path": pathlib.PurePosixPath("data")}},
        "solo-learn": {"state_dict": beside(prefixed(own, "backbone."), prefixed(other, "momentum_backbone."), a="projector.0", b="classifier"),
                       "hyper_parameters": {"args": argparse.Namespace(lr=0.1)}},
        "lightly-train": {"state_dict": prefixed(own, "embedding_model.wrapped_model._features."),
                          "lightly_train": {"models": {"model": nn.ReLU()}}},
        "torchvision": beside(own, {}, a="fc"),
        "compiled": {"model": prefixed(own, "module._orig_mod.")},
    }  # fmt: skip


def test_residual_networks(narrow, tmp_path):
    path, kinds = tmp_path / "checkpoint.pth.tar", residual_checkpoints(narrow)
    expected = narrow(IMAGES)
    for kind, old in (*((kind, False) for kind in kinds), ("moco", True)):
        torch.save(kinds[kind], path, _use_new_zipfile_serialization=not old)
        encoder = load(f"{NARROW}@{path}", image_size=64)
        assert torch.equal(encoder(IMAGES), expected), kind
        assert encoder.details["origin"]["license"] == "not stated"
        assert len(encoder.details["origin"]["sha256"]) == 64


def transformer_checkpoints(network):
    own = network.state_dict()
    other = shifted(own)
    in_chunks = lambda match: f"blocks.{int(match[1]) // 6}.{match[1]}"
    chunks = {re.sub(r"^blocks\.(\d+)", in_chunks, name): t for name, t in own.items()}
    args = argparse.Namespace(arch="vit_tiny", patch_size=16)
    return {
        "dino": {"student": beside(prefixed(other, "module.backbone."), {}, a="module.head.mlp.0"),
                 "teacher": beside(prefixed(own, "backbone."), {}, a="head.mlp.0"), "args": args, "path": pathlib.PurePosixPath("data")},
        "dinov2 in chunks": {"teacher": beside(prefixed(chunks, "backbone."), {"backbone.mask_token": torch.zeros(1, 192)}, a="dino_head.mlp.0")},
        "mae": {"model": {**beside(own, {}, a="decoder_blocks.0.norm1"), "mask_token": torch.zeros(1, 1, 8), "decoder_pos_embed": torch.zeros(1, 4, 8)}},
        "moco v3": {"arch": "vit_tiny", "state_dict": beside(prefixed(own, "module.base_encoder."), prefixed(other, "module.momentum_encoder."), a="module.base_encoder.head.0")},
        "timm training": {"arch": "vit_tiny_patch16_224", "state_dict": beside(other, {}, a="head"), "state_dict_ema": beside(own, {}, a="head")},
    }  # fmt: skip


def test_vision_transformers(vit, tmp_path):
    path, images = tmp_path / "checkpoint.pth", nn.functional.interpolate(IMAGES[:1], 224)
    expected = vit(images)
    for kind, checkpoint in transformer_checkpoints(vit).items():
        torch.save(checkpoint, path)
        encoder = load(f"vit_tiny_patch16_224@{path}")
        assert torch.equal(encoder(images), expected), kind
        assert encoder.preprocessing.mean == (0.485, 0.456, 0.406)  # no timm's own weights
        if kind in ("dino", "moco v3", "timm training"):  # which name their architecture
            assert load(path).details["backbone"] == "timm:vit_tiny_patch16_224", kind


def test_safetensors_are_read_whatever_the_length_of_their_header(narrow, tmp_path):
    """Also where the file then begins as a pickle does, or a zip."""
    path, state = tmp_path / "weights.safetensors", narrow.state_dict()
    length = int.from_bytes(save(state, {"padding": ""})[:8], "little")
    for begin in (b"\x80", b"PK"):
        more = (int.from_bytes(begin, "little") - length) % 256 ** len(begin)
        path.write_bytes(save(state, {"padding": "x" * more}))
        assert path.read_bytes().startswith(begin)
        encoder = load(f"{NARROW}@{path}", image_size=64)
        assert torch.equal(encoder(IMAGES), narrow(IMAGES))


def test_networks_that_ask_for_their_version_are_loaded_again(tmp_path):
    """Which no file of weights has."""
    path = write_network(tmp_path / "mnasnet.safetensors", "mnasnet0_5", size=64)
    encoder = load(path)
    write_encoder(path, encoder.backbone, {"backbone": "custom", "image_size": 64})
    network = torchvision.models.mnasnet0_5()
    network.classifier = nn.Identity()
    assert torch.equal(load(path, backbone=network)(IMAGES), encoder(IMAGES))


NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""


def test_a_network_of_a_python_file_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    torch.save({"0.weight": torch.ones(4, 3, 3, 3), "0.bias": torch.zeros(4)}, "net.pth")
    encoder = load("net.py:net@net.pth", image_size=16)
    assert encoder.details["backbone"] == f"{tmp_path.resolve() / 'net.py'}:net"


def test_the_line_says_what_was_taken_and_what_was_not(resnet, tmp_path):
    torch.save(residual_checkpoints(resnet)["moco"], tmp_path / "moco.pth.tar")
    encoder = load(tmp_path / "moco.pth.tar")  # which names its architecture
    assert encoder.details["backbone"] == "torchvision:resnet18"
    lines = encoder.lines()
    assert "weights of state_dict.module.encoder_q" in lines
    assert (
        "weights without state_dict.module.encoder_k (120), state_dict.module.encoder_q.fc (2), "
        "state_dict.module.queue (1)"
    ) in lines
    assert "assumed, the file does not say" in lines[1]
    state = {f"net.{name}": tensor for name, tensor in resnet.state_dict().items()}
    torch.save({**state, "net": torch.zeros(1)}, tmp_path / "named.pth")
    lines = load(f"resnet18@{tmp_path / 'named.pth'}").lines()
    assert "weights without net (1)" in lines


def test_small_images_have_a_small_stem(tmp_path):
    """solo-learn's networks for CIFAR: a first convolution of 3x3, no pooling."""
    network = torchvision.models.resnet18()
    network.conv1, network.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    network.fc = nn.Identity()
    varied(network, 32)
    state = prefixed(network.state_dict(), "backbone.")
    torch.save({"state_dict": state}, tmp_path / "cifar.ckpt")
    encoder = load(f"resnet18@{tmp_path / 'cifar.ckpt'}")
    images = IMAGES[..., :32, :32]
    assert encoder.image_size == 32
    assert torch.equal(encoder(images), network(images))
    larger = stored(load(f"resnet18@{tmp_path / 'cifar.ckpt'}", image_size=64), tmp_path)
    assert larger.details["backbone"] == "resnet18?built_for=32"
    assert torch.equal(larger(IMAGES), network(IMAGES))


def test_a_small_stem_is_that_of_a_residual_network_alone():
    """Other networks have a first convolution of 3x3 at any size of images."""
    with torch.device("meta"):
        cifar, vgg = torchvision.models.resnet18(), torchvision.models.vgg11()
        cifar.conv1 = nn.Conv2d(3, 64, 3, bias=False)
        others = [torchvision.models.resnet18(), torchvision.models.mobilenet_v2()]
        others += [timm.create_model(name) for name in ("resnet26d", "hrnet_w18_small")]
    own = cifar.state_dict()
    unpooled = {
        re.sub(r"^([4-7])", lambda n: str(int(n[1]) - 1), n): t for n, t in numbered(cifar).items()
    }
    for state in (own, prefixed(own, "module.encoder_q."), numbered(cifar), unpooled,
                  prefixed(unpooled, "f.")):  # fmt: skip
        assert has_small_stem(state), next(iter(state))
    for network in (*others, vgg):
        for prefix in ("", "module.encoder_q."):
            assert not has_small_stem(prefixed(network.state_dict(), prefix)), type(network)


def test_the_small_transformer_of_moco_v3_has_twelve_heads(tmp_path):
    network = timm.create_model("vit_small_patch16_224", num_classes=0, num_heads=12, depth=12)
    state = prefixed(varied(network).state_dict(), "module.base_encoder.")
    torch.save({"arch": "vit_small", "state_dict": state}, tmp_path / "vit-s-300ep.pth.tar")
    encoder = load(tmp_path / "vit-s-300ep.pth.tar")
    images = torch.nn.functional.interpolate(IMAGES[:1], 224)
    assert torch.equal(encoder(images), network(images))
    assert stored(encoder, tmp_path).backbone.body.blocks[0].attn.num_heads == 12


def test_a_tag_gives_preprocessing_and_license(tmp_path, monkeypatch):
    offline(monkeypatch, tmp_path)
    network = timm.create_model("convnextv2_atto", num_classes=0)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    encoder = load(f"timm:convnextv2_atto.fcmae@{tmp_path / 'weights.pth'}")
    config = timm.get_pretrained_cfg("convnextv2_atto.fcmae")
    assert encoder.preprocessing.interpolation == config.interpolation
    assert "assumed" not in "".join(encoder.lines())
    assert encoder.lines()[-1].startswith("warning: license cc-by-nc-4.0: ")
    assert stored(encoder, tmp_path).lines() == encoder.lines()


def test_weights_that_timm_has_saved_are_prepared_for_as_its_own(vit, tmp_path):
    """Those in a training's dictionary may be of any training."""
    torch.save(vit.state_dict(), tmp_path / "weights.pth")
    encoder = load(f"timm:vit_tiny_patch16_224@{tmp_path / 'weights.pth'}")
    assert encoder.preprocessing == timm_view(vit.default_cfg, 224)
    assert encoder.preprocessing.mean == (0.5, 0.5, 0.5)
    assert encoder.lines()[1].endswith("; assumed, as timm's own of this architecture")
    torch.save({"model": vit.state_dict()}, tmp_path / "weights.pth")
    encoder = load(f"timm:vit_tiny_patch16_224@{tmp_path / 'weights.pth'}")
    assert encoder.preprocessing.mean == (0.485, 0.456, 0.406)
    assert encoder.lines()[1].endswith("; assumed, the file does not say")


def test_missing_and_unknown_weights_are_listed_unless_allowed(resnet, vit, tmp_path, capsys):
    path = tmp_path / "part.pth"
    for network, name, part, number, missing in (
        (resnet, "resnet18", "layer4.1", 10, "layer4.1.conv1.weight, layer4.1.bn1.weight, "),
        (vit, "vit_tiny_patch16_224", "blocks.11", 12, "blocks.11.norm1.weight, "),
    ):
        state = {n: t for n, t in network.state_dict().items() if not n.startswith(part)}
        torch.save({**state, "strange.weight": torch.zeros(2)}, path)
        text = refusal(f"{name}@{path}")
        assert f"{number} missing: {missing}" in text
        assert f"and {number - 4} more; 1 left over: strange.weight" in text
        assert "allow_partial" in text
        encoder = load(f"{name}@{path}", allow_partial=True)
        assert f"weights {number} missing" in "\n".join(encoder.lines())
        loaded = encoder.backbone.body.state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert capsys.readouterr() == ("", "")
    part = f"vit_tiny_patch16_224@{path}"  # which the commands load before they refuse the rest
    with pytest.raises(UsageError, match="last:99, but"):
        nearkin.classify(part, "digits", allow_partial=True, train_layers="last:99")
    with pytest.raises(UsageError, match="torchvision has no such network"):
        nearkin.export(part, output=tmp_path / "x", format="torchvision", allow_partial=True)


def test_another_architecture_is_refused(resnet, vit, tmp_path):
    path, tiny = tmp_path / "weights.pth", "vit_tiny_patch16_224"
    for network, others in (
        (resnet, ("resnet50", tiny)),
        (vit, ("vit_small_patch16_224", "vit_tiny_r_s16_p8_224", "resnet18")),
    ):
        torch.save(network.state_dict(), path)
        for wrong in others:
            text = refusal(f"{wrong}@{path}")
            assert re.search(rf"{path} is of another architecture than \w+:{wrong}: its ", text)
        assert refusal(path).endswith("give ARCHITECTURE@FILE, such as resnet50@FILE")
    torch.save(resnet.state_dict(), path)
    assert "missing: layer1.2.conv1.weight" in refusal(f"resnet34@{path}")


def test_other_sizes_of_patches_and_unknown_architectures_are_refused(tmp_path):
    network = timm.create_model("vit_tiny_patch16_224", num_classes=0, patch_size=32)
    file = tmp_path / "w.pth"
    torch.save(network.state_dict(), file)
    text = refusal(f"vit_tiny_patch16_224@{file}")
    assert "its patch_embed.proj.weight is 192x3x32x32, not 192x3x16x16" in text
    assert "Did you mean resnet18?" in refusal(f"resnet1@{file}")
    for missing in (tmp_path / "no.pth", tmp_path):
        assert f"{missing} is no file" in refusal(f"resnet18@{missing}")
    for source in ("resnet18@", "@"):
        assert refusal(source) == f"{source} names no file; give ARCHITECTURE@FILE"
    torch.save(nn.Linear(2, 2), file)  # a network as an object
    with pytest.raises(CheckpointError, match=r"save its state_dict\(\) instead"):
        load(f"resnet18@{file}")


def test_files_of_something_else_get_a_line_that_says_so(resnet, tmp_path):
    path = tmp_path / "w.pth"
    for content, reason in (
        (b"", "is empty"),
        (b"hello", "it is no checkpoint of PyTorch"),
        (b"PK\3\4" + b"x" * 100, "w.pth"),
        (b"\x80\2", "w.pth"),
        (b"\x80\2.", "w.pth"),
        (pickle.dumps({"a": print}, protocol=4), "cannot be read"),
    ):
        path.write_bytes(content)
        assert reason in refusal(f"resnet18@{path}", CheckpointError), content
    for zipped, reason in ((True, "is cut off"), (False, r"expected \d+ more bytes\)")):
        torch.save({"a": torch.zeros(999)}, path, _use_new_zipfile_serialization=zipped)
        path.write_bytes(path.read_bytes()[:-200])
        assert re.search(f"{reason}; get it again", refusal(f"resnet18@{path}", CheckpointError))
    torch.save({**resnet.state_dict(), "conv1.weight": torch.full((64, 3, 7, 7), torch.nan)}, path)
    assert "not finite" in refusal(f"resnet18@{path}", CheckpointError)


def test_what_makes_one_vector_of_an_image_is_named_as_it_is():
    """Networks whose features are all numbers of a map do not average it."""
    for name, positions, named in (
        ("alexnet", 6 * 6, "flattened map"),
        ("squeezenet1_1", 13 * 13, "flattened map"),
        ("vgg11", 7 * 7, "flattened map"),
        ("resnet18", 1, "average"),
        ("mobilenet_v2", 1, "average"),
    ):
        with torch.device("meta"):
            body, images = native(f"torchvision:{name}", 224).eval(), torch.zeros(1, 3, 224, 224)
        channels = [each for each in body.modules() if isinstance(each, torch.nn.Conv2d)][-1]
        count = 512 if name == "squeezenet1_1" else channels.out_channels  # of two convolutions
        assert body(images).shape == (1, count * positions), name
        assert pooling(body) == named, name
