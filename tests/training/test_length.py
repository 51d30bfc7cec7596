"""How long an epoch takes is estimated while loader workers are as busy as they will be."""

import copy
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import pixels
from nearkin_command import run
from small import same, save

from nearkin.config import TrainConfig
from nearkin.data.opening import open_images
from nearkin.data.split import Split
from nearkin.methods import METHODS
from nearkin.networks.backbone import build_backbone
from nearkin.run.auto import resolve
from nearkin.run.reporter import Logger, Silent
from nearkin.training import checkpoint
from nearkin.training.health import Monitor
from nearkin.training.length import (
    Overhead,
    seconds_per_step,
    time_epoch,
    time_filling,
    time_is_short,
    time_overhead,
    undone,
    with_epochs,
)
from nearkin.training.optimizer import build_optimizer
from nearkin.training.session import build

CPU = torch.device("cpu")
PIXELS = pixels(64)


def planned(data, **settings):
    """A resolved configuration whose length is to be measured, its method and its batches."""
    images = open_images(data)
    settings = {"backbone": "tiny", "image_size": 16, "batch_size": 8, **settings}
    config = resolve(TrainConfig(max_time="1m", **settings), images, CPU)
    return config, *build(config, images, CPU)


class CountedFeed:
    """Batches that count how many were requested, and how many were taken."""

    def __init__(self, feed):
        self.feed, self.sampler = feed, feed.sampler
        self.requested = self.taken = 0

    def load(self, start, stop):
        self.requested = stop - start
        with suppress(GeneratorExit):
            for batch in self.feed.load(start, stop):
                self.taken += 1
                yield batch


def counted(**settings):
    """How many batches were requested to measure an epoch, and how many were taken."""
    config, method, batches = planned(PIXELS, **settings)
    feed = CountedFeed(batches)
    time_epoch(config, method, [feed])
    return feed.requested, feed.taken


@pytest.mark.parametrize("workers", [2, 5])
def test_workers_still_read_at_the_last_step_that_is_timed(workers):
    requested, taken = counted(workers=workers, cache="off")
    assert requested - taken >= 2 * workers  # that PyTorch reads ahead
    assert taken >= workers + max(workers, 6)  # those that were read before the first step


def test_what_is_read_once_is_not_read_ahead():
    for settings in ({"workers": 0}, {"workers": 5, "cache": "ram"}):
        assert counted(**settings) == (8, 8), settings


def test_a_cache_has_what_is_timed_and_filling_it_counts_once(photographs):
    """Later epochs, of which the time is to be filled, have nothing to decode either."""
    config, method, batches = planned(photographs, workers=1, cache="ram")
    rows, undecoded = np.arange(len(batches.images)), list[int]()
    look = lambda *_: undecoded.append(len(batches.dataset.cache.undecoded(rows)))
    handle = method.backbone.register_forward_hook(look)
    with_epochs(config, method, [batches])
    handle.remove()
    assert undecoded
    assert not any(undecoded)
    assert time_filling(config, batches) > 0
    assert time_filling(replace(config, cache="off"), batches) == 0


def test_the_steps_that_are_timed_are_undone_and_taken_without_a_second_network():
    config, method, batches = planned(PIXELS)
    before, seen = copy.deepcopy(method.state_dict()), set()
    layouts = {name: weight.stride() for name, weight in method.named_parameters()}
    handle = method.backbone.register_forward_hook(lambda network, *_: seen.add(id(network)))
    time_epoch(config, method, [batches, batches])
    handle.remove()
    assert seen == {id(method.backbone)}
    assert same(method.state_dict(), before)
    assert {name: weight.stride() for name, weight in method.named_parameters()} == layouts
    assert all(weight.grad is None for weight in method.parameters())


def test_networks_that_ask_for_the_version_of_their_weights_are_given_them_back(tmp_path):
    method = METHODS["simclr"](build_backbone("mnasnet0_5", 32))
    optimizer = build_optimizer(method, name="sgd", lr=0.1, weight_decay=0.0)
    before = copy.deepcopy(method.state_dict())
    with undone(method):
        method.backbone.body.layers[0].weight.data.zero_()
    assert same(method.state_dict(), before)
    save(tmp_path, 3, method, optimizer)
    assert checkpoint.load(tmp_path, method, optimizer).step == 3


def test_steps_that_wait_for_all_workers_at_once_count_in_full():
    waiting = [4.0, 0.0, 0.0, 0.0]
    assert seconds_per_step(2 * waiting, group=4) == 1.0
    assert seconds_per_step([1.0, 1.0, 9.0, 1.0, 1.0, 1.0], group=1) == 1.0  # one that was late


@pytest.mark.parametrize("labeled", [True, False])
def test_the_end_has_time_for_the_linear_probe_of_every_encoder(labeled, tmp_path, monkeypatch):
    """Of many classes it takes longer than all features, and without labels there is none."""
    ticks = count(step=1e3)  # Each pass over the images takes a thousand seconds
    clock = SimpleNamespace(perf_counter=partial(next, ticks))
    monkeypatch.setattr("nearkin.metrics.probe.time", clock)
    data = (PIXELS, np.arange(64) % 4) if labeled else PIXELS
    config, method, _ = planned(data)
    split = Split(open_images(data), np.arange(48), np.arange(48, 64))
    monitor = Monitor(split, config, CPU)
    with Logger(Silent(), tmp_path / "train.log") as log:
        ends = [
            time_overhead(log, monitor, method, each, split).end
            for each in (config, replace(config, encoder="start"))
        ]
    passes = [int(end / 1e3) for end in ends]  # Encoding takes much less than one
    one = 400 + 100  # To choose the regularization, and to fit with it
    # The encoder, the untrained one and raw pixels; and the start, if there is one.
    assert passes == ([3 * one, 4 * one] if labeled else [0, 0])


def test_a_time_that_is_too_short_for_an_epoch_is_said(tmp_path, capsys):
    overhead = Overhead(start=10.0, evaluation=4.0, end=100.0)
    assert time_is_short("15m", 786.0, overhead) == ""
    assert time_is_short("15m", 787.0, overhead) == (
        "--max-time 15m is too short for one epoch, which is trained all the same; the run takes "
        "about 15:01"
    )
    np.savez(tmp_path / "data.npz", x=PIXELS)
    settings = ["--backbone", "tiny", "--max-time", "0.001"]
    assert run("train", tmp_path / "data.npz", "-o", tmp_path / "run", *settings) == 0
    assert "warning: --max-time 0.001 is too short for one epoch" in capsys.readouterr().err


def test_a_run_goes_on_for_the_time_that_it_was_planned_for(tmp_path, refusal):
    """It may be left out, or be written otherwise; settings hold the epochs that it became."""
    data, out = tmp_path / "data.npz", tmp_path / "run"
    np.savez(data, x=PIXELS)
    command = ["train", data, "-o", out, "--backbone", "tiny"]
    assert run(*command, "--max-time", "0.1m") == 0
    for again in (["--max-time", "0.1m"], ["--max-time", "6"], []):
        assert run(*command, "--resume", *again) == 0
    line = refusal(2, *command, "--resume", "--max-time", "2h")
    assert "other settings (--max-time 0.1m became 2h); repeat its own command" in line
    assert run("train", data, "--config", out / "config.toml", "-o", tmp_path / "again") == 0
    line = refusal(2, *command[:2], "-o", tmp_path / "again", "--resume", "--max-time", "1h")
    assert "--max-time none became 1h" in line
