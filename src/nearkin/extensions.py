"""Methods, backbones, augmentations and image sources from outside of the package.

A setting names one as `FILE.py:NAME` or as `package.module:NAME`.
"""

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, Final

from nearkin.errors import UsageError
from nearkin.files import sha256
from nearkin.places import user_path
from nearkin.schema import suggestion

REFERENCE: Final = re.compile(
    r"(?!(?:timm|torchvision|transformers):)(?P<home>.*\.py|\w+(\.\w+)*):(?P<name>[^\W\d][\w.<>]*)"
)
"""`FILE.py:NAME` or `module:NAME`; not `timm:NAME`, which is an architecture of that library, nor
what has a number there, as `cuda:1`."""
_PASSED: dict[str, Any] = {}  # objects that were passed from Python, by their reference
_READ: dict[str, str] = {}  # SHA-256 of Python files as they were when imported, by path


def is_reference(text: str) -> bool:
    """Whether a setting names an object outside of the package."""
    return bool(REFERENCE.fullmatch(text))


def names_code(text: str) -> bool:
    """Whether a text is a reference, or begins with one, as `net.py:Net?in_chans=4` does."""
    return bool(REFERENCE.match(text))


def check_trusted(named: Mapping[str, object], file: Path, trust_remote_code: bool) -> None:
    """Refuse names that stand in a file, by setting, and would run code, unless it is trusted.

    The command line and Python may name any code. A file, which others may have written, may name
    parts of nearkin and of its libraries.
    """
    for setting, name in named.items():
        if trust_remote_code or setting in ("known", "ignore") or not isinstance(name, str):
            continue  # names of classes, and of a column, such as exif:Model
        if names_code(name) and name not in _PASSED:
            raise UsageError(
                f"{file} names code to run: {setting} is {name!r}; if you trust it, give "
                "--trust-remote-code"
            )


def label(reference: str) -> str:
    """The name of an object without its file or module; other names as they are."""
    match = REFERENCE.fullmatch(reference)
    return match["name"].rpartition(".")[2] if match else reference


def absolute(reference: str) -> str:
    """A reference that holds from any working directory."""
    match = REFERENCE.fullmatch(reference)
    if match and match["home"].endswith(".py"):
        return f"{user_path(match['home']).resolve()}:{match['name']}"
    return reference


def reference_to(thing: Any) -> str:
    """The reference of a class or function that was passed from Python.

    Objects of scripts, notebooks and function bodies have one that holds in this process only.
    """
    home, name = thing.__module__, thing.__qualname__
    file = getattr(sys.modules.get(home), "__file__", None)
    if home != "__main__" and "." not in home and "<" not in name and file:
        return absolute(f"{file}:{name}")
    reference = f"{home}:{name}"
    _PASSED[reference] = thing
    return reference


def load_reference(reference: str, kind: str) -> Any:
    """Import the object that a reference names."""
    if reference in _PASSED:
        return _PASSED[reference]
    home, _, name = reference.rpartition(":")
    where = f"{kind} {reference}"
    if home == "__main__" or "<" in name:
        main: Any = sys.modules["__main__"]
        if hasattr(main, name):  # a process that was started by the script
            return getattr(main, name)
        raise UsageError(
            f"{where} was passed from Python and is in no file; pass it again, as "
            f"{kind}={label(reference)} of nearkin.train"
        )
    thing: Any = _file(home, where) if home.endswith(".py") else _module(home, where)
    for part in name.split("."):
        if not hasattr(thing, part):
            public = [each for each in vars(thing) if not each.startswith("_")]
            hint = suggestion(part, public) or " Give the name of a class or function in it"
            raise UsageError(f"{where}: {home} has no {part}.{hint}")
        thing = getattr(thing, part)
    return thing


def _module(name: str, where: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # the command `nearkin` does not search it by itself
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and f"{name}.".startswith(f"{missing}."):
            raise UsageError(f"{where}: there is no module {missing}; install it") from error
        raise _failed(where, error) from error


def forget_edited() -> None:
    """Let files that were edited since they were imported be imported anew when named again.

    Modules that users have imported themselves stay as they are, as Python has it.
    """
    for file, read in _READ.items():
        with suppress(OSError):  # gone, or not to be read any more
            if sha256(path := Path(file)) != read:
                sys.modules.pop(_module_name(path), None)


def _module_name(path: Path) -> str:
    """The name of a file's module in every process; two files of one name have different ones."""
    return f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _file(text: str, where: str) -> ModuleType:
    """A Python file as a module, imported once however often a command names it."""
    path = user_path(text).resolve()
    for module in list(sys.modules.values()):
        if module.__name__ != "__main__" and getattr(module, "__file__", None) == str(path):
            return module
    if not path.is_file():
        raise UsageError(f"{where}: there is no file {path}; give the path of a Python file")
    name = _module_name(path)
    _READ[str(path)] = sha256(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as data classes and pickle expect
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for the modules beside it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(where, error) from error
    return module


def _failed(where: str, error: BaseException) -> UsageError:
    """One line on an import that failed: the error and the innermost line."""
    line = getattr(error, "lineno", None) or extract_tb(error.__traceback__)[-1].lineno
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    message = f"{type(error).__name__}: {' '.join(text.split())} (line {line})"
    return UsageError(f"{where} cannot be imported: {message}; mend it")


def source_of(thing: Any) -> dict[str, str]:
    """The file of an object from outside of the package and its SHA-256; {} if it has none.

    It is that of the file as it was imported, which may have been edited since.
    """
    if str(getattr(thing, "__module__", "")).partition(".")[0] == "nearkin":
        return {}
    file = None
    with suppress(TypeError, OSError):
        file = inspect.getsourcefile(thing)
    if file is None or not Path(file).is_file():  # a notebook, or typed by hand
        return {}
    return {"file": file, "sha256": _READ.get(file) or sha256(Path(file))}
