"""From features to classes: heads, k-means, the classifier as a file, and its calibration."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn

from nearkin.config import DiscoverConfig
from nearkin.data.augmentations import AUGMENTATIONS, views_of
from nearkin.discovery.data import DiscoveryTask, Mode
from nearkin.discovery.features import CachedFeatures, DiscoveryEncoder, ViewSettings
from nearkin.encoders.encoder import Encoder, read_tensors, separate_weights
from nearkin.errors import CheckpointError, DataError, UsageError
from nearkin.files import usable, write_whole
from nearkin.method import Method
from nearkin.metrics.kmeans import compact, constrained_kmeans
from nearkin.networks.branch import Backbone
from nearkin.networks.heads import CosineHead, Heads, MultiHead, trainable_layer
from nearkin.networks.tokens import AttentivePooling
from nearkin.types import UNKNOWN
from nearkin.version import check_format

FORMATS: Final = ("1", "2")
"""Formats that are read; the last is written. 1 had neither kind nor encoder: all were of
discoveries."""
Kind = Literal["discovery", "classification"]


AGAIN: Final[Mapping[Kind, str]] = {
    "discovery": "discover again",
    "classification": "classify again",
}
"""What to do if a classifier is of no use, by its kind."""


@dataclass(frozen=True, eq=False)
class Reference:
    """What the images of each class are like, to tell images that are like none of them."""

    means: Float[np.ndarray, "classes dim"]  # Mean unit feature of each class, of length one
    min_similarity: float
    """The cosine similarity to the nearest mean that 99 % of the images learned from exceed."""

    def unlike(self, features: Float[Tensor, "n dim"]) -> Bool[np.ndarray, " n"]:
        """Whether images are less similar to every class than those 99 %."""
        similarity = torch.nn.functional.normalize(features, dim=1).numpy() @ self.means.T
        return np.asarray(similarity.max(axis=1) < self.min_similarity)

    def check(self, num_classes: int, dim: int) -> None:
        """Raise an error if it is not of so many classes and features."""
        if self.means.shape != (num_classes, dim) or not -1.01 <= self.min_similarity <= 1.01:
            raise ValueError(f"its means are {self.means.shape}, for {num_classes} classes")


def heads_of(method: Method[Any]) -> nn.Module:
    """Return the module that gives a method's logits of all classes."""
    heads: nn.Module = method.get_submodule("heads")
    return heads


def frozen_copy(module: nn.Module) -> nn.Module:
    """Return a copy on the CPU in evaluation mode."""
    return copy.deepcopy(module).cpu().eval()


def apply_layer(layer: nn.Module, features: Float[Tensor, "n features"]) -> Float[Tensor, "n dim"]:
    """Apply a layer to features, which it takes as images of one pixel."""
    output: Tensor = layer(features[..., None, None])
    return output.flatten(1)


@torch.no_grad()
def top_features(
    encoder: DiscoveryEncoder, method: Method[Any], rows: Int64[np.ndarray, " n"] | None = None
) -> Float[Tensor, "n dim"]:
    """Return the features of images, by default of all, that a method's heads take."""
    cached, layer = encoder.features(method, with_views=False)
    center = cached.center if rows is None else cached.center[torch.from_numpy(rows)]
    return apply_layer(frozen_copy(layer), center)


def class_probability(
    heads: nn.Module, features: Float[Tensor, "n f"], num_known: int, disjoint: bool
) -> Float[Tensor, "n classes"]:
    """Return probabilities of all classes; 0 of a known one where novel classes are disjoint."""
    # In float32, one of two confident classes would have probability 0.
    logits: Tensor = heads(features).double()
    novel = torch.arange(logits.shape[1], device=logits.device) >= num_known
    return logits.masked_fill(~novel, -torch.inf).softmax(1) if disjoint else logits.softmax(1)


@dataclass(frozen=True, eq=False)
class Clustering:
    """The classes that one approach finds, for all images."""

    joint: Int64[np.ndarray, " images"]  # Among all classes, known and novel
    novel: Int64[np.ndarray, " images"]
    """Among the novel classes, numbered as in `joint`; `joint` where there is no novel class."""

    def of(self, mode: Mode) -> Int64[np.ndarray, " images"]:
        """Return the classes that a mode puts unlabeled images in."""
        return self.novel if mode == "ncd" else self.joint


def head_clustering(encoder: DiscoveryEncoder, method: Method[Any], num_known: int) -> Clustering:
    """Return the most probable classes by a method's heads."""
    features, heads = top_features(encoder, method), frozen_copy(heads_of(method))
    with torch.inference_mode():
        every = [class_probability(heads, features, num_known, each) for each in (False, True)]
    joint, novel = (probability.argmax(dim=1).numpy() for probability in every)
    return Clustering(joint, novel if every[0].shape[1] > num_known else joint)


def kmeans_clustering(
    features: Float[Tensor, "images dim"], task: DiscoveryTask, seed: int
) -> Clustering:
    """Cluster the images to learn from by k-means; others go to the nearest center.

    `joint` clusters all of them, with labeled images fixed in their class; `novel` clusters the
    unlabeled ones alone, if there are any novel classes.
    """
    from sklearn.metrics import pairwise_distances_argmin

    x = compact(features).astype(np.float64)
    joint = constrained_kmeans(
        x[task.rows], task.label[task.rows], task.num_known + task.num_novel, seed=seed
    )
    nearest = pairwise_distances_argmin(x, joint.centers)
    if not task.num_novel:
        return Clustering(nearest, nearest)
    no_labels = np.full(len(task.unlabeled), UNKNOWN)
    novel = constrained_kmeans(x[task.unlabeled], no_labels, task.num_novel, seed=seed)
    return Clustering(
        nearest,
        task.num_known + pairwise_distances_argmin(x, novel.centers),
    )


MIN_TEMPERATURE: Final = 0.05
MAX_TEMPERATURE: Final = 20.0
BINS: Final = 10
SHRINKAGE: Final = 10.0
"""How strongly few images keep a temperature near 1: a normal prior on its logarithm has this
precision, a standard deviation of .32."""
WEAK_SHRINKAGE: Final = 1.0
"""The same for classes that were found, whose temperature is far from 1 as a rule. A dozen images
that are all right at .6 get .90, where Laplace's rule of succession gives .93."""
CALIBRATION_FOLDS: Final = 10
EPSILON: Final = 1e-12  # Keeps the log-loss of a wrong image with probability 1 finite


@dataclass(frozen=True)
class Calibration:
    """A temperature for log-probabilities, and the calibration error with and without it."""

    temperature: float
    num_images: int  # How many images it was fitted to
    error_before: float  # Expected calibration error of the largest probability, from 0 to 1
    error_after: float  # The same with the temperature, on the same images

    def apply(self, probability: Float[np.ndarray, "n classes"]) -> Float[np.ndarray, "n classes"]:
        """Return `p^(1 / temperature)`, scaled so that rows sum to 1.

        The classes of a row keep their order, and a class with probability 0 keeps it.
        """
        return _rescale(probability, self.temperature)


def fit_calibration(
    probability: Float[np.ndarray, "n classes"], correct: Bool[np.ndarray, " n"]
) -> Calibration:
    """Fit the temperature at which the largest probability best predicts whether it is right.

    It has the least binary log-loss against `correct` from 0.05 to 20, drawn towards 1, though
    less than that of `fit_temperature`, and is 1 where nothing is better. Guo et al. On
    calibration of modern neural networks. ICML 2017, arXiv:1706.04599, section 4.2. They score the
    probability of the true class; here a class that was found has no true counterpart, only a
    right or wrong image.

    >>> certain = np.array([[0.99, 0.01]] * 400)
    >>> fitted = fit_calibration(certain, np.arange(400) % 4 > 0)
    >>> fitted.apply(certain)[0].round(2)
    array([0.75, 0.25])
    """
    if not len(correct):
        raise DataError("no image to calibrate with; hide at least one known class")

    def log_likelihood(temperature: float) -> Float[np.ndarray, "n 2"]:
        largest = _rescale(probability, temperature).max(axis=1)
        return np.asarray(np.log(np.stack([1 - largest, largest], axis=1).clip(min=EPSILON)))

    return _calibration(
        probability, correct, _shrunken(log_likelihood, correct.astype(int), WEAK_SHRINKAGE)
    )


def fit_temperature(
    probability: Float[np.ndarray, "n classes"],
    target: Int[np.ndarray, " n"],
    groups: Int[np.ndarray, " n"],
) -> Calibration:
    """Fit the temperature at which the true classes of held-out images are most probable.

    It has the least log-loss from 0.05 to 20 (Guo et al. 2017, section 4.2) of these images and
    of one more that is spread evenly over the classes, and is drawn towards 1: few images that
    are all right would otherwise ask for certainty. It is 1 unless temperatures that are fitted
    to other groups of images lower the log-loss of those left out by more than its standard error.

    >>> certain = np.array([[0.99, 0.01]] * 200)
    >>> target = np.random.default_rng(0).permutation(np.repeat([0, 1], [150, 50]))
    >>> fit_temperature(certain, target, np.arange(200)).apply(certain)[0].round(2)
    array([0.79, 0.21])
    """
    temperature, target = 1.0, np.asarray(target)
    gain = _gains(probability, target, groups)
    if len(gain) > 1 and gain.mean() > gain.std(ddof=1) / np.sqrt(len(gain)):
        temperature = _shrunken_temperature(probability, target)
    return _calibration(probability, probability.argmax(axis=1) == target, temperature)


def _gains(
    probability: Float[np.ndarray, "n classes"],
    target: Int[np.ndarray, " n"],
    groups: Int[np.ndarray, " n"],
) -> Float[np.ndarray, " groups"]:
    """Return how much less log-loss each group has at a temperature of others."""
    names, member = np.unique(groups, return_inverse=True)
    gain, folds = np.zeros(len(target)), member % CALIBRATION_FOLDS
    for fold in np.unique(folds) if len(names) > 1 else ():
        out = folds == fold
        temperature = _shrunken_temperature(probability[~out], target[~out])
        before, after = (
            _log_likelihood(probability[out], each)[np.arange(out.sum()), target[out]]
            for each in (1.0, temperature)
        )
        gain[out] = after - before
    return np.bincount(member, gain)


def _shrunken_temperature(
    probability: Float[np.ndarray, "n classes"], target: Int[np.ndarray, " n"]
) -> float:
    return _shrunken(partial(_log_likelihood, probability), target, SHRINKAGE)


def _shrunken(
    log_likelihood: Callable[[float], Float[np.ndarray, "n outcomes"]],
    target: Int[np.ndarray, " n"],
    shrinkage: float,
) -> float:
    """Return the best temperature for these outcomes and one more that is spread evenly."""

    def loss(log_temperature: float) -> float:
        likelihood = log_likelihood(float(np.exp(log_temperature)))
        own = likelihood[np.arange(len(target)), target].sum()
        return float(shrinkage / 2 * log_temperature**2 - own - likelihood.mean())

    return _least(loss)


def _log_likelihood(
    probability: Float[np.ndarray, "n classes"], temperature: float
) -> Float[np.ndarray, "n classes"]:
    return np.asarray(np.log(_rescale(probability, temperature).clip(min=EPSILON)))


def _least(loss: Callable[[float], float]) -> float:
    """Return the temperature whose logarithm has the least loss; 1 where none is better."""
    from scipy.optimize import minimize_scalar

    bounds = (np.log(MIN_TEMPERATURE), np.log(MAX_TEMPERATURE))
    best = float(minimize_scalar(loss, bounds=bounds, method="bounded").x)
    return float(np.exp(min((0.0, best), key=loss)))


def _calibration(
    probability: Float[np.ndarray, "n classes"],
    correct: Bool[np.ndarray, " n"],
    temperature: float,
) -> Calibration:
    """Return a temperature with what it does to these images."""
    after = _rescale(probability, temperature).max(axis=1)
    return Calibration(
        temperature=temperature,
        num_images=len(correct),
        error_before=calibration_error(probability.max(axis=1), correct),
        error_after=calibration_error(after, correct),
    )


def calibration_error(score: Float[np.ndarray, " n"], correct: Bool[np.ndarray, " n"]) -> float:
    """Return the expected calibration error, from 0 (best) to 1.

    Over ten bins with the same number of images (Nixon et al. Measuring calibration in deep
    learning. 2019, arXiv:1904.01685), except that equal scores share a bin.

    >>> calibration_error(np.full(4, 0.875), np.array([True, True, True, False]))
    0.125
    """
    edges = np.quantile(score, np.arange(1, BINS) / BINS)
    bins = np.searchsorted(edges, score)
    difference = np.bincount(bins, weights=score - correct)
    return float(np.abs(difference).sum() / len(score))


def _rescale(
    probability: Float[np.ndarray, "n classes"], temperature: float
) -> Float[np.ndarray, "n classes"]:
    power = probability.astype(np.float64) ** (1 / temperature)
    return np.asarray(power / power.sum(axis=1, keepdims=True))


@dataclass(frozen=True, eq=False)
class Predictions:
    """One row per image. The known classes come first, in their order, then the novel ones."""

    paths: tuple[str, ...]  # The images' names
    probability: Float[np.ndarray, "images classes"]
    """Softmax of the classifier; rows sum to 1. A class that an image cannot have, such as a
    known one where all known classes are ruled out, has 0."""
    by_view: Int[np.ndarray, "views images"]
    """The most probable class in each of several augmented views."""
    features: Float[np.ndarray, "images dim"]  # Unit vectors that the heads take
    label: Int[np.ndarray, " images"]  # Known classes, `UNKNOWN` for images without a label
    classes: tuple[str, ...]  # Names of all classes: the known ones, then new-1, new-2, ..
    num_known: int
    learned: Bool[np.ndarray, " images"] | None = None
    """Whether an image was learned from, so that its label may decide; None: all were."""
    unlike: Bool[np.ndarray, " images"] | None = None
    """Whether an image is like no class; None where the classifier has no reference."""

    @property
    def cluster(self) -> Int[np.ndarray, " images"]:
        """The most probable class of each image."""
        return np.asarray(self.probability.argmax(axis=1))


@dataclass(frozen=True, eq=False)
class Classifier:
    """From an encoder's features to classes, of a discovery or of a classification."""

    layer: nn.Module  # On top of the encoder; the identity where the encoder itself is finetuned
    heads: nn.Module  # From the layer's features to logits of all classes, the known ones first
    classes: tuple[str, ...]
    num_known: int
    disjoint: bool  # Whether images without a label are taken to be of no known class
    calibration: Calibration | None
    drawn: ViewSettings  # The views of new images
    kind: Kind = "discovery"
    pooling: AttentivePooling | None = None
    """What pools the encoder's tokens, where the classifier does not take its features."""
    reference: Reference | None = None
    """What the features of images are to be like; None for an earlier discovery."""
    digest: str = ""  # Of the encoder that it was trained with; "" where the file does not say

    @property
    def dim(self) -> int:
        """Dimension of the features it takes."""
        first = next(chain(self.layer.parameters(), self.heads.parameters()))
        return first.shape[1]

    def encoder(self, encoder: Encoder) -> Encoder:
        """Return the encoder of the features it takes, or refuse one that does not fit."""
        self._check_origin(encoder)
        fitting = encoder
        if self.pooling is not None:
            tokens = encoder.tokens
            if tokens.dim == len(self.pooling.mean):
                pooled = Backbone(nn.Sequential(tokens, self.pooling), self.dim)
                fitting = Encoder(pooled, encoder.preprocessing, encoder.details)
        if fitting.num_features != self.dim:
            raise CheckpointError(
                f"classifier.safetensors is of another encoder: it takes {self.dim} features, "
                f"and this one gives {fitting.num_features}; {AGAIN[self.kind]}"
            )
        return fitting

    @property
    def known_means(self) -> Float[np.ndarray, "known dim"] | None:
        """Mean features of the known classes, where the heads take those of the reference."""
        classifies = self.kind == "classification"
        return self.reference.means if classifies and self.reference is not None else None

    def _check_origin(self, encoder: Encoder) -> None:
        if self.digest not in ("", encoder.digest):
            raise CheckpointError(
                "classifier.safetensors is of another encoder: the weights, the architecture or "
                "the preprocessing of this one differ from what it was trained with; bring that "
                f"encoder back, or {AGAIN[self.kind]}"
            )

    def predict(
        self, cached: CachedFeatures, paths: tuple[str, ...], label: Int64[np.ndarray, " images"]
    ) -> Predictions:
        """Classify images by an encoder's features of them and of their views."""
        with torch.inference_mode():
            center = apply_layer(self.layer, cached.center)
            views = (apply_layer(self.layer, view) for view in cached.views)
            by_view = [self._probability(view).argmax(dim=1).numpy() for view in views]
            return Predictions(
                paths=paths,
                probability=self._probability(center).numpy(),
                by_view=np.array(by_view, np.int64).reshape(len(by_view), len(center)),
                features=torch.nn.functional.normalize(center, dim=1).numpy(),
                label=label,
                classes=self.classes,
                num_known=self.num_known,
                unlike=None if self.reference is None else self.reference.unlike(cached.center),
            )

    def _probability(self, features: Tensor) -> Tensor:
        return class_probability(self.heads, features, self.num_known, self.disjoint)

    def write(self, path: Path) -> None:
        """Write the classifier as safetensors, atomically."""
        from safetensors.torch import save

        modules = nn.ModuleDict({"layer": self.layer, "heads": self.heads})
        if self.pooling is not None:
            modules["pooling"] = self.pooling
        tensors = separate_weights(modules)
        if self.reference is not None:
            tensors["reference.means"] = torch.from_numpy(self.reference.means)
        metadata = {
            "format": FORMATS[-1],
            "kind": self.kind,
            "min_similarity": None if self.reference is None else self.reference.min_similarity,
            "classes": self.classes,
            "num_known": self.num_known,
            "disjoint": self.disjoint,
            "temperature": getattr(self.heads, "temperature", None),
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "details": asdict(self.drawn),
            "encoder": self.digest,
        }
        write_whole(path, save(tensors, metadata={"nearkin": json.dumps(metadata)}))


def read_classifier(path: Path) -> Classifier:
    """Return what `Classifier.write` wrote, if its parts fit together."""
    if not path.exists():
        made_by = "`nearkin discover` and `nearkin classify` make it when they are done"
        raise UsageError(f"{path} does not exist; {made_by}")
    with usable(path, "make it again"):
        metadata, tensors = read_tensors(path, "nearkin")
        check_format(metadata["format"], FORMATS)
        means = tensors.pop("reference.means", None)
        heads, layer = _heads(tensors, metadata["temperature"]), _layer(tensors)
        modules, pooling = nn.ModuleDict({"layer": layer, "heads": heads}), _pooling(tensors)
        if pooling is not None:
            modules["pooling"] = pooling
        modules.eval().requires_grad_(False).load_state_dict(tensors)
        classifier = Classifier(
            layer,
            heads,
            tuple(metadata["classes"]),
            metadata["num_known"],
            bool(metadata["disjoint"]),
            Calibration(**metadata["calibration"]) if metadata["calibration"] else None,
            ViewSettings(**metadata["details"]),
            metadata.get("kind", "discovery"),
            pooling,
            None if means is None else Reference(means.numpy(), metadata["min_similarity"]),
            str(metadata.get("encoder", "")),
        )
        _check(classifier)
    return classifier


def _check(classifier: Classifier) -> None:
    """Raise an error of any kind if the parts do not fit together."""
    output = classifier.heads(apply_layer(classifier.layer, torch.zeros(1, classifier.dim)))
    rows, names = output.shape[1], classifier.classes
    if len(names) != rows or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{rows} classes are not called {names}")
    if classifier.num_known not in range(rows + 1 - classifier.disjoint):
        raise ValueError(f"{classifier.num_known} of {rows} classes are not known ones")
    for part in (classifier.heads, classifier.calibration):
        if not 0 < getattr(part, "temperature", 1) < torch.inf:
            raise ValueError("a temperature is not above 0")
    _check_kind(classifier, rows)


def _check_kind(classifier: Classifier, rows: int) -> None:
    """Raise an error of any kind if the parts are not those of the kind of the classifier."""
    if classifier.kind not in AGAIN:
        raise ValueError(f"it is of the kind {classifier.kind!r}")
    augment = classifier.drawn.augment
    if isinstance(augment, str) and augment not in AUGMENTATIONS:  # but a file, or code
        raise ValueError(f"{augment!r} is no augmentation of nearkin's")
    if classifier.kind == "discovery":
        views_of(DiscoverConfig(**asdict(classifier.drawn)).augment, ("strong",))
    elif classifier.drawn.num_views or classifier.num_known != rows:
        raise ValueError("a classification has no views, and no novel classes")
    if classifier.reference is not None:
        classifier.reference.check(rows, classifier.dim)


def _heads(tensors: dict[str, Tensor], temperature: float | None) -> nn.Module:
    if "heads.losses" in tensors:
        return _multi_head(tensors, temperature or 0.0)
    if temperature is not None:
        classes, features = tensors["heads.weight"].shape
        return CosineHead(features, classes, temperature)
    if "heads.weight" in tensors:
        rows, features = tensors["heads.weight"].shape
        return nn.Linear(features, rows)
    known, novel = (tensors[f"heads.{part}.weight"] for part in ("known", "novel"))
    return Heads(novel.shape[1], len(known), len(novel))


def _multi_head(tensors: dict[str, Tensor], temperature: float) -> MultiHead:
    known, features = tensors["heads.known.weight"].shape
    hidden = len(tensors["heads.novel.0.projector.0.weight"])
    novel, dim = tensors["heads.novel.0.prototypes.weight"].shape
    heads = len(tensors["heads.losses"])
    return MultiHead(features, hidden, dim, known, novel, heads, temperature)


def _layer(tensors: dict[str, Tensor]) -> nn.Module:
    weight = tensors.get("layer.body.1.weight")
    return nn.Identity() if weight is None else trainable_layer(weight.shape[1], weight.shape[0])


def _pooling(tensors: dict[str, Tensor]) -> AttentivePooling | None:
    parts = [tensors.get(f"pooling.{name}") for name in ("mean", "std", "attention")]
    if any(part is None for part in parts):
        return None
    return AttentivePooling(*(torch.zeros_like(part) for part in parts if part is not None))


def all_class_names(known: tuple[str, ...], num_novel: int) -> tuple[str, ...]:
    """Return the known names, then new-1, new-2, ... as far as these are free.

    >>> all_class_names(("cat", "new-1"), 2)
    ('cat', 'new-1', 'new-2', 'new-3')
    """
    free = (f"new-{n}" for n in range(1, num_novel + len(known) + 1))
    return (*known, *[name for name in free if name not in known][:num_novel])
