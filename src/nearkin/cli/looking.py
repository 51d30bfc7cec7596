"""Commands that show what was learned."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from nearkin.cli.app import Flag, app, show
from nearkin.cli.terminal import Terminal


@app.command
def report(
    run: Path,
    data: str | None = None,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
) -> None:
    """Make the page of a run anew: report.html, one file that opens by a double-click.

    Args:
        run: A run folder.
        data: Its images, if they are no longer where they were.
        output: Where to; the report.html of the run if not given.
    """
    from nearkin.commands.report import report as run_report

    print(run_report(run, data, output=output).resolve())


@app.command
def explore(
    run: Path,
    data: str | None = None,
    /,
    *,
    port: int = 0,
    host: str = "127.0.0.1",
    i_know: Flag = False,
) -> None:
    """Look around in a run with a browser: search, name classes, copy images; Ctrl-C ends it.

    Args:
        run: A run folder.
        data: Its images, if they are no longer where they were.
        port: Where to listen; 0 is any port that is free.
        host: The address to listen on. Other than of this computer alone, it needs --i-know.
        i_know: Whoever can listen in on the way will see all that is shown, and the secret.
    """
    from nearkin.commands.explore import explore as run_explore

    with Terminal() as terminal:
        run_explore(run, data, port=port, host=host, i_know=i_know, reporter=terminal)


@app.command
def compare(
    *runs: Path,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    json: Flag = False,
) -> None:
    """Put finished runs side by side: what differs in their settings, and what they are worth.

    Args:
        runs: Run folders, all trainings or all discoveries.
        output: Also make a page, such as compare.html.
        json: Print the comparison as JSON.
    """
    from nearkin.commands.compare import compare as run_compare

    found = run_compare(runs, output=output)
    show(found.to_dict(), json, found.lines())


@app.command
def export(
    run: Path,
    data: str | None = None,
    /,
    *,
    format: Literal["atlas"],
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
) -> None:
    """Write the images of a run, their places and their neighbors for another program.

    Args:
        run: A run folder.
        data: Its images, if they are no longer where they were.
        format: atlas is the Parquet table that Embedding Atlas reads.
        output: The file.
    """
    from nearkin.commands.export import export as run_export

    count = run_export(run, output, data, format=format)
    print(f"{count} images: {output.resolve()}")
