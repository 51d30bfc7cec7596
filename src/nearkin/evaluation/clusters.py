"""Whether the classes form clusters: k-means against the labels."""

import warnings
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from nearkin.errors import DataError
from nearkin.evaluation.measure import Measure, known
from nearkin.measures.intervals import bootstrap
from nearkin.measures.kmeans import WIDEST, compact
from nearkin.measures.matching import cluster_accuracy

Labels = Int[np.ndarray, " n"]


def clusters(
    features: Float[Tensor, "n dim"], labels: Int[np.ndarray, " n"], *, seed: int
) -> list[Measure]:
    """Measure how well k-means, given the number of classes, separates the classes.

    Accuracy under the best one-to-one match, normalized mutual information (arithmetic mean)
    and adjusted Rand index. Their intervals resample the images and keep the clustering. Images
    without a label are left out.

    Raises:
        DataError: If fewer than two classes have labels.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    truth = labels[known(labels)]
    k = len(np.unique(truth))
    if k < 2:
        raise DataError("clusters need labeled test images of two classes or more")
    with warnings.catch_warnings():  # collapsed features have fewer points than clusters
        warnings.simplefilter("ignore", ConvergenceWarning)
        kmeans = KMeans(k, n_init=10, random_state=seed)
        assigned = kmeans.fit_predict(compact(features[known(labels)])).astype(np.int64)
    protocol = (
        f"k-means of {len(truth)} test images, k {k} (the number of classes), 10 starts, "
        f"unit features, {min(features.shape[1], WIDEST)} dimensions; "
        "interval as if images were independent, clustering fixed"
    )

    def score(
        name: str, statistic: Callable[[Labels, Labels], float], lowest: float = 0.0
    ) -> Measure:
        def resampled(rows: Labels) -> float:
            return statistic(truth[rows], assigned[rows])

        interval = bootstrap(resampled, len(truth), seed=seed, bounds=(lowest, 1.0))
        return Measure(name, float(statistic(truth, assigned)), *interval, protocol)

    return [
        score("cluster accuracy", lambda labels, clusters: cluster_accuracy(labels, clusters)[0]),
        score("NMI", normalized_mutual_info_score),
        score("ARI", adjusted_rand_score, lowest=-0.5),
    ]
