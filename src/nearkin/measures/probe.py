"""Multinomial logistic regression by L-BFGS on all images at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nearkin.errors import DataError
from nearkin.types import UNKNOWN

STEPS = 300  # L-BFGS steps at the most, for each strength


def fit_path(
    x: Float[Tensor, "n dim"], y: Int[Tensor, " n"], num_classes: int, strengths: Sequence[float]
) -> list[tuple[Float[Tensor, "dim classes"], Float[Tensor, " classes"]]]:
    """Fit weights and biases for each strength `C` in turn, each starting where the last ended.

    Minimizes the mean cross-entropy plus the squared weights over `2 C n`; the optimum is that
    of scikit-learn's `LogisticRegression`. Fastest from the smallest `C` to the largest.
    """
    weight = x.new_zeros(x.shape[1], num_classes, requires_grad=True)
    bias = x.new_zeros(num_classes, requires_grad=True)
    fits = []
    for strength in strengths:
        ridge = 1 / (strength * len(x))
        optimizer = torch.optim.LBFGS(
            [weight, bias], max_iter=STEPS, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
        )

        def closure(optimizer: torch.optim.Optimizer = optimizer, ridge: float = ridge) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(x @ weight + bias, y) + ridge / 2 * weight.square().sum()
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)
        fits.append((weight.detach().clone(), bias.detach().clone()))
    return fits


# Values of `C` to choose from, the strongest regularization first.
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
HELD_OUT = 0.15  # Share of the training images that decides between them
# Features wider than the first, such as raw pixels, are reduced to the second.
WIDEST, KEPT = 2_048, 512
CHOICE_LIMIT = 12_000  # Training images, at the most, that the choice is made with


@dataclass(frozen=True, slots=True)
class LinearProbe:
    """A multinomial logistic regression on standardized features."""

    mean: Float[Tensor, " dim"]
    std: Float[Tensor, " dim"]
    basis: Float[Tensor, "dim reduced"] | None  # Principal components of very wide features
    weight: Float[Tensor, "reduced classes"]
    bias: Float[Tensor, " classes"]
    classes: Int[np.ndarray, " classes"]
    strength: float  # The chosen `C`: the inverse of the regularization, as in scikit-learn

    def predict(self, features: Float[Tensor, "n dim"]) -> Int[np.ndarray, " n"]:
        """Return the most likely class of each row."""
        x = (features.float() - self.mean) / self.std
        x = x if self.basis is None else x @ self.basis
        logits = x @ self.weight + self.bias
        return np.asarray(self.classes[logits.argmax(dim=1).cpu().numpy()])


def train_probe(
    features: Float[Tensor, "n dim"],
    labels: Int[np.ndarray, " n"],
    *,
    seed: int,
    groups: Int[np.ndarray, " n"] | None = None,
) -> LinearProbe:
    """Choose the regularization on a held-out slice of these images, then fit all of them.

    Images without a label are left out; those of one group are held out together or not at all.
    """
    rows = np.flatnonzero(labels != UNKNOWN)
    classes, target = np.unique(labels[rows], return_inverse=True)
    if len(classes) < 2:
        raise DataError("the linear probe needs labeled training images of two classes or more")
    groups = rows if groups is None else groups[rows]
    x = features[rows].float()
    std, mean = torch.std_mean(x, dim=0, correction=0)
    std = torch.where(std > 1e-6 * mean.abs(), std, 1.0)  # a constant carries nothing but noise
    x = (x - mean) / std
    basis = _leading(x, seed) if x.shape[1] > WIDEST else None
    x = x if basis is None else x @ basis
    y = torch.from_numpy(target).to(x.device)
    few = np.random.default_rng(seed).permutation(len(rows))[:CHOICE_LIMIT]
    held_out = hold_out(target[few], groups[few], seed)
    strength = _choose(x[few], y[few], held_out, len(classes))
    weight, bias = fit_path(x, y, len(classes), (strength,))[-1]
    return LinearProbe(mean, std, basis, weight, bias, classes, strength)


def hold_out(
    labels: Int[np.ndarray, " n"], groups: Int[np.ndarray, " n"], seed: int
) -> Bool[np.ndarray, " n"]:
    """Draw the images that choose `C`: the same share of the groups of each class.

    A group has the class of its first image. Classes of fewer than four groups give none.
    """
    names, first, member = np.unique(groups, return_index=True, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    chosen = np.zeros(len(names), dtype=bool)
    for label in np.unique(labels):
        own = order[labels[first][order] == label]
        chosen[own[: round(HELD_OUT * len(own))]] = True
    return np.asarray(chosen[member])


def _leading(x: Float[Tensor, "n dim"], seed: int) -> Float[Tensor, "dim reduced"]:
    """Return the `KEPT` leading principal components of at most `CHOICE_LIMIT` rows."""
    few = torch.from_numpy(np.random.default_rng(seed).permutation(len(x))[:CHOICE_LIMIT])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the factorization starts from random vectors
        components: Tensor = torch.pca_lowrank(x[few], q=min(KEPT, len(few)), niter=2)[2]
    return components


def _choose(
    x: Float[Tensor, "n dim"],
    y: Int[Tensor, " n"],
    held_out: Bool[np.ndarray, " n"],
    num_classes: int,
) -> float:
    """Return the strength with the best held-out accuracy; of equals, the strongest."""
    judge = torch.from_numpy(held_out).to(x.device)
    if not judge.any():
        return 1.0
    fits = fit_path(x[~judge], y[~judge], num_classes, STRENGTHS)
    right = [int(((x[judge] @ w + b).argmax(dim=1) == y[judge]).sum()) for w, b in fits]
    return STRENGTHS[right.index(max(right))]
