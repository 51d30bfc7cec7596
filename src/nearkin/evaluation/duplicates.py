"""How well a threshold on the cosine separates edited copies from other images of the data."""

import io
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from PIL import Image, ImageEnhance

from nearkin.data.decode import as_image
from nearkin.data.duplicates import Groups
from nearkin.data.images import Images, Rows, Source
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.inference import inference
from nearkin.errors import DataError, UsageError
from nearkin.evaluation.embeddings import encode_images
from nearkin.evaluation.table import EmbeddingTable
from nearkin.metrics.intervals import wilson
from nearkin.objectives import unit
from nearkin.pace import ProgressCallback, ignore_progress, under

SAMPLE: Final = 1_000  # Images of which a copy is made: half choose the threshold, half test it
OTHERS: Final = 10  # Nearest images of each among which one is looked for that is no copy
LEAST: Final = 10  # Images with a copy and another image, to estimate anything
LARGEST_SIDE: Final = 1_024  # Larger images are reduced to this shorter side before


def _reencoded(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=int(rng.integers(40, 91)))
    return Image.open(file).convert("RGB")


def _resized(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    factor = rng.uniform(0.5, 0.9)
    width, height = (max(1, round(edge * factor)) for edge in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _cropped(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    left, top, right, bottom = rng.uniform(0, 0.05, 4)
    width, height = image.size
    box = (left * width, top * height, (1 - right) * width, (1 - bottom) * height)
    return image.resize(image.size, Image.Resampling.BICUBIC, box=box)


def _brightened(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(float(rng.uniform(0.8, 1.2)))


def _all(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return _reencoded(_brightened(_resized(_cropped(image, rng), rng), rng), rng)


EDITS: Final[Mapping[str, Callable[[Image.Image, np.random.Generator], Image.Image]]] = {
    "re-encoded as JPEG, quality 40 to 90": _reencoded,
    "resized to .5 to .9 of the sides": _resized,
    "cropped by up to 5 % at each edge": _cropped,
    "brightness times .8 to 1.2": _brightened,
    "all four": _all,
}


@dataclass(frozen=True, eq=False)
class EditedSource(Source):
    """Reads images, edited: a pure function of name, edit and seed."""

    images: Images
    edits: Shaped[np.ndarray, " images"]  # One of `EDITS` for each
    seed: int

    def read(self, row: int, limit: int | None = None) -> np.ndarray:
        """An edited image's pixels; `BadImage` where it cannot be read."""
        del limit
        image = as_image(self.images.stored(row), min_side=LARGEST_SIDE)
        assert isinstance(image, Image.Image)  # only RGB of 8 bits is edited
        name = self.images.names[row].encode(errors="surrogatepass")
        rng = np.random.default_rng((self.seed, zlib.crc32(name)))
        return np.asarray(EDITS[self.edits[row]](image, rng))

    def only(self, rows: Rows) -> "EditedSource":
        """The source of these images alone."""
        return EditedSource(self.images.subset(rows), self.edits[rows], self.seed)

    def warm(self, rows: Iterable[int]) -> None:
        """Fetch the images that lie in a store, at once."""
        self.images.source.warm(rows)


@dataclass(frozen=True)
class Precision:
    """What a threshold does on images that did not choose it, with 95 % intervals."""

    threshold: float
    precision: tuple[float, float, float]
    """Value and interval: of all copies and other images above the threshold, the share that are
    copies, with one copy and one other image, its most similar one, of each."""
    recall: tuple[float, float, float]  # The share of the copies that are above
    false: tuple[float, float, float]  # The share of the other images that are above
    by_edit: Mapping[str, float]  # Recall of each kind of copy
    num: int  # Images

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values as text."""
        names = "precision", "recall", "other images above"
        shares = zip(names, (self.precision, self.recall, self.false), strict=True)
        rows = [(name, f"{v:.3f} [{low:.3f}, {high:.3f}]") for name, (v, low, high) in shares]
        return rows + [(f"recall, {name}", f"{of:.3f}") for name, of in self.by_edit.items()]


@dataclass(frozen=True, eq=False)
class EditTest:
    """Sampled images, each with an edited copy and with the most similar image that is no copy."""

    edit: Shaped[np.ndarray, " n"]  # Of `EDITS`
    copy: Float[np.ndarray, " n"]  # The cosine of the image and its copy
    other: Float[np.ndarray, " n"]  # The cosine of the image and the other one
    pairs: Int[np.ndarray, "n 2"]  # The rows of the image and the other one

    def below(self, threshold: float) -> dict[tuple[int, int], float]:
        """The cosine of each image and the other one, by their rows in order, if it is lower."""
        pairs = map(tuple, np.sort(self.pairs, axis=1).tolist())
        cosines = dict(zip(pairs, self.other.tolist(), strict=True))
        return {pair: cosine for pair, cosine in cosines.items() if cosine < threshold}

    def chosen(self, precision: float) -> Precision:
        """Choose the lowest threshold with this precision on half of the images.

        Returns:
            What it does on the other half.

        Raises:
            UsageError: If there is none.
        """
        choosing = np.arange(len(self.copy)) // len(EDITS) % 2 == 0
        copy, other = (np.sort(x[choosing]) for x in (self.copy, self.other))
        true = len(copy) - np.searchsorted(copy, copy)
        false = len(other) - np.searchsorted(other, copy)
        reached = np.flatnonzero(true >= precision * (true + false))
        if not len(reached):
            best = float((true / (true + false)).max(initial=0))
            raise UsageError(
                f"no threshold has --precision {precision:g}: the highest is {best:.3f}, as other "
                "images are as similar as copies; give a lower one, a --threshold, or a better "
                "encoder"
            )
        return self.at(float(copy[reached[0]]), np.flatnonzero(~choosing))

    def at(
        self, threshold: float, rows: Int[np.ndarray, " rows"] | slice = slice(None)
    ) -> Precision:
        """Measure a threshold on these images, by default on all."""
        copy, other = self.copy[rows] >= threshold, self.other[rows] >= threshold
        edit, num = self.edit[rows], len(copy)
        true, false = int(copy.sum()), int(other.sum())
        return Precision(
            threshold,
            precision=_share(true, true + false),
            recall=_share(true, num),
            false=_share(false, num),
            by_edit={name: float(copy[edit == name].mean()) for name in EDITS if name in edit},
            num=num,
        )


def _share(part: int, whole: int) -> tuple[float, float, float]:
    value = part / whole if whole else 1.0
    return (value, *wilson(value, float(whole)))


def edit_test(
    table: EmbeddingTable,
    encoder: Encoder,
    images: Images,
    image_rows: Int[np.ndarray, " rows"],
    groups: Groups,
    *,
    seed: int,
    device: torch.device,
    workers: int,
    on_progress: ProgressCallback = ignore_progress,
) -> EditTest:
    """Edit copies of sampled images, and find the most similar other image of each in the table.

    Other images are those of other groups, the duplicates that contents and pixels have found. A
    duplicate that these miss counts as another image: precision is rather too low. `image_rows`
    are the rows of the table among the images.

    Raises:
        DataError: If fewer than `LEAST` images have another image.
    """
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(len(table), min(SAMPLE, len(table)), replace=False))
    order = np.argsort(image_rows[rows])  # as images are encoded
    vectors, at = table.gather(rows)[order], image_rows[rows][order]
    similarity, near = (x.numpy() for x in table.nearest(vectors, OTHERS + 1))
    different = groups[image_rows[near]] != groups[at][:, None]
    first, lines = different.argmax(axis=1), np.arange(len(at))
    other, other_row = similarity[lines, first], image_rows[near][lines, first]
    drawn = images.subset(at)
    edits = np.resize([*EDITS], len(drawn))
    edited = replace(drawn, source=EditedSource(drawn, edits, seed))
    by, progress = inference(encoder, device), under("copies", on_progress)
    embeddings = encode_images(by, edited, workers=workers, on_progress=progress)
    copy = (unit(embeddings.tensor) * vectors[embeddings.rows]).sum(dim=1).numpy()
    tested = different.any(axis=1)[embeddings.rows]
    if tested.sum() < LEAST:
        raise DataError(
            f"{tested.sum()} images have another image to be told from, too few to estimate a "
            f"precision; give a --threshold, or {LEAST} images or more"
        )
    kept = embeddings.rows[tested]
    pairs = np.stack([at, other_row], axis=1)[kept]
    return EditTest(edit=edits[kept], copy=copy[tested], other=other[kept], pairs=pairs)
