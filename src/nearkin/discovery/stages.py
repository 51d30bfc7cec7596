"""One training stage of a discovery: its recipe, its heads, its batches."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from nearkin.classifier.classifier import apply_layer, heads_of
from nearkin.config import TrainConfig
from nearkin.data.batches import BatchLoader
from nearkin.data.rng import seeded
from nearkin.data.samplers import TwoStreamBatchSampler
from nearkin.discovery.clusterings import start_clusters
from nearkin.discovery.features import (
    LAYER_DIM,
    DiscoveryEncoder,
    principal_layer,
    random_layer,
    top_features,
)
from nearkin.discovery.task import DiscoveryTask
from nearkin.errors import DataError
from nearkin.method import Method
from nearkin.methods import METHODS
from nearkin.networks.branch import Backbone
from nearkin.networks.heads import Heads
from nearkin.objectives import unit
from nearkin.run.folder import RunFolder
from nearkin.run.options import method_options
from nearkin.run.reporter import Logger
from nearkin.schema import Value
from nearkin.training.fit import Lead, fit, optimizer_for, training_steps
from nearkin.training.health import feature_health
from nearkin.types import UNLABELED

MIN_EPOCHS, MAX_EPOCHS = 10, 200


@dataclass(frozen=True)
class Recipe:
    """How a stage is trained; docs/discovery.md has the measurements behind the values."""

    steps: int  # The length that `--epochs auto` aims at, in whole epochs
    lr: float
    options: Mapping[str, Value] = field(default_factory=dict)  # That differ from the paper's


RECIPES: Final[dict[str, Recipe]] = {
    "supervised": Recipe(steps=600, lr=0.1),
    "ncl": Recipe(
        steps=1000,
        lr=0.1,
        # The published threshold on similarities fits the authors' features only: here a share
        # of the closest pairs is positive. Hard negatives take four times as long and gain
        # nothing on average.
        options={"pseudo_labels": "closest", "num_hard": 0},
    ),
    "simgcd": Recipe(
        steps=1000,
        lr=0.1,
        options={"dim": 64, "hidden_dim": 256},
    ),
}


@dataclass(frozen=True, eq=False)
class Stage:
    """A method, what it is trained on, and for how long."""

    config: TrainConfig
    method: Method[Any]
    feed: BatchLoader

    def run(self, folder: RunFolder, log: Logger) -> None:
        """Train from the newest checkpoint of the folder to the last step."""
        folder.path.mkdir(parents=True, exist_ok=True)
        fit(self.config, self.method, self.feed, Lead(folder, log, feature_health(self.feed)))

    def try_out(self, share: float = 1.0) -> None:
        """Train for a share of the steps without writing anything."""
        total = ceil(share * int(self.config.epochs) * self.feed.sampler.steps_per_epoch)
        optimizer, batches = optimizer_for(self.method, self.config), self.feed.load(0, total)
        for _ in training_steps(
            self.config, self.method, optimizer, batches, start=0, total=total
        ):
            pass


@dataclass(frozen=True, eq=False)
class HeadInit:
    """K-means clusters that the heads over classes start at.

    A random head gives many of its classes no image, and a class without images has no gradient:
    many classes of few images would be found late or never (Han et al. 2019, section 3.1, start
    at clusters too; measured in docs/discovery.md).
    """

    features: Float[Tensor, "learned dim"]
    """Of the images to learn from, as the heads take them."""
    cluster: Int64[Tensor, " learned"]  # Their clusters among all classes; labels where known
    labeled: Bool[Tensor, " learned"]

    @torch.no_grad()
    def init_heads(self, method: Method[Any]) -> None:
        """Set the weights of a method's heads to the means of the clusters."""
        heads = heads_of(method)
        device = next(heads.parameters()).device
        if isinstance(heads, Heads):
            # The known head has been trained. The novel one is linear, so it compares directions
            # from the mean of all unlabeled images: features are not negative, and their own
            # directions would be nearly the same.
            features = self.features[~self.labeled]
            novel = self.cluster[~self.labeled] - heads.known.out_features
            center = features.mean(dim=0)
            weight = unit(means(features, novel, heads.novel.out_features) - center)
            heads.novel.weight.copy_(weight.to(device))
            heads.novel.bias.copy_(-(weight @ center).to(device))
        else:
            prototypes = heads.get_parameter("weight")
            prototypes.copy_(means(unit(self.features), self.cluster, len(prototypes)).to(device))


class StageInit(NamedTuple):
    """What the last stage starts from."""

    backbone: Backbone
    heads: HeadInit
    known: nn.Module | None = None  # The head of the known classes, where these came before


def stage_init(
    encoder: DiscoveryEncoder,
    task: DiscoveryTask,
    base: TrainConfig,
    method: str,
    train: Callable[[Stage], None],
) -> StageInit:
    """Return what the last stage starts from, with heads at clusters of the features.

    NCL goes on from the known classes, as in its code and in AutoNovel's. SimGCD has no stage of
    these in its code, and starts at the features themselves, in the directions of their principal
    components; but on features that are no wider than the layer, at a layer that has learned the
    known classes, which found more there (docs/discovery.md).

    Args:
        encoder: What is trained, or below it.
        task: The images.
        base: Settings of all stages.
        method: The method of the last stage.
        train: Trains the stage of the known classes, if there is one.
    """
    if len(task.labeled) < 2:
        raise DataError(f"{len(task.labeled)} labeled images to learn from; give more of them")
    wide = encoder.cached.center.shape[1] > LAYER_DIM or not encoder.has_layer
    if method == "simgcd" and wide:
        return components_init(encoder, task, base.seed)
    return known_init(encoder, task, base, train, disjoint=method == "ncl")


def components_init(encoder: DiscoveryEncoder, task: DiscoveryTask, seed: int) -> StageInit:
    """Start at the principal components of the frozen features, or at the network as it is."""
    features, layer = encoder.cached.center[torch.from_numpy(task.rows)], None
    if encoder.has_layer:
        layer = principal_layer(encoder, task.rows)
        with torch.no_grad():
            features = apply_layer(layer, features)
    return StageInit(encoder.backbone(layer), head_init(features, task, seed))


def known_init(
    encoder: DiscoveryEncoder,
    task: DiscoveryTask,
    base: TrainConfig,
    train: Callable[[Stage], None],
    *,
    disjoint: bool = False,
) -> StageInit:
    """Start at a random layer, or at the network, that has learned the known classes."""
    stage = known_stage(encoder, task, base)
    train(stage)
    features = top_features(encoder, stage.method, task.rows)
    heads = head_init(features, task, base.seed, disjoint=disjoint)
    return StageInit(stage.method.backbone, heads, stage.method.get_submodule("known"))


def head_init(
    features: Float[Tensor, "learned dim"],
    task: DiscoveryTask,
    seed: int,
    *,
    disjoint: bool = False,
) -> HeadInit:
    """Return heads at clusters of the images to learn from, whose features these are.

    Where unlabeled images are `disjoint` from the known classes, of these alone.
    """
    cluster = torch.from_numpy(start_clusters(features, task, seed, disjoint=disjoint))
    return HeadInit(features, cluster, torch.from_numpy(task.label[task.rows] != UNLABELED))


def means(
    features: Float[Tensor, "n dim"], cluster: Int64[Tensor, " n"], count: int
) -> Float[Tensor, "clusters dim"]:
    """Return the mean of each cluster; zeros for an empty one.

    >>> means(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 2]), 3)
    tensor([[2.],
            [0.],
            [5.]])
    """
    member = torch.nn.functional.one_hot(cluster, count).to(features.dtype)
    return member.T @ features / member.sum(dim=0).clamp(min=1)[:, None]


def known_stage(encoder: DiscoveryEncoder, task: DiscoveryTask, base: TrainConfig) -> Stage:
    """Return the stage of the known classes alone (AutoNovel's second stage)."""
    rows = task.labeled
    nothing = np.zeros(0, np.int64)
    batch = min(int(base.batch_size), len(rows))
    sampler = TwoStreamBatchSampler(nothing, nothing, rows, batch, base.seed)
    # --epochs is the length of the last stage.
    config = _stage_config(replace(base, epochs="auto"), "supervised", sampler, {})
    layer = random_layer(encoder, base.seed) if encoder.has_layer else None
    backbone = encoder.backbone(layer)
    return _build_stage(encoder, task, sampler, config, backbone)


def class_stage(
    encoder: DiscoveryEncoder,
    task: DiscoveryTask,
    base: TrainConfig,
    init: StageInit,
    method: str,
    options: Mapping[str, Value],
) -> Stage:
    """Return the stage of known and novel classes together.

    Of the settings of all stages in `base`, epochs are those of this one. `method` has a recipe;
    `options` go before those of the recipe.
    """
    unlabeled, labeled = task.unlabeled, task.labeled
    # Half of a batch is labeled and no image is in it twice, so few images make it smaller.
    batch = min(int(base.batch_size), len(unlabeled) + min(len(unlabeled), len(labeled)))
    sampler = TwoStreamBatchSampler(labeled, task.label[labeled], unlabeled, batch, base.seed)
    requested = {**RECIPES[method].options, **options, "num_novel_classes": task.num_novel}
    # Queues hold half a batch at a time, of unlabeled images; one image has a queue of one.
    resolved = method_options(method, requested, max(2, len(unlabeled)), max(1, batch // 2))
    config = _stage_config(base, method, sampler, resolved)
    stage = _build_stage(encoder, task, sampler, config, copy.deepcopy(init.backbone))
    heads = heads_of(stage.method)
    if isinstance(heads, Heads) and init.known is not None:
        heads.known.load_state_dict(init.known.state_dict())
    init.heads.init_heads(stage.method)
    return stage


def _stage_config(
    base: TrainConfig, method: str, sampler: TwoStreamBatchSampler, options: Mapping[str, Value]
) -> TrainConfig:
    recipe, epochs = RECIPES[method], base.epochs
    if epochs == "auto":
        # Steps count, not epochs: few images need more passes, but not endlessly many.
        epochs = ceil(recipe.steps / sampler.steps_per_epoch)
        epochs = min(MAX_EPOCHS, max(MIN_EPOCHS, epochs))
    return replace(
        base,
        method=method,
        epochs=epochs,
        batch_size=sampler.batch_size,
        optimizer="sgd",
        lr=recipe.lr,
        weight_decay=1e-4,
        warmup=0.0,
        evaluate_every=max(1, int(epochs) // 5),
        options=options,
    )


def _build_stage(
    encoder: DiscoveryEncoder,
    task: DiscoveryTask,
    sampler: TwoStreamBatchSampler,
    config: TrainConfig,
    backbone: Backbone,
) -> Stage:
    """Return the stage that a resolved configuration describes, before any training."""
    kind = METHODS[config.method]
    with seeded(config.seed, torch.device("cpu")):
        method: Method[Any] = kind(backbone, num_known_classes=task.num_known, **config.options)
    feed = encoder.feed(sampler, kind, task.label)
    method = method.to(encoder.device).to(memory_format=torch.channels_last)
    return Stage(config, method, feed)
