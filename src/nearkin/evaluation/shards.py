"""A folder of files of features, each of which is there whole or not at all."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from typing_extensions import override

from nearkin.data.images import Images
from nearkin.encoders.inference import Inference, Precision
from nearkin.errors import DataError, OutputError, UsageError
from nearkin.evaluation.embeddings import Embeddings, encode_images
from nearkin.evaluation.vectors import ROOM, read_footer, write_parquet
from nearkin.files import PARTIAL, replace_text, usable, whole, writing
from nearkin.pace import ProgressCallback, count, ignore_progress, under
from nearkin.result import Result
from nearkin.run.data import write_bad_files
from nearkin.run.failures import resource_errors
from nearkin.schema import Auto

# What a folder is of. Readers of Parquet folders pass over names that begin so.
NOTE: Final = "_shards.json"
BAD_FILES: Final = "_bad_files.csv"
SHARD: Final = 65_536  # Images of a shard
MOST: Final = 1_000_000  # Shards; from there on, their names are not in the order of the images


@dataclass(frozen=True)
class Note:
    """What the shards of a folder are computed from."""

    encoder: str  # Its digest
    data: str  # The fingerprint of the images, their labels, splits and groups
    images: int
    shard: int  # Images of a shard; the last may have fewer
    precision: Precision | Auto = "fp32"  # Of the encoder, as chosen

    @property
    def num_shards(self) -> int:
        """The number of files once all are written."""
        return -(-self.images // self.shard)


def note_on(encoder: str, images: Images, shard: int, precision: Precision | Auto) -> Note:
    """Return the note of a folder of the embeddings of these images, by that encoder."""
    labels, names = hashlib.sha256(images.labels.tobytes()), [*images.classes, *images.splits]
    names += images.group_names if any(images.group_names) else ()
    labels.update("\0".join(names).encode(errors="surrogatepass"))
    data = f"{images.fingerprint}-{labels.hexdigest()}"
    return Note(encoder, data, len(images), shard, precision)


@dataclass(frozen=True, repr=False)
class ShardsWritten(Result):
    """Progress of a folder of shards."""

    path: Path
    now: int  # Shards that were made just now
    missing: int  # Shards that other processes have yet to make
    num_shards: int
    count: int = 0  # Images with features, once no shard is missing
    bad: int = 0  # Unreadable images, once no shard is missing

    @override
    def lines(self) -> list[str]:
        """Lines of text."""
        lines = [f"{self.now} of {self.num_shards} shards written: {self.path}"]
        if self.missing:
            missing = count(self.missing, "missing shard")
            return [*lines, f"others are to make {missing}"]
        lines.append(f"features of {count(self.count, 'image')}")
        if self.bad:
            lines.append(f"left out {self.bad} that cannot be read: see {BAD_FILES}")
        return lines


@dataclass(frozen=True)
class ShardFolder:
    """A folder of Parquet files, each of which is there whole or not at all."""

    path: Path
    note: Note

    @classmethod
    def open(cls, path: Path) -> "ShardFolder":
        """Open a folder of shards; CheckpointError if its note is damaged."""
        if not (path / NOTE).exists():
            raise UsageError(f"{path} has no {NOTE}; give a folder that `nearkin embed` has made")
        with usable(path / NOTE, f"remove {path} and run `nearkin embed` again"):
            note = msgspec.json.decode((path / NOTE).read_bytes(), type=Note)
            if min(note.shard, note.images) < 1 or note.num_shards > MOST:
                raise ValueError("it speaks of impossible numbers")
        return cls(path, note)

    @classmethod
    def noted(cls, path: Path) -> Note | None:
        """What a folder was begun with; None if it is new."""
        return cls.open(path).note if (path / NOTE).exists() else None

    @classmethod
    def claim(cls, path: Path, note: Note) -> "ShardFolder":
        """Write the note of a new folder, or refuse an old one that has another, or none."""
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            others = [file.name for file in path.iterdir() if PARTIAL not in file.name]
        if not (path / NOTE).exists():  # checked last: other processes may have started meanwhile
            if others:
                raise OutputError(
                    f"{path} is not empty and has no {NOTE}; choose a new folder with -o"
                )
            with writing(path / NOTE, ROOM):
                replace_text(path / NOTE, json.dumps(asdict(note), indent=2) + "\n")
        earlier = cls.open(path).note
        if earlier != note:
            kinds = {
                "encoder": "encoder",
                "data": "data",
                "shard": f"--shard-size, {earlier.shard}",
                "precision": f"--precision, {earlier.precision}",
            }
            then, now = vars(earlier), vars(note)
            changed = [kind for name, kind in kinds.items() if then[name] != now[name]]
            differs = " and another ".join(changed or ["number of images"])
            raise OutputError(
                f"{path} was begun with another {differs}; choose a new folder with -o"
            )
        return cls(path, note)

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The file of each shard, there or not. Names are in the order of the images."""
        numbers = range(self.note.num_shards)
        return tuple(self.path / f"shard-{number:06}.parquet" for number in numbers)

    def missing(self) -> list[int]:
        """The shards that are not there yet."""
        there = set(self.path.glob("shard-*.parquet"))
        return [number for number, file in enumerate(self.files) if file not in there]

    def write(self, number: int, embeddings: Embeddings) -> None:
        """Write one shard, and in it which of its images could not be read.

        Another process that has written it meanwhile, as the last one, removes a partial file.
        """
        path = self.files[number]
        try:
            with writing(path, ROOM), whole(path) as partial, partial.open("wb") as file:
                write_parquet(file, replace(embeddings, encoder=self.note.encoder))
        except OutputError:
            if not path.exists():
                raise

    def compute(
        self,
        numbers: Sequence[int],
        by: Inference,
        images: Images,
        *,
        workers: int,
        on_progress: ProgressCallback = ignore_progress,
    ) -> Iterator[tuple[str, int]]:
        """Write these shards of the embeddings of all images, with only one of them in memory.

        A shard that another process has written meanwhile is not made again.

        Yields:
            After each shard, its name and how many images it has.
        """
        for number in numbers:
            name = f"shard {number + 1} of {self.note.num_shards}"
            if self.files[number].exists():
                yield name, read_footer(self.files[number])[0]
                continue
            start = number * self.note.shard
            rows = np.arange(start, min(self.note.images, start + self.note.shard))
            with resource_errors():
                embeddings = encode_images(
                    by,
                    images.subset(rows),
                    workers=workers,
                    on_progress=under(name, on_progress),
                    allow_none=True,
                )
            self.write(number, embeddings.normalized())
            count = len(embeddings)
            del embeddings  # or there would be two while the next is computed
            yield name, count

    def finish(self, images: Images, now: int) -> ShardsWritten:
        """Return the progress, with `now` new shards; whoever sees all shards lists bad images."""
        if missing := len(self.missing()):
            return ShardsWritten(self.path.resolve(), now, missing, self.note.num_shards)
        total, bad = 0, dict[str, str]()
        for file in self.files:
            count, unread = read_footer(file)
            total += count
            bad.update(unread)
        if images.bad or bad:
            path = self.path / BAD_FILES
            with writing(path, ROOM):
                write_bad_files(path, images, bad)
        for partial in self.path.glob(f".shard-*{PARTIAL}*"):  # of killed processes
            partial.unlink(missing_ok=True)
        if not total:
            raise DataError(f"none of the {len(images)} images can be read; look at the files")
        return ShardsWritten(
            self.path.resolve(), now, 0, self.note.num_shards, total, len(images.bad) + len(bad)
        )
