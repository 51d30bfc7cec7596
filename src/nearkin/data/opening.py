"""Opening images: any kind of data is listed, its headers are read, its labels are numbered."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from nearkin.data.archives import ARCHIVES, is_pattern, list_archives, list_pattern
from nearkin.data.arrays import from_name, is_name, list_arrays, list_npz, list_object
from nearkin.data.columns import COLUMN_TABLES, copied_dataset, has_images
from nearkin.data.folders import (
    list_files,
    list_folder,
    list_remote_image,
    list_remote_table,
    list_store,
    list_table,
)
from nearkin.data.images import Images
from nearkin.data.labels import (
    Row,
    annotations_from_folders,
    annotations_from_rows,
    grouped,
    numbered,
    shared_form,
    spellings,
)
from nearkin.data.listing import Listing, is_image, require_files
from nearkin.data.notes import note_on
from nearkin.data.regions import cut, list_coco
from nearkin.data.remote import File, file_or_folder, is_url
from nearkin.data.scan import scan
from nearkin.data.tables import TABLES, Rows, file_at, is_table, match, read_table
from nearkin.errors import DataError, UsageError, redacted
from nearkin.extensions import is_reference, load_reference
from nearkin.pace import ProgressCallback, ignore_progress
from nearkin.places import exists, user_path
from nearkin.schema import check_value


def open_images(
    data: Any,
    *,
    labels: str = "auto",
    cache: bool = True,
    full: bool = False,
    on_progress: ProgressCallback = ignore_progress,
) -> Images:
    """Find all images, check their headers, and read their labels, groups and splits.

    Args:
        data: A folder, flat or nested; a .csv or .parquet with the column path and, optionally,
            label, group and split; a .parquet or .arrow with a column of encoded images; a .zip,
            .tar or .tar.gz; shards/{000..009}.tar; each also as an address of a store, such as
            s3://; an .npz with x and y, or x_train, y_train, x_test, y_test; an array of
            images, a list of paths or of images, or one of these and labels as a tuple; a
            `datasets.Dataset`, or a stream of one; an `ImageSource`; "digits", or
            "torchvision:NAME" for a set that is already on disk; or FILE.py:NAME or module:NAME
            of a function or class whose call gives any of these.
        labels: "auto": what the data declare or, in folders, the class folders if they look like
            some; "none"; "folders": each image's folder, in any case; or the path of a table
            with the columns path and label. Such a table may cover only some images; its rows
            without an image are counted in `notes`.
        cache: Store headers and thumbnails, so that a second start reads and decodes none.
        full: Decode every image now, which also finds damage behind the header.
        on_progress: Progress of the scan of all files.

    Raises:
        DataError: There are no usable images, or their annotations contradict each other. A
            damaged file does not raise: it is listed in `bad`.
    """
    labels = check_value("labels", labels, str)
    resolved, where = _resolve(data)
    listing = _list(resolved, where)
    if not cache:
        listing = replace(listing, key="")
    images = scan(listing, full=full, on_progress=on_progress)
    if any(row.box for row in listing.rows.values()):
        images, rows = cut(images, listing)
        listing = replace(listing, rows=rows)
    if not images.names and not images.bad:  # what may have been images are none
        require_files(replace(listing, names=(), others=[*listing.others, *listing.names]), where)
    if not images.names:
        raise DataError(
            f"{where}: none of {len(images.bad)} images can be used, such as "
            f"{images.bad[0].name!r} ({images.bad[0].reason}); look at the files"
        )
    if is_name(where) and exists(Path(where)):
        text = f"the built-in data set {where} for the folder of that name, which is ./{where}"
        images = images.noted(*note_on("substituted", len(images), text))
    return _annotated(images, listing, labels)


def _resolve(data: Any) -> tuple[Any, str]:
    """The data that a reference stands for, a path as text, and what to call them in messages."""
    where = redacted(str(data)) if isinstance(data, str | Path) else "the data"
    if not where:
        raise UsageError("data '' is no path; give the one of your images")
    known = is_name(where) or is_url(where) or exists(user_path(where))
    if not known and is_reference(where):
        factory = load_reference(where, "source")
        if not callable(factory):
            raise UsageError(f"data {where} is no function; give one that returns images")
        data = factory()
    return str(data) if isinstance(data, str | Path) else data, where


def _list(data: Any, where: str) -> Listing:
    """What the data hold: an object of Python, a name, or what lies at a path or an address."""
    if type(data).__module__.partition(".")[0] == "datasets" and hasattr(data, "with_format"):
        if isinstance(data, Mapping):
            raise DataError(
                f"{where}: a dictionary of {', '.join(map(str, data))}; give one of them"
            )
        copy = copied_dataset(data)
        return replace(list_archives(where, {"": copy}), key=str(copy))
    if not isinstance(data, str):
        return list_object(data, where)
    if is_name(data):
        return list_arrays(data, from_name(data))
    if is_pattern(data):
        return list_pattern(data)
    if is_url(data):
        remote = file_or_folder(data)
        return _list_file(remote) if remote else list_store(data)
    file = user_path(data)
    if not exists(file):
        raise DataError(f"{file}: no such file or folder; give the path of your images")
    return list_folder(file) if file.is_dir() else _list_file(file)


def _list_file(file: File) -> Listing:
    suffix = file.suffix.lower()
    if file.name.lower().endswith(ARCHIVES) or (suffix in COLUMN_TABLES and has_images(file)):
        return list_archives(file, {"": file})
    if suffix in TABLES:
        rows = read_table(file)
        return list_table(file, rows) if isinstance(file, Path) else list_remote_table(file, rows)
    if suffix == ".json" and isinstance(file, Path):
        return list_coco(file)
    if suffix == ".npz":
        return list_npz(file)
    if is_image(file.name):
        if not isinstance(file, Path):
            return list_remote_image(file)
        alone = list_files(file.parent.resolve(), [file.name])
        return replace(alone, key=str(file.resolve()))
    kinds = ", ".join((*ARCHIVES, *dict.fromkeys((*TABLES, *COLUMN_TABLES)), ".npz", ".json"))
    raise DataError(
        f"{file}: not a kind of data that is known; give a folder, an image, or a {kinds}"
    )


def _annotated(images: Images, listing: Listing, labels: str) -> Images:
    """Add the data's own annotations, those of folders or those of a table of labels."""
    names, rows = images.names, listing.rows
    if labels != "auto":
        rows = {name: row._replace(label="", unusable="") for name, row in rows.items()}
    annotations, notes = annotations_from_rows(rows, names)
    if labels == "folders" or not any(annotations.splits):
        how = "none" if labels != "folders" and (rows or labels != "auto") else labels
        of_folders, more = annotations_from_folders(names, how)
        annotations, notes = annotations.or_else(of_folders), notes + more
    if labels not in ("auto", "none", "folders"):
        table = file_at(labels)
        matched, lost = match(table, read_table(table, "label"), names, images)
        of_table, more = annotations_from_rows(matched, names)
        annotations, notes = of_table.or_else(annotations), [*notes, *lost, *more]
    classes, numbers = numbered(annotations.labels)
    return replace(
        images,
        labels=numbers,
        groups=grouped(annotations.groups),
        group_names=tuple(annotations.groups),
        splits=np.array(annotations.splits, np.str_),
        classes=classes,
        notes=(*images.notes, *notes, *spellings(annotations.labels)),
    )


def column_of(column: str, images: Images, *places: Any) -> Shaped[np.ndarray, " images"]:
    """What a column says of each image, as text; '' for nothing.

    It is of the first of these places that is a table with that column; images may lie in a folder
    beside it.
    """
    name, tables = column.strip().lower(), [str(each) for each in places if is_table(str(each))]
    if not tables:
        raise UsageError(
            f"column {column}: there is no table; give one with the columns path and {column}, "
            "as the data or as their labels"
        )
    file, written = _table_with(name, tables)
    rows: Mapping[str, Row] = {}
    boxed = any(row.box for _, row in written) and len(images) and images.source.region(0)
    if boxed and isinstance(file, Path):
        rows = list_table(file, written).rows
    rows = rows or match(file, written, images.names, images)[0]
    cells = (rows[image].label if image in rows else "" for image in images.names)
    return np.array([*map(shared_form, cells)], np.str_)


def _table_with(column: str, tables: Iterable[str]) -> tuple[File, Rows]:
    """The first of these tables that has a column, and its rows; or the error of the first."""
    errors = list[DataError]()
    for file in map(file_at, tables):
        try:
            return file, read_table(file, column)
        except DataError as error:
            errors.append(error)
    raise errors[0]
