"""What all commands share: the application, types of their parameters, and how they print."""

import json
import sys
from typing import Annotated, Any, Final

from cyclopts import App, Group, Parameter
from cyclopts.config import Env

from nearkin.config import VARIABLES
from nearkin.text import printable
from nearkin.version import __version__

HELP = """Self-supervised contrastive learning of images, and novel class discovery.

nearkin demo

nearkin train IMAGES --epochs 100

nearkin discover IMAGES --labeled SOME_CLASSES
"""
app = App(name="nearkin", version=__version__, help=HELP, config=Env(VARIABLES, command=False))

TITLES = ("Data", "Method", "Views", "Optimization", "Evaluation", "Machine", "Output")
GROUPS: Final = {title: Group(title, sort_key=place) for place, title in enumerate(TITLES)}

Flag = Annotated[bool, Parameter(negative="", group=GROUPS["Output"])]
ENCODER: Final = (
    "A run folder, an encoder.safetensors, or a name: dinov2-small, timm:NAME, torchvision:NAME, "
    "a folder of Hugging Face, or ARCHITECTURE@FILE."
)
Images = Annotated[
    str,
    Parameter(
        help="A folder, a CSV or Parquet table, a zip or tar, shards, an .npz, each also at s3:// "
        "or https://, a name such as digits, or FILE.py:NAME."
    ),
]


def is_only_process() -> bool:
    """Whether this process runs a command that takes one; of several, all but the first say so."""
    from nearkin.distributed import is_main_process

    if not is_main_process():
        print("this command takes one process; the first does it, this one ends", file=sys.stderr)
    return is_main_process()


def show(value: Any, as_json: bool, lines: list[str]) -> None:
    """Print a result: as JSON, or as lines for people, each of them one line whatever it names."""
    if as_json:
        print(json.dumps(value))
    else:
        print("\n".join(printable(line).replace("\n", r"\n") for line in lines))
