"""`nearkin embed RUN DATA -o FOLDER/`: features in parts, made by any number of processes."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import nn

from nearkin.commands.embed import Embeddings, encode_readable, table
from nearkin.commands.embed import embed as embed_whole
from nearkin.data.images import Images, open_images
from nearkin.distributed import choose_device, own_cpus
from nearkin.distributed.place import place
from nearkin.errors import DataError, UsageError
from nearkin.evaluation.encoder import Encoder, load
from nearkin.evaluation.parts import (
    BAD_FILES,
    MOST,
    Note,
    claim,
    finish,
    note_on,
    read_footer,
    write_part,
)
from nearkin.pace import ProgressCallback, under
from nearkin.run.failures import foreseen
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Reporter, Silent

SHARD: Final = 65_536
"""Images of a part."""


@dataclass(frozen=True)
class Made:
    """How far a folder of parts has come."""

    now: int
    """Parts that were made just now."""
    missing: int
    """Parts that other processes have yet to make."""
    num_parts: int
    count: int = 0
    """How many have features, once no part is missing."""
    bad: int = 0
    """How many could not be read, likewise."""

    def lines(self, folder: Path) -> list[str]:
        """For people."""
        found = [f"{self.now} of {self.num_parts} parts made: {folder.resolve()}"]
        if self.missing:
            return [*found, f"{self.missing} parts are still missing; others are to make them"]
        found.append(f"{self.count} images have features")
        if self.bad:
            found.append(f"left out {self.bad} that cannot be read: see {BAD_FILES}")
        return found


def embed(
    run: str | Path,
    data: Any,
    *,
    output: str | Path | None = None,
    shard: int = SHARD,
    part: str = "",
    backbone: nn.Module | None = None,
    device: str = "auto",
    workers: int | Literal["auto"] = "auto",
    reporter: Reporter | None = None,
) -> Embeddings | Made:
    """Features of images by a trained encoder. Images that cannot be read have none.

    Args:
        run: A run folder, or its encoder.safetensors.
        data: What `open_images` takes.
        output: Also write them to this file or, if it ends in / or is a folder, into parts there,
            with only one part in memory; see `embed_parts`.
        shard: Images of a part.
        part: `I/N` makes the I-th of N shares of the parts, with I from 1; all if empty.
        backbone: The run's network, if it was given one from Python; untrained.
        device: Where to compute.
        workers: Processes that decode photographs; `auto`: one per processor.
        reporter: Who is told how it goes.

    Returns:
        The features or, of a folder, how far it has come.
    """
    shared: dict[str, Any] = dict(
        backbone=backbone, device=device, workers=workers, reporter=reporter
    )
    if output is not None and is_folder(str(output)):
        return embed_parts(run, data, output, shard=shard, part=part, **shared)
    if part or shard != SHARD:
        name = output or "vectors"
        raise UsageError(f"{name} is one file, without parts; give a folder, {name}/")
    return embed_whole(run, data, output=output, **shared)


def embed_parts(
    run: str | Path,
    data: Any,
    output: str | Path,
    *,
    shard: int = SHARD,
    part: str = "",
    backbone: nn.Module | None = None,
    device: str = "auto",
    workers: int | Literal["auto"] = "auto",
    reporter: Reporter | None = None,
) -> Made:
    """Features of any number of images, of which those of one part are in memory.

    Each part is a Parquet file with rows as `embed` writes them, there whole or not at all. What
    is there is not made again: a command that was killed goes on. Processes that torchrun or srun
    has started divide the parts, and none waits for another.

    Args:
        run: A run folder, or its encoder.safetensors.
        data: What `open_images` takes.
        output: A new folder, or one that was begun with the same encoder, data and shard.
        shard: Images of a part.
        part: `I/N` makes the I-th of N shares of the parts, with I from 1; all if empty.
        backbone: The run's network, if it was given one from Python; untrained.
        device: Where to compute.
        workers: Processes that decode photographs; `auto`: one per processor.
        reporter: Who is told how it goes.

    Raises:
        UsageError: If `shard` or `part` makes no sense.
        DataError: If none of the images can be read.
        OutputError: If the folder is of something else, or cannot be written.
    """
    if shard < 1:
        raise UsageError(f"--shard {shard} is less than one image; give at least 1")
    first, step = _turn(part)
    log = reporter or Silent()
    encoder, images = load(run, backbone=backbone), open_images(data, on_progress=log.progress)
    path = RunFolder(Path(run)).encoder if Path(run).is_dir() else Path(run)
    folder, note = Path(output), note_on(path, images, shard)
    if note.num_parts > MOST:
        raise UsageError(f"--shard {shard} makes more than {MOST} parts; give more")
    claim(folder, note)
    processes = own_cpus() if workers == "auto" else workers
    own = [number for number in note.missing(folder) if number % step == first]
    for number in own:
        rows = np.arange(number * shard, min(len(images), (number + 1) * shard))
        name = f"part {number + 1} of {note.num_parts}"
        on_progress = under(name, log.progress)
        with foreseen():
            found = _features(
                encoder, images.subset(rows), choose_device(device), processes, on_progress
            )
        write_part(folder / note.part(number), found)
        log.line(f"{name}: {len(found.vectors)} images")
        del found  # or there would be two while the next is computed
    return _made(folder, note, images, len(own))


def _features(
    encoder: Encoder,
    images: Images,
    device: torch.device,
    workers: int,
    on_progress: ProgressCallback,
) -> Embeddings:
    found = encode_readable(
        encoder, images, device=device, workers=workers, on_progress=on_progress
    )
    return table(found.images, found.features, found.images.splits.tolist(), found.bad)


def _made(folder: Path, note: Note, images: Images, now: int) -> Made:
    """How far the folder has come; whoever finds all parts there finishes it."""
    missing = len(note.missing(folder))
    if missing:
        return Made(now, missing, note.num_parts)
    total, bad = 0, dict[str, str]()
    for number in range(note.num_parts):
        count, unread = read_footer(folder / note.part(number))
        total += count
        bad.update(unread)
    finish(folder, images, bad)
    if not total:
        raise DataError(f"none of the {len(images)} images can be read; look at the files")
    return Made(now, 0, note.num_parts, total, len(images.bad) + len(bad))


def _turn(part: str) -> tuple[int, int]:
    """The first part that is this process's to make, and how many further each next one is."""
    here = place()
    if not part:
        return (0, 1) if here is None else (here.rank, here.world)
    if here is not None and here.world > 1:
        raise UsageError(
            f"--part {part}, but {here.world} processes were started; leave --part out"
        )
    said = re.fullmatch(r"(\d{1,9})/(\d{1,9})", part)
    if said is None or not 1 <= int(said[1]) <= int(said[2]):
        raise UsageError(f"--part {part} is not I/N with I from 1 to N; give one such as 1/8")
    return int(said[1]) - 1, int(said[2])


def is_folder(output: str) -> bool:
    """Whether a name says, or is that of, a folder."""
    return output.endswith(("/", os.sep)) or Path(output).is_dir()
