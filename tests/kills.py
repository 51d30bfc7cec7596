"""Kill runs with SIGKILL, at random moments and at chosen ones, resume them, and compare.

Imports all at first and forks for every run, so that kills hit the run and not the import.
`tests/faults.py` does this by the thousand.
"""

import itertools
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory

import jaxtyping
import matplotlib.pyplot  # noqa: F401  (imported before forking, as are the next seven)
import numpy as np
import processes
import pyarrow.parquet  # noqa: F401
import sklearn.linear_model
import sklearn.manifold
import sklearn.metrics  # noqa: F401
import timm.optim  # noqa: F401
import torch
import torch._dynamo
from builders import write_network
from small import same

import nearkin.commands.train  # noqa: F401
from nearkin.cli import main
from nearkin.files import PARTIAL
from nearkin.methods import METHODS, parameters
from nearkin.run.folder import RunFolder
from nearkin.schema import option
from nearkin.training.checkpoint import latest

PICTURES, BATCH, EPOCHS, SAVE_EVERY = 32, 8, 5, 2
PER_EPOCH = PICTURES // BATCH
TOTAL = EPOCHS * PER_EPOCH
RANDOM = "at random"
PATIENCE = 600
"""Seconds after which a run counts as hanging, and ends by SIGALRM."""
OWN = {getattr(RunFolder(Path()), name).name for name in ("lock", "marker", "log")}
"""Files that tell of processes and times."""


@dataclass(frozen=True)
class Aim:
    """A moment of a run: a call of `at` within a call of `within`, the first one or later.

    The kill comes before or after that call, or once half of what is written to the file that it
    opens has been written.
    """

    within: str
    at: str
    where: str
    counts: Callable[..., bool] = lambda *_: True
    """Whether a call of `within` counts, by its arguments."""
    often: bool = True
    """Whether there are many such calls in a run; then the second or third is meant."""


def in_epoch(position: int) -> Callable[..., bool]:
    """Whether progress is that of an epoch's batch at this position."""
    return lambda _method, _memo, progress: round(progress * TOTAL) % PER_EPOCH == position


COMMIT = "METHOD.commit"
SAVE, SEALED = "nearkin.training.checkpoint.save", "nearkin.files.write_sealed"
FLUSH, LOOK = (
    "nearkin.run.csv_logger.CSVLogger.flush",
    "nearkin.training.health.Monitor.evaluate",
)
HEALTH, TRAIN = "nearkin.training.health.health", "nearkin.training.session"
ENCODER, EVALUATE = f"{TRAIN}.write_encoder", f"{TRAIN}.evaluate_split"
FOLDER, TEACHER = "nearkin.run.folder.RunFolder", "nearkin.training.teacher"
AIMS = {
    "half a checkpoint": Aim(SAVE, "pathlib.Path.open", "half"),
    "settings, before fsync": Aim(f"{FOLDER}.write_settings", "os.fsync", "before", often=False),
    "sheet of views, before fsync": Aim(
        f"{TRAIN}.augmentation_sheet", "os.fsync", "before", often=False
    ),
    "checkpoint, before fsync": Aim(SAVE, "os.fsync", "before"),
    "checkpoint, before rename": Aim(SAVE, "pathlib.Path.replace", "before"),
    "checkpoint, before fsync of folder": Aim(SAVE, "pathlib.Path.replace", "after"),
    "before pruning": Aim(SAVE, SEALED, "after"),
    "first batch": Aim(COMMIT, COMMIT, "before", in_epoch(0)),
    "last batch": Aim(COMMIT, COMMIT, "before", in_epoch(PER_EPOCH - 1)),
    "look": Aim(LOOK, HEALTH, "before"),
    "half of metrics": Aim(FLUSH, "pathlib.Path.open", "half"),
    "metrics, before fsync": Aim(FLUSH, "os.fsync", "before"),
    "metrics ahead of checkpoint": Aim(FLUSH, FLUSH, "after"),
    "after the last save": Aim(
        SAVE, SAVE, "after", lambda _, state: state["step"] == TOTAL, False
    ),
    "half an encoder": Aim(ENCODER, "pathlib.Path.open", "half", often=False),
    "evaluation": Aim(EVALUATE, "nearkin.evaluation.evaluate._measured", "before", often=False),
    "summary, before fsync": Aim(f"{FOLDER}.write_summary", "os.fsync", "before", often=False),
    "half a teacher": Aim(f"{TEACHER}.write_encoder", "pathlib.Path.open", "half", often=False),
    "half of its features": Aim(f"{TEACHER}.write_sealed", "pathlib.Path.open", "half"),
    "all of its features": Aim(f"{TEACHER}.compute", f"{TEACHER}.compute", "after", often=False),
}
"""Half of all kills; the others come at random."""


def aims_of(method: str) -> list[str]:
    """The moments that a run of this method has."""
    taught = METHODS[method].uses_teacher
    return [name for name, aim in AIMS.items() if taught or TEACHER not in aim.within]


def arguments(
    method: str, data: Path, out: Path, *, seed: int = 0, save_every: int = SAVE_EVERY
) -> list[str]:
    """The command line of a run that has everything and is as short as can be."""
    settings = f"--epochs {EPOCHS} --batch-size {BATCH} --save-every {save_every} --seed {seed} "
    settings += "--evaluate-every 1 --val 0 --backbone tiny --device cpu --resume -q"
    options = {
        "dino": "--num-prototypes 64 --freeze-until 0.2",
        "instdisc": "--num-noise 16",
        "moco": "--queue-size 16 --momentum 0.9 --optimizer adamw",
        "moco_memory_bank": "--num-negatives 16",
        "ncl": "--known 0,1 --num-novel-classes 2 --threshold 0.5",
        "nnclr": "--support-size 16 --num-neighbors 2",
        "seed": "--queue-size 16",
        "simgcd": "--known 0,1 --num-novel-classes 2",
        "supervised": "--known 0,1",
        "swav": "--num-prototypes 30 --queue-size 16 --queue-from 0.2 --freeze-until 0.2",
        "uno": "--known 0,1 --num-novel-classes 2",
    }.get(method, "")
    if not METHODS[method].uses_labels:  # then what labels are for is only measures, and slow
        options += " --labels none"
    if METHODS[method].uses_teacher:
        options += f" --teacher {data.with_name('teacher.safetensors')} --teacher-views 3"
    widths = {"dim", "hidden_dim", "predictor_dim"} & parameters(METHODS[method]).keys()
    narrow = [word for width in sorted(widths) for word in (option(width), "16")]
    return ["train", str(data), "--method", method, "-o", str(out),
            *settings.split(), *options.split(), *narrow]  # fmt: skip


def start(command: list[str], prepare: Callable[[], None] = lambda: None) -> int:
    """A run in a process of its own, which `prepare` may change; returns its number."""
    return processes.fork(partial(_started, command, prepare))


def _started(command: list[str], prepare: Callable[[], None]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the limit of the test is not for this process
    signal.alarm(PATIENCE)
    jaxtyping.config.update("jaxtyping_disable", True)  # types are not the point
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    prepare()
    return main(command)


def finish(child: int) -> int:
    """Wait for a run and return its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die() -> None:
    """End this process without any of the things that it would do at its end."""
    os.kill(os.getpid(), signal.SIGKILL)


def replace(target: str, wrap: Callable[[Callable], Callable]) -> None:
    """Put a wrapper around a function, in this process."""
    owner, _, name = target.rpartition(".")
    place = resolve_name(owner)
    setattr(place, name, wrap(getattr(place, name)))


def of(method: str, target: str) -> str:
    """The function that is meant, in a run of that method."""
    kind = METHODS[method]
    return target.replace("METHOD", f"{kind.__module__}.{kind.__qualname__}")


def set_up(aim: Aim, method: str, nth: int, act: Callable[[], None] = die) -> None:
    """Let this process do that to itself at the `nth` call that the aim is about."""
    armed: list[bool] = []
    replace(of(method, aim.at), acting(aim.where, act, armed))
    replace(of(method, aim.within), arming(aim.counts, nth, armed))


Wrapper = Callable[[Callable], Callable]


def arming(counts: Callable[..., bool], nth: int, armed: list[bool]) -> Wrapper:
    """What tells the function within the wrapped one that its time has come."""
    count = itertools.count(1)

    def wrap(function):
        def call(*arguments, **options):
            if counts(*arguments) and next(count) == nth:
                armed.append(True)
            return function(*arguments, **options)

        return call

    return wrap


def acting(where: str, act: Callable[[], None], armed: list[bool]) -> Wrapper:
    """What lets the wrapped function act in its next call once it is told so."""

    def wrap(function):
        def call(*arguments, **options):
            moment = where if armed else ""
            armed.clear()
            if moment == "before":
                act()
            result = function(*arguments, **options)
            if moment == "after":
                act()
            if moment == "half":
                result.write = half_written(result)
            return result

        return call

    return wrap


def half_written(file):
    """In place of a file's `write`: half of it, and the end."""
    write = file.write

    def half(content):
        write(content[: len(content) // 2])
        file.flush()
        die()

    return half


def resumed_steps(out: Path) -> list[int]:
    """After which steps runs in this folder went on, by their log."""
    log = out / "train.log"
    text = log.read_text() if log.exists() else ""
    return [int(step) for step in re.findall(r"resuming after step (\d+)", text)]


def files(out: Path) -> dict[str, bytes]:
    """The content of everything in a run folder that must not depend on kills."""
    paths = [path for path in out.rglob("*") if path.is_file() and path.name not in OWN]
    lasting = [path for path in paths if not re.fullmatch(r"ckpt-\d+\.pt", path.name)]
    contents = {str(path.relative_to(out)): path.read_bytes() for path in lasting}
    if "report.html" in contents:  # it says where the run is
        contents["report.html"] = contents["report.html"].replace(str(out).encode(), b"RUN")
    return contents


def temporary(out: Path) -> set[Path]:
    """Files that were being written."""
    return {*out.rglob(f"*{PARTIAL}*"), *out.rglob("*.tmp")}


def differences(whole: Path, broken: Path) -> list[str]:
    """Files that a broken run does not share with the unbroken one, leftovers included."""
    mine, theirs = files(whole), files(broken)
    names = {name for name in mine | theirs if mine.get(name) != theirs.get(name)}
    ends = [torch.load(latest(out / "checkpoints"), weights_only=True) for out in (whole, broken)]
    parts = [part for part in ends[0] | ends[1] if not same(*(end.get(part) for end in ends))]
    return sorted(names) + [f"checkpoint: {part}" for part in parts]


def write_data(folder: Path) -> Path:
    """Images of noise, of three classes, and beside them the encoder that teaches."""
    write_network(folder / "teacher.safetensors")
    images = np.random.default_rng(0).integers(0, 256, (PICTURES, 16, 16, 3), dtype=np.uint8)
    np.savez(folder / "data.npz", x=images, y=np.arange(PICTURES) % 3)
    return folder / "data.npz"


def unbroken(command: list[str], out: Path) -> float:
    """Run it in one go; returns its seconds."""
    before = time.perf_counter()
    assert finish(start(command)) == 0, (out / "train.log").read_text()
    return time.perf_counter() - before


def fatal(command: list[str], method: str, shot: str, rng: random.Random, length: float) -> bool:
    """Start a run and kill it; False if it was faster."""
    if shot == RANDOM:
        child = start(command)
        time.sleep(rng.uniform(0, length / 5))
        os.kill(child, signal.SIGKILL)
    else:
        nth = rng.randint(2, 3) if AIMS[shot].often else 1
        child = start(command, lambda: set_up(AIMS[shot], method, nth))
    code = finish(child)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def harness(
    method: str, kills: int, seed: int, folder: str, aims: Sequence[str] = (), period: int = 2
) -> dict[str, object]:
    """Kill a method's runs so many times: one of `period` at random, the others at these aims.

    Returns:
        kills, and of these: in_write (a file was left half written), aims (how many at each);
        resumes from after step 0; runs (that came to their end and were compared); and
        differing: what any of them did not share with the unbroken run.
    """
    rng = random.Random(seed)
    with TemporaryDirectory(dir=folder) as made:
        data, whole, broken = write_data(Path(made)), Path(made, "whole"), Path(made, "broken")
        length = unbroken(arguments(method, data, whole, seed=seed), whole)
        command = arguments(method, data, broken, seed=seed)
        turns = itertools.cycle(aims or aims_of(method))
        shots = [RANDOM if number % period == 0 else next(turns) for number in range(kills)]
        tally, differing, counts = Counter[str](), set[str](), Counter(shots)

        def compare() -> None:
            differing.update(differences(whole, broken))
            tally["runs"] += 1
            tally["resumes"] += len(resumed_steps(broken))
            shutil.rmtree(broken)

        while shots:
            before = temporary(broken)
            if not fatal(command, method, shots[0], rng, length):
                compare()  # and begin again, the kills so far count
                continue
            shot = shots.pop(0)
            half = shot != RANDOM and AIMS[shot].where == "half"
            tally["in_write"] += half or bool(temporary(broken) - before)
        unbroken(command, broken)
        compare()
    counted = {"kills": kills, "resumes": 0, "in_write": 0, **tally}
    return counted | {"differing": sorted(differing), "aims": counts}
