"""Methods over any network, and what they say of input that does not fit."""

import importlib.util
from pathlib import Path

import pytest
import torch
from small import SIDE, SMALL, batch_for, small
from torch import nn

from nearkin.methods import METHODS
from nearkin.networks.backbone import Backbone

EXAMPLES = Path(__file__).parents[2] / "examples"

every_method = pytest.mark.parametrize("name", METHODS)


def network(width=24):
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    )


@every_method
def test_a_method_takes_any_network_and_finds_its_width(name):
    method = METHODS[name](network(), **SMALL[name])
    assert isinstance(method.backbone, Backbone)
    assert method.backbone.feature_dim == 24
    step = method.train()(batch_for(name, 0), 0.5)
    step.loss.backward()
    method.commit(step.memo, 0.5)
    assert step.loss.isfinite()


def hidden(method):
    """Output widths of the layers of the projector but the last."""
    layers = [x for x in method.online.projector if isinstance(x, nn.Linear)]
    return [layer.out_features for layer in layers[:-1]]


@pytest.mark.parametrize(
    "name", [name for name, options in SMALL.items() if "hidden_dim" in options]
)
def test_a_hidden_dimension_of_zero_is_that_of_the_features(name):
    method = small(name, hidden_dim=0)
    assert hidden(method)
    assert set(hidden(method)) == {24}
    if name in ("byol", "moco_v3"):
        assert method.predictor[0].out_features == 24
    assert method(batch_for(name, 0), 0.5).loss.isfinite()


def test_a_loop_of_plain_torch_trains_a_method():
    spec = importlib.util.spec_from_file_location("torch_loop", EXAMPLES / "torch_loop.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    losses = example.train(network(16), torch.randn(64, 3, SIDE, SIDE), epochs=4)
    assert len(losses) == 8
    assert all(loss == loss for loss in losses)
