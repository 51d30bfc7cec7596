"""What the server of a run's page answers: images, search, likeness, edits of a discovery."""

import secrets
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from PIL import Image, ImageDraw
from torch import Tensor

from nearkin.data.batches import center_crops
from nearkin.data.channels import preview
from nearkin.data.decode import BadImage, decode
from nearkin.data.images import SMALL_SIDE, Images, Region, read
from nearkin.data.labels import class_names as given_classes
from nearkin.distributed import choose_device
from nearkin.encoders.encoder import Encoder, load
from nearkin.encoders.inference import encode_pixels
from nearkin.encoders.likeness import likeness_of
from nearkin.errors import CheckpointError, DataError, OutputError, UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.layout import coordinates, landmark_rows, place
from nearkin.evaluation.table import read_embeddings
from nearkin.metrics.neighbors import nearest
from nearkin.report.image_map import ONE_FILE, data_uri, encoded, sheets_in_order
from nearkin.report.page import html
from nearkin.report.page.map import details, script
from nearkin.report.pages import served_page
from nearkin.run import edits
from nearkin.run.copies import copy_to, file_names
from nearkin.run.folder import RunFolder

TOP: Final = 24  # images that a search returns
LARGE: Final = 1600  # the longest side of an image at full size
MAX_DECODERS: Final = 4  # images decoded at once: each may take hundreds of megabytes

Json = Mapping[str, Any]  # plain values


class RunSite:
    """The content of a run's page and the actions it offers; thread-safe.

    `of_table` makes of the run's encoder that of the features in its table, which are searched.
    """

    def __init__(
        self,
        folder: RunFolder,
        images: Images,
        one_file: int = ONE_FILE,
        *,
        of_table: Callable[[Encoder], Encoder] = lambda encoder: encoder,
        trust_remote_code: bool = False,
    ) -> None:
        self.id = secrets.token_hex(8)
        self._folder = folder
        self._of_table = of_table
        self._trust = trust_remote_code
        self._images = images
        self._one_file = one_file
        self._page, self._image_map = served_page(folder, images, one_file, site=self.id)
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
                made = served_page(self._folder, self._images, self._one_file, site=self.id)
                (self._page, self._image_map), self._is_edited = made, False
            return self._page

    def finish(self) -> None:
        """Wait for the change that is under way, and let no other begin."""
        self._lock.acquire()

    def image(self, number: int) -> bytes | None:
        """Return an image of screen size, upright, as WebP; None if it is unreadable."""
        return self._drawn(number, lambda: _screen_sized(self._images.read(number)))

    def whole(self, number: int) -> bytes | None:
        """Return the image that a region is cut from, with a frame around it, as `image` does."""
        return self._drawn(number, lambda: _framed(self._images.source.region(number)))

    def _drawn(self, number: int, draw: Callable[[], Image.Image]) -> bytes | None:
        if number >= len(self._images):
            return None
        with self._decoders:
            try:
                image = draw()
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
            pixels = torch.from_numpy(self._searching.preprocessing.pixels(file))
        except BadImage as error:
            raise DataError(f"the image cannot be read ({error.reason}); give another") from error
        batch = pixels.permute(2, 0, 1)[None]
        return encode_pixels(self._searching.backbone, [batch], self._device).cpu()

    def likeness(self, number: int, other: int) -> Json:
        """Return two images as the encoder sees them, below the heat map of their likeness.

        Also the least and the greatest value of the two maps; see `nearkin.likeness`.
        """
        self._rows([number, other])
        with self._lock:
            view = self._encoder.preprocessing
            pixels, bad = center_crops(view.applied(self._images), [number, other], view)
            if bad:
                row, reason = next(iter(bad.items()))
                raise DataError(f"image {row} cannot be read ({reason}); choose another")
            inputs = view.to_input(torch.from_numpy(pixels).permute(0, 3, 1, 2))
            maps = likeness_of(self._encoder, inputs).numpy()
        low, high = float(maps.min()), float(maps.max())
        heat = np.interp(maps, (low, high), (0, 1)).astype(np.float32)
        drawn = [_heated(preview(one), own) for one, own in zip(pixels, heat, strict=True)]
        return {"images": [data_uri(image) for image in drawn], "low": low, "high": high}

    # Loaded by the first search or comparison: most visits of a page need none of it.

    @cached_property
    def _encoder(self) -> Encoder:
        return load(self._folder.path, trust_remote_code=self._trust).to(self._device)

    @cached_property
    def _searching(self) -> Encoder:
        stored, encoder = self._embeddings, self._of_table(self._encoder).to(self._device)
        fits = stored.vectors.shape[1] == encoder.num_features
        if not fits or stored.encoder not in ("", encoder.digest):
            raise CheckpointError(
                f"{self._folder.embeddings} is of another encoder than {self._folder.encoder}; "
                "train again"
            )
        return encoder

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
        return edits.classes(self._folder, self._images.names)

    def name(self, clusters: list[str], name: str) -> Json:
        """Name clusters; those of one name are one class. Then `classes`."""
        with self._lock:
            edits.name_classes(self._folder, clusters, name)
            self._is_edited = True
            return self.classes()

    def label(self, numbers: list[int], name: str) -> Json:
        """Label images in to_label.csv; '' removes their labels. Then all labels."""
        paths = {self._images.names[row] for row in self._rows(numbers).tolist()}
        with self._lock:
            edits.label_images(self._folder, paths, name)
            return {"labels": edits.labels(self._folder, self._images.names)}

    def split(self, numbers: list[int], name: str) -> Json:
        """Make images a class of their own. Then `classes`."""
        paths = {self._images.names[row] for row in self._rows(numbers).tolist()}
        with self._lock:
            edits.split_off(self._folder, paths, name)
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
        """The class of each image: as it was labeled here, predicted, or labeled before; or ''."""
        predicted = edits.class_names(self._folder) | edits.written_labels(self._folder)
        own = zip(self._images.names, given_classes(self._images), strict=True)
        return [predicted.get(name, label) for name, label in own]


def _heated(
    pixels: UInt8[np.ndarray, "side side 3"], heat: Float32[np.ndarray, "places places"]
) -> Image.Image:
    """An image in gray below the colors of heat from 0 to 1, interpolated between the places."""
    from matplotlib import colormaps

    whole = Image.fromarray(heat).resize(pixels.shape[:2], Image.Resampling.BILINEAR)
    # Its lightness rises evenly, for any kind of color blindness.
    colors = Image.fromarray(colormaps["inferno"](np.asarray(whole), bytes=True)[..., :3])
    return Image.blend(Image.fromarray(pixels).convert("L").convert("RGB"), colors, 0.5)


def _framed(region: Region | None) -> Image.Image:
    """The image that a region is cut from, of screen size, with a frame around the region."""
    if region is None:
        raise BadImage("no region")
    image = _screen_sized(read(region.source, region.row))
    size = np.tile(image.size, 2)
    corners, width = np.rint(region.corners * size), max(1, round(max(image.size) / 200))
    for color, out in (("black", 2 * width), ("white", width)):  # seen on any image
        outside = (corners + np.array([-out, -out, out - 1, out - 1])).clip(0, size - 1)
        ImageDraw.Draw(image).rectangle(outside.tolist(), outline=color, width=width)
    return image


def _screen_sized(file: bytes | np.ndarray) -> Image.Image:
    if isinstance(file, bytes):
        image = decode(file, min_side=LARGE)
    else:
        image = Image.fromarray(preview(file))
    image.thumbnail((LARGE, LARGE))
    return image
