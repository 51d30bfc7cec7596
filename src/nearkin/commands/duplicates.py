"""`nearkin duplicates`: exact and near copies among images, and which of them to keep."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float, Int

from nearkin.commands.index import likely_copies
from nearkin.commands.vectors import Vectors, check_output, open_vectors
from nearkin.config import Auto
from nearkin.data.copies import check_destination, copy_to
from nearkin.data.duplicates import relation
from nearkin.data.images import Folder, Images
from nearkin.data.recognize import class_names
from nearkin.distributed import available_cpus, choose_device
from nearkin.errors import UsageError
from nearkin.evaluation.copies import CopyTest, Precision, copy_test, curves
from nearkin.evaluation.table import EmbeddingTable
from nearkin.measures.intervals import wilson
from nearkin.measures.selection import ROUNDING, keep_one
from nearkin.pace import ProgressCallback, count
from nearkin.report.copies_page import Pair, copies_page
from nearkin.run.failures import resource_errors
from nearkin.run.folder import data_name
from nearkin.run.reporter import Reporter, Silent
from nearkin.tables import aligned, replace_text, write_csv, writing

PRECISION: Final = 0.99  # Of the threshold that is chosen by default
HELD: Final = 250_000  # Pairs whose vectors are compared at once beside an index
SAMPLE: Final = 1_000  # Images by which the recall of an index is estimated


@dataclass(frozen=True)
class Copy:
    """A row of the table: an image that has a copy, or is one."""

    path: str
    action: Literal["keep", "drop"]
    of: str  # The image that is kept in its place; its own if it is kept
    similarity: float  # The cosine of both
    why: str  # `same bytes`, `same pixels` or `near copy`; of a kept one, how many others it has


Rows = Int[np.ndarray, " rows"]
COLUMNS: Final = tuple(column.name for column in fields(Copy))


@dataclass(frozen=True)
class CopiesFound:
    """Copies among images."""

    num_images: int
    threshold: float
    copies: tuple[Copy, ...]  # Cluster by cluster: the kept image, then its copies, closest first
    estimate: Precision | None  # None where there is no encoder, or there are no images
    index_recall: tuple[int, int] | None = None
    """Of sampled images with a copy, how many are in a cluster, and how many there are; None if
    all images were compared."""

    @property
    def dropped(self) -> tuple[Copy, ...]:
        """The copies that are not kept."""
        return tuple(copy for copy in self.copies if copy.action == "drop")

    def lines(self) -> list[str]:
        """Lines of text."""
        dropped = self.dropped
        kinds = Counter(copy.why for copy in dropped)
        which = ", ".join(f"{why}: {number}" for why, number in kinds.most_common())
        others = count(len(self.copies) - len(dropped), "other")
        lines = [
            f"{self.num_images} images, of which {len(dropped)} are copies of {others}"
            f"{f' ({which})' if which else ''}",
            f"threshold {self.threshold:.4f}",
        ]
        if self.estimate is not None:
            lines += [
                f"on edited copies of {self.estimate.num} images:",
                *aligned(self.estimate.rows()),
            ]
        if self.index_recall is not None:
            lines.append(self.recall_of_index())
        return lines

    def recall_of_index(self) -> str:
        """Say how many copies the index has found, in a sentence."""
        if self.index_recall is None:
            return ""
        clustered, total = self.index_recall
        low, high = wilson(clustered, total)
        return (
            f"by the index {clustered} of {total} sampled images with a copy were found, "
            f"95 % interval [{low:.3f}, {high:.3f}]"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def duplicates(
    source: str | Path,
    data: Any = None,
    *,
    output: str | Path | None = None,
    page: str | Path | None = None,
    apply: str | Path | None = None,
    vectors: str | Path | None = None,
    index: str | Path | None = None,
    threshold: float | None = None,
    precision: float | None = None,
    image_size: int | Auto = "auto",
    allow_partial: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
    device: str = "auto",
    workers: int | Auto = "auto",
    reporter: Reporter | None = None,
) -> CopiesFound:
    """Find exact and near copies by the cosine of features, and which image of each to keep.

    Images are taken in the order of preference: most pixels, then most bytes, then the first
    name. One is kept unless it is a copy of one that is kept already; see `keep_one`. Without
    images, the order is that of the table. No image is ever changed or deleted.

    Args:
        source: A run; an encoder, with `data`; or vectors that `embed` has written.
        data: Images: those to embed, or those that the vectors are of.
        output: A new .csv file for the table.
        page: A new .html file, to look at pairs.
        apply: What is kept, as a new .csv list, or as copies in a new folder.
        vectors: Of `data` by the encoder `source`, instead of computing them.
        index: Made of the vectors by `build_index`: then not all pairs are compared.
        threshold: Least cosine of copies. By default it is chosen by `precision`.
        precision: Of copies and most similar other images above the threshold, the share of
            copies, on edited copies of the images themselves; .99 by default.
        image_size: Side of the images in pixels that features are computed with.
        allow_partial: Whether weights may be missing from the encoder's checkpoint, or left over.
        trust_remote_code: Whether to run code that files of the run name.
        seed: Decides which images are edited, and how.
        device: Where to compute features.
        workers: Processes that decode photographs; `auto`: one per CPU.
        reporter: Receives log lines and progress.

    Raises:
        UsageError: If that does not fit together, or no threshold has that precision.
        DataError: If images of the vectors are missing.
        OutputError: If a target exists or cannot be written.
        CheckpointError: If vectors or index are damaged, or of something else.
    """
    _check(threshold, precision, output, page, apply, data)
    log = reporter or Silent()
    processes = available_cpus() if workers == "auto" else workers
    sizes: dict[str, Any] = {"image_size": image_size, "allow_partial": allow_partial}
    sizes["trust_remote_code"] = trust_remote_code
    computing: dict[str, Any] = {"device": device, "workers": workers, "reporter": reporter}
    with (
        resource_errors(),
        open_vectors(source, data, vectors=vectors, **sizes, **computing) as opened,
    ):
        table, images = opened.table, opened.images()
        if images is None and (page or apply):
            raise UsageError("without images there is nothing to show or to copy; give DATA, too")
        image_rows = np.arange(len(table)) if images is None else opened.image_rows(images)
        test = _test(opened, images, image_rows, seed, device, processes, log.progress)
        least = threshold or _chosen(test, precision)
        preferred = _preferred(images, image_rows)
        if index is None:
            keeper, similarity = _compare_all(table, preferred, least, log.progress)
        else:
            keeper, similarity = _compare_likely(table, Path(index), preferred, least)
        result = CopiesFound(
            len(table),
            least,
            tuple(_copies(table, images, image_rows, keeper, similarity)),
            None if test is None else test.at(least, chosen=threshold is None),
            None if index is None else _recall(table, keeper, least, seed),
        )
        if output is not None:
            with writing(Path(output)):
                write_csv(Path(output), COLUMNS, (astuple(copy) for copy in result.copies))
        if images is not None and page is not None:
            name = Path(data_name(data or source)).name
            _write_page(Path(page), name, result, test, table, images, processes)
        if images is not None and apply is not None:
            _apply(Path(apply), images, image_rows[keeper == np.arange(len(keeper))])
    return result


def _test(
    opened: Vectors,
    images: Images | None,
    image_rows: Rows,
    seed: int,
    device: str,
    workers: int,
    on_progress: ProgressCallback,
) -> CopyTest | None:
    """Test thresholds on copies; None without an encoder or images of 8 bits."""
    encoder = opened.encoder()
    if encoder is None or images is None or images.channels is not None:
        return None
    return copy_test(
        opened.table,
        encoder,
        images,
        image_rows,
        seed=seed,
        device=choose_device(device),
        workers=workers,
        on_progress=on_progress,
    )


def _chosen(test: CopyTest | None, precision: float | None) -> float:
    """Return the threshold that has the precision."""
    if test is None:
        raise UsageError(
            "a precision is measured with an encoder on images of 8 bits; give RUN, or ENCODER "
            "and DATA, or a --threshold"
        )
    return test.threshold(PRECISION if precision is None else precision)


def _check(
    threshold: float | None,
    precision: float | None,
    output: str | Path | None,
    page: str | Path | None,
    apply: str | Path | None,
    data: Any,
) -> None:
    """Refuse what cannot be done before anything is computed."""
    if threshold is not None and precision is not None:
        raise UsageError("--precision chooses the threshold, and --threshold is one; give one")
    for name, value in (("threshold", threshold), ("precision", precision)):
        if value is not None and not 0 < value <= 1:
            raise UsageError(f"--{name} {value:g} is not above 0 and at most 1")
    check_output(output, ".csv")
    check_output(page, ".html")
    if apply is not None and Path(apply).suffix == ".csv":
        check_output(apply, ".csv")
    elif apply is not None:
        check_destination(Path(apply), [] if data is None else [data_name(data)])


def _preferred(images: Images | None, image_rows: Rows) -> Rows:
    """Return the rows of the table in the order in which images are preferred."""
    if images is None:
        return image_rows
    pixels = images.sizes.astype(np.int64).prod(axis=1)[image_rows]
    return np.lexsort((image_rows, -images.num_bytes[image_rows], -pixels))


def _compare_all(
    table: EmbeddingTable, preferred: Rows, threshold: float, on_progress: ProgressCallback
) -> tuple[Rows, Float[np.ndarray, " rows"]]:
    """Return the row that is kept in place of each, and the cosine, by comparing all images."""
    place, cosine = keep_one(table.gather()[preferred], threshold, on_progress)
    keeper, similarity = np.empty_like(place), np.empty_like(cosine)
    keeper[preferred], similarity[preferred] = preferred[place], cosine
    return keeper, similarity


def _compare_likely(
    table: EmbeddingTable, index: Path, preferred: Rows, threshold: float
) -> tuple[Rows, Float[np.ndarray, " rows"]]:
    """Do the same by an index: within connected components of the copies that it leads to.

    In memory are the vectors of `HELD` pairs, then those of all images that have a copy.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    rank = np.empty_like(preferred)
    rank[preferred] = np.arange(len(rank))
    keeper, similarity = np.arange(len(rank)), np.ones(len(rank), np.float32)
    likely = likely_copies(index, table, threshold)
    pairs = [likely[:0]]
    for some in np.array_split(likely, len(likely) // HELD + 1):
        rows, place = np.unique(some, return_inverse=True)
        if len(rows):
            left, right = place.reshape(some.shape).T
            x = table.gather(rows)
            pairs.append(some[((x[left] * x[right]).sum(dim=1) >= threshold - ROUNDING).numpy()])
    rows, place = np.unique(np.concatenate(pairs), return_inverse=True)
    if not len(rows):
        return keeper, similarity
    x, (left, right) = table.gather(rows), place.reshape(-1, 2).T
    edges = coo_array((np.ones(len(left), bool), (left, right)), (len(rows),) * 2)
    component = connected_components(edges, directed=False)[1]
    order = np.lexsort((rank[rows], component))
    for members in np.split(order, np.flatnonzero(np.diff(component[order])) + 1):
        own, cosine = keep_one(x[members], threshold)
        keeper[rows[members]], similarity[rows[members]] = rows[members][own], cosine
    return keeper, similarity


def _recall(table: EmbeddingTable, keeper: Rows, threshold: float, seed: int) -> tuple[int, int]:
    """Count sampled images with a copy by comparing all, and those of them in a cluster."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(len(table), min(SAMPLE, len(table)), replace=False))
    similarity, near = (x.numpy() for x in table.nearest(table.gather(rows), 2))
    has_copy = ((near != rows[:, None]) & (similarity >= threshold - ROUNDING)).any(axis=1)
    clustered = np.bincount(keeper)[keeper[rows]] > 1
    return int((has_copy & clustered).sum()), int(has_copy.sum())


def _copies(
    table: EmbeddingTable,
    images: Images | None,
    image_rows: Rows,
    keeper: Rows,
    similarity: Float[np.ndarray, " rows"],
) -> Iterator[Copy]:
    """Yield the images of all clusters, in the order of the table's kept images."""
    size = np.bincount(keeper, minlength=len(keeper))
    rows = np.flatnonzero(size[keeper] > 1)
    path = dict(zip(rows.tolist(), table.texts("path", rows), strict=True))
    is_copy = keeper[rows] != rows
    for row in rows[np.lexsort((rows, -similarity[rows], is_copy, keeper[rows]))].tolist():
        of, why = int(keeper[row]), "near copy"
        if row == of:
            why = f"has {count(int(size[of]) - 1, 'other')}"
        elif images is not None:
            why = relation(images, int(image_rows[row]), int(image_rows[of]))
        action: Literal["keep", "drop"] = "keep" if row == of else "drop"
        yield Copy(path[row], action, path[of], round(float(similarity[row]), 4), why)


def _apply(target: Path, images: Images, rows: Rows) -> None:
    """Write the images that are kept as a list, which is data for nearkin, or copy them."""
    rows = np.sort(rows)
    if target.suffix != ".csv":
        classes = [name or "images" for name in class_names(images.subset(rows))]
        copy_to(target, images, rows, classes, data=[images.key] if images.key else [])
        return
    source = images.source
    listed = images.subset(rows)
    paths = map(source.path, listed.names) if isinstance(source, Folder) else listed.names
    with writing(target):
        columns = zip(paths, class_names(listed), listed.splits.tolist(), strict=True)
        write_csv(target, ("path", "label", "split"), columns)


def _write_page(
    path: Path,
    data: str,
    result: CopiesFound,
    test: CopyTest | None,
    table: EmbeddingTable,
    images: Images,
    workers: int,
) -> None:
    """Write the page, with other images from the test of the threshold."""
    copies = [Pair(copy.of, copy.path, copy.similarity, copy.why) for copy in result.dropped]
    others = list[Pair]()
    if test is not None:
        rows = np.unique(test.pairs)
        paths = dict(zip(rows.tolist(), table.texts("path", rows), strict=True))
        below = {
            frozenset(pair): Pair(paths[pair[0]], paths[pair[1]], float(cosine))
            for pair, cosine in zip(map(tuple, test.pairs), test.other, strict=True)
            if cosine < result.threshold
        }
        others = list(below.values())  # each once, also if both of its images were sampled
    text = copies_page(
        images,
        data,
        f"{result.lines()[0]}.",
        [result.recall_of_index()] if result.index_recall else [],
        result.estimate,
        curves(test) if test else {},
        copies,
        others,
        workers,
    )
    with writing(path):
        replace_text(path, text)
