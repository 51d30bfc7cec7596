"""The examples run: methods, memories, transforms and encoders outside of nearkin's own loop.

The plain loop, the loader and the method of one's own are run by the tests of those parts.
"""

import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import fill
from processes import SECONDS, environment
from pyarrow import parquet
from torch import nn
from torchvision.models import resnet18

import nearkin
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import write_encoder
from nearkin.networks.backbone import build_backbone

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name, function="train"):
    """A function of an example."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))[function]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1))


def learned(before, after):
    return not all(map(torch.equal, before.parameters(), after.parameters()))


def test_a_data_set_of_torchvision_is_packed_for_nearkin(tmp_path, monkeypatch):
    """MNIST as torchvision keeps it: idx files, of which it takes those that are there."""
    raw, rng = tmp_path / "root/MNIST/raw", np.random.default_rng(0)
    raw.mkdir(parents=True)
    packed = {}
    for part, name, num in (("train", "train", 6), ("test", "t10k", 4)):
        x = rng.integers(0, 256, (num, 28, 28), dtype=np.uint8)
        y = np.arange(num, dtype=np.uint8)
        for array, kind in ((x, "images-idx3"), (y, "labels-idx1")):
            head = np.array([8 << 8 | array.ndim, *array.shape], ">i4").tobytes()
            (raw / f"{name}-{kind}-ubyte").write_bytes(head + array.tobytes())
        packed |= {f"x_{part}": x, f"y_{part}": y}
    words = ["pack", "MNIST", str(tmp_path / "mnist.npz"), "--root", str(tmp_path / "root")]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(EXAMPLES / "data/pack_torchvision.py"), run_name="__main__")
    with np.load(tmp_path / "mnist.npz") as written:
        assert all(np.array_equal(written[key], array) for key, array in packed.items())
    images = open_images(tmp_path / "mnist.npz")
    assert images.splits.tolist() == ["test"] * 4 + ["train"] * 6
    assert images.classes == tuple(
        sorted(
            f"{n} - {word}"
            for n, word in enumerate(("zero", "one", "two", "three", "four", "five"))
        )
    )


@pytest.mark.needs("lightning")
def test_lightning_trains_a_method(tmp_path):
    backbone, images = network(), torch.randint(0, 256, (48, 3, 32, 32), dtype=torch.uint8)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, of versions of torch
        loss = example("lightning_loop")(
            backbone, images, max_epochs=1, accelerator="cpu", enable_checkpointing=False,
            default_root_dir=tmp_path, **quiet,
        )  # fmt: skip
    assert 0 < loss < 10
    assert learned(network(), backbone)


@pytest.mark.needs("accelerate")
def test_accelerate_trains_a_method():
    import accelerate

    backbone = network()
    images = torch.randint(0, 256, (48, 3, 32, 32), dtype=torch.uint8)
    loss = example("accelerate_loop")(accelerate.Accelerator(cpu=True), backbone, images, 1)
    assert 0 < loss < 10
    assert learned(network(), backbone)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """An encoder.safetensors of a ResNet-18 for photographs, with statistics of its own."""
    torch.manual_seed(0)
    backbone = build_backbone("resnet18", 64)
    backbone.body.bn1.running_mean.fill_(0.5)
    path = tmp_path_factory.mktemp("run") / "encoder.safetensors"
    write_encoder(path, backbone, {"backbone": "resnet18", "image_size": 64})
    return path


def test_faster_rcnn_takes_an_encoder_and_learns(encoder):
    model = example("detection", "detector")(str(encoder), 3, min_size=64, max_size=64)
    stored = build_backbone("resnet18", 64).body.state_dict().keys()
    kept = model.backbone.body.state_dict()
    assert kept["bn1.running_mean"].eq(0.5).all()
    layers = {name for name in stored if not name.endswith("num_batches_tracked")}
    assert kept.keys() == layers
    assert set(kept) <= set(resnet18().state_dict())
    boxes = torch.tensor([[8.0, 8.0, 40.0, 48.0]])
    losses = model([torch.rand(3, 64, 64)], [{"boxes": boxes, "labels": torch.tensor([1])}])
    sum(losses.values()).backward()
    assert model.backbone.body.conv1.weight.grad.abs().sum() > 0
    assert kept["bn1.running_mean"].eq(0.5).all()
    (found,) = model.eval()([torch.rand(3, 64, 64)])
    assert found.keys() == {"boxes", "labels", "scores"}


SPARK = "--master local[1] --conf spark.ui.enabled=false --conf spark.driver.bindAddress=127.0.0.1"


@pytest.mark.slow
@pytest.mark.needs("pyspark", "java")
def test_spark_computes_the_features_of_nearkin(encoder, tmp_path):
    names = [f"{('cat', 'dog')[number % 2]}/{number}.png" for number in range(10)]
    fill(tmp_path / "images", *names, size=(90, 70))
    command = [EXAMPLES / "spark_embed.py", encoder, tmp_path / "images", tmp_path / "vectors"]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment(
            PYSPARK_PYTHON=sys.executable,
            PYSPARK_SUBMIT_ARGS=f"{SPARK} --conf spark.driver.host=127.0.0.1 pyspark-shell",
        ),
        capture_output=True, text=True, check=False, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = parquet.read_table(tmp_path / "vectors").sort_by("path").to_pydict()
    expected = nearkin.embed(encoder, tmp_path / "images", workers=0)
    vectors = torch.nn.functional.normalize(torch.tensor(rows["vector"]))
    np.testing.assert_allclose(vectors, expected.vectors, atol=1e-6)
    assert rows["label"] == expected.class_names.tolist()
    paths = [path.removeprefix(f"file:{tmp_path}/images/") for path in rows["path"]]
    assert paths == list(expected.paths)
    for part in (tmp_path / "vectors").glob("*.parquet"):  # nearkin searches each
        hits = nearkin.neighbors(encoder, [tmp_path / "images/cat/0.png"], vectors=part, top=1)
        assert len(hits) == 1
