"""The content of an encoder's page, trained or frozen, from the files of its run folder."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from nearkin.config import ClassifyConfig, Config, EmbedConfig, TrainConfig
from nearkin.data.images import Images
from nearkin.encoders.origin import origin_lines
from nearkin.encoders.preprocessing import Preprocessing
from nearkin.evaluation.baselines import TITLES
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import Evaluation, metric_rows
from nearkin.evaluation.metrics import KNN, knn_classes
from nearkin.evaluation.verdict import RATIO_PROTOCOL, StartComparison
from nearkin.metrics.metric import Metric
from nearkin.pace import count
from nearkin.report.page.html import Chart, Points
from nearkin.report.page.sections import Confusion, RunInfo, Table, TrainingReport
from nearkin.run.data import versions
from nearkin.run.folder import RunFolder, data_name
from nearkin.schema import as_typed, option
from nearkin.tables import read_numbers

CURVES: Final = {
    "loss": ("Training loss", "Comparable only within one method."),
    "knn": (
        "kNN accuracy",
        "Top-1 accuracy on at most 1,000 held-out images, of at most 5,000 training images; the "
        "table has that of all images, beside its baselines.",
    ),
    "effective_rank": (
        "Effective rank",
        "Number of directions that the features use; a fall to a few is a collapse.",
    ),
    "feature_std": (
        "Feature standard deviation",
        "Scaled by the square root of the dimension: 1 for features spread evenly over the "
        "sphere, 0 for a collapse.",
    ),
}
"""Title and note of a chart, by the column of metrics.csv."""
HEADINGS: Final = {"encoder": "this encoder", "embedding": "its embedding", **TITLES}
"""What tables of features are called above the metrics."""
BASELINES: Final = ("untrained", "pixels")
LAST_EPOCH: Final = "The last epoch counts; nothing was chosen by the labels of held-out images."
COLLAPSED: Final = "There are signs of a collapse: compare with the baselines before use."
MAX_POINTS: Final = 300  # longer curves are thinned out


def meanings(metrics: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Return what each metric says; those that say the same say it once, by the first of them."""
    said = dict[str, str]()
    for metric in metrics:
        if metric["meaning"] and metric["meaning"] not in said.values():
            said[metric["name"]] = metric["meaning"]
    return tuple(said.items())


def training_curves(folder: RunFolder) -> dict[str, Chart]:
    """Return the curves of a training by column of metrics.csv, without empty ones."""
    rows = [] if folder.is_frozen else read_numbers(folder.metrics)
    charts = {}
    for column, (title, note) in CURVES.items():
        points = [(row["epoch"], row[column]) for row in rows if column in row]
        if points:
            thinned = np.linspace(0, len(points) - 1, min(MAX_POINTS, len(points))).astype(int)
            series: dict[str, Points] = {title: [points[row] for row in thinned]}
            charts[column] = Chart(title, "epoch", "", series, note)
    return charts


def training_report(folder: RunFolder, images: Images, embeddings: Embeddings) -> TrainingReport:
    """Return the content of the report of a finished training."""
    config, data = folder.settings()
    summary = folder.read_evaluated()
    metrics, evaluation = summary["metrics"], Evaluation.stored(summary)
    comparison = evaluation.comparison
    return TrainingReport(
        run=run_info(
            folder,
            data,
            config,
            images,
            protocol=(*protocols(summary), LAST_EPOCH),
            steps=tuple(_steps(folder, data, comparison)),
        ),
        lead=_lead(config, summary, images),
        verdict=f"Training {comparison.text}." if comparison else "",
        health=f"The embedding is {summary['verdict']}.",
        origin=tuple(_came_from(summary)),
        findings=(
            *license_findings(summary),
            *(comparison.findings() if comparison else ()),
            *([f"{evaluation.leaks}."] if evaluation.leaks else []),
            *column_findings(evaluation),
            *(f"The student {kept}." for kept in evaluation.kept),
            *([COLLAPSED] if summary["verdict"].startswith("collapsed") else []),
            *baseline_findings(evaluation),
        ),
        results=results(metrics),
        meanings=meanings(metrics["encoder"].values()),
        confusion=confusion(embeddings),
        curves=tuple(training_curves(folder).values()),
    )


def frozen_report(folder: RunFolder, images: Images, embeddings: Embeddings) -> TrainingReport:
    """Return the content of the report of a finished run of `nearkin embed`."""
    config, data = folder.encoder_settings()
    summary = folder.read_evaluated()
    metrics, health = summary["metrics"], summary["health"]
    evaluation = Evaluation.stored(summary)
    return TrainingReport(
        run=run_info(
            folder,
            data,
            config,
            images,
            protocol=(
                *protocols(summary),
                "Nothing was trained, and nothing was chosen by the labels of held-out images.",
            ),
            steps=tuple(_frozen_steps(folder.path, data)),
        ),
        lead=_frozen_lead(summary, images),
        health=(
            f"The embeddings use {health['effective_rank']:.0f} of {health['directions']:.0f} "
            f"directions (spread {health['feature_std']:.2f}, mean cosine "
            f"{health['mean_cosine']:.2f})."
        ),
        frozen=True,
        origin=_described(summary),
        findings=(
            *license_findings(summary),
            *column_findings(evaluation),
            *baseline_findings(evaluation),
        ),
        results=results(metrics),
        meanings=meanings(metrics["encoder"].values()),
        confusion=confusion(embeddings),
    )


def run_info(folder: RunFolder, data: str, config: Config, images: Images, **more: Any) -> RunInfo:
    """Return the `RunInfo` of a run, with `more` of its fields."""
    return RunInfo(
        data=Path(data).name,
        configuration=vars(config) | {"options": dict(getattr(config, "options", {}))},
        versions=versions(),
        command=command(data, config, folder.config),
        tiny=images.is_small,
        **more,
    )


def _lead(config: TrainConfig, summary: Mapping[str, Any], images: Images) -> str:
    sizes = summary["sizes"]
    held_out = f"; {sizes['test']:,} other images are held out" if "test" in sizes else ""
    taught = f", with {config.teacher} as its teacher" if config.teacher else ""
    origin = f", starting from {config.encoder}" if config.encoder else ""
    labels = _use_of_labels(images)
    if config.known:  # a setting of the methods that learn from labels
        labels = (
            f"It learned from the labels of {count(len(config.known), 'known class')}; all other "
            "labels are used only for the evaluation below."
        )
    return (
        f"{summary['title']} trained the backbone {config.backbone} on "
        f"{count(sizes['train'], 'image')} for {count(int(config.epochs), 'epoch')}"
        f"{origin}{taught}{held_out}. "
        f"{labels}"
    )


def _frozen_lead(summary: Mapping[str, Any], images: Images) -> str:
    sizes, origin = summary["sizes"], summary.get("origin", {})
    license_ = f" (license {origin['license']})" if origin.get("license") else ""
    trained = "not trained on these images"
    if "method" in summary:  # the encoder of a run
        trained = f"as {summary['method']} had trained it"
    held_out = f"; {sizes['test']:,} of them are held out for scoring" if "test" in sizes else ""
    return (
        f"A frozen {summary['backbone']}{license_}, {trained}, embedded "
        f"{count(sum(sizes.values()), 'image')}{held_out}. {_use_of_labels(images)}"
    )


def _use_of_labels(images: Images) -> str:
    if images.classes:
        return "Labels are used only for the evaluation below."
    return "There are no labels, so only the geometry of the embedding can be measured."


def _described(summary: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Name what the encoder is, how images reach it, and whose its weights are."""
    described = {
        "Encoder": summary["encoder"],
        "Architecture": f"{summary['backbone']}, {summary['feature_dim']} features",
        "Pooling": summary.get("pooling", ""),
        "Preprocessing": str(Preprocessing.from_dict(summary["preprocessing"])),
    }
    return (*((name, text) for name, text in described.items() if text), *origin_rows(summary))


def _came_from(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name the encoders that a training started or learned from, and whose weights these are."""
    for title, key in (("Start", "start"), ("Teacher", "teacher")):
        if key in summary:
            yield title, summary[key]
    if "average" in summary:
        yield "Weights", summary["average"]["text"].capitalize()
    yield from origin_rows(summary)


def origin_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name the license, the source and the checksum of an encoder's weights, where known."""
    titles = {"license": "License", "source": "Source", "sha256": "SHA-256 of its file"}
    origin = summary.get("origin", {})
    return ((title, origin[key]) for key, title in titles.items() if origin.get(key))


def license_findings(summary: Mapping[str, Any]) -> list[str]:
    """Return a warning if the license of an encoder's weights does not allow every use."""
    return [
        line.removeprefix("warning: ").capitalize()
        for line in origin_lines(summary.get("origin", {}))
        if line.startswith("warning: ")
    ]


def column_findings(evaluation: Evaluation) -> list[str]:
    """Return a sentence on each question to a column that features are to ignore, if one was."""
    lines = evaluation.column.lines() if evaluation.column else []
    return [f"{line[0].upper()}{line[1:]}." for line in lines]


def baseline_findings(evaluation: Evaluation) -> list[str]:
    """Return a sentence for each baseline that an encoder is not clearly above, image by image."""
    return [
        f"{each.name} is not significantly higher than that of the {TITLES[table]} "
        f"({each.second:.3f}, difference {each})."
        for table, found in evaluation.differences.items()
        for each in found
        if table in BASELINES and each.name == KNN and each.clear <= 0
    ]


def results(metrics: Mapping[str, Any]) -> Table:
    """Return the table of an encoder's metrics beside its baselines."""
    columns = {
        HEADINGS[table]: [Metric(**entry) for entry in column.values()]
        for table, column in metrics.items()
    }
    own = metrics["encoder"].keys()
    heading, *rows = metric_rows(columns)
    start = "the encoder that training started from, " if "start" in metrics else ""
    untrained = "the same network with random weights, and " if "untrained" in metrics else ""
    teacher = " The teacher is what the student aims at." * ("teacher" in metrics)
    embedding = " The embedding is what the projector makes of the features of this encoder."
    note = (
        f"On held-out images, with 95 % confidence intervals. Baselines: {start}{untrained}raw "
        f"pixels.{teacher}{embedding * ('embedding' in metrics)}"
    )
    shown = tuple(tuple(row) for row in rows if row[0] in own)
    return Table("Metrics beside their baselines", ("", *heading[1:]), shown, note)


def confusion(embeddings: Embeddings) -> Confusion | None:
    """Return the kNN predictions of held-out images; None without labels."""
    predictions = knn_classes(embeddings)
    queries = predictions != ""
    if not queries.any():
        return None
    both = np.concatenate([embeddings.class_names[queries], predictions[queries]])
    names, numbers = np.unique(both, return_inverse=True)
    return Confusion.of(names.tolist(), names.tolist(), len(names), numbers.reshape(2, -1).T)


def protocols(summary: Mapping[str, Any]) -> list[str]:
    """Return a sentence on how each number of an encoder was measured, or why it was not."""
    measured = [
        f"{entry['name']}: {Metric(**entry).sentence}."
        for entry in summary["metrics"]["encoder"].values()
    ]
    missing = [f"{name}: not measured, {why}." for name, why in summary["left_out"].items()]
    if comparison := summary.get("comparison"):
        rule = f"decided by {comparison['decided_by']}, {comparison['protocol']}"
        measured.append(f"verdict: {rule}.")
    if "teacher" in summary.get("differences", {}):
        measured.append(f"share of the teacher: {RATIO_PROTOCOL}.")
    return [*measured, *missing, "Confusion: kNN predictions of held-out images."]


def typed(verb: str, *words: object) -> str:
    """A command as it is typed; images that only Python has are DATA."""
    given = ("DATA" if word == data_name(None) else str(word) for word in words)
    return shlex.join(["nearkin", verb, *given])


def _browsing_steps(run: Path) -> list[tuple[str, str]]:
    """Return the next steps that only read a run."""
    return [
        ("Browse images at full size, and search by image.", typed("explore", run)),
        ("Find the nearest neighbors of an image.", typed("neighbors", run, "IMAGE")),
    ]


def _steps(
    folder: RunFolder, data: str, comparison: StartComparison | None
) -> list[tuple[str, str]]:
    run, to_file = folder.path, ("-o", "vectors.parquet")
    start = (
        "Use the encoder that training started from: it is the better one.",
        typed("embed", folder.start, data, *to_file),
    )
    return [
        *([start] if comparison and comparison.verdict == "worse" else []),
        *_browsing_steps(run),
        ("Write embeddings for other programs.", typed("embed", run, data, *to_file)),
        (
            "Label some classes, and discover the novel ones.",
            typed("discover", data, "--known", "A,B", "--encoder", run),
        ),
    ]


def _frozen_steps(run: Path, data: str) -> list[tuple[str, str]]:
    return [
        *_browsing_steps(run),
        (
            "Continue to train it on these images, and see whether that helps.",
            typed("train", data, "--encoder", run),
        ),
        (
            "Label some classes, and discover the novel ones.",
            typed("discover", data, "--known", "A,B", "--encoder", run),
        ),
        (
            "Label a few images of each class, and train a classifier.",
            typed("classify", run, data, "--labels", "LABELS.csv"),
        ),
    ]


NEEDS = {"teacher_views": "teacher", "freeze_epochs": "encoder"}
"""Settings that have no effect without another one."""


def command(data: str, config: Config, file: Path) -> str:
    """Return the command that repeats a run: every setting in effect that is not the default.

    Views of one's own are in `file`, the run's config.toml.
    """
    words = [config.encoder, data] if isinstance(config, EmbedConfig | ClassifyConfig) else [data]
    in_words = "encoder" if len(words) > 1 else ""
    for name, default in vars(type(config)()).items():
        value = getattr(config, name)
        in_effect = name not in NEEDS or getattr(config, NEEDS[name])
        if name in ("options", in_words) or value == default or not in_effect:
            continue
        if name == "augment" and not isinstance(value, str):
            words += ["--config", str(file)]
        else:
            words += [f"--no-{name}"] if value is False else [option(name), as_typed(value)]
    for name, value in getattr(config, "options", {}).items():
        words += [option(name), str(value)]
    return typed(config.verb, *words)
