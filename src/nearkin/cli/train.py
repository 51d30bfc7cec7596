"""Commands that train: an encoder, or the classes of a discovery."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from nearkin.cli.app import GROUPS, Flag, Given, Options, Quiet, app, grouped, merged, show
from nearkin.cli.terminal import Terminal
from nearkin.config import Config, DiscoverConfig, TrainConfig, option, read_toml
from nearkin.errors import UsageError


@grouped
class TypedTrain(Given, TrainConfig):
    """Settings of a training as they were typed."""


@grouped
class TypedDiscover(Given, DiscoverConfig):
    """Settings of a discovery as they were typed."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What is typed beside the settings: files, and what is printed."""

    config_file: Annotated[Path | None, Parameter(name="--config", group=GROUPS["Data"])] = None
    """A TOML file of settings, such as the config.toml of a run. The command line and the
    environment take precedence."""
    out: Annotated[Path | None, Parameter(name=["--out", "-o"], group=GROUPS["Output"])] = None
    """The run folder; runs/DATA-METHOD or runs/DATA-MODE if not given."""
    resume: Flag = False
    """Continue the run that is in the folder."""
    overwrite: Flag = False
    """Replace the run that is in the folder."""
    json: Flag = False
    """Print the measures as JSON."""
    quiet: Quiet = False
    """Show no progress."""


@app.command
def demo(*, out: Path = Path("runs/demo"), json: Flag = False) -> None:
    """Train, evaluate and discover on real handwritten digits of scikit-learn; no download.

    Args:
        out: The folder of its two runs; an earlier demo in it is replaced.
        json: Print the measures as JSON.
    """
    from nearkin.commands.demo import demo as run_demo

    with Terminal(json) as terminal:
        result = run_demo(out=out, reporter=terminal)
    show(result.summary, json, result.lines())


@app.command
def check(
    data: str,
    /,
    *,
    labels: str = "auto",
    scan: Literal["headers", "full"] = "headers",
    json: Flag = False,
) -> None:
    """Check images before training: counts, sizes, bad files, duplicates, proposed settings.

    Args:
        data: A folder, a CSV or Parquet table, a zip or tar, an .npz, a name such as digits, or
            FILE.py:NAME.
        labels: For scoring only: auto, none, folders, or a table with columns path and label.
        scan: headers opens every file; full decodes every image.
        json: Print the result as JSON.
    """
    from nearkin.commands.check import check as run_check

    with Terminal(json) as terminal:
        result = run_check(data, labels=labels, scan=scan, reporter=terminal)
    show(result.to_dict(), json, result.lines())


@app.command
def train(
    data: str | None = None,
    /,
    *,
    config: Annotated[TypedTrain, Parameter(name="*")] | None = None,
    run: Annotated[RunOptions, Parameter(name="*")] | None = None,
    **options: Options,
) -> None:
    """Train an encoder on images without labels, and measure it.

    Args:
        data: A folder, a CSV or Parquet table, a zip or tar, an .npz, a name such as digits, or
            FILE.py:NAME.
        config: Settings.
        run: Files, and what is printed.
        options: Options of the method, such as --temperature 0.2. --method NAME --help lists them.
    """
    _run(TrainConfig, data, config, run or RunOptions(), options)


@app.command
def discover(
    data: str | None = None,
    /,
    *,
    config: Annotated[TypedDiscover, Parameter(name="*")] | None = None,
    run: Annotated[RunOptions, Parameter(name="*")] | None = None,
    **options: Options,
) -> None:
    """Find novel classes among images of which some are labeled.

    Args:
        data: A folder, a CSV or Parquet table, a zip or tar, an .npz, a name such as digits, or
            FILE.py:NAME.
        config: Settings.
        run: Files, and what is printed.
        options: Options of the last stage's method, ncl or simgcd. --mode MODE --help lists them.
    """
    _run(DiscoverConfig, data, config, run or RunOptions(), options)


def _run(
    kind: type[Config],
    data: str | None,
    typed: Given | None,
    run: RunOptions,
    options: Mapping[str, str],
) -> None:
    """Train or discover; the first process shows how it goes, and prints the result."""
    settings = read_toml(run.config_file, kind) if run.config_file else {}
    stored, settings = settings.pop("data", None), merged(settings, typed, options)
    data, verb = data or stored, "train" if kind is TrainConfig else "discover"
    if data is None:
        raise UsageError(f"no images given; say nearkin {verb} DATA, or --config with a data key")
    from nearkin.distributed import is_main_process

    if kind is TrainConfig:
        from nearkin.commands.train import train as command
        from nearkin.evaluation.evaluate import lines
    else:
        from nearkin.commands.discover import discover as command  # type: ignore[assignment]
        from nearkin.run.folder import lines
    config: Any = kind(**settings)
    files: dict[str, Any] = {"out": run.out, "resume": run.resume, "overwrite": run.overwrite}
    with Terminal(run.quiet or run.json or not is_main_process()) as terminal:
        finished = command(data, config, **files, reporter=terminal)
    if is_main_process():
        show(finished.summary, run.json, lines(finished.summary))


@app.command
def replay(run: Path, data: str | None = None, /) -> None:
    """Repeat the step at which a run diverged, and name the layer.

    Args:
        run: A run folder.
        data: Its images, if they are no longer where they were.
    """
    from nearkin.commands.replay import replay as run_replay

    show(None, False, run_replay(run, data))


STAGE_METHODS = {"gcd": "simgcd", "ncd": "ncl"}  # of a discovery's last stage, by mode


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
