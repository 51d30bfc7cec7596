"""Commands that use what was trained, and commands that list what there is."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from nearkin.cli.app import Flag, app, is_only_process, show
from nearkin.cli.terminal import Terminal

Output = Annotated[Path | None, Parameter(name=["--output", "-o"])]


@app.command
def evaluate(run: Path, data: str | None = None, /, *, json: Flag = False) -> None:
    """Measure a run's encoder beside its floors: raw pixels and the untrained network.

    Args:
        run: A run folder.
        data: Other images than those of the run.
        json: Print the measures as JSON.
    """
    if not is_only_process():
        return
    from nearkin.commands.evaluate import evaluate as run_evaluate

    with Terminal(json) as terminal:
        evaluation = run_evaluate(run, data, reporter=terminal)
    show(evaluation.to_dict(), json, evaluation.lines())


@app.command
def embed(
    run: Path,
    data: str,
    /,
    *,
    output: Annotated[str, Parameter(name=["--output", "-o"])],
    shard: int = 65_536,
    part: str = "",
) -> None:
    """Write the features of images as .parquet, .npz, or .npy with a .csv beside it.

    Into a folder, they are written in parts, with only one part in memory: what is there is not
    made again, and processes that torchrun or srun has started divide the parts.

    Args:
        run: A run folder, or an encoder.safetensors.
        data: The images: what `nearkin train` takes.
        output: The file, whose ending says how it is written; or a folder: its name ends in /.
        shard: Images of a part.
        part: I/N, such as 1/8: make the I-th of N shares of the parts, as a job of an array.
    """
    from nearkin.commands.embed import embed as run_embed
    from nearkin.commands.embed import embed_parts, is_folder
    from nearkin.distributed import is_main_process
    from nearkin.errors import UsageError
    from nearkin.evaluation.table import SHARD

    if is_folder(output):
        with Terminal(not is_main_process()) as terminal:
            written = embed_parts(run, data, output, shard=shard, part=part, reporter=terminal)
        if is_main_process():
            show(None, False, written.lines(Path(output)))
        return
    if not is_only_process():
        return
    if part or shard != SHARD:
        raise UsageError(f"{output} is one file, without parts; give a folder, {output}/")
    with Terminal(not is_main_process()) as terminal:
        embeddings = run_embed(run, data, output=output, reporter=terminal)
    count, dim = embeddings.vectors.shape
    print(f"{count} images, {dim} features each: {Path(output).resolve()}")
    for path, reason in embeddings.bad.items():
        print(f"left out {path!r}: {reason}", file=sys.stderr)


@app.command
def neighbors(
    run: Path,
    /,
    *images: str,
    vectors: Annotated[Path | None, Parameter(name="--in")] = None,
    index: Path | None = None,
    top: int = 10,
    sheet: Path | None = None,
    data: str | None = None,
    json: Flag = False,
) -> None:
    """Show the images that are most similar to given ones.

    Args:
        run: A run folder, or an encoder.safetensors.
        images: Files, each of which is looked for.
        vectors: What `nearkin embed` has written, to be searched; by default the features of the
            run's own images.
        index: What `nearkin index` has made of them; faster, and may miss some.
        top: How many to show.
        sheet: Also make an image of them, such as sheet.png.
        data: The images to show on it, if they are not those of the run.
        json: Print them as JSON.
    """
    from nearkin.commands.neighbors import neighbors as run_neighbors

    found = run_neighbors(run, images, vectors=vectors, index=index, top=top)
    if sheet is not None:
        from nearkin.commands.export import sheet as run_sheet

        run_sheet(found, run, sheet, data)
    lines = [line for one in found for line in one.lines()]
    show([one.to_dict() for one in found], json, lines)


@app.command
def index(
    vectors: Path, /, *, output: Annotated[Path, Parameter(name=["--output", "-o"])]
) -> None:
    """Make an approximate index of features, for `nearkin neighbors --index`; needs faiss.

    Args:
        vectors: What `nearkin embed` has written.
        output: A name that ends in .faiss.
    """
    from nearkin.commands.index import build_index

    made = build_index(vectors, output)
    print(f"{made.images} images, {made.kind}: {output.resolve()}")


@app.command
def assign(
    run: Path,
    data: str,
    /,
    *,
    output: Output = None,
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
    if not is_only_process():
        return
    from nearkin.commands.assign import assign as run_assign

    with Terminal(json) as terminal:
        found = run_assign(run, data, output=output, copy_to=copy_to, reporter=terminal)
    show(found.to_dicts(), json, found.lines())


@app.command
def report(run: Path, data: str | None = None, /, *, output: Output = None) -> None:
    """Write the page of a run again: report.html, one file that works offline.

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
    """Serve a run to a browser: search, name classes, copy images; Ctrl-C ends it.

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
def compare(*runs: Path, output: Output = None, json: Flag = False) -> None:
    """Compare finished runs: their measures, and the settings that differ.

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
    """Write images, map coordinates and neighbors of a run for another program.

    Args:
        run: A run folder.
        data: Its images, if they are no longer where they were.
        format: atlas is the Parquet table that Embedding Atlas reads.
        output: The file.
    """
    from nearkin.commands.export import export as run_export

    count = run_export(run, output, data, format=format)
    print(f"{count} images: {output.resolve()}")


@app.command
def methods(name: str = "", /) -> None:
    """List the methods, or show all about one: equation, options, paper, recipes, results.

    Args:
        name: The one to show.
    """
    from nearkin.commands.methods import method_lines

    print("\n".join(method_lines(name)))


@app.command
def backbones(pattern: str = "", /) -> None:
    """List the networks that can be trained.

    Args:
        pattern: Only names that contain this.
    """
    from nearkin.commands.info import backbone_lines

    print("\n".join(backbone_lines(pattern)))


@app.command
def config(method: str = "simclr", /) -> None:
    """Print every setting of a method with its default, as TOML for `nearkin train --config`.

    Args:
        method: Its name.
    """
    from nearkin.commands.methods import config_lines

    print("\n".join(config_lines(method)))


@app.command
def doctor() -> None:
    """Print versions, device, precision and threads, for a bug report."""
    from nearkin.commands.info import doctor_lines

    print("\n".join(doctor_lines()))
