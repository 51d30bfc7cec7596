"""The methods, one per module, and those of other modules and files.

To add one to the package, write its module and import it here.
"""

import inspect
from typing import Any, Literal, get_origin

from nearkin.config import TrainConfig
from nearkin.errors import UsageError
from nearkin.extensions import is_reference, load_reference, reference_to
from nearkin.method import Method
from nearkin.methods.barlow_twins import BarlowTwins as BarlowTwins
from nearkin.methods.byol import BYOL as BYOL
from nearkin.methods.dino import DINO as DINO
from nearkin.methods.feature_matching import FeatureMatching as FeatureMatching
from nearkin.methods.instdisc import InstDisc as InstDisc
from nearkin.methods.instdisc_parametric import InstDiscParametric as InstDiscParametric
from nearkin.methods.moco import MoCo as MoCo
from nearkin.methods.moco_end_to_end import MoCoEndToEnd as MoCoEndToEnd
from nearkin.methods.moco_memory_bank import MoCoMemoryBank as MoCoMemoryBank
from nearkin.methods.moco_v3 import MoCoV3 as MoCoV3
from nearkin.methods.ncl import NCL as NCL
from nearkin.methods.nnclr import NNCLR as NNCLR
from nearkin.methods.rotnet import RotNet as RotNet
from nearkin.methods.seed import SEED as SEED
from nearkin.methods.sigreg import SIGReg as SIGReg
from nearkin.methods.simclr import SimCLR as SimCLR
from nearkin.methods.simgcd import SimGCD as SimGCD
from nearkin.methods.simsiam import SimSiam as SimSiam
from nearkin.methods.supervised import Supervised as Supervised
from nearkin.methods.swav import SwAV as SwAV
from nearkin.methods.uno import UNO as UNO
from nearkin.methods.vicreg import VICReg as VICReg
from nearkin.schema import suggestion, types_of

METHODS: dict[str, type[Method[Any]]] = {
    cls.__module__.rpartition(".")[2]: cls
    for cls in Method.__subclasses__()
    if cls.__module__.startswith(f"{__name__}.")
}
"""The methods of the package by the names of their modules, which are imported above."""


def method_class(name: str) -> type[Method[Any]]:
    """The method of that name, or of a reference such as `my_method.py:MyMethod`.

    Raises:
        UsageError: If there is none, or it is no method.
    """
    if is_reference(name):
        return checked_class(load_reference(name, "method"), name)
    if name not in METHODS:
        if name.endswith(".py"):
            raise UsageError(f"method {name} has no class name; give {name}:NAME")
        raise UsageError(
            f"unknown method {name}.{suggestion(name, METHODS)} "
            f"`nearkin list methods` lists them: {', '.join(METHODS)}; your own is "
            "FILE.py:NAME or module:NAME"
        )
    return METHODS[name]


def method_name(method: str | type[Method[Any]]) -> str:
    """The name of a method that is given as a name or as a class, for `method_class`."""
    if isinstance(method, str):
        return method
    for name, cls in METHODS.items():
        if cls is method:
            return name
    return reference_to(checked_class(method, getattr(method, "__name__", repr(method))))


FACTS = ("self", "backbone", "num_images", "num_known_classes", "teacher_dim")
"""Arguments of a method's constructor that the run fills in; all others are options."""


def parameters(cls: type[Method[Any]]) -> dict[str, inspect.Parameter]:
    """The options of a method, from its constructor."""
    signature = inspect.signature(cls.__init__).parameters
    return {key: value for key, value in signature.items() if key not in FACTS}


def checked_class(cls: Any, name: str) -> type[Method[Any]]:
    """A class from outside of the package, if it is a method whose constructor is a schema.

    Raises:
        UsageError: Naming what is missing.
    """
    where = f"method {name}"
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise UsageError(f"{where} is no subclass of nearkin.method.Method; give one")
    if missing := sorted(cls.__abstractmethods__):
        raise UsageError(f"{where} does not define {', '.join(missing)}; define it")
    try:
        kinds = types_of(cls.__init__)
    except NameError as error:
        raise UsageError(f"{where}: a type of its constructor cannot be read: {error}") from error
    if "backbone" not in inspect.signature(cls.__init__).parameters:
        raise UsageError(f"{where}: its constructor does not take a backbone; add the argument")
    for key, parameter in parameters(cls).items():
        _check_option(where, key, parameter, kinds.get(key))
    return cls


def _check_option(where: str, key: str, parameter: inspect.Parameter, kind: Any) -> None:
    if key in TrainConfig.__dataclass_fields__:
        raise UsageError(f"{where}: option {key} has the name of a setting; rename it")
    if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
        raise UsageError(f"{where}: option {key} is not keyword-only; put it after a *")
    if parameter.default is inspect.Parameter.empty:
        raise UsageError(f"{where}: option {key} has no default; give it one")
    if not _is_option_type(kind):
        raise UsageError(
            f"{where}: option {key} has no type that a setting can have; annotate it as "
            "int, float, bool, str or Literal of texts"
        )


def _is_option_type(kind: Any) -> bool:
    plain = getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind
    return plain in (int, float, bool, str) or get_origin(plain) is Literal
