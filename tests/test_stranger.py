"""What somebody does first: install the package, and use it in an empty folder.

The wheel is installed into an environment of its own, which finds what it depends on in this one.
No checkout is in reach: neither its files nor its documentation.
"""

import json
import re
import runpy
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import environment
from sklearn.datasets import load_sample_images

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.usefixtures("reports")]
SURPRISING = re.compile(r"Traceback|Warning|docs/|\.md\b|NoneType|\bnan\b|<[\w.]+ object at")
"""What no line shows: what only a programmer reads, or that an installed package does not have."""
PATH_OF_A_STRANGER = (
    "--help",
    "doctor",
    "check photos",
    "train photos --max-time 20s -o first",
    "evaluate first",
    "embed first photos -o vectors.parquet",
    "neighbors first photos/china/03.png",
    "duplicates photos --encoder first",
    "select vectors.parquet --num 4",
    "explore first -o page.html",
    "export first --format torch-export",
    "list methods",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the program and Python."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, ROOT], check=True)
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    others = sysconfig.get_paths(vars={"base": str(folder / "env")})["purelib"]
    Path(others, "others.pth").write_text(sysconfig.get_paths()["purelib"])
    (wheel,) = folder.glob("nearkin-*.whl")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
    return python.parent


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A folder with nothing but photographs in it: tiles of two that scikit-learn has."""
    folder = tmp_path_factory.mktemp("empty")
    for name, photograph in zip(("china", "flower"), load_sample_images().images, strict=True):
        (folder / "photos" / name).mkdir(parents=True)
        tiles = np.lib.stride_tricks.sliding_window_view(photograph, (96, 96, 3))[::55, ::55, 0]
        for number, tile in enumerate(tiles.reshape(-1, 96, 96, 3)):
            Image.fromarray(tile).save(folder / "photos" / name / f"{number:02}.png")
    return folder


def said(command, folder):
    """What a command has printed, which has ended well."""
    home = {"HOME": str(folder / "home"), "PYTHONPATH": "", "COLUMNS": "80"}
    env = environment(**home, XDG_CACHE_HOME=str(folder / "home" / "cache"))
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (command, done.stderr[-2000:])
    return done.stdout + done.stderr


def test_every_line_of_the_first_hour_is_understood_without_another_page(installed, empty):
    words = runpy.run_path(str(ROOT / "docs" / "words.py"))
    unusual = words["finders"](words["WORDS"])
    assert "site-packages/nearkin" in said(
        [installed / "python", "-c", "import nearkin; print(nearkin.__file__)"], empty
    )
    for command in PATH_OF_A_STRANGER:
        text = said([installed / "nearkin", *command.split()], empty)
        assert text.strip(), command
        assert not SURPRISING.search(text), (command, text)
        for finder, use in unusual.items():
            assert not finder.search(text), (command, use, text)
    assert (empty / "page.html").stat().st_size > 10_000


def test_the_demo_ends_with_a_page_and_says_where_it_is(installed, tmp_path):
    text = said([installed / "nearkin", "demo"], tmp_path)
    pages = re.findall(r"\S+report\.html", text)
    assert pages
    assert all((tmp_path / page).is_file() for page in pages)


def test_the_first_notebook_runs(installed, tmp_path):
    text = (ROOT / "docs/notebooks/1_train_and_look.ipynb").read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    (tmp_path / "notebook.py").write_text(re.sub(r"epochs=\d+", "epochs=1", code))
    said([installed / "python", "notebook.py"], tmp_path)
