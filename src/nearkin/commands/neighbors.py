"""`nearkin neighbors`: find the images most similar to an image."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from nearkin.commands.arguments import EncoderLike, PathLike, command, name_of
from nearkin.commands.sources import VectorsLike, check_origin, images_of, table_encoder, table_of
from nearkin.config import AutoImageSize
from nearkin.data.folders import list_files
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.data.scan import scan
from nearkin.distributed import choose_device
from nearkin.encoders.encoder import Encoder, is_own, load
from nearkin.encoders.inference import inference
from nearkin.errors import DataError, UsageError
from nearkin.evaluation.embeddings import encode_images
from nearkin.evaluation.table import EmbeddingTable
from nearkin.objectives import unit
from nearkin.result import Result, Row
from nearkin.run.folder import RunFolder, check_target
from nearkin.run.reporter import Silent, reporter_of
from nearkin.run.sheets import contact_sheet, image_format
from nearkin.schema import Count


@dataclass(frozen=True)
class Neighbor:
    """An image of a table, and how similar it is."""

    similarity: float  # The cosine
    path: str
    label: str  # Empty where unknown


@dataclass(frozen=True, repr=False)
class Neighbors(Result):
    """The images of a table that an image is most similar to."""

    image: str
    neighbors: list[Neighbor]  # The most similar first; equals in the order of the table

    @override
    def records(self) -> list[Row]:
        """A row per neighbor."""
        return [{"image": self.image, **asdict(each)} for each in self.neighbors]

    @override
    def lines(self) -> list[str]:
        """Lines of text: the image, then its neighbors."""
        rows = [f"  {n.similarity:6.3f}  {n.path}  {n.label}".rstrip() for n in self.neighbors]
        return [self.image, *rows]


@command
def neighbors(
    encoder: EncoderLike,
    images: Sequence[PathLike],
    *,
    vectors: VectorsLike | None = None,
    top: Count = 10,
    image_size: AutoImageSize = "auto",
    allow_partial: bool = False,
    trust_remote_code: bool = False,
    output: PathLike | None = None,
    overwrite: bool = False,
    data: Any = None,
    backbone: nn.Module | None = None,
    device: str = "auto",
) -> list[Neighbors]:
    """Find the most similar images to each of some images, by their features.

    Args:
        encoder: A run, or another encoder that `load` takes.
        images: Image files. One that is in the table, too, is its own most similar one.
        vectors: What to search: features that `embed` has made by the same encoder; by default
            the run's own embeddings.parquet.
        top: How many; no more are given than there are.
        image_size: Side of the images in pixels that the vectors were made with.
        allow_partial: Whether weights may be missing from the encoder's checkpoint, or left over.
        trust_remote_code: Whether to run code that files of the run name.
        output: An image file that shows them beside their neighbors, such as sheet.png.
        overwrite: Replace the file.
        data: The images to show on it, if they are not those of the run.
        backbone: The run's network, if it was given one from Python; untrained.
        device: Where to compute features.

    Raises:
        UsageError: If there is no such thing.
        DataError: If an image cannot be read.
        CheckpointError: If the vectors are damaged, or of something else.
    """
    sheet = None if output is None else Path(output)
    if sheet is not None:
        image_format(sheet)
        reads = [encoder, *images, vectors, data]
        check_target(sheet, overwrite=overwrite, reads=reads)
    if not images:
        raise UsageError("nothing to look for; give at least one image")
    if data is not None and sheet is None:
        raise UsageError("--data is shown on a sheet of images; give -o sheet.png, too")
    if vectors is None and image_size != "auto":
        raise UsageError("--image-size is of --vectors; those of a run have a size of their own")
    name, files = name_of(encoder), [os.fspath(image) for image in images]
    loaded = load(
        name,
        backbone=backbone,
        image_size=image_size,
        allow_partial=allow_partial,
        trust_remote_code=trust_remote_code,
    )
    if vectors is None and (not is_own(name) or Path(name).is_file()):
        raise UsageError(
            f"{name} has no images of its own; give --vectors, which `nearkin embed ENCODER DATA "
            "-o FILE` writes"
        )
    folder = RunFolder(Path(name))
    if vectors is None:
        vectors, loaded = folder.embeddings, table_encoder(folder, loaded)
    shown = None if sheet is None else _shown(folder, data, trust_remote_code)
    # `check_origin` refuses a table that lacks a column, so none needs to be told of one.
    with table_of(vectors, Silent()) as table:
        check_origin(table, loaded, name)
        queries = _features(loaded, files, choose_device(device))
        nearest = _nearest(table, queries, top)
    found = [Neighbors(file, near) for file, near in zip(files, nearest, strict=True)]
    if sheet is not None and shown is not None:
        rows = [(each.image, [(n.path, n.similarity) for n in each.neighbors]) for each in found]
        contact_sheet(rows, shown, sheet)
    return found


def _features(
    encoder: Encoder, files: Sequence[str], device: torch.device
) -> Float[Tensor, "images dim"]:
    """Compute the features of files, as `embed` does."""
    names = [os.path.abspath(image) for image in files]  # noqa: PTH100  (keeps links)
    for name in names:
        try:
            Path(name).stat()
        except OSError as error:
            raise DataError(f"{name!r} cannot be read ({error.strerror}); give images") from error
    listing = list_files(Path("/"), set(names))
    images = scan(listing)
    bad = images.reasons
    if not bad:
        embeddings = encode_images(inference(encoder, device), images, workers=0, allow_none=True)
        bad = dict(embeddings.bad)
    if bad:
        name, reason = next(iter(bad.items()))
        raise DataError(f"{name!r} cannot be read ({reason}); give images")
    rows = {name: row for row, name in enumerate(images.names)}
    named = dict(zip(listing.written, listing.names, strict=True))
    return unit(embeddings.tensor[[rows[named[name]] for name in names]])


def _nearest(
    table: EmbeddingTable, queries: Float[Tensor, "queries dim"], top: int
) -> list[list[Neighbor]]:
    """Return the most similar rows to each query, with their names."""
    similarity, rows = table.nearest(queries, top)
    found, position = np.unique(rows.numpy(), return_inverse=True)
    columns = (table.texts(column, found) for column in ("path", "label"))
    paths, labels = (np.array(column, np.object_)[position].tolist() for column in columns)
    return [
        [Neighbor(*values) for values in zip(*row, strict=True)]
        for row in zip(similarity.tolist(), paths, labels, strict=True)
    ]


def _shown(folder: RunFolder, data: Any, trust: bool) -> Images:
    """Open the images of the sheet, before the search."""
    if data is not None:
        return open_images(data)
    if not folder.config.exists():
        raise UsageError(f"{folder.path} has no images to show beside others; give --data")
    return images_of(folder, trust=trust, log=reporter_of(verbose=True))
