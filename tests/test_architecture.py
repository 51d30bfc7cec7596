"""What the linters cannot say about the structure of the package."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nearkin
from nearkin.method import Method
from nearkin.methods import FACTS, METHODS

PACKAGE = Path(nearkin.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def relative(path):
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_module_is_a_drawer(path):
    assert path.stem not in {"utils", "util", "misc", "helpers", "common", "manager", "base"}


def test_each_method_has_a_module_of_its_own_and_no_method_inherits_from_another():
    modules = [cls.__module__ for cls in METHODS.values()]
    assert len(set(modules)) == len(modules)
    for cls in METHODS.values():
        assert Method in cls.__bases__


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_configured_by_keywords_with_defaults_types_and_a_sentence_each(name):
    cls = METHODS[name]
    parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]
    documented = inspect.getdoc(cls)
    for parameter in parameters:
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.annotation is not parameter.empty
        assert f"\n    {parameter.name}: " in documented
        given_by_the_run = parameter.name in FACTS
        assert given_by_the_run or parameter.default is not parameter.empty


FORBIDDEN_CALLS = {"eval", "exec", "print"}
UNSAFE = {"torch.hub", "torch.jit.load", "os.system", "yaml.load"}


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_nothing_is_evaluated_or_unpickled(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in FORBIDDEN_CALLS or (name == "print" and path.parent.stem == "cli")
            assert name not in UNSAFE
            assert not name.endswith(".extractall")
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert keywords.get("allow_pickle", "False") == "False"
            names_one = name == "app.install_completion"  # such as bash; starts none
            assert names_one or keywords.get("shell", "False") == "False"
            if name == "torch.load":
                assert keywords["weights_only"] == "True"


def python(code):
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_importing_the_command_line_loads_nothing_heavy():
    heavy = [
        "torch",
        "numpy",
        "torchvision",
        "timm",
        "sklearn",
        "scipy",
        "matplotlib",
        "pyarrow",
        "PIL",
    ]
    done = python(f"import sys, nearkin.cli; print([m for m in {heavy!r} if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_the_package_offers_the_verbs_of_the_command_line_without_loading_torch_first():
    done = python("import sys, nearkin; assert 'torch' not in sys.modules; print(nearkin.train)")
    assert done.returncode == 0, done.stderr
    assert "function train" in done.stdout


def test_a_network_of_our_own_imports_no_library_of_networks():
    """They take seconds at every start."""
    done = python(
        "import sys; from nearkin.networks.backbone import build_backbone, with_channels; "
        "build_backbone(with_channels('small', 3), 32); "
        "print({'timm', 'torchvision'} & set(sys.modules))"
    )
    assert done.stdout.strip() == "set()", done.stderr
