"""Encoders ranked without labels: the measures, the order, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from builders import write_network
from nearkin_command import run as command

import nearkin
from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import load, write_encoder
from nearkin.encoders.inference import inference
from nearkin.errors import UsageError
from nearkin.evaluation.choice import CRITERIA, Ranking
from nearkin.evaluation.embeddings import encode_images
from nearkin.evaluation.evaluate import label_free
from nearkin.metrics.geometry import effective_rank
from nearkin.networks.backbone import build_backbone
from nearkin.run.folder import RunFolder

CPU = torch.device("cpu")
PIXELS = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), np.uint8)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "images.npz"
    np.savez(path, x=PIXELS, y=np.arange(60) % 3)
    return path


def network(seed):
    torch.manual_seed(seed)
    return build_backbone("tiny", 8)


def run(path, data, backbone, *, pixels=None, **settings):
    """A finished run of a training that has left this network."""
    folder = RunFolder(path)
    folder.path.mkdir()
    config = TrainConfig(image_size=8, **settings)
    folder.write_settings(config, str(data))
    write_encoder(folder.encoder, backbone, {"backbone": "tiny", "image_size": 8})
    folder.write_summary({"metrics": {"encoder": {}}})
    images = open_images(str(data) if pixels is None else pixels)
    folder.data.write_text(json.dumps({"fingerprint": f"{images.fingerprint}-split"}))
    return path


def constant():
    """A network that gives the same features for all images."""
    backbone = network(0)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.zero_()
    return backbone


@pytest.fixture
def runs(tmp_path, data):
    return [run(tmp_path / "a", data, constant()), run(tmp_path / "b", data, network(1), seed=1)]


def test_a_ranking_has_the_measures_of_the_features_and_their_order(runs, data):
    ranking = nearkin.rank(runs, by="effective-rank", workers=0)
    for path in runs:
        features = encode_images(
            inference(load(path), CPU), open_images(str(data)), workers=0
        ).tensor
        values = ranking.values[path.name]
        assert values["effective rank"] == pytest.approx(float(effective_rank(features)))
    assert (ranking.order, ranking.best) == (["b", "a"], "b")
    assert ranking.values["b"]["effective rank"] > ranking.values["a"]["effective rank"]
    assert "60 of 60 images" in ranking.protocol


def test_no_label_is_read(runs, data):
    ranking = nearkin.rank(runs, workers=0)
    assert nearkin.rank(runs, data=PIXELS, workers=0).order == ranking.order
    encoder, images = load(runs[1]), open_images(str(data))
    settings = {"seed": 0, "workers": 0, "augment": "characters", "device": CPU}
    other = open_images((PIXELS, np.arange(60) % 7))
    assert (images.labels != other.labels).any()
    assert label_free(encoder, images, **settings) == label_free(encoder, other, **settings)


def test_all_see_the_same_views_whatever_they_were_trained_on(tmp_path, data):
    same = network(1)
    a = run(tmp_path / "a", data, same, augment="simclr")
    b = run(tmp_path / "b", data, same, augment="ncl_cifar", seed=3)
    ranking = nearkin.rank([a, b], by="agreement", workers=0)
    assert (ranking.values["a"], ranking.order) == (ranking.values["b"], ["a", "b"])


def test_the_best_value_is_first_and_what_was_not_measured_last():
    for by, name in CRITERIA.items():
        values = {"none": {}, "low": {name: 0.25}, "one": {name: 1.0}, "high": {name: 4.0}}
        ranking = Ranking(by, values, "images", [])
        assert ranking.order == ["high", "one", "low", "none"], by
        rows = [line.split() for line in ranking.lines()]
        assert [row[0] for row in rows[1:5]] == ranking.order
        assert ranking.lines()[0].startswith(f"by {name}")
        assert rows[4][1:] == ["-"] * len(CRITERIA)


def test_different_dimensions_are_noted(runs, tmp_path, data):
    wide = run(tmp_path / "wide", data, network(0))
    write_network(RunFolder(wide).encoder, "small", size=8)
    assert "128 to 256 dimensions" in nearkin.rank([*runs, wide], workers=0).notes[0]


def test_runs_that_are_not_of_the_same_images_or_no_trainings_are_refused(tmp_path, runs, data):
    other = run(tmp_path / "c", "x", network(2), pixels=PIXELS[:50])
    with pytest.raises(UsageError, match="are of different images"):
        nearkin.rank([*runs, other])
    with pytest.raises(UsageError, match="have changed"):
        nearkin.rank(runs, data=PIXELS[:50])
    folder = RunFolder(tmp_path / "d")
    folder.path.mkdir()
    folder.classifier.touch()
    folder.write_settings(DiscoverConfig(known=["a", "b"]), str(data))
    folder.write_summary({"novel": 3, "scores": {}})
    folder.data.write_text(json.dumps({"fingerprint": "aa-bb"}))
    with pytest.raises(UsageError, match="give runs of one kind"):
        nearkin.rank([*runs, folder.path])
    again = shutil.copytree(folder.path, tmp_path / "e")  # of data and of labeled images beside
    with pytest.raises(UsageError, match="give the run that its encoder is from"):
        nearkin.rank([folder.path, again])


def test_runs_that_are_not_whole_are_refused(runs):
    RunFolder(runs[1]).encoder.unlink()
    with pytest.raises(UsageError, match="encoder"):
        nearkin.rank(runs, workers=0)
    RunFolder(runs[1]).summary.unlink()
    with pytest.raises(UsageError, match="is not finished"):
        nearkin.rank(runs)
    with pytest.raises(UsageError, match="nothing to rank"):
        nearkin.rank([])
    with pytest.raises(UsageError, match="give two or more different runs"):
        nearkin.rank(runs[:1])


def test_the_command_line_ranks_and_refuses_what_does_not_fit(runs, refusal, capsys):
    assert "--by" in refusal(2, "rank", *runs, "--by", "rank")
    assert command("rank", *runs, "--by", "effective-rank", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in shown["order"]] == ["b", "a"]
