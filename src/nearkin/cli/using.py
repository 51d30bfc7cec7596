"""Commands that use a trained encoder."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from nearkin.cli.app import Flag, alone, app, show
from nearkin.cli.terminal import Terminal


@app.command
def evaluate(run: Path, data: str | None = None, /, *, json: Flag = False) -> None:
    """Measure a run's encoder beside its floors: raw pixels and the untrained network.

    Args:
        run: A run folder.
        data: Other images than those of the run.
        json: Print the measures as JSON.
    """
    if not alone():
        return
    from nearkin.commands.evaluate import evaluate as run_evaluate
    from nearkin.evaluation.evaluate import table_lines

    with Terminal(json) as terminal:
        evaluation = run_evaluate(run, data, reporter=terminal)
    show(evaluation.to_dict(), json, table_lines(evaluation))


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
    from nearkin.distributed import is_first
    from nearkin.errors import UsageError
    from nearkin.evaluation.shards import SHARD

    if is_folder(output):
        with Terminal(not is_first()) as terminal:
            written = embed_parts(run, data, output, shard=shard, part=part, reporter=terminal)
        if is_first():
            show(None, False, written.lines(Path(output)))
        return
    if not alone():
        return
    if part or shard != SHARD:
        raise UsageError(f"{output} is one file, without parts; give a folder, {output}/")
    with Terminal(not is_first()) as terminal:
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
    """Show which images are most similar to some.

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
