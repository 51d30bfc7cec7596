"""The pages of trainings, discoveries and comparisons: their content as values, and as HTML."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Int
from markupsafe import Markup

from nearkin.pace import count
from nearkin.report.page.html import (
    BLOCKS,
    SHADES,
    Chart,
    decimal,
    document,
    line_chart,
)
from nearkin.report.page.map import ImageMap, map_section, script

Section = tuple[str, Markup]  # a heading and its content


@dataclass(frozen=True, slots=True)
class Tile:
    """A thumbnail of an image."""

    path: str  # its name in the data
    uri: str  # its pixels, as a `data:` URI
    score: float  # confidence of the classifier in its class
    note: str = ""  # what is written below it
    number: int = -1  # its row in the data, by which the map knows it; -1 where there is no map


@dataclass(frozen=True, slots=True)
class ClassView:
    """A known or novel class, with the unlabeled images assigned to it."""

    name: str
    size: int  # number of images assigned to it
    medoid: Tile | None = None  # the most central image; None if it cannot be displayed
    core: tuple[Tile, ...] = ()  # the most typical images, most typical first
    border: tuple[Tile, ...] = ()  # the images with the lowest scores, lowest first
    score: float | None = None  # mean over its images
    seed_agreement: float | None = None  # Jaccard overlap with the matching class of other seeds
    silhouette: float | None = None  # mean over its images
    nearest_known: str = ""  # the most similar known class
    merge: tuple[str, ...] = ()  # classes that may be the same
    truth: str = ""  # a sentence on its true classes, where known
    on_map: str = ""  # its name on the map, if there is one


@dataclass(frozen=True, slots=True)
class Table:
    """Results as formatted text."""

    title: str
    columns: tuple[str, ...]  # headings, that of the row names first
    rows: tuple[tuple[str, ...], ...]  # the name and the cells of each row
    note: str = ""  # how to read it


@dataclass(frozen=True, slots=True)
class Confusion:
    """Number of images of each true class in each predicted class, without zeros.

    Of a thousand classes, nearly all of a million pairs have no image.
    """

    true: tuple[str, ...]
    predicted: tuple[str, ...]
    num_matched: int  # so many of the first true and predicted classes are the same, in order
    cells: tuple[tuple[int, int, int], ...]  # true class, predicted class, images; in order

    @classmethod
    def of(
        cls,
        true: Sequence[str],
        predicted: Sequence[str],
        num_matched: int,
        pairs: Int[np.ndarray, "images 2"],
    ) -> "Confusion":
        """Count the true and predicted classes of images, by their numbers."""
        found, counts = np.unique(pairs, axis=0, return_counts=True)
        cells = np.concatenate([found, counts[:, None]], axis=1).tolist()
        return cls(tuple(true), tuple(predicted), num_matched, tuple(map(tuple, cells)))

    @property
    def sizes(self) -> list[int]:
        """Images of each true class."""
        sizes = [0] * len(self.true)
        for true, _, images in self.cells:
            sizes[true] += images
        return sizes

    def dense(self) -> Int[np.ndarray, "true predicted"]:
        """Return the whole matrix."""
        counts = np.zeros((len(self.true), len(self.predicted)), np.int64)
        if self.cells:
            true, predicted, images = np.transpose(self.cells)
            counts[true, predicted] = images
        return counts

    def largest(self, number: int) -> list[tuple[int, int, int]]:
        """Return the cells of most images whose class is not the predicted one."""
        wrong = [cell for cell in self.cells if cell[0] != cell[1] or cell[0] >= self.num_matched]
        return sorted(wrong, key=lambda cell: -cell[2])[:number]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What the pages of all kinds of runs tell of a run."""

    data: str  # name of the data
    protocol: tuple[str, ...] = ()  # what was trained on what and scored on what, a sentence each
    configuration: Mapping[str, Any] | None = None
    versions: Mapping[str, str] | None = None
    command: str = ""  # repeats the run
    steps: tuple[tuple[str, str], ...] = ()  # what to do next: a sentence, and its command or ''
    tiny: bool = False  # images are so small that pages enlarge them without blur


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """Content of the page of an encoder, of a training or frozen."""

    run: RunInfo
    lead: str  # what was trained on what, in a paragraph
    health: str  # whether embeddings collapsed, in a sentence
    verdict: str = ""  # whether training helped the encoder it started from, in a sentence
    frozen: bool = False  # whether the encoder was not trained here
    origin: tuple[tuple[str, str], ...] = ()
    """What the encoder is, or that which it was trained from, and whose weights these are."""
    findings: tuple[str, ...] = ()  # what to know before using the encoder, a sentence or two each
    results: Table | None = None  # metrics of the encoder beside its baselines
    meanings: tuple[tuple[str, str], ...] = ()  # each measure with its definition
    confusion: Confusion | None = None  # kNN predictions of held-out images
    curves: tuple[Chart, ...] = ()


@dataclass(frozen=True, slots=True)
class DiscoveryReport:
    """Content of the report of a discovery."""

    run: RunInfo
    mode: Literal["gcd", "ncd"]
    """Whether an unlabeled image may be of a known class (gcd) or not (ncd)."""
    known: tuple[str, ...]  # names of the known classes
    num_labeled: int
    num_unlabeled: int
    novel: tuple[ClassView, ...]  # novel classes in display order
    num_novel_source: str
    """How the number of novel classes was set, as a participle: `given`, `estimated by ...`."""
    score_meaning: str  # what a score means, in a sentence
    assigned: tuple[ClassView, ...] = ()
    """Known classes with the unlabeled images assigned to them."""
    unsure: tuple[Tile, ...] = ()  # images whose labels would teach most, most useful first
    interval: tuple[int, int] | None = None
    """Range of the estimates of the number of novel classes."""
    findings: tuple[str, ...] = ()  # what to know before using the classes, a sentence or two each
    results: tuple[Table, ...] = ()  # scores against the ground truth, where known
    confusion: Confusion | None = None
    num_novel_curves: tuple[Chart, ...] = ()
    """Curves of the criteria by which the number of novel classes was estimated."""
    alternatives: Table | None = None  # other numbers of novel classes, beside that of the result
    curves: tuple[Chart, ...] = ()  # training curves


@dataclass(frozen=True, slots=True)
class ClassificationReport:
    """Content of the page of a classification."""

    run: RunInfo
    num_classes: int
    lead: str  # what was learned from how many labels, in a paragraph
    score_meaning: str  # what a score means, in a sentence
    findings: tuple[str, ...] = ()  # what to know before using it, a sentence or two each
    results: tuple[Table, ...] = ()  # metrics beside baselines, and each class
    confusion: Confusion | None = None  # of test images
    classes: tuple[ClassView, ...] = ()  # with the images that were not learned from
    unsure: tuple[Tile, ...] = ()  # the least certain of these images, least certain first
    doubts: tuple[Tile, ...] = ()  # training images whose labels are to be checked
    reliability: tuple[Chart, ...] = ()  # whether scores are as high as they should be


Report = TrainingReport | DiscoveryReport | ClassificationReport
MAX_OPEN_CLASSES: Final = 20  # a confusion matrix of more classes is folded
MAX_MATRIX: Final = 60  # of more classes, a table has the largest confusions
NUM_CONFUSIONS: Final = 100  # in it
MAX_LEAD_CLASSES: Final = 12  # known classes named in the first paragraph
RELIABILITY: Final = (
    "A reliable class is large, stable across seeds, well separated (silhouette), and its least "
    "confident images still look like its most typical ones."
)
DEFINITIONS: Final = {
    "Images": "assigned to it, and their share of all that are assigned",
    "Score": "mean confidence of the classifier over its images",
    "Seed agreement": "overlap with the matching class of other seeds (Jaccard), from 0 to 1",
    "Silhouette": "separation from other classes: 1 well separated, 0 touching, below 0 mixed",
    "Nearest known class": "by cosine similarity of the class means",
    "Merge candidates": "compare the images before you merge them",
    "Ground truth": "by the labels that were hidden from training",
}
"""The rows of a class's table, each with its definition."""


def report_page(
    report: Report,
    image_map: ImageMap | None = None,
    *,
    served: bool = False,
    files: str = "",
) -> str:
    """Return the report of a run, without a map if there is none; `files` as of `map_section`."""
    run = report.run
    if isinstance(report, TrainingReport):
        verb, title, lead = "train", f"Encoder trained on {run.data}", report.lead
        if report.frozen:
            verb, title = "embed", f"{run.data}, embedded by a frozen encoder"
        first, *sections = _training_sections(report)
    elif isinstance(report, ClassificationReport):
        verb, lead = "classify", report.lead
        title = f"{count(report.num_classes, 'class')} in {run.data}"
        first, *sections = _classification_sections(report)
    else:
        num_novel = count(len(report.novel), "novel class") if report.novel else "No novel class"
        verb, title, lead = "discover", f"{num_novel} in {run.data}", _lead(report)
        first, *sections = _discovery_sections(report)
    return document(
        title=title,
        kicker=f"nearkin {verb}",
        lead=lead,
        sections=[
            first,
            ("Map", map_section(image_map, files) if image_map else Markup()),
            *sections,
            ("Protocol", BLOCKS.listing("ul", [(sentence, "") for sentence in run.protocol])),
            ("Settings", BLOCKS.settings(run)),
            ("Next steps", BLOCKS.listing("ol", run.steps)),
        ],
        script=script() if image_map else "",
        tiny=run.tiny,
        served=served,
        files=bool(image_map and image_map.per_file),
    )


def _training_sections(report: TrainingReport) -> list[Section]:
    meanings = BLOCKS.folded_table("What the metrics mean", (), report.meanings)
    measures = BLOCKS.results(report.results) + meanings if report.results else Markup()
    summary = [sentence for sentence in (report.verdict, report.health) if sentence]
    origin = BLOCKS.table("Encoder", (), report.origin, "facts") if report.origin else Markup()
    return [
        ("Summary", BLOCKS.paragraphs(summary) + BLOCKS.findings(report.findings)),
        ("Encoder" if report.frozen else "Origin", origin),
        ("Evaluation", measures),
        ("Confusion", _confusion(report.confusion)),
        ("Training curves", line_charts(report.curves)),
    ]


def _classification_sections(report: ClassificationReport) -> list[Section]:
    unsure = BLOCKS.tiles(
        "Least certain images",
        "Not learned from. Their labels would help most; below each, the predicted class.",
        report.unsure,
    )
    doubts = BLOCKS.tiles(
        "Labels to check",
        "Training images that fits without them put into another class: a wrong label, or a "
        "hard image. Below each: its label, and the class that is predicted.",
        report.doubts,
    )
    cards = _cards(report.classes, "class", sum(view.size for view in report.classes))
    return [
        ("Summary", BLOCKS.findings(report.findings)),
        ("Evaluation", Markup().join(map(BLOCKS.results, report.results))),
        ("Confusion", _confusion(report.confusion)),
        ("Images to look at", unsure + doubts),
        (
            "Confidence",
            BLOCKS.paragraphs([report.score_meaning]) + line_charts(report.reliability),
        ),
        ("Classes", cards if report.classes else Markup()),
    ]


def _discovery_sections(report: DiscoveryReport) -> list[Section]:
    none = BLOCKS.paragraphs(["None: every image was assigned to a known class."])
    novel = _cards(report.novel, "new", report.num_unlabeled) if report.novel else none
    assigned = Markup()
    if report.assigned:
        assigned = BLOCKS.paragraphs(["Unlabeled images that were assigned to a known class."])
        assigned += _cards(report.assigned, "known", report.num_unlabeled)
    unsure = BLOCKS.tiles(
        "Label these first",
        "The most typical image of each novel class; then the least certain one of each class, "
        "and the next of each: their labels would teach the next round most. Below each, the "
        "class that it was put in.",
        report.unsure,
    )
    scores = Markup().join(map(BLOCKS.results, report.results)) + _confusion(report.confusion)
    alternatives = BLOCKS.results(report.alternatives) if report.alternatives else Markup()
    return [
        ("Findings", BLOCKS.findings(report.findings)),
        ("Novel classes", novel),
        ("Known classes", assigned),
        ("Images to look at", unsure),
        ("Confidence", BLOCKS.paragraphs([report.score_meaning, RELIABILITY])),
        ("Scores against the ground truth", scores),
        ("Number of classes", line_charts(report.num_novel_curves) + alternatives),
        ("Training curves", line_charts(report.curves)),
    ]


def line_charts(charts: Iterable[Chart]) -> Markup:
    """Return charts, one below the other."""
    return Markup().join(map(line_chart, charts))


def _confusion(confusion: Confusion | None) -> Markup:
    if confusion is None:
        return Markup()
    num_classes = max(len(confusion.true), len(confusion.predicted))
    if num_classes > MAX_MATRIX:
        return Markup(BLOCKS.results(_largest_confusions(confusion)))
    rows, shades = [], []
    for name, total, counts in zip(
        confusion.true, confusion.sizes, confusion.dense().tolist(), strict=True
    ):
        rows.append((name, *(f"{n:,}" if n else "" for n in counts)))
        # Rounded up, so that every count above 0 has a shade.
        shades.append([math.ceil(n / max(1, total) * SHADES) for n in counts])
    folded = num_classes > MAX_OPEN_CLASSES
    return Markup(BLOCKS.confusion(("", *confusion.predicted), rows, shades, folded))


def _largest_confusions(confusion: Confusion) -> Table:
    sizes = confusion.sizes
    rows = [
        (confusion.true[true], confusion.predicted[predicted], f"{n:,}", f"{n / sizes[true]:.0%}")
        for true, predicted, n in confusion.largest(NUM_CONFUSIONS)
    ]
    columns = ("True class", "Predicted class", "Images", "Share of the true class")
    note = f"Of {len(confusion.true):,} true and {len(confusion.predicted):,} predicted classes."
    return Table("Largest confusions", columns, tuple(rows), note)


def _lead(report: DiscoveryReport) -> str:
    num_novel = count(len(report.novel), "novel class")
    novel, known = (sum(view.size for view in views) for views in (report.novel, report.assigned))
    more = len(report.known) - MAX_LEAD_CLASSES
    names = ", ".join(report.known[:MAX_LEAD_CLASSES]) + (f" and {more} more" if more > 0 else "")
    data = (
        f"{count(report.num_labeled, 'image')} of {count(len(report.known), 'known class')} "
        f"({names}) came with a label; {report.num_unlabeled:,} came without."
    )
    if report.mode == "ncd":
        result = f"All unlabeled images were assumed novel and clustered into {num_novel}."
    else:
        result = (
            f"Of these, {novel:,} were clustered into {num_novel}, and {known:,} were assigned "
            "to known classes."
        )
    source = f"The number of novel classes was {report.num_novel_source}"
    if report.interval is not None:
        low, high = report.interval
        source += f"; the interval is {low} to {high}"
    return f"{data} {result} {source}."


def _cards(classes: Sequence[ClassView], prefix: str, num_unlabeled: int) -> Markup:
    """All classes at a glance, each a link to its card; then the cards."""
    anchors = {view.name: f"{prefix}-{n}" for n, view in enumerate(classes, start=1)}

    def measures(view: ClassView) -> list[tuple[str, str, str]]:
        cells = {
            "Images": f"{view.size:,} ({view.size / num_unlabeled:.0%})" if num_unlabeled else "0",
            "Score": decimal(view.score),
            "Seed agreement": decimal(view.seed_agreement),
            "Silhouette": decimal(view.silhouette),
            "Nearest known class": view.nearest_known if view.nearest_known != view.name else "",
            "Merge candidates": BLOCKS.links(view.merge, anchors),
            "Ground truth": view.truth,
        }
        return [(name, value, DEFINITIONS[name]) for name, value in cells.items() if value]

    return Markup(BLOCKS.cards(classes, anchors, measures, fold=prefix == "known"))
