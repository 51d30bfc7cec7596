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


HEAVY = "torch numpy torchvision timm sklearn scipy matplotlib pyarrow PIL jaxtyping"
LIGHT = {
    "nearkin, nearkin.cli, nearkin.config, nearkin.toml, nearkin.tables": HEAVY,
    "nearkin.cli as c; [c.main([*verb, end]) for end in ('-h', '--help-all', '--no-such', '--version')"
    " for verb in ([], *([v] for group in c.app.COMMANDS.values() for v in group))]": HEAVY,
    "nearkin.report.page.html": "torch numpy PIL",
    "nearkin.networks.backbone as b; b.build_backbone(b.with_channels('small', 3), 32)":
        "timm torchvision",
}  # fmt: skip
"""What is imported, and perhaps done, and libraries that are not loaded by it: they take seconds."""


def test_what_needs_nothing_heavy_imports_nothing_heavy():
    for done, heavy in LIGHT.items():
        code = f"import sys, {done}; print({set(heavy.split())} & set(sys.modules))"
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
        command = [sys.executable, "-c", code]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert ran.stdout.splitlines()[-1] == "set()", (done, ran.stderr)
