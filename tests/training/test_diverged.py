"""Numbers that are not finite stop a training before they reach anything that lasts."""

import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import pixels
from small import batch_for, small
from torch import nn

from nearkin.commands.doctor import doctor
from nearkin.commands.train import train
from nearkin.config import TrainConfig
from nearkin.data.opening import open_images
from nearkin.errors import DivergedError, UsageError
from nearkin.methods import METHODS
from nearkin.run.auto import resolve
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logger, Silent
from nearkin.training.checkpoint import latest
from nearkin.training.fit import Lead, fit
from nearkin.training.health import feature_health
from nearkin.training.loop import steps
from nearkin.training.optimizer import build_optimizer, warmup_cosine
from nearkin.training.session import build

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""What the forward pass of a batch norm moves, diverged or not."""


def take(method, batch, step):
    optimizer = build_optimizer(method, name="sgd", lr=0.1, weight_decay=0.0)
    how = dict(start=step, total=40, schedule=warmup_cosine(), seed=0)
    return next(steps(method, optimizer, [batch], **how))


def state_of(method):
    state = method.state_dict()
    return {name: value.clone() for name, value in state.items() if not name.endswith(STATISTICS)}


def same(a, b):
    """To the bit, NaN included."""
    return all(torch.equal(a[name].nan_to_num(7.5), b[name].nan_to_num(7.5)) for name in a)


def remembered(method):
    """What a method remembers in floats: queues, banks, centers, momentum encoders."""
    buffers = [b for name, b in method.named_buffers() if not name.endswith(STATISTICS)]
    targets = [p for p in method.parameters() if not p.requires_grad]
    return [tensor for tensor in (*buffers, *targets) if tensor.is_floating_point()]


def a_pixel(method, batch, value):
    batch.views[0][0, 0, 0, 0] = value


def a_weight(method, batch, value):
    method.online.backbone.body[1].weight.data[0, 0] = value


def a_gradient(method, batch, value):
    weight = method.online.backbone.body[1].weight
    weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([2]), value))


def an_output(method, batch, value):
    layer = method.online.backbone.body[1]
    layer.register_forward_hook(lambda _, __, out: out.index_fill(0, torch.tensor([1]), value))


PLACES = {
    "a pixel is NaN": (a_pixel, math.nan),
    "a pixel is infinite": (a_pixel, math.inf),
    "a weight is NaN": (a_weight, math.nan),
    "a weight is infinite": (a_weight, math.inf),
    "a gradient is NaN": (a_gradient, math.nan),
    "a gradient is infinite": (a_gradient, math.inf),
    "a gradient is minus infinite": (a_gradient, -math.inf),
    "an output is NaN": (an_output, math.nan),
    "an output is minus infinite": (an_output, -math.inf),
}
LOSS_OR_GRADIENT = ("a pixel is NaN", "a gradient is NaN")
"""The loss is not finite, or a gradient alone; what makes it so, no method knows."""
CASES = [(name, place) for name in ("simclr", "ncl", "swav") for place in LOSS_OR_GRADIENT]
CASES += [("moco", place) for place in PLACES if place not in LOSS_OR_GRADIENT]


@pytest.mark.parametrize(("name", "place"), CASES)
def test_what_is_not_finite_leaves_weights_and_memories_as_they_were(name, place):
    method, batch = small(name), batch_for(name, 20)
    take(method, batch_for(name, 19), 19)
    spoil, value = PLACES[place]
    spoil(method, batch, value)
    before = state_of(method)
    with pytest.raises(DivergedError, match="at step 20; nothing was written"):
        take(method, batch, 20)
    assert same(state_of(method), before)


WITHOUT_MEMORY = {
    "simclr", "simsiam", "vicreg", "barlow_twins", "sigreg", "rotnet", "supervised",
    "moco_end_to_end", "instdisc_parametric", "feature_matching", "simgcd",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in METHODS if name not in WITHOUT_MEMORY])
def test_a_memory_that_is_not_finite_leaves_everything_as_it_was(name):
    method = small(name)
    take(method, batch_for(name, 19), 19)
    assert remembered(method)
    for tensor in remembered(method):
        original = tensor.clone()
        tensor.fill_(math.nan)
        before = state_of(method)
        try:
            take(method, batch_for(name, 20), 20)
        except DivergedError:
            assert same(state_of(method), before)
        else:  # this step did not read it, so nothing else may have caught it
            state = state_of(method)
            assert all(v.isfinite().all() for k, v in state.items() if before[k].isfinite().all())
        tensor.copy_(original)


def test_the_first_parameter_with_such_a_gradient_is_named():
    method, batch = small("simclr"), batch_for("simclr", 0)
    a_gradient(method, batch, math.nan)
    with pytest.raises(DivergedError, match=r"gradient of online\.backbone\.body\.1\.weight is"):
        take(method, batch, 0)


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    """A run that a learning rate beyond reason has made diverge."""
    folder = tmp_path_factory.mktemp("diverged")
    np.savez(folder / "data.npz", x=pixels(64))
    config = TrainConfig(
        method="barlow_twins", backbone="tiny", epochs=30, batch_size=16, optimizer="sgd",
        lr=1e9, warmup=0.5, save_every=1, precision="fp32", evaluate_every=0,
    )  # fmt: skip
    with pytest.raises(DivergedError) as error:
        train(folder / "data.npz", config, output=folder / "run")
    return folder / "run", str(error.value)


def test_a_run_that_diverges_keeps_what_came_before_and_the_state_it_diverged_from(diverged):
    run, message = diverged
    assert f"`nearkin.doctor({str(run)!r})` shows where it began" in message
    good, captured = (latest(run / folder) for folder in ("checkpoints", "diverged"))
    assert good is not None
    assert captured.name >= good.name


def test_what_an_evaluation_finds_in_a_stage_is_kept_and_no_command_that_is_refused_advised(
    tmp_path,
):
    images = open_images(pixels(16))
    config = TrainConfig(
        method="barlow_twins", backbone="tiny", image_size=16, epochs=2, batch_size=16, lr=1e9,
        optimizer="sgd", warmup=0.0, precision="fp32", evaluate_every=1,
    )  # fmt: skip
    config = resolve(config, images, torch.device("cpu"))
    method, batches = build(config, images, torch.device("cpu"))
    folder = RunFolder(tmp_path)  # without settings, as those of stages are
    with (
        Logger(Silent(), folder.log) as log,
        pytest.raises(DivergedError, match=r"finite; try a lower learning rate$"),
    ):
        fit(config, method, [batches], Lead(folder, log, feature_health(batches)))
    assert latest(folder.diverged).name == "ckpt-00000001.pt"


def test_a_replay_repeats_the_step_and_names_the_layer(diverged):
    run, message = diverged
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    lines = doctor(run).lines()
    assert lines[0].partition("once more")[2].strip() in message
    assert lines[0].startswith("step ")
    assert "pixels from" in lines[-1]
    assert lines == doctor(run).lines()
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_replay_warns_of_a_method_of_ones_own_that_has_changed(diverged, tmp_path):
    run = RunFolder(shutil.copytree(diverged[0], tmp_path / "run"))
    own = tmp_path / "own.py"
    own.write_text(
        "from nearkin.methods.barlow_twins import BarlowTwins\n\nclass Own(BarlowTwins):\n    pass\n"
    )
    config, data = run.settings()
    run.write_settings(replace(config, method=f"{own}:Own"), data)
    stored = json.loads((run.path / "data.json").read_text())
    stored["sources"] = {"method": {"file": str(own), "sha256": "0" * 64}}
    (run.path / "data.json").write_text(json.dumps(stored))
    with pytest.raises(UsageError, match=r"config\.toml names code to run: method is"):
        doctor(run.path)
    warning, *lines = doctor(run.path, trust_remote_code=True).lines()
    assert " ".join(warning.split()).startswith(
        f"warning the source of the method, {own}, has changed since"
    )
    assert lines == doctor(diverged[0]).lines()


def test_a_replay_asks_for_a_run_that_diverged(trained_run):
    with pytest.raises(UsageError, match="has not diverged, so there is nothing to look into"):
        doctor(trained_run)


class Watched(nn.Module):
    """A network that notes the sides of the images it has seen."""

    sides: list[int] = []  # noqa: RUF012  (of all copies)

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, 8)

    def forward(self, x):
        self.sides.append(x.shape[-1])
        return self.last(self.first(x).relu().mean((2, 3)))


def test_a_replay_has_views_of_the_size_that_training_had(tmp_path):
    np.savez(tmp_path / "data.npz", x=pixels(16))
    config = TrainConfig(
        method="barlow_twins", image_size=16, view_sizes=(12,), epochs=30, batch_size=4, val=0.0,
        optimizer="sgd", lr=1e9, precision="fp32", evaluate_every=0, options={"dim": 16},
    )  # fmt: skip
    with pytest.raises(DivergedError):
        train(tmp_path / "data.npz", config, output=tmp_path / "run", backbone=Watched())
    Watched.sides.clear()
    found = doctor(tmp_path / "run", backbone=Watched()).to_dict()
    assert Watched.sides[-1] == 12
    assert re.fullmatch(r"4 images, pixels from .*: '\d\d'(, '\d\d'){3}", found["batch"])
