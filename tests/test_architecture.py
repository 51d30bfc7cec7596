"""What the linters cannot say about the structure of the package."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import nearkin
from nearkin.method import Method
from nearkin.methods import METHODS

PACKAGE = Path(nearkin.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_no_module_is_a_drawer():
    drawers = {"utils", "util", "misc", "helpers", "common", "manager", "base"}
    assert not [path for path in MODULES if path.stem in drawers]


def test_each_method_has_a_module_of_its_own_and_no_method_inherits_from_another():
    modules = [cls.__module__ for cls in METHODS.values()]
    assert len(set(modules)) == len(modules)
    for cls in METHODS.values():
        assert Method in cls.__bases__


FORBIDDEN_CALLS = {"eval", "exec", "print"}
UNSAFE = {"torch.hub", "torch.jit.load", "os.system", "yaml.load"}


def is_safe(call, path):
    """Whether a call can neither evaluate nor unpickle what a file says, nor print past the log."""
    name = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return (
        (name not in FORBIDDEN_CALLS or (name == "print" and path.parent.stem == "cli"))
        and name not in UNSAFE
        and not name.endswith(".extractall")
        and given.get("allow_pickle", "False") == "False"
        # The completion of a shell names one, such as bash, and starts none.
        and (name == "app.install_completion" or given.get("shell", "False") == "False")
        and (name != "torch.load" or given.get("weights_only") == "True")
    )


def test_nothing_is_evaluated_or_unpickled():
    calls = [
        (path, node)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    assert len(calls) > len(MODULES)
    assert not [f"{path}:{call.lineno}" for path, call in calls if not is_safe(call, path)]


def python(code):
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_importing_the_command_line_loads_nothing_heavy():
    heavy = {"torch", "numpy", "torchvision", "timm", "sklearn", "scipy", "matplotlib", "pyarrow"}
    done = python(f"import sys, nearkin.cli; print({heavy | {'PIL'}} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


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
