"""Content of a page as plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Number = int | float
Points = Sequence[tuple[Number, Number]]


@dataclass(frozen=True, slots=True)
class Tile:
    """A thumbnail of an image."""

    path: str
    """Its name in the data."""
    uri: str
    """Its pixels, as a `data:` URI."""
    score: float
    """Confidence of the classifier in its class."""


@dataclass(frozen=True, slots=True)
class ClassView:
    """A known or novel class, with the unlabeled images assigned to it."""

    name: str
    size: int
    """Number of images assigned to it."""
    medoid: Tile | None = None
    """The most central image; None if it cannot be displayed."""
    core: tuple[Tile, ...] = ()
    """The most typical images, most typical first."""
    border: tuple[Tile, ...] = ()
    """The images with the lowest scores, lowest first."""
    score: float | None = None
    """Mean over its images."""
    stability: float | None = None
    """Jaccard overlap with the matching class of other seeds."""
    silhouette: float | None = None
    """Mean over its images."""
    nearest_known: str = ""
    """The most similar known class."""
    merge: tuple[str, ...] = ()
    """Classes that may be the same."""
    truth: str = ""
    """A sentence on its true classes, where known."""


@dataclass(frozen=True, slots=True)
class Table:
    """Results as formatted text."""

    title: str
    columns: tuple[str, ...]
    """Headings, that of the row names first."""
    rows: tuple[tuple[str, ...], ...]
    """The name and the cells of each row."""
    note: str = ""
    """How to read it."""


@dataclass(frozen=True, slots=True)
class Confusion:
    """Number of images of each true class in each predicted class."""

    true: tuple[str, ...]
    predicted: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """A row per true class."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over a common x axis."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]
    """The (x, y) points of each line by name; points that are not finite are left out."""
    note: str = ""
    """How to read it."""
    chosen: Number | None = None
    """An x to mark."""
    interval: tuple[Number, Number] | None = None
    """An uncertainty range of x to shade."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What the pages of all kinds of runs tell of a run."""

    data: str
    """Name of the data."""
    protocol: tuple[str, ...] = ()
    """What was trained on what and scored on what, a sentence each."""
    configuration: Mapping[str, Any] | None = None
    versions: Mapping[str, str] | None = None
    command: str = ""
    """Repeats the run."""
    steps: tuple[tuple[str, str], ...] = ()
    """What to do next: a sentence, and its command or ''."""
    tiny: bool = False
    """Images are so small that pages enlarge them without blur."""


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """Content of the page of a training."""

    run: RunInfo
    lead: str
    """What was trained on what, in a paragraph."""
    health: str
    """Whether embeddings collapsed, in a sentence."""
    findings: tuple[str, ...] = ()
    """What to know before using the encoder, a sentence or two each."""
    results: Table | None = None
    """Measures of the encoder beside its floors."""
    meanings: tuple[tuple[str, str], ...] = ()
    """Each measure with its definition."""
    confusion: Confusion | None = None
    """kNN predictions of held-out images."""
    curves: tuple[Chart, ...] = ()


@dataclass(frozen=True, slots=True)
class DiscoveryReport:
    """Content of the page of a discovery."""

    run: RunInfo
    mode: Literal["gcd", "ncd"]
    """Whether an unlabeled image may be of a known class (gcd) or not (ncd)."""
    known: tuple[str, ...]
    """Names of the known classes."""
    num_labeled: int
    num_unlabeled: int
    novel: tuple[ClassView, ...]
    """Novel classes in display order."""
    num_novel_source: str
    """How the number of novel classes was set, as a participle: `given`, `estimated by ...`."""
    score_meaning: str
    """What a score means, in a sentence."""
    assigned: tuple[ClassView, ...] = ()
    """Known classes with the unlabeled images assigned to them."""
    interval: tuple[int, int] | None = None
    """Range of the estimates of the number of novel classes."""
    findings: tuple[str, ...] = ()
    """What to know before using the classes, a sentence or two each."""
    results: tuple[Table, ...] = ()
    """Scores against the ground truth, where known."""
    confusion: Confusion | None = None
    num_novel_curves: tuple[Chart, ...] = ()
    """Curves of the criteria by which the number of novel classes was estimated."""
    curves: tuple[Chart, ...] = ()
    """Training curves."""
