"""Curves of a discovery: how the number of classes was chosen, and how the training went."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from statistics import fmean

from nearkin.config import DiscoverConfig
from nearkin.discovery.assignments import Assignments
from nearkin.discovery.clusters import Cluster
from nearkin.discovery.outcome import OURS, Outcome, summary, write_tables
from nearkin.discovery.scores import Score
from nearkin.discovery.trials import MODE_METHOD
from nearkin.evaluation.embeddings import Embeddings, embeddings_of
from nearkin.report.page.values import Chart, ClassView, Confusion, DiscoveryReport, Table, Tile
from nearkin.report.pages import store_report, write_page
from nearkin.report.training_report import run_info
from nearkin.run.folder import lines
from nearkin.run.reporter import Logger
from nearkin.tables import read_numbers

LABELS = {
    "silhouette": "silhouette of the clusters",
    "dtc": "accuracy on held-out known classes (DTC)",
    "dtc_silhouette": "silhouette beside it (DTC)",
    "gcd": "accuracy on known classes (GCD)",
}


def counting(outcome: Outcome) -> list[Chart]:
    """The curves by which the number of classes was estimated; none if it was given."""
    estimate = outcome.estimate
    if estimate is None:
        return []
    series = {LABELS[name]: points for name, points in estimate.curves.items()}
    return [
        Chart(
            "How many novel classes?",
            "novel classes",
            "",
            series,
            "Each rule's estimate: "
            + ", ".join(f"{name} {number}" for name, number in estimate.estimates.items())
            + ".",
            estimate.chosen,
            (estimate.low, estimate.high),
        )
    ]


def training(outcome: Outcome) -> list[Chart]:
    """How the last stage of the result went."""
    rows = read_numbers(outcome.folder.stage(f"{MODE_METHOD[outcome.config.mode]}-0").metrics)
    charts = []
    for name in ("loss", "positive_rate", "entropy"):
        points = _by_epoch([(row["epoch"], row[name]) for row in rows if name in row])
        if points:
            title = name.replace("_", " ").capitalize()
            charts.append(Chart(title, "epoch", name.replace("_", " "), {name: points}))
    return charts


def _by_epoch(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over epochs."""
    epochs: dict[int, list[float]] = defaultdict(list)
    for epoch, value in points:
        epochs[ceil(epoch)].append(value)
    return [(float(epoch), fmean(values)) for epoch, values in sorted(epochs.items())]


USUAL = {**vars(DiscoverConfig(known="a,b")), "known": ""}
"""What settings are if nothing is said."""
MOST_SHOWN = 60
"""Classes with images; of more, the largest have some."""


def report_of(
    outcome: Outcome, assignments: Assignments, clusters: list[Cluster]
) -> DiscoveryReport:
    """What the page of a discovery tells."""
    images, estimate = outcome.dataset.images, outcome.estimate
    views = _views(outcome, assignments, clusters)
    novel = [
        view for cluster, view in zip(clusters, views, strict=True) if cluster.kind == "novel"
    ]
    others = [
        view for cluster, view in zip(clusters, views, strict=True) if cluster.kind == "known"
    ]
    return DiscoveryReport(
        run=run_info(
            "discover",
            outcome.data,
            outcome.config,
            USUAL,
            _protocol(outcome),
            _steps(outcome),
            tiny=images.is_small,
        ),
        mode=outcome.config.mode,
        known=outcome.dataset.classes,
        num_labeled=len(images) - len(outcome.rows),
        num_unlabeled=len(outcome.rows),
        novel=tuple(novel),
        assigned=tuple(others),
        num_novel_source=(
            "given with --classes" if estimate is None else "estimated by three rules"
        ),
        interval=None if estimate is None else (estimate.low, estimate.high),
        score_meaning=_confidence(outcome),
        findings=tuple(finding.text for finding in outcome.findings),
        results=tuple(_results(outcome)),
        confusion=_confusion(outcome),
        num_novel_curves=tuple(counting(outcome)),
        curves=tuple(training(outcome)),
    )


def write_outcome(outcome: Outcome, log: Logger) -> None:
    """Leave everything in the run folder, the summary last: it says that the run is complete."""
    assignments = outcome.assignments()
    clusters = outcome.clusters(assignments)
    write_tables(outcome, assignments, clusters, log)
    folder = outcome.folder
    report = report_of(outcome, assignments, clusters)
    store_report(folder, report)
    _embeddings(outcome).write(folder.embeddings)
    write_page(folder, outcome.dataset.images)
    numbers = summary(outcome, clusters)
    folder.write_summary(numbers)
    log.note("\n".join(lines(numbers)))
    log.line(f"look   {folder.report.resolve()}")


def _embeddings(outcome: Outcome) -> Embeddings:
    """What the classifier stands on, of all images, with their true classes where known."""
    import numpy as np

    dataset = outcome.dataset
    images = dataset.images
    if dataset.truth is not None:
        images = replace(images, labels=dataset.truth, classes=dataset.names)
    splits = np.full(len(images), "train")
    splits[dataset.parts.test_rows] = "test"
    return replace(embeddings_of(images, outcome.predictions.features), splits=splits)


def _views(outcome: Outcome, assignments: Assignments, clusters: list[Cluster]) -> list[ClassView]:
    """What is shown of each class, without pixels."""
    largest = sorted(clusters, key=lambda cluster: -cluster.size)[:MOST_SHOWN]
    shown = {cluster.name for cluster in largest}
    place = {row: position for position, row in enumerate(outcome.rows.tolist())}
    names = outcome.dataset.images.names

    def images(cluster: Cluster, group: str) -> tuple[Tile, ...]:
        if cluster.name not in shown:
            return ()
        rows = outcome.groups(assignments, cluster.number)[group].tolist()
        return tuple(Tile(names[row], "", float(assignments.score[place[row]])) for row in rows)

    return [
        ClassView(
            name=cluster.name,
            size=cluster.size,
            medoid=next(iter(images(cluster, "medoid")), None),
            core=images(cluster, "core"),
            border=images(cluster, "border"),
            score=cluster.score,
            stability=cluster.stability,
            silhouette=cluster.silhouette,
            nearest_known=cluster.nearest_known,
            merge=cluster.merge,
            truth=_truth(outcome, cluster),
        )
        for cluster in clusters
    ]


def _truth(outcome: Outcome, cluster: Cluster) -> str:
    """What most images of a cluster are in truth."""
    import numpy as np

    truth = outcome.dataset.truth
    if truth is None or not cluster.size:
        return ""
    members = outcome.rows[outcome.predictions.cluster[outcome.rows] == cluster.number]
    found = truth[members][truth[members] >= 0]
    if not len(found):
        return ""
    number, count = np.unique(found, return_counts=True)
    most = count.argmax()
    name = outcome.dataset.names[number[most]]
    return f"{count[most] / len(found):.0%} of it are {name}, by the truth."


def _confidence(outcome: Outcome) -> str:
    if outcome.calibration is None:
        return (
            "A score is the classifier's largest output, not a probability: too few classes are "
            "known to hide some and see how often it is right."
        )
    found = outcome.calibration
    return (
        f"Scores were calibrated on {found.num_images} images of known classes that had been "
        f"hidden: there, they missed how often the class is right by {found.error_after:.1%} on "
        f"average ({found.error_before:.1%} before). On novel classes they may miss it by more."
    )


def _cell(score: Score) -> str:
    _, value, low, high, _ = score
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _results(outcome: Outcome) -> list[Table]:
    scores = outcome.scores()
    agreement = outcome.scoring.agreement(outcome.baselines, outcome.ours)
    protocols = dict.fromkeys(each[4] for each in scores[OURS])
    tables = []
    for protocol in protocols:
        own = [each[0] for each in scores[OURS] if each[4] == protocol]
        rows = [
            (name, *[_cell(each) for each in found if each[4] == protocol])
            for name, found in scores.items()
        ]
        tables.append(Table(own[0].split(",")[0], ("", *own), tuple(rows), f"{protocol}."))
    rows = [(name, f"{value:.3f}") for name, value in agreement.items()]
    if rows:
        note = (
            "Adjusted Rand index between our classes of unlabeled images and theirs: 1 if equal."
        )
        tables.append(Table("Agreement with the baselines", ("", "ARI"), tuple(rows), note))
    return tables


def _confusion(outcome: Outcome) -> Confusion | None:
    found = outcome.scoring.confusion(outcome.ours)
    if found is None:
        return None
    return Confusion(
        tuple(outcome.dataset.names[number] for number in found.classes),
        tuple(outcome.predictions.classes[number] for number in found.clusters),
        tuple(tuple(row) for row in found.count.tolist()),
    )


def _protocol(outcome: Outcome) -> list[str]:
    mode = (
        "Unlabeled images may be of known or of novel classes (gcd)."
        if outcome.config.mode == "gcd"
        else "Unlabeled images are taken to be of novel classes only (ncd)."
    )
    trunk = outcome.config.train_layers
    learned = (
        "The encoder learned without labels and stays as it is; a layer on top learned from them."
        if trunk == "top"
        else f"The encoder learned without labels first; then {trunk} of it learned from them."
    )
    return [
        mode,
        learned,
        f"Learned from: {len(outcome.task.labeled)} labeled and {len(outcome.task.unlabeled)} "
        f"unlabeled images. Held out: {len(outcome.dataset.parts.test_rows)}.",
        "The last epoch counts. The strength was chosen by hiding known classes, and nothing by "
        "the labels of novel ones.",
    ]


def _steps(outcome: Outcome) -> list[tuple[str, str]]:
    run, data = outcome.folder.path, outcome.data
    return [
        (
            f"Name the classes you accept, in the column name of {outcome.folder.clusters.name}.",
            "",
        ),
        (
            "Look for more classes, with these as known ones.",
            f"nearkin discover {data} --accept {run}",
        ),
        ("Sort new images into these classes.", f"nearkin assign {run} NEW_PICTURES -o new.csv"),
    ]
