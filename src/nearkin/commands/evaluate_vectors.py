"""`nearkin evaluate VECTORS`: measure features that were made before, of more than memory holds.

The features are copied to a temporary file of plain numbers, which all processes of a machine map
into memory; measures read it block by block.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from jaxtyping import Int

from nearkin.choices import Protocol
from nearkin.config import EmbedConfig
from nearkin.data.labels import numbered
from nearkin.data.split import scored_part
from nearkin.distributed import (
    Share,
    broadcast_bytes,
    choose_device,
    is_main_process,
    num_processes,
    training_group,
)
from nearkin.errors import CheckpointError, DataError, ResourceError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import Evaluation, evaluate_tables
from nearkin.evaluation.measures import num_neighbors
from nearkin.evaluation.protocols import CLUSTERS, ENTRIES, chosen
from nearkin.evaluation.table import EmbeddingTable, map_vectors, open_table
from nearkin.measures.kmeans import WIDEST
from nearkin.run.failures import resource_errors, state_memory
from nearkin.run.reporter import Reporter, Silent

Rows = Int[np.ndarray, " _"]
REDUCED: Final = 3  # Times the reduced vectors of a process, as measured at a million
COPIED: Final = {"train": ENTRIES["retrieval"], "test": ENTRIES["fewshot"]}
"""Measures that hold a copy of the vectors of one part, each process its own."""


def evaluate_vectors(
    vectors: str | Path,
    train: str | Path | None = None,
    protocol: Sequence[Protocol] = ("quick",),
    device: str = "auto",
    devices: int = 1,
    reporter: Reporter | None = None,
) -> Evaluation:
    """Measure vectors, those without a label left out where others have one.

    Processes that torchrun or srun has started, or `devices` on this machine, divide kNN, linear
    probe and clusters; each makes the rest itself. For the arguments see `evaluate`.

    Raises:
        UsageError: If these are no vectors, or other processes do not see the first one's files.
        CheckpointError: If a table is damaged, or both are of different encoders.
        ResourceError: If disk or memory have less room than the measures take.
    """
    entries = chosen(protocol)
    table = open_table(Path(vectors))
    bank = table if train is None else open_table(Path(train))
    if "" not in (encoders := {table.encoder, bank.encoder}) and len(encoders) > 1:
        raise CheckpointError(f"{vectors} and {train} are of different encoders; embed all by one")
    log = reporter if reporter and is_main_process() else Silent()
    args = vectors, train, protocol, device
    with (
        resource_errors(),
        training_group(num_processes(devices), evaluate_vectors, *args),
        _mapped(table, bank) as parts,
    ):
        share, sizes = Share.of_rank(), {name: len(part) for name, part in parts.items()}
        log.info(f"vectors  {sizes['train']:,} training images, {sizes['test']:,} test images")
        dim = parts["test"].vectors.shape[1]
        held = [(CLUSTERS, -(-sizes["test"] // share.ranks), REDUCED * min(dim, WIDEST))]
        held += [(entry, sizes[part], dim) for part, copied in COPIED.items() for entry in copied]
        for entry, rows, columns in held:
            if entry in entries:
                state_memory(f"{entry.title} of {rows:,} vectors", 4 * rows * columns, log)
        evaluation = evaluate_tables(
            {"encoder": (parts["train"], parts["test"])},
            seed=EmbedConfig().seed,
            k=num_neighbors(sizes["train"]),
            protocol=protocol,
            device=choose_device(device),
            share=share,
            on_progress=log.progress,
        )
    column = [
        replace(measure, protocol=f"vectors of length one, {measure.protocol}")
        for measure in evaluation.measures["encoder"]
    ]
    return replace(evaluation, measures={"encoder": column})


@contextmanager
def _mapped(table: EmbeddingTable, bank: EmbeddingTable) -> Iterator[dict[str, Embeddings]]:
    """Yield the training and the test embeddings, in files that the first process writes."""
    names = {each: np.array(each.texts("label"), np.str_) for each in {table, bank}}
    rows = dict(zip(("train", "test"), _split(table, bank), strict=True))
    tables = {"train": bank, "test": table}
    for name in rows:
        labeled = names[tables[name]][rows[name]] != ""
        rows[name] = rows[name][labeled] if labeled.any() or name == "train" else rows[name]
    dim, of_bank = _dim(table), _dim(bank)
    if dim != of_bank:
        both = f"{table.path} and {bank.path}"
        raise CheckpointError(
            f"{both} have {dim} and {of_bank} features; embed all by one encoder"
        )
    texts = np.concatenate([names[tables[name]][rows[name]] for name in rows])
    classes, every = numbered(texts.tolist())
    labels = dict(zip(rows, np.split(every, [len(rows["train"])]), strict=True))
    with TemporaryDirectory(prefix="nearkin-") as own:
        if is_main_process():
            _check_disk(Path(own), 4 * dim * sum(map(len, rows.values())))
            for name, of in tables.items():
                of.write_vectors(Path(own) / name, rows[name])
        # Waits until the first process has written all.
        folder = Path(broadcast_bytes(own.encode()).decode())
        if not folder.exists():
            raise UsageError(
                f"{folder} of another machine is not here; set TMPDIR to a shared one"
            )
        yield {
            name: Embeddings(
                map_vectors(folder / name, dim),
                labels[name],
                classes=classes,
            )
            for name in rows
        }


def _dim(table: EmbeddingTable) -> int:
    for block in table.blocks():
        return block.vectors.shape[1]
    raise DataError(f"{table.path} has no image; give vectors of some")


def _split(table: EmbeddingTable, bank: EmbeddingTable) -> tuple[Rows, Rows]:
    """Return the rows to learn from and to score; validation only where there is no test."""
    if bank is not table:
        return np.arange(len(bank)), np.arange(len(table))
    splits = np.array(table.texts("split"), np.str_)
    learned = splits == "train"
    if learned.all():  # nothing is held out: clusters and geometry are measured of all
        learned[:] = False
    scored = ~learned & ((splits != "val") | (scored_part(splits) == "val"))
    return np.flatnonzero(learned), np.flatnonzero(scored)


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"the vectors take {needed / 1e6:,.0f} MB of disk, and {folder.parent} has "
            f"{free / 1e6:,.0f} MB; set TMPDIR to a folder with room"
        )
