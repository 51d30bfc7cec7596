"""`nearkin neighbors`: the images that an image is most similar to."""

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nearkin.commands.embed import encode_readable
from nearkin.commands.index import shortlist
from nearkin.data.images import open_files
from nearkin.data.sources import Folder, Listing, Stat
from nearkin.distributed import choose_device
from nearkin.errors import CheckpointError, DataError, UsageError
from nearkin.evaluation.encoder import Encoder, load
from nearkin.evaluation.parts import digest
from nearkin.evaluation.vectors import Block, Vectors, open_vectors
from nearkin.objectives import unit
from nearkin.run.folder import RunFolder

SLACK: Final = 1e-3
"""What a cosine similarity in float32 is never off by, with up to 16,000 features."""


@dataclass(frozen=True)
class Neighbor:
    """An image of a table, and how similar it is."""

    similarity: float
    """The cosine."""
    path: str
    label: str
    """Empty where unknown."""


@dataclass(frozen=True)
class Neighbors:
    """The images of a table that an image is most similar to."""

    image: str
    neighbors: list[Neighbor]
    """The most similar first; equals in the order of the table."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        found = [f"  {n.similarity:6.3f}  {n.path}  {n.label}".rstrip() for n in self.neighbors]
        return [self.image, *found]


def neighbors(
    run: str | Path,
    files: Sequence[str | Path],
    *,
    vectors: str | Path | None = None,
    index: str | Path | None = None,
    top: int = 10,
    backbone: nn.Module | None = None,
    device: str = "auto",
) -> list[Neighbors]:
    """The most similar images to each of some images, by the features of a run.

    Args:
        run: A run folder, or its encoder.safetensors.
        files: Images. An image that is in the table, too, is its own most similar one.
        vectors: What to search: a folder of parts, a .parquet or an .npz that `embed` has made of
            the same encoder; by default the run's own embeddings.parquet.
        index: Made of these vectors by `nearkin index`. Then not all of them are compared, and
            some neighbors may be missed.
        top: How many; no more are given than there are.
        backbone: The run's network, if it was given one from Python; untrained.
        device: Where to compute features.

    Raises:
        UsageError: If there is no such thing.
        DataError: If an image cannot be read.
        CheckpointError: If the vectors or the index are damaged, or of something else.
    """
    if top < 1 or not files:
        raise UsageError("nothing to look for; give at least one image, and --top 1 or more")
    encoder, table = load(run, backbone=backbone), _table(Path(run), vectors)
    queries = _features(encoder, files, choose_device(device))
    if index is None:
        blocks = table.blocks()
    else:
        blocks = table.blocks(shortlist(Path(index), table, queries, top))
    found = most_similar(blocks, queries, top)
    return [Neighbors(str(name), near) for name, near in zip(files, found, strict=True)]


def _table(run: Path, vectors: str | Path | None) -> Vectors:
    """What to search, which is to be of the run's encoder as far as it says."""
    table = open_vectors(RunFolder(run).embeddings if vectors is None else Path(vectors))
    encoder = RunFolder(run).encoder if run.is_dir() else run
    if table.encoder not in ("", digest(encoder)):
        raise CheckpointError(
            f"{table.path} is of another encoder than {encoder}; make one with nearkin embed {run}"
        )
    return table


def _features(
    encoder: Encoder, files: Sequence[str | Path], device: torch.device
) -> Float[Tensor, "images dim"]:
    """Features of files, read and encoded just as `embed` does it."""
    names = [os.path.abspath(image) for image in files]  # noqa: PTH100  (keeps links)
    listing = Listing("", Folder(Path("/")), {name: _state(name) for name in names})
    images = open_files(listing, cache=False)
    bad = {file.name: file.reason for file in images.bad}
    if not bad:
        found = encode_readable(encoder, images, device=device, workers=0)
        bad = found.bad
    if bad:
        name, reason = next(iter(bad.items()))
        raise DataError(f"{name!r} cannot be read ({reason}); give images")
    rows = {name: row for row, name in enumerate(images.names)}
    return unit(found.features[[rows[name] for name in names]])


def _state(name: str) -> Stat:
    try:
        found = Path(name).stat()
    except OSError as error:
        raise DataError(f"{name!r} cannot be read ({error.strerror}); give images") from error
    if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
        raise DataError(f"{name!r} cannot be read (not a regular file); give images")
    return Stat(found.st_size, found.st_mtime_ns)


Found = tuple[float, int, Neighbor]
"""Less the similarity, and the place: tuples of this kind sort as neighbors do."""


def most_similar(
    blocks: Iterable[Block], queries: Float[Tensor, "queries dim"], top: int
) -> list[list[Neighbor]]:
    """The `top` rows most similar to each query, as if all blocks were one.

    A product of matrices rounds by their shapes, so that equal rows of two blocks, or at the edge
    of one, come out unequal. It only decides which rows are looked at again, in float64 and each
    for itself. Similarities are those, in float32; equal ones are ordered by place.

    Args:
        blocks: In the order of their places.
        queries: Of length one.
        top: How many, at least 1.

    Raises:
        CheckpointError: If the rows have another number of features.
        DataError: If there are none.
    """
    best: list[list[Found]] = [[] for _ in queries]
    for block in blocks:
        dim = block.vectors.shape[1]
        if dim != queries.shape[1]:
            raise CheckpointError(
                f"the vectors have {dim} features and the encoder gives {queries.shape[1]}; give "
                "vectors that nearkin embed has made of this run"
            )
        for query, rough, found in zip(queries, queries @ block.vectors.T, best, strict=True):
            found += _looked_at_again(block, query, _promising(rough, found, top), top)
            found.sort(key=lambda one: one[:2])
            del found[top:]
    if not best[0]:
        raise DataError("there is no image to compare with; give vectors of some")
    return [[neighbor for _, _, neighbor in found] for found in best]


def _promising(
    rough: Float[Tensor, " rows"], found: Sequence[Found], top: int
) -> Int[Tensor, " promising"]:
    """The rows of a block that may be among the most similar so far."""
    least = float(rough.topk(min(top, len(rough))).values[-1])
    if len(found) == top:
        least = max(least, -found[-1][0])
    return (rough >= least - SLACK).nonzero().squeeze(1)


def _looked_at_again(
    block: Block, query: Float[Tensor, " dim"], rows: Int[Tensor, " promising"], top: int
) -> list[Found]:
    """The most similar of these rows of a block."""
    exact = (block.vectors[rows].double() * query.double()).sum(dim=1).float()
    similarity, order = exact.sort(descending=True, stable=True)
    chosen = block.rows(rows[order[:top]].numpy())
    columns = (chosen.paths.to_pylist(), chosen.labels.to_pylist())
    rest = zip(similarity[:top].tolist(), chosen.places.tolist(), *columns, strict=True)
    return [(-s, place, Neighbor(s, path or "", label or "")) for s, place, path, label in rest]
