"""The files of a finished discovery: tables, page and summary."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
from msgspec import structs

from nearkin.classifier.assignments import COLUMNS
from nearkin.classifier.report import class_views, flag_counts, score_meaning, tiles, write_results
from nearkin.data.notes import plain
from nearkin.discovery.clusters import (
    CLUSTER_COLUMNS,
    LABEL_COLUMNS,
    Alternative,
    Cluster,
    cluster_table,
    label_table,
)
from nearkin.discovery.outcome import FAR, OURS, Outcome
from nearkin.discovery.scores import confusion, mode_match
from nearkin.discovery.start import kept_encoder
from nearkin.discovery.trials import accuracies, candidates
from nearkin.evaluation.embeddings import Embeddings, embeddings_of
from nearkin.evaluation.evaluate import metric_rows
from nearkin.metrics.metric import Metric
from nearkin.pace import count
from nearkin.report.encoder_report import command, run_sections, training_curves, typed
from nearkin.report.page.blocks import (
    Cards,
    Chart,
    ClassView,
    Confusion,
    Findings,
    Page,
    Paragraphs,
    Table,
    Tiles,
)
from nearkin.run.data import computed_with, versions
from nearkin.tables import write_csv
from nearkin.text import aligned
from nearkin.types import UNLABELED

TO_LABEL: Final = 100  # Images whose labels would teach most, in to_label.csv
ON_PAGE: Final = 20  # Of these on the page
MAX_NAMED: Final = 12  # Known classes named in the first paragraph
RELIABILITY: Final = (
    "A reliable class is large, stable across seeds, well separated (silhouette), and its least "
    "confident images still look like its most typical ones."
)


def write_outcome(outcome: Outcome) -> None:
    """Write all files of a finished discovery, the summary last: it marks the run complete."""
    folder, assignments = outcome.run.folder, outcome.assignments
    if not folder.assignments.exists():  # the last of the three, which the user may edit then
        classes = cluster_table(outcome.clusters, assignments)
        write_csv(folder.clusters, CLUSTER_COLUMNS, classes, to_edit=True)
        to_label = label_table(assignments, outcome.to_label[:TO_LABEL])
        write_csv(folder.to_label, LABEL_COLUMNS, to_label, to_edit=True)
        write_csv(folder.assignments, COLUMNS, assignments.table())
    numbers = summary(outcome)
    write_results(
        outcome.run,
        outcome.dataset.images,
        _embeddings(outcome),
        build_page(outcome, numbers),
        numbers,
        data=outcome.data,
        encoder=outcome.digest,
    )
    outcome.run.log.debug("\n".join(lines(numbers)))


def summary(outcome: Outcome) -> dict[str, Any]:
    """Return all numbers as plain values."""
    state, config, calibration = outcome.state, outcome.run.config, outcome.classifier.calibration
    held_out, tried = outcome.outliers, accuracies(state.trials)
    return {
        "command": "discover",
        "mode": config.mode,
        "data": outcome.data,
        "known": list(outcome.dataset.classes),
        "novel": outcome.task.num_novel,
        "labeled": int((outcome.dataset.label != UNLABELED).sum()),
        "unlabeled": len(outcome.assignments.rows),
        "held_out": len(outcome.dataset.parts.test_rows),
        "number": state.estimate and asdict(state.estimate),
        "alternatives": [each.to_dict() for each in outcome.alternatives],
        "objective": state.chosen.method,
        "options": state.options(outcome.task.num_novel),
        "trials": {str(each): fmean(by_fold) for each, by_fold in tried.items()},
        "calibration": calibration and asdict(calibration),
        "outliers": {"held_out": held_out and held_out.to_dict()},
        "flags": flag_counts(outcome.assignments),
        "scores": {
            name: [score.to_dict() for score in scores] for name, scores in outcome.scores.items()
        },
        "score_quality": [each.to_dict() for each in outcome.score_quality],
        "clusters": [asdict(cluster) for cluster in outcome.clusters],
        "findings": [asdict(finding) for finding in outcome.findings],
        "notes": plain(outcome.dataset.images.notes),
        **computed_with(config.seed),
    }


def lines(summary: Mapping[str, Any]) -> list[str]:
    """Summarize a discovery in lines: classes, scores beside the baselines, and warnings."""
    sizes, named = _sizes(summary, "novel"), _sizes(summary, "known")
    classes = count(len(sizes), "novel class")
    if sizes:
        classes += f" of {min(sizes)} to {max(sizes)} images"
    into = f", and {sum(named)} images of known classes" if named else ""
    scores = summary["scores"].items()
    heading, *rows = metric_rows({way: [Metric(**each) for each in of] for way, of in scores})
    return [
        f"found  {classes}{into}",
        *(aligned([heading, *rows]) if rows else []),
        *(f"warning: {finding['text']}" for finding in summary["findings"]),
    ]


def _sizes(summary: Mapping[str, Any], kind: str) -> list[int]:
    """Return how many unlabeled images are in each of the novel or of the known classes."""
    return [cluster["size"] for cluster in summary["clusters"] if cluster["kind"] == kind]


def _embeddings(outcome: Outcome) -> Embeddings:
    """Return the features that the heads take, with true classes where these are known."""
    dataset, images = outcome.dataset, outcome.dataset.images
    if dataset.truth is not None:
        images = replace(images, labels=dataset.truth, classes=dataset.names)
    embedded = embeddings_of(images, outcome.assignments.predictions.features)
    return replace(embedded, splits=dataset.parts.splits)


def build_page(outcome: Outcome, summary: Mapping[str, Any]) -> Page:
    """Return the content of the page."""
    images, novel, known = outcome.dataset.images, *_views(outcome)
    stage = outcome.run.folder.stage(f"{outcome.state.chosen.method}-0")  # the result's last one
    num_novel = count(len(novel), "novel class") if novel else "No novel class"
    name, num_unlabeled = Path(outcome.data).name, len(outcome.assignments.rows)
    none = () if novel else ("None: every image was assigned to a known class.",)
    assigned = ("Unlabeled images that were assigned to a known class.",) if known else ()
    return Page(
        kicker="nearkin discover",
        title=f"{num_novel} in {name}",
        lead=lead(summary, _origin_of_number(outcome)),
        sections=(
            ("Findings", (Findings(tuple(finding.text for finding in outcome.findings)),)),
            ("Novel classes", (Paragraphs(none), Cards("new", novel, num_unlabeled))),
            ("Known classes", (Paragraphs(assigned), Cards("known", known, num_unlabeled))),
            ("Images to look at", (_label_these(outcome),)),
            ("Confidence", (Paragraphs((_confidence(outcome), RELIABILITY)),)),
            ("Scores against the ground truth", (*_results(outcome), *_confusion(outcome))),
            ("Number of classes", tuple(_number(outcome))),
            ("Training curves", tuple(training_curves(stage).values())),
            *run_sections(
                outcome.run.folder,
                outcome.data,
                outcome.run.config,
                _protocol(outcome),
                _next_steps(outcome),
                versions(),
            ),
        ),
        tiny=images.is_small,
    )


def _views(outcome: Outcome) -> tuple[tuple[ClassView, ...], tuple[ClassView, ...]]:
    """Return what is shown of the novel classes, and of the known ones."""
    shown, views = class_views(outcome.assignments), dict[str, list[ClassView]](novel=[], known=[])
    for cluster in outcome.clusters:
        view = shown.get(cluster.number, ClassView(cluster.name, 0))
        described = ("seed_agreement", "silhouette", "nearest_known", "merge")
        own = {name: getattr(cluster, name) for name in described}
        view = structs.replace(view, **own, truth=_truth(outcome, cluster))
        views[cluster.kind].append(view)
    return tuple(views["novel"]), tuple(views["known"])


def lead(summary: Mapping[str, Any], number: str) -> str:
    """Return the first paragraph: what was asked, and what was found.

    `number` says how many novel classes were wanted and why.
    """
    known, novel, assigned = summary["known"], _sizes(summary, "novel"), _sizes(summary, "known")
    num_novel, more = count(len(novel), "novel class"), len(known) - MAX_NAMED
    names = ", ".join(known[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
    result = f"All unlabeled images were assumed novel and clustered into {num_novel}."
    if summary["mode"] == "gcd":
        result = (
            f"Of these, {sum(novel):,} were clustered into {num_novel}, and {sum(assigned):,} "
            "were assigned to known classes."
        )
    return (
        f"{count(summary['labeled'], 'image')} of {count(len(known), 'known class')} ({names}) "
        f"came with a label; {sum(novel) + sum(assigned):,} came without. {result} The number of "
        f"novel classes was {number}."
    )


def _label_these(outcome: Outcome) -> Tiles:
    return Tiles(
        "Label these first",
        "The most typical image of each novel class; then the least certain one of each class, "
        "and the next of each: their labels would teach the next round most. Below each, the "
        "class that it was put in.",
        tiles(outcome.assignments, outcome.to_label[:ON_PAGE], with_class=True),
    )


def _origin_of_number(outcome: Outcome) -> str:
    estimate = outcome.state.estimate
    if estimate is not None:
        by = " and ".join(estimate.estimates)
        return f"estimated by {by}; the interval is {estimate.low} to {estimate.high}"
    return "given, or left of the round before" if outcome.run.config.accept else "given"


def _truth(outcome: Outcome, cluster: Cluster) -> str:
    """Say which true class most images of a cluster have."""
    truth, assignments = outcome.dataset.truth, outcome.assignments
    if truth is None:
        return ""
    classes = truth[assignments.rows[assignments.cluster == cluster.number]]
    number, sizes = np.unique(classes[classes != UNLABELED], return_counts=True)
    if not len(sizes):
        return ""
    most = sizes.argmax()
    name = outcome.dataset.names[number[most]]
    return f"{sizes[most] / sizes.sum():.0%} of its images are {name} in truth."


def _confidence(outcome: Outcome) -> str:
    calibration = outcome.classifier.calibration
    if calibration is None:
        few = "too few known classes or labels to hold some out and measure how often it is right"
        return score_meaning(None, few)
    meaning = score_meaning(calibration, "images of held-out known classes")
    errors = [each.value for each in outcome.score_quality if each.name.startswith("ECE")]
    of_novel = f"is {errors[-1]:.1%}" if errors else "may be larger"
    return f"{meaning} On novel classes it {of_novel}."


def _results(outcome: Outcome) -> list[Table]:
    """Return the scores beside those of the baselines; nothing if there are none."""
    ours = [*outcome.scores[OURS], *outcome.score_quality]
    heading, *rows = metric_rows(outcome.scores | {OURS: ours})
    note = (
        "With 95 % confidence intervals. The baselines have the same labels. ECE: the expected "
        "calibration error of the score, 0 is best. AUROC: how often an image whose class is "
        "right has a higher score than one whose class is wrong."
    )
    title, cells = "Scores beside their baselines", tuple(map(tuple, rows))
    return [Table(title, ("", *heading[1:]), cells, note)] if rows else []


def _confusion(outcome: Outcome) -> tuple[Confusion, ...]:
    """Count true classes against those of the result, over unlabeled training images."""
    task, truth = outcome.task, outcome.dataset.truth
    if truth is None or (truth[task.unlabeled] == UNLABELED).all():
        return ()
    y, x = truth[task.unlabeled], outcome.clusterings[OURS].of(task)[task.unlabeled]
    names = outcome.dataset.names, outcome.assignments.classes
    return (confusion(y, x, mode_match(y, x, task), *names),)


def _number(outcome: Outcome) -> Iterator[Chart | Table]:
    """Yield what an estimated number of classes goes by, and what its interval's ends find."""
    if estimate := outcome.state.estimate:
        yield Chart(
            "How many novel classes?",
            "novel classes",
            "silhouette of the clusters",
            {"silhouette": estimate.curve},
            f"Each rule's estimate: {estimate.text}.",
            estimate.chosen,
            (estimate.low, estimate.high),
        )
    if outcome.alternatives:
        yield alternative_table(outcome.alternatives, outcome.task.num_novel)


def alternative_table(alternatives: Sequence[Alternative], chosen: int) -> Table:
    """Return a row for each number, from the least."""
    rows = [
        (
            f"{each.novel} (the result)" if each.novel == chosen else str(each.novel),
            f"{each.sizes[0]} to {each.sizes[-1]}",
            *("" if x is None else f"{x:.3f}" for x in (each.silhouette, each.seed_agreement)),
            "" if each.known is None else str(each.known),
        )
        for each in sorted(alternatives, key=lambda each: each.novel)
    ]
    return Table(
        "The ends of the interval",
        ("novel classes", "images of each", "silhouette", "seed agreement", "known, held out"),
        tuple(rows),
        "The last stage was trained with each of these numbers too. Silhouette: mean over the "
        "classes, by the features of the encoder. Seed agreement: adjusted Rand index between "
        "trainings. To take another number, use its command among the next steps.",
    )


def _protocol(outcome: Outcome) -> Iterator[str]:
    config, task = outcome.run.config, outcome.task
    if task.disjoint:
        yield "Unlabeled images are taken to be of novel classes only (ncd)."
    else:
        yield "Unlabeled images may be of known or of novel classes (gcd)."
    encoder = f"The encoder is {config.encoder}, as it was"
    if config.encoder == "auto":
        encoder = "The encoder is trained on these images without labels"
    layers = "a layer on top" if config.train_layers == "top" else config.train_layers
    yield f"{encoder}; labels train {layers}."
    yield (
        f"Trained on {len(task.labeled)} labeled and {len(task.unlabeled)} unlabeled images. "
        f"Held out: {len(outcome.dataset.parts.test_rows)}."
    )
    origin = "as given or by default"
    if outcome.state.trials and len(candidates(config)) > 1:
        origin = "its share of positive pairs chosen on held-out known classes"
    yield (
        f"The last epoch counts. The objective is {outcome.state.chosen}, {origin}; nothing was "
        "chosen by the labels of novel classes."
    )
    for metric in (*outcome.scores[OURS], *outcome.score_quality):
        yield f"{metric.name}: {metric.sentence}."
    flags, held_out = outcome.assignments.flag, outcome.outliers
    measured = "" if held_out is None else f" Of held-out images, {held_out} are."
    yield (
        f"{flags.count('outlier')} of {len(flags)} unlabeled images are flagged as outliers: "
        f"{FAR}. They may be of none of the classes.{measured}"
    )


def _next_steps(outcome: Outcome) -> Iterator[tuple[str, str]]:
    folder, config, data = outcome.run.folder, outcome.run.config, outcome.data
    encoder = kept_encoder(config, folder)
    again = replace(config, encoder=encoder, method="auto", max_time="", devices=1)
    for number in (each.novel for each in outcome.alternatives):
        if number != outcome.task.num_novel:
            yield (
                f"Take {count(number, 'novel class')}; the features are kept.",
                command(data, replace(again, classes=number), folder.config),
            )
    yield (
        f"Name the classes you accept, in the column name of {folder.clusters.name}, those that "
        f"are one class alike; label single images in {folder.to_label.name}.",
        "",
    )
    yield (
        "Discover more classes, with these as known ones, from the same features.",
        typed("discover", data, "--accept", folder.path),
    )
    new = "NEW_IMAGES", "-o", "new.csv"
    yield "Sort new images into these classes.", typed("predict", folder.path, *new)
