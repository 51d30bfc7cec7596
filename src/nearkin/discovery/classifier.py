"""From features to classes: heads, k-means, the classifier file and its calibration."""

import copy
import json
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn

from nearkin.config import DiscoverConfig, Value
from nearkin.data.augmentations import views_of
from nearkin.discovery.data import DiscoveryTask
from nearkin.discovery.features import CachedFeatures, Trunk
from nearkin.errors import DataError, UsageError
from nearkin.evaluation.encoder import read_tensors
from nearkin.measures.kmeans import compact, constrained_kmeans
from nearkin.method import Method
from nearkin.networks.heads import CosineHead, Heads, top
from nearkin.tables import usable, write_whole
from nearkin.types import UNKNOWN


@dataclass(frozen=True, eq=False)
class Predictions:
    """One row per image. The known classes come first, in their order, then the novel ones."""

    paths: tuple[str, ...]
    """The images' names."""
    probability: Float[np.ndarray, "images classes"]
    """The classifier's softmax, averaged over the views; rows sum to 1. A class that an image
    cannot have, such as a known one where all known classes are ruled out, has 0."""
    by_view: Int[np.ndarray, "views images"]
    """The most probable class in each of several augmented views."""
    features: Float[np.ndarray, "images dim"]
    """Unit vectors of what the classifier stands on."""
    label: Int[np.ndarray, " images"]
    """The number of the known class of an image that came with one, `UNKNOWN` for the rest."""
    classes: tuple[str, ...]
    """Names of all classes: those of the known ones, then new-1, new-2, ..."""
    num_known: int
    """How many of the classes are known."""

    @property
    def cluster(self) -> Int[np.ndarray, " images"]:
        """The number of the most probable class of each image."""
        return np.asarray(self.probability.argmax(axis=1))


COLDEST: Final = 0.05
HOTTEST: Final = 20.0
BINS: Final = 10
LEAST: Final = 1e-12
"""Keeps the logarithm of a certainty that was wrong finite."""


@dataclass(frozen=True)
class Calibration:
    """One temperature for log-probabilities, and what it does to their error."""

    temperature: float
    num_images: int
    """How many images it was fitted to."""
    error_before: float
    """Expected calibration error of the largest probability, from 0 to 1."""
    error_after: float
    """The same with the temperature, on the same images."""

    def apply(self, probability: Float[np.ndarray, "n classes"]) -> Float[np.ndarray, "n classes"]:
        """`p^(1 / temperature)`, scaled so that rows sum to 1.

        The classes of a row keep their order, and a class with probability 0 keeps it.
        """
        return _heat(probability, self.temperature)


def fit(
    probability: Float[np.ndarray, "n classes"], correct: Bool[np.ndarray, " n"]
) -> Calibration:
    """The temperature at which the largest probability best says how often it is right.

    It has the least binary log-loss against `correct` of all from 0.05 to 20, and is 1 where
    nothing is better. Temperature scaling is from Guo et al. On calibration of modern neural
    networks. ICML 2017, arXiv:1706.04599, section 4.2. They score the probability of the true
    class; a class that was found has no true counterpart, only a right or wrong image.

    Args:
        probability: Of the classes, for images whose true class was hidden from the classifier.
        correct: Whether the most probable class turned out to be right.

    Raises:
        DataError: If there is no image.

    >>> certain = np.array([[0.99, 0.01]] * 4)
    >>> fitted = fit(certain, np.array([True, True, True, False]))
    >>> fitted.apply(certain)[0].round(3)
    array([0.75, 0.25])
    """
    from scipy.optimize import minimize_scalar

    if not len(correct):
        raise DataError("no image to calibrate with; hide at least one known class")

    def loss(log_temperature: float) -> float:
        largest = _heat(probability, np.exp(log_temperature)).max(axis=1)
        likelihood = np.where(correct, largest, 1 - largest)
        return float(-np.log(likelihood.clip(min=LEAST)).mean())

    bounds = (np.log(COLDEST), np.log(HOTTEST))
    found = float(minimize_scalar(loss, bounds=bounds, method="bounded").x)
    temperature = float(np.exp(min((0.0, found), key=loss)))
    after = _heat(probability, temperature).max(axis=1)
    return Calibration(
        temperature=temperature,
        num_images=len(correct),
        error_before=calibration_error(probability.max(axis=1), correct),
        error_after=calibration_error(after, correct),
    )


def calibration_error(score: Float[np.ndarray, " n"], correct: Bool[np.ndarray, " n"]) -> float:
    """Mean distance between what images' scores promise and how often they are right.

    The expected calibration error over ten bins with the same number of images (Nixon et al.
    Measuring calibration in deep learning. 2019, arXiv:1904.01685), but for equal scores, which
    share a bin. 0 is best, 1 worst.

    >>> calibration_error(np.full(4, 0.875), np.array([True, True, True, False]))
    0.125
    """
    edges = np.quantile(score, np.arange(1, BINS) / BINS)
    bins = np.searchsorted(edges, score)
    difference = np.bincount(bins, weights=score - correct)
    return float(np.abs(difference).sum() / len(score))


def _heat(
    probability: Float[np.ndarray, "n classes"], temperature: float
) -> Float[np.ndarray, "n classes"]:
    heated = probability.astype(np.float64) ** (1 / temperature)
    return np.asarray(heated / heated.sum(axis=1, keepdims=True))


FORMAT = "1"


@dataclass(frozen=True, eq=False)
class Classifier:
    """From an encoder's features to classes."""

    layer: nn.Module
    """On top of the encoder; nothing but a pass where the encoder itself has learned."""
    heads: nn.Module
    """From the layer's features to logits of all classes, the known ones first."""
    classes: tuple[str, ...]
    num_known: int
    disjoint: bool
    """Whether images without a label are held to be of no known class."""
    calibration: Calibration | None
    details: dict[str, Any]
    """How views are drawn, and where the classifier comes from."""

    @property
    def dim(self) -> int:
        """Numbers in the feature vectors it takes."""
        first = next(chain(self.layer.parameters(), self.heads.parameters()))
        return first.shape[1]

    def predict(
        self, looks: CachedFeatures, paths: tuple[str, ...], label: Int64[np.ndarray, " images"]
    ) -> Predictions:
        """The classes of images, from an encoder's features of them and of views of them."""
        with torch.inference_mode():
            center = apply_layer(self.layer, looks.center)
            probability = self._probability(center)
            by_view = torch.stack(
                [
                    self._probability(apply_layer(self.layer, view)).argmax(dim=1)
                    for view in looks.views
                ]
            )
        return Predictions(
            paths=paths,
            probability=probability.numpy(),
            by_view=by_view.numpy(),
            features=torch.nn.functional.normalize(center, dim=1).numpy(),
            label=label,
            classes=self.classes,
            num_known=self.num_known,
        )

    def _probability(self, features: Tensor) -> Tensor:
        return class_probability(self.heads, features, self.num_known, self.disjoint)


def class_probability(
    heads: nn.Module, features: Float[Tensor, "n f"], num_known: int, disjoint: bool
) -> Float[Tensor, "n classes"]:
    """Probabilities of all classes; where novel classes are disjoint, that of a known one is 0."""
    logits: Tensor = heads(features).double()  # or one of two sure classes would have 0
    rest = torch.arange(logits.shape[1], device=logits.device) >= num_known
    return logits.masked_fill(~rest, -torch.inf).softmax(1) if disjoint else logits.softmax(1)


def apply_layer(layer: nn.Module, features: Float[Tensor, "n features"]) -> Float[Tensor, "n dim"]:
    """What a layer makes of an encoder's features, which it takes as images of one pixel."""
    found: Tensor = layer(features[..., None, None])
    return found.flatten(1)


def heads_of(method: Method[Any]) -> nn.Module:
    """What gives a method's logits of all classes, if it has any."""
    heads: nn.Module = method.get_submodule("heads")
    return heads


def still(module: nn.Module) -> nn.Module:
    """A copy on the CPU that no longer learns."""
    return copy.deepcopy(module).cpu().eval()


def write_classifier(path: Path, classifier: Classifier) -> None:
    """Write it as safetensors, whole or not at all."""
    from safetensors.torch import save

    parts = {"layer": classifier.layer, "heads": classifier.heads}
    state = {
        f"{part}.{name}": tensor.cpu().contiguous()
        for part, module in parts.items()
        for name, tensor in module.state_dict().items()
    }
    calibration = classifier.calibration
    described = {
        "format": FORMAT,
        "classes": classifier.classes,
        "num_known": classifier.num_known,
        "disjoint": classifier.disjoint,
        "temperature": getattr(classifier.heads, "temperature", None),
        "calibration": None if calibration is None else asdict(calibration),
        "details": classifier.details,
    }
    write_whole(path, save(state, metadata={"nearkin": json.dumps(described)}))


def read_classifier(path: Path) -> Classifier:
    """What `write_classifier` wrote, ready to use.

    Raises:
        UsageError: If there is none.
        CheckpointError: If the file is damaged, or contradicts itself.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist; `nearkin discover` makes it when it is done")
    with usable(path, "discover again"):
        said, state = read_tensors(path, "nearkin")
        heads, layer = _heads(state, said["temperature"]), _layer(state)
        heads.load_state_dict(_under("heads.", state))
        layer.load_state_dict(_under("layer.", state))
        found = Classifier(
            layer.eval(),
            heads.eval(),
            tuple(said["classes"]),
            said["num_known"],
            bool(said["disjoint"]),
            Calibration(**said["calibration"]) if said["calibration"] else None,
            said["details"],
        )
        _check(found)
    return found


def _check(found: Classifier) -> None:
    """Raise an error of any kind if the parts do not fit together."""
    rows = found.heads(apply_layer(found.layer, torch.zeros(1, found.dim))).shape[1]
    if len(found.classes) != rows or not all(isinstance(name, str) for name in found.classes):
        raise ValueError(f"{rows} classes are not called {found.classes}")
    if found.num_known not in range(rows + 1 - found.disjoint):
        raise ValueError(f"{found.num_known} of {rows} classes are not known ones")
    for part in (found.heads, found.calibration):
        if not 0 < getattr(part, "temperature", 1) < torch.inf:
            raise ValueError("a temperature is not above 0")
    drawn = {name: found.details[name] for name in ("augment", "num_views", "seed")}
    views_of(DiscoverConfig(**drawn).augment, ("strong",))


def _heads(state: dict[str, Tensor], temperature: float | None) -> nn.Module:
    if temperature is not None:
        classes, features = state["heads.weight"].shape
        return CosineHead(features, classes, temperature)
    known, novel = (state[f"heads.{part}.weight"] for part in ("known", "novel"))
    return Heads(novel.shape[1], len(known), len(novel))


def _layer(state: dict[str, Tensor]) -> nn.Module:
    weight = state.get("layer.body.1.weight")
    return nn.Identity() if weight is None else top(weight.shape[1], weight.shape[0])


def _under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}


def new_names(known: tuple[str, ...], count: int) -> tuple[str, ...]:
    """The names of all classes: the known ones, then new-1, new-2, ... as far as these are free.

    >>> new_names(("cat", "new-1"), 2)
    ('cat', 'new-1', 'new-2', 'new-3')
    """
    free = (f"new-{n}" for n in range(1, count + len(known) + 1))
    return (*known, *[name for name in free if name not in known][:count])


ALONE: Final[dict[str, Value]] = {"novel_weight": 0.0, "known_weight": 0.0}
"""NCL without its contrastive terms."""
BASELINES: Final[dict[str, dict[str, Value]]] = {
    "base loss": ALONE,
    "rank statistics": ALONE | {"pseudo_labels": "ranks"},
}
"""Options of NCL: its own base loss, and AutoNovel's (Han et al. 2020)."""


@dataclass(frozen=True, eq=False)
class Clustering:
    """The classes that one way of looking for them finds, for all images."""

    joint: Int64[np.ndarray, " images"]
    """Of all classes, known and novel."""
    novel: Int64[np.ndarray, " images"]
    """Of the novel classes alone, numbered like those of `joint`."""


def head_clustering(trunk: Trunk, method: Method[Any], num_known: int) -> Clustering:
    """The most probable classes by a method's heads."""
    looks, layer = trunk.seen(method)
    heads = still(heads_of(method))
    with torch.inference_mode():
        features = apply_layer(still(layer), looks.center)
        joint, novel = (
            class_probability(heads, features, num_known, disjoint).argmax(dim=1).numpy()
            for disjoint in (False, True)
        )
    return Clustering(joint, novel)


def kmeans_clustering(
    features: Float[Tensor, "images dim"], task: DiscoveryTask, seed: int
) -> Clustering:
    """K-means on features that no label has touched, fitted to what is learned from.

    All classes: labeled images stay in their class. Novel classes: unlabeled images alone.
    Other images go to the nearest center.
    """
    x = compact(features).astype(np.float64)
    nothing = np.full(len(task.unlabeled), UNKNOWN)
    joint = constrained_kmeans(
        x[task.rows], task.label[task.rows], task.num_known + task.num_novel, seed=seed
    )
    novel = constrained_kmeans(x[task.unlabeled], nothing, task.num_novel, seed=seed)
    return Clustering(_closest(x, joint.centers), task.num_known + _closest(x, novel.centers))


def _closest(
    x: Float[np.ndarray, "images dim"], centers: Float[np.ndarray, "k dim"]
) -> Int64[np.ndarray, " images"]:
    distance: np.ndarray = (centers**2).sum(axis=1) - 2 * x @ centers.T
    return np.asarray(distance.argmin(axis=1), np.int64)
