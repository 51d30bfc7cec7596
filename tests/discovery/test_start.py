"""Which encoder a discovery starts from where none is named: by the images, and what can be had."""

import re
import tomllib

import numpy as np
import pytest
import timm
import torch
from builders import soft
from discoveries import SHORT, discover, save, strict_json
from hub import serving
from safetensors.torch import save_file
from sources import cache_of_hub, offline, varied

from nearkin.config import DiscoverConfig
from nearkin.data.opening import open_images
from nearkin.discovery import start
from nearkin.discovery.start import MIN_SIDE, PRETRAINED, with_encoder
from nearkin.encoders.encoder import weight_bytes
from nearkin.encoders.sources import license_of
from nearkin.errors import CheckpointError, UsageError
from nearkin.schema import parameter_docs

TINY = "test_resnet.r160_in1k"
"""An architecture of timm with weights on the hub, of a few hundred kilobytes."""


@pytest.fixture
def tiny(monkeypatch):
    """The name of an encoder that takes the place of the pretrained one."""
    monkeypatch.setattr(start, "PRETRAINED", f"timm:{TINY}")
    return f"timm:{TINY}"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that has it: its folder, and what is asked of it."""
    with serving(timm.get_pretrained_cfg(TINY).hf_hub_id, tmp_path, monkeypatch) as opened:
        yield opened


def images(side=MIN_SIDE, dtype=np.uint8):
    return open_images(np.zeros((4, side, side + 9, 3), dtype))


def decided(config=None, some=None):
    """The settings with an encoder, and the lines that say why."""
    said = []
    return with_encoder(config or DiscoverConfig(), some or images(), said.append), said


def test_the_default_is_small_free_and_named_in_the_help():
    assert license_of(PRETRAINED) == "apache-2.0"
    assert 80e6 < weight_bytes(PRETRAINED) < 95e6
    sentence = parameter_docs(DiscoverConfig)["encoder"]
    assert f"auto: {PRETRAINED} for images of {MIN_SIDE} px and more" in sentence


def test_what_asks_for_a_training_or_is_no_photograph_trains_without_a_look_at_the_network(
    tiny, hub
):
    small, ten = images(MIN_SIDE - 1), DiscoverConfig(max_time="10m")
    two = DiscoverConfig(devices=2)
    for config, some, says in (
        (None, small, f"they have {MIN_SIDE - 1} px in the median, and {tiny} is for {MIN_SIDE}"),
        (None, images(dtype=np.uint16), f"{tiny} takes RGB of 8 bits alone"),
        (ten, None, "--max-time 10m is the length of a training"),
        (two, None, "several processes share a training"),
    ):
        result, (line,) = decided(config, some)
        assert line.startswith(f"encoder  trained on these images: {says}"), line
        assert line.endswith("; --encoder takes one that exists")
        assert (result.method, result.encoder) == ("simclr", "auto")
        assert decided(result, some) == (result, []), "a second decision"
    for given in (DiscoverConfig(method="rotnet"), DiscoverConfig(encoder="runs/a")):
        assert decided(given) == (given, [])
    assert not hub[1]


def test_weights_in_the_cache_are_taken_without_a_network(tiny, tmp_path, monkeypatch):
    offline(monkeypatch, tmp_path)
    weights = cache_of_hub(tmp_path, TINY) / "model.safetensors"
    result, (line,) = decided()
    assert result == DiscoverConfig(encoder=tiny)
    assert re.match(rf"encoder  {re.escape(tiny)} \(apache-2.0, \d+ MB\), since the images", line)
    assert "--method simclr trains one" in line
    with pytest.raises(UsageError, match="blocks"):  # what was typed, not a reason to train
        decided(DiscoverConfig(train_layers="last:99"))
    weights.write_bytes(weights.read_bytes()[:99])
    with pytest.raises(CheckpointError, match="cannot be read"):
        decided()


def test_without_a_network_or_where_the_hub_refuses_an_encoder_is_trained(
    tiny, hub, tmp_path, monkeypatch
):
    for says in ("has no weights that nearkin reads", f"give it as {tiny}@FILE"):
        result, (first, line) = decided()
        assert result == DiscoverConfig(method="simclr")
        assert first.startswith(f"encoder  {tiny}")
        assert line.startswith("encoder  trained on these images: "), line
        assert line.endswith(f"{says}; --encoder takes one that exists"), line
        offline(monkeypatch, tmp_path / "none")
    assert hub[1], "the hub was not asked"


def test_a_discovery_of_photographs_fetches_it_once_and_goes_on_with_it(tiny, hub, tmp_path):
    folder, asked = hub
    torch.manual_seed(0)
    save_file(varied(timm.create_model(TINY)).state_dict(), folder / "model.safetensors")
    pixels = {f"{n % 4}/{n}.png": np.asarray(soft(n % 4, (70, 65))) for n in range(16)}
    data, out = save(tmp_path / "photos", pixels), tmp_path / "run"
    typed = [data, "-o", out, "--known", "0,1", *SHORT, "--epochs", 1, "--classes", 2, "--val", 0]
    assert discover(*typed) == 0
    assert "model.safetensors" in asked
    log = (out / "train.log").read_text()
    assert f"encoder  {tiny} (apache-2.0" in log
    stored = tomllib.loads((out / "config.toml").read_text())
    assert (stored["encoder"], stored["method"]) == (tiny, "auto")
    assert "license apache-2.0" in log
    (out / "summary.json").unlink()
    (folder / "model.safetensors").unlink()
    asked.clear()
    assert discover(*typed, "--resume") == 0
    assert not asked, "what was decided once is decided again"
    assert strict_json(out / "summary.json")["novel"] == 2
