"""The entry to all benchmarks: `python -m benchmarks NAME`, or without a name to list them."""

import ast
import importlib
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.shared import rows
from benchmarks.shared.options import COMMON, parse, parser_of

PARTS: Final = {"__init__", "__main__", "__pycache__", "shared"}
"""What lies here and is no benchmark."""


def names() -> dict[str, str]:
    """Return the benchmarks, each with the first line of its docstring."""
    files = {path.stem: path for path in rows.HERE.glob("*.py")}
    files |= {path.parent.name: path for path in rows.HERE.glob("*/__init__.py")}
    texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    return {
        name: (ast.get_docstring(ast.parse(texts[name])) or "").split("\n")[0]
        for name in sorted(files)
        if name not in PARTS
    }


def measure(name: str, words: Sequence[str]) -> Iterator[rows.Row]:
    """Run a benchmark; yield its rows, and append them to a file if one is named."""
    module: Any = importlib.import_module(f"benchmarks.{name}")
    parser = parser_of(name, module.__doc__, module.OPTIONS)
    options = parse(parser, module.OPTIONS, words)
    prepare(options)
    for row in module.run(options):
        if options.output != Path():
            chosen = {key: value for key, value in vars(options).items() if key != "output"}
            rows.append(options.output, rows.record(name, row, chosen))
        yield row


def prepare(options: Namespace) -> None:
    """Set the threads of this process, and of those that it starts."""
    import torch

    from nearkin.distributed import available_cpus

    options.threads = options.threads or available_cpus()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)


def main(words: Sequence[str]) -> int:
    """List the benchmarks, or run one and print its rows."""
    known = names()
    if not words or words[0] not in known:
        common = ", ".join(f"--{option.name}" for option in COMMON)
        print(*(f"{name:14} {text}" for name, text in known.items()), sep="\n")
        print(f"\nAll of them take --quick, {common}; NAME --help has the others.")
        return 0 if not words or words[0] in ("-h", "--help") else 2
    name, *rest = words
    for row in measure(name, rest):
        print(row.line(), flush=True)
    print(", ".join(f"{key} {value}" for key, value in rows.made_with().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
