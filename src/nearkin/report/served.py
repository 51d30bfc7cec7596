"""What a server shows of a run, and lets its user do with it."""

import io
import threading
from collections.abc import Callable
from typing import Final

import numpy as np
from PIL import Image

from nearkin.data.decode import center
from nearkin.data.header import BadImage
from nearkin.data.images import SMALL_SIDE, Images
from nearkin.data.rgb import decode
from nearkin.discovery.copies import copy_to, file_names
from nearkin.errors import OutputError, UsageError
from nearkin.report import edits
from nearkin.report.page import page
from nearkin.report.page.map import script
from nearkin.report.page.messages import Json
from nearkin.report.place import Search
from nearkin.report.write import shown_of
from nearkin.run.folder import RunFolder

LARGE: Final = 1600
"""The longest side of a picture that is shown by itself."""
SMALL: Final = 96
DECODERS: Final = 4
"""Pictures that are decoded at once: each may take hundreds of megabytes."""


class RunSite:
    """What is served of a run.

    Args:
        folder: The run.
        images: Its pictures.
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

    def picture(self, number: int) -> bytes | None:
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
        """The most similar pictures, and where the picture lies on the map."""
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
        """Below the run folder, which is never searched for pictures."""
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
        return {"folder": str(path.resolve()), "pictures": written}

    def _rows(self, numbers: list[int] | None) -> np.ndarray:
        """Of all pictures, or of these."""
        count = len(self._images)
        if numbers is None:
            return np.arange(count)
        if not all(0 <= number < count for number in numbers):
            raise UsageError(f"the pictures have numbers from 0 to {count - 1}; reload the page")
        return np.unique(np.array(numbers, np.int64))

    def _labels(self) -> list[str]:
        """The class that each picture came with, or what it was sorted into; '' if neither."""
        sorted_into = edits.called(self._folder)
        names, classes = self._images.names, ("", *self._images.classes)
        own = [classes[label + 1] for label in self._images.labels.tolist()]
        return [sorted_into.get(name, label) for name, label in zip(names, own, strict=True)]


def _shrunk(held: bytes | np.ndarray) -> Image.Image:
    shown = decode(held, min_side=LARGE) if isinstance(held, bytes) else Image.fromarray(held)
    shown.thumbnail((LARGE, LARGE))
    return shown
