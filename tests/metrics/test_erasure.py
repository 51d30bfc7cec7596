"""LEACE: the guarantee of the paper, the least change, and what is kept."""

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

from nearkin.metrics.erasure import leace


def drawn(n=2000, dim=6, seed=0):
    """Features that show three values of a column, and two classes that go along with them."""
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, 2, n)
    value = np.where(rng.random(n) < 0.5, classes, rng.integers(0, 3, n))
    mixed = rng.normal(size=(dim, dim))
    x = (
        rng.normal(size=(n, dim)) @ mixed
        + 2 * np.eye(3, dim)[value]
        + 3 * np.eye(2, dim, 3)[classes]
    )
    return torch.from_numpy(x).float(), torch.from_numpy(np.eye(3)[value]).float(), classes, value


def test_afterwards_no_linear_classifier_tells_the_column():
    x, z, _, value = drawn()
    one = np.zeros(len(x), np.int64)
    erased = leace(x, z, one)(x)
    covariance = (erased - erased.mean(0)).T @ (z - z.mean(0)) / len(x)
    assert covariance.abs().max() < 1e-5
    means = torch.stack([erased[value == each].mean(0) for each in range(3)])
    assert (means - means[0]).abs().max() < 1e-4
    fit = LogisticRegression(C=1e6, max_iter=1000)
    commonest = np.bincount(value).max() / len(value)
    assert fit.fit(x, value).score(x, value) > commonest + 0.1
    assert abs(fit.fit(erased, value).score(erased, value) - commonest) < 0.002
    assert torch.allclose(erased.mean(0), x.mean(0), atol=1e-4)


def test_it_is_the_equation_of_the_paper_and_changes_less_than_a_projection():
    x, z, _, _ = drawn()
    erased = leace(x, z, np.zeros(len(x), np.int64))(x).double()
    rows, hot = x.double() - x.double().mean(0), z.double() - z.double().mean(0)
    covariance, cross = rows.T @ rows / len(x), rows.T @ hot / len(x)
    values, vectors = torch.linalg.eigh(covariance)
    w = vectors @ torch.diag(values**-0.5) @ vectors.T
    p = (w @ cross) @ torch.linalg.pinv(w @ cross, rtol=1e-6)
    restated = x.double() - rows @ (torch.linalg.inv(w) @ p @ w).T
    # Shrinkage of 2,000 images in 6 dimensions is next to nothing.
    assert (erased - restated).abs().max() < 0.02 * (restated - x).abs().max()
    onto = cross @ torch.linalg.pinv(cross, rtol=1e-6)
    assert (erased - x).square().sum() < 0.95 * (rows @ onto.T).square().sum()


def test_within_classes_what_the_column_shares_with_them_stays():
    x, z, classes, _ = drawn()
    erased = leace(x, z, classes)(x)
    within = sum(
        (own - own.mean(0)).T @ (hot - hot.mean(0))
        for own, hot in ((erased[classes == c], z[classes == c]) for c in (0, 1))
    )
    assert within.abs().max() / len(x) < 1e-5
    plain = leace(x, z, np.zeros(len(x), np.int64))(x)
    fit = LogisticRegression(C=1e6, max_iter=1000)
    kept, lost = (fit.fit(of, classes).score(of, classes) for of in (erased, plain))
    assert kept > lost + 0.01


def test_fewer_images_than_dimensions_still_lose_the_column():
    x, z, _, value = drawn(n=30, dim=80, seed=1)
    erased = leace(x, z, np.zeros(30, np.int64))(x)
    means = torch.stack([erased[value == each].mean(0) for each in range(3)])
    assert torch.isfinite(erased).all()
    assert (means - means[0]).abs().max() < 1e-3
