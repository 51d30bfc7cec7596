# ruff: noqa: E402  (the folders of the libraries are set before those are imported)
"""Features of other libraries' encoders beside those libraries' own: the largest difference.

    python benchmarks/encoders.py [PATTERN]

Every encoder has its real size and seeded random weights, is saved in the format in which it is
published, and loaded as any other. Compared is the whole way from files of photographs to
features: the library's transform and forward, and nearkin's. Prints a table in Markdown; PATTERN
leaves only rows that contain it. About five minutes on two cores, 1 GB of disk at a time.
"""

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
FOLDER = Path(tempfile.mkdtemp())
os.environ["HF_HOME"] = str(FOLDER / "hf")
os.environ["TORCH_HOME"] = str(FOLDER / "torch")
warnings.filterwarnings("ignore")

import numpy as np
import timm
import torch
import torchvision
import transformers
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn

from nearkin.data.opening import open_images
from nearkin.encoders.encoder import load
from nearkin.evaluation.embeddings import encode_images

TIMM = {
    "DINOv2": "vit_small_patch14_dinov2.lvd142m",
    "DINOv2 with registers": "vit_small_patch14_reg4_dinov2.lvd142m",
    "DINOv3": "vit_small_patch16_dinov3.lvd1689m",
    "DINO": "vit_small_patch16_224.dino",
    "MAE": "vit_base_patch16_224.mae",
    "CLIP": "vit_base_patch32_clip_224.openai",
    "SigLIP 2": "vit_base_patch16_siglip_224.v2_webli",
    "EVA-02": "eva02_small_patch14_224.mim_in22k",
    "ConvNeXt": "convnext_tiny.fb_in22k",
    "ConvNeXt V2": "convnextv2_tiny.fcmae_ft_in22k_in1k",
    "ResNet": "resnet50.a1_in1k",
    "Swin": "swin_tiny_patch4_window7_224.ms_in1k",
    "EfficientNet": "efficientnet_b0.ra_in1k",
    "MobileNet": "mobilenetv3_large_100.ra_in1k",
}
TORCHVISION = {"ResNet": ("resnet50", "fc"), "ViT": ("vit_b_16", "heads")}
BIT, VIT, CONVNEXT = "BitImageProcessorPil", "ViTImageProcessorPil", "ConvNextImageProcessorPil"
CROPPED = {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}
SMALL = {"hidden_size": 384, "num_attention_heads": 6, "image_size": 518, "patch_size": 14}
TRANSFORMERS = {
    "DINOv2": ("Dinov2", SMALL, BIT, CROPPED),
    "DINOv2 with registers": ("Dinov2WithRegisters", SMALL, BIT, CROPPED),
    "ViT": ("ViT", {}, VIT, {}),
    "MAE": ("ViTMAE", {}, VIT, {}),
    "BEiT": ("Beit", {}, "BeitImageProcessorPil", {**CROPPED, "do_center_crop": False,
                                                   "size": {"height": 224, "width": 224}}),
    "CLIP": ("CLIPVision", {}, "CLIPImageProcessorPil", {}),
    "SigLIP": ("SiglipVision", {}, "SiglipImageProcessorPil", {}),
    "ConvNeXt V2": ("ConvNextV2", {}, CONVNEXT, {"size": {"shortest_edge": 224}}),
    "ResNet": ("ResNet", {}, CONVNEXT, {"size": {"shortest_edge": 224}}),
    "Swin": ("Swin", {}, VIT, {}),
}  # fmt: skip
POOLED = ("Beit", "CLIPVision", "SiglipVision", "ConvNextV2", "ResNet", "Swin")


def photographs() -> Path:
    """Write photographs of several proportions, as JPEG and PNG."""
    folder = FOLDER / "photographs"
    folder.mkdir()
    china, flower = (Image.fromarray(pixels) for pixels in load_sample_images().images)
    china.save(folder / "0.jpg", quality=92)
    flower.crop((111, 33, 512, 366)).save(folder / "1.png")
    china.crop((0, 0, 301, 426)).save(folder / "2.jpg", quality=80)
    flower.resize((1201, 803)).save(folder / "3.jpg", quality=92)
    return folder


def varied(network: nn.Module) -> Any:
    """Give norms, statistics and tokens values of their own, as training does."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in network.named_parameters():
        if tensor.ndim < 2 or "token" in name or "pos" in name:
            tensor.data.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.train().momentum = None
    if norms:
        with torch.no_grad():
            network(torch.randn(8, 3, 224, 224, generator=generator))
    return network.eval()


def forward(network: Any, pixels: Tensor) -> Tensor:
    """Return features, computed with channels last, as nearkin computes them."""
    if isinstance(network, nn.Module):
        network.eval().to(memory_format=torch.channels_last)
    with torch.no_grad():
        features: Tensor = network(pixels)
    return features


def timm_rows(images: list[Image.Image]) -> Iterator[tuple[str, str, str, Callable[[], Tensor]]]:
    """Yield encoders of timm, as its own repositories on the hub have them."""
    for what, name in TIMM.items():

        def expected(name: str = name) -> Tensor:
            torch.manual_seed(0)
            identity = timm.get_pretrained_cfg(name).hf_hub_id.replace("/", "--")
            repository = FOLDER / "hf" / "hub" / f"models--{identity}"
            snapshot = repository / "snapshots" / "0123abc"
            snapshot.mkdir(parents=True)
            (repository / "refs").mkdir()
            (repository / "refs" / "main").write_text("0123abc")
            saved = varied(timm.create_model(name))
            save_file(saved.state_dict(), snapshot / "model.safetensors")
            network = timm.create_model(name, pretrained=True, num_classes=0)
            transform = create_transform(**resolve_model_data_config(network), is_training=False)
            return forward(network, torch.stack([transform(image) for image in images]))

        yield what, f"timm, hub: {name}", f"timm:{name}", expected


def torchvision_rows(
    images: list[Image.Image],
) -> Iterator[tuple[str, str, str, Callable[[], Tensor]]]:
    """Yield encoders of torchvision, in torch's cache."""
    for what, (name, head) in TORCHVISION.items():

        def expected(name: str = name, head: str = head) -> Tensor:
            torch.manual_seed(0)
            weights = torchvision.models.get_model_weights(name).DEFAULT
            network = varied(torchvision.models.get_model(name))
            kept = FOLDER / "torch" / "hub" / "checkpoints"
            kept.mkdir(parents=True, exist_ok=True)
            torch.save(network.state_dict(), kept / weights.url.rpartition("/")[2])
            setattr(network, head, nn.Identity())
            pixels = torch.stack([weights.transforms()(image) for image in images])
            return forward(network, pixels)

        yield what, f"torchvision: {name}", f"torchvision:{name}", expected


def transformers_rows(
    images: list[Image.Image],
) -> Iterator[tuple[str, str, str, Callable[[], Tensor]]]:
    """Yield encoders of transformers, each in a folder."""
    for what, (name, options, processor_name, settings) in TRANSFORMERS.items():
        path = FOLDER / f"transformers-{name}"

        def expected(name: str = name, path: Path = path, row: Any = (options, processor_name, settings)) -> Tensor:  # fmt: skip  # noqa: E501
            torch.manual_seed(0)
            config = getattr(transformers, f"{name}Config")(**row[0])
            model = varied(getattr(transformers, f"{name}Model")(config))
            model.save_pretrained(path)
            processor = getattr(transformers, row[1])(**row[2])
            processor.save_pretrained(path)
            pixels = processor(images=images, return_tensors="pt")["pixel_values"]
            return forward(lambda x: pooled(name, model, x), pixels)

        yield what, f"transformers: {name}Model", str(path), expected


def pooled(name: str, model: Any, pixels: Tensor) -> Tensor:
    """Return features of a model of transformers, as its authors evaluate it."""
    if name == "ViTMAE":
        model.config.mask_ratio = 0.0
        count = (pixels.shape[-1] // model.config.patch_size) ** 2
        order = torch.arange(float(count)).expand(len(pixels), count)
        masked: Tensor = model(pixel_values=pixels, noise=order).last_hidden_state[:, 0]
        return masked
    output = model(pixel_values=pixels)
    whole = output.pooler_output.flatten(1) if name in POOLED else output.last_hidden_state[:, 0]
    features: Tensor = whole
    return features


def checkpoint_rows(
    images: list[Image.Image],
) -> Iterator[tuple[str, str, str, Callable[[], Tensor]]]:
    """Yield checkpoints of MoCo v2 and DINO, by their official names."""
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def pixels(interpolation: str) -> Tensor:
        transform = create_transform(
            (3, 224, 224), crop_pct=0.875, interpolation=interpolation, mean=mean, std=std
        )
        return torch.stack([transform(image) for image in images])

    def moco() -> Tensor:
        torch.manual_seed(0)
        network = varied(torchvision.models.resnet50())
        state = {f"module.encoder_q.{name}": t for name, t in network.state_dict().items()}
        state["module.queue"] = torch.zeros(128, 65536)
        torch.save({"arch": "resnet50", "state_dict": state}, FOLDER / "moco_v2.pth.tar")
        network.fc = nn.Identity()
        return forward(network, pixels("bilinear"))

    def dino() -> Tensor:
        torch.manual_seed(0)
        network = varied(timm.create_model("vit_small_patch16_224", num_classes=0))
        teacher = {f"backbone.{name}": t for name, t in network.state_dict().items()}
        student = {f"module.{name}": t + 1 for name, t in teacher.items()}
        torch.save({"student": student, "teacher": teacher}, FOLDER / "dino.pth")
        return forward(network, pixels("bicubic"))

    yield "MoCo v2", "checkpoint, official names", str(FOLDER / "moco_v2.pth.tar"), moco
    source = f"vit_small_patch16_224@{FOLDER / 'dino.pth'}"
    yield "DINO", "checkpoint, official names", source, dino


def main() -> None:
    """Print the table."""
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = photographs()
    images = [Image.open(file).convert("RGB") for file in sorted(folder.iterdir())]
    data = open_images(folder, cache=False)
    print("| encoder | source | image size | largest relative difference |")
    print("|---|---|---|---|")
    for rows in (timm_rows, torchvision_rows, transformers_rows, checkpoint_rows):
        for what, source_format, source, expected in rows(images):
            if pattern not in f"{what} {source_format}":
                continue
            reference = expected()
            encoder = load(source)
            actual = encode_images(encoder, data, device=torch.device("cpu"), workers=0).tensor
            difference = float((actual - reference).abs().max() / reference.abs().max())
            size = encoder.image_size
            print(f"| {what} | {source_format} | {size} | {difference:.1e} |", flush=True)
            assert np.isfinite(difference)
            remove_weights()


def remove_weights() -> None:
    """Make room for the next encoder."""
    for file in FOLDER.rglob("*"):
        if file.is_file() and file.stat().st_size > 1_000_000 and "photographs" not in file.parts:
            file.unlink()


if __name__ == "__main__":
    main()
