"""Exports, loaded by their own libraries in a process that has no nearkin; and refusals."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import torchvision
from builders import contents, write_files, write_network
from cards import computed
from nearkin_command import run as call
from needs import node_environment
from PIL import Image
from processes import SECONDS, environment
from sklearn.datasets import load_sample_images
from small import tiny_vit
from sources import photographs, varied

import nearkin
from nearkin.classifier.calibration import Calibration
from nearkin.classifier.classifier import Classifier, read_classifier
from nearkin.classifier.features import ViewSettings
from nearkin.classifier.reference import reference_of
from nearkin.commands import export as command
from nearkin.config import TrainConfig
from nearkin.data.preprocessing import Preprocessing
from nearkin.encoders.encoder import load, untrained, write_encoder
from nearkin.errors import CheckpointError, DataError, OutputError, UsageError
from nearkin.exports import compare
from nearkin.exports.graphs import PixelNetwork
from nearkin.exports.native import write_native
from nearkin.networks.backbone import build_backbone
from nearkin.networks.branch import as_backbone
from nearkin.networks.heads import CosineHead, Heads
from nearkin.networks.tokens import AttentivePooling
from nearkin.run.folder import RunFolder

TIMM = "timm:vit_tiny_patch16_224?depth=2"
CENTER = dict(crop="center", interpolation="bicubic", mean=(0.5, 0.5, 0.5), std=(0.5, 0.4, 0.3))
"""Preprocessing of another library, with statistics of its own."""
VIEWS = {
    "tiny": Preprocessing(16),
    "resnet18": Preprocessing(64),
    "torchvision:resnet18": Preprocessing(64, resize_to=73, **CENTER),
    TIMM: Preprocessing(32, resize_to=36, **CENTER),
    "vit_tiny_patch16_224": Preprocessing(32),
    "transformers:vit": Preprocessing(32, resize_to=40, crop_rounding="down", **CENTER),
}
VIT = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=48)
VIT |= dict(intermediate_size=48, patch_size=16)
"""Weights of another size than that of its images."""


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
        network = untrained(details, 32)
    else:
        network = build_backbone(name, view.image_size)
        varied(network.body, view.image_size)
    write_encoder(run.encoder, network, details, view)
    run.write_settings(TrainConfig(backbone="tiny", encoder="/secret/place/start.pth"), str(data))
    run.write_summary({"metrics": {}, "left_out": {}})
    return folder


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, data):
    """Makes a run of each kind of network, by its name, once."""
    return cache(lambda name: made(tmp_path_factory.mktemp("runs") / "run", data, name))


def pixels_and_features(run: Path, photo: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """What a graph takes of a photograph, and the features that the encoder of a run gives it."""
    encoder = load(run)
    with torch.inference_mode(), Image.open(photo) as image:
        pixels = torch.from_numpy(encoder.preprocessing.pixels(np.asarray(image)))
        return pixels.permute(2, 0, 1)[None], encoder(encoder.transform(image)[None])


def unlike(own: torch.Tensor, other: torch.Tensor) -> float:
    return float((own - other).abs().max() / own.abs().max())


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Photographs: upright, on their side, cut out, with a palette, of 16 bits, and a large JPEG."""
    folder = tmp_path_factory.mktemp("kinds")
    china, flower = (Image.fromarray(pixels) for pixels in load_sample_images().images)
    small = flower.resize((160, 107))  # no JPEG: those may be decoded at a smaller scale
    small.save(folder / "flower.png")
    exif = Image.Exif()
    exif[274] = 6  # orientation: to be turned by a quarter
    small.save(folder / "lying.png", exif=exif)
    small.quantize(16).save(folder / "palette.png", transparency=3)
    deep = np.asarray(small.convert("L")).astype(np.uint16) * 257
    Image.fromarray(deep).save(folder / "deep.png")
    small.putalpha(china.resize(small.size).convert("L"))
    small.save(folder / "cut-out.png")
    china.resize((1920, 1281)).save(folder / LARGE, quality=90)
    return folder


LARGE = "large.jpg"


def embedded(run, images):
    """The vectors of `nearkin embed`, by the names of files."""
    table = nearkin.embed(run, images, device="cpu", workers=0)
    return dict(zip(table.paths, np.asarray(table.vectors), strict=True))


def assert_alike(theirs, own, tolerance, what):
    """Features are the vectors of `nearkin embed`; near them of a JPEG that it decodes smaller."""
    theirs = theirs.ravel() / np.linalg.norm(theirs)
    if LARGE in what:
        assert theirs @ own > 0.95, what
    else:
        np.testing.assert_allclose(theirs, own, atol=tolerance, err_msg=str(what))


CARDS = [
    (TIMM, "timm", "features", 1e-6),
    ("tiny", "torch-export", "outputs", 1e-6),
]
NIGHTLY = [
    ("resnet18", "torchvision", "features", 1e-6),
    ("torchvision:resnet18", "torchvision", "features", 1e-5),
    (TIMM, "huggingface", "features", 1e-6),
    (TIMM, "onnx", "outputs", 1e-5),
    ("transformers:vit", "huggingface", "features", 2e-3),  # which does not resize by Pillow
]


@pytest.mark.parametrize(
    "cards", [CARDS, pytest.param(NIGHTLY, marks=pytest.mark.slow)], ids=["most", "others"]
)
def test_the_code_of_the_card_gives_the_vectors_of_embed(run_of, kinds, tmp_path, cards):
    """From the file to the vector, by each format's own library."""
    folders = [tmp_path / str(number) for number in range(len(cards))]
    for folder, (name, format, _, _) in zip(folders, cards, strict=True):
        nearkin.export(run_of(name), output=folder, format=format)
    photos = sorted(kinds.iterdir())
    own = {name: embedded(run_of(name), kinds) for name, *_ in cards}
    results = zip(folders, (result for _, _, result, _ in cards), strict=True)
    cases = product(cards, photos)
    for (card, photo), theirs in zip(cases, computed(results, *photos), strict=True):
        name, format, _, tolerance = card
        assert_alike(theirs, own[name][photo.name], tolerance, (name, format, photo.name))


@pytest.mark.slow
@pytest.mark.needs("transformers")
def test_a_pipeline_of_transformers_gives_the_vectors_of_embed(run_of, kinds, tmp_path):
    """Of a path, it turns photographs itself."""
    import transformers

    command = ["export", run_of(TIMM), "-o", tmp_path / "out", "--format", "huggingface"]
    said = subprocess.run(
        [sys.executable, "-m", "nearkin", *map(str, command)],
        env=environment(), capture_output=True, text=True, check=True, timeout=SECONDS,
    )  # fmt: skip
    assert "[transformers]" not in said.stderr  # its advice on packages reads like an error
    extract = transformers.pipeline(
        "image-feature-extraction", model=str(tmp_path / "out"), pool=True
    )
    own = embedded(run_of(TIMM), kinds)
    for name in ("flower.png", "lying.png", LARGE):
        assert_alike(np.array(extract(str(kinds / name))), own[name], 1e-6, name)


NODE = """
const fs = require("fs"), ort = require("onnxruntime-node");
const [model, pixels, size, result] = process.argv.slice(2);
async function main() {
  const session = await ort.InferenceSession.create(model);
  const images = new ort.Tensor("uint8", fs.readFileSync(pixels), [1, 3, +size, +size]);
  const { features } = await session.run({ images });
  fs.writeFileSync(result, JSON.stringify(Array.from(features.data)));
}
main();
"""


@pytest.mark.slow
@pytest.mark.needs("onnxruntime-node")
def test_node_gives_the_vectors_of_embed(run_of, kinds, tmp_path):
    """From the pixels that `preprocessing.json` describes, in a runtime without Python."""
    nearkin.export(run_of(TIMM), output=tmp_path / "e.onnx")
    (tmp_path / "run.js").write_text(NODE)
    encoder, own = load(run_of(TIMM)), embedded(run_of(TIMM), kinds)
    for photo in sorted(kinds.iterdir()):
        pixels = encoder.preprocessing.pixels(photo.read_bytes()).transpose(2, 0, 1)
        (tmp_path / "pixels").write_bytes(pixels.tobytes())
        command = ["node", "run.js", "e.onnx", "pixels", str(encoder.image_size), "result.json"]
        subprocess.run(command, cwd=tmp_path, env=node_environment(), check=True, timeout=60)
        theirs = np.array(json.loads((tmp_path / "result.json").read_text()))
        assert_alike(theirs, own[photo.name], 1e-5, photo.name)


def test_outputs_are_equal_bit_by_bit_and_the_library_reads_the_preprocessing(run_of, tmp_path):
    """Of views that other libraries have, too, nothing is rounded on the way out and back."""
    for name, format in (
        ("resnet18", "timm"),  # the same network in both libraries
        ("vit_tiny_patch16_224", "timm"),  # with patches of 4 px
        ("vit_tiny_patch16_224", "huggingface"),
        ("torchvision:resnet18", "timm"),
        (TIMM, "timm"),
        ("transformers:vit", "huggingface"),
        ("transformers:vit", "torch-export"),
    ):
        out = tmp_path / name / format
        exported = nearkin.export(run_of(name), output=out, format=format)
        assert "of 3 images of the run" in exported.checks[0], (name, format)
        assert "equal, bit by bit" in exported.checks[0], (name, format)
        if format == "torch-export":
            continue
        read, own = load(out).preprocessing, VIEWS[name]
        assert read.image_size == own.image_size
        if own.crop == "center":
            assert read.mean == pytest.approx(own.mean)
            assert read.std == pytest.approx(own.std)
            assert (read.crop, read.resize_to) == (own.crop, own.resize_to)
            assert read.interpolation == own.interpolation


def test_timm_takes_any_share_of_a_crop(tmp_path):
    """It divides by the share of a crop and rounds down, which loses a pixel of some quotients."""
    encoder = load(write_network(tmp_path / "encoder.safetensors", TIMM, size=224))
    (tmp_path / "timm").mkdir()
    lossy = [side for side in range(224, 449) if int(224 / (224 / side)) != side]
    assert len(lossy) == 10
    for resize_to in (224, 256, *lossy, 448):
        encoder.preprocessing = Preprocessing(224, resize_to=resize_to, **CENTER)
        written = write_native("timm", tmp_path / "timm", encoder)
        assert written.transform.transforms[0].size == resize_to


def test_onnx_takes_any_batch_and_with_an_option_any_size(run_of, tmp_path):
    """Without it, one: see test_a_classifier_gives_the_probabilities_of_assign."""
    nearkin.export(run_of(TIMM), output=tmp_path / "free", format="onnx", dynamic_size=True)
    rng, encoder = np.random.default_rng(0), load(run_of(TIMM))
    session = onnxruntime.InferenceSession(str(tmp_path / "free" / "model.onnx"))
    for size, batch in product((32, 48), (1, 5)):
        pixels = rng.integers(0, 256, (batch, 3, size, size), dtype=np.uint8)
        (features,) = session.run(["features"], {"images": pixels})
        with torch.inference_mode():
            own = PixelNetwork(encoder)(torch.from_numpy(pixels))
        assert unlike(own, torch.from_numpy(features)) < 1e-4
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["preprocessing"])["image_size"] == 32
    assert metadata["encoder_sha256"] == encoder.digest


def test_another_size_that_a_graph_is_compared_at_has_whole_patches(tmp_path):
    network, file = tiny_vit(img_size=28, patch_size=14, depth=1), tmp_path / "encoder.safetensors"
    write_encoder(file, as_backbone(network, 28), {"backbone": "custom", "image_size": 28})
    how = {"format": "torch-export", "dynamic_size": True, "backbone": network}
    exported = nearkin.export(file, output=tmp_path / "out", **how)
    assert [re.search(r"(\d+) px", line)[1] for line in exported.checks] == ["28", "70"]


def test_the_command_says_what_it_compared_and_so_does_the_card(run_of, data, tmp_path, capsys):
    out = tmp_path / "out"
    licenses = ["--license", "cc-by-4.0", "--data-license", "public domain"]
    assert call("export", run_of("tiny"), "--format=torch-export", *licenses, "-o", out) == 0
    check, said = capsys.readouterr().out.splitlines()
    assert said == f"128 features as torch-export: {out}"
    card = (out / "README.md").read_text()
    assert check.removeprefix("check  ") in card
    assert "- these weights, as given: cc-by-4.0\n" in card
    assert "- images, as given: public domain\n" in card
    for file in out.iterdir():  # names of this computer stay on it
        assert str(data.parent).encode() not in file.read_bytes()
        assert b"/secret" not in file.read_bytes()


def heads(kind: str) -> torch.nn.Module:
    torch.manual_seed(1)
    return {"linear": Heads(128, 2, 3), "cosine": CosineHead(128, 5, 0.1)}[kind].eval()


def attention() -> AttentivePooling:
    return AttentivePooling(torch.zeros(128), torch.ones(128), torch.randn(128, 1))


@pytest.mark.parametrize(("kind", "format"), [("linear", "onnx"), ("cosine", "torch-export")])
def test_a_classifier_gives_the_probabilities_of_assign(data, tmp_path, kind, format):
    pooling = attention() if kind == "cosine" else None
    run = classified(tmp_path / "run", data, heads(kind), pooling)
    exported = nearkin.export(run, data, output=tmp_path / "out", format=format)
    assert exported.what == f"5 classes as {format}"
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"- encoder: SHA-256 {load(run).digest}\n" in card
    photo = data / "1.png"
    assigned = nearkin.predict(run, data, workers=0).assignments
    classifier = read_classifier(RunFolder(run).classifier)
    network = PixelNetwork(classifier.encoder(load(run)), classifier)
    with torch.inference_mode():
        own = network(pixels_and_features(run, photo)[0])[0].numpy()
    assert CLASSES[own.argmax()] == assigned.class_names[1]
    assert own.max() == pytest.approx(assigned.score[1], abs=1e-5)
    if kind == "linear":
        results = [(tmp_path / "out", name) for name in ("outputs", "best")]
        outputs, best = computed(results, photo)
        assert str(best) == assigned.class_names[1]
        np.testing.assert_allclose(outputs[0], own, atol=1e-6)
        session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
        (five,) = session.run(None, {"images": np.zeros((5, 3, 16, 16), np.uint8)})
        assert five.shape == (5, 5)
        with pytest.raises(Exception, match="invalid dimensions"):
            session.run(None, {"images": np.zeros((1, 3, 48, 48), np.uint8)})


CLASSES = ("cat", "dog", "new-1", "new-2", "new-3")


def classified(run: Path, data: Path, heads: torch.nn.Module, pooling=None) -> Path:
    """A run with a classifier of two known and three novel classes."""
    made(run, data, "tiny")
    calibration, drawn = Calibration(1.7, 10, 0.1, 0.05), ViewSettings("ncl", num_views=2, seed=0)
    digest, top = load(run).digest, torch.nn.Identity()
    learned = torch.randn(10, 128), np.arange(10) % 5, np.arange(10) % 5 < 2, 5
    parts = (top, heads, CLASSES, 2, calibration, drawn)
    rest = {"reference": reference_of(*learned), "pooling": pooling, "digest": digest}
    classifier = Classifier(*parts, **rest)
    classifier.write(RunFolder(run).classifier)
    return run


def test_a_format_that_cannot_hold_the_network_is_refused(run_of, tmp_path, refusal):
    """With the reason, and all formats that hold it."""
    for name, format, reason, others in (
        ("tiny", "timm", "it is a network of nearkin's own", ""),
        ("tiny", "torchvision", "it is a network of nearkin's own", ""),
        ("tiny", "huggingface", "transformers takes models of timm and its own", ""),
        (TIMM, "torchvision", "torchvision has no such network", "timm, huggingface, "),
        ("transformers:vit", "timm", "it is a network of transformers", "huggingface, "),
    ):
        refused = refusal(2, "export", run_of(name), "--format", format, "-o", tmp_path / "out")
        assert reason in refused
        assert refused.endswith(f"; give --format, one of {others}onnx, torch-export")
    assert list(tmp_path.iterdir()) == []
    file = write_network(tmp_path / "encoder.safetensors", "resnet18", size=32)
    small_stem = r"conv1.weight.*\[64, 3, 3, 3\].*\[64, 3, 7, 7\]\); below 64 px .* small stem"
    for format in ("timm", "torchvision"):
        with pytest.raises(UsageError, match=small_stem):
            nearkin.export(file, output=tmp_path / "out", format=format)


class Unlike(torch.nn.Module):
    """What no graph can hold: where values decide how often a loop runs."""

    def forward(self, images):
        while images.max() > 1:
            images = images / 2
        return images.mean((2, 3))


def test_a_network_that_is_no_graph_is_refused(tmp_path):
    file = tmp_path / "encoder.safetensors"
    write_encoder(file, as_backbone(Unlike(), 16), {"backbone": "custom", "image_size": 16})
    for format in ("onnx", "torch-export"):
        with pytest.raises(UsageError, match=r"into a graph \(.*\); no other format holds it"):
            nearkin.export(file, output=tmp_path / "out", format=format, backbone=Unlike())


def test_a_name_of_a_file_is_that_file_in_its_format(run_of, data, tmp_path, capsys):
    for file, name in (("e.pt2", "tiny"), ("e.pth", "resnet18")):
        assert call("export", run_of(name), "-o", tmp_path / file) == 0
        printed = capsys.readouterr()
        assert printed.out.endswith(f": {tmp_path / file}\n")
        assert f"images: {load(run_of(name)).preprocessing}" in printed.err
    pixels, own = pixels_and_features(run_of("tiny"), data / "1.png")
    assert torch.equal(torch.export.load(tmp_path / "e.pt2").module()(pixels), own)
    weights = torch.load(tmp_path / "e.pth", weights_only=True)
    assert weights.keys() == torchvision.models.resnet18().state_dict().keys() - FC
    assert contents(tmp_path).keys() == {"e.pt2", "e.pth"}


FC = {"fc.weight", "fc.bias"}


def test_outputs_that_cannot_be_are_refused(run_of, tmp_path):
    run, out = run_of("tiny"), tmp_path / "out"
    for output, format, remedy in (
        ("e.onnx", "torch-export", "give a folder or a name that ends in .pt2 as output"),
        ("e.pt2", "timm", "give a folder as output"),
        ("e.safetensors", "huggingface", "give a folder as output"),
        ("e.pt", "torch-export", "give a folder or a name that ends in .pt2 as output"),
        ("table", "atlas", "give a name that ends in .parquet as output"),
    ):
        with pytest.raises(UsageError, match=f"{output} is no name for {format}; {remedy}$"):
            nearkin.export(run, output=output, format=format)
    for output in (None, out, tmp_path / "e.onnx/"):
        named = output if output is None else f"{output}/"
        with pytest.raises(UsageError, match=r"^give format, one of onnx, .*, atlas; or a file"):
            nearkin.export(run, output=named)
    with pytest.raises(UsageError, match="dynamic_size=True is of graphs"):
        nearkin.export(run, output=out, format="timm", dynamic_size=True)
    with pytest.raises(UsageError, match="is no run folder to export into; give output"):
        nearkin.export(RunFolder(run).encoder, format="torch-export")
    with pytest.raises(DataError, match="4 channels of uint8, and the encoder takes RGB"):
        nearkin.export(run, np.zeros((4, 16, 16, 4), np.uint8), output=out, format="onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_replaced_only_if_it_is_an_export_and_asked_for(run_of, tmp_path):
    run, mine = run_of("tiny"), tmp_path / "mine" / "README.md"
    folder, file = tmp_path / "out", tmp_path / "e.pt2"
    write_files(tmp_path, {"mine/README.md": b"mine", "e.pt2": b"mine"})
    nearkin.export(run, output=folder, format="torch-export")
    before = contents(tmp_path)
    for output in (folder, file, mine.parent):
        with pytest.raises(OutputError, match=r"exists; choose another output, or replace it"):
            nearkin.export(run, output=output, format="torch-export")
    for output in (mine.parent, mine):
        with pytest.raises(
            OutputError, match="is no folder of an export, which overwrite=True repl"
        ):
            nearkin.export(run, output=output, format="torch-export", overwrite=True)
    with pytest.raises(OutputError, match=r"cannot write .*; choose another output"):
        nearkin.export(run, output=mine / "out", format="torch-export", overwrite=True)
    assert contents(tmp_path) == before
    (folder / "model.pt2").unlink()
    for output in (folder, file):
        nearkin.export(run, output=output, format="torch-export", overwrite=True)
        torch.export.load(folder / "model.pt2")
    torch.export.load(file)
    assert contents(tmp_path).keys() == before.keys()


def test_an_export_is_replaced_from_within_its_folder(run_of, tmp_path, monkeypatch):
    how, out = {"format": "timm", "overwrite": True}, tmp_path / "out"
    nearkin.export(run_of("resnet18"), output=out, **how)
    before = contents(out)
    (out / "model.safetensors").unlink()
    monkeypatch.chdir(out)
    assert nearkin.export(run_of("resnet18"), output=".", **how).path == out
    assert contents(out) == before
    assert [*tmp_path.iterdir()] == [out]


def test_files_of_ones_own_outlive_an_export_that_is_replaced(run_of, tmp_path):
    """And none of the export's, of whatever format."""
    how, out = {"output": tmp_path / "out", "overwrite": True}, tmp_path / "out"
    nearkin.export(run_of("resnet18"), format="timm", **how)
    own = {"notes.txt": b"mine", ".git/HEAD": b"main", ".gitignore": b"*", "models/a": b"mine"}
    own |= {"model.py": b"mine", "model.d/a": b"mine", "model-1.ckpt": b"mine"}
    write_files(out, {**own, "model-00001-of-00002.safetensors": b"a part of one that is large"})
    for format, files in (
        ("torchvision", {"model.pth"}),
        ("timm", {"config.json", "model.safetensors"}),
    ):
        nearkin.export(run_of("resnet18"), format=format, **how)
        after, described = contents(out), {"README.md", "preprocessing.json", "settings.toml"}
        assert after.keys() == own.keys() | files | described
        assert own.items() <= after.items()
    assert [*tmp_path.iterdir()] == [out]


def test_a_folder_that_looks_like_an_export_is_spared(run_of, tmp_path, monkeypatch):
    """One with the files of an export among others of the same names."""
    nearkin.export(run_of("resnet18"), output=tmp_path / "out", format="timm")
    project = tmp_path / "project"
    shutil.copytree(tmp_path / "out", project)
    write_files(project, {"README.md": b"mine", "settings.toml": b"mine", "a.onnx.data": b"mine"})
    monkeypatch.chdir(project)
    before = contents(tmp_path)
    for output, why in ((".", "is no folder of an export"), ("..", "is no folder of an export")):
        with pytest.raises(OutputError, match=why):
            nearkin.export(run_of("resnet18"), output=output, format="timm", overwrite=True)
    with pytest.raises(OutputError, match=r"a\.onnx\.data exists"):  # weights of a large graph
        nearkin.export(run_of("resnet18"), output="a.onnx")
    assert contents(tmp_path) == before


def test_an_export_that_cannot_be_replaced_stays_as_it_was(run_of, tmp_path):
    out = tmp_path / "out"
    nearkin.export(run_of("resnet18"), output=out, format="torchvision")
    write_files(out, {"config.json/mine": b"in the way of a file", "notes.txt": b"mine"})
    before = contents(tmp_path)
    with pytest.raises(OutputError, match="cannot write"):
        nearkin.export(run_of("resnet18"), output=out, format="timm", overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on Windows")
def test_a_kill_loses_nothing_and_the_same_command_goes_on(run_of, tmp_path):
    """After each number of files that were moved: three of the former export, five of the new."""
    how, out = {"format": "timm", "overwrite": True}, tmp_path / "out"
    nearkin.export(run_of("resnet18"), output=out, **how)
    write_files(out, {"model.safetensors": b"former"})
    former = contents(out)
    marks = {name: former[name] for name in command.MARKS}
    new = {f"p/new/{name}": marks.get(name, b"new") for name in former}
    for moves in range(8):
        folder = shutil.copytree(out, tmp_path / str(moves))
        write_files(folder, {"notes.txt": b"mine", **new})
        if (child := os.fork()) == 0:
            kills = iter([False] * moves)  # and after that
            sys.addaudithook(
                lambda event, _, kills=kills: (
                    event == "os.rename" and next(kills, True) and os._exit(9)
                )
            )
            command._replace(folder, folder / "p" / "new", folder / "p" / "old")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        left = contents(folder)
        for name, content in former.items():
            assert {left.get(name), left.get(f"p/old/{name}")} & {content, b"new"}, (moves, name)
        assert command._is_export(folder)
    nearkin.export(run_of("resnet18"), output=tmp_path / "6", **how)
    whole = contents(tmp_path / "6")
    assert (whole["notes.txt"], marks.items() <= whole.items()) == (b"mine", True)
    assert len(whole["model.safetensors"]) > 1e6


def test_a_file_that_computes_something_else_is_not_kept(run_of, tmp_path, monkeypatch):
    """One weight differs by a thousandth, or all features do."""
    write_native, write_graph = command.write_native, command.write_graph

    def other_weight(*arguments):
        written = write_native(*arguments)
        next(written.network.parameters()).data.flatten()[0] += 1e-3
        return written

    def other_features(*arguments, **options):
        run, program = write_graph(*arguments, **options)
        return lambda images: run(images) * 1.001, program

    monkeypatch.setattr(command, "write_native", other_weight)
    monkeypatch.setattr(command, "write_graph", other_features)
    for name, format in (("resnet18", "torchvision"), ("tiny", "onnx"), ("tiny", "torch-export")):
        with pytest.raises(CheckpointError, match=r"computes other features .* nothing was kept"):
            nearkin.export(run_of(name), output=tmp_path / "out", format=format)
        assert list(tmp_path.iterdir()) == [], format


def test_a_file_whose_own_preprocessing_gives_other_features_is_not_kept(
    run_of, tmp_path, monkeypatch
):
    """For nearkin's own crop, which no other library has, that is a warning."""
    monkeypatch.setattr(compare, "SAME", 1.1)
    with pytest.raises(
        CheckpointError, match=r"^timm .* prepares images otherwise .* nothing was"
    ):
        nearkin.export(run_of(TIMM), output=tmp_path / "out", format="timm")
    assert list(tmp_path.iterdir()) == []
    how = {"format": "timm", "overwrite": True}
    for least, beginning in ((-1.0, "from image to features"), (1.1, "warning: from image to")):
        monkeypatch.setattr(compare, "ALIKE", least)
        *_, line = nearkin.export(run_of("resnet18"), output=tmp_path / "out", **how).checks
        assert line.startswith(beginning)


NAMED = [
    ("tiny", 16), ("small", 32), ("torchvision/resnet18", 32), ("torchvision/resnet50", 64),
    ("timm/resnet50", 64), ("torchvision:vit_b_16", 224), ("timm:vit_base_patch16_224.mae", 224),
    ("timm:vit_small_patch14_dinov2.lvd142m", 224),
    ("timm:vit_small_patch14_reg4_dinov2.lvd142m", 224),
    ("timm:vit_small_patch16_dinov3.lvd1689m", 224), ("timm:vit_base_patch32_clip_224.openai", 224),
    ("timm:vit_base_patch16_siglip_224.v2_webli", 224), ("timm:tf_efficientnet_lite0.in1k", 224),
    ("timm:efficientnet_b0.ra_in1k", 224), ("timm:mobilenetv3_large_100.ra_in1k", 224),
    ("timm:swin_tiny_patch4_window7_224.ms_in1k", 224), ("timm:convnext_tiny.fb_in22k", 224),
    ("timm:convnextv2_tiny.fcmae_ft_in22k_in1k", 224),
]  # fmt: skip
"""The networks that recipes and documentation name; base sizes stand for large ones."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), NAMED)
def test_every_network_that_we_name_is_a_graph(name, size, data, tmp_path):
    encoder = write_network(tmp_path / "encoder.safetensors", name, size=size)
    for file in ("e.onnx", "e.pt2"):
        nearkin.export(encoder, data, output=tmp_path / file)


def test_a_network_of_ones_own_is_a_graph(tmp_path, data):
    def network():
        torch.manual_seed(3)
        layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)
        return torch.nn.Sequential(*layers, torch.nn.Flatten())

    file = tmp_path / "encoder.safetensors"
    write_encoder(file, as_backbone(network(), 16), {"backbone": "custom", "image_size": 16})
    more = {"format": "torch-export", "backbone": network()}
    nearkin.export(file, data, output=tmp_path / "graph", **more)
    exported = nearkin.export(file, output=tmp_path / "out", **more)
    assert "64 images of noise" in exported.checks[0]  # without its images
    assert not (tmp_path / "out" / "settings.toml").exists()
    with pytest.raises(UsageError, match="it is a network of your own"):
        nearkin.export(file, data, output=tmp_path / "timm", format="timm", backbone=network())


@pytest.mark.slow  # it makes two graphs of ResNet-18
def test_what_the_page_says_is_what_happens(data, tmp_path, monkeypatch, refusal):
    """Its commands and its Python, in order, and the refusal that it quotes."""
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    monkeypatch.chdir(tmp_path)
    made(Path("runs/photos-simclr"), data, "resnet18")
    commands = re.findall("^    nearkin (export .*)$", page, re.MULTILINE)
    python = re.findall(r"^    (exported.*)$", page, re.MULTILINE)
    assert (len(commands), len(python)) == (3, 2)
    for each in commands:
        assert call(*shlex.split(each)) == 0, each
    assert (tmp_path / "runs/photos-simclr/exports/onnx/model.onnx").exists()
    pixels, own = pixels_and_features(Path("runs/photos-simclr"), data / "1.png")
    session = onnxruntime.InferenceSession("photos.onnx")
    (by_onnx,) = session.run(None, {"images": pixels.numpy()})
    assert unlike(own, torch.from_numpy(by_onnx)) < 1e-4
    exec("\n".join(python), {"nearkin": nearkin})
    assert (tmp_path / "photos-encoder" / "model.pth").exists()
    write_network(tmp_path / "encoder.safetensors", "small", size=32)
    quoted = re.search(r"^    (error: small .*)$", page, re.MULTILINE)[1]
    assert refusal(2, "export", "encoder.safetensors", "--format=timm", "-o", "out") == quoted
