"""Names, folders and files that are not what they should be: one line, and nothing of them is run."""

import json
import re
import shutil
import socket
from dataclasses import replace

import numpy as np
import pytest
import timm
import transformers
from safetensors.torch import save_file
from sources import cache_of_hub, offline, refusal, saved_by_transformers

import nearkin
from nearkin.commands.lists import list_names
from nearkin.data.preprocessing import Preprocessing
from nearkin.encoders import folders
from nearkin.encoders.encoder import Encoder, load, untrained_like, write_encoder
from nearkin.encoders.libraries import timm_view
from nearkin.encoders.origin import folder_license, origin_lines
from nearkin.encoders.sources import license_of
from nearkin.errors import CheckpointError, UsageError


def test_unknown_names_suggest_the_nearest(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for word, suggestion in (
        ("dinov2-smal", "dinov2-small"),
        ("resnet50", "torchvision:resnet50 or timm:resnet50"),
        ("vit_small_patch16_224", "timm:vit_small_patch16_224"),
        ("timm:resnet18.a1_in1", "timm:resnet18.a1_in1k"),
        ("timm:vit_tiny", "timm:vit_tiny_patch16_224"),
        ("timm:resnet19", "timm:resnet18"),
        ("torchvision:resnet51", "torchvision:resnet50"),
        ("torchvision:resnet50.IMAGENET1K_V3", "IMAGENET1K_V2"),
        ("torchvision: resnet50", "torchvision:resnet50"),
        ("torchvision: vit_b", "torchvision:vit_b_16"),
        ("timm: resnet18.a1_in1k", "timm:resnet18"),
        ("Timm:resnet19", "timm:resnet18"),
        ("tim:convnext_atto", "timm:convnext_atto"),
        ("DINOv2_small", "dinov2-small"),
    ):
        assert f"Did you mean {suggestion}?" in refusal(word)
    assert "Did you mean" not in refusal("torchvision: xyzzy")
    assert refusal("runs/birds").startswith("runs/birds does not exist; `nearkin.train` makes")
    assert f"{tmp_path} is neither a run" in refusal(str(tmp_path))  # such as the images


def test_weights_that_are_not_there_are_refused_with_what_to_do(monkeypatch, tmp_path):
    offline(monkeypatch, tmp_path)
    for name in ("timm:resnet18.a1_in1k", "torchvision:resnet18", "dinov2-small"):
        text = refusal(name)
        for said in ("not on this computer", "HF_HUB_OFFLINE is set", "https://"):
            assert said in text, name
        assert f"give it as {name}@FILE" in text
        if name.startswith("torchvision"):
            assert f"put it into {tmp_path / 'torch' / 'hub' / 'checkpoints'}" in text


def test_no_network_is_found_out_at_once(monkeypatch, tmp_path):
    """By one try of ours: the hub's own client tries for most of a minute."""
    tried = []

    def unreachable(address, *_, **__):
        tried.append(address)
        raise OSError("Network is unreachable")

    offline(monkeypatch, tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(socket, "create_connection", unreachable)
    assert "no connection to huggingface.co" in refusal("timm:resnet18.a1_in1k")
    assert tried == [("huggingface.co", 443)]


def test_sizes_are_refused_before_any_weights_are_read(monkeypatch, tmp_path):
    """Below one patch, timm fails while it interpolates, and good weights would be blamed."""
    offline(monkeypatch, tmp_path)
    for source in ("dinov2-small", f"dinov2-small@{tmp_path / 'none.pth'}"):
        for size, advice in ((8, "14"), (20, "14 or 28")):
            with pytest.raises(UsageError, match=rf"patches of 14 px .* image_size {advice}$"):
                load(source, image_size=size)
    for source in ("torchvision:vit_b_16", "torchvision:vit_b_16@none.pth"):
        assert "cannot take images of 100 px" in refusal(source, image_size=100)
    config = {"crop_mode": "border", "architecture": "x", "crop_pct": 1.0}
    with pytest.raises(UsageError, match="padded with a border"):
        timm_view(config, 224)


def test_a_file_of_the_cache_that_lacks_weights_is_refused(monkeypatch, tmp_path, capfd):
    """timm loads such a file without a word where the classifier is not wanted."""
    offline(monkeypatch, tmp_path)
    snapshot = cache_of_hub(tmp_path, "resnet10t.c3_in1k")
    load("timm:resnet10t.c3_in1k")
    assert capfd.readouterr().out == ""  # what libraries print does not reach the output
    state = timm.create_model("resnet10t").state_dict()
    part = {name: t for name, t in state.items() if not name.startswith("layer4")}
    save_file(part, snapshot / "model.safetensors")
    text = refusal("timm:resnet10t.c3_in1k")
    assert re.search(r"do not fit timm:resnet10t.c3_in1k: \d+ missing: layer4\.0\.conv1\.", text)
    encoder = load("timm:resnet10t.c3_in1k", allow_partial=True)
    assert re.search(r"weights \d+ missing: layer4\.0\.conv1\.", "\n".join(encoder.lines()))
    assert "state_dict" not in encoder.backbone.body.pretrained_cfg
    (snapshot / "model.safetensors").write_bytes(b"\0" * 64)
    assert "cannot be read" in refusal("timm:resnet10t.c3_in1k", CheckpointError)


def test_licenses_of_model_cards(tmp_path):
    gated = "extra_gated_prompt: yes\nlicense: other\nlicense_name: dinov3-license"
    for card, license_ in (
        ("", "not stated"),
        ("---\nlicense: apache-2.0\ntags: [x]\n---\ntext\nlicense: mit\n", "apache-2.0"),
        (f"---\n{gated}\n---\n", "dinov3-license (gated)"),
        ("no front matter\nlicense: mit\n", "not stated"),
    ):
        if card:
            (tmp_path / "README.md").write_text(card)
        assert folder_license(tmp_path) == license_


def test_encoders_are_listed_with_their_licenses_and_restricted_ones_named_as_such():
    for word, name, license_ in (
        ("dinov2", "dinov2-small", "apache-2.0"),
        ("dinov2", "timm:vit_small_patch14_reg4_dinov2.lvd142m", "apache-2.0"),
        ("hiera_tiny_224.mae", "timm:hiera_tiny_224.mae", "cc-by-nc"),
    ):
        listed = list_names("pretrained", word)
        assert listed[name].startswith(license_), name
    for name, restricted in (
        ("dinov2-small", False),
        ("timm:vit_base_patch16_224.mae", True),
        ("timm:vit_small_patch16_dinov3.lvd1689m", True),
        ("timm:vit_huge_patch14_gap_224.in1k_ijepa", True),
        ("torchvision:resnet50", False),
    ):
        license_ = license_of(name)
        lines = origin_lines({"source": "x", "license": license_, "sha256": "0" * 64})
        assert license_ in lines[-1]
        assert lines[-1].startswith("warning: ") == restricted, name


TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14,
        "image_size": 28}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    saved_by_transformers(tmp_path / "model", "Dinov2", TINY, 28)
    return tmp_path / "model"


def change(folder, name="config.json", **values):
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, **values}))


def test_missing_and_unknown_weights_of_a_folder(folder):
    change(folder, num_hidden_layers=2)
    text = refusal(folder)
    assert "18 missing: encoder.layer.1." in text
    encoder = load(folder, allow_partial=True)
    assert "weights 18 missing" in "\n".join(encoder.lines())
    change(folder, num_hidden_layers=1, hidden_size=64)
    refusal(folder, CheckpointError)


def test_code_of_a_folder_is_not_run(folder, tmp_path):
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    hub_kernel = {"attn_implementation": "owner/kernel", "_attn_implementation": "owner/kernel"}
    change(folder, auto_map={"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}, **hub_kernel)
    change(folder, "preprocessor_config.json", auto_map={"AutoImageProcessor": "evil.Evil"})
    encoder = load(folder)
    assert not marker.exists()
    assert not {"auto_map", *hub_kernel} & set(encoder.details["config"])


def test_what_timm_has_or_nobody_is_refused_with_what_to_give(folder):
    """The names that are listed for timm's are there."""
    for kind in ("beit", "bit", "convnext", "deit", "efficientnet", "mobilenet_v1",
                 "mobilenet_v2", "regnet", "resnet", "swinv2"):  # fmt: skip
        change(folder, model_type=kind)
        text = refusal(folder)
        assert f"is a {kind} of transformers, which nearkin does not read. " in text
        pattern = re.search(r"`nearkin.list_pretrained\('(.*)'\)` lists them", text)[1]
        assert any(name.startswith("timm:") for name in nearkin.list_pretrained(pattern)), kind
    change(folder, model_type="dinov4")
    assert "Did you mean dinov" in refusal(folder)


def test_an_index_does_not_lead_out_of_its_folder(folder):
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    for part in ("../secret.safetensors", "/etc/hostname", "sub/x.safetensors", ".."):
        index = {"metadata": {}, "weight_map": {"embeddings.cls_token": part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "not in the folder" in refusal(folder, CheckpointError), part


def test_parts_of_a_folder_are_read_and_none_without_weights(folder):
    whole = load(folder)
    model = transformers.Dinov2Model.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    assert "no weights; put model.safetensors there" in refusal(folder)
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert load(folder).digest == whole.digest


HOSTILE = {
    CheckpointError: [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", "{}"),
        ("config.json", '{"model_type": "dinov2", "hidden_size": "x"}'),
        ("config.json", '{"architecture": "resnet18", "model_args": {"pretrained": true}}'),
        ("config.json", '{"architecture": "resnet18", "model_args": {"checkpoint_path": "/x"}}'),
        ("config.json", '{"architecture": "resnet18", "input_size": [3, 9, "x"]}'),
        ("preprocessor_config.json", "{"),
        ("preprocessor_config.json", "{}"),
        ("preprocessor_config.json", '{"image_std": [0, 1, 1]}'),
        (
            "preprocessor_config.json",
            '{"size": {"height": 28, "width": 56}, "do_center_crop": false}',
        ),
    ],
    UsageError: [
        ("config.json", '{"model_type": "bert"}'),
        ("config.json", '{"architecture": "no_such_net"}'),
        ("adapter_config.json", "{}"),
    ],
}


def test_hostile_descriptions_are_refused(folder, tmp_path):
    cases = [(kind, *case) for kind, of_kind in HOSTILE.items() for case in of_kind]
    for number, (kind, name, content) in enumerate(cases):
        hostile = shutil.copytree(folder, tmp_path / str(number))
        (hostile / name).write_text(content)
        refusal(hostile, kind)
    (folder / "preprocessor_config.json").unlink()
    assert "it has no preprocessor_config.json" in refusal(folder, CheckpointError)


def test_a_missing_library_is_named(folder, monkeypatch, tmp_path):
    encoder = load(folder)
    path = tmp_path / "e.safetensors"
    write_encoder(path, encoder.backbone, encoder.details, encoder.preprocessing)
    monkeypatch.setattr(folders, "find_spec", lambda _: None)
    for source in (folder, path):
        assert "pip install 'nearkin[transformers]'" in refusal(source)


def test_a_header_that_lies_is_refused(folder, tmp_path):
    encoder = load(folder)
    path = tmp_path / "encoder.safetensors"
    config = encoder.details["config"]
    for lie in (
        {"config": {**config, "hidden_size": 10**9}},
        {"config": {**config, "num_hidden_layers": "many"}},
        {"config": {**config, "hidden_size": 48}},
        {"backbone": "transformers:bert"},
    ):
        write_encoder(path, encoder.backbone, encoder.details | lie, encoder.preprocessing)
        refusal(path, CheckpointError)


def test_the_same_weights_with_another_preprocessing_are_another_encoder(folder):
    encoder = load(folder)
    for change in ({"mean": (0.1, 0.2, 0.3)}, {"interpolation": "nearest"}):
        view = replace(encoder.preprocessing, **change)
        assert Encoder(encoder.backbone, view, encoder.details).digest != encoder.digest
    other = untrained_like(encoder, seed=3)
    assert other.preprocessing == encoder.preprocessing
    assert other.backbone.body.state_dict().keys() == encoder.backbone.body.state_dict().keys()
    assert other.digest != encoder.digest


def test_crops_are_rounded_as_the_library_does():
    """35 odd pixels: torchvision begins at 18, transformers at 17."""
    ramp = np.repeat(np.arange(99, dtype=np.uint8)[None, :, None], 64, 0).repeat(3, 2)
    for rounding, begin in (("even", 18), ("down", 17)):
        view = Preprocessing(64, "squash", 99, "nearest", crop_rounding=rounding)
        assert view.pixels(ramp)[0, 0, 0] == begin
