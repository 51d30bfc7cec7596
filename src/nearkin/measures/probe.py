"""Multinomial logistic regression by L-BFGS on all images at once, read in blocks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from nearkin.distributed import ALONE, Share, threads_for
from nearkin.errors import DataError
from nearkin.objectives.fused import blocks
from nearkin.types import UNKNOWN

Fit = TypeVar("Fit")

STEPS = 300  # L-BFGS steps at the most, for each strength
HISTORY: Final = 20
"""Steps that L-BFGS takes the curvature from. With torch's 100 it needs as many, each slower."""
BLOCK: Final = 2**22  # Features and logits that are computed with at once, 16 MiB in float32
HELD: Final = 2**26  # Standardized features up to which they are kept, 256 MiB in float32


@dataclass(frozen=True, eq=False)
class Standardized:
    """Features minus their mean over their deviation, computed anew for the rows asked for.

    The features may be on disk, mapped into memory; of them there is never a whole copy.
    """

    features: Float[Tensor, "n dim"]
    mean: Float[Tensor, " dim"]
    std: Float[Tensor, " dim"]
    basis: Float[Tensor, "dim reduced"] | None = None  # Principal components of wide features

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and of columns."""
        reduced = self.features if self.basis is None else self.basis
        return len(self.features), reduced.shape[1]

    def __getitem__(self, rows: slice | Int[np.ndarray, " m"]) -> Float[Tensor, "m reduced"]:
        x = (self.features[rows].float() - self.mean) / self.std
        return x if self.basis is None else x @ self.basis


def fit_path(
    x: Float[Tensor, "n dim"] | Standardized,
    y: Int[Tensor, " n"],
    num_classes: int,
    strengths: Sequence[float],
    share: Share = ALONE,
) -> list[tuple[Float[Tensor, "dim classes"], Float[Tensor, " classes"]]]:
    """Fit weights and biases for each strength `C` in turn, each starting where the last ended.

    Minimizes the mean cross-entropy plus the squared weights over `2 C n`; the optimum is that
    of scikit-learn's `LogisticRegression`. Fastest from the smallest `C` to the largest.

    Features are correlated, so that the loss is a narrow valley. L-BFGS therefore searches among
    the principal directions, each scaled by the curvature that is expected along it: the optimum
    is the same, and a few dozen steps find it instead of hundreds.
    """
    n, dim = x.shape
    size = max(1, BLOCK // (dim + num_classes))
    with threads_for(n * dim):
        variances, directions = _principal_directions(x, size, share)
        weight, fits = directions.new_zeros(num_classes, dim), []
        bias = directions.new_zeros(num_classes, requires_grad=True)
        for strength in strengths:
            curvature = variances * (num_classes - 1) / num_classes**2 + 1 / (strength * n)
            scaled = (weight @ directions * curvature.sqrt()).requires_grad_()
            basis = (directions / curvature.sqrt()).T

            # A row per class: torch is several times faster with the gradient of these.
            def logits(rows: slice, scaled: Tensor = scaled, basis: Tensor = basis) -> Tensor:
                return F.linear(x[rows], scaled @ basis, bias)

            def squares(scaled: Tensor = scaled, basis: Tensor = basis) -> Tensor:
                return (scaled @ basis).square().sum()

            minimize(
                logits, y, squares, [scaled, bias],
                strength=strength, steps=STEPS, size=size, share=share,
            )  # fmt: skip
            weight = (scaled @ basis).detach()
            fits.append((weight.T, bias.detach().clone()))
    return fits


def _principal_directions(
    x: Float[Tensor, "n dim"] | Standardized, size: int, share: Share
) -> tuple[Float[Tensor, " rank"], Float[Tensor, "dim rank"]]:
    """Return the mean squares of features along their principal directions, and these.

    Of fewer rows than dimensions, only the directions that these span: the optimum is there.
    """
    n, dim = x.shape
    if n < dim:
        _, scales, rows = torch.linalg.svd(x[:], full_matrices=False)
        return scales.square() / n, rows.T
    products = share.total(lambda rows: (y := x[rows]).T @ y, n, size)
    variances, directions = torch.linalg.eigh(products / n)
    return variances.clamp(min=0), directions


def minimize(
    logits: Callable[[slice], Tensor],
    y: Int[Tensor, " n"],
    squares: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    strength: float,
    steps: int,
    size: int | None = None,
    share: Share = ALONE,
) -> None:
    """Minimize the mean cross-entropy plus `squares` over `2 C n` by L-BFGS, in place.

    Loss and gradients are summed over blocks of `size` rows, and over the processes of the share:
    every step is of all rows. All processes get the same sums, so they take the same steps.
    """
    n = len(y)
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=steps,
        tolerance_grad=1e-5,
        history_size=HISTORY,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        total, *gradients = sums = [
            parameters[0].new_zeros(()),
            *map(torch.zeros_like, parameters),
        ]
        for each, gradient in zip(parameters, gradients, strict=True):
            each.grad = gradient  # to which every backward pass adds
        loss = squares() / (2 * strength * n * share.ranks)
        loss.backward()
        total += loss.detach()
        for rows in share.blocks(n, size or n):
            loss = F.cross_entropy(logits(rows), y[rows], reduction="sum") / n
            loss.backward()
            total += loss.detach()
        if share.ranks > 1:
            vector_to_parameters(share.sum(parameters_to_vector(sums)), sums)
        return total

    with torch.enable_grad():
        optimizer.step(closure)


# Values of `C` to choose from, the strongest regularization first.
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
HELD_OUT = 0.15  # Share of the training images that decides between them
# Features wider than the first, such as raw pixels, are reduced to the second.
WIDEST, REDUCED = 2_048, 512
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
        likely = [logits.argmax(dim=1) for logits in self._blocks(features)]
        return np.asarray(self.classes[torch.cat(likely).cpu().numpy()])

    def logits(self, features: Float[Tensor, "n dim"]) -> Float[Tensor, "n classes"]:
        """Return the logits of the classes."""
        return torch.cat(list(self._blocks(features)))

    def _blocks(self, features: Float[Tensor, "n dim"]) -> Iterator[Float[Tensor, "rows classes"]]:
        x = Standardized(features, self.mean, self.std, self.basis)
        size = max(1, BLOCK // (features.shape[1] + len(self.bias)))
        for rows in blocks(max(1, len(features)), size):  # of no features, a matrix without rows
            yield x[rows] @ self.weight + self.bias

    def layer(self) -> tuple[Float[Tensor, "classes dim"], Float[Tensor, " classes"]]:
        """Return weights and biases that take features as they are, not standardized."""
        weight = self.weight if self.basis is None else self.basis @ self.weight
        weight = (weight.T.double() / self.std).float()
        return weight, (self.bias - weight.double() @ self.mean.double()).float()


def train_probe(
    features: Float[Tensor, "n dim"],
    labels: Int[np.ndarray, " n"],
    *,
    seed: int,
    groups: Int[np.ndarray, " n"] | None = None,
    share: Share = ALONE,
) -> LinearProbe:
    """Choose the regularization on a held-out slice of these images, then fit all of them.

    Images without a label are left out; those of one group are held out together or not at all.
    With the share of a process, several fit all images together; each makes the choice itself.
    """
    task = _task(features, labels, groups, seed, share)
    few = np.random.default_rng(seed).permutation(len(task.rows))[:CHOICE_LIMIT]
    held_out = hold_out(task.target[few], task.groups[few], seed)
    return task.probe(_choose(task.x[few], task.y[few], held_out, len(task.classes)))


def train_validated_probe(
    features: Float[Tensor, "n dim"],
    labels: Int[np.ndarray, " n"],
    *,
    seed: int,
    groups: Int[np.ndarray, " n"] | None = None,
    predict_all: bool = False,
) -> tuple[LinearProbe, "Validated"]:
    """Train the same probe on few images or many, and say what it predicts of images held out.

    `train_probe` keeps one slice of the images back for its choice, in which classes of few
    images have none; its figures are those of published protocols. Here, where a class has few
    images, each image that can be is held out once; see `validation_folds`. With `predict_all`
    that is so of many images too: the choice is made on a slice, then all are predicted with it.
    """
    task = _task(features, labels, groups, seed, ALONE)
    few = np.sort(np.random.default_rng(seed).permutation(len(task.rows))[:CHOICE_LIMIT])
    x, y = task.x[few], task.y[few]

    def fit(rows: Tensor, strengths: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
        return fit_path(x[rows], y[rows], len(task.classes), strengths)

    def logits(fitted: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
        return x[rows] @ fitted[0] + fitted[1]

    folds = validation_folds(task.target[few], task.groups[few], seed)
    validated = validate(fit, logits, task.target[few], len(task.classes), folds, STRENGTHS)
    if predict_all and (folds == LEFT_OUT).any():
        folds = dealt_folds(task.target[few], task.groups[few], seed)
        again = validate(
            fit, logits, task.target[few], len(task.classes), folds, (validated.strength,)
        )
        validated = replace(again, choice_size=validated.choice_size)
    return task.probe(validated.strength), validated.at(task.rows[few])


@dataclass(frozen=True, eq=False)
class _Task:
    """Standardized features of the labeled images, and their classes."""

    share: Share
    rows: Int[np.ndarray, " labeled"]  # Among all images
    classes: Int[np.ndarray, " classes"]
    target: Int[np.ndarray, " labeled"]  # Positions in `classes`
    groups: Int[np.ndarray, " labeled"]
    x: Standardized

    @property
    def y(self) -> Int[Tensor, " labeled"]:
        """The classes as a tensor, where the features are."""
        return torch.from_numpy(self.target).to(self.x.mean.device)

    def probe(self, strength: float) -> LinearProbe:
        """Fit all images."""
        n, dim = self.x.shape
        x = self.x[:] if n * dim <= HELD else self.x
        (fitted,) = fit_path(x, self.y, len(self.classes), (strength,), self.share)
        return LinearProbe(self.x.mean, self.x.std, self.x.basis, *fitted, self.classes, strength)


def _task(
    features: Float[Tensor, "n dim"],
    labels: Int[np.ndarray, " n"],
    groups: Int[np.ndarray, " n"] | None,
    seed: int,
    share: Share,
) -> _Task:
    rows = np.flatnonzero(labels != UNKNOWN)
    classes, target = np.unique(labels[rows], return_inverse=True)
    if len(classes) < 2:
        raise DataError("the linear probe needs labeled training images of two classes or more")
    labeled = features if len(rows) == len(features) else features[rows]
    x = Standardized(labeled, *_moments(labeled, share))
    if x.shape[1] > WIDEST:
        x = replace(x, basis=_leading(x, seed))
    return _Task(share, rows, classes, target, rows if groups is None else groups[rows], x)


def _moments(
    features: Float[Tensor, "n dim"], share: Share
) -> tuple[Float[Tensor, " dim"], Float[Tensor, " dim"]]:
    """Return means and standard deviations; the latter are one where features are constant."""
    n, dim = features.shape

    def mean_of(function: Callable[[Tensor], Tensor]) -> Float[Tensor, " dim"]:
        def sums(rows: slice) -> Tensor:
            return function(features[rows].float()).sum(dim=0).cpu().double()

        total = share.total(sums, n, max(1, BLOCK // dim))
        return (total / n).float().to(features.device)

    mean = mean_of(lambda x: x)
    std = mean_of(lambda x: (x - mean).square()).sqrt()
    return mean, torch.where(std > 1e-6 * mean.abs(), std, 1.0)  # a constant is but noise


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


def _leading(x: Standardized, seed: int) -> Float[Tensor, "dim reduced"]:
    """Return the `REDUCED` leading principal components of at most `CHOICE_LIMIT` rows."""
    few = np.random.default_rng(seed).permutation(x.shape[0])[:CHOICE_LIMIT]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the factorization starts from random vectors
        components: Tensor = torch.pca_lowrank(x[few], q=min(REDUCED, len(few)), niter=2)[2]
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


# Choosing where there are few images


FOLDS: Final = 5
MANY: Final = 20  # Groups of every class from which one slice decides, not each image in turn
LEFT_OUT: Final = UNKNOWN  # The fold of images that are never held out


def validation_folds(
    labels: Int[np.ndarray, " n"], groups: Int[np.ndarray, " n"], seed: int, folds: int = FOLDS
) -> Int[np.ndarray, " n"]:
    """Return the fold in which each image is held out, `LEFT_OUT` for none.

    Where every class has `MANY` groups or more, there is one fold: the slice of `hold_out`.
    Otherwise they are the `dealt_folds`. A group has the class of its first image.
    """
    first = np.unique(groups, return_index=True)[1]
    _, sizes = np.unique(labels[first], return_counts=True)
    if sizes.min() >= MANY:
        return np.where(hold_out(labels, groups, seed), 0, LEFT_OUT)
    return dealt_folds(labels, groups, seed, folds)


def dealt_folds(
    labels: Int[np.ndarray, " n"], groups: Int[np.ndarray, " n"], seed: int, folds: int = FOLDS
) -> Int[np.ndarray, " n"]:
    """Deal the groups of each class to all folds in turn, so that each is held out once.

    With a single fold, a fifth of them is, and at least one. The only group of a class is never
    held out: nothing would be left to learn the class from.
    """
    names, first, member = np.unique(groups, return_index=True, return_inverse=True)
    class_of = labels[first]
    generator = np.random.default_rng(seed)
    order, fold = generator.permutation(len(names)), np.full(len(names), LEFT_OUT)
    for label in np.unique(class_of):
        own = order[class_of[order] == label]
        if folds == 1:
            fold[own[: max(len(own) > 1, len(own) // FOLDS)]] = 0
        elif len(own) > 1:
            # Classes begin at different folds, or those of two images would all be in the first.
            fold[own] = (np.arange(len(own)) + generator.integers(folds)) % folds
    return np.asarray(fold[member])


@dataclass(frozen=True, eq=False)
class Validated:
    """The choice of a regularization, and what was predicted of images while held out."""

    strength: float  # The chosen `C`
    rows: Int[np.ndarray, " held_out"]  # The images that were held out at some time
    logits: Float[np.ndarray, "held_out classes"]  # With the chosen `C`, by fits without them
    target: Int[np.ndarray, " held_out"]  # Their classes
    choice_size: int  # Images that the choice was made on; without any, the strength is 1

    @property
    def correct(self) -> Bool[np.ndarray, " held_out"]:
        """Whether the most likely class is right."""
        return np.asarray(self.logits.argmax(axis=1) == self.target)

    def at(self, rows: Int[np.ndarray, " n"]) -> "Validated":
        """Return the same, of images at these positions among others."""
        return replace(self, rows=rows[self.rows])


def validate(
    fit: Callable[[Tensor, Sequence[float]], Sequence[Fit]],
    logits: Callable[[Fit, Tensor], Tensor],
    target: Int[np.ndarray, " n"],
    num_classes: int,
    folds: Int[np.ndarray, " n"],
    strengths: Sequence[float],
) -> Validated:
    """Choose the strength with the best accuracy on held-out images; of equals, the least loss.

    Args:
        fit: Fits the images of these rows, for each strength in turn.
        logits: What a fit predicts of the images of these rows.
        target: The classes, from 0 to below `num_classes`.
        num_classes: Number of columns of the logits.
        folds: The fold in which each image is held out, as of `validation_folds`.
        strengths: The choices.
    """
    rows = np.flatnonzero(folds != LEFT_OUT)
    if not len(rows):
        return Validated(1.0, rows, np.zeros((0, 0)), target[rows], choice_size=0)
    held_out = np.zeros((len(strengths), len(target), num_classes))
    for fold in np.unique(folds[rows]):
        inside = torch.from_numpy(np.flatnonzero(folds != fold))
        outside = torch.from_numpy(np.flatnonzero(folds == fold))
        for position, fitted in enumerate(fit(inside, strengths)):
            held_out[position, outside.numpy()] = logits(fitted, outside).cpu().double().numpy()
    predicted, truth = held_out[:, rows], target[rows]
    right = (predicted.argmax(axis=2) == truth).sum(axis=1)
    loss = [log_loss(each, truth) for each in predicted]
    best = min(range(len(strengths)), key=lambda position: (-right[position], loss[position]))
    return Validated(strengths[best], rows, predicted[best], truth, choice_size=len(rows))


def log_loss(logits: Float[np.ndarray, "n classes"], target: Int[np.ndarray, " n"]) -> float:
    """Return the mean negative log-likelihood of the true classes, in nats.

    >>> round(log_loss(np.zeros((1, 2)), np.array([0])), 4)
    0.6931
    """
    from scipy.special import log_softmax

    likelihood = log_softmax(logits, axis=1)[np.arange(len(target)), target]
    return float(-likelihood.mean())
