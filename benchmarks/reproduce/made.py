"""What a row was made with: the machine, and the commit of the programs."""

import platform
import re
import subprocess
from pathlib import Path

import torch

from nearkin.run.data import machine


def cpu() -> str:
    """Return the name of the CPU and the instructions that torch uses of it."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"model name\s*: (.+)", info)
    instructions = machine(torch.device("cpu"))["instructions"]
    return f"{name[1] if name else platform.machine()}, {instructions}"


def commit() -> str:
    """Return the commit of the programs, with a + where their files differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[2]), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "benchmarks")
    return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)
