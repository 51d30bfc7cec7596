"""Images into features, and features as a table of a row per image."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from nearkin.config import suggestion
from nearkin.data.batches import CenterCrops, to_input
from nearkin.data.images import Images
from nearkin.errors import DataError, OutputError, UsageError
from nearkin.evaluation.encoder import Encoder
from nearkin.networks.backbone import evaluating
from nearkin.objectives import unit
from nearkin.pace import ProgressCallback, ignore_progress, tracked
from nearkin.tables import write_csv


def encode(encoder: nn.Module, batches: Iterable[Float[Tensor, "_ ..."]]) -> Float[Tensor, "n d"]:
    """Features of all images, in float32 on the CPU.

    Batch norm uses its running statistics, so no image's features depend on another image.

    Args:
        encoder: A network from images to features. It is left as it was found.
        batches: Images on the encoder's device.

    Raises:
        DataError: If there are no images.
    """
    found = []
    with evaluating(encoder):
        for batch in batches:
            with torch.inference_mode():
                found.append(encoder(batch).flatten(1).float().cpu())
    if not found:
        raise DataError("no image to encode; name a folder or a split that has some")
    return torch.cat(found)  # outside of inference mode, so that a probe can learn from it


if TYPE_CHECKING:
    import pyarrow


FORMATS = (".parquet", ".npz", ".npy")


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Features of images: row i of `vectors` belongs to the i-th of `images`."""

    images: Images
    """Those that could be read."""
    vectors: np.ndarray
    """float32 of shape (images, features), each of length one."""
    splits: list[str]
    """`train` or `test`; empty where neither is said."""
    bad: dict[str, str]
    """The paths of those that could not be read, which have no row, with the reason."""

    @property
    def paths(self) -> list[str]:
        """The images' names."""
        return list(self.images.names)

    @property
    def labels(self) -> list[str]:
        """Class names; empty where unknown."""
        classes = self.images.classes
        return [classes[label] if label >= 0 else "" for label in self.images.labels.tolist()]

    def part(self, split: str) -> "Embeddings":
        """The images of one side of the split."""
        rows = np.flatnonzero(np.array(self.splits) == split)
        splits = [split] * len(rows)
        return Embeddings(self.images.subset(rows), self.vectors[rows], splits, self.bad)

    def write(self, path: Path) -> None:
        """Write a file whose ending says how: .parquet, .npz, or .npy with a .csv beside it.

        Raises:
            UsageError: For another ending.
            OutputError: If it cannot be written.
        """
        check_format(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".parquet":
                self._write_parquet(path)
            elif path.suffix == ".npz":
                np.savez(path, allow_pickle=False, **self._columns(), vector=self.vectors)
            else:
                np.save(path, self.vectors)
                columns = self._columns()
                rows = zip(*columns.values(), strict=True)
                write_csv(path.with_suffix(".csv"), tuple(columns), rows)
        except OSError as error:
            raise OutputError(
                f"cannot write {path}: {error.strerror}; choose another -o"
            ) from error

    def to_arrow(self) -> "pyarrow.Table":
        """The columns path, split, label and vector."""
        import pyarrow

        flat = pyarrow.array(self.vectors.ravel())
        vectors = pyarrow.FixedSizeListArray.from_arrays(flat, self.vectors.shape[1])
        columns = self._columns().items()
        text = {name: pyarrow.array(column, pyarrow.string()) for name, column in columns}
        return pyarrow.table({**text, "vector": vectors})

    def _columns(self) -> dict[str, list[str]]:
        columns = {"path": self.paths, "split": self.splits, "label": self.labels}
        return {name: list(map(as_text, column)) for name, column in columns.items()}

    def _write_parquet(self, path: Path) -> None:
        from pyarrow import parquet

        with path.open("wb") as file:  # pyarrow takes no path that is not UTF-8
            parquet.write_table(self.to_arrow(), file)


def check_format(path: Path) -> None:
    """Refuse a file ending that has no writer, before anything is computed."""
    if path.suffix not in FORMATS:
        raise UsageError(
            f"cannot write embeddings as {path.name}.{suggestion(path.suffix, FORMATS)} "
            f"Give a name that ends in {', '.join(FORMATS)}, or in / for a folder of parts"
        )


@dataclass(frozen=True, eq=False)
class Encoded:
    """Features of those of some images that could be read."""

    images: Images
    rows: np.ndarray
    """Where these images are among all that were asked for."""
    features: Float[Tensor, "n d"]
    bad: dict[str, str]
    """The names of the others, with the reason."""


def encode_images(
    encoder: Encoder,
    images: Images,
    *,
    device: torch.device,
    workers: int,
    on_progress: ProgressCallback = ignore_progress,
) -> Encoded:
    """Features of images, as the encoder gives them. It is moved to the device.

    Raises:
        DataError: If there are no images, or none that can be read.
    """
    found = encode_readable(
        encoder, images, device=device, workers=workers, on_progress=on_progress
    )
    if not len(found.rows):
        raise DataError(f"none of the {len(images)} images can be read; look at the files")
    return found


def encode_readable(
    encoder: Encoder,
    images: Images,
    *,
    device: torch.device,
    workers: int,
    on_progress: ProgressCallback = ignore_progress,
) -> Encoded:
    """The same of images of which maybe none can be read."""
    encoder.to(device).to(memory_format=torch.channels_last)
    shown = CenterCrops(images, encoder.image_size, workers=workers)
    features = encode_pixels(encoder, tracked(shown, len(images), "features", on_progress), device)
    rows = np.delete(np.arange(len(images)), sorted(shown.bad))
    bad = {images.names[row]: reason for row, reason in sorted(shown.bad.items())}
    return Encoded(images.subset(rows), rows, features[torch.from_numpy(rows)], bad)


def encode_pixels(
    network: nn.Module, batches: Iterable[UInt8[Tensor, "_ 3 _ _"]], device: torch.device
) -> Float[Tensor, "n d"]:
    """Features of images that are already pixels, by a network on that device."""
    return encode(network, (to_input(batch.to(device)) for batch in batches))


def table(
    images: Images, features: Float[Tensor, "n d"], splits: list[str], bad: dict[str, str]
) -> Embeddings:
    """Features of images with what is known about each."""
    return Embeddings(images, unit(features).numpy(), splits, bad)


def as_text(name: str) -> str:
    r"""A name that any file format takes: bytes of it that are not UTF-8 become `\xNN`."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
