"""`nearkin embed -o FOLDER/ --shard-size N`: features of any number of images, shard by shard."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from nearkin.choices import Engine
from nearkin.commands.arguments import command
from nearkin.commands.features import (
    check_alone,
    check_no_column,
    opened,
    prepared,
    with_precision,
)
from nearkin.commands.settings import EncoderLike, PathLike, given, name_of
from nearkin.config import EmbedConfig
from nearkin.data.images import Images
from nearkin.distributed import choose_device, cpus_per_process
from nearkin.distributed.ranks import rank_info
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.inference import Inference
from nearkin.errors import UsageError
from nearkin.evaluation.ray_shards import Opener, compute_on_ray
from nearkin.evaluation.shards import MOST, SHARD, ShardFolder, ShardsWritten, note_on
from nearkin.evaluation.table import are_vectors
from nearkin.pace import Pace
from nearkin.run.reporter import Reporter, Silent, reporter_of
from nearkin.schema import Count


def makes_shards(
    output: PathLike | None, shard_size: int | None, shard: str, engine: Engine
) -> bool:
    """Whether `embed` makes a folder of shards, or goes on with one."""
    asked = shard_size is not None or bool(shard) or engine != "local"
    return asked or (output is not None and Path(output).is_dir() and are_vectors(Path(output)))


@command
def embed_shards(
    encoder: EncoderLike,
    data: Any,
    config: EmbedConfig | None = None,
    *,
    output: PathLike,
    shard_size: Count | None = None,
    shard: str = "",
    engine: Engine = "local",
    backbone: nn.Module | None = None,
    verbose: bool | Reporter = True,
    **settings: Any,
) -> ShardsWritten:
    """Compute the features of any number of images, with one shard in memory.

    Each shard is a Parquet file with rows as `embed` writes them, there whole or not at all. What
    is there is not made again: a command that was killed goes on. Processes that torchrun or srun
    has started divide the shards, and none waits for another; so do the actors of a Ray cluster.

    Args:
        encoder: A run, a name such as dinov2-small, or a file; what `load` takes or returns.
        data: Images: a folder, a table, an archive or shards, or a name such as digits.
        config: The settings, of which `settings` replaces some.
        output: A new folder, or one that was begun with the same encoder, data and size of shards.
        shard_size: Images of a shard; 65,536 if not given, or those of the folder.
        shard: `I/N` makes the I-th of N shares of the shards, with I from 1; all if empty.
        engine: `ray` computes on the cluster at the variable RAY_ADDRESS, or else on one that is
            started on this machine. Its nodes need the same files under the same names.
        backbone: The encoder's network, if it was given one from Python; untrained.
        verbose: Whether to show progress, or what receives it.
        settings: Fields of `nearkin.EmbedConfig`, other than those of a run folder.

    Raises:
        UsageError: If `shard_size` or `shard` makes no sense, or Ray is not installed.
        WorkerError: If the Ray cluster does not answer, or fails. What is written stays.
        DataError: If none of the images can be read.
        OutputError: If the folder is of something else, or cannot be written.
    """
    config, _ = given(EmbedConfig, config, {**settings, "encoder": name_of(encoder)})
    check_alone(config)
    check_no_column(config)
    path = Path(output)
    if shard_size is None:
        earlier = ShardFolder.noted(path)
        shard_size = earlier.shard if earlier else SHARD
    first, step = _turn(shard)
    log = reporter_of(verbose)
    if engine == "ray":
        _check_engine(encoder, data, shard, backbone)
    folder, config, loaded, images = _opened_shards(config, data, path, shard_size, backbone, log)
    own = [number for number in folder.missing() if number % step == first]
    if engine == "ray":
        opener = partial(open_on_node, config, data, path.resolve(), shard_size)
        made = _made_on_ray(opener, own, shard_size, config, log)
    else:
        by = prepared(config, loaded, len(images), choose_device(config.device), log)
        made = folder.compute(own, by, images, workers=_workers(config), on_progress=log.progress)
    for name, count in made:
        log.info(f"{name}: {count} images")
    return folder.finish(images, len(own))


def _opened_shards(
    config: EmbedConfig,
    data: Any,
    output: Path,
    shard_size: int,
    network: nn.Module | None,
    log: Reporter,
) -> tuple[ShardFolder, EmbedConfig, Encoder, Images]:
    """Open an encoder, images, and the folder of their shards, which must be of the same.

    The settings are returned with the precision of the folder.
    """
    loaded, images = opened(config, data, network, log)
    if config.precision == "auto" and (earlier := ShardFolder.noted(output)):
        config = replace(config, precision=earlier.precision)
    where, workers = choose_device(config.device), _workers(config)
    config = with_precision(config, loaded, images, where, workers, log)
    note = note_on(loaded.digest, images, shard_size, config.precision)
    if note.num_shards > MOST:
        raise UsageError(f"--shard-size {shard_size} makes more than {MOST} shards; give more")
    return ShardFolder.claim(output, note), config, loaded, images


def _workers(config: EmbedConfig) -> int:
    return cpus_per_process() if config.workers == "auto" else config.workers


def open_on_node(
    config: EmbedConfig, data: Any, output: Path, shard_size: int
) -> tuple[ShardFolder, Inference, Images]:
    """Open the same on a node of a cluster, which must see the folder that was begun."""
    config = replace(config, precision=ShardFolder.open(output).note.precision)
    log = Silent()
    encoder, images = opened(config, data, None, log)
    note = note_on(encoder.digest, images, shard_size, config.precision)
    by = prepared(config, encoder, len(images), choose_device(config.device), log)
    return ShardFolder.claim(output, note), by, images


def _check_engine(run: Any, data: Any, shard: str, backbone: nn.Module | None) -> None:
    """Refuse what Ray cannot divide, before anything is opened."""
    here = rank_info()
    if shard or (here is not None and here.world_size > 1):
        what = f"--shard {shard}" if shard else f"{here and here.world_size} processes"
        raise UsageError(f"--engine ray and {what} both divide the shards; give one of them")
    if backbone is not None or isinstance(run, Encoder) or not isinstance(data, str | Path):
        raise UsageError("--engine ray takes an encoder and images by names that all nodes know")
    if find_spec("ray") is None:
        raise UsageError("--engine ray needs Ray Data; pip install 'nearkin[ray]'")


def _made_on_ray(
    opener: Opener, shards: list[int], shard_size: int, config: EmbedConfig, log: Reporter
) -> Iterator[tuple[str, int]]:
    """Let the actors of a Ray cluster make shards; yield the name and the images of each."""
    if not shards:
        return
    workers = None if config.workers == "auto" else config.workers
    pace = Pace(len(shards), shard_size)
    for done, made in enumerate(compute_on_ray(opener, shards, config.device, workers), 1):
        log.progress(done, len(shards), "  ".join(["shards", *pace.reach(done)]))
        yield made


def _turn(shard: str) -> tuple[int, int]:
    """Return the first shard that this process makes, and the step to the next one."""
    here = rank_info()
    if not shard:
        return (0, 1) if here is None else (here.rank, here.world_size)
    if here is not None and here.world_size > 1:
        raise UsageError(
            f"--shard {shard}, but {here.world_size} processes were started; leave --shard out"
        )
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {shard} is not I/N with I from 1 to N; give one such as 1/8")
    return int(match[1]) - 1, int(match[2])
