"""Weights in the native formats of other libraries, seeded and random, and photographs."""

import numpy as np
import pytest
import timm
import torch
from builders import soft
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from nearkin.encoders.encoder import load
from nearkin.errors import UsageError

SHAPES = [(211, 167), (320, 214), (150, 401)]
"""Of photographs: odd proportions, one side odd, one of them narrow."""


def photographs(folder):
    """JPEG and PNG files that look like photographs to a filter: soft, with some noise."""
    folder.mkdir()
    rng = np.random.default_rng(7)
    for number, (width, height) in enumerate(SHAPES):
        pixels = np.asarray(soft(number, (width, height)))
        noise = rng.integers(-20, 21, pixels.shape)
        picture = Image.fromarray((pixels.astype(int) + noise).clip(0, 255).astype(np.uint8))
        name = f"{number}.{'png' if number == 1 else 'jpg'}"
        picture.save(folder / name, **({} if number == 1 else {"quality": 92}))
    return folder


def varied(network: nn.Module, image_size: int = 96) -> nn.Module:
    """Give norms, statistics and tokens values of their own: at their start they hide mistakes.

    Statistics of batch norms are those of noise, so that images do not fade on their way.
    """
    generator = torch.Generator().manual_seed(1)
    for name, tensor in network.named_parameters():
        if tensor.ndim < 2 or "token" in name or "pos" in name:
            tensor.data.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    if norms:
        images = torch.randn(8, 3, image_size, image_size, generator=generator)
        for norm in norms:
            norm.train().momentum = None
        with torch.no_grad():
            network(images)
    return network.eval()


def saved_by_transformers(folder, kind, options, size, **saving):
    """Save a model of transformers, with random weights, and a processor of square images."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # whose end is reported as a leak
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**options)
    model = varied(getattr(transformers, f"{kind}Model")(config))
    model.save_pretrained(folder, **saving)
    square = {"height": size, "width": size}
    transformers.BitImageProcessorPil(size=square, crop_size=square).save_pretrained(folder)
    return model


def offline(monkeypatch, folder):
    """Let Hugging Face's cache and torch's be in a folder, with no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TORCH_HOME", str(folder / "torch"))


def cache_of_hub(folder, name):
    """Put random weights of timm where Hugging Face's cache has them after a download."""
    torch.manual_seed(0)
    network = varied(timm.create_model(name))
    config = timm.get_pretrained_cfg(name)
    repository = folder / "hub" / f"models--{config.hf_hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    save_file(network.state_dict(), snapshot / "model.safetensors")
    return snapshot


def prefixed(state, prefix):
    """A state dictionary under a prefix."""
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def shifted(state):
    """The same names with other weights."""
    return {name: t + 1 if t.is_floating_point() else t for name, t in state.items()}


def refusal(source, kind=UsageError, **options):
    """The one short line by which an encoder is refused."""
    with pytest.raises(kind) as raised:
        load(source, **options)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 700
    return str(raised.value)
