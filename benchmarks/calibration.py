"""Whether the temperature of `nearkin classify` lowers the log-loss of images it has not seen.

    python benchmarks/calibration.py [FASHION_MNIST.npz] [--sizes 50,100,200,500,1200] [--seeds 20]

A linear probe on raw pixels learns from random subsets of scikit-learn's digits, or of the first
8,000 images of an .npz with x_train and y_train, every other pixel; at most 3,000 others
are scored. For each size: the mean test log-loss over the seeds as the probe gives it, its
change by the temperature with the standard error of that, the largest change, and how often it
was better, unchanged and worse. Seeds that draw fewer than two images of a class are left out.
"""

import argparse
from statistics import fmean, stdev
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int64
from scipy.special import log_softmax, softmax
from sklearn.datasets import load_digits

from nearkin.discovery.classifier import fit_temperature
from nearkin.measures.probe import log_loss, train_validated_probe

NUM_IMAGES: Final = 8_000
NUM_TEST: Final = 3_000


def pixels(file: str | None) -> tuple[Float[np.ndarray, "n dim"], Int64[np.ndarray, " n"]]:
    """Return images as vectors, and their classes."""
    if file is None:
        x, y = load_digits(return_X_y=True)
        return x.astype(np.float32), y
    with np.load(file) as data:
        x, y = data["x_train"][:NUM_IMAGES], data["y_train"][:NUM_IMAGES]
    return x[:, ::2, ::2].reshape(len(x), -1).astype(np.float32), y.astype(np.int64)


def losses(
    x: Float[np.ndarray, "n dim"], y: Int64[np.ndarray, " n"], size: int, seed: int
) -> tuple[float, float] | None:
    """Return the test log-loss without and with the temperature, of one subset."""
    order = np.random.default_rng(seed).permutation(len(x))
    train, test = order[:size], order[size : size + NUM_TEST]
    if np.bincount(y[train], minlength=y.max() + 1).min() < 2:
        return None
    probe, validated = train_validated_probe(
        torch.from_numpy(x[train]), y[train], seed=seed, predict_all=True
    )
    held_out = softmax(validated.logits, axis=1)
    fitted = fit_temperature(held_out, validated.target, validated.rows)
    logits = log_softmax(probe.logits(torch.from_numpy(x[test])).double().numpy(), axis=1)
    return log_loss(logits, y[test]), log_loss(logits / fitted.temperature, y[test])


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", nargs="?")
    parser.add_argument("--sizes", default="50,100,200,500,1200")
    parser.add_argument("--seeds", type=int, default=20)
    typed = parser.parse_args()
    x, y = pixels(typed.file)
    for size in map(int, typed.sizes.split(",")):
        drawn = [losses(x, y, size, seed) for seed in range(typed.seeds)]
        pairs = [pair for pair in drawn if pair is not None]
        changes = [after - before for before, after in pairs]
        signs = [sum(np.sign(changes) == sign) for sign in (-1, 0, 1)]
        print(
            f"{size:5} images  {fmean(before for before, _ in pairs):.4f}  "
            f"{fmean(changes):+.4f} +- {stdev(changes) / len(changes) ** 0.5:.4f}  "
            f"at most {max(changes):+.4f}  better {signs[0]}, unchanged {signs[1]}, "
            f"worse {signs[2]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
