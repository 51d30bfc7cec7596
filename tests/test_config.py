"""Settings survive their file, and a resumed run keeps its own."""

import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin.config import TrainConfig, continued, read_toml, seconds, to_toml
from nearkin.errors import UsageError

values = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)


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
