"""`nearkin evaluate VECTORS`: measure features that were made before, of more than memory holds.

The features are copied to a temporary file of plain numbers, which is mapped into memory; metrics
read it block by block.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from jaxtyping import Int

from nearkin.choices import Protocol
from nearkin.commands.sources import VectorsLike, table_of
from nearkin.config import EmbedConfig
from nearkin.data.labels import numbered, splits_of
from nearkin.data.notes import Note, lines
from nearkin.data.split import scored_part, validation_notes
from nearkin.distributed import choose_device
from nearkin.errors import CheckpointError, DataError, ResourceError, UsageError
from nearkin.evaluation.column import check_values, column_test
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import Evaluation, evaluate_tables
from nearkin.evaluation.protocols import chosen
from nearkin.evaluation.table import EmbeddingTable, map_vectors
from nearkin.metrics.kmeans import WIDEST
from nearkin.pace import count
from nearkin.run.failures import resource_errors, state_memory
from nearkin.run.reporter import Reporter, reporter_of
from nearkin.types import UNLABELED

Rows = Int[np.ndarray, " _"]
REDUCED: Final = 3  # Times the reduced vectors that k-means holds, as measured at a million


def evaluate_vectors(
    vectors: VectorsLike,
    bank: VectorsLike | None,
    protocol: Sequence[Protocol],
    ignore: str,
    device: str,
    verbose: bool | Reporter,
) -> Evaluation:
    """Measure features, those without a label left out where others have one.

    For the arguments see `evaluate`.

    Raises:
        UsageError: If these are no vectors.
        CheckpointError: If a table is damaged, or both are of different encoders.
        ResourceError: If disk or memory have less room than the metrics take.
    """
    titles, log, where = chosen(protocol), reporter_of(verbose), choose_device(device)
    with ExitStack() as stack:
        table = learned_from = stack.enter_context(table_of(vectors, log))
        if bank is not None:
            learned_from = stack.enter_context(table_of(bank, log))
            _check_other(table, learned_from)
        _check_one_encoder(table, learned_from)
        stack.enter_context(resource_errors())
        learned, scored = stack.enter_context(_mapped(table, learned_from, log))
        if bank is not None:
            _note_shared(learned, scored, log)
        values = None
        if ignore:
            pairs = zip((learned_from, table), (learned, scored), strict=True)
            train, test = (np.array(t.texts(ignore, part.rows), np.str_) for t, part in pairs)
            check_values(ignore, train, test)
            values = train, test
        sizes = f"{len(learned):,} training images, {len(scored):,} test images"
        log.info(f"vectors  {sizes}")
        dim = scored.vectors.shape[1]
        for title, of, columns in (
            ("clusters", scored, REDUCED * min(dim, WIDEST)),
            ("retrieval", learned, dim),  # which hold a copy of these vectors
            ("few-shot", scored, dim),
        ):
            if title in titles:
                state_memory(f"{title} of {len(of):,} vectors", 4 * len(of) * columns, log)
        evaluation = evaluate_tables(
            {"encoder": (learned, scored)},
            seed=EmbedConfig().seed,
            protocol=protocol,
            device=where,
            on_progress=log.progress,
        )
        if values:
            pair, seed = (learned, scored), EmbedConfig().seed
            tested = column_test(ignore, pair, values, seed=seed, device=where)
            evaluation = replace(evaluation, column=tested)
    kind = "vectors of length one" + (f", {table.removed} removed" if table.removed else "")
    column = [metric.of(kind) for metric in evaluation.metrics["encoder"]]
    return replace(evaluation, metrics={"encoder": column})


def _check_other(table: EmbeddingTable, bank: EmbeddingTable) -> None:
    """Refuse a bank that is the table itself."""
    if bank.path.resolve() == table.path.resolve():
        raise UsageError(f"--bank is {table.path} itself, whose column split divides it; omit it")


def _note_shared(learned: Embeddings, scored: Embeddings, log: Reporter) -> None:
    """Warn of vectors that are learned from and scored: their own neighbors are themselves."""
    there = {hash(vector.tobytes()) for vector in learned.vectors}
    if both := sum(hash(vector.tobytes()) in there for vector in scored.vectors):
        log.info(
            f"warning: {count(both, 'test vector')} of {len(scored):,} are training vectors, too, "
            "so the metrics are too high; give others as --bank"
        )


def _check_one_encoder(table: EmbeddingTable, bank: EmbeddingTable) -> None:
    """Refuse features of different encoders, where both name theirs."""
    if "" not in (encoders := {table.encoder, bank.encoder}) and len(encoders) > 1:
        raise CheckpointError(
            f"{table.path} and {bank.path} are of different encoders, or of one with a column "
            "removed from each; embed all by one, at once"
        )


@contextmanager
def _mapped(
    table: EmbeddingTable, bank: EmbeddingTable, log: Reporter
) -> Iterator[tuple[Embeddings, Embeddings]]:
    """Yield the training and the test embeddings, their vectors in files; log what is left out."""
    dim, of_bank = _dim(table), _dim(bank)
    if dim != of_bank:
        raise CheckpointError(
            f"{table.path} and {bank.path} have {dim} and {of_bank} features; embed all by one "
            "encoder"
        )
    numbers, classes = _numbers("label", table, bank)
    groups = _groups(table, bank)
    learned, scored, notes = _split(table, bank)
    every = len(learned) + len(scored)
    learned = learned[numbers[bank][learned] != UNLABELED]
    labeled = scored[numbers[table][scored] != UNLABELED]
    scored = labeled if len(labeled) else scored
    if unlabeled := every - len(learned) - len(scored):
        text = f"{count(unlabeled, 'vector')} without a label"
        notes.append(Note("left out", text, unlabeled))
    for line in lines(notes):
        log.info(line)
    with TemporaryDirectory(prefix="nearkin-") as folder:
        _check_disk(Path(folder), 4 * dim * (len(learned) + len(scored)))
        parts = []
        for name, of, rows in (("train", bank, learned), ("test", table, scored)):
            of.write_vectors(Path(folder) / name, rows)
            vectors = map_vectors(Path(folder) / name, dim)
            own = None if groups is None else groups[of][rows]
            parts.append(Embeddings(vectors, numbers[of][rows], own, rows, classes=classes))
        yield parts[0], parts[1]


def _numbers(
    column: str, table: EmbeddingTable, bank: EmbeddingTable
) -> tuple[dict[EmbeddingTable, Rows], tuple[str, ...]]:
    """Return what each row of both tables says, numbered alike, -1 for nothing; and the names."""
    tables = list(dict.fromkeys((table, bank)))
    texts, codes = zip(*(each.codes(column) for each in tables), strict=True)
    names, number = numbered([text for own in texts for text in own])
    of_each = np.split(number, np.cumsum([len(own) for own in texts])[:-1])
    numbers = {t: n[code] for t, n, code in zip(tables, of_each, codes, strict=True)}
    return numbers, names


def _groups(table: EmbeddingTable, bank: EmbeddingTable) -> dict[EmbeddingTable, Rows] | None:
    """Return the group of each row of both tables; None if they name none."""
    groups, names = _numbers("group", table, bank)
    start = len(names)
    for own in groups.values():  # images without one are groups of their own
        own[own < 0] = np.arange(start, start + (own < 0).sum())
        start += len(own)
    return groups if names else None


def _dim(table: EmbeddingTable) -> int:
    for block in table.blocks():
        return block.shape[1]
    raise DataError(f"{table.path} has no image; give vectors of some")


def _split(table: EmbeddingTable, bank: EmbeddingTable) -> tuple[Rows, Rows, list[Note]]:
    """Return the rows to learn from and to score, with notes on a validation part.

    Where rows name a part to score, those without a part are learned from, as of images.
    """
    if bank is not table:
        return np.arange(len(bank)), np.arange(len(table)), []
    names, code = table.codes("split")
    splits = splits_of(names)[code]
    is_scored = splits == scored_part(splits)
    if is_scored.any():
        learned = ~np.isin(splits, ("val", "test"))
    else:
        learned = splits == "train"
        if learned.all():  # nothing is held out: clusters and geometry are measured of all
            learned[:] = False
        is_scored = ~learned
    return np.flatnonzero(learned), np.flatnonzero(is_scored), validation_notes(splits)


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"the vectors take {needed / 1e6:,.0f} MB of disk, and {folder.parent} has "
            f"{free / 1e6:,.0f} MB; set TMPDIR to a folder with room"
        )
