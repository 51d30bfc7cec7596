"""Settings survive their file, a resumed run keeps its own, and a run folder gives them back."""

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nearkin.config import (
    GROUPS,
    TRUST,
    ClassifyConfig,
    DiscoverConfig,
    EmbedConfig,
    TrainConfig,
    seconds,
)
from nearkin.errors import CheckpointError, UsageError
from nearkin.report.encoder_report import command
from nearkin.run.folder import KINDS, RunFolder, data_name, run_folder
from nearkin.run.options import checked_options
from nearkin.schema import as_typed, parameter_docs
from nearkin.toml import continued, read_toml, to_toml

values = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)


@example(options={"odd": '\0\t\n\x7f"\\\u2028\U0001f426'})
@given(options=st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), values))
def test_any_option_value_survives_the_file(options):
    written = tomllib.loads(to_toml(TrainConfig(options=options), "data"))
    assert written["options"] == options
    assert {name: type(value) for name, value in written["options"].items()} == {
        name: type(value) for name, value in options.items()
    }


def test_a_configuration_survives_the_file(tmp_path):
    config = TrainConfig(method="moco", epochs=7, lr=1e-4, options={"temperature": 0.1})
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config, 'images "of" C:\\cats\n'), encoding="utf-8")
    settings = read_toml(path)
    assert settings.pop("data") == 'images "of" C:\\cats\n'
    assert TrainConfig(**settings) == config
    folder, odd = RunFolder(tmp_path), os.fsdecode(b"data/bilder-\xe9")  # of no UTF-8
    folder.write_settings(config, odd)
    assert folder.settings() == (config, odd)
    for content in ("epochs = ", "epochs = 1\nepochs = 2\n", "\0", "[options"):
        path.write_text(content)
        with pytest.raises(UsageError, match="cannot read the configuration"):
            read_toml(path)


def test_what_is_left_to_auto_is_taken_from_the_run_that_is_continued():
    stored = TrainConfig(epochs=12, lr=0.3, workers=4, options={"temperature": 0.1, "dim": 64})
    config = TrainConfig(workers=1, options={"temperature": 0.1})
    assert continued(config, stored) == replace(stored, workers=1)


def test_durations_are_seconds_or_have_a_unit():
    for duration in ("", "0m", "-3m", "3 weeks", "m"):
        with pytest.raises(UsageError, match="not a duration"):
            seconds(duration)


REFUSED = [
    ("TrainConfig", "warmup_start", 1.5, "a number from 0 to 1"),
    ("TrainConfig", "cosine_end", -0.1, "a number from 0 to 1"),
    ("TrainConfig", "lars_form", "lamb", "you, simclr, byol, swav or solo-learn"),
    ("TrainConfig", "view_sizes", (16, 4), "auto or a list of whole numbers from 8 to 4096"),
    ("TrainConfig", "lr", inf, "a finite number"),
    ("TrainConfig", "lr", nan, "a finite number"),
    ("TrainConfig", "epochs", "ten", "auto or a whole number of at least 1"),
    ("TrainConfig", "options", 3, "a table"),
    ("TrainConfig", "precision", "fp16", "auto, fp32 or bf16. Did you mean bf16?"),
    ("TrainConfig", "save_every", 0, "auto or a whole number of at least 1"),
    ("TrainConfig", "weight_decay", -1.0, "auto or a number of at least 0"),
    ("TrainConfig", "seed", True, "a whole number from 0 to 4294967295"),
    ("DiscoverConfig", "classes", -1, "auto or a whole number of at least 0"),
    ("DiscoverConfig", "classes", "many", "auto or a whole number of at least 0"),
    ("DiscoverConfig", "mode", "both", "gcd or ncd"),
    ("DiscoverConfig", "epochs", 0, "auto or a whole number of at least 1"),
    ("DiscoverConfig", "epochs", 2.5, "auto or a whole number of at least 1"),
    ("DiscoverConfig", "batch_size", 3, "auto or a whole number of at least 4"),
    ("DiscoverConfig", "max_time", "soon", "a duration; write it as 45m or 2h"),
    ("ClassifyConfig", "baselines", "no", "true or false"),
    ("DiscoverConfig", "options", "queue_size", "a table"),
    ("DiscoverConfig", "val", 0.95, "auto or a number from 0 to 0.9"),
    ("DiscoverConfig", "max_bad", 1.5, "a number from 0 to 1"),
    ("DiscoverConfig", "workers", -1, "auto or a whole number of at least 0"),
    ("DiscoverConfig", "seed", 2**32, "a whole number from 0 to 4294967295"),
    ("TrainConfig", "lr_milestones", (170.0,), "a list of numbers from 0.001 to 0.999"),
]
"""Kind, setting, value, and what it is not."""


def test_a_setting_of_a_wrong_type_or_out_of_its_range_is_refused_by_its_name():
    """In a process of its own: in this one, type checks of the tests would come first."""
    code = (
        "from math import inf, nan\n"
        "from nearkin import config\n"
        "from nearkin.errors import UsageError\n"
        f"for kind, name, value, _ in {REFUSED}:\n"
        "    try: getattr(config, kind)(**{name: value})\n"
        "    except UsageError as error: print(error)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"{name} {as_typed(value)} is not {says}" for _, name, value, says in REFUSED
    ]
    with pytest.raises(UsageError, match="final_weight_decay changes one above 0"):
        TrainConfig(weight_decay=0.0, final_weight_decay=0.1)
    with pytest.raises(UsageError, match="lr_milestones and cosine_end"):
        TrainConfig(lr_milestones=[0.6], cosine_end=0.1)


def test_settings_may_be_numbers_and_arrays_of_numpy(tmp_path):
    given = TrainConfig(
        seed=np.int64(3), lr=np.float32(0.5), report=np.bool_(0), view_sizes=np.array([8, 16]),
        lr_milestones=[np.float64(0.5), np.float32(0.75)], known=np.array(["cat", "dog"]),
        options={"temperature": np.float32(0.5), "queue_size": np.int64(1024)},
    )  # fmt: skip
    same = TrainConfig(
        seed=3, lr=0.5, report=False, view_sizes=[8, 16], lr_milestones=[0.5, 0.75],
        known=["cat", "dog"], options={"temperature": 0.5, "queue_size": 1024},
    )  # fmt: skip
    assert given == same
    assert TrainConfig(known={*"dcba"}, lr_milestones=frozenset([0.75, 0.5])) == TrainConfig(
        known=[*"abcd"], lr_milestones=[0.5, 0.75]
    )
    assert to_toml(given, "data") == to_toml(same, "data")
    assert checked_options("moco", {"temperature": np.float32(0.5)}) == {"temperature": 0.5}
    for wrong, says in ((np.float64(3.5), "3.5"), (np.int64(-1), "-1"), (np.array([3]), "3")):
        with pytest.raises(UsageError, match=f"seed {says} is not a whole number"):
            TrainConfig(seed=wrong)


def test_a_report_is_written_unless_the_environment_says_false(monkeypatch):
    for text, written in (("false", False), ("true", True), ("", True)):
        monkeypatch.setenv("NEARKIN_REPORT", text)
        assert TrainConfig().report is written
    monkeypatch.setenv("NEARKIN_REPORT", "0")
    with pytest.raises(UsageError, match="NEARKIN_REPORT '0' is not true or false"):
        TrainConfig()


def test_every_setting_has_a_default_and_a_sentence():
    """The sentence stands below it, and is what `--help` says."""
    for kind in (TrainConfig, DiscoverConfig, ClassifyConfig, EmbedConfig):
        sentences = parameter_docs(kind)
        for name in vars(kind()):
            assert re.fullmatch(r"[A-Z`].*[^.]\.", sentences[name], re.DOTALL), name
            places = [title for title, names in GROUPS.items() if name in names]
            assert name == "options" or len(places) == 1, name


CHANGED = dict(
    labeled="known/ones", known=("cat", "dog"), classes=7, mode="ncd", encoder='runs/"a"'
)
CHANGED |= dict(allow_partial=True, method="rotnet", train_layers="last:2", epochs=200, seed=3)
CHANGED |= dict(max_time="2h", batch_size=64, val=0.0)
CHANGED |= dict(augment="ncl_cifar")
CHANGED |= dict(truth="data", copy_to="sorted", report=True, accept="runs/b", device="cpu")
CHANGED |= dict(devices=2, workers=2, cache="disk", scan="full", max_bad=0.5)
CHANGED |= dict(options={"queue_size": 64, "targets": "official"})


def test_the_command_of_a_run_has_no_settings_without_effect():
    config = TrainConfig(epochs=3, teacher_views=0, freeze_epochs=0)
    assert command("photos", config, Path()) == "nearkin train photos --epochs 3"
    switched = replace(config, epochs=4, grad_checkpointing=True)
    assert command("photos", DiscoverConfig(copy_to="sorted"), Path()) == "nearkin discover photos"
    assert command("photos", switched, Path()).endswith("photos --epochs 4 --grad-checkpointing")
    taught = command("photos", replace(config, method="seed", teacher="dinov2-small"), Path())
    assert taught.endswith("--teacher dinov2-small --teacher-views 0 --epochs 3")


def test_the_default_folder_is_a_free_one_or_of_the_newest_run_of_the_same_data(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for data in ("a/digits", "b/digits", "c/digits"):
        (tmp_path / data).mkdir(parents=True)
    runs = ["digits", "a/digits", str(tmp_path / "a" / "digits"), "digits", "b/digits"]
    for number, data in enumerate(runs, start=1):
        folder = tmp_path / "runs" / f"digits-moco{f'-{number}' * (number > 1)}"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(to_toml(TrainConfig(), data_name(data)))
    (folder.with_name("digits-moco-6")).write_text("a file")
    folder.with_name("digits-moco-7").mkdir()
    folder.with_name("digits-moco-7").joinpath("config.toml").write_text("data = ")

    def of(data, again):
        return run_folder(None, data, "moco", again=again).path.name.removeprefix("digits-moco-")

    everything = ("digits", "a/digits", Path("b/digits"), "c/digits")
    assert [of(data, again=True) for data in everything] == ["4", "3", "5", "8"]
    assert {of(data, again=False) for data in everything} == {"8"}


def test_the_newest_run_may_stand_behind_a_number_that_is_free_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b" / "digits").mkdir(parents=True)
    for name, data in (("", "digits"), ("-3", "digits"), ("-10", "b/digits"), ("-old", "digits")):
        folder = tmp_path / "runs" / f"digits-moco{name}"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(to_toml(TrainConfig(), data_name(data)))
    found = [run_folder(None, "digits", "moco", again=again).path.name for again in (True, False)]
    assert found == ["digits-moco-3", "digits-moco-2"]
    assert run_folder(None, "b/digits", "moco", again=True).path.name == "digits-moco-10"


def test_every_setting_of_a_discovery_survives_the_file(tmp_path):
    path, defaults = tmp_path / "config.toml", DiscoverConfig()  # from which all of them differ
    changed = {name for name, value in CHANGED.items() if getattr(defaults, name) != value}
    assert changed == {entry.name for entry in fields(DiscoverConfig)} - {TRUST}  # in no file
    for config in (defaults, DiscoverConfig(**CHANGED)):
        path.write_text(to_toml(config, "photos"), encoding="utf-8")
        read = read_toml(path, DiscoverConfig)
        assert read.pop("data") == "photos"
        assert DiscoverConfig(**read) == config


def test_a_file_is_read_as_settings_of_what_it_is_for(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('clases = 5\nmode = "ncd"\n')
    with pytest.raises(UsageError, match=r"unknown key clases\. Did you mean classes"):
        read_toml(path, DiscoverConfig)
    path.write_text('encoder = "runs/a"\n')
    assert read_toml(path, DiscoverConfig) == {"encoder": "runs/a"}
    path.write_text('accept = "runs/a"\n')
    with pytest.raises(UsageError, match="unknown key accept"):
        read_toml(path)
    path.write_text("lr = 0.1\n")
    with pytest.raises(UsageError, match="unknown key lr"):
        read_toml(path, DiscoverConfig)


def test_every_setting_that_contradicts_the_discovery_that_is_continued_is_named():
    with pytest.raises(UsageError) as refused:
        continued(DiscoverConfig(**CHANGED), DiscoverConfig())
    named = set(re.findall(r"[(;] ?([a-z_]+) [^;]* became", str(refused.value)))
    # They do not touch the result.
    free = {"devices", "workers", "max_bad", "copy_to", "report", "trust_remote_code"}
    settings = {entry.name for entry in fields(DiscoverConfig)} - free - {"options"}
    assert named == settings | {*CHANGED["options"]}


def test_a_discovery_goes_on_with_what_was_left_to_auto_and_may_load_images_otherwise():
    stored = DiscoverConfig(**CHANGED)
    left = dict.fromkeys(("classes", "epochs"), "auto") | {"max_time": ""}
    free = dict(devices=1, workers=1, max_bad=0.2, copy_to="other")
    config = replace(stored, **left, options={"queue_size": 64}, **free)
    assert continued(config, stored) == replace(stored, **free)
    assert continued(replace(config, copy_to=""), stored).copy_to == stored.copy_to == "sorted"


def test_a_run_says_of_which_kind_it_is(tmp_path):
    folder = RunFolder(tmp_path)
    for kind, settings in KINDS.items():
        folder.write_settings(settings(), "digits")
        assert folder.kind == kind
        assert folder.any_settings() == (settings(), "digits")
        if kind != "training":
            with pytest.raises(UsageError, match=f"is a {kind}; look at its report.html"):
                folder.settings()
            with pytest.raises(
                UsageError, match=rf"of `nearkin\.{settings.verb}`, not of `nearkin"
            ):
                read_toml(folder.config, TrainConfig)
    folder.config.write_text('data = "digits"\n')
    with pytest.raises(UsageError, match="names no kind of run"):
        folder.any_settings()


def test_a_damaged_summary_is_named_with_what_to_do(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.read_summary() == {}
    for damaged in ("{", "[]", "\0"):
        folder.summary.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"summary\.json cannot be used .*resume=True"):
            folder.read_summary()
