"""What learns from labels is chosen by the time given and by hidden known classes."""

import shutil
import tomllib
from dataclasses import replace

import builders
import numpy as np
import pytest
import torch
from discoveries import words
from nearkin_command import run

from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.data.opening import open_images
from nearkin.discovery.data import DiscoveryTask
from nearkin.discovery.features import FinetunedEncoder
from nearkin.discovery.layers import PlannedStage, last_block, planned_time, time_network
from nearkin.discovery.pipeline import GAIN
from nearkin.discovery.stages import known_stage
from nearkin.encoders.encoder import Encoder
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import as_backbone
from nearkin.run.auto import resolve

CPU = torch.device("cpu")
SETTINGS = words(
    "--classes 2 --batch-size 16 --num-views 2 --known-epochs 2 --epochs 2 "
    "--objective simgcd --entropy-weight 1 --num-seeds 1 --no-baselines --device cpu -q"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Digits 0 to 6, 8 of each, as an .npz."""
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    pixels, labels = builders.digits(8, 7)
    np.savez(path, x=pixels, y=labels)
    return path


@pytest.fixture(scope="module")
def discover(data, encoder):
    def discover(out, *more, known="0,1,2,3,4"):
        return run(
            "discover", data, "--known", known, "--from", encoder, "-o", out, *SETTINGS, *more
        )

    return discover


@pytest.fixture(scope="module")
def long(discover, tmp_path_factory):
    """A finished run with more time than it needs; read, never written."""
    out = tmp_path_factory.mktemp("runs") / "long"
    assert discover(out, "--max-time", "9h") == 0
    return out


def settings_of(run):
    return tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))


def log_of(run):
    return (run / "train.log").read_text(encoding="utf-8")


def trials(run):
    """The trial of the network, and that of a layer on top."""
    (network,) = (run / "stages" / "calibration").iterdir()
    return network, run / "stages" / "trials" / network.name


def test_little_time_is_for_a_layer_on_frozen_features(discover, tmp_path):
    out = tmp_path / "run"
    assert discover(out, "--max-time", "1s") == 0
    assert (settings_of(out)["train_layers"], settings_of(out)["max_time"]) == ("top", "")
    assert "of 1s are left; so --train-layers top" in log_of(out)
    assert not (out / "stages" / "calibration-known").exists()


def test_with_time_enough_hidden_classes_decide(long):
    network, frozen = (float(np.load(trial)["accuracy"]) for trial in trials(long))
    better = network > frozen + GAIN
    assert settings_of(long)["train_layers"] == ("6,top" if better else "top")
    assert f"{network:.1%} accuracy on hidden known classes if 6 is trained too" in log_of(long)


def test_a_network_is_not_trained_unless_it_finds_hidden_classes_better(long, discover, tmp_path):
    """Stopped once the trials were there, and resumed with too little time to begin anew."""
    for frozen, layers in ((0.0, "6,top"), (1.0, "top")):
        out = shutil.copytree(long, tmp_path / layers)
        for stage in ("known", "simgcd-0"):
            shutil.rmtree(out / "stages" / stage)
        (out / "summary.json").unlink()
        text = (out / "config.toml").read_text(encoding="utf-8")
        decided = f'train_layers = "{settings_of(long)["train_layers"]}"'
        (out / "config.toml").write_text(text.replace(decided, 'train_layers = "auto"'))
        trial = trials(out)[1]
        content = dict(np.load(trial))
        np.savez(trial, **content | {"accuracy": frozen})
        assert discover(out, "--max-time", "1s", "--resume") == 0
        assert settings_of(out)["train_layers"] == layers
    # And a run that is decided stays so, whatever it would be now.
    np.savez(trial, **content | {"accuracy": 0.0})
    (out / "summary.json").unlink()
    weights = (out / "encoder.safetensors").read_bytes()
    assert discover(out, "--max-time", "9h", "--resume") == 0
    assert settings_of(out)["train_layers"] == "top"
    assert (out / "encoder.safetensors").read_bytes() == weights


def test_nothing_is_timed_where_no_class_can_be_hidden(data, encoder, discover, tmp_path, refusal):
    out = tmp_path / "run"
    assert discover(out, known="0,1,2") == 0
    assert settings_of(out)["train_layers"] == "top"
    assert "--train-layers top: no known class can be hidden" in log_of(out)
    assert "plan   30m in all" in log_of(out)
    # And a time with nothing to plan is refused.
    more = ["--known", "0,1,2", "--from", encoder, "--max-time", "1h", "--train-layers", "top"]
    line = refusal(2, "discover", data, "-o", tmp_path / "other", *more)
    assert "--max-time 1h has nothing to plan" in line
    assert not (tmp_path / "other").exists()


def test_the_time_that_is_planned():
    config, gpu = DiscoverConfig(known=["a", "b"]), torch.device("cuda")
    assert [planned_time(config, device) for device in (CPU, gpu)] == ["30m", ""]
    timed = replace(config, max_time="2h", from_run="run")
    assert [planned_time(timed, device) for device in (CPU, gpu)] == ["2h", "2h"]
    assert planned_time(replace(config, from_run="run", train_layers="top"), CPU) == ""


def test_the_last_block_of_a_network():
    blocks = {"tiny": "6", "resnet18": "layer4.1", "timm/vit_tiny_patch16_224": "blocks.11"}
    assert {name: last_block(build_backbone(name, 32)) for name in blocks} == blocks
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 4))
    assert last_block(as_backbone(plain, 8)) == ""


def test_steps_are_timed_unless_the_time_is_obviously_too_short():
    """Steps leave the network of the stage as it is."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 8, 8, 3), dtype=np.uint8)
    images = open_images(pixels)
    base = resolve(TrainConfig(backbone="tiny", batch_size=8, precision="fp32"), images, CPU)
    config = DiscoverConfig(train_layers="6", num_views=2)
    pretrained = Encoder(build_backbone("tiny", 8), 8, {})
    encoder = FinetunedEncoder(pretrained, images, config, base, CPU)
    task = DiscoveryTask(np.arange(32) % 2, np.arange(32), 2, 2)
    stage = known_stage(encoder, task, replace(base, epochs=3))
    planned = PlannedStage(stage, 2)
    assert planned.num_views == 2 * 3 * 32 * len(stage.method.views)
    before = {name: tensor.clone() for name, tensor in stage.method.state_dict().items()}
    assert time_network(encoder, [planned], limit=0.0).seconds > 0
    assert time_network(encoder, [planned], limit=1e9).seconds > 0
    assert all(torch.equal(x, before[name]) for name, x in stage.method.state_dict().items())
