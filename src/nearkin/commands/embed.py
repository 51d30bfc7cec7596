"""`nearkin embed -o`: the features of images as a file, or as a folder of parts."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from nearkin.choices import Engine
from nearkin.data.images import Images
from nearkin.data.notes import lines
from nearkin.data.opening import open_images
from nearkin.distributed import available_cpus, choose_device, cpus_per_process
from nearkin.distributed.ranks import rank_info
from nearkin.encoders.encoder import Encoder, load
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings, encode_images
from nearkin.evaluation.ray_parts import PartJob, check_ray, run_on_ray
from nearkin.evaluation.table import (
    MOST,
    SHARD,
    PartFolder,
    PartsWritten,
    check_format,
    note_on,
    write_embeddings,
)
from nearkin.files import check_new
from nearkin.pace import Pace
from nearkin.run.failures import resource_errors
from nearkin.run.reporter import Reporter, Silent
from nearkin.schema import Auto


def embed_table(
    run: str | Path,
    data: Any,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    backbone: nn.Module | None = None,
    labels: str = "auto",
    image_size: int | Auto = "auto",
    allow_partial: bool = False,
    trust_remote_code: bool = False,
    device: str = "auto",
    workers: int | Auto = "auto",
    reporter: Reporter | None = None,
) -> Embeddings:
    """Compute the features of images with an encoder, all in memory.

    Images that cannot be read have no features. `embed_parts` needs memory for one part only.

    Raises:
        UsageError: If there is no encoder, or `output` is no such file.
        DataError: If none of the images can be read.
        OutputError: If the file cannot be written.
    """
    if output is not None:
        if is_folder(str(output)):
            raise UsageError(f"{output} is a folder; nearkin.embed_parts writes parts into one")
        check_format(Path(output))
        spare(Path(output), data, labels, overwrite=overwrite)
    log = reporter or Silent()
    on_progress = log.progress
    encoder = _logged(
        load_source(
            run,
            backbone=backbone,
            image_size=image_size,
            allow_partial=allow_partial,
            trust_remote_code=trust_remote_code,
        ),
        log,
    )
    images = _opened(data, labels, log)
    processes = available_cpus() if workers == "auto" else workers
    where = choose_device(device)
    with resource_errors():
        embeddings = encode_images(
            encoder, images, device=where, workers=processes, on_progress=on_progress
        ).normalized()
    if output is not None:
        write_embeddings(Path(output), embeddings, encoder.digest)
    return embeddings


def load_source(
    source: str | Path,
    *,
    backbone: nn.Module | None = None,
    image_size: int | Auto = "auto",
    allow_partial: bool = False,
    trust_remote_code: bool = False,
) -> Encoder:
    """Load an encoder for images of a size, `auto` being its own."""
    size = None if image_size == "auto" else image_size
    return load(
        source,
        backbone=backbone,
        image_size=size,
        allow_partial=allow_partial,
        trust_remote_code=trust_remote_code,
    )


def _logged(encoder: Encoder, log: Reporter) -> Encoder:
    for line in encoder.lines():
        log.info(line)
    return encoder


def _opened(data: Any, labels: str, log: Reporter) -> Images:
    images = open_images(data, labels=labels, on_progress=log.progress)
    for line in lines(images.notes):
        log.info(line)
    return images


def spare(output: Path, *inputs: Any, overwrite: bool = False) -> None:
    """Refuse to replace what is read, whatever the user says, and other files unasked."""
    files = [output, output.with_suffix(".csv")] if output.suffix == ".npy" else [output]
    written = [file.resolve() for file in files]
    for read in inputs:
        if isinstance(read, str | Path) and Path(read).resolve() in written:
            raise UsageError(f"{output} would replace {read}, which is read; choose another -o")
    for file in files:
        check_new(file, overwrite=overwrite)


def embed_parts(
    run: str | Path,
    data: Any,
    output: str | Path,
    *,
    shard: int = SHARD,
    part: str = "",
    engine: Engine = "local",
    backbone: nn.Module | None = None,
    labels: str = "auto",
    image_size: int | Auto = "auto",
    allow_partial: bool = False,
    trust_remote_code: bool = False,
    device: str = "auto",
    workers: int | Auto = "auto",
    reporter: Reporter | None = None,
) -> PartsWritten:
    """Compute the features of any number of images, with one part in memory.

    Each part is a Parquet file with rows as `embed` writes them, there whole or not at all. What
    is there is not made again: a command that was killed goes on. Processes that torchrun or srun
    has started divide the parts, and none waits for another; so do the actors of a Ray cluster.

    Args:
        run: What `nearkin.load` takes: a run folder, a file, or a name such as dinov2-small.
        data: Images: a folder, a table, an archive or shards, or a name such as digits.
        output: A new folder, or one that was begun with the same encoder, data and shard.
        shard: Images of a part.
        part: `I/N` makes the I-th of N shares of the parts, with I from 1; all if empty.
        engine: `ray` computes on the cluster at the variable RAY_ADDRESS, or else on one that is
            started on this machine. Its nodes need the same files under the same names.
        backbone: The run's network, if it was given one from Python; untrained.
        labels: The labels to write beside them, as of `nearkin train`.
        image_size: Side of the images in pixels; `auto`: that of the encoder.
        allow_partial: Whether weights may be missing from a checkpoint, or left over.
        trust_remote_code: Whether to run code that files of the run name.
        device: Where to compute.
        workers: Processes that decode photographs; `auto`: one per CPU.
        reporter: Receives log lines and progress.

    Raises:
        UsageError: If `shard` or `part` makes no sense, or Ray is not installed.
        WorkerError: If the Ray cluster does not answer, or fails. What is written stays.
        DataError: If none of the images can be read.
        OutputError: If the folder is of something else, or cannot be written.
    """
    if shard < 1:
        raise UsageError(f"--shard {shard} is less than one image; give at least 1")
    first, step = _turn(part)
    log = reporter or Silent()
    if engine == "ray":
        _check_engine(run, data, part, backbone)
    encoder = _logged(
        load_source(
            run,
            backbone=backbone,
            image_size=image_size,
            allow_partial=allow_partial,
            trust_remote_code=trust_remote_code,
        ),
        log,
    )
    images = _opened(data, labels, log)
    note = note_on(encoder.digest, images, shard)
    if note.num_parts > MOST:
        raise UsageError(f"--shard {shard} makes more than {MOST} parts; give more")
    folder = PartFolder.claim(Path(output), note)
    own = [number for number in folder.missing() if number % step == first]
    if engine == "ray":
        job = PartJob(
            encoder=str(run),
            data=str(data),
            output=str(Path(output).resolve()),
            folder=str(Path.cwd()),
            labels=labels,
            image_size=image_size,
            allow_partial=allow_partial,
            trust_remote_code=trust_remote_code,
            device=device,
            workers=workers,
        )
        made = _made_on_ray(job, own, shard, log)
    else:
        made = folder.compute(
            own,
            encoder,
            images,
            device=choose_device(device),
            workers=cpus_per_process() if workers == "auto" else workers,
            on_progress=log.progress,
        )
    for name, count in made:
        log.info(f"{name}: {count} images")
    return folder.finish(images, len(own))


def _check_engine(run: Any, data: Any, part: str, backbone: nn.Module | None) -> None:
    """Refuse what Ray cannot divide, before anything is opened."""
    here = rank_info()
    if part or (here is not None and here.world_size > 1):
        what = f"--part {part}" if part else f"{here and here.world_size} processes"
        raise UsageError(f"--engine ray and {what} both divide the parts; give one of them")
    if backbone is not None or not isinstance(run, str | Path) or not isinstance(data, str | Path):
        raise UsageError("--engine ray takes an encoder and images by names that all nodes know")
    check_ray()


def _made_on_ray(
    job: PartJob, parts: list[int], shard: int, log: Reporter
) -> Iterator[tuple[str, int]]:
    """Let the actors of a Ray cluster make parts; yield the name and the images of each."""
    if not parts:
        return
    events = run_on_ray(job, parts, available_cpus())
    log.info(next(events)["plan"])
    pace = Pace(len(parts), shard)
    for done, event in enumerate(events, 1):
        log.progress(done, len(parts), "  ".join(["parts", *pace.reach(done)]))
        yield event["name"], event["images"]


def _turn(part: str) -> tuple[int, int]:
    """Return the first part that this process makes, and the step to the next one."""
    here = rank_info()
    if not part:
        return (0, 1) if here is None else (here.rank, here.world_size)
    if here is not None and here.world_size > 1:
        raise UsageError(
            f"--part {part}, but {here.world_size} processes were started; leave --part out"
        )
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", part)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--part {part} is not I/N with I from 1 to N; give one such as 1/8")
    return int(match[1]) - 1, int(match[2])


def is_folder(output: str) -> bool:
    """Return whether an output is a folder: it ends in / or is one."""
    return output.endswith(("/", os.sep)) or Path(output).is_dir()
