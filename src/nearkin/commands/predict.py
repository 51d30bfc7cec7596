"""`nearkin predict`: new images into the classes of a run, without training."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from nearkin.classifier import assignments
from nearkin.classifier.assignments import COLUMNS, Assignments
from nearkin.classifier.classifier import Classifier, read_classifier
from nearkin.classifier.features import Extraction
from nearkin.commands.arguments import PathLike, command, processes
from nearkin.commands.sources import check_apart, check_output, write_rows
from nearkin.config import AutoCountOrZero
from nearkin.data.images import Images
from nearkin.data.notes import lines
from nearkin.data.opening import open_images
from nearkin.distributed import choose_device
from nearkin.encoders.encoder import Encoder, load
from nearkin.result import Result, Row
from nearkin.run.copies import check_destination
from nearkin.run.copies import copy_to as copy_images
from nearkin.run.edits import names_by_now
from nearkin.run.folder import RunFolder, data_name
from nearkin.run.reporter import Reporter, reporter_of
from nearkin.types import UNLABELED


@dataclass(frozen=True, eq=False, repr=False)
class PredictedClasses(Result):
    """New images in the classes of a run."""

    images: Images
    """The readable ones, in the order of the assignments."""
    assignments: Assignments
    bad: dict[str, str]
    """The others, with the reason."""

    @override
    def records(self) -> list[Row]:
        """A row per image, with the columns of assignments.csv."""
        return [dict(zip(COLUMNS, row, strict=True)) for row in self.assignments.table()]

    @override
    def to_dict(self) -> dict[str, Any]:
        """The rows of all images, and the bad ones."""
        return {"images": self.records(), "bad": self.bad}

    @override
    def lines(self) -> list[str]:
        """How many images each class has."""
        counts = Counter(self.assignments.class_names)
        ordered = [name for name in dict.fromkeys(self.assignments.classes) if name in counts]
        width = max(map(len, ordered))
        classes = [f"{name:{width}}  {counts[name]}" for name in ordered]
        return classes + [f"left out {name!r}: {reason}" for name, reason in self.bad.items()]


@command
def predict(
    run: PathLike,
    data: Any,
    *,
    output: PathLike | None = None,
    copy_to: PathLike | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    device: str = "auto",
    workers: AutoCountOrZero = "auto",
    verbose: bool | Reporter = True,
) -> PredictedClasses:
    """Sort new images into the classes of a discovery or a classification, without training.

    Args:
        run: The run.
        data: Images: a folder, a table, an archive or shards, or a name such as digits.
        output: A CSV file like assignments.csv.
        copy_to: A new folder to sort the images into, by class.
        overwrite: Replace the file.
        trust_remote_code: Whether to run code that files of the run name.
        device: Where to compute.
        workers: Processes that decode photos; `auto`: one per CPU.
        verbose: Whether to show progress, or what receives it.

    Raises:
        NearkinError: One line on what cannot be done.
    """
    check_output(output, ".csv", overwrite=overwrite, reads=[run, data])
    folder = RunFolder(Path(run))
    classifier = read_classifier(folder.classifier).named(names_by_now(folder))
    encoder = classifier.encoder(load(folder.path, trust_remote_code=trust_remote_code))
    check_apart(output, copy_to, "--copy-to")
    if copy_to is not None:
        check_destination(Path(copy_to), [data_name(data)])
    where, log = choose_device(device), reporter_of(verbose)
    found = classified(classifier, encoder, data, where, processes(workers), log)
    if copy_to is not None:  # before a table that may lie in the same new folder
        every, classes = np.arange(len(found.images)), found.assignments.class_names
        copy_images(Path(copy_to), found.images, every, classes, data=[data_name(data)])
    if output is not None:
        write_rows(Path(output), COLUMNS, found.assignments.table())
    return found


def classified(
    classifier: Classifier,
    encoder: Encoder,
    data: Any,
    device: torch.device,
    workers: int,
    log: Reporter,
) -> PredictedClasses:
    """Sort images into the classes of a classifier, by the features of its encoder."""
    images = open_images(data, labels="none", on_progress=log.progress)
    for line in lines(images.notes):
        log.info(line)
    extracted = Extraction(encoder, images, classifier.drawn, device, workers, log).compute()
    cached, rows = extracted.readable(images)
    readable, no_labels = images.subset(rows), np.full(len(rows), UNLABELED)
    predicted = classifier.predict(cached, tuple(readable.names), no_labels)
    assigned = assignments.assign(predicted, classifier.top_reference, classifier.calibration)
    reasons = images.reasons | extracted.reasons(images)
    return PredictedClasses(readable, assigned, dict(sorted(reasons.items())))
