"""Options of a benchmark, each with the default of a quick run."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True)
class Option:
    """A flag of the command line. Its type is that of its default; a list takes several values."""

    name: str
    default: Any
    help: str
    quick: Any = None  # with --quick; None is the usual default
    choices: Sequence[str] | None = None


COMMON: Final = (
    Option("rounds", 7, "turns of each variant; six are the least with a 95 %% interval", quick=2),
    Option("threads", 0, "CPU threads; 0: as many as CPUs that may be used", quick=1),
    Option("data", "", "folder with the data sets, or images; made up if empty"),
    Option("output", Path(), "append the rows to this file of JSON lines"),
)
"""What every benchmark takes, whether it needs it or not."""


def parser_of(name: str, text: str, options: Sequence[Option]) -> ArgumentParser:
    """Make the parser of a benchmark."""
    parser = ArgumentParser(prog=f"python -m benchmarks {name}", description=text.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a size that takes seconds")
    for option in (*options, *COMMON):
        _add(parser, option)
    return parser


def _add(parser: ArgumentParser, option: Option) -> None:
    flags = [f"--{option.name.replace('_', '-')}"]
    flags += ["-o"] if option.name == "output" else []
    several = isinstance(option.default, list)
    kind = type(option.default[0] if several else option.default)
    parser.add_argument(
        *flags,
        type=kind,
        nargs="*" if several else None,
        default=option.default,
        choices=option.choices,
        help=f"{option.help} (%(default)s)",
    )


def parse(parser: ArgumentParser, options: Sequence[Option], words: Sequence[str]) -> Namespace:
    """Read the words of a command line; with `--quick`, other defaults hold."""
    if "--quick" in words:
        every = (*options, *COMMON)
        parser.set_defaults(**{each.name: each.quick for each in every if each.quick is not None})
    return parser.parse_args(words)


def folder_of(options: Namespace) -> Path:
    """Return the folder of `--data`, of a benchmark that nothing made up would do for."""
    if not options.data:
        raise SystemExit("name the folder of the data and of the runs of its encoders by --data")
    return Path(options.data)
