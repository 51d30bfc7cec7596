"""A folder of embeddings in parts: Parquet files that other tools read as one table."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from nearkin import tables
from nearkin.data.images import Images
from nearkin.errors import DataError, OutputError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.run.data import write_bad_files
from nearkin.tables import PARTIAL, usable

# What a folder is of. Readers of Parquet folders pass over names that begin so.
NOTE: Final = "_parts.json"
BAD_FILES: Final = "_bad_files.csv"
BAD: Final = b"nearkin.bad"  # Where a part notes its bad images, so that both appear at once
BLOCK_SIZE: Final = 4_096  # Images that can be read from a part at once
SHARD: Final = 65_536  # Images of a part
MOST: Final = 1_000_000  # Parts; from there on, their names are not in the order of the images


@dataclass(frozen=True)
class PartsWritten:
    """Progress of a folder of parts."""

    now: int  # Parts that were made just now
    missing: int  # Parts that other processes have yet to make
    num_parts: int
    count: int = 0  # Images with features, once no part is missing
    bad: int = 0  # Unreadable images, once no part is missing

    def lines(self, folder: Path) -> list[str]:
        """Lines of text."""
        lines = [f"{self.now} of {self.num_parts} parts written: {folder.resolve()}"]
        if self.missing:
            return [*lines, f"{self.missing} parts are still missing; others are to make them"]
        lines.append(f"{self.count} images have features")
        if self.bad:
            lines.append(f"left out {self.bad} that cannot be read: see {BAD_FILES}")
        return lines


@dataclass(frozen=True)
class Note:
    """What the parts of a folder were computed from."""

    encoder: str  # The SHA-256 of its file
    data: str  # The fingerprint of the images, their labels and their splits
    images: int
    shard: int  # Images of a part; the last may have fewer

    @property
    def num_parts(self) -> int:
        """The number of files once all are written."""
        return -(-self.images // self.shard)

    def part(self, number: int) -> str:
        """The name of a part's file. Names are in the order of the images."""
        return f"part-{number:06}.parquet"

    def missing(self, folder: Path) -> list[int]:
        """The parts that are not there yet."""
        there = {path.name for path in folder.glob("part-*.parquet")}
        return [number for number in range(self.num_parts) if self.part(number) not in there]


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def note_on(encoder: Path, images: Images, shard: int) -> Note:
    """Return the note of a folder of the embeddings of these images."""
    labels, names = hashlib.sha256(images.labels.tobytes()), [*images.classes, *images.splits]
    labels.update("\0".join(names).encode(errors="surrogatepass"))
    return Note(digest(encoder), f"{images.fingerprint}-{labels.hexdigest()}", len(images), shard)


def claim(folder: Path, note: Note) -> None:
    """Write the note of a new folder, or check that an old one has the same.

    Raises:
        OutputError: If it is of something else, is not empty, or cannot be written.
    """
    with tables.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        others = [path.name for path in folder.iterdir() if PARTIAL not in path.name]
    if not (folder / NOTE).exists():  # checked last: other processes may have started meanwhile
        if others:
            raise OutputError(
                f"{folder} is not empty and has no {NOTE}; choose a new folder with -o"
            )
        with whole(folder / NOTE) as partial:
            partial.write_text(json.dumps(asdict(note), indent=2) + "\n", encoding="utf-8")
    earlier = read_note(folder)
    if earlier != note:
        kinds = {"encoder": "encoder", "data": "data", "shard": f"--shard, {earlier.shard}"}
        changed = [kind for name, kind in kinds.items() if vars(earlier)[name] != vars(note)[name]]
        differs = " and another ".join(changed or ["number of images"])
        raise OutputError(
            f"{folder} was begun with another {differs}; choose a new folder with -o"
        )


def read_note(folder: Path) -> Note:
    """Read the note of a folder of parts.

    Raises:
        UsageError: If it is no such folder.
        CheckpointError: If the note is damaged.
    """
    path = folder / NOTE
    if not path.exists():
        raise UsageError(f"{folder} has no {NOTE}; give a folder that nearkin embed has made")
    with usable(path, f"remove {folder} and run nearkin embed again"):
        noted = json.loads(path.read_text(encoding="utf-8"))
        note = Note(**{name: kind(noted[name]) for name, kind in Note.__annotations__.items()})
        if min(note.shard, note.images) < 1 or note.num_parts > MOST:
            raise ValueError("it speaks of impossible numbers")
        return note


def write_part(path: Path, embeddings: Embeddings) -> None:
    """Write one part, and in it which of its images could not be read."""
    from pyarrow import parquet

    rows = embeddings.to_arrow()
    rows = rows.replace_schema_metadata({BAD: json.dumps(embeddings.bad)})
    columns = ["split", "label"]  # of the others, hardly two cells are equal
    with whole(path) as partial, partial.open("wb") as file:
        parquet.write_table(rows, file, row_group_size=BLOCK_SIZE, use_dictionary=columns)


def read_footer(path: Path) -> tuple[int, Mapping[str, str]]:
    """Return how many images a part has, and its unreadable ones with the reason."""
    from pyarrow import parquet

    with usable(path, "remove it and run nearkin embed again"), path.open("rb") as file:
        footer = parquet.read_metadata(file)
        bad = json.loads(footer.metadata[BAD])
        return footer.num_rows, {str(name): str(reason) for name, reason in bad.items()}


def parts_written(folder: Path, note: Note, images: Images, now: int) -> PartsWritten:
    """Return the progress of a folder; the process that sees all parts finishes it."""
    missing = len(note.missing(folder))
    if missing:
        return PartsWritten(now, missing, note.num_parts)
    total, bad = 0, dict[str, str]()
    for number in range(note.num_parts):
        count, unread = read_footer(folder / note.part(number))
        total += count
        bad.update(unread)
    if images.bad or bad:
        with whole(folder / BAD_FILES) as partial:
            write_bad_files(partial, images, bad)
    for partial in folder.glob(f".part-*{PARTIAL}*"):  # of killed processes
        partial.unlink(missing_ok=True)
    if not total:
        raise DataError(f"none of the {len(images)} images can be read; look at the files")
    return PartsWritten(now, 0, note.num_parts, total, len(images.bad) + len(bad))


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Write an output file atomically; see `nearkin.tables.whole`.

    Raises:
        OutputError: If it cannot be written. What had the name before still has it.
    """
    with tables.writing(path, "make room, or choose another -o"), tables.whole(path) as partial:
        yield partial
