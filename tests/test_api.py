"""The verbs of Python have names, types and values; arguments reach what they are for."""

import inspect
import os
import re
import subprocess
import sys
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from builders import pixels

import nearkin
from nearkin.commands.arguments import given
from nearkin.encoders.encoder import Encoder
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.result import Result
from nearkin.schema import types_of

PIXELS = pixels(24, 8)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out, settings = tmp_path_factory.mktemp("runs") / "run", {"epochs": 1, "batch_size": 8}
    settings |= {"backbone": "tiny", "report": False, "options": {"temperature": 0.3, "dim": 8}}
    return nearkin.train(PIXELS, output=out, **settings, dim=16).path


def test_options_by_name_and_in_a_dictionary_are_both_used(run):
    options = tomllib.loads((run / "config.toml").read_text())["options"]
    assert (options["temperature"], options["dim"]) == (0.3, 16)


def test_features_are_of_the_size_that_is_given(run):
    large, own = (nearkin.embed(run, PIXELS, image_size=size, workers=0) for size in (24, "auto"))
    assert np.abs(large.vectors - own.vectors).max() > 1e-3


def test_every_name_of_the_package_is_there_and_no_other():
    assert {"objectives", "memory", "methods", "transforms", "testing"} <= {*dir(nearkin)}
    assert all(hasattr(nearkin, name) for name in dir(nearkin))
    with pytest.raises(AttributeError, match="nearkin has no trian"):
        nearkin.trian  # noqa: B018


def test_every_module_is_there_before_another_is_used():
    names = "errors.UsageError, nearkin.method.Method, nearkin.schema.Dim, nearkin.types.Step"
    subprocess.run([sys.executable, "-c", f"import nearkin; nearkin.{names}"], check=True)


NAMES = Path(__file__).with_name("public_api.txt")
"""The public functions and classes; `PYTHONPATH=tests python tests/test_api.py` writes it anew."""


def called(function):
    """The parameters of a function with their defaults; types are written otherwise by each Python."""
    plain = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(function).parameters.values()
    ]
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.Signature(plain)))


def public_api():
    """A line per function, and per method and property of each class that is public or returned."""
    names = {name: getattr(nearkin, name) for name in dir(nearkin)}
    functions = {name: each for name, each in names.items() if inspect.isfunction(each)}
    classes = {each for each in names.values() if inspect.isclass(each)}
    for name, function in functions.items():
        yield f"nearkin.{name}{called(function)}"
        returned = get_type_hints(function)["return"]
        classes |= {each for each in get_args(returned) or [returned] if inspect.isclass(each)}
    for each in classes:
        if each.__module__.startswith("nearkin."):
            yield f"{each.__name__}{called(each)}"
            for name, member in inspect.getmembers(each):
                if name.startswith("_") or hasattr(torch.nn.Module, name):
                    continue
                if isinstance(member, property):
                    yield f"{each.__name__}.{name}"
                elif inspect.isfunction(member) or inspect.ismethod(member):
                    yield f"{each.__name__}.{name}{called(member)}"


def test_names_and_signatures_of_the_package_change_on_purpose():
    assert sorted(public_api()) == NAMES.read_text(encoding="utf-8").splitlines()


def test_the_reference_has_every_public_function_and_class():
    from nearkin import sklearn

    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    reference = set(re.findall(r"\w+", page))
    classes = inspect.getmembers(sklearn, inspect.isclass)
    own = {name for name, each in classes if each.__module__ == sklearn.__name__}
    for name in {*dir(nearkin), *own}:
        if not inspect.ismodule(getattr(nearkin, name, None)) and not name.startswith("_"):
            assert name in reference, name


def test_every_verb_is_a_function_with_typed_arguments_and_a_result_that_can_be_shown():
    from nearkin.cli.app import COMMANDS

    verbs = [name for group in COMMANDS.values() for name in group]
    assert len(verbs) == 18
    for verb in {*verbs} - {"list"}:
        function = getattr(nearkin, verb)
        hints = get_type_hints(function)
        assert hints.keys() == {*inspect.signature(function).parameters, "return"}, verb
        returned = get_args(hints["return"]) or [hints["return"]]
        of_list = [each for each in returned if inspect.isclass(each)]
        assert all(issubclass(each, (Result, Path, type(None))) for each in of_list), verb


def as_paths(kind):
    """A type whose objects of Python are paths, as the command line has them."""
    if kind in (os.PathLike[str], Encoder, Embeddings):
        return Path
    return (get_origin(kind), frozenset(map(as_paths, get_args(kind)))) if get_args(kind) else kind


def test_what_the_command_line_reads_of_a_command_is_what_it_declares():
    from nearkin.cli.app import COMMANDS
    from nearkin.cli.declared import PYTHON, declared, imported, summary

    for target in (each for group in COMMANDS.values() for each in group.values()):
        read, function = declared(target), imported(target)
        assert inspect.getdoc(function) == inspect.getdoc(read)
        assert summary(target) == inspect.getdoc(read).partition("\n")[0]
        types, parameters = types_of(function), inspect.signature(function).parameters
        seen = inspect.signature(read).parameters
        assert [*seen] == [name for name in parameters if name not in PYTHON], target
        for name, each in seen.items():
            assert each.kind == parameters[name].kind, (target, name)
            assert each.default == parameters[name].default, (target, name)
            assert as_paths(types[name]) == as_paths(types_of(read)[name]), (target, name)


def test_settings_come_as_an_object_as_keywords_and_as_both():
    config = nearkin.TrainConfig(epochs=3, known=["cat"], options={"temperature": 0.3})
    changed, network = given(nearkin.TrainConfig, config, {"epochs": 4, "lr": 1.0, "dim": 8})
    assert (changed.epochs, changed.lr, changed.known, network) == (4, 1.0, ("cat",), None)
    assert changed.options == {"temperature": 0.3, "dim": 8}
    span, names = timedelta(minutes=5), ["tench, Tinca tinca", "cat"]
    typed, _ = given(nearkin.TrainConfig, None, {"max_time": span, "known": names, "val": 0})
    assert (typed.max_time, typed.known) == (300.0, tuple(names))
    own = torch.nn.Identity()
    assert given(nearkin.TrainConfig, None, {"backbone": own, "val": 0.0})[1] is own
    with pytest.raises(UsageError, match=r"ClassifyConfig has no epocs\. Did you mean epochs\?"):
        given(nearkin.ClassifyConfig, None, {"epocs": 3})


def test_what_is_listed_for_people_is_there_as_values():
    assert "moco" in nearkin.list_methods()
    assert nearkin.describe_method("moco").startswith("# MoCo")
    assert "timm/resnet18" in nearkin.list_backbones("resnet18")
    assert "timm:resnet18.a1_in1k" in nearkin.list_pretrained("resnet18")
    with pytest.raises(UsageError, match="no name contains deepseek"):  # they cannot be loaded
        nearkin.list_pretrained("deepseek")
    assert "recipe:cifar10/moco" in nearkin.list_recipes()
    assert 'method = "moco"' in nearkin.list_settings("moco")
    assert nearkin.doctor().found["torch"] == torch.__version__.partition("+")[0]


if __name__ == "__main__":
    NAMES.write_text("\n".join([*sorted(public_api()), ""]), encoding="utf-8")
