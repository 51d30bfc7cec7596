"""What some tests need from outside: without it they are skipped, or fail where it is promised.

NEARKIN_REQUIRE lists, separated by commas, what a machine promises to have, so that a missing
browser is a failure there and not forty tests less:

    NEARKIN_REQUIRE=chromium,shared make test

A test says `@pytest.mark.needs("chromium")`, a module or a line within a test `need("chromium")`.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"
"""Real images beside the repository."""
STUDIES = ("a40ae3c", "7a60c5d")
"""Commits that have the programs of finished studies."""


def installed(*modules: str) -> bool:
    return all(find_spec(module) for module in modules)


def module(name: str, *more: str) -> tuple[Callable[[], bool], str]:
    return partial(installed, name, *more), f"{' and '.join([name, *more])} not installed"


def program(*names: str) -> tuple[Callable[[], bool], str]:
    return lambda: any(map(shutil.which, names)), f"no {' or '.join(names)} on the PATH"


def node_environment() -> dict[str, str]:
    """The environment of Node.js, which finds what npm has installed into this checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT / "node_modules"), os.environ.get("NODE_PATH")]))
    return {**os.environ, "NODE_PATH": path}


def package(name: str) -> tuple[Callable[[], bool], str]:
    """A package of npm: `npm install --no-save --ignore-scripts NAME`."""
    find = ["node", "-e", f"require.resolve('{name}')"]

    def present() -> bool:
        if shutil.which("node") is None:
            return False
        return subprocess.run(find, env=node_environment(), capture_output=True).returncode == 0

    return present, f"no Node.js with {name}; npm install --no-save --ignore-scripts {name}"


def history() -> bool:
    command = ["git", "rev-list", "--max-count=1", *STUDIES]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


THINGS: dict[str, tuple[Callable[[], bool], str]] = {
    "bash": program("bash"),
    "chromium": program("chromium"),
    "compiler": program("c++"),
    "cuda": (torch.cuda.is_available, "no CUDA device"),
    "firefox": program("firefox-esr", "firefox"),
    "history": (history, "no history in this clone"),
    "java": program("java"),
    "nbclient": module("nbclient", "ipykernel"),
    "onnxruntime-node": package("onnxruntime-node"),
    "s3": module("s3fs", "moto"),
    "shared": (SHARED.is_dir, "no ../shared/data beside the repository"),
    **{
        name: module(name)
        for name in (
            "accelerate", "aiohttp", "datasets", "imagecodecs", "lightly", "lightning",
            "openvino", "pandas", "pillow_heif", "playwright", "pyspark", "ray", "tensorboard",
            "trackio", "transformers", "wandb",
        )
    },
}  # fmt: skip
"""By name: whether it is here, and what is said where it is not."""

os.environ.setdefault("TESTS_REQUIRE", os.environ.pop("NEARKIN_REQUIRE", ""))
# Processes of xdist inherit the second name, and no command of a test the first.
PROMISED = frozenset(filter(None, os.environ["TESTS_REQUIRE"].split(",")))

if unknown := PROMISED - THINGS.keys():
    raise pytest.UsageError(f"NEARKIN_REQUIRE: {sorted(unknown)} are none of {sorted(THINGS)}")


def need(thing: str) -> None:
    """Skip the test or module that calls this if the thing is not here; fail if it is promised."""
    present, reason = THINGS[thing]
    if present():
        return
    if thing in PROMISED:
        pytest.fail(f"{reason}, and NEARKIN_REQUIRE promises it")
    pytest.skip(reason, allow_module_level=True)
