"""Self-supervised contrastive learning of images, and discovery of the classes nobody named.

The verbs of the command line are functions here, with the same names and defaults:

    run = nearkin.train("photos/", method="simclr", epochs=100)
    encoder = nearkin.load(run.path)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nearkin.version import __version__ as __version__

if TYPE_CHECKING:
    from nearkin.runs.check import check as check
    from nearkin.runs.demo import demo as demo
    from nearkin.runs.discovery.assign import assign as assign
    from nearkin.runs.evaluation.encoder import load as load
    from nearkin.runs.evaluation.evaluate import evaluate as evaluate
    from nearkin.runs.evaluation.search import neighbors as neighbors
    from nearkin.runs.evaluation.shards import embed as embed
    from nearkin.runs.explore import explore as explore
    from nearkin.runs.python import discover as discover
    from nearkin.runs.python import train as train

_HOME = {
    "assign": "discovery.assign",
    "check": "check",
    "demo": "demo",
    "discover": "python",
    "embed": "evaluation.shards",
    "evaluate": "evaluation.evaluate",
    "explore": "explore",
    "load": "evaluation.encoder",
    "neighbors": "evaluation.search",
    "train": "python",
}


def __dir__() -> list[str]:
    """What the package offers, imported or not."""
    return ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    """Import a verb when it is first used: torch takes a second that `--help` should not."""
    if name not in _HOME:
        raise AttributeError(f"nearkin has no {name}; it has {', '.join(_HOME)}")
    return getattr(import_module(f"nearkin.runs.{_HOME[name]}"), name)
