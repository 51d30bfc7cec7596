"""`nearkin duplicates`: exact and near-duplicates among images, and which of them to keep."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float, Int, Int64
from typing_extensions import override

from nearkin.commands.arguments import EncoderLike, PathLike, command, processes, refuse
from nearkin.commands.sources import (
    Vectors,
    VectorsLike,
    check_apart,
    check_classes,
    check_listed,
    check_output,
    features_at,
    is_table,
    open_vectors,
    places,
    write_page,
    write_rows,
)
from nearkin.config import AutoCountOrZero, AutoImageSize, EmbedConfig, Seed
from nearkin.data.duplicates import (
    Groups,
    Signatures,
    exact_groups,
    keep_one,
    near_groups,
    signatures,
)
from nearkin.data.images import BadFile, Images
from nearkin.data.labels import class_names
from nearkin.data.notes import lines, noted
from nearkin.data.opening import open_images
from nearkin.distributed import choose_device
from nearkin.errors import DataError, UsageError
from nearkin.evaluation.duplicates import LEAST, Precision, edit_test
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import EmbeddingTable
from nearkin.metrics.selection import keep_one as keep_one_by_features
from nearkin.pace import ProgressCallback, count
from nearkin.report.duplicates_page import Pair, duplicates_page
from nearkin.report.page.html import render
from nearkin.report.pages import with_thumbnails
from nearkin.result import Result, Row
from nearkin.run.copies import check_destination, copy_to, file_names
from nearkin.run.folder import data_name
from nearkin.run.reporter import Reporter, reporter_of
from nearkin.text import aligned, as_text

PRECISION: Final = 0.99  # Of the threshold that is chosen by default
BY_FEATURES: Final = "similar features"
UNMEASURED: Final = (
    "a precision is measured with an encoder on images of 8 bits; give --encoder, or a --threshold"
)


@dataclass(frozen=True)
class Duplicate:
    """A row of the table: an image that has a duplicate, or is one."""

    path: str
    action: Literal["keep", "drop"]
    of: str  # The image that is kept in its place; its own if it is kept
    similarity: float  # The correlation of both or, by features, their cosine
    why: str
    """`same bytes`, `near-duplicate` or `similar features`; of a kept one, how many others it
    has."""


Rows = Int[np.ndarray, " rows"]
Similarity = Float[np.ndarray, " images"]
COLUMNS: Final = tuple(column.name for column in fields(Duplicate))


@dataclass(frozen=True, repr=False)
class DuplicateTable(Result):
    """Duplicates among images."""

    num_images: int
    duplicates: tuple[Duplicate, ...]
    """Cluster by cluster: the kept image, then its duplicates, the most similar first."""
    threshold: float | None = None  # Least cosine of features; None without features
    estimate: Precision | None = None  # Of the threshold; None without an encoder
    bad: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of images that cannot be read, with the reason; they are in no list."""

    @property
    def dropped(self) -> tuple[Duplicate, ...]:
        """The duplicates that are not kept."""
        return tuple(each for each in self.duplicates if each.action == "drop")

    @override
    def records(self) -> list[Row]:
        """A row per image that has a duplicate, or is one."""
        return [asdict(each) for each in self.duplicates]

    @override
    def lines(self) -> list[str]:
        dropped = self.dropped
        kinds = Counter(each.why for each in dropped)
        which = ", ".join(f"{why}: {number}" for why, number in kinds.most_common())
        others = count(len(self.duplicates) - len(dropped), "other")
        lines = [
            f"{count(self.num_images, 'image')}, of which {len(dropped):,} are duplicates of "
            f"{others}{f' ({which})' if which else ''}"
        ]
        if self.threshold is not None:
            lines.append(f"threshold on the cosine of features {self.threshold:.4f}")
        if self.estimate is not None:
            title = f"on edited copies of {self.estimate.num} images:"
            lines += [title, *aligned(self.estimate.rows())]
        return lines + [f"left out {name!r}: {reason}" for name, reason in self.bad.items()]


@command
def duplicates(
    data: Any,
    *,
    encoder: EncoderLike | None = None,
    vectors: VectorsLike | None = None,
    output: PathLike | None = None,
    page: PathLike | None = None,
    apply: PathLike | None = None,
    overwrite: bool = False,
    threshold: float | None = None,
    precision: float | None = None,
    image_size: AutoImageSize = "auto",
    allow_partial: bool = False,
    trust_remote_code: bool = False,
    seed: Seed = 0,
    device: str = "auto",
    workers: AutoCountOrZero = "auto",
    verbose: bool | Reporter = True,
) -> DuplicateTable:
    """Find exact and near-duplicates, and which image of each to keep.

    Duplicates are found by contents and pixels, as in `check` and in every split; with an encoder
    or vectors, also by the cosine of features. Images are taken in the order of preference: most
    pixels, then most bytes, then the first name. One is kept unless it is a duplicate of one that
    is kept already. No image is ever changed or deleted.

    Args:
        data: Images: a folder, a table, an archive or shards, or a name such as digits.
        encoder: A run or an encoder, whose features are compared, too.
        vectors: What `embed` has written of `data`, instead of computing features. Images that
            it lacks are compared by contents and pixels alone.
        output: A .csv file for the table.
        page: A .html file, to look at pairs.
        apply: What is kept, as a .csv list of files, or as copies in a new folder.
        overwrite: Replace these files; never a folder.
        threshold: Least cosine of duplicates. By default it is chosen by `precision`.
        precision: Of copies and most similar other images above the threshold, the share of
            copies, on edited copies of the images themselves; .99 by default.
        image_size: Side of the images in pixels that features are computed with.
        allow_partial: Whether weights may be missing from the encoder's checkpoint, or left over.
        trust_remote_code: Whether to run code that files of the run name.
        seed: Decides which images are edited, and how.
        device: Where to compute features.
        workers: Processes that decode photographs; `auto`: one per CPU.
        verbose: Whether to show progress, or what receives it.

    Raises:
        UsageError: If that does not fit together, no threshold has that precision, or images for
            the list are no files.
        DataError: If images of the vectors are missing.
        OutputError: If a target exists or cannot be written.
        CheckpointError: If vectors are damaged, or of something else.
    """
    features = features_at(vectors) if encoder is None else encoder
    encoding = {"image_size": image_size != "auto", "allow_partial": allow_partial}
    _check_options(threshold, precision, features, **encoding)
    _check_outputs(output, page, apply, [data, encoder, vectors], overwrite=overwrite)
    log = reporter_of(verbose)
    images, known = _opened(data, apply, log, chooses=features is not None and threshold is None)
    groups, order = near_groups(known, log.progress), _preferred(images)
    keeper, similar = by_pixels = keep_one(known, groups, order)
    estimate, others = None, list[Pair]()
    if features is not None:
        config = EmbedConfig(
            image_size=image_size,
            allow_partial=allow_partial,
            trust_remote_code=trust_remote_code,
            device=device,
            workers=workers,
        )
        computing = {
            "device": choose_device(device),
            "workers": processes(workers),
            "seed": seed,
            "on_progress": log.progress,
        }
        stored = None if encoder is None else vectors
        with open_vectors(features, data, stored, config, log) as opened:
            rows = opened.image_rows(images, log)
            threshold, estimate, others = _chosen(
                opened, images, rows, groups, threshold, precision, **computing
            )
            keeper, similar = _by_features(
                opened.table, rows, order, by_pixels, threshold, log.progress
            )
    pairs = list(_pairs(keeper, by_pixels[0], exact_groups(known), similar))
    listed = tuple(_duplicates(images, pairs))
    found = DuplicateTable(len(images), listed, threshold, estimate, images.reasons)
    if output is not None:
        write_rows(Path(output), COLUMNS, map(astuple, found.duplicates))
    if page is not None:
        name, lead = Path(data_name(data)).name, f"{found.lines()[0]}."
        content = duplicates_page(images, name, lead, estimate, pairs, others)
        write_page(Path(page), render(with_thumbnails(content, images, processes(workers))))
    if apply is not None:
        kept = images.subset(np.flatnonzero(keeper == np.arange(len(images))))
        _apply(Path(apply), kept, log)
    return found


def _opened(
    data: Any, apply: PathLike | None, log: Reporter, *, chooses: bool
) -> tuple[Images, Signatures]:
    """Open images, without those that cannot be decoded, and log what was decided about them."""
    images = open_images(data, on_progress=log.progress)
    if apply is not None and Path(apply).suffix == ".csv":
        check_listed(images, "give --apply a folder, for copies")
        check_classes(images.classes, "give --apply a folder, for copies")
    if chooses and images.channels is not None:
        raise UsageError(UNMEASURED)
    known = signatures(images, log.progress)
    decoded = np.array([any(digest) for digest in known["digest"].tolist()])
    damaged = [
        BadFile(images.names[row], "cannot be decoded", int(images.num_bytes[row]))
        for row in np.flatnonzero(~decoded).tolist()
    ]
    sound = images.subset(np.flatnonzero(decoded))
    images = replace(sound, bad=tuple(sorted((*images.bad, *damaged), key=lambda file: file.name)))
    for line in images.decisions():
        log.info(line)
    return images, known[decoded]


def _chosen(
    opened: Vectors,
    images: Images,
    rows: Rows,
    groups: Groups,
    threshold: float | None,
    precision: float | None,
    **computing: Any,
) -> tuple[float, Precision | None, list[Pair]]:
    """Return the threshold, given or of this precision; what it does; and pairs below it.

    What it does is measured on edited copies: not without an encoder or images of 8 bits, nor
    where it is given and a few images could not say how precise it is.
    """
    encoder = opened.encoder
    enough = threshold is None or len(rows) >= LEAST
    if encoder is None or images.channels is not None or not enough:
        assert threshold is not None  # or it was refused; see `UNMEASURED`
        return threshold, None, []
    try:
        test = edit_test(opened.table, encoder, images, rows, groups, **computing)
    except DataError:
        if threshold is None:
            raise
        return threshold, None, []
    estimate = test.chosen(precision or PRECISION) if threshold is None else test.at(threshold)
    below = test.below(estimate.threshold)
    return estimate.threshold, estimate, [Pair(*pair, cosine) for pair, cosine in below.items()]


def _by_features(
    table: EmbeddingTable,
    image_rows: Rows,
    order: Groups,
    by_pixels: tuple[Groups, Similarity],
    threshold: float,
    on_progress: ProgressCallback,
) -> tuple[Groups, Similarity]:
    """Return what is kept in place of each image once features are compared, too."""
    keeper, similar = (each.copy() for each in by_pixels)
    row = np.full(len(keeper), -1)
    row[image_rows] = np.arange(len(image_rows))
    left = order[(keeper[order] == order) & (row[order] >= 0)]
    place, cosine = keep_one_by_features(table.gather()[row[left]], threshold, on_progress)
    keeper[left], similar[left] = left[place], cosine
    # What was dropped for an image that is dropped now: both are near the one that is kept.
    return keeper[keeper], np.minimum(similar, similar[keeper])


def _check_options(
    threshold: float | None,
    precision: float | None,
    features: EncoderLike | Embeddings | None,
    **encoding: bool,
) -> None:
    """Refuse a threshold that is none, or two; and options of features, without them."""
    if features is None:
        of_both = {"threshold": threshold is not None, "precision": precision is not None}
        refuse("of features; give --encoder or --vectors, too", **of_both, **encoding)
    if threshold is not None and precision is not None:
        raise UsageError("--precision chooses the threshold, and --threshold is one; give one")
    for name, value in (("threshold", threshold), ("precision", precision)):
        if value is not None and not 0 < value <= 1:
            raise UsageError(f"--{name} {value:g} is not above 0 and at most 1")
    if features is not None and threshold is None and is_table(features):
        raise UsageError(UNMEASURED)


def _check_outputs(
    output: PathLike | None,
    page: PathLike | None,
    apply: PathLike | None,
    reads: Sequence[Any],
    *,
    overwrite: bool,
) -> None:
    """Refuse what must not be replaced before anything is computed; the data are read first."""
    for path, suffix in ((output, ".csv"), (page, ".html")):
        check_output(path, suffix, overwrite=overwrite, reads=reads)
    check_apart(output, apply, "--apply")
    if apply is not None and Path(apply).suffix == ".csv":
        check_output(apply, ".csv", overwrite=overwrite, reads=reads)
    elif apply is not None:
        check_destination(Path(apply), [data_name(reads[0])])


def _preferred(images: Images) -> Int64[np.ndarray, " images"]:
    """Return the rows in the order in which images are preferred."""
    pixels = images.sizes.astype(np.int64).prod(axis=1)
    return np.lexsort((np.arange(len(images)), -images.num_bytes, -pixels))


def _pairs(
    keeper: Groups, by_pixels: Groups, exact: Groups, similar: Similarity
) -> Iterator[Pair]:
    """Yield each dropped image beside the one that is kept, cluster by cluster."""
    dropped = np.flatnonzero(keeper != np.arange(len(keeper)))
    for row in dropped[np.lexsort((dropped, -similar[dropped], keeper[dropped]))].tolist():
        of = int(keeper[row])
        why = "same bytes" if exact[row] == exact[of] else "near-duplicate"
        yield Pair(of, row, float(similar[row]), why if by_pixels[row] == of else BY_FEATURES)


def _duplicates(images: Images, pairs: Iterable[Pair]) -> Iterator[Duplicate]:
    """Yield the images of all clusters, each kept image before those that it stands for."""
    for of, cluster in groupby(pairs, key=lambda pair: pair.one):
        dropped, kept = list(cluster), as_text(images.names[of])
        yield Duplicate(kept, "keep", kept, 1.0, f"has {count(len(dropped), 'other')}")
        for _, row, similarity, why in dropped:
            yield Duplicate(as_text(images.names[row]), "drop", kept, round(similarity, 4), why)


def _apply(target: Path, kept: Images, log: Reporter) -> None:
    """Write the images that are kept as a list, which is data for nearkin, or copy them."""
    if target.suffix == ".csv":
        columns = places(kept), class_names(kept), kept.splits.tolist(), kept.group_names
        write_rows(target, ("path", "label", "split", "group"), zip(*columns, strict=True))
    else:
        _copy(target, kept, log)


def _copy(target: Path, images: Images, log: Reporter) -> None:
    """Copy images into a folder per part and class; log what folders do not say of them."""
    classes, parts = class_names(images), images.splits
    if (parts != "").any():  # what is of no part is learned from
        parts = np.where(parts == "", "train", parts)
    names = sorted({*classes} - {""})
    folders = dict(zip(names, file_names(names), strict=True))  # one per class, in all parts
    renamed = [name for name in names if folders[name] != name]
    grouped = [name for name, own in zip(images.names, images.group_names, strict=True) if own]
    unlabeled = [name for name, own in zip(images.names, classes, strict=True) if not own]
    notes = noted("renamed", renamed, "classes, as their names are those of folders")
    notes += noted("left out", grouped, "images in groups, which folders do not say; a .csv does")
    text = "images without a label, which the folder makes the class images; a .csv does not"
    notes += noted("guessed", unlabeled if names else (), text)
    for line in lines(notes):
        log.info(line)
    own, data = np.array([folders.get(name, "images") for name in classes]), [images.key]
    for part in np.unique(parts).tolist():
        rows = np.flatnonzero(parts == part)
        copy_to(target / part, images, rows, own[rows].tolist(), data=filter(None, data))
