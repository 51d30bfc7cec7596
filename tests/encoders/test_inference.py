"""How features are computed: precision, images per pass, and what is said of either."""

import numpy as np
import pytest
import torch
from builders import digits, write_network
from PIL import Image
from torch import nn

import nearkin
from nearkin.commands import embed as command
from nearkin.config import EmbedConfig
from nearkin.data.opening import open_images
from nearkin.encoders import inference as by
from nearkin.encoders.encoder import Encoder
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import encode_images
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import Backbone
from nearkin.run.reporter import Silent

CPU = torch.device("cpu")
NUMBER = 60


@pytest.fixture(scope="module")
def images():
    return open_images(digits(20, classes=3)[0])


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return Encoder(build_backbone("tiny", 16), 16, {"backbone": "tiny"})


def features(encoder, images, *options, **counted):
    return encode_images(
        by.inference(encoder, CPU, *options, **counted), images, workers=0
    ).vectors


class Lines(Silent):
    """Remembers log lines."""

    def __init__(self):
        self.lines = []

    def info(self, text):
        self.lines.append(text)


def chosen(precision, encoder, images):
    """The precision of features, and the log lines on it."""
    config, log = EmbedConfig(precision=precision, workers=0), Lines()
    return command.with_precision(config, encoder, images, CPU, log).precision, log.lines


def nearest(vectors):
    """The place of each vector's nearest one, by plain loops."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return [
        max((j for j in range(len(unit)) if j != i), key=lambda j: unit[i] @ unit[j])
        for i in range(len(unit))
    ]


def test_bfloat16_is_computed_where_it_is_asked_for_and_its_neighbors_are_counted(encoder, images):
    exact, lower = (features(encoder, images, precision) for precision in ("fp32", "bf16"))
    assert np.array_equal(exact, features(encoder, images))
    assert lower.dtype == np.float32
    difference = np.abs(lower - exact).max() / np.abs(exact).max()
    assert 1e-4 < difference < 0.05  # eight bits of a number, over some layers
    share = np.mean([a == b for a, b in zip(nearest(exact), nearest(lower), strict=True)])
    assert by.neighbors_kept(torch.from_numpy(exact), torch.from_numpy(lower)) == share
    precision, [line] = chosen("bf16", encoder, images)
    assert precision == "bf16"
    assert f"{100 * share:.1f} % of 60 images keep their nearest neighbor of fp32" in line
    assert all(weight.dtype == torch.float32 for weight in encoder.parameters())


def test_the_neighbors_of_one_image_are_no_reason_to_fail(encoder, images):
    precision, [line] = chosen("bf16", encoder, images.spread(1))
    assert precision == "bf16"
    assert "100.0 % of 1 images keep" in line


def test_auto_is_exact_unless_many_images_keep_their_neighbors(encoder, images, monkeypatch):
    """On a processor with bfloat16, which this one need not be."""
    assert chosen("fp32", encoder, images) == ("fp32", [])
    for native in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(command, "native_precision", lambda _, native=native: native)
        assert chosen("auto", encoder, images) == ("fp32", []), "few images"
    monkeypatch.setattr(command, "MANY", NUMBER)
    monkeypatch.setattr(command, "KEPT", 0.5)
    precision, [line] = chosen("auto", encoder, images)
    assert precision == "bf16"
    assert line.endswith(" of 60 images keep their nearest neighbor of fp32")
    monkeypatch.setattr(command, "KEPT", 1.1)
    precision, [line] = chosen("auto", encoder, images)
    assert precision == "fp32"
    assert line.endswith("; fp32 is used")


class Counted(nn.Module):
    """Means of channels, and how many images each call has seen."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, images):
        self.seen.append(len(images))
        return images.mean((2, 3))


def test_a_pass_takes_as_many_images_as_are_said(images):
    network = Counted()
    encoder = Encoder(Backbone(network, 3), 16, {"backbone": "custom"})
    features(encoder, images, "fp32", 25)
    assert network.seen[-3:] == [25, 25, 10]
    features(encoder, images)
    assert network.seen[-1] == NUMBER  # of small images, up to 256


def test_settings_of_held_out_images_are_of_features_without_a_column(tmp_path):
    """Which is removed by the images that are not held out; other features depend on none."""
    lines = ["path,label,camera"]
    for number, (pixels, label) in enumerate(zip(*digits(10, classes=3), strict=True)):
        Image.fromarray(255 - pixels if number % 2 else pixels).save(tmp_path / f"{number:02}.png")
        lines.append(f"{number:02}.png,{label},{'xy'[number % 2]}")
    table, file = tmp_path / "images.csv", tmp_path / "f.parquet"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    how = {"device": "cpu", "workers": 0, "verbose": False}
    encoder = write_network(tmp_path / "encoder.safetensors")
    for setting in ({"val": 0.3}, {"seed": 3}):
        with pytest.raises(UsageError, match=f"{next(iter(setting))} is of run folders"):
            nearkin.embed(encoder, table, output=file, **setting, **how)
    assert not file.exists()
    of = [
        nearkin.embed(encoder, table, output=file, overwrite=True, ignore="camera", **more, **how)
        for more in ({}, {"val": 0.4}, {"val": 0.4, "seed": 3})
    ]
    assert len({found.vectors.tobytes() for found in of}) == 3


@pytest.mark.needs("openvino")
def test_many_images_are_left_to_openvino_which_is_said(encoder, images, monkeypatch):
    monkeypatch.setattr(by, "WORTH", NUMBER * 16**2)
    assert by.inference(encoder, CPU, count=NUMBER - 1).lines == []
    assert by.inference(encoder, CPU, "bf16", count=NUMBER).lines == []
    assert by.inference(encoder, CPU, count=NUMBER).lines == ["features are computed by OpenVINO"]
    exact, compiled = features(encoder, images), features(encoder, images, count=NUMBER)
    assert np.abs(compiled - exact).max() <= 1e-5 * np.abs(exact).max()
