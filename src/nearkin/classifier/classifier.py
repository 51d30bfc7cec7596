"""From features to classes: the classifier as a file, and what it predicts."""

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn
from typing_extensions import override

from nearkin.classifier.calibration import Calibration
from nearkin.classifier.features import CachedFeatures, ViewSettings
from nearkin.classifier.reference import LEARNED, THRESHOLDS, Reference
from nearkin.config import DiscoverConfig
from nearkin.data.augmentations import AUGMENTATIONS, measured_view
from nearkin.encoders.encoder import Encoder, read_tensors, separate_weights
from nearkin.errors import CheckpointError, UsageError
from nearkin.files import usable, write_whole
from nearkin.networks.branch import Backbone
from nearkin.networks.heads import CosineHead, Heads, linear_layer, rectified_layer
from nearkin.networks.tokens import AttentivePooling
from nearkin.objectives import unit
from nearkin.run.folder import KINDS
from nearkin.version import check_format

MAX_VIEWS: Final = 64  # Of an image, that a file may ask for
FORMATS: Final = ("3",)
"""Formats that are read; the last is written."""

Features = Float[Tensor, "n dim"]
Probability = Float[Tensor, "n classes"]
Kind = Literal["discovery", "classification"]


def class_probability(
    heads: nn.Module, features: Features, impossible: Bool[np.ndarray, "#n _"] | None = None
) -> Probability:
    """Return probabilities of all classes; 0 of those that are `impossible` for an image."""
    # In float32, one of two confident classes would have probability 0.
    logits: Tensor = heads(features).double()
    if impossible is not None:
        excluded = torch.from_numpy(impossible).to(logits.device)
        logits = logits.masked_fill(excluded, -torch.inf)
    return logits.softmax(dim=1)


def pooled(encoder: Encoder, pooling: AttentivePooling, dim: int) -> Encoder:
    """Return an encoder whose `dim` features are its tokens, pooled."""
    network = Backbone(nn.Sequential(encoder.tokens, pooling), dim)
    return Encoder(network, encoder.preprocessing, encoder.details)


@dataclass(frozen=True, eq=False)
class Predictions:
    """One row per image. The known classes come first, in their order, then the novel ones."""

    paths: tuple[str, ...]  # The images' names
    probability: Float[np.ndarray, "images classes"]
    """Softmax of the classifier; rows sum to 1. A class that an image cannot have has 0."""
    by_view: Int[np.ndarray, "views images"]
    """The most probable class in each of several augmented views."""
    features: Float[np.ndarray, "images dim"]  # Unit vectors that the heads take
    label: Int[np.ndarray, " images"]  # Known classes, `UNLABELED` for images without a label
    classes: tuple[str, ...]  # Names of all classes: the known ones, then new-1, new-2, ..
    num_known: int
    distance: Float[np.ndarray, " images"]
    """To the images that were learned from, see `Reference`."""
    outlier: Bool[np.ndarray, " images"]

    @property
    def cluster(self) -> Int[np.ndarray, " images"]:
        """The most probable class of each image."""
        return np.asarray(self.probability.argmax(axis=1))


class _Merged(nn.Module):
    """Heads of which some classes are one: its probability is the sum of theirs."""

    def __init__(self, heads: nn.Module, one: Float[Tensor, "classes merged"]) -> None:
        super().__init__()
        self.heads = heads
        self.register_buffer("one", one)

    @override
    def forward(self, features: Features) -> Float[Tensor, "n merged"]:
        """Logits in double precision."""
        logits: Tensor = (self.heads(features).double().softmax(dim=1) @ self.one).log()
        return logits


@dataclass(frozen=True, eq=False)
class Classifier:
    """From an encoder's features to classes, of a discovery or of a classification."""

    layer: nn.Module  # On top of the encoder; the identity where the encoder itself is finetuned
    heads: nn.Module  # From the layer's features to logits of all classes, the known ones first
    classes: tuple[str, ...]
    num_known: int
    calibration: Calibration | None
    drawn: ViewSettings  # The views of new images
    reference: Reference  # The images that it learned from
    kind: Kind = "discovery"
    pooling: AttentivePooling | None = None
    """What pools the encoder's tokens, where the classifier does not take its features."""
    digest: str = ""  # Of the encoder that it was trained with; "" where the file does not say

    @property
    def dim(self) -> int:
        """Dimension of the features it takes."""
        first = next(chain(self.layer.parameters(), self.heads.parameters()))
        return first.shape[1]

    def named(self, names: Mapping[str, str]) -> "Classifier":
        """Return the same with these names of classes; those of one name are one class."""
        if not names:
            return self
        named = [names.get(name, name) for name in self.classes]
        classes = tuple(dict.fromkeys(named))
        number = np.array([classes.index(name) for name in named])
        one = np.eye(len(classes))[number]
        reference = replace(
            self.reference,
            cluster=number[self.reference.cluster],
            sizes=(self.reference.sizes @ one).astype(np.int64),
        )
        heads = _Merged(self.heads, torch.from_numpy(one))
        return replace(self, classes=classes, heads=heads, reference=reference)

    def encoder(self, encoder: Encoder) -> Encoder:
        """Return the encoder of the features it takes, or refuse one that does not fit."""
        self._check_origin(encoder)
        fitting = encoder
        if self.pooling is not None and encoder.tokens.dim == len(self.pooling.mean):
            fitting = pooled(encoder, self.pooling, self.dim)
        if fitting.num_features != self.dim:
            raise CheckpointError(
                f"classifier.safetensors is of another encoder: it takes {self.dim} features, "
                f"and this one gives {fitting.num_features}; {KINDS[self.kind].verb} again"
            )
        return fitting

    def below_heads(self, encoder: Encoder) -> Encoder:
        """Return the encoder with the layer on top of it: that of the features in the run's table.

        The table of a classification has the features of the encoder itself, without any pooling.
        """
        self._check_origin(encoder)
        if not isinstance(self.layer, Backbone):
            return encoder
        top = nn.Sequential(OrderedDict(layer=self.layer))  # a digest has the names of weights
        network = Backbone(nn.Sequential(encoder.backbone.body, top), self.layer.feature_dim)
        return Encoder(network, encoder.preprocessing, encoder.details)

    @property
    def top_reference(self) -> Reference:
        """The images that it learned from, with the unit features that the heads take."""
        with torch.inference_mode():
            features = unit(self.layer(self.reference.features))
            return replace(self.reference, features=features)

    def _check_origin(self, encoder: Encoder) -> None:
        if self.digest not in ("", encoder.digest):
            raise CheckpointError(
                "classifier.safetensors is of another encoder: the weights, the architecture or "
                "the preprocessing of this one differ from what it was trained with; bring that "
                f"encoder back, or {KINDS[self.kind].verb} again"
            )

    def predict(
        self,
        cached: CachedFeatures,
        paths: tuple[str, ...],
        label: Int64[np.ndarray, " images"],
        *,
        excluded: Bool[np.ndarray, "images classes"] | None = None,
    ) -> Predictions:
        """Classify images by an encoder's features of them and of their views.

        `label` has their known classes, or `UNLABELED`; `excluded` are those that an image is
        known not to have, as the known ones are for the images of a discovery in mode ncd.
        """

        def probability(features: Features) -> Probability:
            return class_probability(self.heads, self.layer(features), excluded)

        with torch.inference_mode():
            by_view = [probability(view).argmax(dim=1).numpy() for view in cached.views]
            return Predictions(
                paths=paths,
                probability=probability(cached.center).numpy(),
                by_view=np.array(by_view, np.int64).reshape(len(by_view), len(cached.center)),
                features=unit(self.layer(cached.center)).numpy(),
                label=label,
                classes=self.classes,
                num_known=self.num_known,
                distance=self.reference.distance(cached.center),
                outlier=self.reference.outliers(cached.center),
            )

    @property
    def modules(self) -> nn.ModuleDict:
        """All that has weights, by its name in the file."""
        modules = nn.ModuleDict({"layer": self.layer, "heads": self.heads})
        if self.pooling is not None:
            modules["pooling"] = self.pooling
        return modules

    def write(self, path: Path) -> None:
        """Write the classifier as safetensors, atomically."""
        from safetensors.torch import save

        tensors = separate_weights(self.modules)
        for name in LEARNED:
            tensors[f"reference.{name}"] = torch.as_tensor(getattr(self.reference, name))
        metadata = {
            "format": FORMATS[-1],
            "kind": self.kind,
            "outliers": {key: getattr(self.reference, key) for key in THRESHOLDS},
            "classes": self.classes,
            "num_known": self.num_known,
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
        features, *learned = (tensors.pop(f"reference.{name}") for name in LEARNED)
        arrays: Any = (each.numpy() for each in learned)
        classifier = Classifier(
            _layer(tensors),
            _heads(tensors, metadata["temperature"]),
            tuple(metadata["classes"]),
            metadata["num_known"],
            Calibration(**metadata["calibration"]) if metadata["calibration"] else None,
            ViewSettings(**metadata["details"]),
            Reference(features.float(), *arrays, **metadata["outliers"]),
            metadata["kind"],
            _pooling(tensors),
            str(metadata["encoder"]),
        )
        classifier.modules.eval().requires_grad_(False).load_state_dict(tensors)
        _check(classifier)
    return classifier


def _check(classifier: Classifier) -> None:
    """Raise an error of any kind if the parts do not fit together."""
    output = classifier.heads(classifier.layer(torch.zeros(1, classifier.dim)))
    rows, names, drawn = output.shape[1], classifier.classes, classifier.drawn
    is_discovery = classifier.kind == "discovery"  # else without views and without novel classes
    parts = classifier.heads, classifier.calibration
    views = range(1, MAX_VIEWS + 1) if is_discovery else [0]
    fits = {
        "kind": classifier.kind in get_args(Kind),
        "classes": len(names) == rows and all(isinstance(name, str) for name in names),
        "num_known": classifier.num_known in (range(rows + 1) if is_discovery else [rows]),
        "num_views": drawn.num_views in views,
        # Neither a file nor code.
        "augment": not isinstance(drawn.augment, str) or drawn.augment in AUGMENTATIONS,
        "temperature": all(0 < getattr(part, "temperature", 1) < torch.inf for part in parts),
        "reference": classifier.reference.fits(rows, classifier.dim),
    }
    for part, is_right in fits.items():
        if not is_right:
            raise ValueError(f"its {part} does not fit the rest")
    augment: Any = drawn.augment
    measured_view(DiscoverConfig(augment=augment, seed=drawn.seed).augment)


def _heads(tensors: dict[str, Tensor], temperature: float | None) -> nn.Module:
    if temperature is None and "heads.weight" not in tensors:
        known, novel = (tensors[f"heads.{part}.weight"] for part in ("known", "novel"))
        return Heads(novel.shape[1], len(known), len(novel))
    classes, features = tensors["heads.weight"].shape
    if temperature is None:
        return nn.Linear(features, classes)
    return CosineHead(features, classes, temperature)


def _layer(tensors: dict[str, Tensor]) -> nn.Module:
    weight = tensors.get("layer.body.1.weight")
    if weight is None:
        return nn.Identity()
    layer = linear_layer if "layer.body.1.bias" in tensors else rectified_layer
    return layer(weight.shape[1], weight.shape[0])


def _pooling(tensors: dict[str, Tensor]) -> AttentivePooling | None:
    names = [f"pooling.{name}" for name in ("mean", "std", "attention")]
    if not tensors.keys() >= {*names}:
        return None
    return AttentivePooling(*(torch.zeros_like(tensors[name]) for name in names))


def all_class_names(
    known: tuple[str, ...], num_novel: int, taken: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the known names, then new-1, new-2, ... as far as these are free.

    >>> all_class_names(("cat", "new-1"), 2, taken=["new-3"])
    ('cat', 'new-1', 'new-2', 'new-4')
    """
    taken = {*known, *taken}
    free = (name for number in count(1) if (name := f"new-{number}") not in taken)
    return (*known, *islice(free, num_novel))
