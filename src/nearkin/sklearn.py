"""Estimators of scikit-learn: a training, an encoder as it is, a discovery of novel classes."""

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float32
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from nearkin.classifier.classifier import read_classifier
from nearkin.commands.arguments import EncoderLike, name_of
from nearkin.commands.discover import discover
from nearkin.commands.predict import classified
from nearkin.commands.train import train
from nearkin.data.arrays import ImageList, are_paths
from nearkin.data.images import Images
from nearkin.data.labels import Row, class_of, composed
from nearkin.data.opening import open_images
from nearkin.distributed import available_cpus, choose_device, torch_defaults
from nearkin.encoders.encoder import Encoder, load
from nearkin.encoders.inference import inference
from nearkin.errors import DataError
from nearkin.evaluation.embeddings import encode_images
from nearkin.method import Method
from nearkin.run.reporter import Silent
from nearkin.schema import Auto, Value
from nearkin.tables import read_csv
from nearkin.types import UNLABELED

SETTINGS: Final[Mapping[str, Any]] = {"val": 0.0, "report": False}
"""Of runs within estimators, unless their own `settings` say otherwise."""


class _ImagesError(DataError, ValueError):
    """A `DataError` as scikit-learn's users expect it."""


@contextmanager
def _estimating() -> Iterator[None]:
    """Compute as a command does; images that cannot be used are a `ValueError`."""
    try:
        with torch_defaults():
            yield
    except DataError as error:
        raise _ImagesError(str(error)) from error


class _ImageEncoder(
    ClassNamePrefixFeaturesOutMixin,  # type: ignore[misc]  # scikit-learn has no types
    TransformerMixin,  # type: ignore[misc]
    BaseEstimator,  # type: ignore[misc]
):
    """A transformer from images to the features of `encoder_`, which `fit` sets."""

    encoder_: Encoder
    device: str

    @_estimating()
    def transform(self, X: Any) -> Float32[np.ndarray, "n features"]:
        """Return the features of images, a unit vector for each.

        Raises:
            ValueError: If these are no images, or a file cannot be read.
        """
        check_is_fitted(self)
        images = _opened(self, X, fitting=False)
        by = inference(self.encoder_, choose_device(self.device))
        embeddings = encode_images(by, images, workers=available_cpus())
        _refuse(X, embeddings.bad)
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


@contextmanager
def _arguments(estimator: Any) -> Iterator[dict[str, Any]]:
    """The arguments of a run of either kind, whose folder is removed unless `output` names one."""
    with tempfile.TemporaryDirectory() as folder:
        yield {
            "epochs": estimator.epochs,
            "device": estimator.device,
            "output": estimator.output or Path(folder) / "run",
            "seed": int(check_random_state(estimator.random_state).randint(2**31 - 1)),
        }


@dataclass(repr=False, eq=False)
class SelfSupervisedEncoder(_ImageEncoder):
    """Trains an encoder on images without labels, and turns images into its features.

    Images are an array of shape (n, height, width) or (n, height, width, channels) with one
    channel or three; flattened, an array of shape (n, height * width * channels); or a list of
    paths of image files. Numbers of type uint8 are taken as they are. Others are scaled, so that
    the smallest and the largest one of the training images become black and white; if these were
    uint8, others have to be whole numbers from 0 to 255.

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

    method: str | type[Method[Any]] = "simclr"
    _: KW_ONLY
    backbone: str | nn.Module = "auto"
    image_shape: Sequence[int] | None = None
    epochs: int | Auto = "auto"
    batch_size: int | Auto = "auto"
    options: Mapping[str, Value] | None = None
    settings: Mapping[str, Any] | None = None
    output: str | Path | None = None
    device: str = "auto"
    random_state: int | np.random.RandomState | None = None

    @_estimating()
    def fit(self, X: Any, y: Any = None) -> "SelfSupervisedEncoder":
        """Train an encoder; labels are ignored.

        Raises:
            ValueError: If these are no images.
            NearkinError: If they cannot be trained on, in one line.
        """
        del y
        data = checked_images(self, X, fitting=True)
        own = self.backbone if isinstance(self.backbone, nn.Module) else None
        with _arguments(self) as arguments:
            run = train(
                data,
                method=self.method,
                backbone=self.backbone,
                batch_size=self.batch_size,
                options=self.options,
                **arguments,
                **{**SETTINGS, **(self.settings or {})},
            )
            self.encoder_ = load(run.path, backbone=own, trust_remote_code=True)  # its own run
        return self


@dataclass(repr=False, eq=False)
class PretrainedEncoder(_ImageEncoder):
    """Turns images into the features of an encoder as it is.

    For images see `SelfSupervisedEncoder`.

    Args:
        encoder: What `nearkin.load` takes or returns: a name, a run, or an encoder.
        image_shape: Of flattened images: (height, width) or (height, width, channels).
        device: Where to compute.

    Attributes:
        encoder_: The encoder, a torch module.
        range_: The smallest and the largest number of the images that it was fitted to; None if
            they were uint8, or paths.
        n_features_in_: Numbers of an image; 1 for paths.
    """

    encoder: EncoderLike = "dinov2-small"
    _: KW_ONLY
    image_shape: Sequence[int] | None = None
    device: str = "auto"

    @_estimating()
    def fit(self, X: Any, y: Any = None) -> "PretrainedEncoder":
        """Load the encoder, and take the range of the numbers of images; nothing is learned.

        Raises:
            ValueError: If these are no images that it takes, a file cannot be read, or there is
                no such encoder.
        """
        del y
        images = _opened(self, X, fitting=True)
        encoder = load(name_of(self.encoder))
        encoder.preprocessing.applied(images)
        self.encoder_ = encoder
        return self


@dataclass(repr=False, eq=False)
class NovelClassDiscovery(BaseEstimator):  # type: ignore[misc]
    """Finds novel classes among images of which some have a label, as `nearkin.discover` does.

    As in `sklearn.semi_supervised`, images without a label have the label -1. For images see
    `SelfSupervisedEncoder`.

    Args:
        num_novel_classes: How many there are; `auto` estimates it.
        encoder: What `nearkin.load` takes or returns; `auto` chooses one, or trains it.
        mode: Whether unlabeled images may be of known classes (gcd), or not (ncd).
        image_shape: Of flattened images: (height, width) or (height, width, channels).
        epochs: Epochs over the unlabeled images.
        settings: Further arguments of `nearkin.discover`. Unless they say otherwise, all images
            are learned from (`val` is 0), and no report is written.
        output: The run folder to keep; none if None.
        device: Where to compute.
        random_state: Seed, generator, or None for another seed each time.

    Attributes:
        classes_: The labels of known classes as given, in order, then the novel classes: numbers
            above the known ones if these are numbers, else new-1, new-2, ...
        labels_: The class of each image that was fitted: its own, or the one that was found.
        encoder_: The encoder, a torch module.
        classifier_: What sorts its features into classes.
        range_: The smallest and the largest number of the images; None if uint8, or paths.
        n_features_in_: Numbers of an image; 1 for paths.
    """

    num_novel_classes: int | Auto = "auto"
    _: KW_ONLY
    encoder: EncoderLike = "auto"
    mode: Literal["gcd", "ncd"] = "gcd"
    image_shape: Sequence[int] | None = None
    epochs: int | Auto = "auto"
    settings: Mapping[str, Any] | None = None
    output: str | Path | None = None
    device: str = "auto"
    random_state: int | np.random.RandomState | None = None

    @_estimating()
    def fit(self, X: Any, y: Any) -> "NovelClassDiscovery":
        """Find novel classes among the images whose label is -1.

        Raises:
            ValueError: If these are no images, all or none of them have a label, or two labels
                would be one class.
            NearkinError: If nothing can be found among them, in one line.
        """
        images, y = checked_images(self, X, fitting=True), column_or_1d(y)
        check_consistent_length(X, y)
        labels = sorted({*y.tolist()} - {UNLABELED})
        if not labels or UNLABELED not in y.tolist():
            raise ValueError("y has to hold classes, and -1 for images without a label")
        known = _class_names(labels)
        name_of = dict(zip(labels, known, strict=True)) | {UNLABELED: ""}
        names = [name_of[label] for label in y.tolist()]
        data = replace(images, labels=names) if isinstance(images, ImageList) else (images, names)
        _refuse(X, open_images(images).reasons)
        with _arguments(self) as arguments:
            run = discover(
                data,
                known=known,
                classes=self.num_novel_classes,
                mode=self.mode,
                encoder=self.encoder,
                **arguments,
                **{**SETTINGS, **(self.settings or {})},
            )
            self.classifier_ = read_classifier(run.folder.classifier)
            self.encoder_ = self.classifier_.encoder(load(run, trust_remote_code=True))
            bad = read_csv(run.folder.bad_files) if run.folder.bad_files.exists() else ()
            _refuse(X, {row["path"]: row["reason"] for row in bad})
            found = {int(row["path"]): row["cluster"] for row in run.assignments.rows}
        classes = self.classifier_.classes
        self.classes_ = _with_novel(labels, classes[len(labels) :])
        # Not those of `predict`, which judges new images: these may be known to be of novel ones.
        numbers = [classes.index(found.get(row, name)) for row, name in enumerate(names)]
        self.labels_ = self.classes_[numbers]
        return self

    @_estimating()
    def predict(self, X: Any) -> Any:
        """Return the most probable class of each image, known or novel.

        Raises:
            ValueError: If these are no images, or a file cannot be read.
        """
        check_is_fitted(self)
        images, device = checked_images(self, X, fitting=False), choose_device(self.device)
        found = classified(
            self.classifier_, self.encoder_, images, device, available_cpus(), Silent()
        )
        _refuse(X, found.bad)
        return self.classes_[found.assignments.cluster]


def _class_names(labels: Sequence[Any]) -> list[str]:
    """Return these labels as a run reads them: 0.0 is the class 0, and "a " is the class a."""
    read, _ = class_of({str(row): Row.of(label) for row, label in enumerate(labels)})
    names = [composed(name) for name in read.values()]
    times = Counter(names)
    for label, name in zip(labels, names, strict=True):
        if not name or times[name] > 1:
            meaning = f"is read as {name!r}, like another one" if name else "is no class"
            raise ValueError(f"y has the label {label!r}, which {meaning}; give another label")
    return names


def _with_novel(labels: Sequence[Any], novel: Sequence[str]) -> Any:
    """Return known classes by their labels, then novel ones: numbers above them, or names."""
    known = np.array(labels)
    if known.dtype.kind in "biuf":
        return np.array([*known, *(known.max() + 1 + np.arange(len(novel)))])
    return np.array([*labels, *novel])


def checked_images(estimator: Any, X: Any, *, fitting: bool) -> Any:
    """Return images as `nearkin.train` takes them; `fit` sets `n_features_in_` and `range_`."""
    if are_paths(X):
        if fitting:
            estimator.n_features_in_, estimator.range_ = 1, None
        return ImageList(tuple(X))
    is_flat = getattr(X, "ndim", 0) <= 2
    shape = estimator.image_shape if is_flat else X.shape[1:]
    flat = X if is_flat else X.reshape(len(X), -1)
    flat = validate_data(estimator, flat, reset=fitting, ensure_min_samples=2 if fitting else 1)
    if shape is None:
        raise ValueError(
            f"X has rows of {flat.shape[1]} numbers; give image_shape, which is (height, "
            "width) or (height, width, channels)"
        )
    if fitting:
        is_bytes = flat.dtype == np.uint8
        estimator.range_ = None if is_bytes else (float(flat.min()), float(flat.max()))
    pixels = _scaled(flat, estimator.range_).reshape(len(flat), *shape)
    return pixels if pixels.ndim == 4 else pixels[..., None]


def _scaled(pixels: Any, limits: tuple[float, float] | None) -> Any:
    """Return numbers as uint8, or from 0 to 1 by the range of the training images."""
    if pixels.dtype == np.uint8:
        return pixels
    if limits is None:
        with np.errstate(invalid="ignore"):  # of numbers that are refused
            whole = pixels.astype(np.uint8)
        if not np.array_equal(whole, pixels):
            raise ValueError(
                f"X is {pixels.dtype} from {pixels.min():g} to {pixels.max():g}, and the images "
                "of fit were uint8; give uint8, or whole numbers from 0 to 255"
            )
        return whole
    low, high = limits
    return np.clip((pixels.astype(np.float32) - low) / ((high - low) or 1.0), 0, 1)


def _opened(estimator: Any, X: Any, *, fitting: bool) -> Images:
    """Return images whose headers are read, checked as by `checked_images`."""
    images = open_images(checked_images(estimator, X, fitting=fitting))
    _refuse(X, images.reasons)
    return images


def _refuse(X: Any, bad: Mapping[str, str]) -> None:
    for name, reason in bad.items():
        raise ValueError(f"cannot read {list(X)[int(name)]}: {reason}; leave it out")
