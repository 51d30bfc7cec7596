"""What is done with a trained encoder: images into features, features into numbers and tables."""

import csv
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import cut_short, fill, noise, soft
from nearkin_command import run as call
from PIL import Image
from pyarrow import parquet
from torch import nn

import nearkin
from nearkin.commands.embed import embed
from nearkin.commands.evaluate import evaluate
from nearkin.config import TrainConfig
from nearkin.data.opening import open_images
from nearkin.data.split import Split
from nearkin.encoders.encoder import CUSTOM, load, write_encoder
from nearkin.errors import CheckpointError, DataError, UsageError
from nearkin.evaluation import evaluate as evaluation
from nearkin.evaluation.evaluate import evaluate_split, second_view
from nearkin.methods import METHODS
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import as_backbone
from nearkin.run.auto import resolve
from nearkin.run.data import open_split
from nearkin.run.folder import RunFolder
from nearkin.training.health import Monitor
from nearkin.training.session import encoders_beside

CPU = torch.device("cpu")


def write_run(folder, images, data="images", backbone=None, **settings):
    """A run as it is when training is done: the settings, and an encoder."""
    folder.mkdir(parents=True, exist_ok=True)
    unresolved = TrainConfig(
        backbone="tiny", image_size=16, epochs=1, seed=3, workers=0, **settings
    )
    config = resolve(unresolved, images, CPU)
    torch.manual_seed(1)
    body = build_backbone("tiny", 16) if backbone is None else as_backbone(backbone, 16)
    name = "tiny" if backbone is None else CUSTOM
    RunFolder(folder).write_settings(config, str(data))
    write_encoder(RunFolder(folder).encoder, body, {"backbone": name, "image_size": 16})
    return config


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Twenty photographs of two classes, of which 003 and 012 cannot be decoded."""
    folder = tmp_path_factory.mktemp("data") / "images"
    for number in range(20):
        path = folder / ("cat", "dog")[number // 10] / f"{number % 10:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        soft(number, (80, 72)).save(path)
    cut_short(folder / "cat" / "003.png", folder / "dog" / "002.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, images):
    folder = tmp_path_factory.mktemp("runs") / "run"
    write_run(folder, open_images(images), images, val=0.4)
    return folder


@pytest.fixture(scope="module")
def parts(run, images):
    return open_split(images, RunFolder(run).settings()[0])


@pytest.fixture(scope="module")
def measured(run, parts):
    """What is measured of the run, and the table; the caller's random numbers are left alone."""
    before = torch.random.get_rng_state()
    measures = _evaluated(run, parts, RunFolder(run).settings()[0])
    assert torch.equal(torch.random.get_rng_state(), before)
    return measures


def _evaluated(run, parts, config):
    encoder = load(run)
    settings = dict(seed=config.seed, workers=int(config.workers), augment=config.augment)
    random = encoders_beside(encoder, RunFolder(run), config, parts, CPU, 0, None)
    return evaluate_split(encoder, parts, beside=random, device=CPU, **settings)


BAD = ["cat/003.png", "dog/002.png"]


def test_images_that_cannot_be_read_have_no_features_and_are_named(run, images):
    embeddings = embed(run, images, workers=0)
    assert list(embeddings.bad) == BAD
    assert all(embeddings.bad.values())
    assert len(embeddings.paths) == len(embeddings.vectors) == len(embeddings.labels) == 18
    assert not set(BAD) & set(embeddings.paths)
    good = load(run).transform(Image.open(images / "dog" / "003.png"))[None]
    row = embeddings.vectors[list(embeddings.paths).index("dog/003.png")]
    expected = nn.functional.normalize(load(run)(good))[0].detach().numpy()
    np.testing.assert_allclose(row, expected, atol=1e-5)


def test_images_none_of_which_can_be_read_are_an_error(run, tmp_path):
    folder = fill(tmp_path, "0.png", "1.png", "2.png")
    cut_short(*folder.iterdir())
    with pytest.raises(DataError, match="none of the 3 images can be read"):
        embed(run, folder)


def test_images_that_cannot_be_read_are_in_no_measure_and_in_no_table(
    run, images, parts, measured
):
    scores, table = measured
    assert sum(scores.sizes.values()) == 18
    assert sorted(table.bad) == BAD
    assert list(table.paths) == [name for name in parts.images.names if name not in BAD]
    held_out = set(parts.test.names) - set(BAD)
    assert {p for p, s in zip(table.paths, table.splits) if s == "test"} == held_out
    test = table.subset(np.flatnonzero(table.splits == "test"))
    assert set(test.paths) == held_out
    everything = embed(run, images, workers=0)
    np.testing.assert_allclose(table.vectors, everything.vectors, atol=1e-5)
    assert table.class_names.tolist() == everything.class_names.tolist()
    assert scores.metrics["encoder"][0].n == len(held_out)


def test_without_the_bad_images_every_number_is_the_same(run, parts, measured):
    config, _ = RunFolder(run).settings()
    good = np.array([row for row, name in enumerate(parts.images.names) if name not in BAD])
    train, test = (
        np.flatnonzero(np.isin(good, rows)) for rows in (parts.train_rows, parts.test_rows)
    )
    sound = Split(parts.images.subset(good), train, test)
    expected, _ = _evaluated(run, sound, config)
    assert measured[0].to_dict() == expected.to_dict()


def test_raw_pixels_are_looked_at_for_some_training_images(run, parts, monkeypatch):
    monkeypatch.setattr(evaluation, "PIXEL_BANK", 5)
    scores, _ = _evaluated(run, parts, RunFolder(run).settings()[0])
    first = {table: column[0] for table, column in scores.metrics.items()}
    assert first["pixels"].protocol["training images"] == 5
    assert first["encoder"].protocol["training images"] > 5
    assert first["pixels"].n == first["encoder"].n


def test_the_second_view_is_made_of_the_images_that_are_looked_at(run, images, monkeypatch):
    monkeypatch.setattr("nearkin.evaluation.metrics.GEOMETRY_IMAGES", 4)
    config, _ = RunFolder(run).settings()
    images = open_images(images)
    settings = dict(seed=config.seed, augment=config.augment, device=CPU)
    view = second_view(load(run), images, **settings)
    # Rows 0, 5, 10 and 15 of the 20 are measured; both damaged images are not among them.
    assert view.rows.tolist() == [0, 5, 10, 15]
    assert len(view) == 4
    monkeypatch.setattr("nearkin.evaluation.metrics.GEOMETRY_IMAGES", 20)
    view = second_view(load(run), images, **settings)
    assert view.rows.tolist() == [row for row in range(20) if images.names[row] not in BAD]
    assert len(view) == 18


def test_a_run_on_arrays_asks_for_them(tmp_path, monkeypatch):
    """Whatever folder of their name there is."""
    fill(tmp_path / "arrays", *(f"{n}.png" for n in range(12)))
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
    write_run(tmp_path / "run", open_images(data), "arrays", val=0.5)
    with pytest.raises(UsageError, match="made from arrays"):
        evaluate(tmp_path / "run")
    assert evaluate(tmp_path / "run", data).sizes == {"train": 6, "test": 6}


class Bare(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images):
        return self.layers(images)


def test_a_network_of_ones_own_is_passed_by_the_same_name_everywhere(tmp_path, images):
    folder = tmp_path / "run"
    write_run(folder, open_images(images), images, backbone=Bare(), val=0.4, labels="none")
    assert load(folder, backbone=Bare()).num_features == 4
    assert embed(folder, images, backbone=Bare(), workers=0).vectors.shape == (18, 4)
    assert set(evaluate(folder, backbone=Bare(), workers=0).metrics) >= {"untrained"}
    with pytest.raises(UsageError, match="of a network of your own; pass it as `backbone`"):
        embed(folder, images)
    own, out = load(folder, backbone=Bare()), tmp_path / "out"
    with pytest.raises(UsageError, match="which a run cannot name"):
        nearkin.classify(own, images, output=out)
    with pytest.raises(UsageError, match="which a run cannot name"):
        nearkin.discover(images, encoder=own, known=["a"], output=out)
    assert not out.exists()
    again = nearkin.embed_run(own, images, output=out, workers=0, verbose=False)
    assert load(again, backbone=Bare()).digest == own.digest
    nearkin.embed_run(own, images, output=out, workers=0, verbose=False, resume=True)


def labeled_like(images, labels):
    return replace(images, labels=np.asarray(labels), classes=("a", "b"))


def measure(parts, config):
    torch.manual_seed(0)
    method = METHODS["simclr"](build_backbone("tiny", 16), dim=8, hidden_dim=16)
    return Monitor(parts, config, CPU).evaluate(method)


def test_neighbors_are_not_asked_unless_both_sides_have_labels(run, images):
    config, _ = RunFolder(run).settings()
    side, known = np.arange(20) % 2, np.arange(20) // 2 % 2
    for train, test in ((False, True), (True, False), (False, False)):
        labels = np.where(np.where(side == 0, train, test), known, -1)
        labeled = labeled_like(open_images(images), labels)
        parts = Split(labeled, np.flatnonzero(side == 0), np.flatnonzero(side == 1))
        assert "knn" not in measure(parts, config), (train, test)


def test_the_monitor_prefers_images_with_labels_and_leaves_out_bad_ones(run, images):
    config, _ = RunFolder(run).settings()
    labels = np.full(20, -1)
    labels[[0, 1, 2, 3, 4, 5]] = 0, 1, 0, 1, 0, 1  # row 3 is damaged
    images = labeled_like(open_images(images), labels)
    parts = Split(images, np.arange(0, 20, 2), np.arange(1, 20, 2))
    monitor = Monitor(parts, config, CPU)
    assert monitor.bank_labels.tolist() == [0, 0, 0]
    assert monitor.query_labels.tolist() == [1, 1]
    assert len(monitor.queries) == 2
    assert measure(parts, config)["knn"] == 0.0


def test_a_single_held_out_image_is_no_collapse(run, images):
    """It has one direction, whatever was learned: images that are trained on are measured."""
    config, _ = RunFolder(run).settings()
    images = labeled_like(open_images(images), np.arange(20) % 2)
    for test in ([19], [3, 19]):  # one, and one that can be read
        parts = Split(images, np.setdiff1d(np.arange(20), test), np.array(test))
        measured = measure(parts, config)
        assert measured["directions"] == 8
        assert measured["feature_std"] > 0
        assert "knn" not in measured  # of images that are trained on


def test_an_image_has_the_features_that_embed_gives_its_file(run, tmp_path):
    ramp, exif = np.linspace(0, 65535, 40 * 30).reshape(40, 30).astype(np.uint16), Image.Exif()
    exif[0x0112] = 6
    clear = np.dstack([noise(0, (30, 40)), ramp // 256]).astype(np.uint8)
    Image.fromarray(clear).save(tmp_path / "clear.png")
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    soft(0, (300, 200)).save(tmp_path / "turned.jpg", exif=exif)
    stored, encoder = embed(run, tmp_path), load(run)
    assert list(stored.paths) == ["clear.png", "deep.png", "turned.jpg"]
    for name, vector in zip(stored.paths, stored.vectors, strict=True):
        with Image.open(tmp_path / name) as image, torch.no_grad():
            size = image.size
            features = encoder(encoder.transform(image)[None])
            assert image.size == np.asarray(image).shape[1::-1] == size
        expected = nn.functional.normalize(features)[0]
        np.testing.assert_allclose(vector, expected, atol=1e-6, err_msg=name)


def test_arrays_and_tensors_are_transformed_as_the_same_pillow_images(run):
    encoder, rng = load(run), np.random.default_rng(0)
    arrays = rng.integers(0, 256, (3, 40, 30, 3), dtype=np.uint8)
    expected = torch.stack([encoder.transform(Image.fromarray(image)) for image in arrays])
    tensors = torch.from_numpy(arrays).permute(0, 3, 1, 2)
    last = torch.from_numpy(arrays)
    for several in (
        arrays,
        list(arrays),
        tensors,
        tuple(tensors),
        [arrays[0], *tensors[1:]],
        last,
    ):
        assert torch.equal(encoder.transform(several), expected)
    for one in (arrays[1], tensors[1], last[1]):
        assert torch.equal(encoder.transform(one), expected[1])
    gray = Image.fromarray(arrays[0, :, :, 0])
    for one in (np.asarray(gray), torch.from_numpy(arrays[0, :, :, 0])):
        assert torch.equal(encoder.transform(one), encoder.transform(gray))
    for one in (arrays[1] / 255, tensors[1] / 255):
        assert torch.equal(encoder.transform(one), expected[1])
    mixed = encoder.transform([gray, arrays[1, :20]])
    assert encoder(mixed).shape == (2, encoder.num_features)


def test_what_is_no_image_is_refused_in_words(run):
    for wrong, message in [
        (np.zeros((8, 8, 3), np.int64), "an array of int64; give uint8"),
        (torch.full((3, 8, 8), -1.0), "floats from -1 to -1"),
        (np.zeros((2, 0, 8, 3), np.uint8), "shape"),  # the others: tests/test_transforms.py
        ([], "no images"),
        ("cat.png", "str is no image; give a PIL image, an array or a tensor"),
        ([None], "NoneType is no image"),
    ]:
        with pytest.raises(UsageError, match=message):
            load(run).transform(wrong)


def test_a_row_per_image_is_written_into_a_table_of_any_kind(run, tmp_path):
    """And names that are not UTF-8, with their bytes."""
    folder, out = fill(tmp_path / "images", "a.png", os.fsdecode(b"caf\xe9.png")), tmp_path
    for ending in (".parquet", ".npz", ".npy"):
        assert call("embed", run, folder, "-o", out / f"vectors{ending}") == 0
    table, stored = parquet.read_table(out / "vectors.parquet"), np.load(out / "vectors.npz")
    vectors = np.array(table["vector"].to_pylist(), np.float32)
    plain = np.load(out / "vectors.npy")
    assert stored["vector"].dtype == plain.dtype == np.float32
    assert np.array_equal(vectors, stored["vector"])
    assert np.array_equal(vectors, plain)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    with (out / "vectors.csv").open(newline="", encoding="utf-8") as file:
        beside = [row["path"] for row in csv.DictReader(file)]
    assert beside == table["path"].to_pylist() == stored["path"].tolist()
    assert beside == ["a.png", "caf\\xe9.png"]


def test_weights_fit_a_network_of_the_same_architecture_and_no_other(run):
    says = r"weights of tiny for 16 px, [^\n]* fit (small|Sequential)[^\n]*$"
    with pytest.raises(UsageError, match=says):
        load(run, backbone=build_backbone("small", 32).body)


def test_an_encoder_is_written_whole_or_not_at_all(run, tmp_path, monkeypatch):
    path = tmp_path / "encoder.safetensors"
    with pytest.raises(UsageError, match="does not exist"):
        load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"encoder\.safetensors cannot be used"):
        load(path)
    write_encoder(path, load(run).backbone, {"backbone": "tiny", "image_size": 16})
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_encoder(path, build_backbone("small", 32), {"backbone": "small", "image_size": 32})
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before
