"""A name that stands in a file is not imported, unless the user trusts it: for every such name."""

import dataclasses
import json
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from hostile import (
    ENCODER,
    REFUSED,
    answers_to,
    assert_harmless,
    folder_of,
    run_of,
    tensors,
    tiny,
    work_place,
    zipped,
)  # fmt: skip

from nearkin.config import ClassifyConfig, DiscoverConfig, EmbedConfig, TrainConfig
from nearkin.data.opening import open_images
from nearkin.encoders.encoder import load
from nearkin.errors import CheckpointError, UsageError
from nearkin.schema import described


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return work_place(tmp_path_factory.mktemp("names"))


SPELLINGS = ["theirs.py:{}", "theirs:{}", "./theirs.py:{}?in_chans=4", "theirs:{}?built_for=8"]
STORED = {"train": TrainConfig, "discover": DiscoverConfig, "classify": ClassifyConfig,
          "embed": EmbedConfig}  # fmt: skip
NEEDED = {"discover": {"known": "a,b", "encoder": "good"}, "classify": {"encoder": "good"},
          "embed": {"encoder": "good"}}  # fmt: skip
RANK = "rank HERE good --by effective-rank"
USING = [
    "embed HERE images -o x.npz --overwrite",
    "embed HERE/encoder.safetensors images -o x.npz --overwrite",
    "embed HERE images -o x.npz --overwrite --image-size 32",
    "embed HERE images -o embedded",
    "neighbors HERE images/a/a0.png",
    "evaluate HERE",
    "duplicates images --encoder HERE",
    "audit --train images --test images --encoder HERE",
    "select HERE images --num 2 -o x.csv",
    "export HERE --format torch-export -o exported",
    RANK,
    "train images --encoder HERE -o HERE-on",
    "train images --method seed --teacher HERE -o HERE-by",
    "discover images --known a,b --encoder HERE -o found",
    "classify HERE images -o classified",
]
"""Whatever takes an encoder."""
USING_RUN = {
    "data": ["doctor HERE", "evaluate HERE", "explore HERE --write", "export HERE --format atlas", "explore HERE",
             RANK],
    **{setting: ["doctor HERE", "evaluate HERE", "train images -o HERE --resume"]
       for setting in ("augment", "backbone", "method")},
}  # fmt: skip
"""Whatever takes its images, its views or its next step from the settings of a run."""
OTHERWISE = {
    "run backbone: evaluate HERE": ({0}, ""),  # the header of its encoder counts
    "run method: evaluate HERE": ({0}, ""),
    "run method: train images -o HERE --resume": ({2}, "with other settings (--method"),
}
UNTRUSTED = {2}, "give --trust-remote-code"


def textual(kind):
    """The settings that take any text, so that a name might stand there."""
    hints = get_type_hints(kind, include_extras=True)
    names = [entry.name for entry in dataclasses.fields(kind)]
    return [name for name in names if "text" in described(hints[name]).split(" or ")]


def headers(fingerprint):
    """One name in all uses; the others each in some, since one place reads them all."""
    for number, spelling in enumerate([*(each.format("Net") for each in SPELLINGS), "os:abort"]):
        files = run_of(TrainConfig(image_size=16), fingerprint=fingerprint, backbone=spelling)
        for command in USING[number - 1 :: 4] if number else USING:
            yield f"header {spelling}: {command}", files, command, *UNTRUSTED


def configs():
    """Each setting that is text, in a file of settings, for each kind of run."""
    for verb, kind in STORED.items():
        for setting in [*textual(kind), "data"]:
            values = {"data": "images", **NEEDED.get(verb, {}), setting: "theirs.py:load"}
            lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
            expected = (REFUSED, "error: ") if setting in ("known", "ignore") else UNTRUSTED
            files = {"settings.toml": "\n".join(lines)}
            command = f"{verb} --config HERE/settings.toml -o y"
            yield f"config: {verb} {setting}", files, command, *expected
    for setting in ("encoder", "teacher"):  # an architecture, and the file of its weights
        text = f'data = "images"\nmethod = "seed"\n{setting} = "theirs.py:Net@good.pth"'
        command = "train --config HERE/settings.toml"
        yield f"config: at {setting}", {"settings.toml": text}, command, *UNTRUSTED


def runs(fingerprint):
    for setting, commands in USING_RUN.items():
        given = {"augment": "simclr", setting: "theirs.py:load"}
        data = given.pop("data", "images")
        files = run_of(TrainConfig(image_size=16, **given), data, fingerprint)
        for command in commands:
            what = f"run {setting}: {command}"
            yield what, files, command, *OTHERWISE.get(what, UNTRUSTED)
    files = run_of(TrainConfig())
    files["config.toml"] = f"trust_remote_code = true\n{files['config.toml']}"
    says = "unknown key trust_remote_code"
    yield "a run that trusts itself", files, "evaluate HERE", {2}, says
    files = run_of(TrainConfig(), fingerprint=fingerprint)
    yield "a run of no size", files, RANK, {2}, "names no image_size"


def others():
    """Names in a classifier, and in checkpoints that say what they are of."""
    classes = {"format": "1", "classes": ["a", "b"], "num_known": 2, "disjoint": False,
               "temperature": 0.1, "calibration": None}  # fmt: skip
    heads = {"heads.weight": torch.ones(2, 128)}
    for kind, num_views in (("discovery", 2), ("classification", 0)):
        details = {"augment": "theirs.py:VIEWS", "num_views": num_views, "seed": 0}
        described = tensors(heads, {**classes, "kind": kind, "details": details})
        files = {**run_of(TrainConfig()), "classifier.safetensors": described}
        yield f"classifier: {kind}", files, "predict HERE images", REFUSED, "error: "
    for spelling, size in zip(SPELLINGS, ("", " --image-size 32") * 2, strict=True):
        files = {"x.pth": zipped({"arch": spelling.format("Net"), "state_dict": tiny()})}
        command = f"embed HERE/x.pth images -o x.npz --overwrite{size}"
        yield f"checkpoint: {spelling}{size}", files, command, REFUSED, "error: "


def test_no_name_in_a_file_is_imported(place):
    fingerprint = open_images(place / "images", labels="none", cache=False).fingerprint
    folder_of(place / "good", run_of(TrainConfig(image_size=16), fingerprint=fingerprint))
    cases = [("warm", {}, "embed good images -o x.npz --overwrite", {0}, "")]
    cases += [*headers(fingerprint), *configs(), *runs(fingerprint), *others()]
    assert sum(says == UNTRUSTED[1] for *_, says in cases) > 70
    assert_harmless(place, cases, answers_to(place, cases))


def test_what_is_trusted_is_run(place, monkeypatch):
    monkeypatch.chdir(place)
    run = folder_of(place / "trusted", run_of(TrainConfig(), backbone="theirs.py:Net"))
    with pytest.raises(UsageError, match=r"encoder\.safetensors names code .* 'theirs\.py:Net'"):
        load(run)
    assert not Path("marker").exists()
    assert load(run, trust_remote_code=True).num_features == 128
    Path("marker").unlink()


def test_a_header_does_not_make_a_library_fetch_weights(tmp_path):
    for name in ("timm:resnet18?pretrained=true", "torchvision:resnet18?weights=DEFAULT",
                 "timm:resnet18?checkpoint_path=x.pth", "timm:resnet18?pretrained_cfg={}"):  # fmt: skip
        header = {**ENCODER, "backbone": name}
        folder_of(tmp_path, {"encoder.safetensors": tensors(tiny(), header)})
        with pytest.raises(CheckpointError, match="which is no option of an architecture"):
            load(tmp_path)
