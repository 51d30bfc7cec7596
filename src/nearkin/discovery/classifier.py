"""What a classifier of known and novel classes says about images."""

import copy
import json
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn

from nearkin.config import DiscoverConfig
from nearkin.data.augmentations import views_of
from nearkin.discovery.calibration import Calibration
from nearkin.discovery.trunk import Looks
from nearkin.errors import UsageError
from nearkin.evaluation.encoder import read_tensors
from nearkin.method import Method
from nearkin.networks.heads import CosineHead, Heads, top
from nearkin.tables import usable, write_whole


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
        self, looks: Looks, paths: tuple[str, ...], label: Int64[np.ndarray, " images"]
    ) -> Predictions:
        """The classes of images, from an encoder's features of them and of views of them."""
        with torch.inference_mode():
            center = on_top(self.layer, looks.center)
            probability = self._probability(center)
            by_view = torch.stack(
                [self._probability(on_top(self.layer, view)).argmax(dim=1) for view in looks.views]
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


def on_top(layer: nn.Module, features: Float[Tensor, "n features"]) -> Float[Tensor, "n dim"]:
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
    rows = found.heads(on_top(found.layer, torch.zeros(1, found.dim))).shape[1]
    if len(found.classes) != rows or not all(isinstance(name, str) for name in found.classes):
        raise ValueError(f"{rows} classes are not called {found.classes}")
    if found.num_known not in range(rows + 1 - found.disjoint):
        raise ValueError(f"{found.num_known} of {rows} classes are not known ones")
    for part in (found.heads, found.calibration):
        if not 0 < getattr(part, "temperature", 1) < torch.inf:
            raise ValueError("a temperature is not above 0")
    drawn = {name: found.details[name] for name in ("augment", "num_views", "seed")}
    views_of(DiscoverConfig(**drawn).augment, 1)


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
