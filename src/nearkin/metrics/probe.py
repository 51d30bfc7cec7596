"""Multinomial logistic regression by L-BFGS on all images at once, read in blocks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from nearkin.distributed import threads_for
from nearkin.errors import DataError
from nearkin.metrics.components import principal_components
from nearkin.metrics.intervals import Groups
from nearkin.objectives.fused import blocks
from nearkin.types import UNLABELED

Fit = TypeVar("Fit")
Features = Float[Tensor, "n dim"]
Numbers = Int[np.ndarray, " n"]
"""A number of each image, such as its class, its group or its fold."""

STRENGTHS: Final = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Values of `C` to choose from, the strongest regularization first; as in scikit-learn."""
FOLDS: Final = 5
ENOUGH: Final = 500  # Held-out images after which a choice needs no further fold
MOST: Final = 12_000  # Images that the choice is made with, at the most
MOST_CLASSES: Final = 600  # Of which these are; of more classes, some are drawn, each whole
WIDEST: Final = 2_048  # Wider features, such as raw pixels, are reduced to as many components
LEFT_OUT: Final = UNLABELED  # The fold of images that are never held out
UNUSED: Final = LEFT_OUT - 1  # Of those that are not learned from either

STEPS = 300  # L-BFGS steps at the most, for each strength
CHOICE_STEPS: Final = 100  # The same for a choice: weak regularizations alone take more
HISTORY: Final = 20
"""Steps that L-BFGS takes the curvature from. With torch's 100 it needs as many, each slower."""
MOST_EVALUATIONS: Final = 25  # Of the loss in a step, by the line search
CHOICE_PASSES: Final = 400  # Over the images that make the choice: 180 to 1,000 were counted
FIT_PASSES: Final = 100  # Over all images, for the fit after it
BLOCK: Final = 2**22  # Features and logits that are computed with at once, 16 MiB in float32
ROUNDING: Final = 1e-10  # Below this share of the largest, a variance is none
HELD: Final = 2**26  # Standardized features up to which they are kept, 256 MiB in float32


@dataclass(frozen=True, eq=False)
class Standardized:
    """Features minus their mean over their deviation, computed anew for the rows asked for.

    The features may be on disk, mapped into memory; of them there is no whole copy.
    """

    features: Features
    mean: Float[Tensor, " dim"]
    std: Float[Tensor, " dim"]
    basis: Float[Tensor, "dim reduced"] | None = None  # Principal components of wide features

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and of columns."""
        reduced = self.features if self.basis is None else self.basis
        return len(self.features), reduced.shape[1]

    def __getitem__(
        self, rows: slice | Int[np.ndarray, " m"] | Int[Tensor, " m"]
    ) -> Float[Tensor, "m reduced"]:
        x = (self.features[rows].float() - self.mean) / self.std
        return x if self.basis is None else x @ self.basis

    def unreduced(
        self, directions: Float[Tensor, "reduced rank"]
    ) -> tuple["Standardized", Float[Tensor, "dim rank"]]:
        """Return the rows in all their dimensions, and the same directions in these."""
        if self.basis is None:
            return self, directions
        return replace(self, basis=None), self.basis @ directions


class LinearFit(NamedTuple):
    """What a logistic regression learns."""

    weight: Float[Tensor, "dim classes"]
    bias: Float[Tensor, " classes"]
    converged: bool  # Whether it is at the optimum


def fit_path(
    x: Float[Tensor, "n dim"] | Standardized,
    y: Int[Tensor, " n"],
    num_classes: int,
    strengths: Sequence[float],
    steps: int = STEPS,
) -> list[LinearFit]:
    """Fit weights and biases for each strength `C` in turn, each starting where the last ended.

    Minimizes the mean cross-entropy plus the squared weights over `2 C n`; the optimum is that
    of scikit-learn's `LogisticRegression`. Fastest from the smallest `C` to the largest.

    Features are correlated, so that the loss is a narrow valley. L-BFGS therefore searches among
    the principal directions, each scaled by the curvature that is expected along it: the optimum
    is the same, and a few dozen steps find it instead of hundreds.
    """
    n, dim = x.shape
    size = _rows_at_once(dim, num_classes)
    with threads_for(n * dim):
        variances, directions = _principal_directions(x, size)
        # Rows in memory are turned once. Of others, each step turns the few weights instead.
        rows, turn = (x @ directions, None) if isinstance(x, Tensor) else x.unreduced(directions)
        fits, bias = [], directions.new_zeros(num_classes)
        along = directions.new_zeros(num_classes, len(variances))  # Weights along the directions
        for strength in strengths:
            curvature = variances * (num_classes - 1) / num_classes**2 + 1 / (strength * n)
            scale = curvature.rsqrt()
            scaled = along / scale

            def objective(
                scaled: Tensor = scaled, scale: Tensor = scale, decay: float = 1 / (strength * n)
            ) -> Tensor:
                along = scaled * scale
                weight = along if turn is None else along @ turn.T
                loss, of_weight, bias.grad = _cross_entropy(rows, y, weight, bias, size)
                of_along = of_weight if turn is None else of_weight @ turn
                scaled.grad = (of_along + decay * along) * scale
                return loss + decay / 2 * along.square().sum()

            converged = minimize(objective, [scaled, bias], steps)
            along = scaled * scale
            fits.append(LinearFit(directions @ along.T, bias.clone(), converged))
    return fits


def _rows_at_once(dim: int, num_classes: int) -> int:
    return max(1, BLOCK // (dim + num_classes))


def _cross_entropy(
    x: Float[Tensor, "n dim"] | Standardized,
    y: Int[Tensor, " n"],
    weight: Float[Tensor, "classes dim"],
    bias: Float[Tensor, " classes"],
    size: int,
) -> tuple[Float[Tensor, ""], Float[Tensor, "classes dim"], Float[Tensor, " classes"]]:
    """Return the mean cross-entropy of linear logits, and its gradients.

    Of few images, autograd takes twice as long.
    """
    loss, of_weight, of_bias = bias.new_zeros(()), torch.zeros_like(weight), torch.zeros_like(bias)
    for rows in blocks(len(y), size):
        block, target = x[rows], y[rows, None]
        # A row per class: torch is several times faster with the gradient of these.
        logs = F.linear(block, weight, bias).log_softmax(dim=1)
        loss -= logs.gather(1, target).sum()
        residual = logs.exp_().scatter_add_(1, target, logs.new_full(target.shape, -1.0))
        of_weight += residual.T @ block
        of_bias += residual.sum(dim=0)
    return loss / len(y), of_weight / len(y), of_bias / len(y)


def _principal_directions(
    x: Float[Tensor, "n dim"] | Standardized, size: int
) -> tuple[Float[Tensor, " rank"], Float[Tensor, "dim rank"]]:
    """Return the mean squares of features along their principal directions, and these."""
    n, dim = x.shape
    if n < dim:  # only the directions that rows span: the optimum is there
        rows = x[:].double()
        squares, left = torch.linalg.eigh(rows @ rows.T)
        real = squares > ROUNDING * squares[-1]
        directions = rows.T @ left[:, real] / squares[real].sqrt()
        return squares[real].float() / n, directions.float()
    products = sum((y := x[rows]).T @ y for rows in blocks(n, size))
    variances, directions = torch.linalg.eigh(products / n)
    return variances.clamp(min=0), directions


def minimize(objective: Callable[[], Tensor], parameters: Sequence[Tensor], steps: int) -> bool:
    """Minimize by L-BFGS, in place; return whether it ended before the last step, at the optimum.

    `objective` returns the loss, and leaves its gradients in those of the parameters.
    """
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=steps,
        max_eval=MOST_EVALUATIONS * steps,
        tolerance_grad=1e-5,
        history_size=HISTORY,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(objective)
    return bool(optimizer.state[parameters[0]]["n_iter"] < steps)


# The probe


@dataclass(frozen=True, slots=True)
class Choice:
    """A regularization, and what it was chosen on."""

    strength: float  # `C`: the inverse of the regularization
    images: int  # Training images that were held out for it; without any, it is 1
    at_end: bool = False  # Of its grid, beyond which others may be better

    def described(self) -> dict[str, str | int | float]:
        """Return it for the protocol of a metric."""
        if not self.images:
            return {"C": self.strength, "held-out training images to choose it": 0}
        end = {"at": "the end of its grid"} if self.at_end else {}
        return {"C": self.strength, **end, "held-out training images chose it": self.images}


@dataclass(frozen=True, slots=True)
class LinearProbe:
    """A multinomial logistic regression on standardized features."""

    mean: Float[Tensor, " dim"]
    std: Float[Tensor, " dim"]
    basis: Float[Tensor, "dim reduced"] | None  # Principal components of very wide features
    weight: Float[Tensor, "reduced classes"]
    bias: Float[Tensor, " classes"]
    classes: Int[np.ndarray, " classes"]
    choice: Choice
    converged: bool  # Whether the fit is at the optimum

    def predict(self, features: Features) -> Numbers:
        """Return the most likely class of each row."""
        x = Standardized(features, self.mean, self.std, self.basis)
        size = _rows_at_once(features.shape[1], len(self.bias))
        likely = [
            (x[rows] @ self.weight + self.bias).argmax(dim=1)
            for rows in blocks(max(1, len(features)), size)  # of no features, one without rows
        ]
        return np.asarray(self.classes[torch.cat(likely).cpu().numpy()])

    def layer(self) -> tuple[Float[Tensor, "classes dim"], Float[Tensor, " classes"]]:
        """Return weights and biases that take features as they are, not standardized."""
        weight = self.weight if self.basis is None else self.basis @ self.weight
        weight = (weight.T.double() / self.std).float()
        return weight, (self.bias - weight.double() @ self.mean.double()).float()


def train_probe(
    features: Features, labels: Numbers, *, seed: int, groups: Groups = None
) -> LinearProbe:
    """Choose the regularization on held-out ones of these images, then fit all of them.

    Of the strengths that predict held-out images best, the one of the least loss; see
    `choice_folds`. Of more than `MOST` images some make the choice, with those of at most
    `MOST_CLASSES` classes: one image of each of many classes would tell nothing. Images of
    `UNLABELED` are left out. Features may be of any scale, and on disk.

    Raises:
        DataError: If there are not two classes.
    """
    task = _Task.of(features, labels, groups, seed)
    few = task.drawn(seed)
    folds = choice_folds(few.target, few.groups, seed)
    validated = few.validated(folds, STRENGTHS)
    return task.probe(validated.choice)


def probe_device(device: torch.device) -> torch.device:
    """Return where a probe is fitted: not on Apple GPUs, which have no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def probe_seconds(labels: Numbers, dim: int, device: torch.device) -> float:
    """Estimate how long `train_probe` takes, by the time of one pass over the choice's images.

    The time is that of zeros, which draws no random number. 0 if there are not two classes.
    """
    classes, target = np.unique(labels[labels != UNLABELED], return_inverse=True)
    if len(classes) < 2:
        return 0.0
    few, where = min(len(target), MOST), probe_device(device)
    x, y = torch.zeros(few, dim, device=where), torch.from_numpy(target[:few]).to(where)
    weight, bias = x.new_zeros(len(classes), dim), x.new_zeros(len(classes))
    size = _rows_at_once(dim, len(classes))
    for _ in range(2):  # the first one waits for its memory
        before = time.perf_counter()
        loss, *_ = _cross_entropy(x, y, weight, bias, size)
        loss.item()
        a_pass = time.perf_counter() - before
    return a_pass * (CHOICE_PASSES + FIT_PASSES * len(target) / few)


def held_out_logits(
    features: Features, labels: Numbers, choice: Choice, *, seed: int, groups: Groups = None
) -> "Validated":
    """Predict training images by probes of that strength that have not learned from them.

    Of many images and classes, so many at random that their logits take 256 MB. The fits learn
    from all that are never held out nonetheless: fits of a few images of each class are others.
    """
    task = _Task.of(features, labels, groups, seed)
    most = min(MOST, HELD // len(task.classes))
    folds = choice_folds(task.target, task.groups, seed, most)
    held = np.random.default_rng(seed).permutation(np.flatnonzero(folds != LEFT_OUT))
    folds[held[most:]] = UNUSED
    validated = task.validated(folds, (choice.strength,))
    return replace(validated.at(task.rows), choice=choice)


@dataclass(frozen=True, eq=False)
class _Task:
    """Standardized features of labeled images, and their classes."""

    rows: Int[np.ndarray, " labeled"]  # Among all images
    classes: Int[np.ndarray, " classes"]
    target: Int[np.ndarray, " labeled"]  # Positions in `classes`
    groups: Int[np.ndarray, " labeled"]
    x: Standardized

    @classmethod
    def of(cls, features: Features, labels: Numbers, groups: Groups, seed: int) -> "_Task":
        rows = np.flatnonzero(labels != UNLABELED)
        classes, target = np.unique(labels[rows], return_inverse=True)
        if len(classes) < 2:
            raise DataError(
                "the linear probe needs labeled training images of two classes or more"
            )
        labeled = features if len(rows) == len(features) else features[rows]
        x = Standardized(labeled, *_moments(labeled))
        if min(x.shape) > WIDEST:  # fewer images span fewer dimensions in any case
            x = replace(x, basis=_leading(x, seed))
        return cls(rows, classes, target, rows if groups is None else groups[rows], x)

    def subset(self, rows: Int[np.ndarray, " chosen"]) -> "_Task":
        x = replace(self.x, features=self.x.features[rows])
        return replace(
            self, rows=self.rows[rows], target=self.target[rows], groups=self.groups[rows], x=x
        )

    def drawn(self, seed: int) -> "_Task":
        """Return the images that make the choice, with their classes alone."""
        generator = np.random.default_rng(seed)
        classes = generator.permutation(len(self.classes))[:MOST_CLASSES]
        rows = np.flatnonzero(np.isin(self.target, classes))
        few = self.subset(np.sort(generator.permutation(rows)[:MOST]))
        numbers, target = np.unique(few.target, return_inverse=True)
        return replace(few, classes=self.classes[numbers], target=target)

    def validated(
        self, folds: Int[np.ndarray, " labeled"], strengths: Sequence[float]
    ) -> "Validated":
        """Predict images by fits without them; rows are among these."""
        x, y, num = self.held, self.y, len(self.classes)

        def fit(some: Tensor, strengths: Sequence[float]) -> list[LinearFit]:
            learned = x[some] if isinstance(x, Tensor) else self.subset(some.numpy()).x
            return fit_path(learned, y[some], num, strengths, CHOICE_STEPS)

        def logits(fitted: LinearFit, some: Tensor) -> Tensor:
            return x[some] @ fitted.weight + fitted.bias

        return validate(fit, logits, self.target, num, folds, strengths)

    @property
    def y(self) -> Int[Tensor, " labeled"]:
        return torch.from_numpy(self.target).to(self.x.mean.device)

    @property
    def held(self) -> Float[Tensor, "labeled dim"] | Standardized:
        """The features, standardized at once if they are few."""
        n, dim = self.x.shape
        return self.x[:] if n * dim <= HELD else self.x

    def probe(self, choice: Choice) -> LinearProbe:
        """Fit all images."""
        (fit,) = fit_path(self.held, self.y, len(self.classes), (choice.strength,))
        scale = self.x.mean, self.x.std, self.x.basis
        return LinearProbe(*scale, fit.weight, fit.bias, self.classes, choice, fit.converged)


def _moments(features: Features) -> tuple[Float[Tensor, " dim"], Float[Tensor, " dim"]]:
    """Return means and standard deviations; the latter are one where features are constant."""
    n, dim = features.shape

    def mean_of(function: Callable[[Tensor], Tensor]) -> Float[Tensor, " dim"]:
        size = max(1, BLOCK // dim)
        parts = (function(features[rows].float()).sum(dim=0).double() for rows in blocks(n, size))
        return (sum(parts) / n).float()  # type: ignore[union-attr]

    mean = mean_of(lambda x: x)
    std = mean_of(lambda x: (x - mean).square()).sqrt()
    return mean, torch.where(std > 1e-6 * mean.abs(), std, 1.0)  # a constant is but noise


def _leading(x: Standardized, seed: int) -> Float[Tensor, "dim reduced"]:
    """Return the `WIDEST` leading principal components of at most `MOST` rows."""
    few = np.random.default_rng(seed).permutation(x.shape[0])[:MOST]
    rows = x[np.sort(few)].cpu().numpy()
    return torch.from_numpy(principal_components(rows, WIDEST).directions.copy()).to(x.mean)


# Held-out images


def folds_of(labels: Numbers, groups: Numbers, seed: int, folds: int = FOLDS) -> Numbers:
    """Return the fold in which each image is held out, `LEFT_OUT` for none.

    The groups of each class are dealt to all folds in turn; with a single fold, a fifth of them
    is, and at least one. A group is dealt with the class of its first image. Of no class are all
    groups held out at once: nothing would be left to learn it from. (StratifiedGroupKFold of
    scikit-learn takes 12 s for 12,000 groups.)
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
    for label in np.unique(labels):
        own = member[labels == label]
        if (fold[own] == fold[own[0]]).all():
            fold[own[0]] = LEFT_OUT
    return np.asarray(fold[member])


def choice_folds(labels: Numbers, groups: Numbers, seed: int, enough: int = ENOUGH) -> Numbers:
    """Return the same, with no further fold after as many images as a choice needs."""
    folds = folds_of(labels, groups, seed)
    sizes = np.bincount(folds[folds != LEFT_OUT], minlength=FOLDS)
    needed = 1 + int(np.searchsorted(sizes.cumsum(), enough))
    return np.where(folds < needed, folds, LEFT_OUT)


@dataclass(frozen=True, eq=False)
class Validated:
    """The choice of a regularization, and what was predicted of images while held out."""

    choice: Choice
    rows: Int[np.ndarray, " held_out"]  # The images that were held out at some time
    logits: Float32[np.ndarray, "held_out classes"]  # With the chosen `C`, by fits without them
    target: Int[np.ndarray, " held_out"]  # Their classes

    @property
    def correct(self) -> Bool[np.ndarray, " held_out"]:
        """Whether the most likely class is right."""
        return np.asarray(self.logits.argmax(axis=1) == self.target)

    def at(self, rows: Numbers) -> "Validated":
        """Return the same, of images at these positions among others."""
        return replace(self, rows=rows[self.rows])


def validate(
    fit: Callable[[Tensor, Sequence[float]], Sequence[Fit]],
    logits: Callable[[Fit, Tensor], Tensor],
    target: Numbers,
    num_classes: int,
    folds: Numbers,
    strengths: Sequence[float],
) -> Validated:
    """Choose the strength with the best accuracy on held-out images; of equals, the least loss.

    `fit` fits the images of some rows for each strength in turn, and `logits` is what a fit
    predicts of others. For `folds` see `folds_of`.
    """
    rows = np.flatnonzero(folds >= 0)
    truth, fold_of = target[rows], folds[rows]
    if not len(rows):
        return Validated(Choice(1.0, 0), rows, np.zeros((0, num_classes), np.float32), truth)
    held_out = np.zeros((len(strengths), len(rows), num_classes), np.float32)
    for fold in np.unique(fold_of):
        inside = torch.from_numpy(np.flatnonzero((folds != fold) & (folds != UNUSED)))
        own = fold_of == fold
        outside = torch.from_numpy(rows[own])
        for position, fitted in enumerate(fit(inside, strengths)):
            held_out[position, own] = logits(fitted, outside).float().cpu().numpy()
    ranks = [(np.count_nonzero(x.argmax(axis=1) != truth), log_loss(x, truth)) for x in held_out]
    best = ranks.index(min(ranks))  # the first of equal ones
    choice = Choice(strengths[best], len(rows), at_end=best in (0, len(strengths) - 1))
    return Validated(choice, rows, held_out[best], truth)


def log_loss(logits: Float[np.ndarray, "n classes"], target: Numbers) -> float:
    """Return the mean negative log-likelihood of the true classes, in nats.

    >>> round(log_loss(np.zeros((1, 2)), np.array([0])), 4)
    0.6931
    """
    from scipy.special import log_softmax

    likelihood = log_softmax(logits.astype(np.float64), axis=1)[np.arange(len(target)), target]
    return float(-likelihood.mean())
