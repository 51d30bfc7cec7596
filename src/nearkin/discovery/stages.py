"""One training stage of a discovery: its recipe, its heads, its batches."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from nearkin.config import TrainConfig
from nearkin.data.batches import BatchLoader
from nearkin.data.rng import seeded
from nearkin.data.samplers import TwoStreamBatchSampler
from nearkin.discovery.features import LAYER_DIM, DiscoveryEncoder, principal_layer, top_features
from nearkin.discovery.task import DiscoveryTask
from nearkin.method import Method
from nearkin.methods import METHODS
from nearkin.metrics.kmeans import compact, constrained_kmeans
from nearkin.networks.branch import Backbone
from nearkin.networks.heads import Heads, rectified_layer
from nearkin.objectives import unit
from nearkin.run.folder import RunFolder
from nearkin.run.options import method_options
from nearkin.run.reporter import Logger
from nearkin.schema import Value
from nearkin.training.fit import Lead, fit, optimizer_for, training_steps
from nearkin.training.health import feature_health
from nearkin.types import UNLABELED

MIN_EPOCHS, MAX_EPOCHS = 10, 200


# docs/discovery.md has the measurements behind these values.
LR: Final = 0.1
STEPS: Final = {"supervised": 600, "ncl": 1000, "simgcd": 1000}
"""The length of a stage that `--epochs auto` aims at, in whole epochs."""
OPTIONS: Final[Mapping[str, Mapping[str, Value]]] = {
    "simgcd": {"dim": 64, "hidden_dim": 256, "entropy_weight": 1.0},
    # The published threshold on similarities fits the authors' features only: here a share of the
    # closest pairs is positive. Hard negatives take four times as long and gain nothing in the
    # mean. The two heads are also trained as one classifier.
    "ncl": {"pseudo_labels": "closest", "num_hard": 0, "joint_weight": 1.0},
}
"""Options that differ from the methods' own."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A method, what it is trained on, and for how long."""

    config: TrainConfig
    method: Method[Any]
    feed: BatchLoader

    def run(self, folder: RunFolder, log: Logger) -> None:
        """Train from the newest checkpoint of the folder to the last step."""
        folder.path.mkdir(parents=True, exist_ok=True)
        fit(self.config, self.method, [self.feed], Lead(folder, log, feature_health(self.feed)))

    def try_out(self, share: float = 1.0) -> None:
        """Train for a share of the steps without writing anything."""
        total = ceil(share * int(self.config.epochs) * self.feed.sampler.steps_per_epoch)
        optimizer, batches = optimizer_for(self.method, self.config), self.feed.load(0, total)
        for _ in training_steps(
            self.config, self.method, optimizer, batches, start=0, total=total
        ):
            pass


class StageInit(NamedTuple):
    """What the last stage starts from.

    Heads over classes start at k-means clusters. A random head gives many of its classes no image,
    and a class without images has no gradient: many classes of few images would be found late or
    never (Han et al. 2019, section 3.1, start at clusters too; measured in docs/discovery.md).
    """

    backbone: Backbone
    features: Float[Tensor, "learned dim"]
    """Of the images to learn from, as the heads take them."""
    cluster: Int64[Tensor, " learned"]  # Their clusters among all classes; labels where known
    known: nn.Module | None = None  # The head of the known classes, where these came before


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages that learn from labels."""

    encoder: DiscoveryEncoder  # What is trained, or below it
    task: DiscoveryTask
    base: TrainConfig  # Settings of all stages; epochs are those of the last one

    def start(self, train: Callable[[Stage], None]) -> StageInit:
        """Return what the last stage starts from, with heads at clusters of the features.

        NCL goes on from the known classes, as in its code and in AutoNovel's. SimGCD has no stage
        of these in its code, and starts at the features themselves, in the directions of their
        principal components; but on features that are no wider than the layer, at a layer that has
        learned the known classes, which found more there (docs/discovery.md). `train` trains it.
        """
        wide = self.encoder.cached.center.shape[1] > LAYER_DIM or not self.encoder.has_layer
        if self.task.method == "simgcd" and wide:
            return self.from_components()
        return self.from_known(train)

    def from_components(self) -> StageInit:
        """Start at the principal components of the frozen features, or at the network as it is."""
        rows, layer = self.task.rows, None
        features = self.encoder.cached.center[torch.from_numpy(rows)]
        if self.encoder.has_layer:
            layer = principal_layer(self.encoder, rows)
            with torch.no_grad():
                features = layer(features)
        return StageInit(self.encoder.backbone(layer), features, self.clusters(features))

    def from_known(self, train: Callable[[Stage], None]) -> StageInit:
        """Start at a random layer, or at the network, that has learned the known classes."""
        stage = self.known()
        train(stage)
        features = top_features(self.encoder, stage.method, self.task.rows)
        backbone, known = stage.method.backbone, stage.method.get_submodule("known")
        return StageInit(backbone, features, self.clusters(features), known)

    def clusters(self, features: Float[Tensor, "learned dim"]) -> Int64[Tensor, " learned"]:
        """Return k-means classes that the images to learn from start in; labels where known.

        Where unlabeled images are disjoint from the known classes, they are clustered alone.
        """
        task, label = self.task, self.task.label[self.task.rows]
        part = label == UNLABELED if task.disjoint else np.ones(len(label), bool)
        first = task.num_known if task.disjoint else 0
        x, count = compact(features)[part].astype(np.float64), task.num_classes - first
        found = constrained_kmeans(x, label[part], count, seed=self.base.seed)
        label[part] = first + found.cluster
        return torch.from_numpy(label)

    def known(self) -> Stage:
        """Return the stage of the known classes alone (AutoNovel's second stage)."""
        rows, nothing = self.task.labeled, np.zeros(0, np.int64)
        batch, seed = min(int(self.base.batch_size), len(rows)), self.base.seed
        sampler = TwoStreamBatchSampler(nothing, nothing, rows, batch, seed)
        layer = None
        if self.encoder.has_layer:
            with seeded(seed, torch.device("cpu")):
                layer = rectified_layer(self.encoder.cached.center.shape[1], LAYER_DIM)
        # --epochs is the length of the last stage.
        config = replace(self.base, method="supervised", epochs="auto", options={})
        return self._stage(config, sampler, self.encoder.backbone(layer))

    def classes(self, init: StageInit, options: Mapping[str, Value]) -> Stage:
        """Return the stage of known and novel classes together; `options` go before `OPTIONS`."""
        task, unlabeled, labeled = self.task, self.task.unlabeled, self.task.labeled
        batch = min(int(self.base.batch_size), task.largest_batch)
        labels, seed = task.label[labeled], self.base.seed
        sampler = TwoStreamBatchSampler(labeled, labels, unlabeled, batch, seed)
        requested = {**OPTIONS[task.method], **options, "num_novel_classes": task.num_novel}
        # Queues hold half a batch at a time, of unlabeled images; one image has a queue of one.
        sizes = max(2, len(unlabeled)), max(1, batch // 2)
        resolved = method_options(task.method, requested, *sizes)
        config = replace(self.base, method=task.method, options=resolved)
        stage = self._stage(config, sampler, copy.deepcopy(init.backbone))
        heads = stage.method.get_submodule("heads")
        if isinstance(heads, Heads) and init.known is not None:
            heads.known.load_state_dict(init.known.state_dict())
        _init_heads(heads, init, task)
        return stage

    def _stage(
        self, config: TrainConfig, sampler: TwoStreamBatchSampler, backbone: Backbone
    ) -> Stage:
        """Return the stage of the method in the settings, before any training."""
        kind, epochs = METHODS[config.method], config.epochs
        if epochs == "auto":
            # Steps count, not epochs: few images need more passes, but not endlessly many.
            epochs = ceil(STEPS[config.method] / sampler.steps_per_epoch)
            epochs = min(MAX_EPOCHS, max(MIN_EPOCHS, epochs))
        config = replace(
            config,
            epochs=epochs,
            batch_size=sampler.batch_size,
            optimizer="sgd",
            lr=LR,
            weight_decay=1e-4,
            warmup=0.0,
            evaluate_every=max(1, int(epochs) // 5),
        )
        num_known = self.task.num_known
        with seeded(config.seed, torch.device("cpu")):
            method: Method[Any] = kind(backbone, num_known_classes=num_known, **config.options)
        feed = self.encoder.feed(sampler, kind, self.task.label)
        method = method.to(self.encoder.device).to(memory_format=torch.channels_last)
        return Stage(config, method, feed)


@torch.no_grad()
def _init_heads(heads: nn.Module, init: StageInit, task: DiscoveryTask) -> None:
    """Set the weights of heads to the means of the clusters."""
    features, cluster = init.features, init.cluster
    if isinstance(heads, Heads):
        # The known head has been trained. The novel one is linear, so it compares directions from
        # the mean of all unlabeled images: features are not negative, and their own directions
        # would be nearly the same.
        unlabeled = torch.from_numpy(task.label[task.rows] == UNLABELED)
        features, novel = features[unlabeled], cluster[unlabeled] - task.num_known
        center = features.mean(dim=0)
        weight = unit(means(features, novel, heads.novel.out_features) - center)
        heads.novel.weight.copy_(weight)
        heads.novel.bias.copy_(-(weight @ center))
    else:
        prototypes = heads.get_parameter("weight")
        prototypes.copy_(means(unit(features), cluster, len(prototypes)))


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
