"""Projectors and predictors are those of the papers, layer by layer."""

import pytest
from small import small
from torch import nn

LARGE = dict(num_layers=3, predictor_norm=True)  # of vision transformers
HEADS = [
    ("moco", dict(projector="linear"), "8", None),  # version 1
    ("moco", dict(hidden_dim=0), "24 relu 8", None),  # version 2, as wide as the features
    ("moco_v3", {}, "16- norm relu 8- bare", "16- norm relu 8"),
    ("moco_v3", LARGE, "16- norm relu 16- norm relu 8- bare", "16- norm relu 8- bare"),
    ("nnclr", {}, "16- norm relu 16- norm relu 8- bare", "16- norm relu 8"),
    ("nnclr", dict(num_layers=2, affine=True), "16- norm relu 8- norm", None),  # lightly's
    ("byol", {}, "16- norm relu 8", "16- norm relu 8"),
    ("simsiam", dict(num_layers=2), "8- norm relu 8- bare", "6- norm relu 8"),
    ("simsiam", dict(num_layers=3), "8- norm relu 8- norm relu 8- bare", None),
    ("dino", {}, "16 gelu 16 gelu 8", None),
    ("simgcd", {}, "16 gelu 16 gelu 8", None),
    ("barlow_twins", {}, "16- norm relu 16- norm relu 16", None),
    ("vicreg", {}, "16- norm relu 16- norm relu 16", None),
    ("feature_matching", dict(num_layers=1), "10", None),  # as wide as the teacher's features
    ("feature_matching", dict(num_layers=4), "16- norm relu " * 3 + "10", None),
]


def described(network):
    """Widths, with `-` where there is no bias; `bare` is a norm without scale and shift."""

    def word(layer):
        match layer:
            case nn.Linear():
                return f"{layer.out_features}" + "-" * (layer.bias is None)
            case nn.BatchNorm1d():
                return "norm" if layer.affine else "bare"
        return type(layer).__name__.lower()

    return " ".join(map(word, network))


@pytest.mark.parametrize(("name", "options", "projector", "predictor"), HEADS)
def test_heads_are_those_of_the_paper(name, options, projector, predictor):
    method = small(name, **options)
    assert described(method.online.projector) == projector
    assert predictor is None or described(method.predictor) == predictor
