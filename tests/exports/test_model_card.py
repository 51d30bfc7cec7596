"""The model card of an export says what is known, and nothing of this computer."""

import json
import tomllib

import huggingface_hub
import numpy as np
import pytest
import tifffile
from builders import write_network
from PIL import Image

from nearkin.config import TrainConfig
from nearkin.data.preprocessing import Preprocessing
from nearkin.encoders.encoder import load, untrained, write_encoder
from nearkin.exports.model_card import Card
from nearkin.metrics.metric import Metric
from nearkin.run.folder import RunFolder

TINY = {"backbone": "tiny"}
HOW = "k=20, 60 test images"
MEASURES = {
    table: {"kNN top-1": Metric("kNN top-1", *numbers, 100, None, {"method": HOW}).to_dict()}
    for table, numbers in (("encoder", (0.91, 0.88, 0.93)), ("pixels", (0.42, 0.38, 0.46)))
}


@pytest.fixture
def folder(tmp_path):
    """A run as it is when all is done."""
    folder = RunFolder(tmp_path / "run")
    write_network(folder.encoder, method="simclr", epochs=3)
    settings = TrainConfig(backbone="tiny", encoder="/secret/place/start.pth")
    folder.write_settings(settings, "/secret/birds")
    folder.write_summary({"metrics": MEASURES, "left_out": {}})
    folder.data.write_text(json.dumps({"train": 2, "test": 1, "fingerprint": "0123-4567"}))
    return folder


def card_of(encoder, out, folder=None, *checks, **changes):
    parts = {
        "name": "birds-simclr", "encoder": load(encoder), "format": "torch-export", "classes": (),
        "folder": folder, "license": "", "data_license": "",
    }  # fmt: skip
    out.mkdir(exist_ok=True)
    Card(**parts | changes).write(out, checks)
    return (out / "README.md").read_text()


def test_the_card_of_a_run_says_what_is_known(folder, tmp_path):
    out = tmp_path / "out"
    licenses = {"license": "cc-by-4.0", "data_license": "public domain"}
    card = card_of(folder.path, out, folder, "equal, bit by bit", **licenses)
    stated = huggingface_hub.ModelCard(card).data
    assert (stated.license, stated.pipeline_tag) == ("cc-by-4.0", "image-feature-extraction")
    (result,) = stated.eval_results  # of the encoder, not of its baselines
    assert (result.metric_type, result.metric_value) == ("kNN top-1", "0.910 [0.880, 0.930]")
    assert (result.dataset_name, result.metric_args) == ("birds", {"method": HOW})
    assert "to 128 features, by `tiny`. Exported as torch-export by nearkin." in card
    assert "| metric | encoder | raw pixels |" in card
    assert "| kNN top-1 | 0.910 [0.880, 0.930] | 0.420 [0.380, 0.460] |" in card
    assert f"- kNN top-1: {HOW}" in card
    assert "- images: birds, 2 to learn from, 1 held out" in card
    assert "0123-4567" in card
    assert "- method: simclr\n- epochs: 3\n" in card
    assert f"SHA-256 {load(folder.path).digest}" in card
    assert "- these weights, as given: cc-by-4.0\n" in card
    assert "- images, as given: public domain\n" in card
    assert "equal, bit by bit" in card
    assert "not of unit length" in card
    assert "OpenVINO" not in card  # which reads ONNX
    settings = tomllib.loads((out / "settings.toml").read_text())
    assert (settings["data"], settings["encoder"]) == ("birds", "start.pth")
    written = json.loads((out / "preprocessing.json").read_text())
    assert written == json.loads(json.dumps(load(folder.path).preprocessing.to_dict()))
    for file in out.iterdir():
        assert "/secret" not in file.read_text()


def test_the_card_of_an_encoder_of_no_run_leaves_out_what_is_not_known(folder, tmp_path):
    card = card_of(folder.encoder, tmp_path / "out")
    assert "| metric |" not in card
    assert "- images:" not in card
    assert not (tmp_path / "out" / "settings.toml").exists()


def test_the_card_of_a_classifier_names_its_classes_in_order(folder, tmp_path):
    card = card_of(folder.path, tmp_path / "out", folder, classes=("cat", "dog", "new-1"))
    assert "to the probabilities of 3 classes, by `tiny`" in card
    assert "of unit length" not in card
    listed = card.split("Classes, in order: ")[1].splitlines()[0]
    assert listed.index("cat") < listed.index("dog") < listed.index("new-1")


def test_the_code_of_a_transformer_takes_images_of_other_sizes_than_its_weights(tmp_path):
    sizes = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=48)
    for kind, pooling, config, takes in (
        ("vit", "class token", {**sizes, "image_size": 32, "patch_size": 16}, True),
        ("convnextv2", "pooled", {"hidden_sizes": [8] * 4, "depths": [1] * 4}, False),
    ):
        file = tmp_path / f"{kind}.safetensors"
        details = {"backbone": f"transformers:{kind}", "config": config, "pooling": pooling}
        write_encoder(file, untrained(details, 64), {**details, "image_size": 64})
        card = card_of(file, tmp_path / kind, format="huggingface")
        called = '["pixel_values"], interpolate_pos_encoding=True)' in card
        assert called == takes, kind


def test_the_code_reads_channels_wherever_they_are_in_a_file(tmp_path):
    view = Preprocessing(16, low=3 * (0.0,), high=3 * (2.0**16,))
    write_encoder(tmp_path / "e.safetensors", untrained(TINY, 16), TINY, view)
    card = card_of(tmp_path / "e.safetensors", tmp_path / "out")
    exec(card.split("```python\n")[1].split("\nfiles = ")[0], code := {})
    pixels = np.random.default_rng(0).integers(0, 2**16, (3, 20, 24), np.uint16)
    Image.fromarray(pixels[0]).save(tmp_path / "gray.png")
    for name, values, how in (
        ("gray", pixels[0], {}),
        ("last", pixels.transpose(1, 2, 0), {"planarconfig": "contig"}),
        ("planes", pixels, {"planarconfig": "separate"}),
        ("pages", pixels, {"metadata": {"axes": "CYX"}, "ome": True}),
    ):
        tifffile.imwrite(tmp_path / f"{name}.tif", values, photometric="minisblack", **how)
    for photo in ("gray.png", "gray.tif", "last.tif", "planes.tif", "pages.tif"):
        own = view.pixels((tmp_path / photo).read_bytes()).transpose(2, 0, 1)
        np.testing.assert_allclose(code["pixels"](str(tmp_path / photo)), own, atol=1e-6)


def test_names_of_classes_are_no_markdown(folder, tmp_path):
    card = card_of(folder.path, tmp_path / "out", folder, classes=("a\n# b", "`c`"))
    assert "Classes, in order: `a\\n# b`, `` `c` ``" in card
