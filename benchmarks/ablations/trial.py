"""Train one arm with one seed, and measure it."""

import hashlib
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from arms import Arm
from torch import Tensor, nn

from nearkin.data.batches import Batches, CenterCrops, to_input
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.data.order import Order
from nearkin.data.rng import permutation
from nearkin.data.views import View
from nearkin.errors import DataError
from nearkin.evaluation.embeddings import Embeddings, encode
from nearkin.evaluation.measures import knn, num_neighbors
from nearkin.measures.neighbors import nearest
from nearkin.method import Method
from nearkin.methods import METHODS
from nearkin.methods.nnclr import NNCLR
from nearkin.methods.swav import SwAV
from nearkin.networks.backbone import Block, conv_norm
from nearkin.networks.branch import as_backbone
from nearkin.objectives import sinkhorn, unit
from nearkin.training.health import health
from nearkin.training.loop import steps
from nearkin.training.optimizer import build_optimizer, warmup_cosine

CPU = torch.device("cpu")
PIECE = 500
"""Images encoded per batch."""


@dataclass(frozen=True)
class Recipe:
    """Settings shared by all arms."""

    steps: int = 1500
    lr: float = 1e-3
    weight_decay: float = 0.05
    warmup: float = 0.1
    image_size: int = 14
    train: int = 10_000
    """Training images, which are the bank of kNN too."""
    queries: int = 2_000
    """Images held out of the training part for scoring."""


DRAWN: dict[str, Any] = {
    "scale": (0.2, 1.0),
    "flip": 0.5,
    "jitter": 0.8,
    "brightness": 0.4,
    "contrast": 0.4,
}
"""The augmentation of all arms. Images are gray, so nothing changes a hue."""


class ImageSet:
    """Random images of the training part: some for training, others for scoring.

    Args:
        data: As for `nearkin train`. A test part is never used.
        recipe: How many, and how large.

    Raises:
        DataError: If there are too few.
    """

    def __init__(self, data: str, recipe: Recipe) -> None:
        images = open_images(data)
        rows = np.flatnonzero(images.splits != "test")
        needed = recipe.train + recipe.queries
        if len(rows) < needed:
            raise DataError(f"{data}: {len(rows)} images to train on; {needed} are needed")
        drawn = rows[permutation(0, 0, len(rows))]
        self.train = images.subset(np.sort(drawn[: recipe.train]))
        self.queries = images.subset(np.sort(drawn[recipe.train : needed]))
        self.size = recipe.image_size

    @cached_property
    def shown(self) -> tuple[Tensor, Tensor]:
        """Return both sets, normalized."""
        train, queries = (_pixels(images, self.size) for images in (self.train, self.queries))
        return to_input(train), to_input(queries)

    @cached_property
    def fingerprint(self) -> str:
        """Return mean and standard deviation of the pixels."""
        return self.train.fingerprint + self.queries.fingerprint

    def raw(self) -> float:
        """Return the first floor: kNN on raw pixels at the size of the network's input."""
        train, queries = (
            _pixels(images, self.size).flatten(1) / 255 for images in (self.train, self.queries)
        )
        return self.knn(unit(train - train.mean(dim=0)), unit(queries - train.mean(dim=0)))

    def knn(self, bank: Tensor, queries: Tensor) -> float:
        """Return the kNN accuracy on the scored images."""
        train = Embeddings(bank.numpy(), self.train.labels)
        scored = Embeddings(queries.numpy(), self.queries.labels)
        return knn(train, scored, k=num_neighbors(len(bank))).value


def _pixels(images: Images, size: int) -> Tensor:
    return torch.cat(list(CenterCrops(images, size)))


def network() -> nn.Sequential:
    """Return a residual network of 73,000 parameters: 14 px become 7, 4 and 2."""
    layers = [conv_norm(3, 16, 3, stride=2), nn.ReLU(inplace=True), Block(16, 32, 2)]
    return nn.Sequential(*layers, Block(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def key(arm: Arm, seed: int, recipe: Recipe, images: ImageSet) -> str:
    """Return a key of all settings of a trial, except the code and the number of threads."""
    decides = [asdict(arm), seed, asdict(recipe), DRAWN, images.fingerprint]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def trial(arm: Arm, seed: int, recipe: Recipe, images: ImageSet) -> dict[str, float]:
    """Train one arm with one seed, and measure it after the last step."""
    torch.manual_seed(seed)
    backbone = as_backbone(network(), recipe.image_size)
    options: dict[str, Any] = dict(arm.options)
    if "num_images" in inspect.signature(METHODS[arm.method].__init__).parameters:
        options["num_images"] = len(images.train)
    method = METHODS[arm.method](backbone, **options)
    method.to(memory_format=torch.channels_last)
    losses = train(method, arm.batch_size, seed, recipe, images)[-100:] or [np.nan]
    found = measure(method.eval(), images)
    return found | {"loss": float(np.mean(losses)), "loss_sd": float(np.std(losses))}


def train(
    method: Method[Any], batch_size: int, seed: int, recipe: Recipe, images: ImageSet
) -> list[float]:
    """Train a method, and return the losses."""
    batches = Batches(
        images.train,
        (View(**DRAWN),) * len(method.views),
        image_size=recipe.image_size,
        order=Order(len(images.train), batch_size, seed),
        device=CPU,
    )
    decay = recipe.weight_decay
    run = steps(
        method,
        build_optimizer(method, name="adamw", lr=recipe.lr, weight_decay=decay),
        batches.between(0, recipe.steps),
        start=0,
        total=recipe.steps,
        schedule=warmup_cosine(recipe.warmup),
        seed=seed,
    )
    return [step.loss.item() for _, step in run]


def measure(method: Method[Any], images: ImageSet) -> dict[str, float]:
    """Return one row: features are the backbone's, embeddings the projector's."""
    features = [encode(method.backbone, shown.split(PIECE)) for shown in images.shown]
    bank, queries = (encode(method.online.projector, each.split(PIECE)) for each in features)
    found = {
        "knn": images.knn(*features),
        "knn_embedding": images.knn(bank, queries),
        "effective_rank_features": health(features[1])["effective_rank"],
        **health(queries),
    }
    special = SPECIAL.get(type(method), {})
    return found | {name: of(method, queries, images) for name, of in special.items()}


def imbalance(method: SwAV, queries: Tensor, images: ImageSet) -> float:
    """Return the share of the codes' mass that must move to balance all prototypes."""
    del images
    scores = unit(queries) @ method.prototypes.detach().T
    mass = sinkhorn(scores, method.epsilon, method.num_iterations).mean(dim=0)
    return float((mass - 1 / len(mass)).abs().sum() / 2)


def neighbors_of_class(method: NNCLR, queries: Tensor, images: ImageSet) -> float:
    """Return the share of drawn neighbors in the support set with the query's class."""
    support = method.support_set
    _, rows = nearest(support.keys, queries, method.num_neighbors)
    owners = support.index[rows].numpy()
    same = images.train.labels[owners] == images.queries.labels[:, None]
    return float((same & (owners >= 0)).mean())


SPECIAL: dict[type, dict[str, Callable[[Any, Tensor, ImageSet], float]]] = {
    SwAV: {"code_imbalance": imbalance},
    NNCLR: {"neighbors_of_class": neighbors_of_class},
}
"""Further measures, by method."""
