"""`SelfSupervisedEncoder`: a training as a transformer of scikit-learn, for pipelines."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from nearkin.commands.train import train
from nearkin.data.opening import open_images
from nearkin.distributed import available_cpus, choose_device
from nearkin.encoders.encoder import load
from nearkin.evaluation.embeddings import encode_images
from nearkin.method import Method
from nearkin.schema import Auto, Value


class SelfSupervisedEncoder(
    ClassNamePrefixFeaturesOutMixin,  # type: ignore[misc]  # scikit-learn has no types
    TransformerMixin,  # type: ignore[misc]
    BaseEstimator,  # type: ignore[misc]
):
    """Trains an encoder on images without labels, and turns images into its features.

    Images are an array of shape (n, height, width) or (n, height, width, channels) with one
    channel or three; flattened, an array of shape (n, height * width * channels); or a list of
    paths of image files. Numbers of type uint8 are taken as they are. Others are scaled, so that
    the smallest and the largest one of the training images become black and white.

    Args:
        method: What `nearkin.train` takes: a name, a reference, or a class.
        backbone: A name, or a network from images to features.
        image_shape: Of flattened images: (height, width) or (height, width, channels). One of
            the numbers may be -1: what is left.
        epochs: Number of epochs.
        batch_size: Images per step.
        options: Options of the method, such as {"temperature": 0.2}.
        settings: Further arguments of `nearkin.train`. Unless they say otherwise, all images are
            trained on (`val` is 0), and no page is written.
        output: The run folder to keep; none if None.
        device: Where to compute.
        random_state: Seed, generator, or None for another seed each time.

    Attributes:
        encoder_: The trained encoder, a torch module.
        range_: The smallest and the largest number of the training images; None if they were
            uint8, or paths.
        n_features_in_: Numbers of an image; 1 for paths.
    """

    def __init__(
        self,
        method: str | type[Method[Any]] = "simclr",
        *,
        backbone: str | nn.Module = "auto",
        image_shape: Sequence[int] | None = None,
        epochs: int | Auto = "auto",
        batch_size: int | Auto = "auto",
        options: Mapping[str, Value] | None = None,
        settings: Mapping[str, Any] | None = None,
        output: str | Path | None = None,
        device: str = "auto",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.method = method
        self.backbone = backbone
        self.image_shape = image_shape
        self.epochs = epochs
        self.batch_size = batch_size
        self.options = options
        self.settings = settings
        self.output = output
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> "SelfSupervisedEncoder":
        """Train an encoder; labels are ignored.

        Raises:
            ValueError: If these are no images.
            NearkinError: If they cannot be trained on, in one line.
        """
        del y
        data = self._images(X, fitting=True)
        own = self.backbone if isinstance(self.backbone, nn.Module) else None
        with tempfile.TemporaryDirectory() as folder:
            run = train(
                data,
                method=self.method,
                backbone=self.backbone,
                epochs=self.epochs,
                batch_size=self.batch_size,
                options=self.options,
                device=self.device,
                output=self.output or Path(folder) / "run",
                seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
                **{"val": 0.0, "report": False, **(self.settings or {})},
            )
            self.encoder_ = load(run.path, backbone=own, trust_remote_code=True)  # its own run
        return self

    def transform(self, X: Any) -> Float32[np.ndarray, "n features"]:
        """Return the features of images, a unit vector for each.

        Raises:
            ValueError: If these are no images, or a file cannot be read.
        """
        check_is_fitted(self)
        images = open_images(self._images(X, fitting=False))
        embeddings = encode_images(
            self.encoder_, images, device=choose_device(self.device), workers=available_cpus()
        )
        bad = {bad.name: bad.reason for bad in images.bad} | {**embeddings.bad}
        for name, reason in bad.items():
            raise ValueError(f"cannot read {list(X)[int(name)]}: {reason}; leave it out")
        return embeddings.normalized().vectors

    @property
    def _n_features_out(self) -> int:
        """Of `get_feature_names_out`."""
        return int(self.encoder_.num_features)

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn may expect: images, or paths, and features of type float32."""
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = tags.input_tags.string = True
        tags.transformer_tags.preserves_dtype = []
        return tags

    def _images(self, X: Any, *, fitting: bool) -> Any:
        """Return checked images as `nearkin.train` takes them."""
        if are_paths(X):
            if fitting:
                self.n_features_in_, self.range_ = 1, None
            return PathList(tuple(X))
        shape = X.shape[1:] if getattr(X, "ndim", 0) > 2 else self.image_shape
        flat = X.reshape(len(X), -1) if getattr(X, "ndim", 0) > 2 else X
        flat = validate_data(self, flat, reset=fitting, ensure_min_samples=2 if fitting else 1)
        if shape is None:
            raise ValueError(
                f"X has rows of {flat.shape[1]} numbers; give image_shape, which is (height, "
                "width) or (height, width, channels)"
            )
        if fitting:
            is_bytes = flat.dtype == np.uint8
            self.range_ = None if is_bytes else (float(flat.min()), float(flat.max()))
        return self._scaled(flat).reshape(len(flat), *shape)

    def _scaled(self, pixels: Any) -> Any:
        """Return numbers as uint8, or from 0 to 1 by the range of the training images."""
        if self.range_ is None:
            return pixels.astype(np.uint8)
        low, high = self.range_
        return np.clip((pixels.astype(np.float32) - low) / ((high - low) or 1.0), 0, 1)


def are_paths(X: Any) -> bool:
    """Return whether this is a list, an array or a series of texts or paths."""
    is_list = isinstance(X, list | tuple) or getattr(X, "ndim", 0) == 1
    return is_list and len(X) > 0 and all(isinstance(each, str | Path) for each in X)


@dataclass(frozen=True)
class PathList:
    """An `ImageSource` of files, in their order; one file may be there twice."""

    paths: tuple[str | Path, ...]

    @property
    def names(self) -> Sequence[str]:
        """Numbers, which sort as the files are given."""
        width = len(str(len(self.paths)))
        return [f"{row:0{width}}" for row in range(len(self.paths))]

    def read(self, name: str, /) -> bytes:
        """Return the bytes of a file."""
        return Path(self.paths[int(name)]).read_bytes()
