"""What travels between the layers: a `Batch` goes in, a `Step` comes out; and checks of shapes."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from itertools import chain
from types import NoneType, UnionType
from typing import Final, Generic, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from jaxtyping import Float, Int
from torch import Tensor

Memo = TypeVar("Memo")
"""What a method's forward pass hands to its commit: tensors without gradient, or None."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

Encoded = tuple[Tensor, ...]
"""What a method's networks give: tensors with one row per image, in the order of the batch."""

UNLABELED: Final = -1
"""The label of an image whose class is not known."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Several views of the same images, and which images they are.

    Views may differ in size (multi-crop), never in their number of images.
    """

    views: tuple[Float[Tensor, "batch channel _ _"], ...]
    index: Int[Tensor, " batch"]
    """Position of each image in its data set."""
    label: Int[Tensor, " batch"]
    """Class of each image, or `UNLABELED`."""
    teacher: tuple[Float[Tensor, "batch _"], ...] = ()
    """A teacher's features of each view, unit vectors, for a method that learns from one."""

    def to(self, device: torch.device | str) -> "Batch":
        """Return the same batch on another device."""
        return self.map(lambda x: x.to(device, non_blocking=True))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch of what a function makes of each tensor, such as a part of its rows."""
        return Batch(
            tuple(map(function, self.views)),
            function(self.index),
            function(self.label),
            tuple(map(function, self.teacher)),
        )


@dataclass(frozen=True, slots=True)
class Step(Generic[Memo]):
    """Result of a forward pass: a loss, and a memo for `commit`."""

    loss: Float[Tensor, ""]
    memo: Memo
    """What `commit` writes to the memories; the same on every rank."""
    metrics: Mapping[str, Float[Tensor, ""]] = field(default_factory=dict[str, Tensor])


def checked(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Refuse what contradicts the annotations of a function that are tensors, or tensors or None.

    That is another type, such as an array, another kind of number, or another shape.

    Raises:
        ValueError: Naming the argument, what it is and what is expected.
    """
    names = list(inspect.signature(function).parameters)
    annotations = {name: _tensor_type(x) for name, x in function.__annotations__.items()}

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        sizes: dict[str, int | torch.SymInt] = {}  # symbols while a graph is made
        for name, value in chain(zip(names, args, strict=False), kwargs.items()):
            expected = annotations.get(name)
            reason = _mismatch(value, *expected, sizes) if expected else ""
            if reason:
                raise ValueError(f"{function.__name__}: {name} {reason}")
        return function(*args, **kwargs)

    return run


def _tensor_type(annotation: object) -> tuple[str, tuple[str, ...], bool] | None:
    """Return kind and dimensions of `Float[Tensor, "batch dim"]`, and whether it may be None."""
    is_union = get_origin(annotation) in (Union, UnionType)
    parts = get_args(annotation) if is_union else (annotation,)
    types = [part for part in parts if part is not NoneType]
    if len(types) != 1 or not hasattr(types[0], "dim_str"):
        return None
    return types[0].__name__.partition("[")[0], tuple(types[0].dim_str.split()), NoneType in parts


def _mismatch(
    x: object,
    kind: str,
    dims: tuple[str, ...],
    optional: bool,
    sizes: dict[str, int | torch.SymInt],
) -> str:
    """Return how a value differs from what is expected; `sizes` of dimensions are filled in."""
    if x is None and optional:
        return ""
    if not isinstance(x, Tensor):
        return f"is of type {type(x).__name__}, expected a tensor"
    actual = "Float" if x.is_floating_point() else "Bool" if x.dtype == torch.bool else "Int"
    if actual != kind:
        return f"has dtype {x.dtype}, expected {kind.lower()}"
    if dims and dims[0].startswith("*"):
        return ""
    fits = len(dims) == x.ndim and all(
        sizes.setdefault(dim, size) == size for dim, size in zip(dims, x.shape, strict=True)
    )
    if fits:
        return ""
    expected = ", ".join(f"{dim} = {sizes[dim]}" if dim in sizes else dim for dim in dims)
    return f"has shape {tuple(x.shape)}, expected ({expected})"
