"""The verbs of Python have names, types and values; arguments reach what they are for."""

import inspect
import subprocess
import sys
import tomllib
from types import UnionType
from typing import Any, Union, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from builders import pixels

import nearkin
from nearkin.commands.settings import given
from nearkin.errors import UsageError
from nearkin.schema import types_of

PIXELS = pixels(24, 8)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out, settings = tmp_path_factory.mktemp("runs") / "run", {"epochs": 1, "batch_size": 8}
    settings |= {"backbone": "tiny", "report": False, "options": {"temperature": 0.3, "dim": 8}}
    return nearkin.train(PIXELS, out=out, **settings, dim=16).path


def test_options_by_name_and_in_a_dictionary_are_both_used(run):
    options = tomllib.loads((run / "config.toml").read_text())["options"]
    assert (options["temperature"], options["dim"]) == (0.3, 16)


def test_features_are_of_the_size_that_is_given(run):
    large, own = (nearkin.embed(run, PIXELS, image_size=size, workers=0) for size in (24, "auto"))
    assert np.abs(large.vectors - own.vectors).max() > 1e-3


def test_every_name_of_the_package_is_there_and_importing_it_loads_no_torch():
    program = "import sys, nearkin; assert 'torch' not in sys.modules; " + "".join(
        f"nearkin.{name}; " for name in dir(nearkin)
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert {"objectives", "memory", "methods", "transforms", "testing"} <= {*dir(nearkin)}
    with pytest.raises(AttributeError, match="nearkin has no trian"):
        nearkin.trian  # noqa: B018


OTHERWISE = {  # modules of the package have the names of these verbs
    "index": "build_index",
    "report": "write_report",
    "methods": "list_methods",
    "backbones": "list_backbones",
    "config": "default_settings",
}


def test_every_verb_is_a_function_with_typed_arguments_and_one_type_of_result():
    from nearkin.cli.app import COMMANDS

    verbs = [name for group in COMMANDS.values() for name in group]
    assert {"train", "embed", "doctor", *OTHERWISE} <= set(verbs)
    for verb in verbs:
        function = getattr(nearkin, OTHERWISE.get(verb, verb))
        hints = get_type_hints(function)
        signature = inspect.signature(function)
        assert hints.keys() == {*signature.parameters, "return"}, verb
        returned = hints["return"]
        assert returned is not Any, verb
        assert get_origin(returned) not in (Union, UnionType), verb


def test_what_the_command_line_reads_of_a_command_is_what_it_declares():
    from nearkin.cli.app import COMMANDS
    from nearkin.cli.declared import PYTHON, declared, imported, summary

    for target in (each for group in COMMANDS.values() for each in group.values()):
        read, function = declared(target), imported(target)
        assert inspect.getdoc(function) == read.__doc__
        assert summary(target) == read.__doc__.partition("\n")[0]
        types, parameters = types_of(function), inspect.signature(function).parameters
        seen = inspect.signature(read).parameters
        assert [*seen] == [name for name in parameters if name not in PYTHON], target
        for name, each in seen.items():
            assert each.kind == parameters[name].kind, (target, name)
            assert each.default == parameters[name].default, (target, name)
            assert each.annotation == types_of(read)[name] == types[name], (target, name)


def test_settings_come_as_an_object_as_keywords_and_as_both():
    config = nearkin.TrainConfig(epochs=3, known=["cat"], options={"temperature": 0.3})
    changed, network = given(nearkin.TrainConfig, config, {"epochs": 4, "lr": 1.0, "dim": 8})
    assert (changed.epochs, changed.lr, changed.known, network) == (4, 1.0, ("cat",), None)
    assert changed.options == {"temperature": 0.3, "dim": 8}
    own = torch.nn.Identity()
    assert given(nearkin.TrainConfig, None, {"backbone": own, "val": 0.0})[1] is own
    with pytest.raises(UsageError, match=r"ClassifyConfig has no epocs\. Did you mean epochs\?"):
        given(nearkin.ClassifyConfig, None, {"epocs": 3})


def test_what_is_listed_for_people_is_there_as_values():
    assert "moco" in nearkin.list_methods()
    assert nearkin.describe_method("moco").startswith("# MoCo")
    assert "timm/resnet18" in nearkin.list_backbones("resnet18")
    assert "timm:resnet18.a1_in1k" in nearkin.list_backbones("resnet18", pretrained=True)
    assert 'method = "moco"' in nearkin.default_settings("moco")
    assert nearkin.doctor()["torch"] == torch.__version__.partition("+")[0]
