"""`nearkin embed` with an encoder of another library: its run folder, and commands that take it."""

import errno
import json
import os

import kills
import numpy as np
import pytest
import timm
import torch
from builders import digits
from kills import Aim
from nearkin_command import run as call
from PIL import Image
from pyarrow import parquet
from safetensors.torch import save_file

import nearkin
from nearkin.commands.embed import source_name
from nearkin.encoders.encoder import load
from nearkin.errors import OutputError, UsageError
from nearkin.evaluation import embeddings
from nearkin.evaluation.table import open_table
from nearkin.run.folder import RunFolder

ARCHITECTURE = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}


def write_weights(folder, seed=0):
    """A vision transformer as timm writes one, with random weights."""
    torch.manual_seed(seed)
    name, size = "vit_tiny_patch16_224", {"img_size": 32}
    network = timm.create_model(name, **size, **ARCHITECTURE)
    folder.mkdir(parents=True)
    save_file(network.state_dict(), folder / "model.safetensors")
    view = {"input_size": [3, 32, 32], "fixed_input_size": True, "interpolation": "bicubic"}
    view |= {"crop_pct": 0.8, "mean": [0, 0, 0], "std": [0.25, 0.25, 0.25]}
    layers = {"first_conv": "patch_embed.proj", "classifier": "head", "license": "apache-2.0"}
    config = {"architecture": name, "num_classes": 1000, "model_args": size | ARCHITECTURE}
    (folder / "config.json").write_text(json.dumps(config | {"pretrained_cfg": view | layers}))
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "vit")


@pytest.fixture(scope="module")
def source(weights):
    return f"timm:local-dir:{weights}"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Handwritten digits as photographs of several sizes, in class folders; one is cut short."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    for number, (pixels, label) in enumerate(zip(*digits(20, classes=3))):
        path = folder / str(label) / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).convert("RGB").resize((48 + number % 5, 40)).save(path)
    bad = min(folder.glob("0/*.jpg"))
    bad.write_bytes(bad.read_bytes()[:300])
    return folder


@pytest.fixture(scope="module")
def first(images):
    return min(images.glob("1/*.jpg"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, source, images):
    out = tmp_path_factory.mktemp("runs") / "frozen"
    assert call("embed", source, images, "-o", out, "--val=.3", "-q", "--report") == 0
    return RunFolder(out)


def test_a_frozen_encoder_leaves_all_that_a_training_leaves_but_a_training(run, source):
    names = {path.name for path in run.path.iterdir()}
    assert names >= {
        "encoder.safetensors", "embeddings.parquet", "summary.json", "report.html", "config.toml",
        "data.json", "images.csv", "bad_files.csv", "train.log", "map.npz",
    }  # fmt: skip
    assert not names & {"checkpoints", "stages", "metrics.csv", "plots"}
    summary = run.read_summary()
    assert list(summary["metrics"]) == ["encoder", "pixels"]  # nothing was trained here
    assert summary["origin"]["license"] == "apache-2.0"
    assert len(summary["origin"]["sha256"]) == 64
    log = run.log.read_text()
    for line in load(source).lines():
        assert line in log
    page = run.report.read_text()
    statistics = "mean 0.000, 0.000, 0.000, std 0.250, 0.250, 0.250"
    for said in ("not trained any further", "apache-2.0", "nearkin discover", statistics):
        assert said in page
    assert "Training curves" not in page


def test_its_features_are_those_of_the_librarys_own_pipeline(run, weights, images):
    network = timm.create_model(f"local-dir:{weights}", pretrained=True, num_classes=0).eval()
    settings = timm.data.resolve_model_data_config(network)
    transform = timm.data.create_transform(**settings, is_training=False)
    table = parquet.read_table(run.embeddings)
    assert len(table) == 59
    for row in range(0, 59, 7):
        pixels = transform(Image.open(images / table["path"][row].as_py()).convert("RGB"))
        with torch.inference_mode():
            expected = torch.nn.functional.normalize(network(pixels[None]))[0]
        torch.testing.assert_close(
            torch.tensor(table["vector"][row].as_py()), expected, atol=1e-5, rtol=0
        )


def test_python_and_the_command_line_give_the_same(run, source, images, tmp_path):
    table = parquet.read_table(run.embeddings)
    options = {"output": tmp_path / "run", "val": 0.3, "report": False}
    nearkin.embed_run(source, images, workers=0, **options)
    made = nearkin.embed(source, images, workers=0)
    assert (tmp_path / "run" / "embeddings.parquet").read_bytes() == run.embeddings.read_bytes()
    vectors = np.stack(table["vector"].to_pylist()).astype(np.float32)
    np.testing.assert_allclose(made.vectors, vectors, atol=1e-6)
    assert call("embed", "--config", run.config, "-o", tmp_path / "same.npz", "-q") == 0
    with pytest.raises(UsageError, match="val is of run folders"):
        nearkin.embed(source, images, val=0.3)
    alone = nearkin.embed(source, images, output=tmp_path / "v.npz", workers=0)
    for file in ("v.npz", "same.npz"):
        np.testing.assert_array_equal(np.load(tmp_path / file)["vector"], alone.vectors)
    with pytest.raises(OutputError, match="replace it with overwrite=True"):
        nearkin.embed(source, images, output=tmp_path / "v.npz", workers=0)
    again = nearkin.embed(source, images, output=tmp_path / "v.npz", overwrite=True, workers=0)
    np.testing.assert_array_equal(again.vectors, alone.vectors)
    np.testing.assert_allclose(alone.vectors, vectors, atol=1e-5)
    assert list(alone.paths) == list(made.paths) == table["path"].to_pylist()


def test_a_lower_precision_is_said_kept_and_continued(source, images, tmp_path, capsys, refusal):
    """Of a run and of a folder of shards, where `auto` takes what was begun."""
    lower, said = (
        ["--precision", "bf16", "--batch-size", "7"],
        "images keep their nearest neighbor",
    )
    exact = nearkin.embed(source, images, workers=0).vectors
    run, folder = RunFolder(tmp_path / "run"), tmp_path / "shards"
    assert call("embed", source, images, "-o", run.path, *lower, "--no-report") == 0
    assert "% of 59 " + said in capsys.readouterr().err
    assert run.read_summary()["precision"] == "bf16"
    assert 'precision = "bf16"' in run.config.read_text()
    vectors = np.stack(parquet.read_table(run.embeddings)["vector"].to_pylist())
    assert 1e-5 < np.abs(vectors - exact).max() < 0.05
    shards = ["embed", source, images, "-o", folder, "--shard-size=30"]
    assert call(*shards, "--shard=1/2", *lower) == 0
    begun = json.loads((folder / "_shards.json").read_text())
    assert begun["precision"] == "bf16"
    assert "begun with another --precision, bf16" in refusal(4, *shards, "--precision", "fp32")
    capsys.readouterr()
    assert call(*shards) == 0
    assert said in capsys.readouterr().err
    vectors = open_table(folder).gather()
    assert 1e-5 < np.abs(np.asarray(vectors) - exact).max() < 0.05


def test_neighbors_take_the_name_and_the_run_and_know_their_vectors(
    run, source, images, first, tmp_path, refusal
):
    of_run = nearkin.neighbors(run.path, [first], top=3)
    assert of_run[0].neighbors[0].path == f"1/{first.name}"
    assert open_table(run.embeddings).encoder == load(source).digest == load(run.path).digest
    other = f"timm:local-dir:{write_weights(tmp_path / 'other', seed=1)}"
    for output, *more in (("shards", "--shard-size=9"), ("v.parquet",)):
        vectors = tmp_path / output
        assert call("embed", source, images, "-o", vectors, "-q", *more) == 0
        assert open_table(vectors).encoder == load(source).digest
        for encoder in (source, run.path):
            assert nearkin.neighbors(encoder, [first], vectors=vectors, top=3) == of_run
        refused = refusal(5, "neighbors", other, first, "--vectors", vectors)
        assert f"{vectors} is of another encoder than {other}" in refused


def numbers_of_the_run(folder, evaluation):
    """Whether an evaluation has the numbers of a run, as its summary holds them."""
    again = json.loads(json.dumps(evaluation.to_dict()))
    (name,) = again.pop("bad")
    assert name in folder.bad_files.read_text()
    summary = folder.read_summary()
    return {name: summary[name] for name in again} == again


def test_evaluate_gives_the_numbers_of_the_run_and_takes_the_size_of_other_vectors(
    run, source, images, first, tmp_path, capsys
):
    assert run.encoder_settings()[0].val == 0.3
    again = nearkin.evaluate(run.path, workers=0)
    assert numbers_of_the_run(run, again)
    shards, size = tmp_path / "shards", "--image-size=16"
    assert call("embed", source, images, "-o", shards, "--shard-size=99", size, "-q") == 0
    assert call("neighbors", source, first, "--vectors", shards) == 5
    capsys.readouterr()
    assert call("neighbors", source, first, "--vectors", shards, size, "--top=1") == 0
    assert f"1.000  1/{first.name}" in capsys.readouterr().out
    how = {"image_size": 16, "workers": 0}
    nearkin.embed_run(source, images, output=tmp_path / "run", report=False, **how)
    measured = nearkin.evaluate(source, images, image_size=16, workers=0)
    assert numbers_of_the_run(RunFolder(tmp_path / "run"), measured)
    assert measured.sizes["train"] > again.sizes["train"]  # by default, fewer are held out


def test_a_full_disk_is_no_bug(source, images, tmp_path, monkeypatch, refusal):
    def full(path, *_):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("nearkin.commands.embed.write_encoder", full)
    monkeypatch.setattr("nearkin.commands.classify.write_start", full)
    known = ["--known", "0,1", "--classes", "2"]
    for words in (["embed", source, images], ["classify", source, images]):
        assert "no room left to write" in refusal(8, *words, "-o", tmp_path / words[0], "-q")
    monkeypatch.setattr("nearkin.run.data.write_csv", full)  # of the first files of a run
    for words in (
        ["embed", source, images],
        ["classify", source, images],
        ["discover", images, "--encoder", source, *known],
    ):
        assert "no room left to write" in refusal(8, *words, "-o", tmp_path / "new", "-q")


def prepare(aim=None, nth=1, cache=None):
    """Shards of 16 images, kept in a cache of the run's own, and a kill at the aim."""

    def change():
        embeddings.SHARD = 16
        if cache is not None:
            os.environ["XDG_CACHE_HOME"] = str(cache)
        if aim is not None:
            kills.set_up(aim, "simclr", nth)

    return change


WRITE = "nearkin.classifier.kept.KeptFeatures.write"
AIMS = {16: (Aim(WRITE, "os.fsync", "before"), 2), 48: (Aim(WRITE, WRITE, "after"), 3)}
"""Kills, by the number of images whose features the run that goes on does not compute again."""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, source, images):
    out, cache = tmp_path_factory.mktemp("runs") / "whole", tmp_path_factory.mktemp("cache")
    assert kills.finish(kills.start(command(source, images, out), prepare(cache=cache))) == 0
    return out


def command(source, images, out):
    settings = "--val .3 --device cpu --workers 0 --resume -q"
    return ["embed", source, str(images), "-o", str(out), *settings.split()]


@pytest.fixture
def hidden(weights, tmp_path):
    """Takes the weights of the source away until the end of the test."""
    gone = tmp_path / "gone"
    yield lambda: weights.rename(gone)
    gone.rename(weights)


@pytest.mark.parametrize("kept", AIMS)
def test_a_killed_run_goes_on_without_its_source_to_the_same_bytes(
    kept, unbroken, images, source, hidden, tmp_path
):
    out, words = tmp_path / "broken", command(source, images, tmp_path / "broken")
    cache = tmp_path / "cache"
    assert kills.finish(kills.start(words, prepare(*AIMS[kept], cache))) == -9
    hidden()
    assert kills.finish(kills.start(words, prepare(cache=cache))) == 0
    expected, files = kills.files(unbroken), kills.files(out)
    assert files.keys() == expected.keys()
    assert [name for name in files if files[name] != expected[name]] == []
    assert f"features of {kept} images were kept in {cache}" in (out / "train.log").read_text()


def test_a_discovery_goes_on_when_the_source_of_its_encoder_is_gone(
    source, images, hidden, tmp_path
):
    settings = "--known 0,1 --classes 2 --epochs 1"
    settings += " --val 0 --device cpu --workers 0"
    settings += " --entropy-weight 1 --resume -q"
    out = tmp_path / "run"
    words = ["discover", str(images), "--encoder", source, "-o", str(out), *settings.split()]
    start = "nearkin.discovery.pipeline.write_start"
    assert kills.finish(kills.start(words, prepare(Aim(start, start, "after")))) == -9
    digest, preprocessing = load(source).digest, load(source).preprocessing
    hidden()
    assert call(*words) == 0
    assert load(out).preprocessing == preprocessing
    assert load(out / "start.safetensors").digest == digest
    assigned = nearkin.predict(out, images, workers=0)
    assert len(assigned.images) == 59


REFUSED = [
    ("embed", 2, "no encoder given; say nearkin embed ENCODER DATA"),
    ("embed SOURCE", 2, "no images given; say nearkin embed ENCODER DATA"),
    ("embed SOURCE DATA -o OUT/v.parquet --val .2", 2, "--val is of run folders"),
    ("embed SOURCE DATA -o OUT/v.parquet --resume", 2, "--resume is of run folders"),
    ("embed SOURCE DATA -o OUT/v --shard-size 9 --overwrite", 2, "--overwrite is of run folders"),
    ("embed SOURCE DATA -o OUT/v.csv", 2, "ends in .parquet, .npz, .npy"),
    ("embed SOURCE DATA --shard 1/2", 2, "need a folder of shards; give -o"),
    ("embed SOURCE DATA --vall .2", 2, "--vall"),
    ("embed SOURCE DATA -o OUT/r --image-size 33", 2, "32 or 40"),
    ("embed dinov2-smal DATA -o OUT/r", 2, "Did you mean dinov2-small?"),
    ("embed resnet18@ DATA -o OUT/r", 2, "resnet18@ names no file"),
    ("embed SOURCE DATA -o RUN", 4, "--resume"),
    ("embed SOURCE DATA -o RUN --val .3 --seed 3 --resume", 2, "--seed 0"),
    ("embed RUN DATA -o RUN --overwrite", 2, "--overwrite would remove"),
    ("explore dinov2-small --write", 2, "dinov2-small is no run folder; `nearkin embed"),
    ("explore dinov2-small", 2, "dinov2-small is no run folder; `nearkin embed"),
    ("neighbors SOURCE FIRST", 2, "has no images of its own; give --vectors"),
    ("evaluate SOURCE", 2, "keeps no images; give its images"),
    ("evaluate RUN DATA --image-size 16", 2, "at its own --image-size"),
    ("neighbors RUN FIRST --image-size 16", 2, "--image-size is of --vectors"),
    ("doctor RUN", 2, "is a frozen encoder"),
    ("embed RUN DATA -o OUT/v.npz --image-size 36", 2, "cannot be divided into the patches"),
]


def test_one_line_says_what_is_wrong(run, source, images, first, tmp_path, refuses, refusal):
    before = run.summary.read_bytes()
    refuses(REFUSED, SOURCE=source, DATA=images, FIRST=first, OUT=tmp_path, RUN=run.path)
    assert not (tmp_path / "r").exists()
    assert run.summary.read_bytes() == before
    for command in ("evaluate", "explore"):  # a run that is not there is looked for beside it
        assert f"Did you mean {run.path}?" in refusal(2, command, f"{run.path}n")


def test_a_resumed_run_that_is_complete_computes_nothing(run, source, images):
    before = run.embeddings.stat().st_mtime_ns
    words = ["embed", source, images, "-o", run.path, "--val", ".3"]
    assert call(*words, "--resume", "-q") == 0
    assert run.embeddings.stat().st_mtime_ns == before
    assert run.log.read_text().splitlines()[-2].endswith("already complete")


def test_a_run_is_named_after_its_encoder():
    for name, expected in {
        "dinov2-small": "dinov2-small",
        "timm:vit_small_patch14_dinov2.lvd142m": "vit_small_patch14_dinov2.lvd142m",
        "torchvision:resnet50": "resnet50",
        "timm:local-dir:weights/my vit/": "my-vit",
        "timm:resnet18@weights/moco.pth": "moco",
        "runs/photos-simclr": "photos-simclr",
    }.items():
        assert source_name(name) == expected
