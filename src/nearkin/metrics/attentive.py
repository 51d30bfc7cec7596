"""Multinomial logistic regression on what heads of attention pool from the tokens of images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from nearkin.data.rng import seeded
from nearkin.metrics.probe import Validated, choice_folds, minimize, validate
from nearkin.networks.tokens import AttentivePooling, pool_tokens

HEADS: Final = 4  # Queries, each of which attends to tokens of its own
STEPS: Final = 100  # L-BFGS steps at the most, for each strength
STRENGTHS: Final = (1e-2, 1e-1, 1.0, 10.0)  # Values of `C`, the strongest regularization first
START: Final = 0.01  # Standard deviation of the first attention: nearly all tokens alike

Fitted = tuple[
    Float[Tensor, "dim heads"], Float[Tensor, "pooled classes"], Float[Tensor, " classes"]
]
"""The attention, and weights and biases of the logistic regression on top of it."""


@dataclass(frozen=True, eq=False)
class AttentiveProbe:
    """Attentive pooling of tokens and a logistic regression on top of it."""

    pooling: AttentivePooling
    weight: Float[Tensor, "pooled classes"]
    bias: Float[Tensor, " classes"]
    classes: Int[np.ndarray, " classes"]

    @torch.no_grad()
    def predict(self, tokens: Float[Tensor, "n _ dim"]) -> Int[np.ndarray, " n"]:
        """Return the most likely class of each image."""
        likely = (self.pooling(tokens.float()) @ self.weight + self.bias).argmax(dim=1)
        return np.asarray(self.classes[likely.cpu().numpy()])


def train_attentive_probe(
    tokens: Float[Tensor, "n tokens dim"],
    labels: Int[np.ndarray, " n"],
    *,
    seed: int,
    groups: Int[np.ndarray, " n"] | None = None,
) -> tuple[AttentiveProbe, Validated]:
    """Choose the regularization on held-out ones of these images, then fit all of them.

    Minimizes the mean cross-entropy plus the squared weights and attention over `2 C n` by L-BFGS
    on all images at once, from an attention that is nearly that of an average. With no attention
    it is the linear probe on mean tokens. All images have a label, of two classes or more.

    Returns:
        The probe, and what was predicted of images while they were held out.
    """
    classes, target = np.unique(labels, return_inverse=True)
    x = tokens.float()
    std, mean = torch.std_mean(x, dim=(0, 1), correction=0)
    std = torch.where(std > 1e-6 * mean.abs(), std, 1.0)
    x, y = (x - mean) / std, torch.from_numpy(target).to(x.device)
    with seeded(seed, torch.device("cpu")):
        start = (torch.randn(x.shape[2], HEADS) * START).to(x.device)

    def fit(rows: Tensor, strengths: Sequence[float]) -> list[Fitted]:
        return _fit_path(x[rows], y[rows], start, len(classes), strengths)

    def logits(fitted: Fitted, rows: Tensor) -> Tensor:
        attention, weight, bias = fitted
        return pool_tokens(x[rows], attention) @ weight + bias

    folds = choice_folds(target, np.arange(len(x)) if groups is None else groups, seed)
    validated = validate(fit, logits, target, len(classes), folds, STRENGTHS)
    # As far along the path as when the choice was made: each fit starts where the last ended.
    path = STRENGTHS[: STRENGTHS.index(validated.choice.strength) + 1]
    attention, weight, bias = fit(torch.arange(len(x)), path)[-1]
    pooling = AttentivePooling(mean, std, attention).requires_grad_(False)
    return AttentiveProbe(pooling, weight, bias, classes), validated


def _fit_path(
    x: Float[Tensor, "n tokens dim"],
    y: Int[Tensor, " n"],
    start: Float[Tensor, "dim heads"],
    num_classes: int,
    strengths: Sequence[float],
) -> list[Fitted]:
    """Fit attention, weights and biases for each strength in turn, from where the last ended."""
    attention = start.clone().requires_grad_()
    weight = x.new_zeros(start.numel(), num_classes, requires_grad=True)
    bias = x.new_zeros(num_classes, requires_grad=True)

    parameters, fits = (attention, weight, bias), []
    for strength in strengths:

        def objective(decay: float = 1 / (2 * strength * len(y))) -> Tensor:
            logits = pool_tokens(x, attention) @ weight + bias
            squares = attention.square().sum() + weight.square().sum()
            loss = F.cross_entropy(logits, y) + decay * squares
            for each, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                each.grad = grad
            return loss.detach()

        minimize(objective, parameters, STEPS)
        fits.append((attention.detach().clone(), weight.detach().clone(), bias.detach().clone()))
    return fits
