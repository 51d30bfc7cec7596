"""What the pages of runs are made of: plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Number = int | float
Points = Sequence[tuple[Number, Number]]


@dataclass(frozen=True, slots=True)
class Tile:
    """An image as it is shown."""

    path: str
    """Its name in the data."""
    uri: str
    """Its pixels, as a `data:` URI."""
    score: float
    """How sure the classifier is of its class."""


@dataclass(frozen=True, slots=True)
class ClassView:
    """What is shown of a class, of those images that came without a label."""

    name: str
    size: int
    """How many images it was given."""
    medoid: Tile | None = None
    """The most central image; none if it has none that can be shown."""
    core: tuple[Tile, ...] = ()
    """The most typical images, most typical first."""
    border: tuple[Tile, ...] = ()
    """The images the classifier is least sure of, least sure first."""
    score: float | None = None
    """Mean over its images."""
    stability: float | None = None
    """How much of it the other seeds found as well (Jaccard)."""
    silhouette: float | None = None
    """Mean over its images."""
    nearest_known: str = ""
    """The known class it looks most like."""
    merge: tuple[str, ...] = ()
    """Classes it may be the same as."""
    truth: str = ""
    """A sentence on what it is in truth, where that is known."""


@dataclass(frozen=True, slots=True)
class Table:
    """Results, such as ours beside baselines."""

    title: str
    columns: tuple[str, ...]
    """Headings, that of the row names first."""
    rows: tuple[tuple[str, ...], ...]
    """The name and the cells of each row, ready to be read."""
    note: str = ""
    """How to read it."""


@dataclass(frozen=True, slots=True)
class Confusion:
    """How many images of each true class were given to each found class."""

    truth: tuple[str, ...]
    found: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """A row per true class."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over a common axis."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]
    """The (x, y) points of each line, by its name; those that are not finite are left out."""
    note: str = ""
    """How to read it."""
    chosen: Number | None = None
    """An x to be marked."""
    interval: tuple[Number, Number] | None = None
    """Between which x the truth may lie."""


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """All that the page of a training tells."""

    data: str
    """What the data are called."""
    lead: str
    """What was trained on what, in a paragraph."""
    health: str
    """Whether the embeddings still differ, in plain words."""
    findings: tuple[str, ...] = ()
    """What the reader should know before using the encoder, a sentence or two each."""
    results: Table | None = None
    """What the encoder is worth, beside its floors."""
    meanings: tuple[tuple[str, str], ...] = ()
    """What each of these numbers means."""
    confusion: Confusion | None = None
    """Which classes held-out images are taken for by their nearest training images."""
    curves: tuple[Chart, ...] = ()
    protocol: tuple[str, ...] = ()
    """How each number was found."""
    configuration: Mapping[str, Any] | None = None
    versions: Mapping[str, str] | None = None
    command: str = ""
    """What repeats the run."""
    steps: tuple[tuple[str, str], ...] = ()
    """What to do next: a sentence, and the command for it or nothing."""
    tiny: bool = False
    """Whether the images are so small that their pixels are to be seen as squares."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that the page of a discovery run tells."""

    data: str
    """What the data are called."""
    mode: Literal["gcd", "ncd"]
    """Whether an image without a label may be of a known class (gcd) or not (ncd)."""
    known: tuple[str, ...]
    """Names of the known classes."""
    num_labeled: int
    """How many images came with the name of a class."""
    num_unlabeled: int
    """How many came without; these were sorted into classes."""
    novel: tuple[ClassView, ...]
    """The classes found among them, in the order they are to be shown."""
    chosen: str
    """How the number of novel classes came about, as a participle: `given`, `chosen by ...`."""
    confidence: str
    """What a score means, in a sentence."""
    assigned: tuple[ClassView, ...] = ()
    """The known classes that images without a label were given to."""
    interval: tuple[int, int] | None = None
    """Between which numbers of novel classes the truth may lie."""
    findings: tuple[str, ...] = ()
    """What the reader should know before using any of this, a sentence or two each."""
    results: tuple[Table, ...] = ()
    """Scores against the truth, where it is known."""
    confusion: Confusion | None = None
    counting: tuple[Chart, ...] = ()
    """Curves by which the number of classes was chosen."""
    training: tuple[Chart, ...] = ()
    """Curves of the training."""
    protocol: tuple[str, ...] = ()
    """What was trained on what and scored on what, a sentence each."""
    configuration: Mapping[str, Any] | None = None
    versions: Mapping[str, str] | None = None
    command: str = ""
    """What repeats the run."""
    steps: tuple[tuple[str, str], ...] = ()
    """What to do next: a sentence, and the command for it or nothing."""
    tiny: bool = False
    """Whether the images are so small that their pixels are to be seen as squares."""
