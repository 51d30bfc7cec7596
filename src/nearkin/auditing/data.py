"""What is audited: features of a training and a test part, with their images where there are some.

Parts come as two sets, as a column of a table, or as what the data themselves name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nearkin.classifier.features import UNTOUCHED, Extraction
from nearkin.data.images import Either, Images
from nearkin.data.labels import grouped, numbered, splits_of
from nearkin.data.notes import lines
from nearkin.data.opening import column_of, open_images
from nearkin.data.split import learned_and_scored, trained_or_scored, validation_notes
from nearkin.data.union import union
from nearkin.encoders.encoder import Encoder
from nearkin.errors import CheckpointError, UsageError
from nearkin.evaluation.column import Values, check_values
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.table import EmbeddingTable
from nearkin.pace import count
from nearkin.run.reporter import Reporter
from nearkin.types import UNLABELED

PARTS: Final = ("train", "test")
SECOND: Final = "test: "  # Before the names of the images of a second set

Rows = Int[np.ndarray, " _"]


@dataclass(frozen=True, eq=False)
class Audited:
    """Unit features of images of which each is of the part `train` or `test`."""

    embeddings: Embeddings  # With the groups that the data name
    images: Images | None = None  # In the same order; None of vectors alone
    num_seen: int | None = None  # Test images that the encoder's run was trained on, if known

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def is_test(self) -> Bool[np.ndarray, " n"]:
        """Whether each image is of the test part."""
        return np.asarray(self.embeddings.splits == "test")

    @property
    def train_rows(self) -> Rows:
        """The images that are learned from."""
        return np.flatnonzero(~self.is_test)

    @property
    def test_rows(self) -> Rows:
        """The images that are scored."""
        return np.flatnonzero(self.is_test)


def check_parts(splits: Values, labels: Rows, ignore: str, values: Values) -> None:
    """Refuse empty parts, labels of one class, and a column `ignore` with too few values."""
    for part, name in zip(PARTS, ("training", "test"), strict=True):
        if not (splits == part).any():
            raise UsageError(
                f"the data have no {name} part; name parts by folders (train, test), by a column "
                "with --split, or by --train and --test"
            )
    if len(np.unique(labels[labels != UNLABELED])) == 1:
        raise UsageError("all labels are of one class; give some of several, or none")
    if ignore:
        check_values(ignore, values[splits == "train"], values[splits == "test"])


def open_parts(
    sets: Sequence[Any], split: str, ignore: str, labels: str, log: Reporter
) -> tuple[Images, Values]:
    """Open one set of images, whose parts a column or the data name, or a training and a test set.

    Validation images are left out, as in `evaluate`. Returns the others, each of the part `train`
    or `test`, and what the column `ignore` says of each.
    """
    opened = [open_images(each, labels=labels, on_progress=log.progress) for each in sets]
    images, values = opened[0], np.zeros(sum(map(len, opened)), "U1")
    if ignore:
        pairs = zip(opened, sets, strict=True)
        values = np.concatenate([column_of(ignore, own, labels, data) for own, data in pairs])
    if len(opened) == 2:
        images = union(opened[0], opened[1], SECOND)
        assert isinstance(images.source, Either)
        is_first, values = images.source.rows < images.source.start, values[images.source.rows]
        parts, groups = np.where(is_first, "train", "test"), grouped(images.group_names)
        images = replace(images, splits=parts, groups=groups)  # those of one name are one
    elif split:
        named = column_of(split, images, labels, sets[0])
        images = replace(images, splits=splits_of(named.tolist(), f"--split {split}"))
    values = values[np.logical_or(*learned_and_scored(images.splits))]
    used = trained_or_scored(images)
    splits = np.where(used.splits == "test", "test", "train")
    check_parts(splits, used.labels, ignore, values)
    for line in used.decisions():
        log.info(line)
    return replace(used, splits=splits), values


def of_images(
    images: Images, encoder: Encoder, device: torch.device, workers: int, log: Reporter
) -> Audited:
    """Compute the features of images, or take those that an earlier command has kept."""
    extracted = Extraction(encoder, images, UNTOUCHED, device, workers, log).compute()
    embeddings = extracted.embeddings(images).normalized()
    if extracted.bad:
        log.info(f"left out: {count(len(extracted.bad), 'image')} that cannot be read")
    return Audited(embeddings, images.subset(embeddings.rows))


def of_tables(
    tables: Sequence[EmbeddingTable], split: str, ignore: str, log: Reporter
) -> tuple[Audited, Values]:
    """Read one table of features, whose column `split` names parts, or a training and a test one.

    They have to be of one encoder, and to have the column `ignore`.
    """
    vectors = _vectors(tables)
    cells = {
        name: [table.texts(name) for table in tables]
        for name in {"path", "label", "group", split or "split", ignore} - {""}
    }
    for table, own in zip(tables, cells.get(ignore, ()), strict=False):
        if not any(own):
            raise UsageError(f"{table.path} has no column {ignore}; give one that it has")
    values = cells.get(ignore) or [[""] * len(own) for own in vectors]
    ignored = np.array([cell for own in values for cell in own], np.str_)
    if len(tables) == 2:  # as of images, either may have an image of the same path
        cells["path"][1] = [SECOND + path for path in cells["path"][1]]
        cells["split"] = [[part] * len(own) for part, own in zip(PARTS, vectors, strict=True)]
    column = {name: [cell for own in of for cell in own] for name, of in cells.items()}
    where = f"--split {split}" if split else str(tables[0].path)
    parts, groups = splits_of(column[split or "split"], where), column["group"]
    classes, numbers = numbered(column["label"])
    learned, scored = learned_and_scored(parts)
    used = learned | scored
    for line in lines(validation_notes(parts)):
        log.info(line)
    splits = np.where(scored, "test", "train")
    check_parts(splits[used], numbers[used], ignore, ignored[used])
    embeddings = Embeddings(
        torch.cat(vectors).numpy(),
        numbers,
        groups=grouped(groups),
        rows=np.arange(len(parts)),
        paths=column["path"],
        classes=classes,
        splits=splits,
        removed=tables[0].removed,
        group_names=groups,
    )
    return Audited(embeddings.subset(used)), ignored[used]


def _vectors(tables: Sequence[EmbeddingTable]) -> list[Float[Tensor, "_ dim"]]:
    """Read the vectors of tables, which have to be of one encoder."""
    if len({each.encoder for each in tables} - {""}) > 1:
        raise CheckpointError(
            "the two tables are of different encoders, or of one with a column removed from each; "
            "embed both by one, at once"
        )
    vectors = [table.gather() for table in tables]
    if len({each.shape[1] for each in vectors}) > 1:
        raise CheckpointError(
            "the two tables have different numbers of features; embed both by one"
        )
    return vectors
