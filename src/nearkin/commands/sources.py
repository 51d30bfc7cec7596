"""What commands on features and their images take: a run, an encoder with images, or vectors."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeGuard

import numpy as np
from jaxtyping import Int

from nearkin.classification.data import open_labeled_data
from nearkin.classifier.classifier import read_classifier
from nearkin.commands.embed import embed
from nearkin.commands.settings import EncoderLike, PathLike, name_of
from nearkin.config import ClassifyConfig, DiscoverConfig
from nearkin.data.images import Either, Folder, Images, Source
from nearkin.data.opening import open_images
from nearkin.discovery.data import open_discovery_data
from nearkin.encoders.encoder import Encoder, is_own, load
from nearkin.errors import CheckpointError, DataError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import EmbeddingTable, are_vectors, open_table
from nearkin.evaluation.vectors import write_embeddings
from nearkin.extensions import check_trusted
from nearkin.files import creating
from nearkin.run.folder import RunFolder, check_target, data_name
from nearkin.run.reporter import Reporter, reporter_of
from nearkin.schema import Auto, option
from nearkin.tables import write_csv
from nearkin.text import as_text

VectorsLike = PathLike | Embeddings
"""Features: a folder of shards or a .parquet that `embed` has written, or what it has returned."""


def is_table(source: EncoderLike | Embeddings) -> TypeGuard[VectorsLike]:
    """Whether these are features rather than an encoder."""
    if isinstance(source, Encoder):
        return False
    return isinstance(source, Embeddings) or are_vectors(Path(source))


def features_at(vectors: VectorsLike | None) -> Embeddings | Path | None:
    """The features that are named: a file or a folder of them or, of a run, its own table.

    Raises:
        UsageError: If there are none.
    """
    if vectors is None or isinstance(vectors, Embeddings):
        return vectors
    own = RunFolder(Path(vectors)).embeddings
    return open_table(own if own.exists() else Path(vectors)).path


def check_stored(**given: bool) -> None:
    """Refuse the options that are given of images and an encoder, where features are stored.

    Raises:
        UsageError: If there is one.
    """
    for name, is_given in given.items():
        if is_given:
            raise UsageError(
                f"{option(name)} is of images with an encoder, and these features are stored; "
                "leave it out"
            )


@contextmanager
def table_of(vectors: VectorsLike, log: Reporter) -> Iterator[EmbeddingTable]:
    """Open a table of features, and log which column is removed; those in memory become a file."""
    with ExitStack() as stack:
        at = features_at(vectors)
        if isinstance(at, Embeddings):
            folder = stack.enter_context(TemporaryDirectory(prefix="nearkin-"))
            path = Path(folder) / "embeddings.parquet"
            write_embeddings(path, at, at.encoder)
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
    source: str  # What `load` takes; empty if only the table was given
    image_size: int | Auto = "auto"
    allow_partial: bool = False
    trust_remote_code: bool = False

    @property
    def is_of_run(self) -> bool:
        """Whether the table is a run's own."""
        return bool(self.source) and self.table.path == RunFolder(Path(self.source)).embeddings

    @cached_property
    def encoder(self) -> Encoder | None:
        """Load the encoder, or refuse one that the table is not from; None if none was given."""
        if not self.source:
            return None
        if self.is_of_run:
            RunFolder(Path(self.source)).encoder_settings()  # a discovery has other features
        encoder = load(
            self.source,
            image_size=self.image_size,
            allow_partial=self.allow_partial,
            trust_remote_code=self.trust_remote_code,
        )
        check_origin(self.table, encoder, self.source)
        return encoder

    def image_rows(self, images: Images) -> Int[np.ndarray, " rows"]:
        """Return the row among the images of each row of the table."""
        row = {as_text(name): number for number, name in enumerate(images.names)}
        paths = self.table.texts("path")
        if missing := [path for path in paths if path not in row]:
            raise DataError(
                f"{len(missing)} of {len(paths)} images of {self.table.path} are not among these, "
                f"such as {missing[0]!r}; give the images that it was made of"
            )
        return np.array([row[path] for path in paths], np.int64)


@contextmanager
def open_vectors(
    source: EncoderLike | Embeddings,
    data: Any = None,
    *,
    vectors: VectorsLike | None = None,
    image_size: int | Auto = "auto",
    allow_partial: bool = False,
    trust_remote_code: bool = False,
    device: str = "auto",
    workers: int | Auto = "auto",
    verbose: bool | Reporter = True,
) -> Iterator[Vectors]:
    """Yield a run's features; those of `data` by an encoder, computed or stored; or stored ones.

    Args:
        source: A run, an encoder with `data`, or features.
        data: Images.
        vectors: Features of them by that encoder.
        image_size: Side of the images in pixels that features are computed with.
        allow_partial: Whether weights may be missing from the encoder's checkpoint, or left over.
        trust_remote_code: Whether to run code that files of the run name.
        device: Where to compute.
        workers: Processes that decode photographs.
        verbose: Whether to show progress, or what receives it.

    Raises:
        UsageError: If that does not fit together.
    """
    how: dict[str, Any] = {"image_size": image_size, "allow_partial": allow_partial}
    if is_table(source) or (vectors is None and data is None):
        check_stored(image_size=image_size != "auto", allow_partial=allow_partial)
    how["trust_remote_code"] = trust_remote_code
    log = reporter_of(verbose)
    if is_table(source):
        if vectors is not None:
            raise UsageError("these are features, and so is --vectors; give one of them")
        with table_of(source, log) as table:
            yield Vectors(table, "")
        return
    name = name_of(source)
    if vectors is None and data is None:
        if not is_own(name):
            raise UsageError(f"{name} has no images of its own; give images, too")
        RunFolder(Path(name)).check_is_run()
        table = open_table(RunFolder(Path(name)).embeddings)
        yield Vectors(table, name, trust_remote_code=trust_remote_code)
        return
    if vectors is None:
        computing: dict[str, Any] = {"device": device, "workers": workers, "verbose": log}
        vectors = embed(name, data, labels="none", **computing, **how)
    with table_of(vectors, log) as table:
        found = Vectors(table, name, **how)
        assert found.encoder is not None  # or it is refused, as one of other features
        yield found


def images_of(folder: RunFolder, data: Any = None, *, trust_remote_code: bool = False) -> Images:
    """Open the images of a finished run.

    Args:
        folder: The run.
        data: The images, if they have moved.
        trust_remote_code: Whether to run code that files of the run name.

    Raises:
        UsageError: If the run is not finished, or its images were arrays, which are not stored.
    """
    folder.check_is_run()
    if not folder.summary.exists():
        raise UsageError(f"{folder.path} is no finished run; finish it with --resume")
    config, _ = folder.any_settings()
    labeled = getattr(config, "labeled", "")
    source = source_of(folder, data, trust_remote_code=trust_remote_code, labeled=labeled)
    if isinstance(config, DiscoverConfig):
        # The truth that it was scored by may be gone, like the run that it accepted.
        return open_discovery_data(source, replace(config, truth=""), resumed=folder).images
    if isinstance(config, ClassifyConfig):
        return open_labeled_data(source, config, resumed=folder).images
    return open_images(source, labels=config.labels)


def source_of(folder: RunFolder, data: Any, *, trust_remote_code: bool, **settings: Any) -> Any:
    """Return what the images of a run are opened from: `data`, or if None what it was made from.

    Raises:
        UsageError: If these were arrays, which are not stored, or if code is not trusted that the
            run names there or in these of its settings.
    """
    if data is None:
        data = settings["data"] = folder.any_settings()[1]
        if data == data_name(None) and not Path(data).exists():
            raise UsageError(
                f"{folder.path} was made from arrays, which are not stored; give the images, too"
            )
    check_trusted(settings, folder.config, trust_remote_code)
    return data


def check_origin(table: EmbeddingTable, encoder: Encoder, source: str | Path) -> None:
    """Refuse a table of another encoder, where it names its own, or one that lacks a column.

    The projection that has removed the column is not stored, and what an encoder makes of an image
    has the column still.
    """
    if table.removed:
        raise CheckpointError(
            f"{table.path}: {table.removed} is removed from these features, and not from those of "
            "other images; give features that nearkin embed makes without --ignore"
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


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table for people."""
    with creating(path):
        write_csv(path, columns, rows)


def places(images: Images) -> list[str]:
    """Return where each image lies, as a table that is data for nearkin names it.

    That is an absolute path, or the name of an image that is no file of its own.
    """
    return [_place(images.source, row, name) for row, name in enumerate(images.names)]


def _place(source: Source, row: int, name: str) -> str:
    if isinstance(source, Folder):
        return source.path(row)
    if isinstance(source, Either):
        first, position = source.start, int(source.rows[row])
        return (
            _place(source.first, position, name)
            if position < first
            else _place(source.second, position - first, name)
        )
    return name
