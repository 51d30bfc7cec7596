"""All kinds of data that hold encoded pictures, by the name of the file or folder."""

from pathlib import Path

from nearkin.data.archive import ARCHIVES, list_archive
from nearkin.data.folder import list_folder
from nearkin.data.sources import Listing
from nearkin.data.table import TABLES, Row, list_table, read_table
from nearkin.errors import DataError


def list_files(path: Path) -> tuple[Listing, dict[str, Row] | None]:
    """Find the pictures in a folder, an archive or a table; and, of a table, its rows.

    Raises:
        DataError: it is none of these, is damaged, or holds no pictures.
    """
    if path.is_dir():
        return list_folder(path), None
    if path.name.lower().endswith(ARCHIVES):
        return list_archive(path), None
    if path.suffix.lower() in TABLES:
        return list_table(path, read_table(path))
    kinds = ", ".join((*ARCHIVES, *TABLES, ".npz"))
    raise DataError(f"{path}: not a kind of data that is known; give a folder, or a {kinds}")
