"""Features are those of the library that has the encoder, from files of photographs to vectors.

All weights are random and seeded, saved in the library's own format and loaded as any others.
"""

import hashlib
import json
import re
from copy import deepcopy

import pytest
import timm
import torch
import torchvision
import transformers
from PIL import Image
from sources import cache_of_hub, offline, photographs, varied
from timm.data import create_transform, resolve_model_data_config
from timm.models._hub import save_for_hf
from torch import nn

from nearkin.data.opening import open_images
from nearkin.encoders.encoder import load, write_encoder
from nearkin.encoders.inference import inference
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import encode_images

CLOSE = 1e-5
FOLDED = {"efficientnet_b0.ra_in1k": 1e-4}
"""Rounding changes a random EfficientNet's features by 5e-5, and those of timm's own by 1.4e-4."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return photographs(tmp_path_factory.mktemp("photographs") / "data")


def opened(folder):
    return [Image.open(file).convert("RGB") for file in sorted(folder.iterdir())]


def features(encoder, folder):
    """From the files to features, by the way that all commands take."""
    images = open_images(folder, cache=False)
    return encode_images(inference(encoder, torch.device("cpu")), images, workers=0).tensor


def assert_equal_features(encoder, folder, expected, tmp_path, close=CLOSE):
    """Features are the library's, and those of the encoder's copy in a file bit for bit."""
    actual = features(encoder, folder)
    difference = (actual - expected).abs().max() / expected.abs().max()
    assert actual.shape == expected.shape
    assert difference <= close
    # Not a constant: images differ by far more than that.
    assert (expected - expected[0]).abs().max() / expected.abs().max() > 100 * CLOSE
    copy = tmp_path / "copy.safetensors"
    write_encoder(copy, encoder.backbone, encoder.details, encoder.preprocessing)
    again = load(copy)
    assert torch.equal(features(again, folder), actual)
    assert again.lines() == encoder.lines()
    assert again.digest == encoder.digest


def of_timm(network, folder):
    transform = create_transform(**resolve_model_data_config(network), is_training=False)
    # In float64, or the difference would be the library's rounding, which depends on the CPU.
    images = torch.stack([transform(image) for image in opened(folder)]).double()
    with torch.no_grad():
        return deepcopy(network).eval().double()(images)


@pytest.mark.parametrize(
    "name",
    [
        "efficientnet_b0.ra_in1k",
        "eva02_tiny_patch14_224.mim_in22k",
        "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    ],
)
def test_timm_by_name(name, folder, tmp_path, monkeypatch):
    offline(monkeypatch, tmp_path)
    cache_of_hub(tmp_path, name)
    expected = of_timm(timm.create_model(name, pretrained=True, num_classes=0), folder)
    encoder = load(f"timm:{name}")
    assert_equal_features(encoder, folder, expected, tmp_path, FOLDED.get(name, CLOSE))


SMALL_VIT = {"depth": 2, "embed_dim": 48, "num_heads": 3}
LOCAL = {
    "dinov2": ("vit_small_patch14_dinov2.lvd142m", {**SMALL_VIT, "img_size": 126}),
    "clip": ("vit_base_patch32_clip_224.openai", SMALL_VIT),
    "siglip 2": ("vit_base_patch16_siglip_224.v2_webli", SMALL_VIT),
    "mae": ("vit_base_patch16_224.mae", SMALL_VIT),
    "swin": ("swin_tiny_patch4_window7_224.ms_in1k", {"depths": [1, 1], "num_heads": [3, 3], "embed_dim": 12}),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOCAL)
def test_timm_in_a_folder(kind, folder, tmp_path):
    name, arguments = LOCAL[kind]
    torch.manual_seed(0)
    saved = varied(timm.create_model(name, **arguments))
    save_for_hf(saved, tmp_path / "model", model_args=arguments, safe_serialization=True)
    source = f"local-dir:{tmp_path / 'model'}"
    expected = of_timm(timm.create_model(source, pretrained=True, num_classes=0), folder)
    encoder = load(f"timm:{source}")
    assert_equal_features(encoder, folder, expected, tmp_path)
    assert load(tmp_path / "model").digest == encoder.digest


def test_timm_in_a_folder_has_any_number_of_classes(folder, tmp_path):
    """Of fine-tuned weights; timm's own default is 1000, and not all versions write both places."""
    for where, classes in (("both", 1000), ("top", 7), ("nested", 0), ("nested", 7), ("old", 7)):
        torch.manual_seed(0)
        arguments = {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16]} if where != "old" else {}
        saved = varied(timm.create_model("resnet10t", num_classes=classes, **arguments))
        path = tmp_path / f"{where} {classes}"
        save_for_hf(saved, path, model_args=arguments, safe_serialization=True)
        config = json.loads((path / "config.json").read_text())
        config["model_args"].pop("num_classes")
        if where == "top":
            config["pretrained_cfg"]["num_classes"] = 1000  # of the weights it was tuned from
        elif where == "nested":
            del config["num_classes"]
        elif where == "old":
            config = {**config["pretrained_cfg"], "architecture": "resnet10t", "num_features": 512}
        (path / "config.json").write_text(json.dumps(config))
        saved.reset_classifier(0)
        assert_equal_features(load(path), folder, of_timm(saved, folder), tmp_path)


def test_a_classifier_of_another_width_than_a_timm_folder_says_is_left_over(folder, tmp_path):
    torch.manual_seed(0)
    arguments = {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16]}
    saved = varied(timm.create_model("resnet10t", num_classes=7, **arguments))
    save_for_hf(saved, tmp_path / "model", model_args=arguments, safe_serialization=True)
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["model_args"].pop("num_classes")
    config["num_classes"] = 1000
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"fc\.weight"):
        load(tmp_path / "model")
    encoder = load(tmp_path / "model", allow_partial=True)
    saved.reset_classifier(0)
    assert_equal_features(encoder, folder, of_timm(saved, folder), tmp_path)


def saved_torchvision(name, folder, state, monkeypatch):
    """Keep these weights as torch keeps a download: the name begins the SHA-256 of the content."""
    kept = folder / "torch" / "hub" / "checkpoints"
    kept.mkdir(parents=True)
    torch.save(state, kept / "weights")
    begin = hashlib.sha256((kept / "weights").read_bytes()).hexdigest()[:8]
    (kept / "weights").rename(kept / f"{name}-{begin}.pth")
    weights = torchvision.models.get_model_weights(name).DEFAULT.value
    monkeypatch.setattr(weights, "url", f"https://download.invalid/{name}-{begin}.pth")


TRANSFORMED = {"transform_input": True, "aux_logits": True, "init_weights": False}
HEADS = {
    "densenet121": "classifier",
    "googlenet": "fc",
    "inception_v3": "fc",
    "mnasnet0_5": "classifier",
    "mobilenet_v2": "classifier",
    "resnet18": "fc",
    "vit_b_32": "heads",
}
SLOW = ("densenet121", "googlenet", "inception_v3", "vit_b_32")


def as_in_files(state):
    """Names as torchvision's files have them: those of DenseNets are older than its classes."""
    return {
        re.sub(r"(denselayer\d+\.(?:norm|conv))", r"\1.", name): t for name, t in state.items()
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in HEADS]
)
def test_torchvision_by_name(name, folder, tmp_path, monkeypatch):
    """At the size and in the range of its own weights."""
    offline(monkeypatch, tmp_path)
    torch.manual_seed(0)
    options = TRANSFORMED if name in ("googlenet", "inception_v3") else {}
    network = varied(torchvision.models.get_model(name, **options).eval())
    saved_torchvision(name, tmp_path, as_in_files(network.state_dict()), monkeypatch)
    setattr(network, HEADS[name], nn.Identity())
    transform = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    with torch.no_grad():
        expected = network(torch.stack([transform(image) for image in opened(folder)]))
    encoder = load(f"torchvision:{name}")
    assert_equal_features(encoder, folder, expected, tmp_path)
    (file,) = tmp_path.glob("torch/hub/checkpoints/*.pth")
    assert load(f"{encoder.details['backbone'].partition('?')[0]}@{file}").digest == encoder.digest


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT = {**TINY, "intermediate_size": 64, "image_size": 64, "patch_size": 16}
TEXT = {**TINY, "intermediate_size": 64, "vocab_size": 99}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
SWIN = {"image_size": 64, "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
SQUARE = {"size": {"height": 64, "width": 64}}
CROPPED = {"size": {"shortest_edge": 83}, "crop_size": {"height": 64, "width": 64}}
BOTH = {"vision_config": VIT, "text_config": TEXT}

FOLDERS = {
    "clip": ("CLIP", BOTH, "CLIPImageProcessorPil", CROPPED),
    "convnext v2": ("ConvNextV2", STAGES, "ConvNextImageProcessorPil", {"size": {"shortest_edge": 64}}),
    "dinov2": ("Dinov2", {**TINY, "patch_size": 14, "image_size": 98}, "BitImageProcessorPil", {**CROPPED, "crop_size": {"height": 70, "width": 70}}),
    "mae": ("ViTMAE", {**VIT, "mask_ratio": 0.75}, "ViTImageProcessorPil", SQUARE),
    "swin": ("Swin", SWIN, "ViTImageProcessorPil", SQUARE),
    "vit": ("ViT", VIT, "ViTImageProcessorPil", SQUARE),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    """No progress bars of transformers, whose end is reported as a leak."""
    transformers.utils.logging.disable_progress_bar()


def saved_folder(kind, path):
    """Save a model of transformers and its image processor."""
    name, options, processor_name, settings = FOLDERS[kind]
    torch.manual_seed(0)
    model_name = f"{name}ForImageClassification" if kind == "vit" else f"{name}Model"
    model = getattr(transformers, model_name)(getattr(transformers, f"{name}Config")(**options))
    varied(model).save_pretrained(path)
    processor = getattr(transformers, processor_name)(**settings)
    processor.save_pretrained(path)
    return model, processor


def of_transformers(kind, model, processor, folder):
    """Features by what transformers itself computes, pooled as its authors evaluate."""
    pixels = processor(images=opened(folder), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        if kind == "clip":
            return model.vision_model(pixel_values=pixels).pooler_output
        if kind == "mae":
            model.config.mask_ratio = 0.0
            order = torch.arange(16.0).expand(len(pixels), 16)
            return model(pixel_values=pixels, noise=order).last_hidden_state[:, 0]
        output = (model.vit if kind == "vit" else model)(pixel_values=pixels)
    pooled = kind in ("convnext v2", "swin")
    return output.pooler_output.flatten(1) if pooled else output.last_hidden_state[:, 0]


@pytest.mark.parametrize("kind", FOLDERS)
def test_transformers_in_a_folder(kind, folder, tmp_path):
    model, processor = saved_folder(kind, tmp_path / "model")
    expected = of_transformers(kind, model, processor, folder)
    assert_equal_features(load(tmp_path / "model"), folder, expected, tmp_path)


def test_sizes_that_patches_do_not_divide_are_refused(tmp_path):
    saved_folder("dinov2", tmp_path)
    assert load(tmp_path, image_size=84).image_size == 84
    with pytest.raises(UsageError, match=r"into the patches of 14 px .* give image_size 84 or 98"):
        load(tmp_path, image_size=85)
