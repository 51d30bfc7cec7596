"""A page as values, which can be stored: headings, each with the blocks below it."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np
from jaxtyping import Int
from msgspec import Struct

SIDE: Final = 96  # Pixels of a thumbnail, unless it is
MEDOID_SIDE: Final = 192  # that of a class, or
PAIR_SIDE: Final = 128  # one of a pair

Number = int | float
Points = Sequence[tuple[Number, Number]]


class Tile(Struct, frozen=True):
    """A thumbnail of an image."""

    path: str  # its name in the data
    uri: str = ""  # its pixels, as a `data:` URI; without any, it is not shown
    score: float = 0.0  # confidence of the classifier in its class
    note: str = ""  # what is written below it
    number: int = -1  # its row in the data, by which the map knows it; -1 where there is no map
    side: int = SIDE


class ClassView(Struct, frozen=True):
    """A known or novel class, with the unlabeled images assigned to it."""

    name: str
    size: int  # number of images assigned to it
    medoid: Tile | None = None  # the most central image
    core: tuple[Tile, ...] = ()  # the most typical images, most typical first
    border: tuple[Tile, ...] = ()  # the images with the lowest scores, lowest first
    score: float | None = None  # mean over its images
    seed_agreement: float | None = None  # Jaccard overlap with the matching class of other seeds
    silhouette: float | None = None  # mean over its images
    nearest_known: str = ""  # the most similar known class
    merge: tuple[str, ...] = ()  # classes that may be the same
    truth: str = ""  # a sentence on its true classes, where known
    on_map: str = ""  # its name on the map, if there is one


# ---- blocks: those that have nothing to show leave no trace on the page ----


class Paragraphs(Struct, frozen=True, tag=True):
    """Sentences, a paragraph each."""

    sentences: tuple[str, ...]


class Findings(Struct, frozen=True, tag=True):
    """What to know before using a result, a sentence or two each; they stand out."""

    sentences: tuple[str, ...]


class Listing(Struct, frozen=True, tag=True):
    """Sentences, each with a command or ''."""

    items: tuple[tuple[str, str], ...]
    ordered: bool = False


class Command(Struct, frozen=True, tag=True):
    """A command, and what it does."""

    sentence: str
    command: str


class Table(Struct, frozen=True, tag=True):
    """Results as formatted text."""

    title: str
    columns: tuple[str, ...]  # headings, that of the row names first
    rows: tuple[tuple[str, ...], ...]  # the name and the cells of each row
    note: str = ""  # how to read it


class Facts(Struct, frozen=True, tag=True):
    """Names with their texts, as a table; a folded one shows only its title until it is opened."""

    title: str
    rows: tuple[tuple[str, str], ...]
    folded: bool = True


class Confusion(Struct, frozen=True, tag=True):
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


class Chart(Struct, frozen=True, tag=True):
    """Lines over a common x axis."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]
    """The (x, y) points of each line by name; points that are not finite are left out."""
    note: str = ""  # how to read it
    chosen: Number | None = None  # an x to mark
    interval: tuple[Number, Number] | None = None  # an uncertainty range of x to shade


class Tiles(Struct, frozen=True, tag=True):
    """Images side by side."""

    title: str
    note: str
    tiles: tuple[Tile, ...]


class Pairs(Struct, frozen=True, tag=True):
    """Images two by two, each pair with its similarity and a remark."""

    note: str
    pairs: tuple[tuple[Tile, Tile, str, str], ...]


class Cards(Struct, frozen=True, tag=True):
    """All classes at a glance, each a link to its card; then the cards."""

    kind: Literal["new", "known", "class"]  # known classes are folded
    classes: tuple[ClassView, ...]
    num_images: int  # of which the sizes of classes are shares


Block = (
    Paragraphs | Findings | Listing | Command | Table | Facts | Confusion | Chart | Tiles | Pairs
    | Cards
)  # fmt: skip
Section = tuple[str, tuple[Block, ...]]  # a heading, and what is below it


class Page(Struct, frozen=True):
    """The content of a page, but for the map of its images."""

    kicker: str  # the command that made it
    title: str
    lead: str  # what was done with what, in a paragraph
    sections: tuple[Section, ...]  # the map comes after the first
    tiny: bool = False  # images are so small that they are enlarged without blur
