"""Methods over any network, with the heads of the papers, and what they say of wrong input."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import SIDE, SMALL, batch_for, small
from torch import nn

from nearkin.errors import UsageError
from nearkin.memory import MemoryBank, Queue
from nearkin.methods import METHODS
from nearkin.networks.branch import Backbone
from nearkin.objectives import in_batch, info_nce, nt_xent, unit

EXAMPLES = Path(__file__).parents[2] / "examples"


def network(width=24):
    layers = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers)


def test_a_method_takes_any_network_and_finds_its_width():
    for name in METHODS:
        backbone = METHODS[name](network(), **SMALL[name]).backbone
        assert isinstance(backbone, Backbone), name
        assert backbone.feature_dim == 24, name


def hidden(method):
    """Output widths of the layers of the projector but the last; UNO has one in each head."""
    heads = getattr(method, "more_classes", None)
    projector = heads[0].projector if heads else method.online.projector
    return [layer.out_features for layer in projector if isinstance(layer, nn.Linear)][:-1]


@pytest.mark.parametrize("name", [name for name in SMALL if "hidden_dim" in SMALL[name]])
def test_a_hidden_dimension_of_zero_is_that_of_the_features(name):
    method = small(name, hidden_dim=0)
    assert set(hidden(method)) == {24}
    if name in ("byol", "moco_v3"):
        assert method.predictor[0].out_features == 24
    assert method(batch_for(name, 0), 0.5).loss.isfinite()


def test_widths_of_zero_are_in_proportion_to_the_features():
    simsiam = small("simsiam", dim=0, predictor_dim=0)
    assert simsiam.predictor[0].in_features == 24
    assert simsiam.predictor[0].out_features == 6  # a quarter, as 512 of 2,048 in the paper
    assert small("nnclr", predictor_dim=0).predictor[0].out_features == 24
    assert small("simsiam", dim=2, predictor_dim=0).predictor[0].out_features == 1


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
    ("sigreg", {}, "16- norm relu 16- norm relu 8", None),
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


def test_a_loop_of_plain_torch_trains_a_method():
    train = runpy.run_path(str(EXAMPLES / "torch_loop.py"))["train"]
    losses = train(network(16), torch.randn(64, 3, SIDE, SIDE), epochs=4)
    assert len(losses) == 8
    assert all(loss == loss for loss in losses)


def rows(count, dim=4):
    return unit(torch.randn(count, dim))


def test_wrong_tensors_are_told_in_words():
    queue, bank, mask = Queue(8, 4), MemoryBank(8, 4, 0.5), torch.ones(4, 9)
    for function, tensors, words in [
        (info_nce, (rows(4), rows(3), rows(9), 0.1), r"info_nce: key has shape \(3, 4\), expec"),
        (in_batch, (rows(4), rows(4, 5), 0.1), r"key has shape \(4, 5\), expected \(batch = 4, d"),
        (nt_xent, (rows(4)[0], rows(4), 0.1), r"nt_xent: a has shape \(4,\), expected \(batch, d"),
        (nt_xent, (rows(4).long(), rows(4), 0.1), "a has dtype torch.int64, expected float"),
        (info_nce, (rows(4), rows(4), rows(9), 0.1, mask), "same has dtype torch.float32, expe"),
        (queue.enqueue, (rows(2), torch.arange(3)), r"index has shape \(3,\), expected \(batch ="),
        (queue.enqueue, (rows(2, 5), torch.arange(2)), r"\(2, 5\), the memory \(8, 4\)"),
        (bank.write, (torch.arange(2), rows(2, 3)), r"the memory \(8, 4\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            function(*tensors)


@pytest.mark.parametrize("name", ["moco", "rotnet", "ncl"])
def test_a_batch_that_does_not_fit_is_told_in_words(name):
    method, batch = small(name), batch_for(name, 0)
    for views in ((), (*batch.views, batch.views[0])):  # none, and one that no loss uses
        with pytest.raises(ValueError, match=f"views?, the batch has {len(views)}"):
            method(replace(batch, views=views), 0.5)
    object.__setattr__(batch, "index", batch.index[1:])  # past the checks that tests make
    with pytest.raises(ValueError, match="15 indices, 16 labels and views of shapes"):
        method(batch, 0.5)


def test_a_network_that_gives_no_features_is_told_in_words():
    with pytest.raises(UsageError, match="gives"):
        METHODS["simclr"](nn.Flatten(0))
