"""Self-supervised contrastive learning of images, and novel class discovery.

The verbs of the command line are functions here, with the same names and defaults:

    run = nearkin.train("photos/", method="simclr", epochs=100)
    encoder = nearkin.load(run.path)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nearkin.version import __version__ as __version__

if TYPE_CHECKING:
    from nearkin.api import discover as discover
    from nearkin.api import train as train
    from nearkin.commands.assign import assign as assign
    from nearkin.commands.check import check as check
    from nearkin.commands.demo import demo as demo
    from nearkin.commands.embed import embed as embed
    from nearkin.commands.embed import embed_parts as embed_parts
    from nearkin.commands.evaluate import evaluate as evaluate
    from nearkin.commands.explore import explore as explore
    from nearkin.commands.neighbors import neighbors as neighbors
    from nearkin.evaluation.encoder import load as load

_HOME = {
    "assign": "commands.assign",
    "check": "commands.check",
    "demo": "commands.demo",
    "discover": "api",
    "embed": "commands.embed",
    "embed_parts": "commands.embed",
    "evaluate": "commands.evaluate",
    "explore": "commands.explore",
    "load": "evaluation.encoder",
    "neighbors": "commands.neighbors",
    "train": "api",
}


def __dir__() -> list[str]:
    """What the package offers, imported or not."""
    return ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    """Import a verb when it is first used: torch takes a second that `--help` should not."""
    if name not in _HOME:
        raise AttributeError(f"nearkin has no {name}; it has {', '.join(_HOME)}")
    return getattr(import_module(f"nearkin.{_HOME[name]}"), name)
