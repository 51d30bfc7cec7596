"""Which process this is of several that train together, whoever has started them."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nearkin.errors import UsageError

PORTS: Final = range(20_000, 30_000)
"""Where processes that SLURM has started meet, by the number of their job."""


@dataclass(frozen=True)
class Place:
    """Which process this is of several that were started to train together."""

    rank: int
    world: int
    local: int
    """The number of the process on its machine, and of its GPU."""


def place() -> Place | None:
    """What the environment says of this process; nothing if it was started alone."""
    env = {**os.environ, **from_slurm(os.environ)}
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank = int(env["RANK"])
    return Place(rank, int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", rank)))


def is_first() -> bool:
    """Whether this process is the one that writes and speaks."""
    here = place()
    return here is None or here.rank == 0


def num_processes(devices: int) -> int:
    """How many processes share a batch: those that there are, or as many as are asked for.

    Raises:
        UsageError: If both are given and differ.
    """
    here = place()
    if here is None:
        return devices
    if devices not in (1, here.world):
        raise UsageError(
            f"--devices {devices}, but {here.world} processes were started; leave --devices out"
        )
    return here.world


def num_local(devices: int) -> int:
    """How many of these processes share the processors that this one may use.

    Of those that `srun` has started, each has its own.
    """
    return devices if place() is None else int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def from_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would say of a process that `srun` has started with others, if it has.

    Nothing where torchrun has spoken: `srun` may have started it, once on each machine.
    """
    if "RANK" in env or int(env.get("SLURM_STEP_NUM_TASKS", 1)) == 1:
        return {}
    # n[001-004,7],m2 begins with n001
    first = re.sub(r"\[(\d+)[^]]*\]", r"\1", env["SLURM_STEP_NODELIST"], count=1)
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "MASTER_ADDR": first.partition(",")[0],
        "MASTER_PORT": str(PORTS[int(env["SLURM_JOB_ID"]) % len(PORTS)]),
    }
