"""What is taken out of a run: a table for other explorers, and contact sheets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from nearkin.commands.report import images_of
from nearkin.data.images import open_images
from nearkin.evaluation.table import Neighbors
from nearkin.report.atlas import write_atlas
from nearkin.report.contact import contact_sheet
from nearkin.run.folder import RunFolder

Format = Literal["atlas"]


def export(run: str | Path, output: str | Path, data: Any = None, *, format: Format) -> int:
    """Write the images of a run for another program to show.

    Args:
        run: A run folder.
        output: The file.
        data: The images, if they are no longer where they were.
        format: `atlas` is the Parquet table that Embedding Atlas reads.

    Returns:
        How many images it has.

    Raises:
        NearkinError: One line on what cannot be done.
    """
    del format  # so far there is one
    folder = RunFolder(Path(run))
    return write_atlas(folder, images_of(folder, data), Path(output))


def sheet(
    found: Sequence[Neighbors], run: str | Path, output: str | Path, data: Any = None
) -> Path:
    """Show images beside their neighbors, with names and similarities, as one image.

    Args:
        found: What `neighbors` has found.
        run: The run whose images were looked among.
        output: The file.
        data: What was looked among instead.

    Raises:
        NearkinError: One line on what cannot be done.
    """
    images = images_of(RunFolder(Path(run))) if data is None else open_images(data)
    return contact_sheet(found, images, Path(output))
