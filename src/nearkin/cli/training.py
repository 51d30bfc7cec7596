"""Commands that train an encoder."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from nearkin.cli.app import Flag, Given, app, merged, show
from nearkin.cli.terminal import Terminal
from nearkin.config import TrainConfig, read_toml
from nearkin.errors import UsageError


class Typed(Given, TrainConfig):
    """Settings of a training as they were typed."""


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
        data: A folder, a CSV or Parquet table, a zip or tar, an .npz, or a name such as digits.
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
    config: Annotated[Typed, Parameter(name="*")] | None = None,
    config_file: Annotated[Path | None, Parameter(name="--config")] = None,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    resume: Flag = False,
    overwrite: Flag = False,
    json: Flag = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
    **options: str,
) -> None:
    """Train an encoder on images without labels, and measure it.

    Args:
        data: A folder, a CSV or Parquet table, a zip or tar, an .npz, or a name such as digits.
        config: Settings.
        config_file: A TOML file of settings, such as the config.toml of a run. What is typed or
            set in the environment goes before it.
        out: The run folder; runs/DATA-METHOD if not given.
        resume: Continue the run that is in the folder.
        overwrite: Replace the run that is in the folder.
        json: Print the measures as JSON.
        quiet: Show no progress.
        options: The method's own options, such as --temperature 0.2; `nearkin config METHOD`
            shows them.
    """
    settings = read_toml(config_file) if config_file else {}
    stored, settings = settings.pop("data", None), merged(settings, config, options)
    if data is None and stored is None:
        raise UsageError("no images given; say nearkin train DATA, or --config with a data key")
    from nearkin.commands.train import train as run_train
    from nearkin.distributed import is_first
    from nearkin.evaluation.evaluate import rows_of

    with Terminal(quiet or json or not is_first()) as terminal:
        run = run_train(
            data or stored,
            TrainConfig(**settings),
            out=out,
            resume=resume,
            overwrite=overwrite,
            reporter=terminal,
        )
    if is_first():
        show(run.summary, json, rows_of(run.summary))


@app.command
def replay(run: Path, data: str | None = None, /) -> None:
    """Repeat the step at which a run diverged, and say where it began.

    Args:
        run: A run folder.
        data: Its images, if they are no longer where they were.
    """
    from nearkin.commands.replay import replay as run_replay

    show(None, False, run_replay(run, data))
