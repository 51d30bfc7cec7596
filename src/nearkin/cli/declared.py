"""What a command declares, read from its file: to import it takes seconds, with torch."""

import ast
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from nearkin import choices, config, schema
from nearkin.run.reporter import Reporter

TYPES: Final = {
    **vars(choices),
    **vars(config),
    **vars(schema),
    **{"Any": Any, "Literal": Literal, "Path": Path, "Reporter": Reporter, "Sequence": Sequence},
    **dict.fromkeys(("EncoderLike", "PathLike", "VectorsLike", "Embeddings"), str | Path),
}
"""Names that the types of words and options are written with; objects of Python are paths here."""
PYTHON: Final = ("settings", "backbone")
"""Parameters that are no words and no options."""


def imported(target: str) -> Callable[..., Any]:
    """The function `module:name` of `nearkin.commands`."""
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"nearkin.commands.{module}"), name)
    return function


def declared(target: str) -> Callable[..., Any]:
    """A function with the parameters and the docstring of `imported(target)` that does nothing."""
    definition = _definition(target)
    definition.decorator_list, definition.body, definition.returns = [], definition.body[:1], None
    parameters = definition.args
    options = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
    shown = [(each, default) for each, default in options if each.arg not in PYTHON]
    parameters.kwonlyargs = [each for each, _ in shown]
    parameters.kw_defaults = [default for _, default in shown]
    parameters.kwarg = None
    names: dict[str, Any] = {**TYPES}
    exec(compile(ast.Module([definition], []), target, "exec"), names)
    function: Callable[..., Any] = names[definition.name]
    return function


def summary(target: str) -> str:
    """The first line of a command's docstring."""
    return (ast.get_docstring(_definition(target)) or "").partition("\n")[0]


def _definition(target: str) -> ast.FunctionDef:
    module, _, name = target.partition(":")
    spec = find_spec(f"nearkin.commands.{module}")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return next(
        each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name
    )
