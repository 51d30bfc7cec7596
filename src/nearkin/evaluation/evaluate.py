"""Everything that can be said about features, whatever labels there are."""

from collections.abc import Callable, Mapping

from nearkin.errors import DataError
from nearkin.evaluation.clusters import clusters
from nearkin.evaluation.features import Features
from nearkin.evaluation.geometry import geometry
from nearkin.evaluation.knn import knn
from nearkin.evaluation.measure import Measure
from nearkin.evaluation.probe import linear_probe
from nearkin.evaluation.report import Evaluation
from nearkin.pace import Tell, nobody, under


def evaluate_features(
    train: Features,
    test: Features,
    *,
    seed: int,
    k: int = 200,
    temperature: float = 0.1,
    tell: Tell = nobody,
) -> tuple[list[Measure], dict[str, str]]:
    """Measure test features with the help of training features.

    Args:
        train: The bank of kNN, and what the linear probe learns from.
        test: What is scored. Its labels decide nothing but the scores.
        seed: Decides held-out images, starts of k-means and resampling.
        k: Neighbors of kNN.
        temperature: Of the votes of kNN.
        tell: Hears what is measured.

    Returns:
        The measures, and why others could not be taken, by name.
    """
    known = (train.vectors, train.labels, test.vectors, test.labels)
    attempts: dict[str, Callable[[], list[Measure]]] = {
        "kNN top-1": lambda: [knn(*known, k=k, temperature=temperature)],
        "linear probe": lambda: [linear_probe(*known, seed=seed, groups=train.groups)],
        "clusters": lambda: clusters(test.vectors, test.labels, seed=seed),
        "geometry": lambda: geometry(test.vectors, test.other_view, test.seen),
    }
    measures: list[Measure] = []
    left_out: dict[str, str] = {}
    for done, (name, attempt) in enumerate(attempts.items()):
        tell(done, len(attempts), name)
        try:
            measures += attempt()
        except DataError as error:
            left_out[name] = str(error)
    tell(len(attempts), len(attempts), "measured")
    return measures, left_out


def evaluate(
    tables: Mapping[str, tuple[Features, Features]],
    *,
    seed: int,
    k: int = 200,
    temperature: float = 0.1,
    tell: Tell = nobody,
) -> Evaluation:
    """The same measures for several tables of features of the same images.

    Args:
        tables: Training and test features by name: `encoder`, whose numbers of images are
            reported, and the floors it has to beat.
        seed: See `evaluate_features`, as for `k` and `temperature`.
        k: Neighbors of kNN.
        temperature: Of the votes of kNN.
        tell: Hears what is measured.
    """
    measures: dict[str, list[Measure]] = {}
    left_out: dict[str, str] = {}
    parts = zip(("train", "test"), next(iter(tables.values())), strict=True)
    sizes = {part: len(features.labels) for part, features in parts}
    for name, (train, test) in tables.items():
        measures[name], reasons = evaluate_features(
            train, test, seed=seed, k=k, temperature=temperature, tell=under(name, tell)
        )
        left_out |= reasons
    return Evaluation(sizes, measures, left_out)
