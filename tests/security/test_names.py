"""A name that stands in a file is not imported, unless the user trusts it: for every such name."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hostile import ENCODER, Commands, folder_of, run_of, tensors, tiny, work_place, zipped

from nearkin.config import ClassifyConfig, DiscoverConfig, EmbedConfig, TrainConfig, members
from nearkin.encoders.encoder import load
from nearkin.errors import CheckpointError, UsageError


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return work_place(tmp_path_factory.mktemp("names"))


SPELLINGS = ["theirs.py:{}", "theirs:{}", "./theirs.py:{}?in_chans=4", "theirs:{}?built_for=8"]
STORED = {"train": TrainConfig, "discover": DiscoverConfig, "classify": ClassifyConfig,
          "embed": EmbedConfig}  # fmt: skip
NEEDED = {"discover": {"known": "a,b", "from_run": "good"}, "classify": {"from_run": "good"},
          "embed": {"encoder": "good"}}  # fmt: skip


def textual(kind):
    """The settings that take any text, so that a name might stand there."""
    hints = {entry.name: entry.type for entry in dataclasses.fields(kind)}
    return [name for name, hint in hints.items() if str in members(hint)]


def add_headers(commands, place):
    for number, spelling in enumerate([*(each.format("Net") for each in SPELLINGS), "os:abort"]):
        run = run_of(place, f"header{number}", TrainConfig(), backbone=spelling)
        using = {
            "embed": ["embed", run, "images", "-o", "x.npz"],
            "a file": ["embed", f"{run}/encoder.safetensors", "images", "-o", "x.npz"],
            "at another size": ["embed", run, "images", "-o", "x.npz", "--image-size", 32],
            "a run": ["embed", run, "images", "--out", "embedded"],
            "neighbors": ["neighbors", run, "images/a/a0.png"],
            "evaluate": ["evaluate", run],
            "duplicates": ["duplicates", run, "images"],
            "select": ["select", run, "images", "--num", 2, "-o", "x.csv"],
            "export": ["export", run, "--format", "safetensors", "-o", "exported"],
            "rank": ["compare", run, "good", "--rank-by", "rankme"],
            "start": ["train", "images", "--init-from", run, "-o", f"{run}-on"],
            "teacher": ["train", "images", "--method", "seed", "--teacher", run, "-o", f"{run}-by"],
            "discover": ["discover", "images", "--known", "a,b", "--from", run, "-o", "found"],
            "classify": ["classify", "images", "--from", run, "-o", "classified"],
        }  # fmt: skip
        for name, arguments in using.items():
            commands.add(f"header {spelling}: {name}", *arguments)


def add_configs(commands, place):
    """Each setting that is text, in a file of settings, for each kind of run."""
    for verb, kind in STORED.items():
        for setting in [*textual(kind), "data"]:
            name = f"{verb}-{setting}"
            values = {"data": "images", **NEEDED.get(verb, {}), setting: "theirs.py:load"}
            lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
            folder_of(place / "configs", {f"{name}.toml": "\n".join(lines)})
            commands.add(f"config: {name}", verb, "--config", f"configs/{name}.toml", "-o", "y")
    for setting in ("init_from", "teacher"):  # an architecture, and the file of its weights
        text = f'data = "images"\nmethod = "seed"\n{setting} = "theirs.py:Net@good.pth"'
        folder_of(place / "configs", {f"at-{setting}.toml": text})
        commands.add(f"config: at {setting}", "train", "--config", f"configs/at-{setting}.toml")


def add_runs(commands, place):
    """Settings of a run, where a command takes its images, its views or its next step from it."""
    run_of(place, "good", TrainConfig())
    for setting in ("data", "augment", "backbone", "method"):
        given = {} if setting == "data" else {setting: "theirs.py:load"}
        data = "theirs.py:load" if setting == "data" else "images"
        run = run_of(place, f"run-{setting}", TrainConfig(**{"augment": "simclr", **given}), data)
        using = {"replay": ["replay", run], "evaluate": ["evaluate", run]}
        if setting == "data":
            using |= {"report": ["report", run], "atlas": ["export", run],
                      "rank": ["compare", run, "good", "--rank-by", "rankme"],
                      "explore": ["explore", run]}  # fmt: skip
        else:
            using["resume"] = ["train", "images", "-o", run, "--resume"]
        for name, arguments in using.items():
            commands.add(f"run {setting}: {name}", *arguments)
    trust = run_of(place, "trusting", TrainConfig())
    with (place / trust / "config.toml").open("a") as file:
        file.write("\n")
    text = (place / trust / "config.toml").read_text()
    folder_of(place / trust, {"config.toml": f"trust_remote_code = true\n{text}"})
    commands.add("a run that trusts itself", "evaluate", trust)


def add_others(commands, place):
    """Names in a classifier, and in checkpoints that say what they are of."""
    classes = {"format": "1", "classes": ["a", "b"], "num_known": 2, "disjoint": False,
               "temperature": 0.1, "calibration": None}  # fmt: skip
    heads = {"heads.weight": torch.ones(2, 128)}
    for kind, num_views in (("discovery", 2), ("classification", 0)):
        details = {"augment": "theirs.py:VIEWS", "num_views": num_views, "seed": 0}
        described = {**classes, "kind": kind, "details": details}
        run = run_of(place, f"classes-{kind}", TrainConfig())
        folder_of(place / run, {"classifier.safetensors": tensors(heads, described)})
        commands.add(f"classifier: {kind}", "assign", run, "images")
    for number, spelling in enumerate(SPELLINGS):
        checkpoint = {"arch": spelling.format("Net"), "state_dict": tiny()}
        folder_of(place, {f"said{number}.pth": zipped(checkpoint)})
        for size in ([], ["--image-size", 32]):
            name = f"checkpoint: {spelling} {size}"
            commands.add(name, "embed", f"said{number}.pth", "images", "-o", "x.npz", *size)


@pytest.fixture(scope="module")
def named(place):
    commands = Commands(place)
    commands.add("warm", "embed", "good", "images", "-o", "x.npz")
    for add in (add_headers, add_configs, add_runs, add_others):
        add(commands, place)
    answers = commands.run()
    marked = (place / "marker").exists()
    return answers, marked


def test_no_name_in_a_file_is_imported(named):
    answers, marked = named
    assert not marked
    ended = {name: answer.line for name, answer in answers.items()}  # in one line, no traceback
    started = [(name, a.events) for name, a in answers.items() if a.events and "warm" not in name]
    assert started == []
    assert ended.pop("run method: evaluate") == ended.pop("run backbone: evaluate") == ""
    assert "with other settings (--method" in ended.pop("run method: resume")
    assert "unknown key trust_remote_code" in ended.pop("a run that trusts itself")
    plain = [name for name in ended if name.endswith(("-known", "-device"))]
    others = [name for name in ended if name.startswith(("classifier", "checkpoint"))]
    assert all(ended[name] for name in (*plain, *others))
    refused = ended.keys() - {*plain, *others, "warm"}
    assert len(refused) > 100
    assert [name for name in refused if "give --trust-remote-code" not in ended[name]] == []


def test_what_is_trusted_is_run(place, monkeypatch):
    monkeypatch.chdir(place)
    run = run_of(place, "trusted", TrainConfig(), backbone="theirs.py:Net")
    with pytest.raises(UsageError, match=r"encoder\.safetensors names code .* 'theirs\.py:Net'"):
        load(run)
    assert not Path("marker").exists()
    assert load(run, trust_remote_code=True).dim == 128
    Path("marker").unlink()


@pytest.mark.parametrize(
    "option", ["pretrained=true", "weights=DEFAULT", "checkpoint_path=x.pth", "pretrained_cfg={}"]
)
def test_a_header_does_not_make_a_library_fetch_weights(option, tmp_path):
    library = "torchvision" if option.startswith("weights") else "timm"
    header = {**ENCODER, "backbone": f"{library}:resnet18?{option}"}
    folder_of(tmp_path, {"encoder.safetensors": tensors(tiny(), header)})
    with pytest.raises(CheckpointError, match="which is no option of an architecture"):
        load(tmp_path)
