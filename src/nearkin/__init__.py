"""Self-supervised contrastive learning of images, and novel class discovery.

The commands of the command line are functions, with the same names and defaults:

    run = nearkin.train("photos/", method="simclr", epochs=100, temperature=0.2)
    run = nearkin.train("photos/", nearkin.TrainConfig(epochs=100))
    encoder = nearkin.load(run)

The parts work alone: `nearkin.objectives`, `nearkin.memory`, `nearkin.methods`,
`nearkin.transforms` and the other modules are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nearkin.version import __version__ as __version__

if TYPE_CHECKING:
    from nearkin import data as data
    from nearkin import errors as errors
    from nearkin import evaluation as evaluation
    from nearkin import memory as memory
    from nearkin import method as method
    from nearkin import methods as methods
    from nearkin import networks as networks
    from nearkin import objectives as objectives
    from nearkin import schema as schema
    from nearkin import sklearn as sklearn
    from nearkin import testing as testing
    from nearkin import training as training
    from nearkin import transforms as transforms
    from nearkin import types as types
    from nearkin.commands.audit import audit as audit
    from nearkin.commands.check import check as check
    from nearkin.commands.classify import classify as classify
    from nearkin.commands.compare import compare as compare
    from nearkin.commands.compare import rank as rank
    from nearkin.commands.demo import demo as demo
    from nearkin.commands.discover import discover as discover
    from nearkin.commands.doctor import doctor as doctor
    from nearkin.commands.duplicates import duplicates as duplicates
    from nearkin.commands.embed import embed as embed
    from nearkin.commands.embed import embed_run as embed_run
    from nearkin.commands.embed import embed_shards as embed_shards
    from nearkin.commands.evaluate import evaluate as evaluate
    from nearkin.commands.explore import explore as explore
    from nearkin.commands.export import export as export
    from nearkin.commands.lists import describe_method as describe_method
    from nearkin.commands.lists import list_backbones as list_backbones
    from nearkin.commands.lists import list_methods as list_methods
    from nearkin.commands.lists import list_pretrained as list_pretrained
    from nearkin.commands.lists import list_recipes as list_recipes
    from nearkin.commands.lists import list_settings as list_settings
    from nearkin.commands.neighbors import neighbors as neighbors
    from nearkin.commands.predict import predict as predict
    from nearkin.commands.select import select as select
    from nearkin.commands.train import train as train
    from nearkin.config import ClassifyConfig as ClassifyConfig
    from nearkin.config import DiscoverConfig as DiscoverConfig
    from nearkin.config import EmbedConfig as EmbedConfig
    from nearkin.config import TrainConfig as TrainConfig
    from nearkin.data.views import View as View
    from nearkin.encoders.encoder import load as load
    from nearkin.encoders.likeness import likeness as likeness
    from nearkin.method import Method as Method

_MODULES = (
    "data", "errors", "evaluation", "memory", "method", "methods", "networks", "objectives",
    "schema", "sklearn", "testing", "training", "transforms", "types",
)  # fmt: skip
_COMMANDS = (
    "audit", "check", "classify", "compare", "demo", "discover", "doctor", "duplicates", "embed",
    "evaluate", "explore", "export", "neighbors", "predict", "select", "train",
)  # fmt: skip
_LISTS = (
    "describe_method", "list_backbones", "list_methods", "list_pretrained", "list_recipes",
    "list_settings",
)  # fmt: skip
_CONFIGS = ("TrainConfig", "EmbedConfig", "DiscoverConfig", "ClassifyConfig")
_HOMES = {
    **{name: f"commands.{name}" for name in _COMMANDS},
    **dict.fromkeys(_LISTS, "commands.lists"),
    **dict.fromkeys(_CONFIGS, "config"),
    "Method": "method",
    "View": "data.views",
    "embed_run": "commands.embed",
    "embed_shards": "commands.embed",
    "likeness": "encoders.likeness",
    "load": "encoders.encoder",
    "rank": "commands.compare",
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
