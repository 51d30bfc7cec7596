"""The interactive map of images: its values, and its data for the script."""

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Shaped

from nearkin.files import write_whole

SIMILARITY_STEPS: Final = 100
"""Similarities are stored as this many steps per 1, which fit into a byte."""
SCRIPT_PARTS: Final = (
    "data", "drawing", "view", "legend", "selection", "lists", "panel", "server", "labels",
    "input",
)  # fmt: skip
"""JavaScript files in the order they are concatenated."""
ESCAPES: Final = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&"})
"""Characters that could end the element that holds the data."""


Role = Literal["", "class", "score", "label"]


@dataclass(frozen=True, slots=True, eq=False)
class Coloring:
    """One way to color the map."""

    name: str
    """Shown to the reader."""
    values: Int[np.ndarray, " n"] | Float[np.ndarray, " n"]
    """The class of every image, -1 if unknown; without classes a number, NaN if unknown."""
    classes: tuple[str, ...] = ()
    note: str = ""  # a sentence on how to read it
    role: Role = ""
    """What the page does with it: scores order the images of a class, highest first; labels are
    given where there is a server, which suggests the names of classes, and classes of a discovery
    are renamed there."""

    @property
    def known(self) -> Bool[np.ndarray, " n"]:
        """Whether the value of each image is known."""
        is_class = np.issubdtype(self.values.dtype, np.integer)
        return self.values >= 0 if is_class else np.isfinite(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class ImageMap:
    """Images with their coordinates, nearest neighbors, colorings and thumbnails."""

    number: Int[np.ndarray, " n"]
    """Index of each image in the data, by which the page asks its server."""
    names: tuple[str, ...]  # paths in the data, which may hold anything
    xy: Float[np.ndarray, "n 2"]
    neighbors: Int[np.ndarray, "n k"]
    """Rows of this map, most similar first, without the image itself."""
    similarity: Float32[np.ndarray, "n k"]  # cosine
    regions: Int[np.ndarray, " regions"]  # rows of the map that are cut from larger images
    colorings: tuple[Coloring, ...]
    """The first is selected at first; without any, all points look alike."""
    sheets: Iterable[bytes]  # WebP images of thumbnails, row by row in the order of the images
    side: int  # pixels of a thumbnail's side
    columns: int  # thumbnails in a row of a sheet
    per_sheet: int  # thumbnails on every sheet but the last
    total: int  # images in the run, of which these may be a sample
    among: int = 0  # images that neighbors are among, if not all
    per_file: int = 0  # images whose names and neighbors are in a file beside the page; 0 is none


def write_files(image_map: ImageMap, folder: Path) -> None:
    """Write what the page of a map loads when it is needed: N.js and N.webp, counted from 0.

    Scripts and images, as a page from a disk may load nothing else. One sheet is in memory.
    """
    folder.mkdir(exist_ok=True)
    for number in range(-(-len(image_map.names) // image_map.per_file)):
        write_whole(folder / f"{number}.js", details(image_map, number).encode())
    for number, sheet in enumerate(image_map.sheets):
        write_whole(folder / f"{number}.webp", sheet)


def details(image_map: ImageMap, number: int) -> str:
    """Return the names and neighbors of one file's images, as a script in plain ASCII."""
    return f"nearkinDetails({number}, {_json(_details(image_map, number))});\n"


def script() -> str:
    """Return the JavaScript of the map."""
    folder = resources.files(__package__) / "script"
    parts = [(folder / f"{part}.js").read_text(encoding="utf-8") for part in SCRIPT_PARTS]
    return "\n".join(['"use strict";\n(() => {', *parts, "})();\n"])


def _details(image_map: ImageMap, number: int) -> dict[str, Any]:
    per_file = image_map.per_file or len(image_map.names)
    some = slice(number * per_file, (number + 1) * per_file)
    similarity = np.rint(image_map.similarity[some] * SIMILARITY_STEPS).astype(np.int16)
    return {
        "names": image_map.names[some],
        "neighbors": _array(image_map.neighbors[some]),
        "similarity": _array(similarity),
    }


def map_data(image_map: ImageMap, files: str = "") -> str:
    """Return what the script reads: JSON that cannot be taken for markup.

    `files` is the address of what `details` and the sheets are in, if the map has such.
    """
    texts = ("name", "role", "classes", "note")
    colorings = [
        {name: getattr(one, name) for name in texts} | {"values": _array(one.values)}
        for one in image_map.colorings
    ]
    data: dict[str, Any] = {
        "number": _array(image_map.number),
        "xy": _array(image_map.xy),
        "regions": _array(image_map.regions),
        "k": image_map.neighbors.shape[1],
        "among": image_map.among,
        "similaritySteps": SIMILARITY_STEPS,
        "colorings": colorings,
        "side": image_map.side,
        "columns": image_map.columns,
        "perSheet": image_map.per_sheet,
    }
    if image_map.per_file:
        data |= {"files": files, "perFile": image_map.per_file}
    else:
        data["details"] = _details(image_map, 0)
        data["sheets"] = [_base64(sheet) for sheet in image_map.sheets]
    return _json(data)


def _json(values: Mapping[str, Any]) -> str:
    """JSON with arrays as base64, which cannot be taken for markup."""
    return json.dumps(values, separators=(",", ":")).translate(ESCAPES)


def _array(values: Shaped[np.ndarray, "..."]) -> dict[str, str]:
    """Little-endian bytes in the smallest type that holds all values."""
    kinds = (np.int8, np.int16, np.int32)
    low, high = (values.min(), values.max()) if values.size else (0, 0)
    fitting = (k for k in kinds if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
    integers = np.issubdtype(values.dtype, np.integer)
    kind = np.dtype(next(fitting) if integers else np.float32)
    data = _base64(values.astype(kind.newbyteorder("<")).tobytes())
    return {"kind": f"{kind.name.capitalize()}Array", "data": data}  # the script's own name


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
