"""Principal components: those of scikit-learn, whichever matrix they are taken from."""

import tracemalloc

import numpy as np
import pytest
from sklearn.decomposition import PCA

from nearkin.evaluation.layout import _principal_components
from nearkin.metrics import components
from nearkin.metrics.components import principal_components


def stretched(n, dim, seed=0):
    rng = np.random.default_rng(seed)
    return 3 + rng.normal(size=(n, dim)) * np.linspace(3, 0.5, dim)


@pytest.mark.parametrize("shape", [(90, 40), (40, 40), (40, 41), (40, 300)])
def test_the_components_are_those_of_scikit_learn(shape, monkeypatch):
    monkeypatch.setattr(components, "BLOCK", 1_000)  # several blocks
    rows = stretched(*shape)
    expected = PCA(12, svd_solver="full").fit(rows)
    mean, directions = principal_components(rows, 12)
    np.testing.assert_allclose(mean, expected.mean_)
    np.testing.assert_allclose(directions.T, expected.components_, atol=1e-9)
    few = principal_components(rows.astype(np.float32), 12).directions
    assert few.dtype == np.float32
    np.testing.assert_allclose(few.T, expected.components_, atol=1e-4)


def test_few_rows_have_no_more_components_than_they_span():
    rows = stretched(4, 9)
    directions = principal_components(rows, 4).directions
    np.testing.assert_allclose(directions.T @ directions, np.diag([1, 1, 1, 0]), atol=1e-9)


def test_few_rows_of_wide_features_take_no_covariance():
    """That of 3,000 columns has 72 MB."""
    rows = stretched(30, 3_000).astype(np.float32)
    tracemalloc.start()
    _principal_components(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6
