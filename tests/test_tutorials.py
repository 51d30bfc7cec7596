"""The commands and blocks of the tutorials run, in the order in which they stand.

On a folder of four small classes, for an epoch where a page gives minutes. A command that needs
weights from the network, or that serves until it is stopped, is parsed instead of run.
"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from builders import digits
from nearkin_command import run as call
from PIL import Image

from nearkin.cli.app import application

ROOT = Path(__file__).parents[1]
# In this order: the first makes the run that the others use.
LONG = ["docs/augmentations", "docs/train", "README"]
PAGES = ["docs/quickstart", *(pytest.param(page, marks=pytest.mark.slow) for page in LONG)]
FENCE = re.compile(r"```(python|toml)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^    (nearkin [^#\n]*)", re.MULTILINE)
BLOCK = re.compile(f"{FENCE.pattern}|{COMMAND.pattern}", re.DOTALL | re.MULTILINE)
PARSED_ONLY = re.compile(r"dinov2|explore|demo")
SHORT = ["--epochs", "1"]
NAMES = ["cat", "dog", "emu", "fox"]


def blocks(page):
    """Yield the kind and the text of each block."""
    for found in BLOCK.finditer((ROOT / f"{page}.md").read_text(encoding="utf-8")):
        language, fenced, command = found.groups()
        yield (language, fenced) if language else ("command", command.strip())


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder with what the pages name: photos/, new-photos/ and known/ with two of the classes."""
    folder = tmp_path_factory.mktemp("tutorial")
    images, labels = digits(90, classes=len(NAMES))
    for number, name in enumerate(NAMES):
        own = images[labels == number]
        for start, where in ((0, "photos"), (30, "new-photos"), (60, "known")):
            if where == "known" and number > 1:
                continue
            (folder / where / name).mkdir(parents=True)
            for k, pixels in enumerate(own[start : start + 30], start=1):
                Image.fromarray(pixels).resize((16, 16)).save(folder / where / name / f"{k}.png")
    return folder


@pytest.fixture(scope="module", autouse=True)
def in_photos(photos):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(photos)
        yield


def run(command):
    words = shlex.split(re.sub(r"--max-time ..m|--epochs \d+", "", command))[1:]
    if words[0] in ("train", "discover"):
        words += ["--device", "cpu", "--workers", "0", *SHORT]
    if PARSED_ONLY.search(command):
        application(words[0]).parse_args(words, exit_on_error=False, print_error=False)
    else:
        assert call(*words) == 0


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_tutorial_runs(page):
    some = list(blocks(page))
    assert some
    for kind, text in some:
        if kind == "toml":
            tomllib.loads(text)
            name = re.match(r"# ([\w.]+)", text)[1]
            Path(name).write_text(text, encoding="utf-8")
        elif kind == "python":
            exec(compile(text, f"{page}.md", "exec"), {"__name__": "page"})
        else:
            run(text)


def test_a_broken_command_is_seen():
    with pytest.raises(AssertionError):
        run("nearkin train photos/ --max-tme 10m")
