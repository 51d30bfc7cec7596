"""What commands on features and their images take: a run, an encoder with images, or vectors."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeGuard

import numpy as np
from jaxtyping import Int

from nearkin.classification.data import open_labeled_data
from nearkin.classifier.classifier import read_classifier
from nearkin.commands.arguments import EncoderLike, PathLike, name_of, refuse
from nearkin.commands.embed import embed, loaded
from nearkin.config import ClassifyConfig, DiscoverConfig, EmbedConfig
from nearkin.data.images import Either, Folder, Images, Source
from nearkin.data.labels import Row, class_of
from nearkin.data.notes import named
from nearkin.data.opening import open_images
from nearkin.discovery.data import open_discovery_data
from nearkin.encoders.encoder import Encoder, is_own
from nearkin.errors import CheckpointError, DataError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import EmbeddingTable, are_vectors, open_table
from nearkin.evaluation.vectors import write_embeddings
from nearkin.extensions import check_trusted
from nearkin.files import creating, replace_text
from nearkin.pace import count
from nearkin.run.data import lost_images
from nearkin.run.folder import RunFolder, check_target, data_name
from nearkin.run.reporter import Reporter
from nearkin.tables import write_csv
from nearkin.text import as_text

STORED: Final = "of images with an encoder, and these features are stored; leave it out"
"""Of options that are refused."""
VectorsLike = PathLike | Embeddings
"""Features: a folder of shards or a .parquet that `embed` has written, or what it has returned."""


def is_table(source: Any) -> TypeGuard[VectorsLike]:
    """Whether these are features, rather than an encoder or images."""
    if isinstance(source, str | os.PathLike):
        return are_vectors(Path(source))
    return isinstance(source, Embeddings)


def features_at(vectors: VectorsLike | None) -> Embeddings | Path | None:
    """The features that are named: a file or a folder of them or, of a run, its own table."""
    if vectors is None or isinstance(vectors, Embeddings):
        return vectors
    own = RunFolder(Path(vectors)).embeddings
    return open_table(own if own.exists() else Path(vectors)).path


@contextmanager
def table_of(vectors: VectorsLike, log: Reporter) -> Iterator[EmbeddingTable]:
    """Open a table of features, and log which column is removed; those in memory become a file."""
    with ExitStack() as stack:
        at = features_at(vectors)
        if isinstance(at, Embeddings):
            folder = stack.enter_context(TemporaryDirectory(prefix="nearkin-"))
            path = Path(folder) / "embeddings.parquet"
            write_embeddings(path, at)
            at = path
        assert at is not None
        table = open_table(at)
        if table.removed:
            log.info(f"{table.path.name}: features without {table.removed}, which is removed")
        yield table


@dataclass(frozen=True)
class Vectors:
    """A table of features, with the encoder that they are from, where known."""

    table: EmbeddingTable
    source: str = ""  # What `load` takes; empty if only the table was given
    encoder: Encoder | None = None  # None also where a run stands for its own table

    @property
    def is_of_run(self) -> bool:
        """Whether the table is a run's own."""
        return bool(self.source) and self.table.path == RunFolder(Path(self.source)).embeddings

    def image_rows(self, images: Images, log: Reporter) -> Int[np.ndarray, " rows"]:
        """Return the row among the images of each row of the table; log how many have none."""
        row = {as_text(name): number for number, name in enumerate(images.names)}
        paths = self.table.texts("path")
        if missing := [path for path in paths if path not in row]:
            raise DataError(
                f"{len(missing)} of {len(paths)} images of {self.table.path} are not among these, "
                f"such as {missing[0]!r}; give the images that it was made of"
            )
        if without := len(row.keys() - set(paths)):
            log.info(f"left out: {count(without, 'image')} of which there are no features")
        return np.array([row[path] for path in paths], np.int64)


@contextmanager
def open_vectors(
    source: EncoderLike | Embeddings,
    data: Any,
    vectors: VectorsLike | None,
    config: EmbedConfig,
    log: Reporter,
) -> Iterator[Vectors]:
    """Yield a run's features; those of `data` by an encoder, computed or stored; or stored ones.

    An encoder is loaded, and features are computed, by the settings.
    """
    computes = vectors is not None or data is not None
    if is_table(source) or not computes:
        sized = config.image_size != "auto"
        refuse(STORED, image_size=sized, allow_partial=config.allow_partial)
    if is_table(source):
        if vectors is not None:
            raise UsageError("these are features, and so is --vectors; give one of them")
        with table_of(source, log) as table:
            yield Vectors(table)
        return
    name = name_of(source)
    folder = RunFolder(Path(name))
    if not computes:
        if not is_own(name):
            raise UsageError(f"{name} has no images of its own; give images, too")
        folder.check_is_run()
        yield Vectors(open_table(folder.embeddings), name)
        return
    if vectors is None:
        vectors = embed(name, data, config, labels="none", verbose=log)
    encoder = loaded(name, config, None)
    with table_of(vectors, log) as table:
        found = Vectors(table, name, encoder)
        if found.is_of_run:
            folder.encoder_settings()  # a discovery has other features
        check_origin(table, encoder, name)
        yield found


def images_of(
    folder: RunFolder, data: Any = None, *, trust: bool = False, log: Reporter | None = None
) -> Images:
    """Open the images of a finished run, which are `data` if they have moved.

    Where `log` is given, it says that some are others by now, or are gone.
    """
    folder.check_is_run()
    if not folder.summary.exists():
        raise UsageError(f"{folder.path} is no finished run; finish it with --resume")
    config, _ = folder.any_settings()
    source = source_of(folder, data, trust, labeled=getattr(config, "labeled", ""))
    if isinstance(config, DiscoverConfig):
        # The truth that it was scored by may be gone, like the run that it accepted.
        images = open_discovery_data(source, replace(config, truth=""), resumed=folder).images
    elif isinstance(config, ClassifyConfig):
        images = open_labeled_data(source, config, resumed=folder).images
    else:
        images = open_images(source, labels=config.labels)
    if log and (changes := lost_images(folder, images)):
        log.info(f"warning: these are not all images of {folder.path}: {changes}")
    return images


def source_of(folder: RunFolder, data: Any, trust: bool, **settings: Any) -> Any:
    """Return what the images of a run are opened from: `data`, or if None what it was made from.

    Code that the run names there, or in these of its settings, is refused unless it is trusted.
    """
    if data is None:
        data = settings["data"] = folder.any_settings()[1]
        if data == data_name(None):
            raise UsageError(
                f"{folder.path} was made from arrays, which are not stored; give the images, too"
            )
    check_trusted(settings, folder.config, trust)
    return data


def check_origin(table: EmbeddingTable, encoder: Encoder, source: str | Path) -> None:
    """Refuse a table of another encoder, where it names its own, or one that lacks a column.

    The projection that has removed the column is not stored, and what an encoder makes of an image
    has the column still.
    """
    if table.removed:
        raise CheckpointError(
            f"{table.path}: {table.removed} is removed from these features, and not from those of "
            "other images; give features that `nearkin embed` makes without --ignore"
        )
    if table.encoder not in ("", encoder.digest):
        raise CheckpointError(
            f"{table.path} is of another encoder than {source}, or of the same at another image "
            f"size; give that --image-size, or make it again with {source}"
        )


def table_encoder(folder: RunFolder, encoder: Encoder) -> Encoder:
    """Return the encoder of the features in a run's own table, of the run's encoder.

    A discovery has features below the heads of its classifier, which has a layer of its own.
    """
    if not folder.classifier.exists():
        return encoder
    return read_classifier(folder.classifier).below_heads(encoder)


def check_output(
    path: PathLike | None, suffix: str, *, overwrite: bool, reads: Iterable[Any]
) -> None:
    """Refuse another suffix, or what `check_target` refuses, before anything is computed."""
    if path is None:
        return
    if Path(path).suffix != suffix:
        raise UsageError(f"cannot write {Path(path)}; give a name that ends in {suffix}")
    check_target(Path(path), overwrite=overwrite, reads=reads)


def check_apart(output: PathLike | None, other: PathLike | None, option: str) -> None:
    """Refuse one path for `-o` and for the output of another option."""
    if output and other and Path(output).resolve() == Path(other).resolve():
        raise UsageError(f"-o and {option} are both {other}; give each a file of its own")


def write_page(path: Path, page: str) -> None:
    """Write a page of HTML."""
    with creating(path):
        replace_text(path, page)


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table for people."""
    with creating(path):
        write_csv(path, columns, rows)


def check_listed(images: Images, remedy: str) -> None:
    """Refuse a table that is to be data, of images that are no files of their own."""
    of_images = images.source
    sources = [of_images.first, of_images.second] if isinstance(of_images, Either) else [of_images]
    if not all(isinstance(source, Folder) for source in sources):
        raise UsageError(f"images that are no files cannot be listed as data; {remedy}")


def check_classes(classes: Sequence[str], remedy: str) -> None:
    """Refuse a table of classes that would be read as others, such as of a folder called -1."""
    read, _ = class_of({name: Row.of(name) for name in classes})
    if others := [name for name in classes if read[name] != name]:
        which = "class" if len(others) == 1 else f"{len(others)} classes"
        raise DataError(
            f"a table cannot hold the {which} {named(others)}: numbers are "
            f"read as whole ones, and -1 or nan as no label; rename the folders, or {remedy}"
        )


def places(images: Images) -> list[str]:
    """Return where each image lies, as a table that is data for nearkin names it.

    That is an absolute path, or the name of an image that is no file of its own: such a table is
    for --labels; see `check_listed`.
    """
    return [_place(images.source, row, name) for row, name in enumerate(images.names)]


def _place(source: Source, row: int, name: str) -> str:
    if isinstance(source, Folder):
        return source.path(row)
    if isinstance(source, Either):
        return _place(*source.place(row), name)
    return name
