"""What was decided about the data without being asked, so that silence means: nothing was."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Final, Literal, get_args

Decision = Literal["left out", "merged", "renamed", "guessed", "substituted"]
DECISIONS: Final = get_args(Decision)


@dataclass(frozen=True)
class Note:
    """One decision about the data, with what it concerns.

    `str(note)` is one line: "left out: 12 files ending in .heic, such as 'a.heic'".
    """

    decision: Decision
    text: str  # What it is, with the count and, where the user can change it, the option
    count: int  # Images, files, rows or classes that it concerns
    examples: tuple[str, ...] = ()  # Names of the first of them

    def __str__(self) -> str:
        such = f", such as {named(self.examples)}" if self.examples else ""
        return f"{self.decision}: {self.text}{such}"


def note_on(decision: Decision, about: Sequence[str] | int, text: str) -> list[Note]:
    """A note on what these are the names of, or only the number of; none without any."""
    number, names = (about, ()) if isinstance(about, int) else (len(about), tuple(about[:3]))
    return [Note(decision, text, number, names)] if number else []


def noted(decision: Decision, names: Sequence[str], text: str) -> list[Note]:
    """A note on what these are the names of, which begins with their number; none without any.

    >>> print(*noted("left out", ["a", "b"], "files that are empty"))
    left out: 2 files that are empty, such as 'a', 'b'
    """
    return note_on(decision, names, f"{len(names)} {text}")


def lines(notes: Iterable[Note]) -> list[str]:
    """Format notes for the log and for `nearkin check`, a line each, what was left out first."""
    return [str(note) for note in sorted(notes, key=lambda note: DECISIONS.index(note.decision))]


def plain(notes: Iterable[Note]) -> list[dict[str, Any]]:
    """Return plain values of notes, for JSON."""
    return [asdict(note) | {"examples": list(note.examples)} for note in notes]


def named(names: Iterable[str]) -> str:
    """Format the first three names for a message: on one line, whatever they contain."""
    return ", ".join(map(repr, islice(names, 3)))
