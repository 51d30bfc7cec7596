"""NCL: discover new classes in unlabeled images with the help of labeled ones.

Zhong, Fini, Roy, Luo, Ricci, Sebe. Neighborhood contrastive learning for novel class
discovery. CVPR 2021, arXiv:2106.10731.

    loss  = l_ce + l_bce + w l_mse + b l_scl + a l_ncl + c l_j
    l_ce  = -log P(class)                                          (eq. 1)
    s_ij  = 1 if cos(h_i, h_j) > threshold, else 0                 (eq. 2)
    l_bce = -mean_ij (s log x + (1 - s) log(1 - x)), x = p_i.p'_j  (eq. 3)
    l_mse = mean (p - p')^2, the two heads added                   (eq. 4)
    l_ncl = -sum_j target_j log softmax_j(q.k_j / t)               (eq. 5 to 7)
            target: alpha on the own key, the rest evenly on K neighbors
    l_scl = the same, target: evenly on the own key and its class  (eq. 8)
    hard negatives of l_ncl: unit(mu e + (1 - mu) l)               (eq. 9 to 11)

    l_j   = -log sum P'' of the classes of the image's kind, known or novel

Labeled images make up l_ce and l_scl, unlabeled ones l_bce and l_ncl. l_j is not in the paper: it
makes both heads one classifier, P'' being a softmax over the classes of both. h, p and q are
features, class probabilities and unit features of view 1, p' are probabilities of view 2, and the
own key is view 2's unit features; e is a key least like q and l one of a known class. a, b and c
are `novel_weight`, `known_weight` and `joint_weight`, w rises to `consistency_weight`, alpha is
`own_weight`, K at most `num_neighbors`, t is `temperature`.

    known classes: backbone -> Linear
    novel classes: backbone -> Linear

Queries: unit features of view 1. Keys: unit features of view 2, the queue of the image's part,
and mixtures of both queues.
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from msgspec import Meta
from torch import Tensor, nn
from typing_extensions import override

from nearkin.errors import UsageError
from nearkin.memory import KeyUpdate, Queue, same_image_mask
from nearkin.method import Defaults, HealthBounds, Method
from nearkin.networks.branch import Branch
from nearkin.networks.heads import Heads
from nearkin.objectives import (
    class_targets,
    classify,
    close,
    closest,
    consistency,
    look_up,
    mixed_negatives,
    neighborhood_targets,
    pairwise_bce,
    ramp,
    same_ranks,
    separation,
    soft_match,
    unit,
)
from nearkin.schema import Count, CountOrZero, Fraction, QueueSize, Temperature, Weight
from nearkin.types import UNLABELED, Batch, Encoded, Step

Rows = Float[Tensor, "n f"]
Index = Int[Tensor, " n"]


class NCL(Method[KeyUpdate]):
    """Neighbors in the queue are of one class; mixtures with known classes are of another.

    Images without a label are taken to be of novel classes. Either part of a batch may be empty.

    Args:
        num_known_classes: Number of known classes, which have labels.
        num_novel_classes: Number of novel classes.
        queue_size: Number of keys in each of the two queues.
        num_neighbors: Number of nearest keys taken as positives; at most half those of a class.
        own_weight: Weight alpha of the query's other view; the neighbors share the rest.
        targets: Weights by the `paper`, or as in the `official` code, where the other view takes
            the place of a neighbor and its weight is lost.
        pseudo_labels: Which unlabeled images are of one class: `close` ones, the `closest` pairs
            of the batch, or those of equal `ranks` (AutoNovel).
        threshold: Cosine similarity above which features are close.
        positive_rate: Share of the pairs of a batch that are positive, for `closest`.
        top_ranks: Number of largest features that must be the same, for `ranks`.
        num_easy: Number of least similar novel keys to mix with known keys. The official code has
            50 with five novel classes, 400 with more.
        num_mixes: Number of mixtures of each of them.
        num_hard: Number of hard negatives: the most similar mixtures. 0 means none.
        mix: Share of the novel key: one and two `thirds` (official code), or `uniform`.
        hard_from: Share of training after which hard negatives are added.
        novel_weight: Weight of the contrastive loss of unlabeled images.
        novel_from: Share of training after which that loss is added; the first epoch's end in the
            official code.
        known_weight: Weight of the contrastive loss of labeled images.
        joint_weight: Weight of telling known classes from novel ones. The paper has no such term:
            which head an image is for is known there.
        consistency_weight: Weight of the consistency of the views, after it has risen.
        consistency_until: Share of training in which that weight rises.
        temperature: Softmax temperature.
    """

    defaults = Defaults(augment="ncl", augment_small="ncl_cifar")
    health_bounds = HealthBounds(min_rank=0.11, min_std=0.35, max_cosine=0.72)
    uses_labels = True
    metrics = ("positive_rate", "classify", "pairs", "consistency", "known", "novel")

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_known_classes: int,
        num_novel_classes: Count = 5,
        queue_size: QueueSize = 2000,
        num_neighbors: Count = 200,
        own_weight: Fraction = 0.2,
        targets: Literal["paper", "official"] = "paper",
        pseudo_labels: Literal["close", "closest", "ranks"] = "close",
        threshold: Annotated[float, Meta(ge=-1, le=1)] = 0.95,
        positive_rate: Fraction = 0.1,
        top_ranks: Count = 5,
        num_easy: Count = 50,
        num_mixes: Count = 5,
        num_hard: CountOrZero = 400,
        mix: Literal["thirds", "uniform"] = "thirds",
        hard_from: Fraction = 0.015,
        novel_weight: Weight = 1.0,
        novel_from: Fraction = 0.0,
        known_weight: Weight = 0.1,
        joint_weight: Weight = 0.0,
        consistency_weight: Weight = 5.0,
        consistency_until: Fraction = 0.25,
        temperature: Temperature = 0.05,
    ) -> None:
        super().__init__()
        self.num_neighbors, self.own_weight, self.targets = num_neighbors, own_weight, targets
        self.pseudo_labels = pseudo_labels
        self.threshold, self.positive_rate, self.top_ranks = threshold, positive_rate, top_ranks
        self.num_easy, self.num_mixes, self.num_hard = num_easy, num_mixes, num_hard
        self.mix, self.hard_from, self.temperature = mix, hard_from, temperature
        self.novel_weight, self.known_weight = novel_weight, known_weight
        self.novel_from, self.joint_weight = novel_from, joint_weight
        self.consistency_weight, self.consistency_until = consistency_weight, consistency_until
        self.online = Branch(backbone)
        features = self.backbone.feature_dim
        if pseudo_labels == "ranks" and top_ranks > features:
            raise UsageError(
                f"--top-ranks {top_ranks} is more than the {features} features of "
                f"{self.backbone.name}; give at most that"
            )
        self.heads = Heads(features, num_known_classes, num_novel_classes)
        self.known_queue = Queue(queue_size, features, labeled=True)
        self.novel_queue = Queue(queue_size, features)

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[KeyUpdate]:
        (h1, h2), index, label = encoded, batch.index, batch.label
        query, key = unit(h1), unit(h2.detach())
        known = label != UNLABELED
        novel1, novel2 = (self.heads.novel(h).softmax(dim=1) for h in (h1, h2))
        known1, known2 = (self.heads.known(h).softmax(dim=1) for h in (h1, h2))
        same = self.same_class(h1[~known].detach())
        ramped = self.consistency_weight * ramp(progress, self.consistency_until)
        losses = {
            "classify": classify(self.heads.known(h1[known]), label[known]),
            "pairs": pairwise_bce(novel1[~known], novel2[~known], same),
            "consistency": ramped * (consistency(known1, known2) + consistency(novel1, novel2)),
            "known": self.known_weight
            * self.contrast_known(query[known], key[known], index[known], label[known]),
            "novel": (self.novel_weight if progress >= self.novel_from else 0.0)
            * self.contrast_novel(query[~known], key[~known], index[~known], progress),
            "joint": self.joint_weight
            * separation(self.heads(h1), known, self.heads.known.out_features),
        }
        others = max(len(same) * (len(same) - 1), 1)
        metrics = {"positive_rate": same.float().fill_diagonal_(0).sum() / others}
        metrics |= {name: loss.detach() for name, loss in losses.items()}
        total = torch.stack(list(losses.values())).sum()
        return Step(total, KeyUpdate(index, query.detach(), label), metrics)

    @override
    def commit(self, memo: KeyUpdate, progress: float, /) -> None:
        """The embeddings of first views enter the queue of their part, with the class if known."""
        images, keys, label = memo
        assert label is not None
        known = label != UNLABELED
        self.known_queue.enqueue(keys[known], images[known], label[known])
        self.novel_queue.enqueue(keys[~known], images[~known])

    def same_class(self, features: Rows) -> Bool[Tensor, "n n"]:
        """Pseudo-labels: which pairs are held to be of one class."""
        if self.pseudo_labels == "ranks":
            return same_ranks(features, self.top_ranks)
        if self.pseudo_labels == "closest":
            return closest(features, self.positive_rate)
        return close(features, self.threshold)

    def contrast_known(
        self, query: Rows, key: Rows, index: Index, label: Index
    ) -> Float[Tensor, ""]:
        """The other view and all queued images of the class are positives, equally (eq. 8)."""
        queue = self.known_queue
        logits, usable = self.against(queue, query, key, index)
        return soft_match(logits, class_targets(logits, label, queue.label, usable))

    def contrast_novel(
        self, query: Rows, key: Rows, index: Index, progress: float
    ) -> Float[Tensor, ""]:
        """The other view and the nearest queued images are positives (eq. 5 to 7)."""
        logits, usable = self.against(self.novel_queue, query, key, index)
        most = int(self.novel_queue.filled.sum()) // (2 * self.heads.novel.out_features)
        targets = neighborhood_targets(
            logits.detach(),
            usable,
            own_weight=self.own_weight,
            num_neighbors=max(1, min(self.num_neighbors, most)),
            own_competes=self.targets == "official",
        )
        if self.num_hard and progress >= self.hard_from:
            hard = self.hard_negatives(query, usable) / self.temperature
            logits, targets = torch.cat([logits, hard], 1), F.pad(targets, (0, hard.shape[1]))
        return soft_match(logits, targets)

    def against(
        self, queue: Queue, query: Rows, key: Rows, index: Index
    ) -> tuple[Float[Tensor, "n matches"], Bool[Tensor, "n keys"]]:
        """Logits against the own key and a queue, and which entries of the queue count."""
        usable = queue.filled & ~same_image_mask(index, queue.index)
        logits = look_up(query, queue.keys, self.temperature, own=key)
        least = torch.finfo(logits.dtype).min / 2
        return logits.masked_fill(~F.pad(usable, (1, 0), value=True), least), usable

    def hard_negatives(
        self, query: Rows, usable: Bool[Tensor, "n keys"]
    ) -> Float[Tensor, "n hard"]:
        """Similarities to known keys mixed into the novel ones least like the query (eq. 9)."""
        novel, known = self.novel_queue.keys, self.known_queue.keys[self.known_queue.filled]
        count = min(self.num_easy, int(usable.sum(dim=1).min()) if len(usable) else 0, len(known))
        with torch.no_grad():
            unlike = (query @ novel.T).masked_fill(~usable, torch.inf)
            easy = unlike.topk(count, dim=1, largest=False).indices
            chance = torch.rand(len(query), self.num_mixes, len(known), device=query.device)
            drawn = chance.topk(count, dim=2).indices
            shares = torch.arange(1, 3, dtype=query.dtype, device=query.device) / 3
            if self.mix == "uniform":
                shares = torch.rand(*drawn.shape, 1, dtype=query.dtype, device=query.device)
        return mixed_negatives(query, novel, known, easy, drawn, shares, self.num_hard)
