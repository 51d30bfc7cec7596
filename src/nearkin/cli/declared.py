"""What a command declares, read from its file: to import it takes seconds, with torch."""

import ast
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Final, Literal, get_type_hints

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
    """A function that does nothing, with the parameters and the docstring of `imported(target)`.

    The defaults of its parameters are written out.
    """
    definition = _definition(target)
    parameters = [*_parameters(definition.args)]

    def declaration() -> None:
        pass

    declaration.__doc__ = ast.get_docstring(definition)
    declaration.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    declaration.__annotations__ = {each.name: each.annotation for each in parameters}
    declaration.__annotations__ = get_type_hints(declaration, TYPES, include_extras=True)
    return declaration


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


def _parameters(declared: ast.arguments) -> Iterator[Parameter]:
    required = [None] * (len(declared.args) - len(declared.defaults))
    defaults = [*required, *declared.defaults, *declared.kw_defaults]
    for each, default in zip([*declared.args, *declared.kwonlyargs], defaults, strict=True):
        if each.arg not in PYTHON:
            is_option = each in declared.kwonlyargs
            assert each.annotation is not None
            yield Parameter(
                each.arg,
                Parameter.KEYWORD_ONLY if is_option else Parameter.POSITIONAL_OR_KEYWORD,
                default=Parameter.empty if default is None else ast.literal_eval(default),
                annotation=ast.unparse(each.annotation),
            )
