"""Checkpoints: files that training continues from, bit for bit, and when they are written."""

import io
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from nearkin import files
from nearkin.distributed import all_reduce_max, failing_together, full_state
from nearkin.errors import CheckpointError, DivergedError, ResourceError, UnsavedError
from nearkin.files import usable
from nearkin.method import Method
from nearkin.networks.backbone import as_current
from nearkin.run.csv_logger import CSVLogger
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logger
from nearkin.training.optimizer import restore_optimizer
from nearkin.version import check_format

FORMATS: Final = (1,)  # Those that are read; the last is written

NAME_FORMAT: Final = "ckpt-{:08d}.pt"
NAME: Final = re.compile(r"ckpt-(\d{8,})\.pt")
PLAIN: Final = (Tensor, bool, int, float, str, type(None))
State = dict[str, Any]

PATIENCE: Final = 3  # How many checkpoints in a row may fail before the run stops
INTERVAL: Final = 60.0  # Seconds between checkpoints with `auto`; more if saving takes long
SHARE: Final = 0.02  # Of the time of a training, at most, that goes into checkpoints


class Restored(NamedTuple):
    """The checkpoint that training continues from."""

    step: int  # Steps that are done; 0 if there was no checkpoint
    damaged: tuple[Path, ...]  # Newer ones that were damaged, under the names they now have


def leaves(value: object, place: str = "") -> Iterator[tuple[str, object]]:
    """Yield all that a nested state holds, each with its place."""
    if isinstance(value, Mapping | list | tuple):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in parts:
            yield from leaves(part, f"{place}.{key}" if place else str(key))
    else:
        yield place, value


def not_finite(state: State) -> Iterator[str]:
    """Yield where a state is not finite."""
    for place, value in leaves(state):
        if isinstance(value, Tensor) and not value.isfinite().all():
            yield place


def state_of(step: int, method: Method[Any], optimizer: Optimizer) -> State:
    """Return what a checkpoint holds. All processes have to call this: each may hold a part."""
    states = {"method": method.state_dict(), "optimizer": optimizer.state_dict()}
    return {"format": FORMATS[-1], "step": step, **full_state(states)}


def save(folder: Path, state: State, *, keep: int = 3, finite: bool = True) -> Path:
    """Write a checkpoint, whole or not at all, then remove all but the newest `keep`.

    Once this returns, the new file survives a crash of the machine and has been read back.

    With `finite` every number must be finite, as it must be to train on from here.

    Raises:
        CheckpointError: If the state holds more than tensors and plain Python values.
        DivergedError: If a number of the state is not finite. The older checkpoints stay.
        ResourceError: If the file cannot be written, or is not read back as it was written. The
            older checkpoints stay.
    """
    for place, value in leaves(state):
        if type(value) not in PLAIN:  # could not be read back as plain data
            kind = type(value).__name__
            raise CheckpointError(
                f"the state holds a {kind} at {place}; make it a tensor or a plain number"
            )
    for place in not_finite(state) if finite else ():
        raise DivergedError(
            f"{place} is no longer finite after step {state['step']}; nothing was written since "
            "the checkpoint before. Try a lower learning rate"
        )
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path, content = folder / NAME_FORMAT.format(state["step"]), buffer.getvalue()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.remove_partial(folder)
        files.write_sealed(path, content)
        _verify(path)
        for old in _newest_first(folder)[keep:]:
            old.unlink()
    except OSError as error:
        raise ResourceError(
            f"cannot write the checkpoint {path} of {len(content):,} bytes "
            f"({error.strerror}); make room or allow writing there, then resume"
        ) from error
    return path


def _verify(path: Path) -> None:
    """Read a checkpoint back before any older one is given up for it."""
    content = files.read_sealed(path)
    if content is None:
        raise ResourceError(
            f"{path} is not read back as it was written, and was set aside as "
            f"{_set_aside(path).name}; the disk may be failing, so give another -o"
        )
    _unpacked(path, content)


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint in the folder, which may be damaged; see `load`."""
    return next(iter(_newest_first(folder)), None)


def load(folder: Path, method: Method[Any], optimizer: Optimizer) -> Restored:
    """Restore the newest sound checkpoint in place.

    Damaged ones that are newer than it get the ending `.corrupt`. A folder without checkpoints
    is where training starts; one with none but damaged checkpoints is an error.

    Raises:
        CheckpointError: If no checkpoint is sound, or the newest sound one does not fit the
            method and the optimizer. Both are then left as they were.
    """
    try:
        files.remove_partial(folder)
        damaged: list[Path] = []
        for path in _newest_first(folder):
            content = files.read_sealed(path)
            if content is not None:
                step = _restore(path, content, method, optimizer)
                return Restored(step, tuple(map(_set_aside, damaged)))
            damaged.append(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot read the checkpoints in {folder} ({error.strerror}); allow reading and "
            "writing there"
        ) from error
    if damaged:
        raise CheckpointError(
            f"{damaged[0]} is damaged or no checkpoint, and so is every older one; "
            "put back a copy, or start anew in another folder"
        )
    return Restored(0, ())


def _newest_first(folder: Path) -> list[Path]:
    names = {path: NAME.fullmatch(path.name) for path in folder.glob("ckpt-*.pt")}
    steps = {path: int(match[1]) for path, match in names.items() if match}
    return sorted(steps, key=steps.__getitem__, reverse=True)


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.corrupt")
    with suppress(FileNotFoundError):  # another rank was faster
        path.replace(aside)
    return aside


def _restore(path: Path, content: bytes, method: Method[Any], optimizer: Optimizer) -> int:
    state = _unpacked(path, content)
    for misfit in _misfits(state, state_of(0, method, optimizer)):
        raise CheckpointError(
            f"{path} is of another configuration: {misfit}; resume with the one it was made with"
        )
    method.load_state_dict(as_current(state["method"], method))
    restore_optimizer(optimizer, state["optimizer"])
    return int(state["step"])


def _unpacked(path: Path, content: bytes) -> State:
    try:
        state: State = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        version, name = state["format"], NAME_FORMAT.format(state["step"])
    except Exception as error:  # whatever foreign content does to the reader
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}); "
            "take it away if another program made it"
        ) from error
    with usable(path, "resume with the release that wrote it"):
        check_format(version, FORMATS)
    if name != path.name:
        raise CheckpointError(f"{path} has been renamed; give it back its name {name}")
    return state


def _misfits(saved: State, here: State) -> Iterator[str]:
    """Yield where a saved state does not fit the current one."""
    then, now = _layout(saved), _layout(here)
    for place in {**now, **then}:
        before, after = then.get(place, "absent"), now.get(place, "absent")
        if before != after:
            yield f"{place} is {before} there and {after} here"
    options = (set().union(*state["optimizer"]["param_groups"]) for state in (saved, here))
    for option in sorted(set.difference(*options)):  # a newer torch may have more
        yield f"its optimizer has the option {option}, the one here has not"


def _layout(state: State) -> dict[str, str]:
    tensors = {
        name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for name, value in state["method"].items()
    }
    groups = {
        f"parameter group {position}": f"{len(group['params'])} parameters"
        for position, group in enumerate(state["optimizer"]["param_groups"])
    }
    return {**tensors, **groups}


class Files(NamedTuple):
    """What the first process writes to."""

    folder: RunFolder
    journal: CSVLogger  # The metrics: a checkpoint is never ahead of them
    log: Logger  # Receives warnings of checkpoints that failed


@dataclass(eq=False)
class Checkpointer:
    """Writes checkpoints when they are due: saving changes no state, so a clock may decide."""

    files: Files | None  # None in the other processes, which take part if the method is sharded
    method: Method[Any]
    optimizer: Optimizer
    every: int | str  # Steps between checkpoints; `auto`: by `INTERVAL` and `SHARE`
    done: int  # Steps that are done

    def __post_init__(self) -> None:
        self._failures = 0
        self._last, self._pause = time.monotonic(), INTERVAL

    def after(self, done: int, *, requested: bool, last: bool) -> None:
        """Save what stands after `done` steps, if that is due or requested of any process.

        Raises:
            UnsavedError: If the `last` one, or three in a row, cannot be written.
            DivergedError: If what stands is no longer finite.
        """
        self.done, started = done, time.monotonic()
        is_due = started - self._last >= self._pause
        if self.every != "auto":
            is_due = done % int(self.every) == 0
        due = requested or (self.files is not None and (last or is_due))
        if not all_reduce_max(int(due)):
            return
        with failing_together():
            state = state_of(done, self.method, self.optimizer)
            if self.files:
                self._save(self.files, state, last)
        self._last = time.monotonic()
        self._pause = max(INTERVAL, (self._last - started) / SHARE)

    def _save(self, files: Files, state: State, last: bool) -> None:
        try:
            files.journal.flush()
            save(files.folder.checkpoints, state)
        except ResourceError as error:
            self._failures += 1
            if last or self._failures == PATIENCE:
                raise UnsavedError(*error.args) from error
            files.log.info(f"warning: {error}; training goes on, the next one may succeed")
        else:
            self._failures = 0

    @contextmanager
    def keeping_diverged(self) -> Iterator[None]:
        """Keep the state at which a training diverges within a `with` block, for a replay."""
        try:
            yield
        except DivergedError as error:
            state = state_of(self.done, self.method, self.optimizer)
            if self.files is None:
                raise
            folder = self.files.folder
            with suppress(ResourceError):  # the divergence is the error to report
                save(folder.diverged, state, keep=1, finite=False)
            if not folder.config.exists():  # a stage, which is no run by itself
                raise
            where = f"`nearkin doctor {folder.path}` shows where it began"
            raise DivergedError(f"{error}; {where}") from error
