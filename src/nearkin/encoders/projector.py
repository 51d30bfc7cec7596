"""The projector of a trained encoder, in a file beside it: features become the embedding."""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nearkin.encoders.encoder import AGAIN, Encoder, read_tensors, write_tensors
from nearkin.errors import UsageError
from nearkin.files import usable
from nearkin.networks.branch import Backbone, as_backbone
from nearkin.version import check_format

FORMATS: Final = ("1",)  # Those that are read; the last is written
LAYERS: Final[Mapping[str, type[nn.Module]]] = {
    "Linear": nn.Linear,
    "BatchNorm1d": nn.BatchNorm1d,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
}
"""Layers that a file can name."""


class Projected(nn.Sequential):
    """A backbone and the projector on top of it: a network from images to embeddings."""


def write_projector(path: Path, projector: nn.Module, encoder: Encoder) -> None:
    """Write the projector of an encoder as safetensors, whole or not at all.

    Nothing is written where there is none, or where it is no sequence of `LAYERS`. The file names
    the encoder by its digest.
    """
    parts = projector if isinstance(projector, nn.Sequential) else nn.Sequential()
    layers = [_description(layer) for layer in parts]
    if not layers or None in layers:
        return
    note = {"format": FORMATS[-1], "encoder": encoder.digest, "layers": layers}
    write_tensors(path, projector, "projector", note)


def embedding_encoder(encoder: Encoder, path: Path) -> Encoder:
    """Return an encoder whose features are projected by what `write_projector` has written.

    Raises:
        UsageError: If there is no such file, or it is of another encoder.
        CheckpointError: If the file is damaged.
    """
    if not path.exists():
        raise UsageError(
            f"{path.parent} has no embedding: it keeps no {path.name}; give the run of a method "
            "that trains a projector, whose encoder is no mean with its start, or leave out "
            "--features embedding"
        )
    with usable(path, AGAIN):
        note, state = read_tensors(path, "projector")
        check_format(note["format"], FORMATS)
        with torch.device("meta"):  # sizes are those of the tensors, whatever the header says
            projector = nn.Sequential(*(LAYERS[kind](**values) for kind, values in note["layers"]))
        projector.load_state_dict(state, assign=True)
    if note["encoder"] != encoder.digest:
        raise UsageError(f"{path} is of another encoder than that beside it; {AGAIN}")
    backbone = Backbone(encoder.backbone.body, encoder.num_features)
    body = Projected(OrderedDict(backbone=backbone, projector=projector))
    network = as_backbone(body, encoder.image_size, name=encoder.backbone.name)
    return Encoder(network, encoder.preprocessing, encoder.details)


def _description(layer: nn.Module) -> tuple[str, dict[str, Any]] | None:
    """Return the name of a layer and its arguments; None if a file cannot name it."""
    if isinstance(layer, nn.Linear):
        sizes = {"in_features": layer.in_features, "out_features": layer.out_features}
        return "Linear", {**sizes, "bias": layer.bias is not None}
    if isinstance(layer, _BatchNorm):  # also one over groups, which evaluates as any other
        norm = {"num_features": layer.num_features, "eps": layer.eps, "affine": layer.affine}
        return "BatchNorm1d", norm
    if isinstance(layer, nn.GELU):
        return "GELU", {"approximate": layer.approximate}
    return ("ReLU", {}) if isinstance(layer, nn.ReLU) else None
