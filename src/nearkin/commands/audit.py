"""`nearkin audit`: what a split of images hides, and what an encoder follows."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from nearkin.auditing.data import Audited, of_images, of_tables, open_parts
from nearkin.auditing.outcome import Audit, examine
from nearkin.commands.arguments import EncoderLike, PathLike, command, name_of, processes, refuse
from nearkin.commands.sources import (
    STORED,
    check_classes,
    check_listed,
    check_output,
    is_table,
    places,
    table_of,
    write_page,
    write_rows,
)
from nearkin.config import AutoCountOrZero, AutoImageSize, Seed
from nearkin.data.images import Images
from nearkin.distributed import choose_device
from nearkin.encoders.encoder import load
from nearkin.errors import UsageError
from nearkin.evaluation.column import Values
from nearkin.evaluation.layout import landmark_rows
from nearkin.report.image_map import by_name, image_map
from nearkin.report.page.html import render
from nearkin.report.page.map import ImageMap
from nearkin.report.pages import with_thumbnails
from nearkin.run.data import trained_on
from nearkin.run.folder import data_name
from nearkin.run.reporter import Reporter, reporter_of
from nearkin.text import as_text


@command
def audit(
    data: Any = None,
    *,
    encoder: EncoderLike | None = None,
    train: Any = None,
    test: Any = None,
    split: str = "",
    labels: str = "auto",
    ignore: str = "",
    output: PathLike | None = None,
    page: PathLike | None = None,
    overwrite: bool = False,
    precision: float = 0.99,
    image_size: AutoImageSize = "auto",
    allow_partial: bool = False,
    trust_remote_code: bool = False,
    seed: Seed = 0,
    device: str = "auto",
    workers: AutoCountOrZero = "auto",
    verbose: bool | Reporter = True,
) -> Audit:
    """Find what a split of images hides: leaks and what they cost, and labels that may be wrong.

    Test images that are in the training part, too; groups of one source; accuracy with them and
    without; a split without them; images that show little; and, with --ignore, whether features
    follow a column such as the camera. No image is changed.

    Args:
        data: Images whose parts are named by folders, by a table or by --split; or their features,
            a .parquet or a folder of shards that `nearkin embed` has written.
        encoder: A run or an encoder, whose features are compared; none for features.
        train: Images or features of the training part, with --test in place of DATA.
        test: Those of the test part.
        split: The column of the table that names the part of each image: train, val or test.
        labels: The classes, as `nearkin train` takes them: auto, none, folders, or a table.
        ignore: A column of that table, or of DATA, that features are to ignore, such as camera.
        output: A .csv file for the repaired split, which other commands take as data, or as
            --labels of images that are no files, as in an archive; of features alone, if it lies
            in the folder that their paths are relative to.
        page: A .html file, to look at what was found; with --ignore, also at a map of the images,
            colored by the column.
        overwrite: Replace these files.
        precision: The least share of duplicates among the leaks that features alone find.
        image_size: Side of the images in pixels that features are computed with.
        allow_partial: Whether weights may be missing from the encoder's checkpoint, or left over.
        trust_remote_code: Whether to run code that files of the run name.
        seed: Decides what is drawn.
        device: Where to compute.
        workers: Processes that decode photographs; `auto`: one per CPU.
        verbose: Whether to show progress, or what receives it.

    Raises:
        UsageError: If that does not fit together, a part is empty or within the other, or classes
            or the column have a single value.
        OutputError: If a target exists or cannot be written.
    """
    sets = _sets(data, train, test, split)
    if not 0 < precision < 1:
        raise UsageError(f"--precision {precision:g} is not above 0 and below 1")
    for path, suffix in ((output, ".csv"), (page, ".html")):
        check_output(path, suffix, overwrite=overwrite, reads=[*sets, encoder, labels])
    log, where, number = reporter_of(verbose), choose_device(device), processes(workers)
    if encoder is None:
        sized = image_size != "auto"
        refuse(STORED, labels=labels != "auto", image_size=sized, allow_partial=allow_partial)
        _check_places(sets, output)
        audited, ignored = _of_vectors(sets, output, split, ignore, log)
    else:
        loaded = load(
            name_of(encoder),
            image_size=image_size,
            allow_partial=allow_partial,
            trust_remote_code=trust_remote_code,
        )
        images, ignored = open_parts(sets, split, ignore, labels, log)
        _check_places(sets, output, images)
        audited = of_images(images, loaded, where, number, log)
        assert audited.images is not None
        seen = trained_on(name_of(encoder), audited.images)
        if seen is not None:
            audited = replace(audited, num_seen=int(seen[audited.is_test].sum()))
        ignored = ignored[audited.embeddings.rows]
    found = examine(
        audited,
        ignore,
        ignored,
        precision=precision,
        seed=seed,
        device=where,
        on_progress=log.progress,
    )
    if output is not None:
        _write_split(Path(output), found)
    if page is not None:
        content = found.page(Path(data_name(sets[0])).name)
        if audited.images is not None:
            content = with_thumbnails(content, audited.images, number)
        write_page(Path(page), render(content, _colored(found, ignored)))
    return found


def _check_places(
    sets: Sequence[Any], output: PathLike | None, images: Images | None = None
) -> None:
    """Refuse a table that changes classes, or of two sets and not of where their images lie."""
    if output is not None and images is not None:
        check_classes(images.classes, "leave -o out")
    if len(sets) < 2 or output is None:
        return
    if images is None:
        raise UsageError(
            "-o is a table of images, and two tables of features do not say where these are; give "
            "the images, with --encoder"
        )
    check_listed(images, "leave -o out")


def _colored(found: Audit, ignored: Values) -> ImageMap | None:
    """Return a map colored by the column to ignore, where there is one, and images.

    Of more images than one file holds, it is of a sample.
    """
    embeddings, images = found.audited.embeddings, found.audited.images
    if found.column is None or images is None:
        return None
    rows = landmark_rows(embeddings.class_names)
    sample = replace(embeddings.subset(rows), rows=rows)
    map_ = image_map(None, sample, images)
    if map_ is None:
        return None
    own = by_name(found.column.column, ignored[map_.number], f"{found.column.sentence}.")
    first = (own,) if own.known.any() and len(own.classes) > 1 else ()
    return replace(map_, colorings=(*first, *map_.colorings), total=len(images))


def _sets(data: Any, train: Any, test: Any, split: str) -> Sequence[Any]:
    """Return the data, or the two sets that are given in their place."""
    if (data is None) == (train is None and test is None) or (train is None) != (test is None):
        raise UsageError("give DATA, or --train and --test in its place")
    if data is None and split:
        raise UsageError(f"--split {split} names parts, and so do --train and --test; omit one")
    return [train, test] if data is None else [data]


def _of_vectors(
    sets: Sequence[Any], output: PathLike | None, split: str, ignore: str, log: Reporter
) -> tuple[Audited, Values]:
    """Read features; refuse images, which need an encoder, and classes that a table changes."""
    for each in sets:
        if not is_table(each):
            raise UsageError(f"{data_name(each)}: these are images; give --encoder, too")
    with ExitStack() as stack:
        tables = [stack.enter_context(table_of(each, log)) for each in sets]
        audited, ignored = of_tables(tables, split, ignore, log)
    if output is not None:
        check_classes(audited.embeddings.classes, "leave -o out")
    return audited, ignored


def _write_split(path: Path, found: Audit) -> None:
    images, embeddings = found.audited.images, found.audited.embeddings
    names = embeddings.paths if images is None else places(images)
    groups = map(as_text, replace(embeddings, groups=found.groups).named_groups)
    columns = names, found.repaired.tolist(), embeddings.class_names.tolist(), groups
    write_rows(path, ("path", "split", "label", "group"), zip(*columns, strict=True))
