"""What a run is computed with: another machine goes on with it, but not to the bit."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from nearkin.distributed import device_name, world_size
from nearkin.tables import replace_text, usable
from nearkin.version import __version__


def machine(device: torch.device) -> dict[str, str | int]:
    """All that the bits of a result depend on, beside settings and data."""
    return {
        "nearkin": __version__,
        "torch": torch.__version__,
        "device": device_name(device),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "processes": world_size(),
    }


def note_machine(path: Path, device: torch.device, step: int) -> str:
    """Write down what a run is computed with from a step on.

    Args:
        path: A JSON file, a list with an entry for every change.
        device: Where it is computed.
        step: Steps that are done.

    Returns:
        What has changed since the last time, in one line; nothing if nothing has.
    """
    now = machine(device)
    before, changes = [], ""
    if path.exists():
        with usable(path, "remove it; it only notes what the run is computed with"):
            before = json.loads(path.read_text(encoding="utf-8"))
            changes = _changes(before[-1], now)
    if changes or not before:
        entries = [*before, {"after_step": step, **now}]
        replace_text(path, json.dumps(entries, indent=2) + "\n")
    return changes


def _changes(then: Mapping[str, str | int], now: Mapping[str, str | int]) -> str:
    names = [name for name in now if then.get(name) != now[name]]
    return "; ".join(f"{name} {then.get(name)} became {now[name]}" for name in names)
