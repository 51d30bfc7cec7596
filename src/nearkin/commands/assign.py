"""`nearkin assign`: new images into the classes of a discovery, without training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nearkin.commands.embed import spare
from nearkin.data.copies import check_destination
from nearkin.data.copies import copy_to as copy
from nearkin.data.images import Images, open_images
from nearkin.discovery.assignments import COLUMNS, Assignments
from nearkin.discovery.assignments import assign as assigned
from nearkin.discovery.classifier import read_classifier
from nearkin.discovery.features import look, rows_of
from nearkin.distributed import available_cpus, choose_device
from nearkin.errors import CheckpointError, DataError, OutputError
from nearkin.evaluation.encoder import load
from nearkin.run.folder import RunFolder, data_name
from nearkin.run.reporter import Reporter, Silent
from nearkin.tables import write_csv
from nearkin.types import UNKNOWN


@dataclass(frozen=True, eq=False)
class Assigned:
    """New images in the classes of a discovery."""

    images: Images
    """Those that could be read, in the order of the assignments."""
    assignments: Assignments
    bad: dict[str, str]
    """The others, with the reason."""

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dictionary per image, with the columns of assignments.csv."""
        return [dict(zip(COLUMNS, row, strict=True)) for row in self.assignments.rows()]

    def lines(self) -> list[str]:
        """How many images went where, for people."""
        numbers, counts = np.unique(self.assignments.cluster, return_counts=True)
        names = [self.assignments.classes[number] for number in numbers]
        width = max(map(len, names))
        found = [f"{name:{width}}  {n}" for name, n in zip(names, counts.tolist(), strict=True)]
        return found + [f"left out {name!r}: {reason}" for name, reason in self.bad.items()]


def assign(
    run: str | Path,
    data: Any,
    *,
    output: str | Path | None = None,
    copy_to: str | Path | None = None,
    device: str = "auto",
    workers: int | Literal["auto"] = "auto",
    reporter: Reporter | None = None,
) -> Assigned:
    """Sort new images into the classes that a discovery found.

    Args:
        run: The run folder of the discovery.
        data: What `open_images` takes.
        output: A CSV file like assignments.csv.
        copy_to: A new folder to sort the images into, by class.
        device: Where to compute.
        workers: Processes that decode photographs; `auto`: one per processor.
        reporter: Who is told how it goes.

    Raises:
        NearkinError: One line on what cannot be done.
    """
    folder = RunFolder(Path(run))
    classifier, encoder = read_classifier(folder.classifier), load(folder.path)
    if classifier.dim != encoder.dim:
        raise CheckpointError(
            f"{folder.classifier} is of another encoder: it takes {classifier.dim} features, and "
            f"{folder.encoder.name} gives {encoder.dim}; discover again"
        )
    if copy_to is not None:
        check_destination(Path(copy_to), [data_name(data)])
    if output is not None:
        spare(Path(output), data)
    on_progress = (reporter or Silent()).progress
    images = open_images(data, labels="none", on_progress=on_progress)
    said = classifier.details
    looks, bad = look(
        encoder,
        images,
        said["augment"],
        said["num_views"],
        said["seed"],
        choose_device(device),
        available_cpus() if workers == "auto" else workers,
        on_progress,
    )
    rows = np.setdiff1d(np.arange(len(images)), list(bad))
    if not len(rows):
        raise DataError(f"none of the {len(images)} images can be read; look at the files")
    shown, nothing = images.subset(rows), np.full(len(rows), UNKNOWN)
    predictions = classifier.predict(rows_of(looks, rows), tuple(shown.names), nothing)
    found = assigned(predictions, calibration=classifier.calibration)
    if output is not None:
        _write(Path(output), found)
    if copy_to is not None:
        classes = [found.classes[number] for number in found.cluster]
        copy(Path(copy_to), shown, np.arange(len(shown)), classes, data=[data_name(data)])
    unread = {file.name: file.reason for file in images.bad}
    unread |= {images.names[row]: reason for row, reason in bad.items()}
    return Assigned(shown, found, dict(sorted(unread.items())))


def _write(path: Path, found: Assignments) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_csv(path, COLUMNS, found.rows())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another -o") from error
