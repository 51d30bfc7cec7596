"""Carry an encoder in small files: its weights in bfloat16, in parts of at most 15 MiB.

    python benchmarks/carry_encoder.py cut RUN/encoder.safetensors PREFIX
    python benchmarks/carry_encoder.py join PREFIX encoder.safetensors

The first writes PREFIX.0, PREFIX.1 and so on, the second an encoder in float32 again.
A weight loses 16 bits of 32: measures of the joined encoder are those of the run but for rounding.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load, save, save_file

PART = 15 * 2**20


def cut(source: Path, prefix: Path) -> list[Path]:
    """Write the parts of an encoder; return their paths."""
    with safe_open(source, "pt") as file:
        details = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    small = {
        name: weight.bfloat16() if weight.dtype == torch.float32 else weight
        for name, weight in weights.items()
    }
    content = save(small, details)
    parts = []
    for number, start in enumerate(range(0, len(content), PART)):
        parts.append(prefix.with_name(f"{prefix.name}.{number}"))
        parts[-1].write_bytes(content[start : start + PART])
    return parts


def join(prefix: Path, target: Path) -> None:
    """Write the encoder that was cut into these parts."""
    count = len(list(prefix.parent.glob(f"{prefix.name}.*")))
    content = b"".join(
        prefix.with_name(f"{prefix.name}.{number}").read_bytes() for number in range(count)
    )
    weights = {
        name: weight.float() if weight.dtype == torch.bfloat16 else weight
        for name, weight in load(content).items()
    }
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    save_file(weights, target, header.get("__metadata__"))


def main() -> None:
    """Cut or join."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", choices=("cut", "join"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    if options.what == "cut":
        print(*cut(options.source, options.target), sep="\n")
    else:
        join(options.source, options.target)


if __name__ == "__main__":
    main()
