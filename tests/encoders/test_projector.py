"""The projector in a file beside the encoder, of every method."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small import SIDE, batch_at, run, small
from torch import nn

from nearkin.encoders.encoder import CUSTOM, Encoder
from nearkin.encoders.projector import embedding_encoder, write_projector
from nearkin.errors import CheckpointError, UsageError
from nearkin.methods import METHODS
from nearkin.networks.batch_norm import normalize_in_groups

WITHOUT = {"ncl", "rotnet", "supervised", "uno"}
"""Methods that train the features themselves; UNO has a projector per head."""


def encoder_of(method):
    return Encoder(method.backbone, SIDE, {"backbone": CUSTOM})


@pytest.mark.parametrize("name", METHODS)
def test_the_embedding_of_every_method_is_kept(name, tmp_path):
    method, path = small(name), tmp_path / "projector.safetensors"
    if name == "simsiam":
        normalize_in_groups(method, 2)  # batch norms over groups are kept as plain ones
    run(method, name, until=3)
    write_projector(path, method.online.projector, encoder_of(method))
    assert path.exists() == (name not in WITHOUT)
    if name in WITHOUT:
        with pytest.raises(UsageError, match=r"has no embedding: it keeps no projector\.safe"):
            embedding_encoder(encoder_of(method), path)
        return
    images = batch_at(9).views[0]
    with torch.no_grad():
        expected = method.eval().online(images)
        embedding = embedding_encoder(encoder_of(method), path)(images)
    assert embedding.shape == expected.shape != method.backbone(images).shape
    assert torch.equal(embedding, expected)


def test_a_file_that_is_not_what_it_says_is_refused(tmp_path):
    method, path = small("simclr"), tmp_path / "projector.safetensors"
    for other in (nn.Sequential(nn.Linear(24, 8), nn.Softplus()), nn.Linear(24, 8)):
        write_projector(path, other, encoder_of(method))
        assert not path.exists()  # it could not name these layers
    write_projector(path, method.online.projector, encoder_of(method))
    with safe_open(path, framework="pt") as file:
        note = json.loads(file.metadata()["projector"])
    too_large = ["Linear", {"in_features": 10**6, "out_features": 10**9, "bias": True}]
    for change in (
        {"layers": [["Transformer", {}]]},  # a layer of code
        {"layers": [too_large]},
        {"layers": [["ReLU", {"size": 3}]]},  # an argument that there is not
        {"format": "9"},  # a later one
        {"layers": None},
    ):
        save_file(load_file(path), path, metadata={"projector": json.dumps(note | change)})
        with pytest.raises(CheckpointError, match=r"projector\.safetensors cannot be used"):
            embedding_encoder(encoder_of(method), path)
    write_projector(path, method.online.projector, encoder_of(method))
    with torch.no_grad():
        next(method.backbone.parameters()).mul_(2)
    with pytest.raises(UsageError, match="is of another encoder than that beside it"):
        embedding_encoder(encoder_of(method), path)
