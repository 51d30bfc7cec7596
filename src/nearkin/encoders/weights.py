"""How many bytes of weights an encoder has, before anything of it is read."""

from pathlib import Path
from typing import Final

import torch

from nearkin.encoders import pretrained
from nearkin.encoders.encoder import encoder_file, is_own
from nearkin.encoders.files import SIZE
from nearkin.networks.backbone import NATIVE, native

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth")


def weight_bytes(source: str) -> int:
    """Return the size of an encoder's weights, from its file or its architecture; 0 if unknown.

    `source` is what `nearkin.encoders.encoder.load` takes.
    """
    path = Path(source.rpartition("@")[2])
    if path.is_dir() and is_own(path):
        path = encoder_file(path)
    if path.is_file():
        return path.stat().st_size
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir() if file.suffix in WEIGHTS)
    name = pretrained.DINOV2.get(source, source)
    return _architecture_bytes(name) if NATIVE.fullmatch(name) else 0


def _architecture_bytes(name: str) -> int:
    """Return the size of an architecture's parameters, none of which are made."""
    try:
        with torch.device("meta"):
            network = native(name, SIZE)
    except Exception:  # not to be built there, or no such name, which loading says
        return 0
    return sum(parameter.nbytes for parameter in network.parameters())
