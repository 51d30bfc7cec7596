"""`nearkin evaluate`: measure an encoder, or features that were made before, beside baselines."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import nn

from nearkin.choices import Protocol
from nearkin.commands.arguments import EncoderLike, command, name_of, processes, refuse
from nearkin.commands.embed import features_of, resolved
from nearkin.commands.sources import STORED, VectorsLike, is_table, source_of, table_of
from nearkin.config import AutoCountOrZero, AutoImageSize, EmbedConfig, TrainConfig
from nearkin.data.images import Images
from nearkin.data.labels import class_names, numbered, splits_of
from nearkin.data.notes import Note, lines
from nearkin.data.opening import column_of
from nearkin.data.split import Split, learned_and_scored, validation_notes
from nearkin.distributed import choose_device
from nearkin.encoders.encoder import Encoder, is_own, load
from nearkin.encoders.projector import embedding_encoder
from nearkin.encoders.sources import unknown
from nearkin.errors import CheckpointError, DataError, NearkinError, ResourceError, UsageError
from nearkin.evaluation.column import ColumnTest, Values, check_values, column_test, divided
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import Evaluation, evaluate_split, evaluate_tables
from nearkin.evaluation.protocols import chosen
from nearkin.evaluation.table import EmbeddingTable, map_vectors, stored_labels
from nearkin.metrics.kmeans import WIDEST
from nearkin.pace import count
from nearkin.run.data import changed_data, note_column, open_split
from nearkin.run.failures import state_memory
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Reporter, reporter_of
from nearkin.text import as_text
from nearkin.training.session import encoders_beside
from nearkin.types import UNLABELED

Rows = Int[np.ndarray, " _"]
REDUCED: Final = 3  # Times the reduced vectors that k-means holds, as measured at a million


@command
def evaluate(
    encoder: EncoderLike | Embeddings,
    data: Any = None,
    *,
    bank: VectorsLike | None = None,
    protocol: Sequence[Protocol] = ("quick",),
    features: Literal["backbone", "embedding"] = "backbone",
    labels: str = "",
    ignore: str = "",
    image_size: AutoImageSize = "auto",
    allow_partial: bool = False,
    trust_remote_code: bool = False,
    backbone: nn.Module | None = None,
    device: str = "auto",
    workers: AutoCountOrZero = "auto",
    verbose: bool | Reporter = True,
) -> Evaluation:
    """Measure an encoder beside its baselines: its start, the untrained network, raw pixels.

    Of features that `nearkin embed -o FILE` has written, it measures as many as a disk holds.

    Args:
        encoder: A run, or what else `nearkin.load` takes, such as dinov2-small; or features that
            `embed` has made: a folder of shards, or a .parquet.
        data: Other images than those of the run, split like those; the images for an encoder
            that is of no run.
        bank: Of features, those to learn from. By default their split decides, as of images: test
            images are scored, or validation images without them, and all but these two are learned
            from; where none is to be scored, `train` is learned from and all others are scored.
        protocol: What is measured, some of these: quick (kNN at k 20 and 200, linear probe,
            clusters, view retrieval and geometry); knn (at k 10, 20, 100 and 200, temperatures
            .07 and .1, and by majority); linear (probe); attentive (probe on the tokens before the
            pooling); fewshot (classifiers from 1, 2, 5 and 10 images per class, 10 draws each);
            retrieval (mAP, mAP@R and recall@1 of test images among training images); labelfree
            (what needs no labels: view retrieval and geometry); or full, which is all of them.
            Other than quick, the metrics of a run's own images are also stored in its
            evaluation.json and shown in its report, as is what `ignore` finds.
        features: What is measured: those of the `backbone`, as everywhere; with `embedding` also
            the run's embedding, which its projector makes of them, in a table of its own.
        labels: Labels of the images: auto, none, folders, or a table with columns path and label;
            by default those of the run for its own images, and auto for others.
        ignore: A column of the table of the images or of their labels, or of the features, that
            features are to ignore, such as camera: whether they follow it, and what is left of the
            class accuracy without it.
        image_size: Side of the images in pixels, if not that of the encoder; a run keeps its own.
        allow_partial: Whether weights may be missing from the encoder's checkpoint, or left over.
        trust_remote_code: Whether to run code that files of the run name.
        backbone: The run's network, if it was given one from Python; untrained.
        device: Where to compute.
        workers: Processes that decode photographs; `auto`: one per CPU.
        verbose: Whether to show progress, or what receives it.

    Returns:
        The metrics, by default kNN, linear probe, clusters and geometry, of the encoder and of raw
        pixels; of one that was trained here also of the untrained network and of the start of its
        training, if it had one, with the verdict on it. Each with its protocol and interval.
        Without labels, only view retrieval and geometry.

    Raises:
        UsageError: If there is no such encoder, no embedding of it, or no images to measure it on.
    """
    if is_table(encoder):
        if data is not None:
            raise UsageError("of features, no images are read; leave the images out")
        refuse(
            STORED,
            backbone=backbone is not None,
            features=features != "backbone",
            labels=bool(labels),
            image_size=image_size != "auto",
            allow_partial=allow_partial,
        )
        return evaluate_vectors(encoder, bank, protocol, ignore, device, verbose)
    name = name_of(encoder)
    if bank is not None:
        raise UsageError(f"--bank is for features, and {name} is an encoder; leave it out")
    log, where = reporter_of(verbose), choose_device(device)
    folder, config, source = _run_of(name, data, labels, trust_remote_code, log)
    if image_size != "auto" and folder.config.exists():
        raise UsageError("a run is measured at its own --image-size; leave the option out")
    loaded = load(
        name,
        backbone=backbone,
        image_size=image_size,
        allow_partial=allow_partial,
        trust_remote_code=trust_remote_code,
    )
    tables = _tables(loaded, folder, features, log)
    split, same = _opened(folder, config, source, log)
    values = _values(ignore, split, config.labels, source) if ignore else None
    number = processes(workers)
    computed = None
    if isinstance(config, TrainConfig):
        tables |= encoders_beside(loaded, folder, config, split, where, number, backbone)
    else:
        config = resolved(replace(config, workers=number), loaded, split.images)
        computed = {  # in one go, as a run does, so that numbers are the same
            name: features_of(config, encoder, split.images, where, log, name)
            for name, encoder in tables.items()
        }
    (table, measured), *compared = tables.items()
    evaluation, embeddings = evaluate_split(
        measured,
        split,
        beside=dict(compared),
        seed=config.seed,
        workers=number,
        augment=config.augment,
        device=where,
        features=computed,
        table=table,
        protocol=protocol,
        on_encoded=partial(_log_bad, log),
        on_progress=log.progress,
    )
    column = _of_column(ignore, embeddings, values, config.seed, where)
    evaluation = replace(_named(evaluation, table, measured.num_features), column=column)
    if data is None and same and (ignore or table == "embedding" or [*protocol] != ["quick"]):
        _store(folder, evaluation, protocol, split.images, values, log)
    return replace(evaluation, start=folder.start, bad=split.images.reasons | {**embeddings.bad})


def _values(ignore: str, split: Split, labels: str, source: Any) -> Values:
    """What a column says of each image, which has to be enough to be measured."""
    values = column_of(ignore, split.images, labels, source)
    check_values(ignore, values[split.train_rows], values[split.test_rows])
    return values


def _log_bad(log: Reporter, embeddings: Embeddings) -> None:
    if embeddings.bad:
        log.info(f"left out: {count(len(embeddings.bad), 'image')} that cannot be read")


def _of_column(
    name: str, embeddings: Embeddings, values: Values | None, seed: int, device: torch.device
) -> ColumnTest | None:
    if values is None:
        return None
    parts = divided(embeddings, values[embeddings.rows])
    return column_test(name, *parts, seed=seed, device=device)


def _named(evaluation: Evaluation, table: str, dim: int) -> Evaluation:
    """Let the protocols of an embedding's metrics say that they are of it; else change none."""
    if table != "embedding":
        return evaluation
    return measured_on(evaluation, table, f"embedding of {dim} dimensions")


def _opened(
    folder: RunFolder, config: TrainConfig | EmbedConfig, data: Any, log: Reporter
) -> tuple[Split, bool]:
    """Open images, divided as the run has noted, and say whether they are those of the run."""
    resumed = folder if folder.config.exists() else None
    split = open_split(data, config, log.progress, resumed=resumed)
    for line in split.images.decisions():
        log.info(line)
    if changes := changed_data(split):
        log.info(
            f"warning: these are not the images of {folder.path}: {changes}; nothing is stored "
            "there"
        )
    return split, not changes


def _tables(
    encoder: Encoder, folder: RunFolder, features: str, log: Reporter
) -> dict[str, Encoder]:
    """Return what is measured, the table that it is about first."""
    for line in encoder.lines():
        log.info(line)
    if features != "embedding":
        return {"encoder": encoder}
    embedding = embedding_encoder(encoder, folder.projector)
    log.info(f"embedding {embedding.num_features} dimensions, by {folder.projector}")
    return {"embedding": embedding, "encoder": encoder}


def _has_labels_of(folder: RunFolder, images: Images, log: Reporter) -> bool:
    """Whether images have the labels that the metrics of their run are by, or a warning."""
    then = stored_labels(folder.embeddings) if folder.embeddings.exists() else {}
    now = zip(map(as_text, images.names), map(as_text, class_names(images)), strict=True)
    changed = sum(then.get(name, label) != label for name, label in now)
    if changed:
        log.info(
            f"warning: {count(changed, 'image')} of {folder.path} had another label when it was "
            "made; nothing is stored there"
        )
    return not changed


def _run_of(
    encoder: str, data: Any, labels: str, trust: bool, log: Reporter
) -> tuple[RunFolder, TrainConfig | EmbedConfig, Any]:
    """Return the run folder of an encoder, with its settings and what its images are opened from.

    An encoder that is of no run has the default settings, and no images. Settings that name code
    to make images or views with are refused, unless it is trusted. However many images cannot be
    read, the others are measured.
    """
    folder = RunFolder(Path(encoder))
    if is_own(encoder) and not folder.path.is_file():
        if not folder.path.exists():
            raise unknown(encoder)
        config, _ = folder.encoder_settings()
        source = source_of(folder, data, trust, augment=config.augment)
        if data is not None and not labels and config.labels != "auto":
            log.info(
                f"warning: labels are those of the data; {encoder} has --labels {config.labels}"
            )
        labels = labels or (config.labels if data is None else "auto")
        return folder, replace(config, labels=labels, trust_remote_code=trust, max_bad=1.0), source
    if data is None:
        raise UsageError(f"{encoder} keeps no images; give its images, too")
    return folder, EmbedConfig(encoder=encoder, labels=labels or "auto", max_bad=1.0), data


def _store(
    folder: RunFolder,
    evaluation: Evaluation,
    protocol: Sequence[Protocol],
    images: Images,
    values: Values | None,
    log: Reporter,
) -> None:
    """Add the metrics to the run; where that is impossible, they are still shown."""
    if "embedding" in evaluation.metrics:  # the report's map is of the features
        evaluation = replace(evaluation, column=None)
    try:
        if not _has_labels_of(folder, images, log):
            return
        with folder.locked():
            if evaluation.column and values is not None:
                note_column(folder, evaluation.column.column, images, values)
            folder.add_metrics(evaluation.to_dict(), chosen(protocol))
    except (OSError, NearkinError) as error:
        log.info(f"warning: the metrics are not stored in {folder.evaluation}: {error}")


def evaluate_vectors(
    vectors: VectorsLike,
    bank: VectorsLike | None,
    protocol: Sequence[Protocol],
    ignore: str,
    device: str,
    verbose: bool | Reporter,
) -> Evaluation:
    """Measure features as `evaluate`, those without a label left out where others have one."""
    titles, log, where = chosen(protocol), reporter_of(verbose), choose_device(device)
    with ExitStack() as stack:
        table = learned_from = stack.enter_context(table_of(vectors, log))
        if bank is not None:
            learned_from = stack.enter_context(table_of(bank, log))
            _check_bank(table, learned_from)
        learned, scored = stack.enter_context(_mapped(table, learned_from, log))
        if bank is not None:
            _note_shared(learned, scored, log)
        values = None
        if ignore:
            pairs = zip((learned_from, table), (learned, scored), strict=True)
            train, test = (np.array(t.texts(ignore, part.rows), np.str_) for t, part in pairs)
            check_values(ignore, train, test)
            values = train, test
        log.info(f"vectors  {len(learned):,} training images, {len(scored):,} test images")
        dim, removal = scored.vectors.shape[1], f"--ignore {ignore}"
        for title, of, columns in (
            ("clusters", scored, REDUCED * min(dim, WIDEST)),
            ("retrieval", learned, 2 * dim),  # unit vectors take two copies
            ("few-shot", scored, 3 * dim),  # and centered ones another
            (removal, learned, 6 * dim),  # three of float64
        ):
            if title in (*titles, ignore and removal):
                state_memory(f"{title} of {len(of):,} vectors", 4 * len(of) * columns, log)
        seed = EmbedConfig().seed
        evaluation = evaluate_tables(
            {"encoder": (learned, scored)},
            seed=seed,
            protocol=protocol,
            device=where,
            on_progress=log.progress,
        )
        if values:
            tested = column_test(ignore, (learned, scored), values, seed=seed, device=where)
            evaluation = replace(evaluation, column=tested)
    removed = f", {table.removed} removed" if table.removed else ""
    return measured_on(evaluation, "encoder", f"vectors of length one{removed}")


def measured_on(evaluation: Evaluation, table: str, what: str) -> Evaluation:
    """Let the protocols of a table's metrics say what they are of."""
    column = [metric.of(what) for metric in evaluation.metrics[table]]
    return replace(evaluation, metrics={**evaluation.metrics, table: column})


def _check_bank(table: EmbeddingTable, bank: EmbeddingTable) -> None:
    """Refuse a bank that is the table itself, or of another encoder, where both name theirs."""
    if bank.path.resolve() == table.path.resolve():
        raise UsageError(f"--bank is {table.path} itself, whose column split divides it; omit it")
    if "" not in (encoders := {table.encoder, bank.encoder}) and len(encoders) > 1:
        raise CheckpointError(
            f"{table.path} and {bank.path} are of different encoders, or of one with a column "
            "removed from each; embed all by one, at once"
        )


def _note_shared(learned: Embeddings, scored: Embeddings, log: Reporter) -> None:
    """Warn of vectors that are learned from and scored: their own neighbors are themselves."""
    there = {hash(vector.tobytes()) for vector in learned.vectors}
    if both := sum(hash(vector.tobytes()) in there for vector in scored.vectors):
        log.info(
            f"warning: {count(both, 'test vector')} of {len(scored):,} are training vectors, too, "
            "so the metrics are too high; give others as --bank"
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
    tables, start = ([table], 0) if bank is table else ([table, bank], len(table))
    labels, classes = _numbers("label", tables)
    groups = _groups(tables)
    learned, scored, notes = _split(table, bank)
    every = len(learned) + len(scored)
    learned = learned[labels[start + learned] != UNLABELED]
    labeled = scored[labels[scored] != UNLABELED]
    scored = labeled if len(labeled) else scored
    if unlabeled := every - len(learned) - len(scored):
        text = f"{count(unlabeled, 'vector')} without a label"
        notes.append(Note("left out", text, unlabeled))
    for line in lines(notes):
        log.info(line)
    with TemporaryDirectory(prefix="nearkin-") as folder:
        _check_disk(Path(folder), 4 * dim * (len(learned) + len(scored)))
        parts = list[Embeddings]()
        for of, first, rows in ((bank, start, learned), (table, 0, scored)):
            file, own = Path(folder) / str(len(parts)), first + rows
            of.write_vectors(file, rows)
            of_rows = None if groups is None else groups[own]
            parts.append(
                Embeddings(map_vectors(file, dim), labels[own], of_rows, rows, classes=classes)
            )
        yield parts[0], parts[1]


def _numbers(column: str, tables: Sequence[EmbeddingTable]) -> tuple[Rows, tuple[str, ...]]:
    """Return what the rows of all tables say, as numbers, -1 for nothing; and their names."""
    texts, codes = zip(*(each.codes(column) for each in tables), strict=True)
    names, number = numbered([text for own in texts for text in own])
    of_each = np.split(number, np.cumsum([len(own) for own in texts])[:-1])
    return np.concatenate([n[code] for n, code in zip(of_each, codes, strict=True)]), names


def _groups(tables: Sequence[EmbeddingTable]) -> Rows | None:
    """Return the group of each row of all tables; None if they name none."""
    groups, names = _numbers("group", tables)
    alone = groups < 0  # images without one are groups of their own
    groups[alone] = len(names) + np.arange(alone.sum())
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
    splits = splits_of(names, str(table.path))[code]
    learned, is_scored = learned_and_scored(splits)
    if not is_scored.any():
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
