"""Encoders by their names on the Hugging Face hub, from a server of this machine that speaks as it."""

import pytest
from hub import serving
from sources import offline, refusal, saved_by_transformers

from nearkin.encoders.encoder import load
from nearkin.encoders.sources import hub_repository
from nearkin.errors import CheckpointError


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one repository: its folder, and what is asked of it."""
    with serving("owner/model", tmp_path, monkeypatch) as opened:
        yield opened


def save(folder, **saving):
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}
    saved_by_transformers(folder, "Dinov2", tiny | {"image_size": 28}, 28, **saving)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")


def test_a_name_of_the_hub_is_the_folder_there(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, asked = hub
    save(folder)
    for more in ("pytorch_model.bin", "flax_model.msgpack", "train.py"):
        (folder / more).write_bytes(b"\0")
    encoder = load("owner/model")
    assert encoder.digest == load(folder).digest
    assert encoder.details["origin"]["source"] == "https://huggingface.co/owner/model"
    assert encoder.details["origin"]["license"] == "apache-2.0"
    assert {"model.safetensors", "config.json"} <= {*asked}  # one form of the weights, and no code
    assert not {"pytorch_model.bin", "flax_model.msgpack", "train.py"} & {*asked}
    asked.clear()
    for name in ("hf-hub:owner/model", "hf_hub:owner/model", "hf-hub:owner/model@main"):
        assert load(name).digest == encoder.digest
    assert not asked  # what is in the cache is taken as it is
    # What other programs leave there may lack a part: how images are prepared, or weights.
    for name in ("preprocessor_config.json", "model.safetensors"):
        next((tmp_path / "hub").glob(f"*/snapshots/*/{name}")).unlink()
        assert load("owner/model").digest == encoder.digest
        assert asked
        asked.clear()


def test_weights_in_parts_are_fetched_whole(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, asked = hub
    save(folder, max_shard_size="30KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert load("owner/model").digest == load(folder).digest
    next((tmp_path / "hub").glob("*/snapshots/*/model-*.safetensors")).unlink()
    asked.clear()
    assert load("owner/model").digest == load(folder).digest
    assert asked


def test_a_repository_without_an_encoder_gets_one_line(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, _ = hub
    (folder / "README.md").write_text("a data set")
    assert "has no config.json" in refusal("owner/model")
    (folder / "config.json").write_text("{}")
    assert "names neither an architecture" in refusal("hf-hub:owner/model", CheckpointError)
    assert "cannot be downloaded (" in refusal("owner/other")


def test_without_a_network_the_line_says_what_to_fetch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    offline(monkeypatch, tmp_path)
    said = refusal("facebook/dinov2-small")
    assert said.startswith(
        "facebook/dinov2-small is no path here, and on Hugging Face the weights"
    )
    assert "https://huggingface.co/facebook/dinov2-small" in said
    assert said.endswith("and give the folder")


def test_paths_are_no_names_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    for path in (
        "results/birds",
        "runs/birds",
        "./a/b",
        "a/b/c",
        "/a/b",
        "../b",
        "torchvision/resnet18",
    ):
        assert hub_repository(path) == "", path
    assert refusal("results/birds").startswith("results/birds does not exist")
    assert hub_repository("facebook/dinov2-small") == "facebook/dinov2-small"


def test_names_of_timm_on_the_hub_are_timms_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    offline(monkeypatch, tmp_path)
    for name in ("timm/resnet10t.c3_in1k", "hf-hub:timm/resnet10t.c3_in1k"):
        assert "the weights of timm:resnet10t.c3_in1k are not on this computer" in refusal(name)
