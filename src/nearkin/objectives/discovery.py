"""The terms of novel class discovery (Zhong et al. 2021): pairs, consistency, neighborhoods."""

import math
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nearkin.objectives.contrast import unit
from nearkin.objectives.numerics import full_precision
from nearkin.types import UNLABELED, checked

EPSILON: Final = 1e-7
"""Keeps the logarithm of an impossible agreement finite."""


@full_precision
def close(features: Float[Tensor, "batch dim"], threshold: float) -> Bool[Tensor, "batch batch"]:
    """Which pairs of images have a cosine similarity above the threshold (eq. 2).

    >>> close(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), threshold=0.9).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    z = unit(features)
    return z @ z.T > threshold


@full_precision
def closest(features: Float[Tensor, "batch dim"], rate: float) -> Bool[Tensor, "batch batch"]:
    """Which pairs are the `rate` of a batch's pairs with the largest cosine similarity.

    A threshold fits one network only; a share of pairs means the same in all of them. Every image
    makes a pair with itself, which is not counted. Equal similarities are all in or all out.

    >>> closest(torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [1.0, 1.0]]), rate=1 / 6).int()
    tensor([[1, 1, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 1, 0],
            [0, 0, 0, 1]], dtype=torch.int32)
    """
    z = unit(features)
    similarity = z @ z.T
    row, column = torch.triu_indices(len(z), len(z), offset=1, device=z.device)
    ranked = similarity[row, column].sort(descending=True).values
    count = round(rate * len(ranked))
    least = ranked[count - 1] if count else torch.inf
    above = (similarity >= least).triu(diagonal=1)  # rounding may tell a pair from its mirror
    return (above | above.T).fill_diagonal_(True)


@full_precision
def same_ranks(features: Float[Tensor, "batch dim"], top: int) -> Bool[Tensor, "batch batch"]:
    """Which pairs have their `top` largest features in common, in any order.

    Han et al. 2020 (AutoNovel), arXiv:2002.05714, eq. 4.

    >>> same_ranks(torch.tensor([[9.0, 8.0, 0.0], [8.0, 9.0, 1.0], [9.0, 0.0, 8.0]]), top=2).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    largest = features.topk(top, dim=1).indices
    chosen = torch.zeros_like(features).scatter(1, largest, 1.0)
    return chosen @ chosen.T == top


@full_precision
def pairwise_bce(
    a: Float[Tensor, "batch classes"],
    b: Float[Tensor, "batch classes"],
    same: Bool[Tensor, "batch batch"],
) -> Float[Tensor, ""]:
    """Binary cross-entropy of two images being of one class, over all ordered pairs (eq. 3).

    `a` and `b` are class probabilities of the two views, and `same` says which pairs are held to
    be of one class. The mean over the pairs, or zero where there are none.

    >>> p = torch.eye(2)
    >>> pairwise_bce(p, p, torch.eye(2).bool()).abs() < 1e-6
    tensor(True)
    """
    agreement = a @ b.T
    likelihood = torch.where(same, agreement, 1 - agreement)
    # rounded probabilities can agree by more than one
    return -(likelihood.clamp(min=0) + EPSILON).log().sum() / max(same.numel(), 1)


@full_precision
def consistency(
    a: Float[Tensor, "batch classes"], b: Float[Tensor, "batch classes"]
) -> Float[Tensor, ""]:
    """Mean squared difference of two views' class probabilities (eq. 4); zero for no images."""
    return (a - b).square().sum() / max(a.numel(), 1)


@full_precision
def classify(
    logits: Float[Tensor, "batch classes"], label: Int[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """Mean cross-entropy of the images whose label is not `UNLABELED`; zero where there are none.

    The logits of the known classes come first.

    >>> classify(torch.tensor([[2.0, 0.0, 0.0], [9.0, 9.0, 9.0]]), torch.tensor([0, UNLABELED]))
    tensor(0.2395)
    """
    total = F.cross_entropy(logits, label, ignore_index=UNLABELED, reduction="sum")
    return total / (label != UNLABELED).sum().clamp(min=1)


@full_precision
def separation(
    logits: Float[Tensor, "batch classes"], known: Bool[Tensor, " batch"], num_known: int
) -> Float[Tensor, ""]:
    """Mean cross-entropy of being of any known class, or of any novel one; zero for no images.

    The logits of the `num_known` known classes come first. Cross-entropy over all classes is this
    one and the cross-entropy among the classes of the image's own kind.

    >>> logits = torch.tensor([[3.0, 0.0, 0.0], [3.0, 3.0, 0.0]])
    >>> separation(logits, known=torch.tensor([True, False]), num_known=1)
    tensor(0.3820)
    """
    kinds = [part.logsumexp(dim=1) for part in logits.tensor_split([num_known], dim=1)]
    total = F.cross_entropy(torch.stack(kinds, dim=1), (~known).long(), reduction="sum")
    return total / max(len(known), 1)


@full_precision
def mean_entropy(probabilities: Float[Tensor, "batch classes"]) -> Float[Tensor, ""]:
    """Entropy of a batch's mean prediction, in nats (Wen et al. 2023, section 4).

    From 0, where all images are given to one class, to `log(classes)`, where all classes get as
    much, however sure each prediction is.

    >>> mean_entropy(torch.eye(4))  # log(4)
    tensor(1.3863)
    """
    mean = probabilities.mean(dim=0)
    return -(mean * mean.clamp(min=torch.finfo(mean.dtype).tiny).log()).sum()


def ramp(progress: float, until: float) -> float:
    """The rise from `exp(-5)` to 1 of the weight of consistency (section 3.1).

    >>> [round(ramp(progress, until=0.5), 4) for progress in (0.0, 0.25, 0.5, 1.0)]
    [0.0067, 0.2865, 1.0, 1.0]
    """
    missing = 1 - min(progress / until, 1.0) if until > 0 else 0.0
    return math.exp(-5 * missing**2)


@checked
def neighborhood_targets(
    logits: Float[Tensor, "batch matches"],
    usable: Bool[Tensor, "batch keys"],
    *,
    own_weight: float,
    num_neighbors: int,
    own_competes: bool = False,
) -> Float[Tensor, "batch matches"]:
    """`own_weight` on the query's own key, the rest evenly on its nearest neighbors (eq. 5 to 7).

    Args:
        logits: Of each query against its own key, then against the queue, as from `look_up`.
        usable: Which entries of the queue may be neighbors.
        own_weight: The weight alpha of the own key. Unless `own_competes`, the own key takes all
            where there is no neighbor.
        num_neighbors: Maximum number of neighbors.
        own_competes: Whether the own key, if it is among the nearest, takes one of the neighbors'
            places, and the weight of that place is lost, as in the official code. Where there is
            no neighbor, all but alpha is lost.
    """
    own = torch.full_like(usable[:, :1], own_competes)
    candidates = logits.masked_fill(~torch.cat([own, usable], dim=1), -torch.inf)
    nearest = candidates.topk(min(num_neighbors, usable.shape[1]), dim=1)
    exists = nearest.values.isfinite().to(logits.dtype)
    share = exists / exists.sum(dim=1, keepdim=True).clamp(min=1)
    targets = torch.zeros_like(logits).scatter(1, nearest.indices, (1 - own_weight) * share)
    shared = exists.amax(dim=1)  # 1 where there is a neighbor, else 0
    targets[:, 0] = own_weight * shared + (1 - shared)
    return targets


@checked
def class_targets(
    logits: Float[Tensor, "batch matches"],
    label: Int[Tensor, " batch"],
    labels: Int[Tensor, " keys"],
    usable: Bool[Tensor, "batch keys"],
) -> Float[Tensor, "batch matches"]:
    """The same weight on the query's own key and on every usable key of its class (eq. 8).

    `label` has the class of each query, `labels` that of each entry of the queue. For the others
    see `neighborhood_targets`.

    >>> usable = torch.tensor([[True, True, False]])
    >>> class_targets(torch.zeros(1, 4), torch.tensor([7]), torch.tensor([7, 8, 7]), usable)
    tensor([[0.5000, 0.5000, 0.0000, 0.0000]])
    """
    positive = (label[:, None] == labels) & usable
    positive = torch.cat([torch.ones_like(label, dtype=torch.bool)[:, None], positive], dim=1)
    return positive.to(logits.dtype) / positive.sum(dim=1, keepdim=True)


@full_precision
def mixed_negatives(
    query: Float[Tensor, "batch dim"],
    novel: Float[Tensor, "novel dim"],
    known: Float[Tensor, "known dim"],
    easy: Int[Tensor, "batch easy"],
    drawn: Int[Tensor, "batch draws easy"],
    mix: Float[Tensor, "*mixes"],
    num_hard: int,
) -> Float[Tensor, "batch hard"]:
    """Similarities of queries to the hardest mixtures of novel and known keys (eq. 9 to 11).

    A mixture `mix e + (1 - mix) l` of a key `e` least like the query and a key `l` of a known
    class is certainly of another class. None is built: products of queries and keys, which a step
    needs anyway, give their similarities.

    Args:
        query: Unit vectors.
        novel: The queue of images without a class.
        known: The queue of images of known classes.
        easy: For each query, the novel keys to mix.
        drawn: For each query and draw, the known key that each of them is mixed with.
        mix: Shares of the novel key, broadcast against (batch, draws, easy, mixtures).
        num_hard: How many are kept, the most similar to the query.
    """
    overlap = (novel @ known.T)[easy[:, None, :], drawn][..., None]
    to_novel = (query @ novel.T).gather(1, easy)[:, None, :, None]
    to_known = (query @ known.T).gather(1, drawn.flatten(1)).view_as(drawn)[..., None]
    novel_norm = novel.square().sum(dim=1)[easy][:, None, :, None]
    known_norm = known.square().sum(dim=1)[drawn][..., None]
    rest = 1 - mix
    square = mix**2 * novel_norm + rest**2 * known_norm + 2 * mix * rest * overlap
    least = 16 * torch.finfo(query.dtype).eps  # below, opposite keys leave nothing but rounding
    mixtures = (mix * to_novel + rest * to_known) / square.clamp(min=least).sqrt()
    candidates = mixtures.flatten(1)
    return candidates.topk(min(num_hard, candidates.shape[1]), dim=1).values
