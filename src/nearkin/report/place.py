"""What a new picture is most similar to, and where it lies on the map of a run."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from nearkin.commands.embed import encode_pixels
from nearkin.data.decode import center
from nearkin.data.header import BadImage, header
from nearkin.data.images import MAX_PIXELS, Images
from nearkin.distributed import choose_device
from nearkin.errors import CheckpointError, DataError
from nearkin.evaluation.encoder import Encoder, load
from nearkin.measures.neighbors import nearest
from nearkin.report.embedded import Embedded, embedded
from nearkin.report.mapping import MOST, balanced, places
from nearkin.report.page.layout import place
from nearkin.run.folder import RunFolder

TOP: Final = 24


@dataclass(frozen=True)
class Similar:
    """The pictures that a new one is most similar to."""

    numbers: list[int]
    """The most similar first."""
    similarity: list[float]
    """Their cosines."""
    place: list[float]
    """Where the new one lies on the map."""


class Search:
    """Looks among all pictures of a run. What that takes is loaded when it is first asked.

    Args:
        folder: The run.
        images: Its pictures.
    """

    def __init__(self, folder: RunFolder, images: Images) -> None:
        self._folder = folder
        self._images = images
        self._device = choose_device("auto")

    def similar(self, encoded: bytes) -> Similar:
        """The pictures most similar to that in a file.

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
            numbers=found.number[rows[0].numpy()].tolist(),
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
            raise DataError(
                f"the picture cannot be read ({error.reason}); give another"
            ) from error
        return encode_pixels(self._encoder, [pixels[None]], self._device).cpu()

    @cached_property
    def _encoder(self) -> Encoder:
        return load(self._folder.path).to(self._device)

    @cached_property
    def _embedded(self) -> Embedded:
        return embedded(self._folder, self._images)

    @cached_property
    def _map(self) -> tuple[Float32[np.ndarray, "shown dim"], Float[np.ndarray, "shown 2"]]:
        """What is on the map, and where: read once, since its table has to be hashed for it."""
        rows = balanced(self._embedded.labels, MOST)
        vectors = self._embedded.vectors[rows]
        return vectors, places(self._folder, vectors, rows)
