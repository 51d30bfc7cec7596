"""The command line: parse, call one function of `runs`, print. The only module that prints.

Importing it loads neither torch nor any other heavy library, so that `--help` is instant.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Env
from rich.console import Console

from nearkin.config import TrainConfig, read_toml
from nearkin.errors import NearkinError, UsageError
from nearkin.terminal import Terminal, err
from nearkin.version import __version__

HELP = """Learn from pictures without labels which are alike.

nearkin demo

nearkin train PICTURES --epochs 100
"""
app = App(name="nearkin", version=__version__, help=HELP, config=Env("NEARKIN_", command=False))

Flag = Annotated[bool, Parameter(negative="")]


class Typed(TrainConfig):
    """Settings that remember which of them were given, since these go before a file's."""

    given: frozenset[str]

    def __new__(cls, **given: Any) -> "Typed":
        """Note the names; the data class does the rest."""
        typed = super().__new__(cls)
        object.__setattr__(typed, "given", frozenset(given))
        return typed


def show(value: Any, as_json: bool, lines: list[str]) -> None:
    """Print a result: as JSON, or as lines for people."""
    if as_json:
        print(json.dumps(value))
    else:
        print("\n".join(lines))


@app.command
def demo(*, out: Path = Path("runs/demo"), json: Flag = False) -> None:
    """Train and evaluate on real handwritten digits that come with scikit-learn; no download.

    Args:
        out: The run folder; an earlier demo in it is replaced.
        json: Print the measures as JSON.
    """
    from nearkin.runs.demo import demo as run_demo
    from nearkin.runs.evaluate import rows_of

    with Terminal(json) as terminal:
        run = run_demo(out=out, reporter=terminal)
    show(run.summary, json, rows_of(run.summary))


@app.command
def check(
    data: str,
    /,
    *,
    labels: str = "auto",
    scan: Literal["headers", "full"] = "headers",
    json: Flag = False,
) -> None:
    """Look at pictures before training: counts, sizes, bad files, duplicates, proposed settings.

    Args:
        data: A folder, a CSV or Parquet table, a zip or tar, an .npz, or a name such as digits.
        labels: For scoring only: auto, none, folders, or a table with columns path and label.
        scan: headers opens every file; full decodes every picture.
        json: Print the findings as JSON.
    """
    from nearkin.runs.check import check as run_check

    found = run_check(data, labels=labels, scan=scan)
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
    """Train an encoder on pictures without labels, and measure it.

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
    stored = settings.pop("data", None)
    if data is None and stored is None:
        raise UsageError("no pictures given; say nearkin train DATA, or --config with a data key")
    named = {name.replace("-", "_"): value for name, value in options.items()}
    typed = {name: getattr(config, name) for name in config.given} if config else {}
    settings["options"] = {**settings.get("options", {}), **named}
    from nearkin.runs.evaluate import rows_of
    from nearkin.runs.train import train as run_train

    with Terminal(quiet or json) as terminal:
        run = run_train(
            data or stored,
            TrainConfig(**{**settings, **typed}),
            out=out,
            resume=resume,
            overwrite=overwrite,
            reporter=terminal,
        )
    show(run.summary, json, rows_of(run.summary))


@app.command
def evaluate(run: Path, data: str | None = None, /, *, json: Flag = False) -> None:
    """Measure a run's encoder beside its floors: raw pixels and the untrained network.

    Args:
        run: A run folder.
        data: Other pictures than those of the run.
        json: Print the measures as JSON.
    """
    from nearkin.runs.evaluate import evaluate as run_evaluate
    from nearkin.runs.evaluate import table_lines

    evaluation = run_evaluate(run, data)
    show(evaluation.to_dict(), json, table_lines(evaluation))


@app.command
def embed(
    run: Path, data: str, /, *, output: Annotated[Path, Parameter(name=["--output", "-o"])]
) -> None:
    """Write the features of pictures as .parquet, .npz, or .npy with a .csv beside it.

    Args:
        run: A run folder, or an encoder.safetensors.
        data: The pictures: what `nearkin train` takes.
        output: The file; its ending says how it is written.
    """
    from nearkin.runs.embed import embed as run_embed

    embeddings = run_embed(run, data, output=output)
    count, dim = embeddings.vectors.shape
    print(f"{count} pictures, {dim} features each: {output.resolve()}")
    for path, reason in embeddings.bad.items():
        print(f"left out {path!r}: {reason}", file=sys.stderr)


@app.command
def methods(name: str = "", /) -> None:
    """List the methods, or show all about one: equation, options, paper, recipes, results.

    Args:
        name: The one to show.
    """
    from nearkin.runs.pages import method_lines

    print("\n".join(method_lines(name)))


@app.command
def backbones(pattern: str = "", /) -> None:
    """List the networks that can be trained.

    Args:
        pattern: Only names that contain this.
    """
    from nearkin.runs.info import backbone_lines

    print("\n".join(backbone_lines(pattern)))


@app.command
def config(method: str = "simclr", /) -> None:
    """Print every setting of a method with its default, as TOML for `nearkin train --config`.

    Args:
        method: Its name.
    """
    from nearkin.runs.info import config_lines

    print("\n".join(config_lines(method)))


@app.command
def doctor() -> None:
    """Print versions, device, precision, threads and what else helps to help."""
    from nearkin.runs.info import doctor_lines

    print("\n".join(doctor_lines()))


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; see docs/exit-codes.md."""
    try:
        app(
            arguments,
            console=Console(soft_wrap=True, highlight=False),
            error_console=err,
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
    except (CycloptsError, NearkinError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code if isinstance(error, NearkinError) else UsageError.exit_code
    except BrokenPipeError:  # whoever read the output has heard enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("error: stopped at once; nothing since the last checkpoint is kept", file=sys.stderr)
        return 130
    except Exception as error:
        if "NEARKIN_TRACEBACK" in os.environ:
            raise
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        hint = "see the train.log of a run, or set NEARKIN_TRACEBACK=1, and please report it"
        print(f"error: a bug in nearkin: {what}; {hint}", file=sys.stderr)
        return NearkinError.exit_code
    return 0
