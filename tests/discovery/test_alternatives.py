"""What is told of other numbers of novel classes."""

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score, silhouette_samples

from nearkin.discovery.alternatives import describe, table


def test_sizes_silhouettes_and_agreement_are_those_of_the_clusters():
    generator = np.random.default_rng(0)
    truth = np.repeat(
        [0, 1, 2, 4], [5, 9, 20, 1]
    )  # two known classes; the second novel one is empty
    x = np.eye(5)[truth] + 0.2 * generator.normal(size=(len(truth), 5))
    others = [np.where(truth == 2, 3, truth), generator.permutation(truth)]
    found = describe(x, [truth, *others], num_known=2, num_novel=3, known=None)
    assert (found.novel, found.sizes) == (3, (20, 1, 0))
    values = silhouette_samples(x, truth, metric="cosine")
    of_class = [values[truth == number].mean() for number in (0, 1, 2)]
    assert found.silhouette == pytest.approx(np.mean(of_class))
    pairs = [(truth, others[0]), (truth, others[1]), others]
    assert found.seed_agreement == pytest.approx(np.mean([adjusted_rand_score(*p) for p in pairs]))
    alone = describe(x, [np.full(len(x), 2)], num_known=2, num_novel=1, known=None)
    assert (alone.silhouette, alone.seed_agreement) == (None, None)
    shown = table([found, alone], chosen=3)
    assert [row[:2] for row in shown.rows] == [("1", "35 to 35"), ("3 (the result)", "20 to 0")]
    assert {len(row) for row in shown.rows} == {len(shown.columns)}
