"""The content of an encoder's page, trained or frozen, from the files of its run folder."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from nearkin.config import ClassifyConfig, Config, EmbedConfig, TrainConfig
from nearkin.data.images import Images
from nearkin.data.preprocessing import Preprocessing
from nearkin.encoders.encoder import CUSTOM
from nearkin.encoders.origin import origin_lines
from nearkin.evaluation.baselines import TITLES
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.evaluate import Evaluation, metric_rows
from nearkin.evaluation.metrics import KNN, knn_classes
from nearkin.evaluation.verdict import PROTOCOL
from nearkin.pace import count
from nearkin.report.page.blocks import (
    Chart,
    Command,
    Confusion,
    Facts,
    Findings,
    Listing,
    Page,
    Paragraphs,
    Points,
    Section,
    Table,
)
from nearkin.run.data import OBJECT, versions
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
    "entropy": ("Entropy", "SimGCD's of the mean prediction: 0 if all images are in one class."),
}
"""Title and note of a chart, by the column of metrics.csv."""
HEADINGS: Final = {"encoder": "this encoder", "embedding": "its embedding", **TITLES}
"""What tables of features are called above the metrics."""
BASELINES: Final = ("untrained", "pixels")
MAX_POINTS: Final = 300  # of longer curves, a point is the mean of a few steps


def training_curves(folder: RunFolder) -> dict[str, Chart]:
    """Return the curves of a training by column of metrics.csv, without empty ones."""
    rows = [] if folder.is_frozen else read_numbers(folder.metrics)
    charts = {}
    for column, (title, note) in CURVES.items():
        points = np.array([(row["epoch"], row[column]) for row in rows if column in row])
        if len(points):
            means = [part.mean(0) for part in np.array_split(points, min(MAX_POINTS, len(points)))]
            series: dict[str, Points] = {title: [(float(x), float(y)) for x, y in means]}
            charts[column] = Chart(title, "epoch", "", series, note)
    return charts


def encoder_page(folder: RunFolder, images: Images, embeddings: Embeddings) -> Page:
    """Return the report of a training, or of a run of `nearkin embed`, but for the map."""
    config, data = folder.encoder_settings()
    summary, name = folder.read_evaluated(), Path(data).name
    evaluation = Evaluation.stored(summary)
    if isinstance(config, EmbedConfig):
        title, lead = f"{name}, embedded by a frozen encoder", _frozen_lead(summary, images)
        about, facts = "Encoder", _described(summary)
        rule = "Nothing was trained, and nothing was chosen by the labels of held-out images."
    else:
        title, lead = f"Encoder trained on {name}", _lead(config, summary, images)
        about, facts = "Origin", _came_from(summary)
        rule = "The last epoch counts; nothing was chosen by the labels of held-out images."
    findings = Findings(tuple(_findings(summary, evaluation)))
    return Page(
        kicker=f"nearkin {config.verb}",
        title=title,
        lead=lead,
        sections=(
            ("Summary", (Paragraphs(tuple(_state(summary, evaluation))), findings)),
            (about, (Facts("Encoder", tuple(facts), folded=False),)),
            ("Evaluation", (_results(evaluation), _meanings(evaluation))),
            ("Confusion", _confusion(embeddings)),
            ("Training curves", tuple(training_curves(folder).values())),
            *run_sections(
                folder,
                data,
                config,
                (*_protocols(summary, evaluation), rule),
                _steps(folder, data, evaluation),
                made_with(summary),
            ),
        ),
        tiny=images.is_small,
    )


def _state(summary: Mapping[str, Any], evaluation: Evaluation) -> Iterator[str]:
    """Yield whether training helped, and how the embeddings use their directions."""
    if evaluation.comparison:
        yield f"Training {evaluation.comparison.text}."
    if "verdict" in summary:
        what = "The embedding" if _is_end(summary) else "The embedding of the last step, not kept,"
        yield f"{what} is {summary['verdict']}."
    else:
        health = summary["health"]
        yield (
            f"The embeddings use {health['effective_rank']:.0f} of {health['directions']:.0f} "
            f"directions (spread {health['feature_std']:.2f}, mean cosine "
            f"{health['mean_cosine']:.2f})."
        )


def _findings(summary: Mapping[str, Any], evaluation: Evaluation) -> Iterator[str]:
    """Yield what to know before using an encoder, a sentence or two each."""
    yield from license_findings(summary)
    if comparison := evaluation.comparison:
        yield from comparison.findings()
    if evaluation.leaks:
        yield f"{evaluation.leaks}."
    if evaluation.column:
        yield from (f"{_capital(line)}." for line in evaluation.column.lines())
    yield from (f"The student {kept}." for kept in evaluation.kept)
    if _is_end(summary) and summary.get("verdict", "").startswith("collapsed"):
        yield "There are signs of a collapse: compare with the baselines before use."
    for table in BASELINES:
        for each in evaluation.differences.get(table, ()):
            if each.name == KNN and each.clear <= 0:
                yield (
                    f"{each.name} is not significantly higher than that of the {TITLES[table]} "
                    f"({each.second:.3f}, difference {each})."
                )


def _is_end(summary: Mapping[str, Any]) -> bool:
    """Whether the encoder has the weights of the last step, of which the health is."""
    return bool(summary.get("average", {}).get("share", 1.0) == 1.0)


def run_sections(
    folder: RunFolder,
    data: str,
    config: Config,
    protocol: Iterable[str],
    steps: Iterable[tuple[str, str]],
    programs: Mapping[str, Any],
) -> tuple[Section, ...]:
    """Return what the pages of all kinds of runs end with.

    `protocol` says what was trained on what and scored on what, a sentence each; `steps` say what
    to do next, each with its command or ''; `programs` are the versions that have computed it.
    """
    settings = vars(config) | {"options": dict(getattr(config, "options", {}))}
    facts = (
        Facts(title, tuple((name, str(value)) for name, value in values.items()))
        for title, values in (("All settings", settings), ("Versions", programs))
    )
    own = ", with the network that was passed from Python in a file, as BACKBONE"
    again = Command(
        f"This command repeats the run{own * (getattr(config, 'backbone', '') == CUSTOM)}:",
        command(data, config, folder.config),
    )
    return (
        ("Protocol", (Listing(tuple((sentence, "") for sentence in protocol)),)),
        ("Settings", (again, *facts)),
        ("Next steps", (Listing(tuple(steps), ordered=True),)),
    )


def made_with(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions of the programs that have computed a run, as its summary has them."""
    return {name: summary[name] for name in (*versions(), "threads") if name in summary}


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
    trained = "not trained any further"
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


def _described(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name what the encoder is, how images reach it, and whose its weights are."""
    yield "Encoder", summary["encoder"]
    yield "Architecture", f"{summary['backbone']}, {summary['feature_dim']} features"
    if pooling := summary.get("pooling"):
        yield "Pooling", pooling
    yield "Preprocessing", str(Preprocessing.from_dict(summary["preprocessing"]))
    yield from _origin(summary)


def _came_from(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name the encoders that a training started or learned from, and whose weights these are."""
    for title, key in (("Start", "start"), ("Teacher", "teacher")):
        if key in summary:
            yield title, summary[key]
    if "average" in summary:
        yield "Weights", _capital(summary["average"]["text"])
    yield from _origin(summary)


def _origin(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name the license, the source and the checksum of an encoder's weights, where known."""
    titles = {"license": "License", "source": "Source", "sha256": "SHA-256 of its file"}
    origin = summary.get("origin", {})
    return ((title, origin[key]) for key, title in titles.items() if origin.get(key))


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def license_findings(summary: Mapping[str, Any]) -> list[str]:
    """Return a warning if the license of an encoder's weights does not allow every use."""
    return [
        _capital(line.removeprefix("warning: "))
        for line in origin_lines(summary.get("origin", {}))
        if line.startswith("warning: ")
    ]


def _results(evaluation: Evaluation) -> Table:
    """Return the table of an encoder's metrics beside its baselines."""
    metrics = evaluation.metrics
    heading, *rows = metric_rows({HEADINGS[table]: column for table, column in metrics.items()})
    start = "the encoder that training started from, " * ("start" in metrics)
    untrained = "the same network with random weights, and " * ("untrained" in metrics)
    teacher = " The teacher is what the student aims at." * ("teacher" in metrics)
    embedding = " The embedding is what the projector makes of the features of this encoder."
    held_out = "test" in evaluation.sizes
    images = "held-out images" if held_out else "training images (none is held out)"
    note = (
        f"On {images}, with 95 % confidence intervals. Baselines: {start}{untrained}raw pixels."
        f"{teacher}{embedding * ('embedding' in metrics)}"
    )
    own = {metric.name for metric in metrics["encoder"]}
    shown = tuple(tuple(row) for row in rows if row[0] in own)
    return Table("Metrics beside their baselines", ("", *heading[1:]), shown, note)


def _meanings(evaluation: Evaluation) -> Facts:
    """Return what each metric says; of those that say the same, of the first."""
    names = dict[str, str]()  # by meaning
    for metric in evaluation.metrics["encoder"]:
        names.setdefault(metric.meaning, metric.name)
    rows = ((name, meaning) for meaning, name in names.items() if meaning)
    return Facts("What the metrics mean", tuple(rows))


def _confusion(embeddings: Embeddings) -> tuple[Confusion, ...]:
    """Return the kNN predictions of held-out images; nothing without labels."""
    predictions = knn_classes(embeddings)
    queries = predictions != ""
    if not queries.any():
        return ()
    both = np.stack([embeddings.class_names[queries], predictions[queries]], axis=1)
    names, pairs = np.unique(both, return_inverse=True)
    return (Confusion.of(names.tolist(), names.tolist(), len(names), pairs),)


def _protocols(summary: Mapping[str, Any], evaluation: Evaluation) -> Iterator[str]:
    """Yield a sentence on how each number of an encoder was measured, or why it was not."""
    metrics = evaluation.metrics["encoder"]
    for metric in metrics:
        yield f"{metric.name}: {metric.sentence}."
    comparison = summary.get("comparison")
    if comparison and comparison["decided_by"]:
        yield f"verdict: decided by {comparison['decided_by']}, {comparison['protocol']}."
    if "teacher" in evaluation.differences:
        yield f"difference to the teacher: {PROTOCOL}."
    if any(metric.name == KNN for metric in metrics):
        yield "Confusion: kNN predictions of held-out images."
    for name, why in evaluation.left_out.items():
        yield f"{name}: not measured, {why}."


def typed(verb: str, *words: object) -> str:
    """A command as it is typed; images that only Python has are DATA, such an encoder ENCODER."""
    given = ("DATA" if word == data_name(None) else str(word) for word in words)
    named = ("ENCODER" if word.startswith(OBJECT) else word for word in given)
    return shlex.join(["nearkin", verb, *named])


def _steps(folder: RunFolder, data: str, evaluation: Evaluation) -> Iterator[tuple[str, str]]:
    """Yield what to do next with an encoder: what only reads its run first."""
    run, to_file, comparison = folder.path, ("-o", "vectors.parquet"), evaluation.comparison
    if comparison and comparison.verdict == "worse":
        better = "Use the encoder that training started from: it is the better one."
        yield better, typed("embed", folder.start, data, *to_file)
    yield "Browse images at full size, and search by image.", typed("explore", run)
    yield "Find the nearest neighbors of an image.", typed("neighbors", run, "IMAGE")
    if not evaluation.sizes["train"]:  # all are held out, and nothing learns from them
        return
    if folder.is_frozen:
        on = "Continue to train it on these images, and see whether that helps."
        yield on, typed("train", data, "--encoder", run)
    else:
        yield "Write embeddings for other programs.", typed("embed", run, data, *to_file)
    yield (
        "Label some classes, and discover the novel ones.",
        typed("discover", data, "--known", "A,B", "--encoder", run),
    )
    yield (
        "Label a few images of each class, and train a classifier.",
        typed("classify", run, data, "--labels", "LABELS.csv"),
    )


NEEDS = {"teacher_views": "teacher", "freeze_epochs": "encoder"}
"""Settings that have no effect without another one."""


def command(data: str, config: Config, file: Path) -> str:
    """Return the command that repeats a run: every setting in effect that is not the default.

    Views of one's own are in `file`, the run's config.toml. A folder for copies of the images is
    to be new, so it is left out.
    """
    words = [config.encoder, data] if isinstance(config, EmbedConfig | ClassifyConfig) else [data]
    in_words = "encoder" if len(words) > 1 else ""
    for name, default in vars(type(config)()).items():
        value = getattr(config, name)
        in_effect = name not in NEEDS or getattr(config, NEEDS[name])
        if name in ("options", "copy_to", in_words) or value == default or not in_effect:
            continue
        if name == "augment" and not isinstance(value, str):
            words += ["--config", str(file)]
        elif name == "backbone" and value == CUSTOM:
            words += ["--backbone", "BACKBONE"]
        else:
            flag = option(name) if value else f"--no-{name}"
            words += [flag] if isinstance(value, bool) else [option(name), as_typed(value)]
    for name, value in getattr(config, "options", {}).items():
        words += [option(name), str(value)]
    return typed(config.verb, *words)
