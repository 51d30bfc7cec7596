"""Commands that find classes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nearkin.cli.app import Flag, Given, alone, app, merged, show
from nearkin.cli.terminal import Terminal
from nearkin.config import DiscoverConfig, read_toml
from nearkin.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Typed(Given, DiscoverConfig):
    """Settings of a discovery as they were typed."""

    from_run: Annotated[str, Parameter(name="--from")] = ""  # `from` is a word of Python's
    """A run whose encoder to stand on, instead of training one."""


@app.command
def discover(
    data: str | None = None,
    /,
    *,
    config: Annotated[Typed, Parameter(name="*")] | None = None,
    config_file: Annotated[Path | None, Parameter(name="--config")] = None,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    resume: Flag = False,
    overwrite: Flag = False,
    json: Flag = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
    **options: str,
) -> None:
    """Find the classes among images of which some have a known class.

    Args:
        data: A folder, a CSV or Parquet table, a zip or tar, an .npz, or a name such as digits.
        config: Settings.
        config_file: A TOML file of settings, such as the config.toml of a discovery. What is
            typed or set in the environment goes before it.
        out: The run folder; runs/DATA-MODE if not given.
        resume: Continue the run that is in the folder.
        overwrite: Replace the run that is in the folder.
        json: Print the summary as JSON.
        quiet: Show no progress.
        options: Options of the last stage's method, ncl or simgcd; `nearkin config METHOD` shows
            them.
    """
    settings = read_toml(config_file, DiscoverConfig) if config_file else {}
    stored, settings = settings.pop("data", None), merged(settings, config, options)
    if data is None and stored is None:
        raise UsageError("no images given; say nearkin discover DATA, or --config with a data key")
    from nearkin.commands.discover import discover as run_discover
    from nearkin.distributed import is_first
    from nearkin.run.folder import lines

    with Terminal(quiet or json or not is_first()) as terminal:
        run = run_discover(
            data or stored,
            DiscoverConfig(**settings),
            out=out,
            resume=resume,
            overwrite=overwrite,
            reporter=terminal,
        )
    if is_first():
        show(run.summary, json, lines(run.summary))


@app.command
def assign(
    run: Path,
    data: str,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    copy_to: Path | None = None,
    json: Flag = False,
) -> None:
    """Sort new images into the classes of a discovery, without training.

    Args:
        run: The run folder of a discovery.
        data: The images.
        output: A CSV like the assignments.csv of the run.
        copy_to: A new folder to sort the images into, by class.
        json: Print the assignments as JSON.
    """
    if not alone():
        return
    from nearkin.commands.assign import assign as run_assign

    with Terminal(json) as terminal:
        found = run_assign(run, data, output=output, copy_to=copy_to, reporter=terminal)
    show(found.to_dicts(), json, found.lines())
