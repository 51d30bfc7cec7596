"""`nearkin embed`: the features of pictures as a table other tools read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin.config import suggestion
from nearkin.data.centered import pixels, to_network
from nearkin.data.images import Images, open_images
from nearkin.distributed import available_cpus, choose_device
from nearkin.errors import OutputError, UsageError
from nearkin.evaluation.encode import encode
from nearkin.objectives import unit
from nearkin.runs.encoder import Encoder, load
from nearkin.tables import write_csv

FORMATS = (".parquet", ".npz", ".npy")


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Features of pictures: row i of `vectors` belongs to `paths[i]`."""

    paths: list[str]
    vectors: np.ndarray
    """float32 of shape (pictures, features), each of length one."""
    labels: list[str]
    """Class names; empty where unknown."""
    splits: list[str]
    """`train` or `test`; empty where neither is said."""

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

    def _columns(self) -> dict[str, list[str]]:
        return {"path": self.paths, "split": self.splits, "label": self.labels}

    def _write_parquet(self, path: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        flat = pyarrow.array(self.vectors.ravel())
        vectors = pyarrow.FixedSizeListArray.from_arrays(flat, self.vectors.shape[1])
        parquet.write_table(pyarrow.table({**self._columns(), "vector": vectors}), path)


def check_format(path: Path) -> None:
    """Refuse a file ending that has no writer, before anything is computed."""
    if path.suffix not in FORMATS:
        raise UsageError(
            f"cannot write embeddings as {path.name}.{suggestion(path.suffix, FORMATS)} "
            f"Give a name that ends in {', '.join(FORMATS)}"
        )


def embed(
    run: str | Path, data: Any, *, output: str | Path | None = None, device: str = "auto"
) -> Embeddings:
    """Features of pictures by a trained encoder.

    Args:
        run: A run folder, or its encoder.safetensors.
        data: What `open_images` takes.
        output: Also write them to this file.
        device: Where to compute.
    """
    if output is not None:
        check_format(Path(output))
    embeddings = embed_images(load(run), open_images(data), choose_device(device))
    if output is not None:
        embeddings.write(Path(output))
    return embeddings


def embed_images(encoder: Encoder, images: Images, device: torch.device) -> Embeddings:
    """Features of pictures that are already open."""
    encoder.to(device).to(memory_format=torch.channels_last)
    workers = available_cpus()
    shown = pixels(images, encoder.image_size, workers=workers)
    features = encode(encoder, (to_network(batch.to(device)) for batch in shown))
    return table(images, features, images.splits.tolist())


def table(images: Images, features: Tensor, splits: list[str]) -> Embeddings:
    """Features of pictures with what is known about each."""
    labels = [images.classes[label] if label >= 0 else "" for label in images.labels.tolist()]
    return Embeddings(list(images.names), unit(features).numpy(), labels, splits)
