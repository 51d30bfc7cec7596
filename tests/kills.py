"""Kill runs with SIGKILL at random moments, resume them, and compare with an unbroken run.

    python tests/kills.py METHOD KILLS SEED FOLDER

Imports once and forks for every run, so that kills hit training and not the import. Prints a JSON
object: kills, resumes from after step 0, and the names of files that differ from the unbroken run's.
"""

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import matplotlib.pyplot  # noqa: F401  (imported before forking, as are the next two)
import numpy as np
import torch
import torch._dynamo

import nearkin.runs.train  # noqa: F401
from nearkin.cli import main
from nearkin.config import option
from nearkin.methods import METHODS
from nearkin.runs.options import method_parameters
from nearkin.training.checkpoint import latest

COMPARED = ("metrics.csv", "encoder.safetensors")


def arguments(method: str, data: Path, out: Path) -> list[str]:
    settings = "--epochs 30 --batch-size 16 --save-every 3 --evaluate-every 20 --backbone tiny -q"
    options = {
        "dino": "--num-prototypes 64 --freeze-until 0.2",
        "instdisc": "--num-noise 24",
        "moco": "--queue-size 32 --momentum 0.9",
        "moco_memory_bank": "--num-negatives 24",
        "ncl": "--known 0,1 --num-novel-classes 2 --threshold 0.5",
        "nnclr": "--support-size 32 --num-neighbors 2",
        "simgcd": "--known 0,1 --num-novel-classes 2",
        "supervised": "--known 0,1",
        "swav": "--num-prototypes 30 --queue-size 32 --queue-from 0.2 --freeze-until 0.2",
    }.get(method, "")
    if not METHODS[method].uses_labels:  # then what labels are for is only measures, and slow
        options += " --labels none"
    widths = {"dim", "hidden_dim", "predictor_dim"} & method_parameters(method).keys()
    narrow = [word for width in sorted(widths) for word in (option(width), "16")]
    return ["train", str(data), "--method", method, "-o", str(out), "--resume",
            *settings.split(), *options.split(), *narrow]  # fmt: skip


def start(method: str, data: Path, out: Path) -> int:
    """A run in a process of its own; returns its number."""
    child = os.fork()
    if child:
        return child
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os._exit(main(arguments(method, data, out)))


def finish(child: int) -> int:
    """Wait for a run and return its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def resumed_steps(out: Path) -> list[int]:
    log = out / "train.log"
    return [int(step) for step in re.findall(r"resuming after step (\d+)", log.read_text())]


def same_tensors(a: Path, b: Path) -> bool:
    one, other = (torch.load(path, weights_only=True) for path in (a, b))
    mine, theirs = one["method"], other["method"]
    slots = [
        tensor
        for state in (one, other)
        for entry in state["optimizer"]["state"].values()
        for tensor in entry.values()
    ]
    half = len(slots) // 2
    return (
        one["step"] == other["step"]
        and mine.keys() == theirs.keys()
        and all(torch.equal(mine[key], theirs[key]) for key in mine)
        and all(torch.equal(x, y) for x, y in zip(slots[:half], slots[half:], strict=True))
    )


def harness(method: str, kills: int, seed: int, folder: Path) -> dict[str, object]:
    rng = random.Random(seed)
    data = folder / "data.npz"
    pictures = np.random.default_rng(0).integers(0, 256, (90, 16, 16, 3), dtype=np.uint8)
    np.savez(data, x=pictures, y=np.arange(90) % 3)
    whole, broken = folder / f"{method}-whole", folder / f"{method}-broken"
    before = time.perf_counter()
    assert finish(start(method, data, whole)) == 0
    length = time.perf_counter() - before
    done, resumes = 0, list[int]()
    while done < kills:
        child = start(method, data, broken)
        time.sleep(rng.uniform(0, 0.3 * length))
        os.kill(child, signal.SIGKILL)
        code = finish(child)
        assert code in (0, -signal.SIGKILL), code
        if code == 0:  # it was faster: begin again, the kills so far count
            resumes += resumed_steps(broken)
            shutil.rmtree(broken)
        else:
            done += 1
    assert finish(start(method, data, broken)) == 0
    differing = [
        name for name in COMPARED if (whole / name).read_bytes() != (broken / name).read_bytes()
    ]
    last = [latest(out / "checkpoints") for out in (whole, broken)]
    differing += [] if same_tensors(*last) else ["checkpoint"]
    steps = resumes + resumed_steps(broken)
    return {"kills": done, "resumes": len(steps), "steps": steps, "differing": differing}


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, kills, seed, folder = sys.argv[1:]
    print(json.dumps(harness(name, int(kills), int(seed), Path(folder))))
