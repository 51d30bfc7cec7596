"""What is taken out of a run: a table for other explorers, and contact sheets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from nearkin.commands.neighbors import Neighbors
from nearkin.commands.report import pictures_of
from nearkin.data.images import open_images
from nearkin.report.atlas import write_atlas
from nearkin.report.contact import contact_sheet
from nearkin.run.folder import RunFolder

Format = Literal["atlas"]


def export(run: str | Path, output: str | Path, data: Any = None, *, format: Format) -> int:
    """Write the pictures of a run for another program to show.

    Args:
        run: A run folder.
        output: The file.
        data: The pictures, if they are no longer where they were.
        format: `atlas` is the Parquet table that Embedding Atlas reads.

    Returns:
        How many pictures it has.

    Raises:
        NearkinError: One line on what cannot be done.
    """
    del format  # so far there is one
    folder = RunFolder(Path(run))
    return write_atlas(folder, pictures_of(folder, data), Path(output))


def sheet(
    found: Sequence[Neighbors], run: str | Path, output: str | Path, data: Any = None
) -> Path:
    """Show pictures beside their neighbors, with names and similarities, as one picture.

    Args:
        found: What `neighbors` has found.
        run: The run whose pictures were looked among.
        output: The file.
        data: What was looked among instead.

    Raises:
        NearkinError: One line on what cannot be done.
    """
    images = pictures_of(RunFolder(Path(run))) if data is None else open_images(data)
    return contact_sheet(found, images, Path(output))
