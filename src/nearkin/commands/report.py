"""`nearkin report`: the page of a run, made anew."""

from pathlib import Path
from typing import Any

from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.data.images import Images, open_images
from nearkin.discovery.data import open_discovery_data
from nearkin.errors import OutputError, UsageError
from nearkin.report.write import shown_of, write_page
from nearkin.run.folder import RunFolder, data_name
from nearkin.tables import replace_text


def report(run: str | Path, data: Any = None, *, output: str | Path | None = None) -> Path:
    """Make the page of a finished run anew, from its files and its images.

    Args:
        run: The run folder.
        data: Its images, if they are no longer where they were.
        output: Where to; the run's own report.html by default.

    Returns:
        Where the page is.

    Raises:
        NearkinError: One line on what cannot be done.
    """
    folder = RunFolder(Path(run))
    path, images = Path(output or folder.report), images_of(folder, data)
    try:
        if output is None:
            write_page(folder, images)
        else:
            replace_text(path, shown_of(folder, images).page())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another -o") from error
    return path


def images_of(folder: RunFolder, data: Any = None) -> Images:
    """The images of a finished run.

    Args:
        folder: The run.
        data: The images, if they are no longer where they were.

    Raises:
        UsageError: If this is no finished run, or it was made of arrays, which it does not keep.
    """
    if not folder.summary.exists():
        raise UsageError(f"{folder.path} is no finished run; finish it with --resume")
    config: DiscoverConfig | TrainConfig
    discovered = folder.classifier.exists()
    config, stored = folder.discovery_settings() if discovered else folder.settings()
    if data is None and stored == data_name(None) and not Path(stored).exists():
        raise UsageError(
            f"{folder.path} was made of arrays, which it does not keep; give the images, too"
        )
    asked = stored if data is None else data
    if isinstance(config, DiscoverConfig):
        return open_discovery_data(asked, config).images
    return open_images(asked, labels=config.labels)
