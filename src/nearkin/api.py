"""`nearkin.train`, `.embed`, `.discover` and `.classify`: the commands for Python, typed.

The settings stand in the signatures, so that an editor completes them; a test holds them against
the data classes of `nearkin.config`, whose docstrings describe them.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from nearkin.commands.classify import classify as run_classify
from nearkin.commands.discover import discover as run_discover
from nearkin.commands.embed import embed as embed_table
from nearkin.commands.frozen import embed_folder, only_of_folders
from nearkin.commands.train import Run
from nearkin.commands.train import train as run_train
from nearkin.commands.vectors import images_of
from nearkin.config import (
    Auto,
    ClassifyConfig,
    DiscoverConfig,
    EmbedConfig,
    Settings,
    TrainConfig,
    Value,
)
from nearkin.data.augmentations import Augment, stored_views
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import read_embeddings
from nearkin.method import Method
from nearkin.methods import method_name
from nearkin.run.reporter import Reporter


def train(  # noqa: D417 (the settings are described by the data class)
    data: Any,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
    method: str | type[Method[Any]] = "simclr",
    backbone: str | nn.Module = "auto",
    init_from: str | Path = "",
    teacher: str | Path = "",
    teacher_views: int | Auto = "auto",
    allow_partial: bool = False,
    trust_remote_code: bool = False,
    lora: int = 0,
    drop_path: float | Auto = "auto",
    known: str = "",
    labels: str | Path = "auto",
    val: float = 0.1,
    scan: Literal["headers", "full"] = "headers",
    max_bad: float = 0.1,
    augment: Augment = "auto",
    image_size: int | Auto = "auto",
    view_sizes: str = "auto",
    epochs: int | Auto = "auto",
    max_time: str = "",
    batch_size: int | Auto = "auto",
    optimizer: Literal["auto", "sgd", "lars", "adamw", "muon"] = "auto",
    lr: float | Auto = "auto",
    weight_decay: float | Auto = "auto",
    lars_eta: float = 0.001,
    lars_clip: bool = False,
    lars_vectors: bool = False,
    lars_joint: bool = False,
    lars_inside: bool = False,
    warmup: float = 0.1,
    warmup_start: float = 0.0,
    cosine_end: float = 0.0,
    lr_milestones: str = "",
    layer_decay: float | Auto = "auto",
    freeze_epochs: int | Auto = "auto",
    seed: int = 0,
    evaluate_every: int | Auto = "auto",
    on_collapse: Literal["warn", "stop"] = "warn",
    device: str | torch.device = "auto",
    devices: int = 1,
    fsdp: bool = False,
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    compile: Literal["auto", "off", "on", "graphs"] = "auto",
    workers: int | Auto = "auto",
    cache: Literal["auto", "ram", "disk", "off"] = "auto",
    shuffle_window: int | Auto = "auto",
    chunk_size: int = 0,
    grad_checkpointing: bool = False,
    save_every: int | Auto = "auto",
    report: bool = True,
    track: str = "",
    options: Mapping[str, Value] | None = None,
    **method_options: Value,
) -> Run:
    """Train an encoder on images without labels, and evaluate it.

    Args:
        data: A folder, a table, an archive, shards or an .npz, by path or address (`s3://...`), a
            name such as `digits`, a `datasets.Dataset`, or arrays: uint8 images of shape (n,
            height, width, 3), or of other channels (docs/data.md), or a pair of images and labels.
        out: The run folder; `runs/DATA-METHOD` if None.
        resume: Continue the run that is in `out`.
        overwrite: Replace the run that is in `out`.
        reporter: Receives log lines and progress; None is silent.
        method: A name, `FILE.py:NAME`, `module:NAME`, or a class.
        backbone: A name, `FILE.py:NAME`, `module:NAME`, or a network from images to features.
        augment: A name, the path of a .toml file, or a list of `nearkin.View`.
        options: Options of the method, in place of or beside `method_options`.
        method_options: Options of the method, such as `temperature=0.2`.

    The other arguments are the fields of `nearkin.config.TrainConfig`.

    Returns:
        The finished run: `run.path`, `run.summary`.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    config = _config(TrainConfig, locals())
    network = backbone if isinstance(backbone, nn.Module) else None
    return run_train(
        data,
        config,
        out=out,
        resume=resume,
        overwrite=overwrite,
        network=network,
        reporter=reporter,
    )


def discover(  # noqa: D417
    data: Any,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
    labeled: str | Path = "",
    known: str = "",
    classes: int | Auto = "auto",
    mode: Literal["gcd", "ncd"] = "gcd",
    accept: str | Path = "",
    val: float | Auto = "auto",
    truth: str | Path = "",
    scan: Literal["headers", "full"] = "headers",
    max_bad: float = 0.1,
    augment: Augment = "auto",
    num_views: int = 8,
    from_run: str | Path = "",
    allow_partial: bool = False,
    trust_remote_code: bool = False,
    method: str | type[Method[Any]] = "simclr",
    train_layers: str = "auto",
    known_epochs: int | Auto = "auto",
    epochs: int | Auto = "auto",
    max_time: str = "",
    batch_size: int | Auto = "auto",
    lr_milestones: str = "",
    objective: Literal["auto", "uno", "ncl", "joint_ncl", "simgcd"] = "auto",
    start: Literal["clusters", "random"] = "clusters",
    pair_rate: float | Auto = "auto",
    entropy_weight: float | Auto = "auto",
    balance: float | Auto = "auto",
    num_seeds: int | Auto = "auto",
    seed: int = 0,
    baselines: bool = True,
    device: str | torch.device = "auto",
    devices: int = 1,
    workers: int | Auto = "auto",
    cache: Literal["auto", "ram", "disk", "off"] = "auto",
    copy_to: str | Path = "",
    report: bool = True,
    options: Mapping[str, Value] | None = None,
    **method_options: Value,
) -> Run:
    """Find novel classes among images of which some are labeled.

    Args:
        data: What `nearkin.train` takes.
        out: The run folder; `runs/DATA-MODE` if None.
        resume: Continue the run that is in `out`.
        overwrite: Replace the run that is in `out`.
        reporter: Receives log lines and progress; None is silent.
        labeled: Images of known classes: class folders, or a table with columns path and label.
        from_run: A run whose encoder to use; `--from` on the command line.
        options: Options of the last stage's method, in place of or beside `method_options`.
        method_options: Options of the last stage's method, such as `temperature=0.1`.

    The other arguments are the fields of `nearkin.config.DiscoverConfig`.

    Returns:
        The finished run: `run.path`, `run.summary`.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    config = _config(DiscoverConfig, locals())
    return run_discover(
        data, config, out=out, resume=resume, overwrite=overwrite, reporter=reporter
    )


def classify(  # noqa: D417
    data: Any,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
    labels: str | Path = "auto",
    labeled: str | Path = "",
    val: float | Auto = "auto",
    scan: Literal["headers", "full"] = "headers",
    max_bad: float = 0.1,
    augment: Augment = "auto",
    from_run: str | Path = "",
    trust_remote_code: bool = False,
    train_layers: str = "linear",
    epochs: int | Auto = "auto",
    lr: float | Auto = "auto",
    layer_decay: float | Auto = "auto",
    batch_size: int | Auto = "auto",
    seed: int = 0,
    baselines: bool = True,
    device: str | torch.device = "auto",
    workers: int | Auto = "auto",
    cache: Literal["auto", "ram", "disk", "off"] = "auto",
    copy_to: str | Path = "",
    report: bool = True,
    save_every: int | Auto = "auto",
) -> Run:
    """Learn classes from labels of some images or of all, on top of any encoder.

    Args:
        data: What `nearkin.train` takes.
        out: The run folder; `runs/DATA-classify` if None.
        resume: Continue the run that is in `out`.
        overwrite: Replace the run that is in `out`.
        reporter: Receives log lines and progress; None is silent.
        labels: `auto`, `folders`, or a table with the columns path and label.
        labeled: Labeled images instead: class folders, or a table with columns path and label.
        from_run: The encoder; `--from` on the command line.

    The other arguments are the fields of `nearkin.config.ClassifyConfig`.

    Returns:
        The finished run: `run.path`, `run.summary`.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    config = _config(ClassifyConfig, locals())
    return run_classify(
        data, config, out=out, resume=resume, overwrite=overwrite, reporter=reporter
    )


def embed(  # noqa: D417
    encoder: str | Path,
    data: Any,
    *,
    out: str | Path | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    backbone: nn.Module | None = None,
    reporter: Reporter | None = None,
    allow_partial: bool = False,
    trust_remote_code: bool = False,
    labels: str | Path = "auto",
    val: float = 0.1,
    scan: Literal["headers", "full"] = "headers",
    max_bad: float = 0.1,
    image_size: int | Auto = "auto",
    augment: Augment = "auto",
    seed: int = 0,
    device: str | torch.device = "auto",
    workers: int | Auto = "auto",
    report: bool = True,
) -> Embeddings:
    """Compute the features of images by an encoder as it is, without training.

    Without `out` they are only computed, and written to `output`; the settings of an evaluation
    have no effect then, and are refused. `embed_parts` needs memory for a part of them only.

    Args:
        encoder: A run folder, a file, or a name such as `dinov2-small`; what `load` takes.
        data: What `nearkin.train` takes.
        out: A run folder to make: embeddings, measures beside their floors, and the page.
        output: A file to write the features to: .parquet, .npz, or .npy with a .csv beside it.
        resume: Continue the run that is in `out`.
        overwrite: Replace the run that is in `out`, or the file `output`.
        backbone: The encoder's network, if it was given one from Python; untrained.
        reporter: Receives log lines and progress; None is silent.
        labels: Labels, for evaluation only.
        augment: A name, the path of a .toml file, or a list of `nearkin.View`.

    The other arguments are the fields of `nearkin.config.EmbedConfig`.

    Returns:
        Unit vectors, a row per readable image, in the order of the data.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    config = _config(EmbedConfig, locals())
    if out is None:
        only_of_folders(config, resume=resume)
        return embed_table(
            encoder,
            data,
            output=output,
            overwrite=overwrite,
            backbone=backbone,
            labels=config.labels,
            image_size=image_size,
            allow_partial=allow_partial,
            trust_remote_code=trust_remote_code,
            device=config.device,
            workers=workers,
            reporter=reporter,
        )
    if output is not None:
        raise UsageError("out makes a run folder and output only a table; give one")
    run = embed_folder(
        data,
        config,
        out=out,
        resume=resume,
        overwrite=overwrite,
        network=backbone,
        reporter=reporter,
    )
    return read_embeddings(run.folder.embeddings, images_of(run.folder, data))


def _config(kind: type[Settings], arguments: Mapping[str, Any]) -> Settings:
    """The arguments of a call as settings: paths and devices as text, objects as references."""
    settings: dict[str, Any] = {entry.name: arguments[entry.name] for entry in fields(kind)}
    if "options" in settings:
        settings["options"] = {**(arguments["options"] or {}), **arguments["method_options"]}
        settings["method"] = method_name(arguments["method"])
    if not isinstance(settings["augment"], str):
        settings["augment"] = stored_views(settings["augment"])
    backbone = settings.get("backbone", "auto")
    if isinstance(backbone, nn.Module):
        settings["backbone"] = "auto"  # the network itself travels beside the settings
    elif not isinstance(backbone, str):
        raise UsageError(f"backbone is {backbone!r}; give a name or a torch.nn.Module")
    for name, value in settings.items():
        if isinstance(value, Path | torch.device):
            settings[name] = str(value)
    return kind(**settings)
