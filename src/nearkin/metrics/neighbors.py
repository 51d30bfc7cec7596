"""Nearest neighbors by cosine similarity, exact and in little memory."""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nearkin.errors import DataError
from nearkin.objectives import unit
from nearkin.objectives.fused import blocks, product

SIMILARITIES = {"cpu": 2**22}  # Held at once, 16 MiB in float32: they stay in the CPU's cache
MANY_SIMILARITIES = 2**25  # The same on other devices, 128 MiB in float32
WIDTH = {"cpu": 2**12}  # Rows of a bank that queries are compared with at once
LARGE_WIDTH = 2**20  # The same on other devices: nothing waits for them while one block is enough
RUN = 32  # Neighboring similarities that are reduced to their maximum first

Nearest = tuple[Float[Tensor, "queries k"], Int[Tensor, "queries k"]]
"""The cosines of each query and the nearest rows, most similar first, and which rows these are."""


def held_at_once(device: torch.device) -> int:
    """Return how many similarities to compute at once."""
    return SIMILARITIES.get(device.type, MANY_SIMILARITIES)


@torch.no_grad()
def nearest(
    bank: Float[Tensor, "bank dim"],
    queries: Float[Tensor, "queries dim"],
    k: int,
    *,
    exclude_self: bool = False,
    ignored: Bool[Tensor, "queries bank"] | None = None,
) -> Nearest:
    """Return cosines and rows of the `k` rows of the bank most similar to each query, in order.

    Features are of any length, and there are no more neighbors than the bank has rows. Equal
    similarities are ordered by their place in the bank, so the answer is unique. With
    `exclude_self` the queries are the bank, and no row is its own neighbor. Rows that are
    `ignored` are nobody's neighbor but where a query has fewer than `k` others.

    Raises:
        DataError: If the bank has no row to offer.

    >>> nearest(torch.tensor([[0.0, 2.0], [3.0, 0.0]]), torch.tensor([[1.0, 0.0]]), k=1)
    (tensor([[1.]]), tensor([[1]]))
    """
    k = min(k, len(bank) - exclude_self)
    if k < 1:
        raise DataError("no image to compare with; nearest neighbors need at least one other")
    width = min(len(bank), max(WIDTH.get(bank.device.type, LARGE_WIDTH), k))
    rows = max(1, min(held_at_once(bank.device) // width, len(queries)))
    pieces = []
    for x in blocks(len(queries), rows):
        values, index, own = queries.new_empty(0), torch.empty(0), unit(queries[x])
        for y in blocks(len(bank), width):  # block by block: a unit bank would be a whole copy
            similarity = product(own, unit(bank[y]).T)
            if ignored is not None:
                similarity.masked_fill_(ignored[x, y], -torch.inf)
            if exclude_self:
                similarity.diagonal(offset=x.start - y.start).fill_(-torch.inf)
            if y.start == 0:
                values, index = _largest(similarity, k)
            else:
                values, index = _improved(values, index, similarity, y.start)
        pieces.append((values, index))
    values, index = map(torch.cat, zip(*pieces, strict=True))
    return values, index


def _largest(similarity: Float[Tensor, "queries bank"], k: int) -> Nearest:
    """Return the largest `k` of each row, equal ones from left to right."""
    runs = similarity.shape[1] // RUN
    if runs >= 8 * k:
        # They are in the runs with the largest maxima: each of these has a number that comes
        # before all of another run.
        maxima = similarity[:, : runs * RUN].unflatten(1, (runs, RUN)).amax(dim=2)
        run = _largest(maxima, k)[1].sort(dim=1).values
        inside = torch.arange(RUN, device=run.device)
        after = torch.arange(runs * RUN, similarity.shape[1], device=run.device)
        columns = (run[..., None] * RUN + inside).flatten(1)
        columns = torch.cat([columns, after.expand(len(run), -1)], dim=1)
        values, index = _largest(similarity.gather(1, columns), k)
        return values, columns.gather(1, index)
    values, index = similarity.topk(min(k + 1, similarity.shape[1]))
    least, index = values[:, k - 1 : k], index[:, :k]
    cut_through = (least == values[:, k:]).any(dim=1)  # topk may pick any of several equals there
    if similarity.device.type != "cpu":  # to ask would be to wait for it
        index = _first_of_equals(similarity, least, k)
    elif cut_through.any():
        index[cut_through] = _first_of_equals(similarity[cut_through], least[cut_through], k)
    index = index.sort(dim=1).values
    values, order = similarity.gather(1, index).sort(dim=1, descending=True, stable=True)
    return values, index.gather(1, order)


def _first_of_equals(
    similarity: Float[Tensor, "rows bank"], least: Float[Tensor, "rows 1"], k: int
) -> Int[Tensor, "rows k"]:
    """Return the columns of the `k` largest of each row, whose smallest is known."""
    above, equal = similarity > least, similarity == least
    missing = k - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1) <= missing))
    columns = torch.arange(similarity.shape[1], device=similarity.device)
    return columns.where(chosen, len(columns)).topk(k, dim=1, largest=False).values


def _improved(
    values: Float[Tensor, "queries k"],
    index: Int[Tensor, "queries k"],
    similarity: Float[Tensor, "queries block"],
    start: int,
) -> Nearest:
    """Merge the largest `k` so far with further columns; skip runs with nothing larger."""
    k, least = values.shape[1], values[:, -1:]
    if rest := -similarity.shape[1] % RUN:
        similarity = F.pad(similarity, (0, rest), value=-torch.inf)
    runs = similarity.unflatten(1, (-1, RUN))
    row, run = (runs.amax(dim=2) > least).nonzero(as_tuple=True)
    some = runs[row, run]
    place, within = (some > least[row]).nonzero(as_tuple=True)
    row, column = row[place], start + run[place] * RUN + within
    counts = row.bincount(minlength=len(values))
    slot = k + torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    more = 0, int(counts.max())
    values, index = F.pad(values, more, value=-torch.inf), F.pad(index, more)
    values[row, slot], index[row, slot] = some[place, within], column
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values[:, :k], index.gather(1, order[:, :k])


def tally(
    similarity: Float[Tensor, "queries k"],
    classes: Int[Tensor, "queries k"],
    *,
    temperature: float,
    num_classes: int,
) -> Float[Tensor, "queries num_classes"]:
    """Score classes by the nearest neighbors, weighted by `exp(cosine / temperature)`.

    The classifier of Wu et al. 2018, section 3.4. The scores of a query sum to one. A temperature
    of infinity is the plain majority, in which all neighbors count alike.
    """
    weights = torch.softmax(similarity / temperature, dim=1)
    scores = weights.new_zeros(len(similarity), num_classes)
    return scores.scatter_add_(1, classes, weights)


@torch.no_grad()
def predict_without(
    bank: Float[Tensor, "bank dim"],
    bank_labels: Int[np.ndarray, " bank"],
    queries: Float[Tensor, "queries dim"],
    fold: Int[np.ndarray, " bank"],
    *,
    k: int,
    temperature: float,
) -> Int[Tensor, "folds queries"]:
    """Predict classes by votes as in `tally`, without each fold of the bank in turn.

    The neighbors are searched once, half as many again as vote. Where that leaves fewer than
    `k`, these vote alone, and where none is left, those of the whole bank.
    """
    similarity, index = nearest(bank, queries, k + k // 2 + 1)
    weights = ((similarity - similarity[:, :1]) / temperature).exp()  # of one query, to scale
    classes = torch.from_numpy(bank_labels).to(index)[index]
    member, predicted = torch.from_numpy(fold).to(index)[index], []
    num_classes = int(bank_labels.max()) + 1
    rows = max(1, held_at_once(queries.device) // num_classes)
    for left_out in range(int(fold.max()) + 1):
        present = member != left_out
        present |= ~present.any(dim=1, keepdim=True)
        voting = weights * (present & (present.cumsum(dim=1) <= k))
        winners = (
            some.new_zeros(len(some), num_classes).scatter_add_(1, of, some).argmax(dim=1)
            for some, of in zip(voting.split(rows), classes.split(rows), strict=True)
        )
        predicted.append(torch.cat([*winners]))
    return torch.stack(predicted)


def neighbor_agreement(
    a: Float[Tensor, "images dim"], b: Float[Tensor, "images dim"], k: int
) -> Float[Tensor, ""]:
    """Return the share of the `k` nearest other images that two views have in common.

    Needs no labels. About `k / (images - 1)` by chance, 1 if the views agree on everything.

    Raises:
        DataError: If there is only one image.
    """
    neighbors = [nearest(x, x, k, exclude_self=True)[1] for x in (a, b)]
    both = torch.cat(neighbors, dim=1).sort(dim=1).values
    shared = (both[:, 1:] == both[:, :-1]).sum(dim=1)
    return shared.float().mean() / neighbors[0].shape[1]
