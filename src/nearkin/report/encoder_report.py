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
from nearkin.evaluation.verdict import RATIO_PROTOCOL
from nearkin.metrics.metric import Metric
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
    "entropy": ("Entropy", "Of the mean prediction; 0 if all images are in one class."),
}
"""Title and note of a chart, by the column of metrics.csv."""
HEADINGS: Final = {"encoder": "this encoder", "embedding": "its embedding", **TITLES}
"""What tables of features are called above the metrics."""
BASELINES: Final = ("untrained", "pixels")
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


def encoder_page(folder: RunFolder, images: Images, embeddings: Embeddings) -> Page:
    """Return the report of a training, or of a run of `nearkin embed`, but for the map."""
    config, data = folder.encoder_settings()
    summary, name = folder.read_evaluated(), Path(data).name
    evaluation = Evaluation.stored(summary)
    comparison = evaluation.comparison
    if isinstance(config, EmbedConfig):
        title, lead = f"{name}, embedded by a frozen encoder", _frozen_lead(summary, images)
        state, facts = _use_of_directions(summary["health"]), _described(summary)
        rule = "Nothing was trained, and nothing was chosen by the labels of held-out images."
    else:
        title, lead = f"Encoder trained on {name}", _lead(config, summary, images)
        what = "The embedding" if _is_end(summary) else "The embedding of the last step, not kept,"
        state, facts = f"{what} is {summary['verdict']}.", tuple(_came_from(summary))
        rule = "The last epoch counts; nothing was chosen by the labels of held-out images."
    verdict = [f"Training {comparison.text}."] if comparison else []
    findings, steps = tuple(_findings(summary, evaluation)), _steps(folder, data, evaluation)
    metrics = summary["metrics"]
    meant = Facts("What the metrics mean", meanings(metrics["encoder"].values()))
    origin = "Encoder" if folder.is_frozen else "Origin"
    return Page(
        kicker=f"nearkin {config.verb}",
        title=title,
        lead=lead,
        sections=(
            ("Summary", (Paragraphs((*verdict, state)), Findings(findings))),
            (origin, (Facts("Encoder", facts, folded=False),)),
            ("Evaluation", (results(summary), meant)),
            ("Confusion", confusion(embeddings)),
            ("Training curves", tuple(training_curves(folder).values())),
            *run_sections(
                folder, data, config, (*protocols(summary), rule), steps, made_with(summary)
            ),
        ),
        tiny=images.is_small,
    )


def _findings(summary: Mapping[str, Any], evaluation: Evaluation) -> Iterator[str]:
    """Yield what to know before using an encoder, a sentence or two each."""
    yield from license_findings(summary)
    if comparison := evaluation.comparison:
        yield from comparison.findings()
    if evaluation.leaks:
        yield f"{evaluation.leaks}."
    yield from _of_column(evaluation)
    yield from (f"The student {kept}." for kept in evaluation.kept)
    if _is_end(summary) and summary.get("verdict", "").startswith("collapsed"):
        yield COLLAPSED
    yield from baseline_findings(evaluation)


def _is_end(summary: Mapping[str, Any]) -> bool:
    """Whether the encoder has the weights of the last step, of which the health is."""
    return bool(summary.get("average", {}).get("share", 1.0) == 1.0)


def _of_column(evaluation: Evaluation) -> Iterator[str]:
    """Yield a sentence on each question to the column that features are to ignore, if any."""
    for line in evaluation.column.lines() if evaluation.column else ():
        yield f"{_capital(line)}."


def run_sections(
    folder: RunFolder,
    data: str,
    config: Config,
    protocol: Iterable[str],
    steps: Iterable[tuple[str, str]],
    programs: Mapping[str, Any],
) -> tuple[Section, ...]:
    """Return what the pages of all kinds of runs end with.

    Args:
        folder: The run.
        data: Its images.
        config: Its settings.
        protocol: What was trained on what and scored on what, a sentence each.
        steps: What to do next: a sentence, and its command or ''.
        programs: The versions of those that have computed it.
    """
    settings = vars(config) | {"options": dict(getattr(config, "options", {}))}
    again = Command("This command repeats the run:", command(data, config, folder.config))
    return (
        ("Protocol", (Listing(tuple((sentence, "") for sentence in protocol)),)),
        ("Settings", (again, _facts("All settings", settings), _facts("Versions", programs))),
        ("Next steps", (Listing(tuple(steps), ordered=True),)),
    )


def made_with(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions of the programs that have computed a run, as its summary has them."""
    return {name: summary[name] for name in (*versions(), "threads") if name in summary}


def _facts(title: str, values: Mapping[str, Any]) -> Facts:
    return Facts(title, tuple((name, str(value)) for name, value in values.items()))


def _use_of_directions(health: Mapping[str, float]) -> str:
    return (
        f"The embeddings use {health['effective_rank']:.0f} of {health['directions']:.0f} "
        f"directions (spread {health['feature_std']:.2f}, mean cosine "
        f"{health['mean_cosine']:.2f})."
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
        yield "Weights", _capital(summary["average"]["text"])
    yield from origin_rows(summary)


def origin_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
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


def baseline_findings(evaluation: Evaluation) -> list[str]:
    """Return a sentence for each baseline that an encoder is not clearly above, image by image."""
    return [
        f"{each.name} is not significantly higher than that of the {TITLES[table]} "
        f"({each.second:.3f}, difference {each})."
        for table, found in evaluation.differences.items()
        for each in found
        if table in BASELINES and each.name == KNN and each.clear <= 0
    ]


def results(summary: Mapping[str, Any]) -> Table:
    """Return the table of an encoder's metrics beside its baselines."""
    metrics = summary["metrics"]
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
    held_out = "test" in summary["sizes"]
    images = "held-out images" if held_out else "training images (none is held out)"
    note = (
        f"On {images}, with 95 % confidence intervals. Baselines: {start}{untrained}raw pixels."
        f"{teacher}{embedding * ('embedding' in metrics)}"
    )
    shown = tuple(tuple(row) for row in rows if row[0] in own)
    return Table("Metrics beside their baselines", ("", *heading[1:]), shown, note)


def confusion(embeddings: Embeddings) -> tuple[Confusion, ...]:
    """Return the kNN predictions of held-out images; nothing without labels."""
    predictions = knn_classes(embeddings)
    queries = predictions != ""
    if not queries.any():
        return ()
    both = np.concatenate([embeddings.class_names[queries], predictions[queries]])
    names, numbers = np.unique(both, return_inverse=True)
    pairs = numbers.reshape(2, -1).T
    return (Confusion.of(names.tolist(), names.tolist(), len(names), pairs),)


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
    if KNN in summary["metrics"]["encoder"]:
        measured.append("Confusion: kNN predictions of held-out images.")
    return [*measured, *missing]


def typed(verb: str, *words: object) -> str:
    """A command as it is typed; images that only Python has are DATA, such an encoder ENCODER."""
    given = (_without_python(str(word)) for word in words)
    return shlex.join(["nearkin", verb, *given])


def _without_python(word: str) -> str:
    if word == data_name(None):
        return "DATA"
    return "ENCODER" if word.startswith(OBJECT) else word


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
            flag = option(name) if value else f"--no-{name}"
            words += [flag] if isinstance(value, bool) else [option(name), as_typed(value)]
    for name, value in getattr(config, "options", {}).items():
        words += [option(name), str(value)]
    return typed(config.verb, *words)
