"""What the linters cannot say about the structure of the package."""

import os
import subprocess
import sys
from pathlib import Path

import architecture
from PIL import Image

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


LIGHT = """
import sys
def absent(*heavy): assert not {*heavy} & {*sys.modules}, {*heavy} & {*sys.modules}
HEAVY = "torch numpy torchvision timm sklearn scipy matplotlib pyarrow PIL jaxtyping".split()
import nearkin, nearkin.cli as c, nearkin.config, nearkin.toml, nearkin.tables
absent(*HEAVY)
for end in ("-h", "--help-all", "--no-such", "--version"):
    for verb in ([], *([verb] for group in c.app.COMMANDS.values() for verb in group)):
        c.main([*verb, end])
absent(*HEAVY)
import nearkin.report.page.html
absent("torch", "PIL")
import nearkin.networks.backbone as b
b.build_backbone(b.with_channels("small", 3), 32)
absent("timm", "torchvision")
"""
"""What is imported and done, and libraries that are not loaded by it: they take seconds."""


def test_what_needs_nothing_heavy_imports_nothing_heavy():
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", LIGHT]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr


def test_every_package_is_in_the_image_of_the_site(tmp_path):
    architecture.draw(tmp_path / "packages.png")
    with Image.open(tmp_path / "packages.png") as image:
        assert min(image.size) > 500
