"""Self-supervised contrastive learning of images, and novel class discovery.

The commands of the command line are functions, with the same names and defaults:

    run = nearkin.train("photos/", method="simclr", epochs=100, temperature=0.2)
    run = nearkin.train("photos/", nearkin.TrainConfig(epochs=100))
    encoder = nearkin.load(run.path)

The parts work alone: `nearkin.objectives`, `nearkin.memory`, `nearkin.methods`,
`nearkin.transforms` and the other modules are imported when they are first used.

Importing it lets threads sleep while they wait for each other; see docs/reliability.md.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nearkin.version import __version__ as __version__

if TYPE_CHECKING:
    from nearkin import data as data
    from nearkin import evaluation as evaluation
    from nearkin import memory as memory
    from nearkin import methods as methods
    from nearkin import networks as networks
    from nearkin import objectives as objectives
    from nearkin import sklearn as sklearn
    from nearkin import testing as testing
    from nearkin import training as training
    from nearkin import transforms as transforms
    from nearkin.commands.assign import assign as assign
    from nearkin.commands.check import check as check
    from nearkin.commands.classify import classify as classify
    from nearkin.commands.compare import compare as compare
    from nearkin.commands.compare import rank as rank
    from nearkin.commands.demo import demo as demo
    from nearkin.commands.discover import discover as discover
    from nearkin.commands.duplicates import duplicates as duplicates
    from nearkin.commands.embed import embed as embed
    from nearkin.commands.embed import embed_parts as embed_parts
    from nearkin.commands.evaluate import evaluate as evaluate
    from nearkin.commands.explore import explore as explore
    from nearkin.commands.export import export as export
    from nearkin.commands.index import build_index as build_index
    from nearkin.commands.info import default_settings as default_settings
    from nearkin.commands.info import describe_method as describe_method
    from nearkin.commands.info import doctor as doctor
    from nearkin.commands.info import list_backbones as list_backbones
    from nearkin.commands.info import list_methods as list_methods
    from nearkin.commands.neighbors import neighbors as neighbors
    from nearkin.commands.replay import replay as replay
    from nearkin.commands.report import write_report as write_report
    from nearkin.commands.select import select as select
    from nearkin.commands.train import train as train
    from nearkin.config import ClassifyConfig as ClassifyConfig
    from nearkin.config import DiscoverConfig as DiscoverConfig
    from nearkin.config import EmbedConfig as EmbedConfig
    from nearkin.config import TrainConfig as TrainConfig
    from nearkin.data.views import View as View
    from nearkin.encoders.encoder import load as load
    from nearkin.method import Method as Method

# Threads that spin while they wait take the cores of other work. The libraries read these when
# they are loaded, here or in a process that is started from here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch, scikit-learn
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # numpy, scipy: 2^4 cycles, the least

_MODULES = (
    "data", "evaluation", "memory", "methods", "networks", "objectives", "sklearn", "testing",
    "training", "transforms",
)  # fmt: skip
_COMMANDS = (
    "assign", "check", "compare", "demo", "duplicates", "embed", "evaluate", "explore", "export",
    "neighbors", "replay", "select",
)  # fmt: skip
_HOMES = {name: f"commands.{name}" for name in _COMMANDS} | {
    "Method": "method",
    "TrainConfig": "config",
    "EmbedConfig": "config",
    "DiscoverConfig": "config",
    "ClassifyConfig": "config",
    "View": "data.views",
    "build_index": "commands.index",
    "classify": "commands.classify",
    "default_settings": "commands.info",
    "describe_method": "commands.info",
    "discover": "commands.discover",
    "doctor": "commands.info",
    "embed_parts": "commands.embed",
    "list_backbones": "commands.info",
    "list_methods": "commands.info",
    "load": "encoders.encoder",
    "rank": "commands.compare",
    "train": "commands.train",
    "write_report": "commands.report",
}


def __dir__() -> list[str]:
    """The names of the package, imported or not."""
    return sorted(["__version__", *_MODULES, *_HOMES])


def __getattr__(name: str) -> Any:
    """Import a function or module when it is first used: `import nearkin` loads no torch."""
    if name in _MODULES:
        return import_module(f"nearkin.{name}")
    if name not in _HOMES:
        raise AttributeError(f"nearkin has no {name}; it has {', '.join(__dir__())}")
    return getattr(import_module(f"nearkin.{_HOMES[name]}"), name)
