"""One stage of a discovery: its recipe, its method, and the processes that train it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nearkin.config import DiscoverConfig, TrainConfig, Value
from nearkin.data.batches import Feed
from nearkin.data.order import BatchOrder, Streams
from nearkin.data.rng import seeded
from nearkin.discovery.classifier import apply_layer, heads_of, kmeans_clustering, still
from nearkin.discovery.data import DiscoveryTask, open_discovery_data, without
from nearkin.discovery.features import Trunk, finetuned_encoder
from nearkin.distributed import called, choose_device, company, num_processes, together
from nearkin.errors import DataError
from nearkin.evaluation.embeddings import encode
from nearkin.evaluation.encoder import Encoder
from nearkin.method import Method
from nearkin.methods import METHODS
from nearkin.networks.heads import Heads
from nearkin.objectives import unit
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Logger
from nearkin.run.settings.build import named_backbone
from nearkin.run.settings.options import method_options
from nearkin.training.fit import accompany, fit, optimizer_for, same, steps_of
from nearkin.training.health import health
from nearkin.training.session import run_worker
from nearkin.types import UNKNOWN


@dataclass(frozen=True, eq=False)
class Start:
    """K-means on the features of a network that has learned the known classes.

    Many classes of few images are otherwise found late or never: a random head gives most of
    them no image, and what has no image has no gradient (Han et al. 2019, section 3.1, begin
    at clusters too; measured in docs/discovery.md).
    """

    features: Float[Tensor, "learned dim"]
    """Of the images to learn from."""
    novel: Int64[Tensor, " learned"]
    """Their clusters among the novel classes, from 0; `UNKNOWN` for labeled images."""
    joint: Int64[Tensor, " learned"]
    """Their clusters among all classes."""

    @torch.no_grad()
    def aim(self, method: Method[Any]) -> None:
        """Let a method's heads start at the clusters."""
        heads = heads_of(method)
        device = next(heads.parameters()).device
        if isinstance(heads, Heads):
            rest = self.novel != UNKNOWN
            middle = self.features[rest].mean(dim=0)
            count = heads.novel.out_features
            weight = unit(means(self.features[rest], self.novel[rest], count) - middle)
            heads.novel.weight.copy_(weight.to(device))
            heads.novel.bias.copy_(-(weight @ middle).to(device))
        else:
            prototypes = heads.get_parameter("weight")
            prototypes.copy_(means(unit(self.features), self.joint, len(prototypes)).to(device))


StageInit = tuple[Method[Any], Start | None]
"""What the last stage starts from: a network that knows the known classes, and clusters."""


def begun(
    trunk: Trunk, known: Method[Any], task: DiscoveryTask, seed: int, start: str
) -> StageInit:
    """What the last stage starts from, where its classes start at `clusters` or at `random`."""
    return known, start_of(trunk, known, task, seed) if start == "clusters" else None


def start_of(trunk: Trunk, known: Method[Any], task: DiscoveryTask, seed: int) -> Start:
    """The clusters of the images to learn from.

    Args:
        trunk: What the network stands on.
        known: The known stage's method, trained.
        task: The images.
        seed: Of k-means.
    """
    looks, layer = trunk.seen(known)
    with torch.no_grad():
        features = apply_layer(still(layer), looks.center[torch.from_numpy(task.rows)])
    learned = replace(task, label=task.label[task.rows], rows=np.arange(len(task.rows)))
    arm = kmeans_clustering(features, learned, seed)
    novel = np.where(learned.label == UNKNOWN, arm.novel - task.num_known, UNKNOWN)
    return Start(features, torch.from_numpy(novel), torch.from_numpy(arm.joint))


def means(
    features: Float[Tensor, "n dim"], cluster: Int64[Tensor, " n"], count: int
) -> Float[Tensor, "clusters dim"]:
    """The mean of each cluster; zero for one without rows.

    >>> means(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 2]), 3)
    tensor([[2.],
            [0.],
            [5.]])
    """
    member = torch.nn.functional.one_hot(cluster, count).to(features.dtype)
    return member.T @ features / member.sum(dim=0).clamp(min=1)[:, None]


NOTHING: Final = np.zeros(0, np.int64)
LOOKED_AT: Final = 1000
"""Images whose features tell whether a stage is healthy."""


@dataclass(frozen=True)
class Recipe:
    """How a stage is trained; see docs/discovery.md for how this was chosen."""

    steps: int
    """What `--epochs auto` comes to, in whole epochs."""
    lr: float
    options: Mapping[str, Value] = field(default_factory=dict)
    """Options that differ from the paper's."""
    terms: tuple[str, ...] = ()
    """Metrics that are noted at every step."""


RECIPES: Final[dict[str, Recipe]] = {
    "supervised": Recipe(steps=600, lr=0.1),
    "ncl": Recipe(
        steps=1000,
        lr=0.1,
        options={"pseudo_labels": "closest", "num_hard": 0},
        terms=("positive_rate", "classify", "pairs", "consistency", "known", "novel"),
    ),
    "simgcd": Recipe(
        steps=1000,
        lr=0.1,
        options={"dim": 64, "hidden_dim": 256},
        terms=("distill", "entropy", "classify", "contrast", "class_contrast"),
    ),
}
LEAST_EPOCHS, MOST_EPOCHS = 10, 200


@dataclass(frozen=True, eq=False)
class Stage:
    """One training: by what, how long, and what with."""

    config: TrainConfig
    method: Method[Any]
    feed: Feed
    task: DiscoveryTask
    order: Streams

    def run(self, folder: RunFolder, log: Logger, others: AbstractContextManager[None]) -> None:
        """Train to the last step from where the folder's newest checkpoint stands.

        Args:
            folder: Where checkpoints and metrics go.
            log: Who is told how it goes.
            others: Within it, other processes take the same steps.
        """
        terms, health = RECIPES[self.config.method].terms, Health(self.feed)
        folder.path.mkdir(parents=True, exist_ok=True)
        with others:
            fit(folder, self.config, self.method, self.feed, health, log, terms)

    def try_out(self, share: float = 1.0) -> None:
        """Train without leaving anything on the disk, for a share of the steps."""
        total = ceil(share * int(self.config.epochs) * self.feed.order.steps_per_epoch)
        optimizer, fed = optimizer_for(self.method, self.config), self.feed.between(0, total)
        for _ in steps_of(self.config, self.method, optimizer, fed, start=0, total=total):
            pass


class Health:
    """Whether the features of some images still differ."""

    def __init__(self, feed: Feed) -> None:
        shown = []
        for batch in feed.between(0, feed.order.steps_per_epoch):
            shown.append(batch.views[0])
            if sum(map(len, shown)) >= LOOKED_AT:
                break
        self.shown = torch.cat(shown)

    def look(self, method: Method[Any]) -> dict[str, float]:
        """Measure a method as it stands, leaving it as it was."""
        return health(encode(method.backbone, [self.shown]))


def known_stage(trunk: Trunk, task: DiscoveryTask, base: TrainConfig) -> Stage:
    """The known classes alone (AutoNovel's second stage)."""
    rows = task.labeled
    if len(rows) < 2:
        raise DataError(f"{len(rows)} labeled images to learn from; give more of them")
    order = Streams(NOTHING, rows, min(int(base.batch_size), len(rows)), base.seed)
    config = _config(replace(base, lr_milestones=""), "supervised", order, {})
    return stage_of(trunk, task, order, config)


def class_stage(
    trunk: Trunk,
    task: DiscoveryTask,
    base: TrainConfig,
    before: Method[Any],
    method: str,
    options: Mapping[str, Value],
    start: Start | None = None,
) -> Stage:
    """Known and novel classes together, starting from a network that knows the known ones.

    Args:
        trunk: What the network stands on.
        task: The images.
        base: What all stages have in common; its epochs and milestones are those of this one.
        before: The known stage's method.
        method: `ncl` or `simgcd`.
        options: Its options, over those of its recipe.
        start: Clusters that its heads start at, instead of at random.
    """
    rows, labeled = task.unlabeled, task.labeled
    batch = min(int(base.batch_size), len(rows) + min(len(rows), len(labeled)))
    if batch < 2:
        raise DataError(
            f"{len(rows)} unlabeled and {len(labeled)} labeled images do not make a batch of "
            "two; give more images"
        )
    order = Streams(labeled, rows, batch, base.seed)
    asked = dict(RECIPES[method].options) | dict(options) | {"num_novel_classes": task.num_novel}
    images, batch = max(2, len(rows)), max(1, batch // 2)  # one image has a queue of one
    config = _config(base, method, order, method_options(method, asked, images, batch))
    stage = stage_of(trunk, task, order, config)
    stage.method.backbone.load_state_dict(before.backbone.state_dict())
    if start is not None:
        start.aim(stage.method)
    return stage


def _config(
    base: TrainConfig, method: str, order: BatchOrder, options: Mapping[str, Value]
) -> TrainConfig:
    recipe, epochs = RECIPES[method], base.epochs
    if epochs == "auto":
        wanted = ceil(recipe.steps / order.steps_per_epoch)
        epochs = min(MOST_EPOCHS, max(LEAST_EPOCHS, wanted))
    return replace(
        base,
        method=method,
        epochs=epochs,
        batch_size=order.batch_size,
        optimizer="sgd",
        lr=recipe.lr,
        weight_decay=1e-4,
        warmup=0.0,
        evaluate_every=max(1, int(epochs) // 5),
        options=options,
    )


def stage_of(trunk: Trunk, task: DiscoveryTask, order: Streams, config: TrainConfig) -> Stage:
    """The training that a configuration describes, as it is before anything is learned."""
    kind = METHODS[config.method]
    backbone = trunk.backbone(config.seed)
    with seeded(config.seed, torch.device("cpu")):
        method: Method[Any] = kind(backbone, num_known_classes=task.num_known, **config.options)
    feed = trunk.feed(order, kind, task.label)
    method = method.to(trunk.device).to(memory_format=torch.channels_last)
    return Stage(config, method, feed, task, order)


def follow(data: Any) -> None:
    """What all processes but the first do: one training after another, as they are called."""
    with company(1, follow):
        while training := called(run_worker, follow_stage):
            training(data)


@contextmanager
def beside(stage: Stage, config: DiscoverConfig, bad: Iterable[int]) -> Iterator[None]:
    """Have the others train a stage as well within a `with` block, where they can share it.

    The result does not depend on it: a stage whose images are too few for a batch of all
    processes is trained by the first alone, as it would be without the others.

    Args:
        stage: Of which the first has all.
        config: Settings of the discovery.
        bad: Rows of images that turned out unreadable.
    """
    shared = config.train_layers != "top"
    if not shared or stage.order.batch_size % num_processes(config.devices):
        yield
        return
    task, order = stage.task, stage.order
    rows = {"label": task.label, "rows": task.rows}
    rows |= {"labeled": order.labeled, "unlabeled": order.unlabeled}
    with together(config.devices, follow_stage):
        same(
            {name: torch.from_numpy(each) for name, each in rows.items()}
            | {"bad": list(bad), "classes": [task.num_known, task.num_novel]}
            | {"settings": json.dumps([asdict(config), asdict(stage.config)])}
        )
        yield


def follow_stage(data: Any) -> None:
    """What all processes but the first do in a stage: its steps, with their part of each batch."""
    with together(1, follow_stage):
        log = same({})
        rows = {name: each.numpy() for name, each in log.items() if torch.is_tensor(each)}
        asked, settings = json.loads(log["settings"])
        config, training = DiscoverConfig(**asked), TrainConfig(**settings)
        images = without(open_discovery_data(data, config), set(log["bad"])).images
        task = DiscoveryTask(rows["label"], rows["rows"], *log["classes"])
        batch, seed = int(training.batch_size), training.seed
        order = Streams(rows["labeled"], rows["unlabeled"], batch, seed)
        encoder = Encoder(named_backbone(training, None), int(training.image_size), {})
        trunk = finetuned_encoder(encoder, images, config, training, choose_device(config.device))
        stage = stage_of(trunk, task, order, training)
        accompany(stage.config, stage.method, stage.feed)
