"""`nearkin.train` and `nearkin.discover`: calls with the command line's names and defaults."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from nearkin.commands.discover import discover as run_discover
from nearkin.commands.train import Run
from nearkin.commands.train import train as run_train
from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.errors import UsageError
from nearkin.run.reporter import Reporter

AS_TEXT = {
    "device", "init_from", "labels", "labeled", "from_run", "truth", "copy_to", "accept",
}  # fmt: skip
"""Settings that may come as a path or a torch device."""


def train(
    data: Any,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    backbone: str | nn.Module = "auto",
    reporter: Reporter | None = None,
    **settings: Any,
) -> Run:
    """Train an encoder on images without labels, and measure it.

    Args:
        data: A folder, a table, an archive, an .npz, a name such as `digits`, or arrays: uint8
            images of shape (n, height, width, 3), or a pair of images and labels.
        out: The run folder; `runs/DATA-METHOD` if None.
        resume: Continue the run that is in `out`.
        overwrite: Replace the run that is in `out`.
        backbone: The name of a network, or any network that turns images into features.
        reporter: Who is told how it goes; nobody if None.
        settings: Fields of `TrainConfig`, and options of the method.

    Returns:
        The finished run: `run.path`, `run.summary`.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    if not isinstance(backbone, str | nn.Module):
        raise UsageError(
            f"backbone is a {type(backbone).__name__}; give a name or a torch.nn.Module"
        )
    network = backbone if isinstance(backbone, nn.Module) else None
    named = backbone if isinstance(backbone, str) else "auto"
    known, options = _divided(TrainConfig, settings)
    return run_train(
        data,
        TrainConfig(backbone=named, options=options, **known),
        out=out,
        resume=resume,
        overwrite=overwrite,
        network=network,
        reporter=reporter,
    )


def discover(
    data: Any,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
    **settings: Any,
) -> Run:
    """Find the classes among images of which some have a known class.

    Args:
        data: What `nearkin.train` takes.
        out: The run folder; `runs/DATA-MODE` if None.
        resume: Continue the run that is in `out`.
        overwrite: Replace the run that is in `out`.
        reporter: Who is told how it goes; nobody if None.
        settings: Fields of `DiscoverConfig`, such as `labeled`, and options of the last stage's
            method. `from_run` is what the command line calls `--from`.

    Returns:
        The finished run: `run.path`, `run.summary`.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    known, options = _divided(DiscoverConfig, settings)
    return run_discover(
        data,
        DiscoverConfig(options=options, **known),
        out=out,
        resume=resume,
        overwrite=overwrite,
        reporter=reporter,
    )


def _divided(
    kind: type[TrainConfig | DiscoverConfig], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of that kind, and what is left: options of a method."""
    names = {entry.name for entry in fields(kind)}
    known: dict[str, Any] = {
        name: str(value) if name in AS_TEXT else value
        for name, value in settings.items()
        if name in names
    }
    options = {name: value for name, value in settings.items() if name not in names}
    return known, {**known.pop("options", {}), **options}
