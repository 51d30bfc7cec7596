"""Commands that use what was trained, and commands that list what there is."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.completion.detect import ShellDetectionError

import nearkin
from nearkin.cli.app import ENCODER, Flag, Images, app, is_only_process, show
from nearkin.cli.terminal import Terminal
from nearkin.config import FULL, PROTOCOLS, Criterion, ExportFormat, Rule
from nearkin.errors import OutputError, UsageError
from nearkin.files import check_new

Json = Annotated[Flag, Parameter(help="Print the result as JSON.")]
Output = Annotated[Path, Parameter(name=["--output", "-o"])]
Run = Annotated[Path, Parameter(help="A run folder.")]
Encoder = Annotated[str, Parameter(help=ENCODER)]
Protocol = Annotated[
    str,
    Parameter(
        help="What to measure, separated by commas:\n\n"
        + "".join(f"- {name}: {measures}\n" for name, measures in PROTOCOLS.items())
        + f"- {FULL}: all of them"
    ),
]
Features = Annotated[
    Literal["backbone", "embedding"],
    Parameter(help="embedding: measure also what the run's projector makes of the features."),
]
ImageSize = Annotated[
    int | Literal["auto"],
    Parameter(help="Side of the images in pixels; auto: that of the encoder."),
]
AllowPartial = Annotated[
    Flag,
    Parameter(help="Weights may be missing from the encoder's checkpoint, or left over."),
]
TrustRemoteCode = Annotated[
    Flag,
    Parameter(help="Run code that files of the run name: a network, a method, a source."),
]
Source = Annotated[str, Parameter(help=f"{ENCODER} Or what `nearkin embed -o` has written.")]
DataOf = Annotated[
    str | None,
    Parameter(help="Images, if they are not those of the run: to embed, or of the vectors."),
]
VectorsOf = Annotated[
    Path | None,
    Parameter(name="--in", help="What `nearkin embed -o` has made of DATA with that encoder."),
]
RunImages = Annotated[
    str | None, Parameter(help="Its images, if they are no longer where they were.")
]


@app.command
def demo(*, out: Path = Path("runs/demo"), json: Json = False) -> None:
    """Train, evaluate and discover on real handwritten digits of scikit-learn; no download.

    Args:
        out: The folder of its two runs; an earlier demo in it is replaced.
    """
    with Terminal(json) as terminal:
        result = nearkin.demo(out=out, reporter=terminal)
    show(result.summary, json, result.lines())


@app.command
def check(
    data: Images,
    /,
    *,
    labels: str = "auto",
    scan: Literal["headers", "full"] = "headers",
    json: Json = False,
) -> None:
    """Check images before training: counts, sizes, bad files, duplicates, proposed settings.

    Args:
        labels: For scoring only: auto, none, folders, or a table with columns path and label.
        scan: headers opens every file; full decodes every image.
    """
    with Terminal(json) as terminal:
        result = nearkin.check(data, labels=labels, scan=scan, reporter=terminal)
    show(result.to_dict(), json, result.lines())


@app.command
def replay(
    run: Run, data: RunImages = None, /, *, trust_remote_code: TrustRemoteCode = False
) -> None:
    """Repeat the step at which a run diverged, and name the layer."""
    show(None, False, nearkin.replay(run, data, trust_remote_code=trust_remote_code))


@app.command
def evaluate(
    run: Source,
    data: str | None = None,
    /,
    *,
    train: Path | None = None,
    devices: int = 1,
    protocol: Protocol = "quick",
    features: Features = "backbone",
    image_size: ImageSize = "auto",
    allow_partial: AllowPartial = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Measure a run's encoder beside its floors: its start, the untrained network, raw pixels.

    Of vectors that `nearkin embed -o` has written, it measures as many as a disk holds.

    Args:
        data: Other images than those of the run.
        train: Vectors to learn from, if not those of the split train among the given ones.
        devices: Processes that share the measures of vectors.
    """
    from nearkin.distributed import is_main_process
    from nearkin.evaluation.table import are_vectors
    from nearkin.run.folder import RunFolder

    if not are_vectors(Path(run)) and not is_only_process():
        return
    with Terminal(json) as terminal:
        evaluation = nearkin.evaluate(
            run,
            data,
            train=train,
            devices=devices,
            protocol=protocol,
            features=features,
            image_size=image_size,
            allow_partial=allow_partial,
            trust_remote_code=trust_remote_code,
            reporter=terminal,
        )
    if is_main_process():
        show(evaluation.to_dict(), json, evaluation.lines(RunFolder(Path(run)).start))


@app.command
def neighbors(
    run: Encoder,
    /,
    *images: str,
    vectors: Annotated[Path | None, Parameter(name="--in")] = None,
    index: Path | None = None,
    top: int = 10,
    image_size: ImageSize = "auto",
    allow_partial: AllowPartial = False,
    trust_remote_code: TrustRemoteCode = False,
    sheet: Path | None = None,
    data: str | None = None,
    json: Json = False,
) -> None:
    """Show the images that are most similar to given ones.

    Args:
        images: Files, each of which is looked for.
        vectors: What `nearkin embed` has written, to be searched; by default the features of the
            run's own images.
        index: What `nearkin index` has made of them; faster, and may miss some.
        top: How many to show.
        sheet: Also make an image of them, such as sheet.png.
        data: The images to show on it, if they are not those of the run.
    """
    if sheet is not None:
        check_new(sheet)
    results = nearkin.neighbors(
        run,
        images,
        vectors=vectors,
        index=index,
        top=top,
        image_size=image_size,
        allow_partial=allow_partial,
        trust_remote_code=trust_remote_code,
    )
    if sheet is not None:
        from nearkin.commands.neighbors import sheet as run_sheet

        run_sheet(results, run, sheet, data, trust_remote_code=trust_remote_code)
    lines = [line for result in results for line in result.lines()]
    show([result.to_dict() for result in results], json, lines)


@app.command(config=())  # NEARKIN_PRECISION is that of a training's numbers
def duplicates(
    data: Images,
    /,
    *,
    encoder: Annotated[str | None, Parameter(help=f"{ENCODER} Compare features, too.")] = None,
    vectors: VectorsOf = None,
    threshold: float | None = None,
    precision: float | None = None,
    output: Output | None = None,
    page: Path | None = None,
    apply: Path | None = None,
    image_size: ImageSize = "auto",
    allow_partial: AllowPartial = False,
    trust_remote_code: TrustRemoteCode = False,
    seed: int = 0,
    json: Json = False,
) -> None:
    """Find exact and near-duplicates, and the one to keep of each; nothing is deleted.

    Args:
        threshold: Least cosine of features.
        precision: Choose the threshold by its precision on edited copies of the images: .99 by
            default.
        output: A new .csv: path, action (keep or drop), of, similarity, why.
        page: A new .html, to look at pairs.
        apply: Write what is kept: a new .csv list, or copies in a new folder.
        seed: Decides which images are edited, and how.
    """
    if not is_only_process():
        return
    with Terminal(json) as terminal:
        result = nearkin.duplicates(
            data,
            encoder=encoder,
            vectors=vectors,
            threshold=threshold,
            precision=precision,
            output=output,
            page=page,
            apply=apply,
            image_size=image_size,
            allow_partial=allow_partial,
            trust_remote_code=trust_remote_code,
            seed=seed,
            reporter=terminal,
        )
    show(result.to_dict(), json, result.lines())


@app.command
def select(
    source: Source,
    data: DataOf = None,
    /,
    *,
    num: int,
    output: Output,
    rule: Rule = "typical",
    labeled: Path | None = None,
    vectors: VectorsOf = None,
    image_size: ImageSize = "auto",
    allow_partial: AllowPartial = False,
    trust_remote_code: TrustRemoteCode = False,
    seed: int = 0,
) -> None:
    """Select which images to label first.

    Args:
        num: How many.
        output: A new .csv: path, and label to be filled in.
        rule: typical: of each cluster the image with the closest neighbors; diverse: the image
            farthest from all before; uncertain: the least certain of a classification or
            discovery; mixture: all of these in turn; random.
        labeled: A table with columns path and label: images that have a label already.
        seed: Decides what is drawn.
    """
    if not is_only_process():
        return
    with Terminal() as terminal:
        result = nearkin.select(
            source,
            data,
            num=num,
            output=output,
            rule=rule,
            labeled=labeled,
            vectors=vectors,
            image_size=image_size,
            allow_partial=allow_partial,
            trust_remote_code=trust_remote_code,
            seed=seed,
            reporter=terminal,
        )
    show(None, False, result.lines())


@app.command
def index(vectors: Path, /, *, output: Output) -> None:
    """Make an approximate index of features, for `nearkin neighbors --index`; needs faiss.

    Args:
        vectors: What `nearkin embed` has written.
        output: A name that ends in .faiss.
    """
    made = nearkin.build_index(vectors, output)
    print(f"{made.images} images, {made.kind}: {output.resolve()}")


@app.command
def assign(
    run: Run,
    data: Images,
    /,
    *,
    output: Output | None = None,
    copy_to: Path | None = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Sort new images into the classes of a discovery or a classification, without training.

    Args:
        output: A CSV like the assignments.csv of the run.
        copy_to: A new folder to sort the images into, by class.
    """
    if not is_only_process():
        return

    with Terminal(json) as terminal:
        result = nearkin.assign(
            run,
            data,
            output=output,
            copy_to=copy_to,
            trust_remote_code=trust_remote_code,
            reporter=terminal,
        )
    show(result.to_dicts(), json, result.lines())


@app.command
def report(
    run: Annotated[Path, Parameter(help="A run folder, or what `nearkin embed -o` has written.")],
    data: DataOf = None,
    /,
    *,
    output: Output | None = None,
    one_file: int = 50_000,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write the page of a run again, or one with the map of vectors; it works offline.

    Args:
        output: Where to; the report.html of the run if not given.
        one_file: Up to this many images, the page is one file; above, it has a folder beside it.
    """
    page = nearkin.write_report(
        run, data, output=output, one_file=one_file, trust_remote_code=trust_remote_code
    )
    print(page.resolve())


@app.command
def explore(
    run: Run,
    data: RunImages = None,
    /,
    *,
    port: int = 0,
    host: str = "127.0.0.1",
    i_know: Flag = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve a run to a browser: search, name classes, copy images; Ctrl-C ends it.

    Args:
        port: Where to listen; 0 is any port that is free.
        host: The address to listen on. Other than of this computer alone, it needs --i-know.
        i_know: Whoever can listen in on the way will see all that is shown, and the secret.
    """
    with Terminal() as terminal:
        nearkin.explore(
            run,
            data,
            port=port,
            host=host,
            i_know=i_know,
            trust_remote_code=trust_remote_code,
            reporter=terminal,
        )


@app.command
def compare(
    *runs: Path,
    rank_by: Criterion | None = None,
    data: str | None = None,
    output: Output | None = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Compare finished runs: their measures, and the settings that differ.

    Args:
        runs: Run folders, all trainings or all discoveries.
        rank_by: Rank encoders without reading a label: those of several runs, or the checkpoints
            of one.
        data: The images to rank by, if they are no longer where they were.
        output: Also make a page, such as compare.html.
    """
    if rank_by is None and data is not None:
        raise UsageError("a comparison reads no images; --data goes with --rank-by")
    if rank_by is not None and output is not None:
        raise UsageError("--rank-by makes no page; leave out --output")
    with Terminal(json) as terminal:
        result = (
            nearkin.compare(runs, output=output)
            if rank_by is None
            else nearkin.rank(
                runs,
                data,
                by=rank_by,
                trust_remote_code=trust_remote_code,
                reporter=terminal,
            )
        )
    show(result.to_dict(), json, result.lines())


@app.command
def export(
    run: Encoder,
    data: RunImages = None,
    /,
    *,
    format: ExportFormat = "atlas",
    dynamic_size: Flag = False,
    license: str = "",
    data_license: str = "",
    output: Output | None = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a run's encoder or classifier, or its images, for another program.

    Args:
        format: A table of the images, for Embedding Atlas; the encoder's weights as safetensors,
            or for timm, torchvision or Hugging Face; or a graph from images of 8 bits to features
            (of a classification or discovery, to probabilities), as ONNX or for torch.export.
        dynamic_size: The graph takes images of any size, not only the encoder's.
        license: The license that you give these weights, for the model card.
        data_license: The license of the images, for the model card.
        output: A new folder; exports/FORMAT in the run folder if not given. For atlas, a file
            that ends in .parquet; atlas.parquet in the run folder if not given.
    """
    with Terminal() as terminal:
        result = nearkin.export(
            run,
            output,
            data,
            format=format,
            dynamic_size=dynamic_size,
            license=license,
            data_license=data_license,
            trust_remote_code=trust_remote_code,
            reporter=terminal,
        )
    show(None, False, result.lines())


@app.command
def methods(name: str = "", /) -> None:
    """List the methods, or show all about one: equation, options, paper, recipes, results.

    Args:
        name: The one to show.
    """
    from nearkin.commands.info import method_lines

    print("\n".join(method_lines(name)))


@app.command
def backbones(pattern: str = "", /, *, pretrained: bool = False) -> None:
    """List the networks that can be trained, or the encoders that can be started from.

    Args:
        pattern: Only names that contain this.
        pretrained: List the names of encoders with weights, each with its license.
    """
    from nearkin.commands.info import pretrained_lines

    lines = pretrained_lines(pattern) if pretrained else nearkin.list_backbones(pattern)
    print("\n".join(lines))


@app.command
def config(name: str = "simclr", /, *, recipes: Flag = False) -> None:
    """Print every setting of a method with its default, or a recipe, as TOML for `--config`.

    Args:
        name: A method, or recipe:NAME.
        recipes: List the recipes, which are settings of papers, instead.
    """
    from nearkin.commands.info import recipe_lines

    print("\n".join(recipe_lines()) if recipes else nearkin.default_settings(name).rstrip("\n"))


@app.command
def doctor() -> None:
    """Print versions, device, precision and threads, for a bug report."""
    print("\n".join(f"{name:10} {text}" for name, text in nearkin.doctor().items()))


@app.command(name="--install-completion")
def install_completion(
    *, shell: Literal["bash", "zsh", "fish", "powershell"] | None = None
) -> None:
    """Install completion of commands and options by Tab.

    Args:
        shell: For which shell; for the one that runs if not given.
    """
    try:
        path = app.install_completion(shell=shell)
    except ShellDetectionError as error:
        raise UsageError(f"cannot tell which shell runs; give --shell ({error})") from error
    except OSError as error:
        raise OutputError(f"cannot install completion: {error}; give another HOME") from error
    print(f"{path}; shells that are started from now on have it")
