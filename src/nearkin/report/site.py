"""What the server of a run's page answers: images, search, and edits of discovered classes."""

import threading
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float32
from PIL import Image
from torch import Tensor

from nearkin.data.channels import preview
from nearkin.data.decode import BadImage, center, decode
from nearkin.data.images import SMALL_SIDE, Images
from nearkin.distributed import choose_device
from nearkin.encoders.encoder import Encoder, load
from nearkin.encoders.inference import encode_pixels
from nearkin.errors import CheckpointError, DataError, OutputError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.vectors import read_embeddings
from nearkin.files import whole, write_whole, writing
from nearkin.metrics.neighbors import nearest
from nearkin.report.image_map import (
    ONE_FILE,
    coordinates,
    display_name,
    encoded,
    landmark_rows,
    place,
    sheets_in_order,
)
from nearkin.report.page import html
from nearkin.report.page.map import details, script
from nearkin.report.pages import served_page
from nearkin.run.copies import copy_to, file_names
from nearkin.run.folder import RunFolder
from nearkin.run.named import (
    CLUSTER_COLUMNS,
    LABEL_COLUMNS,
    check_names,
    read_edited,
    written_labels,
)
from nearkin.tables import write_csv
from nearkin.text import printable

TOP: Final = 24  # images that a search returns
LARGE: Final = 1600  # the longest side of an image at full size
SMALL: Final = 96
MAX_DECODERS: Final = 4  # images decoded at once: each may take hundreds of megabytes
MAX_NAME: Final = 100  # characters of a class name
ASSIGNMENT_COLUMNS: Final = ("path", "cluster", "flag")
"""Columns that are required of assignments.csv."""

Json = Mapping[str, Any]  # plain values


class RunSite:
    """The content of a run's page and the actions it offers; thread-safe."""

    def __init__(
        self,
        folder: RunFolder,
        images: Images,
        one_file: int = ONE_FILE,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        self._folder = folder
        self._trust = trust_remote_code
        self._images = images
        self._one_file = one_file
        self._page, self._image_map = served_page(folder, images, one_file)
        self._is_edited = False  # since the page was made
        in_files = bool(self._image_map and self._image_map.per_file)
        self.policy = html.policy(script(), served=True, files=in_files)
        self._device = choose_device("auto")
        self._lock = threading.Lock()  # held during changes and searches
        self._decoders = threading.Semaphore(MAX_DECODERS)

    @property
    def page(self) -> str:
        """The page, with classes as they are named now; its map asks for them itself."""
        with self._lock:
            if self._is_edited:
                made = served_page(self._folder, self._images, self._one_file)
                (self._page, self._image_map), self._is_edited = made, False
            return self._page

    def finish(self) -> None:
        """Wait for the change that is under way, and let no other begin."""
        self._lock.acquire()

    def image(self, number: int, *, large: bool) -> bytes | None:
        """Return an image as WebP, None if it is unreadable.

        A large one is upright and of screen size; a small one is its central square.
        """
        if number >= len(self._images):
            return None
        with self._decoders:
            try:
                content = self._images.read(number)
                if not isinstance(content, bytes):
                    content = preview(content)
                image = (
                    _screen_sized(content) if large else Image.fromarray(center(content, SMALL))
                )
            except BadImage:
                return None
            lossless = max(image.size) <= SMALL_SIDE
            return encoded(image, "webp", quality=85, lossless=lossless)

    def details(self, number: int) -> bytes | None:
        """Return the names and neighbors of some thousand images, as a script."""
        map_ = self._image_map
        if not (map_ and map_.per_file) or number * map_.per_file >= len(map_.names):
            return None
        return details(map_, number).encode()

    def sheet(self, number: int) -> bytes | None:
        """Return a sheet of the map's thumbnails, made now."""
        map_ = self._image_map
        if map_ is None or number * map_.per_sheet >= len(map_.names):
            return None
        rows = map_.number[number * map_.per_sheet :][: map_.per_sheet]
        with self._decoders:
            return next(sheets_in_order(self._images, rows, map_.side))

    def search(self, file: bytes) -> Json:
        """Return the nearest neighbors of an image file, and its coordinates on the map."""
        with self._lock:
            query, stored = self._encode(file), self._embeddings
            if stored.vectors.shape[1] != query.shape[1]:
                raise CheckpointError(
                    f"{self._folder.embeddings} is of another encoder than "
                    f"{self._folder.encoder}; train again"
                )
            similarity, rows = nearest(torch.from_numpy(stored.vectors), query, TOP)
            xy = place(query.numpy(), *self._map)
            labels = self._labels()
        numbers = stored.rows[rows[0].numpy()].tolist()
        names = self._images.names
        neighbors = [
            {"number": n, "name": names[n], "label": labels[n], "similarity": cosine}
            for n, cosine in zip(numbers, similarity[0].tolist(), strict=True)
        ]
        return {"xy": xy[0].tolist(), "neighbors": neighbors}

    def _encode(self, file: bytes) -> Float[Tensor, "1 dim"]:
        try:
            pixels = torch.from_numpy(self._encoder.preprocessing.pixels(file))
        except BadImage as error:
            raise DataError(f"the image cannot be read ({error.reason}); give another") from error
        batch = pixels.permute(2, 0, 1)[None]
        return encode_pixels(self._encoder.backbone, [batch], self._device).cpu()

    # Loaded by the first search: most visits of a page need none of it.

    @cached_property
    def _encoder(self) -> Encoder:
        return load(self._folder.path, trust_remote_code=self._trust).to(self._device)

    @cached_property
    def _embeddings(self) -> Embeddings:
        return read_embeddings(self._folder.embeddings, self._images)

    @cached_property
    def _map(self) -> tuple[Float32[np.ndarray, "n dim"], Float[np.ndarray, "n 2"]]:
        """The features and the coordinates of the landmarks of the map."""
        rows = landmark_rows(self._embeddings.class_names)
        vectors = self._embeddings.vectors[rows]
        return vectors, coordinates(self._folder, vectors, rows)

    def classes(self) -> Json:
        """Return the classes as they are in the run folder now."""
        return classes(self._folder, self._images.names)

    def name(self, clusters: list[str], name: str) -> Json:
        """Name clusters; those of one name are one class. Then `classes`."""
        with self._lock:
            name_classes(self._folder, clusters, name)
            self._is_edited = True
            return self.classes()

    def label(self, numbers: list[int], name: str) -> Json:
        """Label images for the next round; '' removes their labels. Then all labels."""
        paths = {self._images.names[row] for row in self._rows(numbers).tolist()}
        with self._lock:
            label_images(self._folder, paths, name)
            return {"labels": _numbered(written_labels(self._folder), self._images.names)}

    def split(self, numbers: list[int], name: str) -> Json:
        """Make images a class of their own. Then `classes`."""
        paths = {self._images.names[row] for row in self._rows(numbers).tolist()}
        with self._lock:
            split_off(self._folder, paths, name)
            self._is_edited = True
            return self.classes()

    def export(self, folder: str, numbers: list[int] | None) -> Json:
        """Copy images, or all of them, by class into a new folder in the run's exports."""
        if file_names([folder]) != [folder]:
            raise UsageError(
                f"{folder!r} is no folder name; begin with a letter or a digit, and use no "
                "characters that file systems refuse, such as / and :"
            )
        path = self._folder.exports / folder
        if self._folder.exports.is_symlink() or path.is_symlink() or path.exists():
            raise OutputError(f"{path} exists already; choose another name")
        rows = self._rows(numbers)
        with self._lock:
            labels = self._labels()
            names = [labels[row] or "unlabeled" for row in rows.tolist()]
            copied = copy_to(path, self._images, rows, names, data=())
        return {"folder": str(path.resolve()), "images": copied}

    def _rows(self, numbers: list[int] | None) -> np.ndarray:
        total = len(self._images)
        if numbers is None:
            return np.arange(total)
        if not all(0 <= number < total for number in numbers):
            raise UsageError(f"images have numbers from 0 to {total - 1}; reload the page")
        return np.unique(np.array(numbers, np.int64))

    def _labels(self) -> list[str]:
        """The predicted class of each image, or else its label, or else ''."""
        predicted = class_names(self._folder)
        names, labels = self._images.names, ("", *self._images.classes)
        own = [labels[label + 1] for label in self._images.labels.tolist()]
        return [predicted.get(name, label) for name, label in zip(names, own, strict=True)]


def _screen_sized(file: bytes | np.ndarray) -> Image.Image:
    image = decode(file, min_side=LARGE) if isinstance(file, bytes) else Image.fromarray(file)
    image.thumbnail((LARGE, LARGE))
    return image


# ---- classes of a discovery ----


def is_discovery(folder: RunFolder) -> bool:
    """Return whether a run has classes to edit."""
    return folder.clusters.exists() and folder.assignments.exists()


def name_classes(folder: RunFolder, clusters: Collection[str], name: str) -> None:
    """Name clusters of clusters.csv; those of one name are one class, '' removes their names."""
    name = _valid(name)
    with _editing(folder):
        rows = read_edited(folder.clusters, CLUSTER_COLUMNS)
        if unknown := set(clusters) - {row["cluster"] for row in rows}:
            raise UsageError(f"{folder.clusters} has no class {min(unknown)!r}; reload the page")
        for row in rows:
            if row["cluster"] in clusters:
                row["name"] = name
        check_names(folder.clusters, rows)
        _replace(folder.clusters, folder.original_clusters, rows)


def split_off(folder: RunFolder, paths: Collection[str], name: str) -> str:
    """Make unlabeled images a new class, whose cluster (such as `new-1`) is returned.

    They are its core, since the user selected them by hand.
    """
    name = _valid(name)
    with _editing(folder):
        clusters = read_edited(folder.clusters, CLUSTER_COLUMNS)
        assignments = read_edited(folder.assignments, ASSIGNMENT_COLUMNS)
        moved = [row for row in assignments if row["path"] in paths]
        if not moved or len(moved) < len(paths):
            others = set(paths) - {row["path"] for row in moved}
            which = f"{min(others)!r} came with a label" if others else "no images are selected"
            raise UsageError(f"{which}; select unlabeled images")
        taken = {row["cluster"] for row in clusters}
        new = next(free for number in count(1) if (free := f"new-{number}") not in taken)
        for row in moved:
            row |= {"cluster": new, "flag": "core"}
        sizes = Counter(row["cluster"] for row in assignments)
        clusters.append({"cluster": new, "name": name, "kind": "novel"})
        check_names(folder.clusters, clusters)
        for row in clusters:
            row["size"] = str(sizes[row["cluster"]])
        # In this order, an interruption leaves an empty class, never an image without one.
        _replace(folder.clusters, folder.original_clusters, clusters)
        _replace(folder.assignments, folder.original_assignments, assignments)
    return new


def label_images(folder: RunFolder, paths: Collection[str], label: str) -> None:
    """Label unlabeled images in to_label.csv, for the next round; '' removes their labels."""
    label = _valid(label)
    with _editing(folder):
        assigned = _clusters(folder)
        if not paths or (others := set(paths) - assigned.keys()):
            which = f"{min(others)!r} came with a label" if paths else "no images are selected"
            raise UsageError(f"{which}; select unlabeled images")
        # Discoveries of earlier releases have no such table yet.
        there = folder.to_label.exists()
        rows = read_edited(folder.to_label, LABEL_COLUMNS) if there else []
        listed = {row["path"] for row in rows}
        rows += [{"path": path, "cluster": assigned[path]} for path in sorted(set(paths) - listed)]
        for row in rows:
            if row["path"] in paths:
                row["label"] = label
        _replace(folder.to_label, folder.original_to_label, rows)


def classes(folder: RunFolder, names: Sequence[str]) -> dict[str, Any]:
    """Return the classes of a discovery, the cluster of each image, and labels; or none."""
    if not is_discovery(folder):
        return {"editable": False, "classes": [], "cluster_of": {}, "labels": {}}
    assigned = _clusters(folder)
    sizes = Counter(assigned.values())
    rows = [
        {key: row[key].strip() for key in CLUSTER_COLUMNS} | {"size": sizes[row["cluster"]]}
        for row in read_edited(folder.clusters, CLUSTER_COLUMNS)
    ]
    return {
        "editable": True,
        "classes": rows,
        "cluster_of": _numbered(assigned, names),
        "labels": _numbered(written_labels(folder), names),
    }


def _numbered(by_path: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """What is said of images, by their numbers, which are the keys of JSON."""
    return {str(row): by_path[name] for row, name in enumerate(names) if name in by_path}


def class_names(folder: RunFolder) -> dict[str, str]:
    """Return the class name of every image that a run assigned to a class, by path."""
    if not is_discovery(folder):
        return _clusters(folder) if folder.assignments.exists() else {}
    names = {
        r["cluster"]: display_name(r) for r in read_edited(folder.clusters, ("cluster", "name"))
    }
    return {path: names.get(cluster, cluster) for path, cluster in _clusters(folder).items()}


def _clusters(folder: RunFolder) -> dict[str, str]:
    return {
        row["path"]: row["cluster"] for row in read_edited(folder.assignments, ("path", "cluster"))
    }


def _valid(name: str) -> str:
    name = name.strip()
    if len(name) > MAX_NAME or printable(name) != name or "\n" in name:
        raise UsageError(f"a name is one line of at most {MAX_NAME} characters; choose another")
    return name


@contextmanager
def _editing(folder: RunFolder) -> Iterator[None]:
    if not is_discovery(folder):
        raise UsageError(
            f"{folder.path} is no finished discovery; it has no classes to edit. Those of a "
            "classification are its labels: change these, and classify again"
        )
    with writing(folder.path, "free some space, or allow writing"), folder.locked():
        yield


def _replace(path: Path, original: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write a table with its own columns and any of the user's; keep the first version."""
    there = path.exists()
    marked = not there or path.read_bytes().startswith(BOM_UTF8)  # as the user's program left it
    if there and not original.exists():
        write_whole(original, path.read_bytes())
    columns = list(rows[0])
    with whole(path) as partial:
        cells = ([row.get(name, "") for name in columns] for row in rows)
        write_csv(partial, columns, cells, to_edit=marked)
