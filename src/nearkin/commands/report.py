"""`nearkin report`: the report of a run, written again."""

from pathlib import Path
from typing import Any

from nearkin.commands.vectors import Vectors, images_of
from nearkin.data.opening import open_images
from nearkin.errors import UsageError
from nearkin.evaluation.table import are_vectors, open_table
from nearkin.files import check_new, writing
from nearkin.report.pages import write_page, write_table_page
from nearkin.run.failures import resource_errors
from nearkin.run.folder import RunFolder


def write_report(
    run: str | Path,
    data: Any = None,
    *,
    output: str | Path | None = None,
    one_file: int = 50_000,
    trust_remote_code: bool = False,
) -> Path:
    """Write the report of a finished run again, or a page with the map of a table of features.

    Of a table, one block is in memory, so that a million images fit.

    Args:
        run: The run folder, or what `embed` has written.
        data: The images of a table; those of a run, if they have moved.
        output: The file; the run's own report.html by default.
        one_file: Of more images, most of the page is in a folder beside it, such as report_files.
        trust_remote_code: Whether to run code that files of the run name.

    Returns:
        Where the page is.

    Raises:
        NearkinError: One line on what failed.
    """
    if output is not None:
        check_new(Path(output))
    if are_vectors(Path(run)):
        return _write_table_page(Path(run), data, output, one_file)
    folder = RunFolder(Path(run))
    path = Path(output or folder.report)
    images = images_of(folder, data, trust_remote_code=trust_remote_code)
    with writing(path):
        write_page(folder, images, output=Path(output) if output else None, one_file=one_file)
    return path


def _write_table_page(table: Path, data: Any, output: str | Path | None, one_file: int) -> Path:
    if data is None or output is None:
        raise UsageError(f"{table} are features; give DATA, their images, and -o, the page")
    vectors, images, path = Vectors(open_table(table), ""), open_images(data), Path(output)
    with writing(path), resource_errors():
        write_table_page(vectors.table, images, vectors.image_rows(images), path, one_file)
    return path
