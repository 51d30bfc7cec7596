"""`nearkin select`: which images to label first."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int
from typing_extensions import override

from nearkin.choices import Rule
from nearkin.commands.arguments import EncoderLike, PathLike, command, name_of
from nearkin.commands.sources import (
    Vectors,
    VectorsLike,
    check_output,
    is_table,
    open_vectors,
    write_rows,
)
from nearkin.config import AutoCountOrZero, AutoImageSize, EmbedConfig, Seed
from nearkin.data.images import Images
from nearkin.data.labels import class_of, splits_of
from nearkin.data.notes import lines
from nearkin.data.opening import open_images
from nearkin.data.remote import File
from nearkin.data.tables import Rows, file_at, match, read_table
from nearkin.discovery.clusters import LABEL_COLUMNS
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import open_table
from nearkin.metrics.selection import typical
from nearkin.result import Result
from nearkin.result import Row as Record
from nearkin.run.data import held_out_by, runs_of, stored_split
from nearkin.run.edits import Row, read_edited
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Reporter, reporter_of
from nearkin.schema import Count
from nearkin.text import as_text

SCORED: Final = ("val", "test")  # Parts whose labels would teach nothing


@dataclass(frozen=True, repr=False)
class Selection(Result):
    """Images to label, most useful first."""

    paths: tuple[str, ...]
    rule: Rule
    num_unlabeled: int  # That could have been selected
    num_labeled: int  # That have a label already
    output: Path | None

    @override
    def records(self) -> list[Record]:
        """A row per image."""
        return [{"path": path} for path in self.paths]

    @override
    def lines(self) -> list[str]:
        counts = (
            f"{len(self.paths)} of {self.num_unlabeled} unlabeled images by rule {self.rule}, "
            f"beside {self.num_labeled} labeled ones"
        )
        if self.output is None:
            return [counts, *self.paths]
        return [counts, f"fill in the column label: {self.output}"]


@command
def select(
    encoder: EncoderLike | Embeddings,
    data: Any = None,
    *,
    num: Count,
    output: PathLike | None = None,
    overwrite: bool = False,
    rule: Rule = "typical",
    labeled: PathLike | None = None,
    vectors: VectorsLike | None = None,
    image_size: AutoImageSize = "auto",
    allow_partial: bool = False,
    trust_remote_code: bool = False,
    seed: Seed = 0,
    device: str = "auto",
    workers: AutoCountOrZero = "auto",
    verbose: bool | Reporter = True,
) -> Selection:
    """Select which images to label first, by their features; the same for equal arguments.

    No label but those of `labeled`, and of the run's own classes, is ever looked at.
    Images that a run holds out for scoring are left out: their labels would teach nothing.

    Args:
        encoder: A run; an encoder, with `data`; or features that `embed` has made.
        data: Images: those to embed, or those that the vectors are of.
        num: How many.
        output: A .csv like to_label.csv of a discovery.
        overwrite: Replace the file.
        rule: `typical`: of each cluster the image with the closest neighbors (TypiClust); or
            `random`.
        labeled: A table with columns path and label: images that have a label already.
        vectors: Features of `data` by the encoder, instead of computing them.
        image_size: Side of the images in pixels that features are computed with.
        allow_partial: Whether weights may be missing from the encoder's checkpoint, or left over.
        trust_remote_code: Whether to run code that files of the run name.
        seed: Decides what is drawn, and where k-means starts.
        device: Where to compute features.
        workers: Processes that decode photographs; `auto`: one per CPU.
        verbose: Whether to show progress, or what receives it.

    Raises:
        UsageError: If that does not fit together, or there are not so many unlabeled images.
        DataError: If `labeled` names none of the images.
        OutputError: If `output` exists or cannot be written.
        CheckpointError: If vectors or assignments are damaged.
    """
    check_output(output, ".csv", overwrite=overwrite, reads=[encoder, data, labeled, vectors])
    # What needs no features is refused before they are computed.
    table = None if labeled is None else file_at(os.fspath(labeled))
    labels = table and (table, read_table(table, "label"))
    images = None if data is None else open_images(data, labels="none")
    source, log = "" if is_table(encoder) else name_of(encoder), reporter_of(verbose)
    assigned, learned = _of_run(source, images)
    if labels and images is not None:
        learned |= _labeled(*labels, images.names, images, log)
    names = () if images is None else images.names
    pool_of = partial(_pool, num, stored=[*assigned, *names], labeled=learned)
    if source and images is not None and vectors is None:
        held_out = np.isin(images.splits, SCORED) | held_out_by(source, images)
        pool_of(map(as_text, images.names), held_out)
    config = EmbedConfig(
        image_size=image_size,
        allow_partial=allow_partial,
        trust_remote_code=trust_remote_code,
        device=device,
        workers=workers,
    )
    with open_vectors(encoder, data, vectors, config, log) as opened:
        paths = opened.table.texts("path")
        if labels and images is None:
            learned |= _labeled(*labels, {*paths, *assigned}, None, log)
        # Without images that cannot be decoded.
        rows, pool, has_label = pool_of(paths, _held_out(opened, images, log))
        if rule == "typical":
            features = opened.table.gather(rows)
            order = typical(features, np.flatnonzero(has_label), num, seed=seed)
        else:
            order = np.random.default_rng(seed).permutation(np.flatnonzero(~has_label))
        chosen = tuple(pool[row] for row in order[:num].tolist())
    if output is not None:
        _write(Path(output), chosen, assigned)
    where = None if output is None else Path(output).resolve()
    return Selection(chosen, rule, int((~has_label).sum()), int(has_label.sum()), where)


def _write(path: Path, chosen: Iterable[str], assigned: Mapping[str, Row]) -> None:
    """Write a table to label, with what a run says of the images."""
    rows = (assigned.get(name, {}) | {"path": name, "label": ""} for name in chosen)
    cells = ([row.get(column, "") for column in LABEL_COLUMNS] for row in rows)
    write_rows(path, LABEL_COLUMNS, cells)


def _labeled(
    table: File, rows: Rows, names: Iterable[str], images: Images | None, log: Reporter
) -> set[str]:
    """Return the images that a table gives a label; log how many rows are of none."""
    found, notes = match(table, rows, names, images)
    for line in lines(notes):
        log.info(line)
    return {name for name, label in class_of(found)[0].items() if label}


def _pool(
    num: int,
    paths: Iterable[str],
    held_out: Bool[np.ndarray, " images"],
    *,
    stored: Iterable[str],
    labeled: Iterable[str],
) -> tuple[Int[np.ndarray, " pool"], Sequence[str], Bool[np.ndarray, " pool"]]:
    """Return the rows of images that are not held out, their names, and which have a label.

    Refuse to select more than have none. `stored` are names as they are, also if not UTF-8.
    """
    as_stored = {as_text(path): path for path in stored}
    rows = np.flatnonzero(~held_out)
    names = [as_stored.get(path, path) for path in np.array([*paths], object)[rows].tolist()]
    known = set(map(as_text, labeled))
    has_label = np.array([as_text(name) in known for name in names], bool)
    if num > (num_unlabeled := int((~has_label).sum())):
        few = f"only {num_unlabeled} images have no label; give fewer"
        none = "all images have a label or are held out; give others"
        raise UsageError(f"--num {num}, but {few if num_unlabeled else none}")
    return rows, names, has_label


def _held_out(opened: Vectors, images: Images | None, log: Reporter) -> Bool[np.ndarray, " table"]:
    """Whether each row of a table is of a part to score, or is held out by the encoder's run.

    That is known by the contents of images, or by their names where there are only features.
    """
    table = opened.table
    held = np.isin(splits_of(table.texts("split"), str(table.path)), SCORED)
    has_run = opened.source and not opened.is_of_run and runs_of(opened.source)
    if images is not None:
        rows = opened.image_rows(images, log)
        if has_run:
            held |= held_out_by(opened.source, images)[rows]
        return held
    own = RunFolder(Path(opened.source)).embeddings
    if has_run and own.exists():
        columns = (open_table(own).texts(name) for name in ("path", "split"))
        names = {path for path, split in zip(*columns, strict=True) if split == "test"}
        held |= np.array([path in names for path in table.texts("path")])
    return held


def _of_run(source: str, images: Images | None) -> tuple[dict[str, Row], set[str]]:
    """Return the rows of a run's assignments.csv by path, and the names that it has learned from.

    Nothing where the run has no such table. Where images are given, those of the run are known by
    their contents, whatever they are called now.
    """
    folder = RunFolder(Path(source))
    if not source or not folder.assignments.exists():
        return {}, set()
    rows = {row["path"]: row for row in read_edited(folder.assignments, ("path", "cluster"))}
    every, stored = set(open_table(folder.embeddings).texts("path")), stored_split(folder)
    if images is None or stored is None:
        return rows, every - {as_text(name) for name in rows}
    both = dict.fromkeys(zip(stored.names, stored.contents.tolist(), strict=True))
    called = {content: name for name, content in both}
    now = zip(images.names, images.contents.tolist(), strict=True)
    # Of exact copies the name decides.
    then = {name: name if (name, c) in both else called.get(c) for name, c in now}
    own = {name: rows[was] for name, was in then.items() if was in rows}
    learned = {name for name, was in then.items() if was and as_text(was) in every}
    return own, learned - own.keys()
