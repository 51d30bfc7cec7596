"""Exports, loaded by their own libraries in a process that has no nearkin; and refusals."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from processes import environment
from sources import photographs, varied

import nearkin
from nearkin.cli import main
from nearkin.commands import export as command
from nearkin.commands.export import PixelNetwork
from nearkin.config import TrainConfig
from nearkin.data.preprocessing import Preprocessing
from nearkin.discovery.classifier import Calibration, Classifier, read_classifier
from nearkin.discovery.features import ViewSettings
from nearkin.encoders.encoder import load, write_encoder
from nearkin.errors import CheckpointError, DataError, OutputError, UsageError
from nearkin.evaluation.measures import Measure
from nearkin.networks.backbone import build_backbone
from nearkin.networks.heads import CosineHead, Heads, MultiHead
from nearkin.run.folder import RunFolder

CENTER = dict(crop="center", interpolation="bicubic", mean=(0.5, 0.5, 0.5), std=(0.5, 0.4, 0.3))
"""Preprocessing of another library, with statistics of its own."""
VIEWS = {
    "tiny": Preprocessing(16),
    "resnet18": Preprocessing(64),
    "torchvision:resnet18": Preprocessing(64, resize_to=73, **CENTER),
    "timm:vit_tiny_patch16_224?depth=2": Preprocessing(32, resize_to=36, **CENTER),
    "vit_tiny_patch16_224": Preprocessing(32),
    "transformers:vit": Preprocessing(32, resize_to=40, crop_rounding="down", **CENTER),
}
VIT = dict(
    hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48, image_size=32,
    patch_size=16,
)  # fmt: skip
MEASURES = {
    "encoder": {"kNN top-1": Measure("kNN top-1", 0.91, 0.88, 0.93, "k=20, 60 test images")},
    "pixels": {"kNN top-1": Measure("kNN top-1", 0.42, 0.38, 0.46, "k=20, 60 test images")},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return photographs(tmp_path_factory.mktemp("data") / "birds")


def made(folder: Path, data: Path, name: str) -> Path:
    """A run as it is when all is done, with an encoder of that name."""
    folder.mkdir(parents=True)
    view, run = VIEWS[name], RunFolder(folder)
    details = {"backbone": name, "method": "simclr", "epochs": 3}
    torch.manual_seed(0)
    if name.startswith("transformers:"):
        details |= {"config": VIT, "pooling": "class token"}
        network = transformers_network(details)
    else:
        network = build_backbone(name, view.image_size)
        varied(network.body, view.image_size)
    write_encoder(run.encoder, network, details, view)
    run.write_settings(
        TrainConfig(backbone="tiny", init_from="/secret/place/start.pth"), str(data)
    )
    plain = {t: {name: m.to_dict() for name, m in of.items()} for t, of in MEASURES.items()}
    run.write_summary({"measures": plain, "left_out": {}})
    run.data.write_text(json.dumps({"train": 2, "test": 1, "fingerprint": "0123-4567"}))
    return folder


def transformers_network(details):
    from nearkin.encoders.encoder import untrained

    return untrained(details, 32)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data):
    """A run of each kind of network, by its name."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: made(folder / f"run-{number}", data, name) for number, name in enumerate(VIEWS)}


def outputs_by_cards(results: dict[Path, str], photo: Path) -> list[object]:
    """What the code of each model card computes of a photograph, in a process without nearkin."""
    lines = ["import os, sys", "sys.modules['nearkin'] = None  # importing it fails"]
    for number, (folder, result) in enumerate(results.items()):
        code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
        code = code.replace('"photo.jpg"', repr(str(photo)))
        lines += [f"os.chdir({str(folder)!r})", "names = {}", f"exec({code!r}, names)"]
        lines += ["import numpy", f"result = numpy.asarray(names[{result!r}])"]
        lines += [f"numpy.save({str(folder.parent / f'result-{number}.npy')!r}, result)"]
    arguments = [sys.executable, "-W", "ignore", "-c", "\n".join(lines)]
    subprocess.run(arguments, env=environment(), check=True)
    return [
        np.load(folder.parent / f"result-{number}.npy") for number, folder in enumerate(results)
    ]


def own_features(run: Path, photo: Path) -> torch.Tensor:
    encoder = load(run)
    with torch.inference_mode(), Image.open(photo) as image:
        return encoder(encoder.transform(image)[None])


def unlike(own: torch.Tensor, other: torch.Tensor) -> float:
    return float((own - other).abs().max() / own.abs().max())


CARDS = [
    ("resnet18", "torchvision", "features", 0),
    # Statistics that are not nearkin's are folded into the input there, which rounds.
    ("torchvision:resnet18", "torchvision", "features", 1e-5),
    ("timm:vit_tiny_patch16_224?depth=2", "timm", "features", 1e-5),
    ("timm:vit_tiny_patch16_224?depth=2", "huggingface", "features", 1e-5),
    ("transformers:vit", "huggingface", "features", 2e-3),  # which does not resize by Pillow
    ("tiny", "torch-export", "outputs", 0),
    ("timm:vit_tiny_patch16_224?depth=2", "onnx", "outputs", 1e-4),
]


def test_the_code_of_the_card_gives_the_features_of_the_run(runs, data, tmp_path):
    """From the file to the vector, by each format's own library."""
    results = {}
    for number, (name, format, result, _) in enumerate(CARDS):
        folder = tmp_path / str(number)
        nearkin.export(runs[name], folder, format=format)
        results[folder] = result
    photo = data / "1.png"
    for (name, format, _, tolerance), theirs in zip(CARDS, outputs_by_cards(results, photo)):
        difference = unlike(own_features(runs[name], photo), torch.from_numpy(theirs))
        assert difference <= tolerance, (name, format)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("tiny", "safetensors"),
        ("resnet18", "timm"),  # the same network in both libraries
        ("vit_tiny_patch16_224", "timm"),  # with patches of 4 px
        ("vit_tiny_patch16_224", "huggingface"),
        ("torchvision:resnet18", "timm"),
        ("transformers:vit", "torch-export"),
    ],
)
def test_outputs_are_equal_bit_by_bit(runs, tmp_path, name, format):
    exported = nearkin.export(runs[name], tmp_path / "out", format=format)
    assert "of 3 images of the run" in exported.checks[0]
    assert "equal, bit by bit" in exported.checks[0]
    again = tmp_path / "out" / "model.safetensors" if format == "safetensors" else tmp_path / "out"
    if format in ("safetensors", "timm"):
        assert load(again).preprocessing.image_size == VIEWS[name].image_size


def test_the_library_reads_the_preprocessing_that_was_written(runs, tmp_path):
    """Of views that other libraries have, too, nothing is rounded on the way out and back."""
    for name, format in (
        ("timm:vit_tiny_patch16_224?depth=2", "timm"),
        ("transformers:vit", "huggingface"),
    ):
        nearkin.export(runs[name], tmp_path / format, format=format)
        read, own = load(tmp_path / format).preprocessing, VIEWS[name]
        assert read.mean == pytest.approx(own.mean)
        assert read.std == pytest.approx(own.std)
        assert (read.crop, read.resize_to, read.image_size) == (own.crop, own.resize_to, 32)
        assert read.interpolation == own.interpolation


def test_timm_takes_any_share_of_a_crop():
    """It divides by the share and rounds down, which loses a pixel of many quotients."""
    from nearkin.encoders.libraries import timm_view
    from nearkin.encoders.native import _crop_share

    for resize_to in range(224, 449):
        view = Preprocessing(224, resize_to=resize_to, **CENTER)
        config = {"crop_pct": _crop_share(view), **CENTER}
        assert timm_view(config, 224).resize_to == resize_to


def test_onnx_takes_any_batch_and_with_an_option_any_size(runs, tmp_path):
    fixed, free = (tmp_path / name for name in ("fixed", "free"))
    nearkin.export(runs["tiny"], fixed, format="onnx")
    vit = "timm:vit_tiny_patch16_224?depth=2"
    nearkin.export(runs[vit], free, format="onnx", dynamic_size=True)
    rng = np.random.default_rng(0)
    for folder, name, sizes in (
        (fixed, "tiny", (16,)),
        (free, vit, (32, 48)),
    ):
        encoder = load(runs[name])
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
        for size in sizes:
            for batch in (1, 5):
                pixels = rng.integers(0, 256, (batch, 3, size, size), dtype=np.uint8)
                (features,) = session.run(["features"], {"images": pixels})
                with torch.inference_mode():
                    own = PixelNetwork(encoder)(torch.from_numpy(pixels))
                assert unlike(own, torch.from_numpy(features)) < 1e-4
    of_one_size = onnxruntime.InferenceSession(str(fixed / "model.onnx"))
    with pytest.raises(Exception, match="invalid dimensions"):
        of_one_size.run(None, {"images": np.zeros((1, 3, 48, 48), np.uint8)})
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["preprocessing"])["image_size"] == 32
    assert metadata["encoder_sha256"] == encoder.digest


def test_the_card_says_what_is_known(runs, data, tmp_path, capsys):
    arguments = [
        "--license",
        "cc-by-4.0",
        "--data-license",
        "public domain",
        "-o",
        str(tmp_path / "x"),
    ]
    assert main(["export", str(runs["tiny"]), "--format", "torch-export", *arguments]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"128 features as torch-export: {tmp_path / 'x'}"
    card = (tmp_path / "x" / "README.md").read_text()
    assert card.startswith('---\nlicense: "cc-by-4.0"\n')
    assert "| kNN top-1 | 0.910 [0.880, 0.930] | 0.420 [0.380, 0.460] |" in card
    assert "| measure | encoder | raw pixels |" in card
    assert "- kNN top-1: k=20, 60 test images" in card
    assert "- images: birds, 2 to learn from, 1 held out" in card
    assert "0123-4567" in card
    assert "- method: simclr\n- epochs: 3\n" in card
    assert f"SHA-256 {load(runs['tiny']).digest}" in card
    assert "- these weights, as given: cc-by-4.0\n" in card
    assert "- images, as given: public domain\n" in card
    assert printed[0].removeprefix("check  ") in card
    settings = tomllib.loads((tmp_path / "x" / "settings.toml").read_text())
    assert (settings["data"], settings["init_from"]) == ("birds", "start.pth")
    for file in (tmp_path / "x").iterdir():  # names of this computer stay on it
        assert str(data.parent).encode() not in file.read_bytes()
        assert b"/secret" not in file.read_bytes()


# ---------------------------------------------------------------- classifiers


def heads(kind: str) -> torch.nn.Module:
    torch.manual_seed(1)
    if kind == "several":
        made = MultiHead(128, 16, 8, 2, 3, 4, 0.1)
        made.losses.copy_(torch.tensor([3.0, 2.0, 1.0, 4.0]))
        return made.eval()
    return {"linear": Heads(128, 2, 3), "cosine": CosineHead(128, 5, 0.1)}[kind].eval()


@pytest.mark.parametrize(
    ("kind", "disjoint", "format"),
    [
        ("linear", True, "onnx"),
        ("several", False, "torch-export"),
        ("cosine", False, "onnx"),
    ],
)
def test_a_classifier_gives_the_probabilities_of_assign(
    runs, data, tmp_path, kind, disjoint, format
):
    run = classified(tmp_path / "run", data, heads(kind), disjoint)
    exported = nearkin.export(run, tmp_path / "out", data, format=format)
    assert exported.what == f"5 classes as {format}"
    encoder, photo = load(run), data / "1.png"
    assigned = nearkin.assign(run, data, workers=0).assignments
    with Image.open(photo) as image:
        pixels = torch.from_numpy(encoder.preprocessing.pixels(np.asarray(image)))
    network = PixelNetwork(encoder, read_classifier(RunFolder(run).classifier))
    with torch.inference_mode():
        own = network(pixels.permute(2, 0, 1)[None])[0].numpy()
    assert CLASSES[own.argmax()] == assigned.class_names[1]
    assert own.max() == pytest.approx(assigned.score[1], abs=1e-5)
    assert (own[:2] == 0).all() == disjoint
    nearkin.export(run, tmp_path / "encoder", data, format="safetensors")  # which has no classes
    assert "Classes" not in (tmp_path / "encoder" / "README.md").read_text()
    if kind == "linear":
        outputs, best = (
            outputs_by_cards({tmp_path / "out": result}, photo)[0]
            for result in ("outputs", "best")
        )
        assert str(best) == assigned.class_names[1]
        np.testing.assert_allclose(outputs[0], own, atol=1e-6)


CLASSES = ("cat", "dog", "new-1", "new-2", "new-3")


def classified(run: Path, data: Path, heads: torch.nn.Module, disjoint: bool) -> Path:
    """A run with a classifier of two known and three novel classes."""
    made(run, data, "tiny")
    calibration, drawn = Calibration(1.7, 10, 0.1, 0.05), ViewSettings("ncl", num_views=2, seed=0)
    digest, top = load(run).digest, torch.nn.Identity()
    parts = (top, heads, CLASSES, 2, disjoint, calibration, drawn)
    Classifier(*parts, digest=digest).write(RunFolder(run).classifier)
    return run


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "format", "reason"),
    [
        ("tiny", "timm", "it is a network of nearkin's own"),
        ("tiny", "torchvision", "it is a network of nearkin's own"),
        ("tiny", "huggingface", "transformers takes models of timm and its own"),
        ("timm:vit_tiny_patch16_224?depth=2", "torchvision", "torchvision has no such network"),
        ("transformers:vit", "timm", "is a network of transformers"),
    ],
)
def test_a_format_that_cannot_hold_the_network_is_refused(
    runs, tmp_path, capsys, name, format, reason
):
    out = tmp_path / "out"
    assert main(["export", str(runs[name]), "--format", format, "-o", str(out)]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert "--format safetensors, onnx or torch-export" in error
    assert list(tmp_path.iterdir()) == []


def test_a_small_stem_is_no_network_of_a_library(tmp_path, data):
    torch.manual_seed(0)
    file = tmp_path / "encoder.safetensors"
    write_encoder(file, build_backbone("resnet18", 32), {"backbone": "resnet18", "image_size": 32})
    for format in ("timm", "torchvision"):
        with pytest.raises(
            UsageError, match=r"conv1.weight is 64x3x3x3, and 64x3x7x7 in .* small stem"
        ):
            nearkin.export(file, tmp_path / "out", format=format)


def test_what_exists_is_not_overwritten(runs, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    mine = tmp_path / "out" / "README.md"
    mine.write_text("mine")
    arguments = [
        "export",
        str(runs["tiny"]),
        "--format",
        "safetensors",
        "-o",
        str(tmp_path / "out"),
    ]
    assert main(arguments) == 4
    assert "exists; remove it, or choose another -o" in capsys.readouterr().err
    assert mine.read_text() == "mine"


def test_outputs_that_cannot_be_are_refused(runs, tmp_path):
    with pytest.raises(UsageError, match=r"would be one file.* give -o .*model$"):
        nearkin.export(runs["tiny"], tmp_path / "model.onnx", format="onnx")
    with pytest.raises(UsageError, match="--dynamic-size is of graphs"):
        nearkin.export(runs["tiny"], tmp_path / "out", format="safetensors", dynamic_size=True)
    with pytest.raises(UsageError, match="is no run folder to export into; give a folder as -o"):
        nearkin.export(RunFolder(runs["tiny"]).encoder, format="safetensors")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*; choose another -o"):
        nearkin.export(runs["tiny"], tmp_path / "file" / "out", format="safetensors")


def test_images_of_other_channels_are_refused(runs, tmp_path):
    pixels = np.zeros((4, 16, 16, 4), np.uint8)
    with pytest.raises(DataError) as raised:
        nearkin.export(runs["tiny"], tmp_path / "out", pixels, format="onnx")
    assert "4 channels of uint8, and the encoder takes RGB" in str(raised.value)
    assert raised.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def test_without_its_images_outputs_are_compared_on_noise(runs, tmp_path):
    file = RunFolder(runs["tiny"]).encoder
    exported = nearkin.export(file, tmp_path / "out", format="onnx")
    assert "64 images of noise" in exported.checks[0]
    assert not (tmp_path / "out" / "settings.toml").exists()


def test_a_file_that_computes_something_else_is_not_kept(runs, tmp_path, monkeypatch):
    """One weight differs by a thousandth."""

    def damaged(format, folder, encoder):
        written = command_write(format, folder, encoder)
        next(written.network.parameters()).data.flatten()[0] += 1e-3
        return written

    command_write = command.write_native
    monkeypatch.setattr(command, "write_native", damaged)
    with pytest.raises(CheckpointError, match=r"computes other features .* nothing was kept"):
        nearkin.export(runs["resnet18"], tmp_path / "out", format="torchvision")
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_computes_something_else_is_not_kept(runs, tmp_path, monkeypatch):
    command_write = command.write_graph

    def damaged(*arguments, **options):
        run, program = command_write(*arguments, **options)
        return lambda images: run(images) * 1.001, program

    monkeypatch.setattr(command, "write_graph", damaged)
    for format in ("onnx", "torch-export"):
        with pytest.raises(CheckpointError, match="computes other features"):
            nearkin.export(runs["tiny"], tmp_path / "out", format=format)
    assert list(tmp_path.iterdir()) == []


def test_a_network_of_ones_own_is_a_graph_and_weights(tmp_path, data):
    def network():
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
        )

    from nearkin.networks.branch import as_backbone

    file = tmp_path / "encoder.safetensors"
    write_encoder(file, as_backbone(network(), 16), {"backbone": "custom", "image_size": 16})
    for format in ("safetensors", "torch-export"):
        nearkin.export(file, tmp_path / format, data, format=format, backbone=network())
    with pytest.raises(UsageError, match="it is a network of your own"):
        nearkin.export(file, tmp_path / "timm", data, format="timm", backbone=network())


def test_what_the_page_says_is_what_happens(data, tmp_path, monkeypatch, capsys):
    """Its commands and its Python, in order, and the refusal that it quotes."""
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    monkeypatch.chdir(tmp_path)
    made(Path("runs/photos-simclr"), data, "resnet18")
    commands = re.findall("^    nearkin (export .*)$", page, re.MULTILINE)
    python = re.findall(r"^    (exported.*)$", page, re.MULTILINE)
    assert (len(commands), len(python)) == (2, 2)
    for each in commands:
        assert main(shlex.split(each)) == 0, each
    assert (tmp_path / "runs/photos-simclr/exports/onnx/model.onnx").exists()
    exec("\n".join(python), {"nearkin": nearkin})
    assert (tmp_path / "photos-encoder" / "model.pth").exists()
    small = {"backbone": "small", "image_size": 32}
    write_encoder(tmp_path / "encoder.safetensors", build_backbone("small", 32), small)
    capsys.readouterr()
    assert main(["export", "encoder.safetensors", "--format", "timm", "-o", "out"]) == 2
    quoted = re.search(r"^    (error: small .*)$", page, re.MULTILINE)[1]
    assert capsys.readouterr().err.splitlines()[-1] == quoted
