"""Pictures, wherever they come from: names, labels, sizes, and a way to read each of them."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Int32, Int64, Shaped

from nearkin.data.archive import ARCHIVES, list_archive
from nearkin.data.arrays import Arrays, from_memory, from_npz, join
from nearkin.data.folder import list_folder
from nearkin.data.header import BadImage, Header
from nearkin.data.labels import Said, in_bytes, said_by_folders
from nearkin.data.named import from_name, is_name
from nearkin.data.scan import scan
from nearkin.data.sources import BadFile, Listing, Source
from nearkin.data.table import TABLES, list_table, match, read_table, said_by_rows
from nearkin.errors import DataError

__all__ = ["BadFile", "Images", "open_images"]
