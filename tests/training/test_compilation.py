"""A compiled method trains as the same method uncompiled does, but for rounding."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import pixels
from small import SIDE, small
from torch import nn

from nearkin.config import TrainConfig
from nearkin.data.opening import open_images
from nearkin.data.split import Split
from nearkin.networks.branch import (
    Backbone,
    Branch,
    compile_branches,
    should_compile,
)
from nearkin.training.health import Monitor

TRAINED = """
import itertools
import torch
from small import batch_for, run, small
from nearkin.networks.branch import compile_branches
torch.set_num_threads(1)
names, ways = ["moco"], [("cpu", False)]
if torch.cuda.is_available():
    names, ways = ["moco", "byol", "swav", "dino"], [("cuda", False), ("cuda", True)]
for name, (device, graphs) in itertools.product(names, ways):
    plain, compiled = small(name).to(device), small(name).to(device)
    compile_branches(compiled, graphs=graphs)
    batches = lambda name, step: batch_for(name, step).to(device)
    expected, _ = run(plain, name, batches=batches)
    result, _ = run(compiled, name, batches=batches)
    assert compiled.online.backbone._compiled_call_impl is not None
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[key], value, rtol=1e-3, atol=1e-4)
"""


@pytest.mark.slow
@pytest.mark.needs("compiler")
def test_compiled_methods_train_as_others_do():
    """In a process of its own, without the type checks of tests, which would be compiled too."""
    command, here = [sys.executable, "-c", TRAINED], Path(__file__).parents[1]
    process = subprocess.run(command, cwd=here, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_evaluation_during_training_compiles_nothing():
    """It has images of other numbers, and batch norms in another mode: each would be a graph."""
    images = open_images(pixels(24, SIDE))
    split = Split(images, np.arange(12), np.arange(12, 24))
    monitor = Monitor(split, TrainConfig(image_size=SIDE, workers=0), torch.device("cpu"))
    method, graphs = small("simclr"), []

    def compiler(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    method.backbone.body.compile(backend=compiler)  # the rest has the type checks of tests
    assert monitor.evaluate(method).keys() >= {"effective_rank"}
    assert not graphs
    method.backbone(torch.zeros(2, 3, SIDE, SIDE))
    assert len(graphs) == 1  # a training step compiles


def test_what_compiling_pays_for(monkeypatch):
    """On one H100, a step of SimCLR took 20.6 ms with Muon at 32 px, and compiled 28.0 ms."""
    monkeypatch.setattr("nearkin.networks.branch.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    cases = [
        ("cuda", 10**9, "muon", 224, True),
        ("cuda", 10**9, "muon", 32, False),
        ("cuda", 10**9, "sgd", 32, True),
        ("cuda", 100, "sgd", 224, False),
        ("cpu", 10**9, "sgd", 224, False),
    ]
    for device, steps, optimizer, side, pays in cases:
        given = should_compile(torch.device(device), steps, optimizer=optimizer, side=side)
        assert given == pays, (device, steps, optimizer, side)


def test_what_graphs_give_is_copied_before_they_run_again():
    """DINO's target runs before the online network, and a graph has one place for its results."""
    place = torch.zeros(2, 5)

    class Graph(nn.Module):
        def forward(self, images):
            return place.copy_(images.flatten(1)[:, :5])

    branch = Branch(Backbone(Graph(), 5))
    branch.copies = True
    first, second = (branch(torch.full((2, 3, 4, 4), x)) for x in (1.0, 2.0))
    assert first.unique() == 1
    assert second.unique() == 2
    for graphs in (True, False):
        method = small("dino")
        compile_branches(method, graphs=graphs)
        assert method.target.copies == method.online.copies == graphs
