"""`nearkin compare` and `nearkin rank`: finished runs side by side, or ranked without labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from nearkin.choices import Criterion
from nearkin.commands.arguments import PathLike, command, processes
from nearkin.commands.embed import usual_augment
from nearkin.commands.sources import check_output, source_of, write_page
from nearkin.config import AutoCountOrZero
from nearkin.data.images import Images
from nearkin.data.notes import lines
from nearkin.data.opening import open_images
from nearkin.data.split import trained_or_scored
from nearkin.distributed import choose_device
from nearkin.encoders.encoder import load
from nearkin.errors import UsageError
from nearkin.evaluation.choice import Ranking
from nearkin.evaluation.evaluate import label_free
from nearkin.evaluation.metrics import GEOMETRY_IMAGES
from nearkin.pace import under
from nearkin.report.comparison import (
    KINDS,
    Comparison,
    FinishedRun,
    read_finished,
    short_names,
    side_by_side,
)
from nearkin.run.folder import RunFolder
from nearkin.run.reporter import Reporter, reporter_of


@command
def compare(
    runs: Sequence[PathLike], *, output: PathLike | None = None, overwrite: bool = False
) -> Comparison:
    """Compare finished runs: their metrics, and the settings that differ.

    Args:
        runs: Runs, all trainings, all discoveries or all classifications.
        output: Also write a page to this file, such as compare.html.
        overwrite: Replace the file.

    Raises:
        UsageError: If these are not two or more different finished runs of one kind. A frozen
            encoder's run is of the kind of trainings: it says whether training helped.
        OutputError: If the page cannot be written.
    """
    check_output(output, ".html", overwrite=overwrite, reads=runs)
    comparison = side_by_side(_finished(runs, "compare"))
    if output is not None:
        write_page(Path(output), comparison.page())
    return comparison


@command
def rank(
    runs: Sequence[PathLike],
    *,
    data: Any = None,
    by: Criterion = "view-retrieval",
    backbone: nn.Module | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    workers: AutoCountOrZero = "auto",
    verbose: bool | Reporter = True,
) -> Ranking:
    """Rank the encoders of finished runs without labels.

    All are measured anew, on the same images and the same augmented views of them. No label is
    read. docs/evaluation.md has what such a ranking is worth.

    Args:
        runs: Trainings or frozen encoders of the same images, held out alike or
            not.
        data: Their images, if they are no longer where they were.
        by: The metric that decides; the others stand beside it.
        backbone: The network of the runs, if it was given one from Python; untrained.
        trust_remote_code: Whether to run code that files of the run name.
        device: Where to compute.
        workers: Processes that decode photographs; `auto`: one per CPU.
        verbose: Whether to show progress, or what receives it.

    Raises:
        UsageError: If there is nothing to choose from, a run that has no encoder, or runs of
            different images.
    """
    finished = _finished(runs, "rank")
    size = min(_image_size(run.folder) for run in finished)
    images, log = _images_of(finished, data, trust_remote_code), reporter_of(verbose)
    for line in lines(images.notes):
        log.info(line)
    augment = str(usual_augment(images, size))  # as a training on them would choose it
    where, values, dims = choose_device(device), dict[str, dict[str, float]](), set[int]()
    for name, run in zip(short_names(finished), finished, strict=True):
        encoder = load(run.folder.path, backbone=backbone, trust_remote_code=trust_remote_code)
        dims.add(encoder.num_features)
        metrics = label_free(
            encoder,
            images,
            seed=0,
            workers=processes(workers),
            augment=augment,
            device=where,
            on_progress=under(name, log.progress),
        )
        values[name] = {name: metric.value for name, metric in metrics.items()}
    protocol = (
        f"features of the backbone, {min(len(images), GEOMETRY_IMAGES)} of {len(images)} images, "
        f"trained on or not, and views of them by {augment}"
    )
    spread = f"Features have {min(dims)} to {max(dims)} dimensions: of more, ranks can be larger."
    return Ranking(by, values, protocol, [spread] if len(dims) > 1 else [])


def _finished(runs: Sequence[PathLike], verb: str) -> list[FinishedRun]:
    """Read two or more different runs of one kind."""
    if len({Path(run).resolve() for run in runs}) < max(2, len(runs)):
        raise UsageError(f"nothing to {verb}; give two or more different runs")
    finished = [read_finished(Path(run)) for run in runs]
    kinds = {run.kind: run.folder for run in finished}
    if len(kinds) > 1:
        one, other, *_ = sorted(kinds.values(), key=lambda folder: [*KINDS].index(folder.kind))
        raise UsageError(
            f"{one.path} is a {one.kind} and {other.path} a {other.kind}; give runs of one kind"
        )
    return finished


def _images_of(runs: Sequence[FinishedRun], data: Any, trust: bool) -> Images:
    """Open the images that all of these runs are of, whose labels may name a part left out."""
    first = runs[0]
    for run in runs:
        if run.images != first.images:
            raise UsageError(
                f"{first.folder.path} and {run.folder.path} are of different images, so their "
                "metrics do not compare; give runs of the same images"
            )
    source = source_of(first.folder, data, trust)
    labels = getattr(first.folder.any_settings()[0], "labels", "none")
    images = trained_or_scored(open_images(source, labels=labels))
    if images.fingerprint != first.images:
        raise UsageError(
            f"the images of {first.folder.path} have changed since; bring them back, or rank runs "
            "of those there are now"
        )
    return images


def _image_size(folder: RunFolder) -> int:
    """Return the image size of a run; refuse one that is of no encoder."""
    size = folder.encoder_settings()[0].image_size
    if size == "auto":
        raise UsageError(f"{folder.config} names no image_size; it is not what a run wrote")
    return size
