"""`nearkin report`: the page of a run, written again."""

from pathlib import Path
from typing import Any

from nearkin.classification.data import open_labeled_data
from nearkin.config import ClassifyConfig, DiscoverConfig
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.discovery.data import open_discovery_data
from nearkin.errors import UsageError
from nearkin.evaluation.table import are_vectors, open_table
from nearkin.report.image_map import ONE_FILE
from nearkin.report.pages import write_page, write_table_page
from nearkin.run.failures import resource_errors
from nearkin.run.folder import RunFolder, data_name
from nearkin.tables import writing


def write_report(
    run: str | Path,
    data: Any = None,
    *,
    output: str | Path | None = None,
    one_file: int = ONE_FILE,
) -> Path:
    """Write the page of a finished run again, or a page with the map of a table of features.

    Of a table, a block is in memory, so that a million images have room.

    Args:
        run: The run folder, or what `embed` has written.
        data: The images of a table; those of a run, if they have moved.
        output: The file; the run's own report.html by default.
        one_file: Of more images, most of the page is in a folder beside it, such as report_files.

    Returns:
        Where the page is.

    Raises:
        NearkinError: One line on what failed.
    """
    if are_vectors(Path(run)):
        return _write_table_page(Path(run), data, output, one_file)
    folder = RunFolder(Path(run))
    path, images = Path(output or folder.report), images_of(folder, data)
    with writing(path):
        write_page(folder, images, output=Path(output) if output else None, one_file=one_file)
    return path


def _write_table_page(table: Path, data: Any, output: str | Path | None, one_file: int) -> Path:
    from nearkin.commands.vectors import Vectors  # which takes the images of runs from here

    if data is None or output is None:
        raise UsageError(f"{table} are features; give DATA, their images, and -o, the page")
    vectors, images, path = Vectors(open_table(table), ""), open_images(data), Path(output)
    with writing(path), resource_errors():
        write_table_page(vectors.table, images, vectors.image_rows(images), path, one_file)
    return path


def images_of(folder: RunFolder, data: Any = None) -> Images:
    """Open the images of a finished run.

    Args:
        folder: The run.
        data: The images, if they have moved.

    Raises:
        UsageError: If the run is not finished, or its images were arrays, which are not stored.
    """
    folder.check_is_run()
    if not folder.summary.exists():
        raise UsageError(f"{folder.path} is no finished run; finish it with --resume")
    config, stored = folder.any_settings()
    if data is None and stored == data_name(None) and not Path(stored).exists():
        raise UsageError(
            f"{folder.path} was made from arrays, which are not stored; give the images, too"
        )
    source = stored if data is None else data
    if isinstance(config, DiscoverConfig):
        return open_discovery_data(source, config).images
    if isinstance(config, ClassifyConfig):
        return open_labeled_data(source, config).images
    return open_images(source, labels=config.labels)
