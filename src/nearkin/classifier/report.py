"""What the pages and files of a discovery and of a classification have in common."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
from jaxtyping import Int

from nearkin.classifier.assignments import Assignments, typical
from nearkin.classifier.calibration import Calibration
from nearkin.config import ClassifyConfig, DiscoverConfig
from nearkin.data.images import Images
from nearkin.evaluation.embeddings import Embeddings
from nearkin.evaluation.vectors import write_embeddings
from nearkin.files import write_whole
from nearkin.report.page.blocks import ClassView, Page, Tile
from nearkin.report.pages import store_page, write_page
from nearkin.run.copies import check_destination, copy_to
from nearkin.run.edits import class_names
from nearkin.run.opening import OpenRun

WITH_IMAGES: Final = 60  # Classes shown with images; of more, the largest
CORE: Final = 24
BORDER: Final = 12  # Images shown of each class

Rows = Int[np.ndarray, " rows"]
AnyRun = OpenRun[DiscoverConfig] | OpenRun[ClassifyConfig]


def tiles(assignments: Assignments, rows: Rows, *, with_class: bool = False) -> tuple[Tile, ...]:
    """Return what is shown of images; the page adds pixels."""
    paths, score = assignments.predictions.paths, assignments.score[rows]
    classes = (assignments.classes[number] for number in assignments.cluster[rows].tolist())
    shown = zip(assignments.rows[rows].tolist(), score.tolist(), classes, strict=True)
    return tuple(Tile(paths[i], "", sure, name if with_class else "") for i, sure, name in shown)


def class_views(assignments: Assignments) -> dict[int, ClassView]:
    """Return what is shown of each class that has images; of many classes, images of the largest.

    Classes are numbered as in the predictions.
    """
    sizes = np.bincount(assignments.cluster, minlength=len(assignments.classes))
    largest = np.argsort(-sizes, kind="stable")[:WITH_IMAGES]
    views = dict[int, ClassView]()
    for number in np.flatnonzero(sizes).tolist():
        core = border = tuple[Tile, ...]()
        if number in largest:
            members = typical(assignments, number)
            least_sure = members[np.argsort(assignments.margin[members], kind="stable")]
            core = tiles(assignments, members[:CORE])
            border = tiles(assignments, least_sure[:BORDER])
        views[number] = ClassView(
            name=assignments.classes[number],
            size=int(sizes[number]),
            medoid=core[0] if core else None,
            core=core,
            border=border,
            score=fmean(assignments.score[assignments.cluster == number].tolist()),
        )
    return views


def flag_counts(assignments: Assignments) -> dict[str, int]:
    """Return how many images have each flag."""
    flags = assignments.flag
    return {flag: flags.count(flag) for flag in sorted(set(flags)) if flag}


def score_meaning(calibration: Calibration | None, images: str) -> str:
    """Say what a score means; `images` are those that calibrated it, where there were any."""
    if calibration is None:
        return f"A score is the classifier's largest output, not a probability: {images}."
    if calibration.temperature == 1:
        return (
            "Scores are probabilities as the classifier gives them: no temperature predicts "
            f"{calibration.num_images:,} {images} clearly better. There, the calibration error is "
            f"{calibration.error_before:.1%}."
        )
    return (
        f"Scores are calibrated probabilities: temperature {calibration.temperature:.2f}, fitted "
        f"to {calibration.num_images:,} {images.rstrip(',')}. There, the calibration error is "
        f"{calibration.error_after:.1%} ({calibration.error_before:.1%} before)."
    )


def write_results(
    run: AnyRun,
    images: Images,
    embeddings: Embeddings,
    page: Page,
    summary: Mapping[str, Any],
    *,
    data: str,
    encoder: str,
) -> None:
    """Write what a run leaves beside its tables, the summary last: it marks the run complete.

    `encoder` is the digest of the encoder that the embeddings are of.
    """
    folder, config = run.folder, run.config
    if config.copy_to:
        _copy(run, images, data)
    write_embeddings(folder.embeddings, replace(embeddings, encoder=encoder))
    store_page(folder, page)
    if config.report:
        write_page(folder, images)
    folder.write_summary(dict(summary))
    folder.copying.unlink(missing_ok=True)
    if config.report:
        run.log.info(f"report {folder.report.resolve()}")


def complete_results(run: AnyRun, images: Images, data: str) -> None:
    """Make what a finished run lacks, of copies of the images and the report."""
    folder, config, log = run.folder, run.config, run.log
    place = Path(config.copy_to)
    copies = bool(config.copy_to) and (folder.copied_to == place or not any(place.glob("*")))
    report = config.report and not folder.report.exists()
    if copies or report:
        folder.write_settings(config, data)
    else:
        log.info("already complete")
    if copies:
        _copy(run, images, data)
        folder.copying.unlink()
    if report:
        write_page(folder, images)
        log.info(f"report {folder.report.resolve()}")


def _copy(run: AnyRun, images: Images, data: str) -> None:
    """Copy images by the names that classes have by now; note where, for a resumed run."""
    folder, place, of = run.folder, Path(run.config.copy_to), class_names(run.folder)
    rows = np.array([row for row, name in enumerate(images.names) if name in of], np.int64)
    classes = [of[images.names[row]] for row in rows.tolist()]
    if folder.copied_to != place:
        check_destination(place, [data])
        write_whole(folder.copying, os.fsencode(place))
    copied = copy_to(place, images, rows, classes, data=[data], begun=True)
    run.log.info(f"copied {copied} images to {place}")
