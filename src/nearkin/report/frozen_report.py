"""The content of the page of an encoder as it is, from the files of its run folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearkin.data.images import Images
from nearkin.data.preprocessing import Preprocessing
from nearkin.evaluation.embeddings import Embeddings
from nearkin.pace import count
from nearkin.report.page.sections import TrainingReport
from nearkin.report.training_report import (
    confusion,
    knn_findings,
    licence_findings,
    look_steps,
    meanings,
    measure_protocols,
    origin_rows,
    results,
    run_info,
)
from nearkin.run.folder import RunFolder


def frozen_report(folder: RunFolder, images: Images, embeddings: Embeddings) -> TrainingReport:
    """Return the content of the page of a finished run of `nearkin embed`."""
    config, data = folder.encoder_settings()
    summary = folder.read_evaluated()
    measures, health = summary["measures"], summary["health"]
    return TrainingReport(
        run=run_info(
            data,
            config,
            images,
            protocol=(
                *measure_protocols(summary),
                "Nothing was trained, and nothing was chosen by the labels of held-out images.",
            ),
            steps=tuple(_steps(folder.path, data)),
        ),
        lead=_lead(summary, images),
        health=(
            f"The embeddings use {health['effective_rank']:.0f} of {health['directions']:.0f} "
            f"directions (spread {health['feature_std']:.2f}, mean cosine "
            f"{health['mean_cosine']:.2f})."
        ),
        frozen=True,
        origin=_described(summary),
        findings=(*licence_findings(summary), *knn_findings(measures)),
        results=results(measures),
        meanings=meanings(measures["encoder"]),
        confusion=confusion(embeddings),
    )


def _lead(summary: Mapping[str, Any], images: Images) -> str:
    sizes, origin = summary["sizes"], summary.get("origin", {})
    license_ = f" ({origin['license']})" if origin.get("license") else ""
    trained = "not trained on these images"
    if "method" in summary:  # the encoder of a run
        trained = f"as {summary['method']} had trained it"
    held_out = f"; {sizes['test']:,} of them are held out for scoring" if "test" in sizes else ""
    labels = "Labels are used only for the evaluation below."
    if not images.classes:
        labels = "There are no labels, so only the geometry of the embedding can be measured."
    return (
        f"A frozen {summary['backbone']}{license_}, {trained}, embedded "
        f"{count(sum(sizes.values()), 'image')}{held_out}. {labels}"
    )


def _described(summary: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Name what the encoder is, how images reach it, and whose its weights are."""
    described = {
        "Encoder": summary["encoder"],
        "Architecture": f"{summary['backbone']}, {summary['feature_dim']} features",
        "Pooling": summary.get("pooling", ""),
        "Preprocessing": str(Preprocessing.from_dict(summary["preprocessing"])),
    }
    return (*((name, text) for name, text in described.items() if text), *origin_rows(summary))


def _steps(run: Path, data: str) -> list[tuple[str, str]]:
    return [
        *look_steps(run),
        (
            "Continue to train it on these images, and see whether that helps.",
            f"nearkin train {data} --init-from {run}",
        ),
        (
            "Label some classes, and discover the novel ones.",
            f"nearkin discover {data} --known A,B --from {run}",
        ),
        (
            "Label a few images of each class, and train a classifier.",
            f"nearkin classify {data} --from {run} --labels LABELS.csv",
        ),
    ]
