"""Multinomial logistic regression by L-BFGS on all images at once."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

STEPS = 300
"""L-BFGS steps at the most, for each strength."""


def fit_path(
    x: Float[Tensor, "n dim"],
    y: Int[Tensor, " n"],
    num_classes: int,
    strengths: Sequence[float],
) -> list[tuple[Float[Tensor, "dim classes"], Float[Tensor, " classes"]]]:
    """Weights and biases for each strength in turn, each starting where the last one ended.

    Minimizes the mean cross-entropy plus the squared weights over `2 C n`; the optimum is that
    of scikit-learn's `LogisticRegression`.

    Args:
        x: Standardized features.
        y: Classes, from 0 to `num_classes - 1`.
        num_classes: Number of classes.
        strengths: Values of `C`, above 0. Fastest from the smallest to the largest.
    """
    weight = x.new_zeros(x.shape[1], num_classes, requires_grad=True)
    bias = x.new_zeros(num_classes, requires_grad=True)
    fits = []
    for strength in strengths:
        _minimize(x, y, weight, bias, ridge=1 / (strength * len(x)))
        fits.append((weight.detach().clone(), bias.detach().clone()))
    return fits


def _minimize(
    x: Float[Tensor, "n dim"],
    y: Int[Tensor, " n"],
    weight: Float[Tensor, "dim classes"],
    bias: Float[Tensor, " classes"],
    ridge: float,
) -> None:
    """Move the weights and biases, in place, to the optimum."""
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=STEPS, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight + bias, y) + ridge / 2 * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
