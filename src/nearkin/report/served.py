"""What a new image is most similar to, and where it lies on the map of a run."""

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float32
from PIL import Image
from torch import Tensor

from nearkin.data.copies import copy_to, file_names
from nearkin.data.decode import BadImage, center, decode, header
from nearkin.data.images import MAX_PIXELS, SMALL_SIDE, Images
from nearkin.distributed import choose_device
from nearkin.errors import CheckpointError, DataError, OutputError, UsageError
from nearkin.evaluation.embeddings import Embeddings, encode_pixels
from nearkin.evaluation.encoder import Encoder, load
from nearkin.evaluation.table import read_embeddings
from nearkin.measures.neighbors import nearest
from nearkin.report import edits
from nearkin.report.mapping import MOST, balanced, places
from nearkin.report.page import page
from nearkin.report.page.layout import place
from nearkin.report.page.map import script
from nearkin.report.page.site import Json
from nearkin.report.write import shown_of
from nearkin.run.folder import RunFolder

TOP: Final = 24


@dataclass(frozen=True)
class Similar:
    """The images that a new one is most similar to."""

    numbers: list[int]
    """The most similar first."""
    similarity: list[float]
    """Their cosines."""
    place: list[float]
    """Where the new one lies on the map."""


class Search:
    """Looks among all images of a run. What that takes is loaded when it is first asked.

    Args:
        folder: The run.
        images: Its images.
    """

    def __init__(self, folder: RunFolder, images: Images) -> None:
        self._folder = folder
        self._images = images
        self._device = choose_device("auto")

    def similar(self, encoded: bytes) -> Similar:
        """The images most similar to that in a file.

        Raises:
            DataError: If it cannot be read.
            CheckpointError: If the encoder or the embeddings are damaged or do not match.
        """
        features, found = self._features(encoded), self._embedded
        if found.vectors.shape[1] != features.shape[1]:
            raise CheckpointError(
                f"{self._folder.embeddings} is of another encoder than {self._folder.encoder}; "
                "train again"
            )
        similarity, rows = nearest(torch.from_numpy(found.vectors), features, TOP)
        there = place(features.numpy(), *self._map)
        return Similar(
            numbers=found.rows[rows[0].numpy()].tolist(),
            similarity=similarity[0].tolist(),
            place=there[0].tolist(),
        )

    def _features(self, encoded: bytes) -> Float[Tensor, "1 dim"]:
        size = self._encoder.image_size
        try:
            described = header(encoded)
            if described.width * described.height > MAX_PIXELS:
                raise BadImage("too-large")
            pixels = torch.from_numpy(center(encoded, size)).permute(2, 0, 1)
        except BadImage as error:
            raise DataError(f"the image cannot be read ({error.reason}); give another") from error
        return encode_pixels(self._encoder, [pixels[None]], self._device).cpu()

    @cached_property
    def _encoder(self) -> Encoder:
        return load(self._folder.path).to(self._device)

    @cached_property
    def _embedded(self) -> Embeddings:
        return read_embeddings(self._folder.embeddings, self._images)

    @cached_property
    def _map(self) -> tuple[Float32[np.ndarray, "shown dim"], Float[np.ndarray, "shown 2"]]:
        """What is on the map, and where: read once, since its table has to be hashed for it."""
        rows = balanced(self._embedded.class_names, MOST)
        vectors = self._embedded.vectors[rows]
        return vectors, places(self._folder, vectors, rows)


LARGE: Final = 1600
"""The longest side of an image that is shown by itself."""
SMALL: Final = 96
DECODERS: Final = 4
"""Images that are decoded at once: each may take hundreds of megabytes."""


class RunSite:
    """What is served of a run.

    Args:
        folder: The run.
        images: Its images.
    """

    def __init__(self, folder: RunFolder, images: Images) -> None:
        self._folder = folder
        self._images = images
        self._page = shown_of(folder, images).page(served=True)
        self._policy = page.policy(script(), served=True)
        self._search = Search(folder, images)
        self._at_work = threading.Lock()
        """Held while anything is changed or searched."""
        self._decoders = threading.Semaphore(DECODERS)

    def page(self) -> str:
        """As it was when this was made; what has been named since, it asks for."""
        return self._page

    def policy(self) -> str:
        """Its own."""
        return self._policy

    def image(self, number: int) -> bytes | None:
        """Upright, and no larger than a screen."""
        return self._webp(number, _shrunk)

    def thumbnail(self, number: int) -> bytes | None:
        """The central square."""
        return self._webp(number, lambda held: Image.fromarray(center(held, SMALL)))

    def _webp(
        self, number: int, small: Callable[[bytes | np.ndarray], Image.Image]
    ) -> bytes | None:
        if number >= len(self._images):
            return None
        file = io.BytesIO()
        with self._decoders:
            try:
                shown = small(self._images.read(number))
            except BadImage:
                return None
            shown.save(file, "webp", quality=85, lossless=max(shown.size) <= SMALL_SIDE)
        return file.getvalue()

    def search(self, encoded: bytes) -> Json:
        """The most similar images, and where the image lies on the map."""
        with self._at_work:
            found = self._search.similar(encoded)
            labels = self._labels()
        pairs = zip(found.numbers, found.similarity, strict=True)
        neighbors = [
            {
                "number": number,
                "name": self._images.names[number],
                "label": labels[number],
                "similarity": similarity,
            }
            for number, similarity in pairs
        ]
        return {"place": found.place, "neighbors": neighbors}

    def classes(self) -> Json:
        """As they are in the run folder now."""
        return edits.classes(self._folder, self._images.names)

    def name(self, cluster: str, name: str) -> Json:
        """Saved at once."""
        return self.merge([cluster], name)

    def merge(self, clusters: list[str], name: str) -> Json:
        """Saved at once."""
        with self._at_work:
            edits.name_classes(self._folder, clusters, name)
            return self.classes()

    def split(self, numbers: list[int], name: str) -> Json:
        """Saved at once."""
        paths = {self._images.names[row] for row in self._rows(numbers).tolist()}
        with self._at_work:
            edits.split_off(self._folder, paths, name)
            return self.classes()

    def export(self, folder: str, numbers: list[int] | None) -> Json:
        """Below the run folder, which is never searched for images."""
        if file_names([folder]) != [folder]:
            raise UsageError(
                f"{folder!r} is no folder name; use letters, digits, '.', '_' and '-'"
            )
        path = self._folder.exports / folder
        if self._folder.exports.is_symlink() or path.is_symlink() or path.exists():
            raise OutputError(f"{path} is there already; choose another name")
        rows = self._rows(numbers)
        with self._at_work:
            labels = self._labels()
            classes = [labels[row] or "unlabeled" for row in rows.tolist()]
            written = copy_to(path, self._images, rows, classes, data=())
        return {"folder": str(path.resolve()), "images": written}

    def _rows(self, numbers: list[int] | None) -> np.ndarray:
        """Of all images, or of these."""
        count = len(self._images)
        if numbers is None:
            return np.arange(count)
        if not all(0 <= number < count for number in numbers):
            raise UsageError(f"the images have numbers from 0 to {count - 1}; reload the page")
        return np.unique(np.array(numbers, np.int64))

    def _labels(self) -> list[str]:
        """The class that each image came with, or what it was sorted into; '' if neither."""
        sorted_into = edits.called(self._folder)
        names, classes = self._images.names, ("", *self._images.classes)
        own = [classes[label + 1] for label in self._images.labels.tolist()]
        return [sorted_into.get(name, label) for name, label in zip(names, own, strict=True)]


def _shrunk(held: bytes | np.ndarray) -> Image.Image:
    shown = decode(held, min_side=LARGE) if isinstance(held, bytes) else Image.fromarray(held)
    shown.thumbnail((LARGE, LARGE))
    return shown
