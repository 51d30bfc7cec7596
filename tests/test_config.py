"""Settings survive their file, and a resumed run keeps its own."""

import re
import tomllib
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nearkin.config import TrainConfig, continued, read_toml, seconds, to_toml
from nearkin.errors import UsageError

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
    path.write_text(to_toml(config, 'pictures "of" C:\\cats\n'), encoding="utf-8")
    settings = read_toml(path)
    assert settings.pop("data") == 'pictures "of" C:\\cats\n'
    assert TrainConfig(**settings) == config


@pytest.mark.parametrize("content", ["epochs = ", "epochs = 1\nepochs = 2\n", "\0", "[options"])
def test_files_that_are_not_toml_are_refused(tmp_path, content):
    path = tmp_path / "config.toml"
    path.write_text(content)
    with pytest.raises(UsageError, match="cannot read the configuration"):
        read_toml(path)


def test_what_is_left_to_auto_is_taken_from_the_run_that_is_continued():
    stored = TrainConfig(epochs=12, lr=0.3, workers=4, options={"temperature": 0.1, "dim": 64})
    asked = TrainConfig(workers=1, options={"temperature": 0.1})
    assert continued(asked, stored) == replace(stored, workers=1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"epochs": 13}, "--epochs 12 became 13"),
        ({"seed": 1}, "--seed 0 became 1"),
        ({"options": {"temperature": 0.2}}, "'temperature': 0.2"),
    ],
)
def test_what_contradicts_the_run_that_is_continued_is_named(changes, says):
    stored = TrainConfig(epochs=12, options={"temperature": 0.1})
    with pytest.raises(UsageError, match=says):
        continued(TrainConfig(**changes), stored)


@pytest.mark.parametrize("duration", ["", "0m", "-3m", "3 weeks", "m"])
def test_durations_that_are_none_are_refused(duration):
    with pytest.raises(UsageError, match="not a duration"):
        seconds(duration)


@pytest.mark.parametrize("drops", ["", "0.6", ".6", "0.6,0.8", "0.33333, 0.66667"])
def test_drops_are_shares_of_the_training(drops):
    assert TrainConfig(drops=drops).drops == drops


@pytest.mark.parametrize("drops", ["0.6,", "0.6 0.8", "1.2", "-0.5", "120", "half", "nan", ","])
def test_drops_that_are_no_shares_are_refused(drops):
    with pytest.raises(UsageError, match=r"--drops .* write them as 0\.6,0\.8"):
        TrainConfig(drops=drops)


def test_a_rate_falls_in_one_way_only():
    with pytest.raises(UsageError, match="--drops and --cosine-end"):
        TrainConfig(drops="0.6", cosine_end=0.1)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"warmup_start": 1.5}, "--warmup-start 1.5 is not from 0 to 1"),
        ({"cosine_end": -0.1}, "--cosine-end -0.1 is not from 0 to 1"),
        ({"lars_eta": 0.0}, "--lars-eta 0.0 is not from"),
        ({"lr": float("inf")}, "--lr inf is not from"),
        ({"lr": float("nan")}, "--lr nan is not from"),
    ],
)
def test_a_number_out_of_its_range_is_refused(setting, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        TrainConfig(**setting)
