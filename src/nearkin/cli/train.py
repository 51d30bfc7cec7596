"""Commands that train: an encoder, or the classes of a discovery."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from nearkin.cli.app import GROUPS, Flag, Given, Options, Quiet, app, grouped, merged, show
from nearkin.cli.terminal import Terminal
from nearkin.config import DiscoverConfig, TrainConfig, option, read_toml
from nearkin.errors import UsageError

ConfigFile = Annotated[Path | None, Parameter(name="--config", group=GROUPS["Data"])]
Out = Annotated[Path | None, Parameter(name=["--out", "-o"], group=GROUPS["Output"])]


@grouped
class TypedTrain(Given, TrainConfig):
    """Settings of a training as they were typed."""


@grouped
class TypedDiscover(Given, DiscoverConfig):
    """Settings of a discovery as they were typed."""


@app.command
def demo(*, out: Path = Path("runs/demo"), json: Flag = False) -> None:
    """Train, evaluate and discover on real handwritten digits of scikit-learn; no download.

    Args:
        out: The folder of its two runs; an earlier demo in it is replaced.
        json: Print the measures as JSON.
    """
    from nearkin.commands.demo import demo as run_demo

    with Terminal(json) as terminal:
        shown = run_demo(out=out, reporter=terminal)
    show(shown.summary, json, shown.lines())


@app.command
def check(
    data: str,
    /,
    *,
    labels: str = "auto",
    scan: Literal["headers", "full"] = "headers",
    json: Flag = False,
) -> None:
    """Look at images before training: counts, sizes, bad files, duplicates, proposed settings.

    Args:
        data: A folder, a CSV or Parquet table, a zip or tar, an .npz, a name such as digits, or
            FILE.py:NAME.
        labels: For scoring only: auto, none, folders, or a table with columns path and label.
        scan: headers opens every file; full decodes every image.
        json: Print the findings as JSON.
    """
    from nearkin.commands.check import check as run_check

    with Terminal(json) as terminal:
        found = run_check(data, labels=labels, scan=scan, reporter=terminal)
    show(found.to_dict(), json, found.lines())


@app.command
def train(
    data: str | None = None,
    /,
    *,
    config: Annotated[TypedTrain, Parameter(name="*")] | None = None,
    config_file: ConfigFile = None,
    out: Out = None,
    resume: Flag = False,
    overwrite: Flag = False,
    json: Flag = False,
    quiet: Quiet = False,
    **options: Options,
) -> None:
    """Train an encoder on images without labels, and measure it.

    Args:
        data: A folder, a CSV or Parquet table, a zip or tar, an .npz, a name such as digits, or
            FILE.py:NAME.
        config: Settings.
        config_file: A TOML file of settings, such as the config.toml of a run. What is typed or
            set in the environment goes before it.
        out: The run folder; runs/DATA-METHOD if not given.
        resume: Continue the run that is in the folder.
        overwrite: Replace the run that is in the folder.
        json: Print the measures as JSON.
        quiet: Show no progress.
        options: Options of the method, such as --temperature 0.2. --method NAME --help lists them.
    """
    settings = read_toml(config_file) if config_file else {}
    stored, settings = settings.pop("data", None), merged(settings, config, options)
    if data is None and stored is None:
        raise UsageError("no images given; say nearkin train DATA, or --config with a data key")
    from nearkin.commands.train import train as run_train
    from nearkin.distributed import is_main_process
    from nearkin.evaluation.evaluate import rows_of

    with Terminal(quiet or json or not is_main_process()) as terminal:
        run = run_train(
            data or stored,
            TrainConfig(**settings),
            out=out,
            resume=resume,
            overwrite=overwrite,
            reporter=terminal,
        )
    if is_main_process():
        show(run.summary, json, rows_of(run.summary))


@app.command
def discover(
    data: str | None = None,
    /,
    *,
    config: Annotated[TypedDiscover, Parameter(name="*")] | None = None,
    config_file: ConfigFile = None,
    out: Out = None,
    resume: Flag = False,
    overwrite: Flag = False,
    json: Flag = False,
    quiet: Quiet = False,
    **options: Options,
) -> None:
    """Find the classes among images of which some have a known class.

    Args:
        data: A folder, a CSV or Parquet table, a zip or tar, an .npz, a name such as digits, or
            FILE.py:NAME.
        config: Settings.
        config_file: A TOML file of settings, such as the config.toml of a discovery. What is
            typed or set in the environment goes before it.
        out: The run folder; runs/DATA-MODE if not given.
        resume: Continue the run that is in the folder.
        overwrite: Replace the run that is in the folder.
        json: Print the summary as JSON.
        quiet: Show no progress.
        options: Options of the last stage's method, ncl or simgcd. --mode MODE --help lists them.
    """
    settings = read_toml(config_file, DiscoverConfig) if config_file else {}
    stored, settings = settings.pop("data", None), merged(settings, config, options)
    if data is None and stored is None:
        raise UsageError("no images given; say nearkin discover DATA, or --config with a data key")
    from nearkin.commands.discover import discover as run_discover
    from nearkin.distributed import is_main_process
    from nearkin.run.folder import lines

    with Terminal(quiet or json or not is_main_process()) as terminal:
        run = run_discover(
            data or stored,
            DiscoverConfig(**settings),
            out=out,
            resume=resume,
            overwrite=overwrite,
            reporter=terminal,
        )
    if is_main_process():
        show(run.summary, json, lines(run.summary))


@app.command
def replay(run: Path, data: str | None = None, /) -> None:
    """Repeat the step at which a run diverged, and say where it began.

    Args:
        run: A run folder.
        data: Its images, if they are no longer where they were.
    """
    from nearkin.commands.replay import replay as run_replay

    show(None, False, run_replay(run, data))


STAGE_METHODS = {"gcd": "simgcd", "ncd": "ncl"}
"""The method of a discovery's last stage, whose options `nearkin discover` takes."""


def show_method_options(arguments: list[str]) -> None:
    """Below the help of a command that names a method, list the options of that method.

    Only then is torch imported, or a file of the user's own.
    """
    if not {"--help", "-h"} & {*arguments} or arguments[0] not in ("train", "discover"):
        return
    settings = {option(entry.name) for entry in fields(DiscoverConfig)}
    if arguments[0] == "train":
        settings, method = set(), _typed_value(arguments, "--method")
    else:
        method = STAGE_METHODS.get(_typed_value(arguments, "--mode"), "")
    if not method:
        return
    from cyclopts.help import HelpEntry, HelpPanel
    from cyclopts.help.formatters import DefaultFormatter
    from rich.console import Console

    from nearkin.commands.methods import option_rows
    from nearkin.extensions import label
    from nearkin.methods import method_class

    console = Console(soft_wrap=True, highlight=False)
    entries = [
        HelpEntry(positive_names=(name,), description=text)
        for name, text in option_rows(method_class(method))
        if name not in settings
    ]
    panel = HelpPanel("parameter", f"Options of {label(method)}", entries=entries)
    DefaultFormatter()(console, console.options, panel)


def _typed_value(arguments: list[str], name: str) -> str:
    """The value of an option, as `--name value` or `--name=value`; "" if there is none."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == name:
            return following
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return ""
