"""The forms of matching a query against a dictionary of keys.

Each is written plainly, from a matrix of logits: that is the reference. Where this matrix is large
and slow, `nearkin.objectives.fused` gives the same numbers without it.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nearkin.objectives import fused
from nearkin.objectives.numerics import full_precision, mean_over_rows
from nearkin.types import UNLABELED

Temperature = float | Float[Tensor, ""]
"""What similarities are divided by; a tensor may learn."""

MIN_LENGTH: Final = 1e-6
"""Vectors shorter than this have no reliable direction: `unit` leaves them shorter than one."""


@full_precision
def unit(x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """Scale each vector to length one, or by `1 / MIN_LENGTH` if it is shorter than `MIN_LENGTH`.

    So the gradient near zero, which is one over the length, is held at `1 / MIN_LENGTH`. Squares
    cannot overflow or vanish.

    >>> unit(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    scaled = x / largest.clamp(min=MIN_LENGTH)
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / torch.where(largest < MIN_LENGTH, length.clamp(min=1), length)


@full_precision
def look_up(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "keys dim"],
    temperature: Temperature,
    own: Float[Tensor, "batch dim"] | None = None,
) -> Float[Tensor, "batch matches"]:
    """Return the logits of each query against a dictionary, after its `own` key if it has one.

    >>> query, keys = torch.eye(2), torch.tensor([[0.0, 1.0]])
    >>> look_up(query, keys, temperature=0.5, own=query)
    tensor([[2., 0.],
            [2., 2.]])
    """
    logits = query @ keys.T
    if own is not None:
        logits = torch.cat([(query * own).sum(dim=1, keepdim=True), logits], dim=1)
    return logits / temperature


def masked_logsumexp(
    logits: Float[Tensor, "batch keys"], ignored: Bool[Tensor, "batch keys"] | None = None
) -> Float[Tensor, " batch"]:
    """Return the logarithm of the sum of exponentials of the logits that are not ignored."""
    if ignored is not None:
        # Not -inf: the logsumexp of nothing but -inf has no gradient.
        logits = logits.masked_fill(ignored, torch.finfo(logits.dtype).min / 2)
    return logits.logsumexp(dim=1)


def infonce_from_lse(
    positive: Float[Tensor, " batch"], total: Float[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """Return the mean InfoNCE, from positive logits and the logsumexp of the negative ones.

    With `d = total - positive` it is `log(1 + exp(d))`. A softmax over all of them would
    subtract two numbers that agree in every digit once the positive wins by far.
    """
    behind = total - positive
    return torch.logaddexp(behind, torch.zeros_like(behind)).mean()


def _contrast(
    query: Tensor,
    key: Tensor,
    negatives: Tensor,
    temperature: Temperature,
    ignored: Tensor | None = None,
    own: Sequence[int] = (),
) -> Tensor:
    """Return the InfoNCE of queries; without negatives at `own`, see `fused.strip_info_nce`."""
    if isinstance(temperature, Tensor):  # it may learn, and no fused form has its gradient
        query, temperature = query / temperature, 1.0
    if fused.should_fuse(query, negatives):
        return fused.strip_info_nce(query, key, negatives, temperature, ignored, own)
    logits = look_up(query, negatives, temperature)
    for column in own:
        logits.diagonal(column).fill_(torch.finfo(logits.dtype).min / 2)
    positive = (query * key).sum(dim=1) / temperature
    return infonce_from_lse(positive, masked_logsumexp(logits, ignored))


@full_precision
def info_nce(
    query: Float[Tensor, "batch dim"],
    key: Float[Tensor, "batch dim"],
    negatives: Float[Tensor, "keys dim"],
    temperature: Temperature,
    same: Bool[Tensor, "batch keys"] | None = None,
) -> Float[Tensor, ""]:
    """Find the query's own key among shared negatives (He et al. 2020, eq. 1).

    Args:
        query: Unit vectors.
        key: The positive of each query.
        negatives: A dictionary shared by all queries.
        temperature: Divides the similarities; above 0.
        same: Which negatives show the query's own image; they are left out.

    Returns:
        The mean over the queries, between 0 and `log(1 + keys) + 2 / temperature`.

    >>> q = torch.tensor([[1.0, 0.0]])
    >>> info_nce(q, q, -q, temperature=1.0)  # log(1 + exp(-2))
    tensor(0.1269)
    """

    def term(rows: slice) -> Tensor:
        q, k, ignored = query[rows], key[rows], None if same is None else same[rows]
        if isinstance(temperature, Tensor) or not fused.should_attend(q, negatives, temperature):
            return _contrast(q, k, negatives, temperature, ignored)
        total = fused.dictionary_logsumexp(q, negatives, temperature, ignored)
        return infonce_from_lse((q * k).sum(dim=1) / temperature, total)

    return mean_over_rows(term, len(query))


@full_precision
def in_batch(
    query: Float[Tensor, "batch dim"], key: Float[Tensor, "batch dim"], temperature: Temperature
) -> Float[Tensor, ""]:
    """Find the query's own key among the keys of the batch (He et al. 2020, figure 2a).

    The cross-view InfoNCE: `N` terms, one direction, no negatives from the query's own view. The
    positive of each query is a negative of all others.

    >>> in_batch(torch.eye(2), torch.eye(2), temperature=1.0)  # log(1 + exp(-1))
    tensor(0.3133)
    """

    def term(rows: slice) -> Tensor:
        first = rows.start or 0  # the key of the first query
        return _contrast(query[rows], key[rows], key, temperature, own=[first])

    return mean_over_rows(term, len(query))


@full_precision
def nt_xent(
    a: Float[Tensor, "batch dim"], b: Float[Tensor, "batch dim"], temperature: Temperature
) -> Float[Tensor, ""]:
    """Find each view's other view among all 2N - 1 others (Chen et al. 2020, eq. 1).

    `a` and `b` are the two views of each image. The mean is over all 2N, and `log(2N - 1)` where
    all embeddings are alike.

    >>> nt_xent(torch.eye(2), torch.eye(2), temperature=1.0)  # log(1 + 2 exp(-1))
    tensor(0.5514)
    """
    views = torch.cat([a, b])

    def term(rows: slice) -> Tensor:
        first = rows.start or 0
        own = [first, first + len(a)]  # neither itself nor its partner is a negative
        forward = _contrast(a[rows], b[rows], views, temperature, own=own)
        backward = _contrast(b[rows], a[rows], views, temperature, own=own)
        return torch.add(forward, backward) / 2

    return mean_over_rows(term, len(a))


@full_precision
def sup_con(
    a: Float[Tensor, "batch dim"],
    b: Float[Tensor, "batch dim"],
    label: Int[Tensor, " batch"],
    temperature: Temperature,
) -> Float[Tensor, ""]:
    """Find all views of the same class among all 2N - 1 others (Khosla et al. 2020, eq. 2).

    Supervised contrastive learning. arXiv:2004.11362. `a` and `b` are the two views of each image.
    Images whose label is `UNLABELED` take no part. Where no two labels are the same, it is
    `nt_xent`; where there is none, it is zero.

    >>> sup_con(torch.eye(2), torch.eye(2), torch.tensor([7, 7]), temperature=1.0)
    tensor(1.2181)
    """
    z, labels = torch.cat([a, b]), label.repeat(2)
    views = torch.arange(len(z), device=z.device)
    labeled = label != UNLABELED

    def term(rows: slice) -> Tensor:
        queries = views.view(2, -1)[:, rows].flatten()
        # Masks, and not the labeled rows: their number would be asked of a GPU.
        apart = (queries[:, None] == views) | ~labeled.repeat(2)
        logits = look_up(z[queries], z, temperature)
        positive = ((labels[queries, None] == labels) & ~apart).to(z.dtype)
        target = positive / positive.sum(dim=1, keepdim=True).clamp(min=1)
        return soft_match(logits.masked_fill(apart, torch.finfo(z.dtype).min / 2), target)

    return mean_over_rows(term, len(label)) * len(label) / labeled.sum().clamp(min=1)


@full_precision
def soft_match(
    logits: Float[Tensor, "batch matches"], target: Float[Tensor, "batch matches"]
) -> Float[Tensor, ""]:
    """The equation itself: cross-entropy of a softmax with a soft target, summed over matches.

    Returns:
        The mean over the batch, or zero where the batch is empty.

    >>> soft_match(torch.zeros(1, 4), torch.tensor([[0.5, 0.5, 0.0, 0.0]]))  # log(4)
    tensor(1.3863)
    """
    return -(target * logits.log_softmax(dim=1)).sum() / max(len(logits), 1)


@full_precision
def relational_distillation(
    student: Float[Tensor, "batch dim"],
    teacher: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "keys dim"],
    student_temperature: float,
    teacher_temperature: float,
) -> Float[Tensor, ""]:
    """See a dictionary of the teacher's keys as the teacher does (Fang et al. 2021, eq. 3 to 5).

    Self-supervised distillation for visual representation. arXiv:2101.04731. The cross-entropy of
    two softmaxes over similarities with the same keys: the teacher's embedding of the image
    itself, and the dictionary. No gradient reaches teacher or keys.

    Args:
        student: The student's embeddings, unit vectors.
        teacher: The teacher's embeddings of the same views, unit vectors.
        keys: The teacher's embeddings of other images, unit vectors.
        student_temperature: Divides the student's similarities; above 0.
        teacher_temperature: Divides the teacher's; smaller, so that they are sharper.

    Returns:
        The mean over the batch, at least the entropy of the teacher's softmax.

    >>> z, keys = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    >>> relational_distillation(z, z, keys, 1.0, 0.01)  # log(1 + exp(-1))
    tensor(0.3133)
    """
    teacher, keys = teacher.detach(), keys.detach()

    def term(rows: slice) -> Tensor:
        own = teacher[rows]
        target = look_up(own, keys, teacher_temperature, own).softmax(dim=1)
        return soft_match(look_up(student[rows], keys, student_temperature, own), target)

    return mean_over_rows(term, len(student))


def swapped_match(
    logits: Sequence[Float[Tensor, "batch matches"]],
    targets: Sequence[Float[Tensor, "batch matches"]],
) -> Float[Tensor, ""]:
    """Match each view with the target of every other view (Caron et al. 2020, eq. 2 and 6).

    `logits` are those of all views, `targets` the soft targets of the first ones, in the same
    order. The mean of `soft_match` over all pairs of a target and another view.
    """
    pairs = itertools.product(enumerate(targets), enumerate(logits))
    losses = [soft_match(view, target) for (i, target), (j, view) in pairs if i != j]
    return torch.stack(losses).mean()


@full_precision
def nce(
    query: Float[Tensor, "batch dim"],
    key: Float[Tensor, "batch dim"],
    noise: Float[Tensor, "noise dim"],
    temperature: float,
    normalizer: Float[Tensor, ""],
    num_images: int,
) -> Float[Tensor, ""]:
    """Tell the query's own key from noise, one yes or no at a time (Wu et al. 2018, eq. 5 to 7).

    With `P(v) = exp(v.q / temperature) / normalizer` and `m` noise keys drawn evenly from `n`
    images, the key is believed to be the query's own with `h(v) = P(v) / (P(v) + m / n)`, whose
    logit is `log P(v) - log(m / n)`.

    Args:
        query: Unit vectors.
        key: The entry of each query's own image.
        noise: Entries drawn evenly, with replacement, shared by the batch.
        temperature: Divides the similarities; above 0.
        normalizer: The constant Z that stands for the sum over all images.
        num_images: How many images there are.

    Returns:
        The mean over the queries; `log(1 + m) + m log(1 + 1 / m)` where P is `1 / n` everywhere.

    >>> q, noise, z = torch.eye(2), torch.zeros(1, 2), torch.tensor(2.0)
    >>> nce(0 * q, q, noise, 1.0, normalizer=z, num_images=2)  # 2 log(2)
    tensor(1.3863)
    """
    offset = normalizer.log() + math.log(len(noise) / num_images)

    def term(rows: slice) -> Tensor:
        own = (query[rows] * key[rows]).sum(dim=1) / temperature - offset
        others = look_up(query[rows], noise, temperature) - offset
        return -(F.logsigmoid(own) + F.logsigmoid(-others).sum(dim=1)).mean()

    return mean_over_rows(term, len(query))


@full_precision
def sinkhorn(
    scores: Float[Tensor, "batch prototypes"],
    epsilon: float,
    iterations: int,
    ignored: Bool[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch prototypes"]:
    """Soft assignments that use every prototype equally (Caron et al. 2020, section 3.1, eq. 3).

    Each iteration gives every prototype the same mass, then every image: images come last, so
    their codes sum to one after any number of iterations. In logarithms, where no score is too
    large for `exp(score / epsilon)`.

    Args:
        scores: Similarity of each image with each prototype.
        epsilon: How soft the assignments are; above 0.
        iterations: At least 1; prototypes get equal mass only in the limit.
        ignored: Images that take no prototype's mass; their codes mean nothing.

    >>> sinkhorn(torch.zeros(2, 4), epsilon=0.05, iterations=3)
    tensor([[0.2500, 0.2500, 0.2500, 0.2500],
            [0.2500, 0.2500, 0.2500, 0.2500]])
    """
    kernel = scores / epsilon
    image = torch.zeros_like(scores[:, :1])
    for _ in range(iterations):
        mass = kernel + image
        if ignored is not None:
            mass = mass.masked_fill(ignored[:, None], torch.finfo(scores.dtype).min / 2)
        prototype = -mass.logsumexp(dim=0)
        image = -(kernel + prototype).logsumexp(dim=1, keepdim=True)
    return (kernel + prototype + image).exp()
