"""Edited copies that are found, and other images that are taken for copies, beside imagehash.

    python -m benchmarks duplicates [--sets photos/ digits.zip] [--sides 28 300] [--count 2000]

`count` images of each set, any data that nearkin opens, are made squares of each side (0: as
they are). Of `copies` of them a copy is made by each edit. nearkin, pHash of imagehash and
cleanvision, where installed, look for duplicates among all. A row says the CPU time of an image,
how many copies share a group with their original, and how many of 1,000 originals are merged with
another one: some sets have duplicates of their own, which all should find.
"""

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image, ImageEnhance
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from benchmarks.shared.datasets import as_jpeg
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row, compared
from nearkin.data.decode import as_image
from nearkin.data.duplicates import near_groups, signatures
from nearkin.data.images import Images
from nearkin.data.opening import open_images

OPTIONS: Final = (
    Option("sets", ["digits"], "data to draw images from"),
    Option("sides", [0], "pixels a side; 0: as they are", quick=[32]),
    Option("count", 2000, "images of a set", quick=60),
    Option("copies", 200, "images of which copies are made", quick=10),
)


def _resized(image: Image.Image, factor: float) -> Image.Image:
    width, height = (max(1, round(factor * edge)) for edge in image.size)
    return as_jpeg(image.resize((width, height), Image.Resampling.BICUBIC), 85)


def _cropped(image: Image.Image) -> Image.Image:
    x, y = (max(1, round(0.03 * edge)) for edge in image.size)
    return image.crop((x, y, image.width - x, image.height - y))


EDITS: Final[dict[str, Callable[[Image.Image], Image.Image]]] = {
    "JPEG 85": lambda image: as_jpeg(image, 85),
    "JPEG 35": lambda image: as_jpeg(image, 35),
    "x .7": lambda image: _resized(image, 0.7),
    "x 1.25": lambda image: _resized(image, 1.25),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.15),
    "cropped": _cropped,
}


def drawn(name: str, count: int) -> list[Image.Image]:
    """Draw images of a set."""
    images = open_images(name, labels="none")
    rows = np.random.default_rng(0).permutation(len(images))[:count].tolist()
    contents = (images.read(row) for row in rows)
    read = map(as_image, contents)
    return [image for image in read if isinstance(image, Image.Image)]


def by_nearkin(_: Path, images: Images) -> dict[str, np.ndarray]:
    """Group by nearkin."""
    return {"": near_groups(signatures(images))}


def by_imagehash(folder: Path, images: Images) -> dict[str, np.ndarray]:
    """Group by the distance of pHash."""
    imagehash: Any = import_module("imagehash")
    hashes = [imagehash.phash(Image.open(folder / name)).hash.ravel() for name in images.names]
    signs = np.array(hashes, np.float32) * 2 - 1
    distance = (64 - signs @ signs.T) / 2
    return {f"pHash {most}": _joined(np.argwhere(distance <= most), images) for most in (4, 10)}


def by_cleanvision(folder: Path, images: Images) -> dict[str, np.ndarray]:
    """Group by cleanvision."""
    lab: Any = import_module("cleanvision").Imagelab(data_path=str(folder))
    lab.find_issues({"near_duplicates": {}, "exact_duplicates": {}}, n_jobs=1, verbose=False)
    row = {str((folder / name).resolve()): number for number, name in enumerate(images.names)}
    sets = [each for info in ("near", "exact") for each in lab.info[f"{info}_duplicates"]["sets"]]
    pairs = [(row[paths[0]], row[path]) for paths in sets for path in paths]
    return {"cleanvision": _joined(np.array(pairs, np.int64).reshape(-1, 2), images)}


def _joined(pairs: np.ndarray, images: Images) -> np.ndarray:
    edges = coo_array((np.ones(len(pairs), bool), pairs.T), (len(images),) * 2)
    return np.asarray(connected_components(edges, directed=False)[1])


def figures(groups: np.ndarray, images: Images) -> dict[str, float]:
    """Return the recall of each edit, and how many of 1,000 originals are merged with another."""
    group = dict(zip(images.names, groups.tolist(), strict=True))
    own = {name: at for name, at in group.items() if name.startswith("original/")}
    found = {edit: list[bool]() for edit in EDITS}
    for name, at in group.items():
        kind, _, number = name.partition("/")
        if kind in found:
            found[kind].append(at == own[f"original/{number}"])
    merged = 1000 * (len(own) - len(set(own.values()))) / len(own)
    return {edit: float(np.mean(hits)) for edit, hits in found.items()} | {"merged": merged}


def plant(folder: Path, images: list[Image.Image], side: int, copies: int) -> Images:
    """Write images of a side, and the copies of some, as files; open them."""
    for kind in ("original", *EDITS):
        (folder / kind).mkdir()
    for number, image in enumerate(images):
        square = image.resize((side, side), Image.Resampling.BICUBIC) if side else image
        square.save(folder / "original" / f"{number:05}.png")
        for kind, edit in EDITS.items() if number < copies else ():
            edit(square).save(folder / kind / f"{number:05}.png")
    return open_images(folder, labels="none", cache=False)


def run(options: Namespace) -> Iterator[Row]:
    """Plant copies in each set at each side, and look for them."""
    others = {"imagehash": by_imagehash, "cleanvision": by_cleanvision}
    there = {name: function for name, function in others.items() if find_spec(name)}
    for module in there:  # else the first call is timed with its import
        import_module(module)
    for name, side in product(options.sets, options.sides):
        cost, more = list[float](), dict[str, Any]()
        with tempfile.TemporaryDirectory() as folder:
            images = plant(Path(folder), drawn(name, options.count), side, options.copies)
            for function in (by_nearkin, *there.values()):
                start = time.process_time()
                groups = function(Path(folder), images)
                cost.append(1000 * (time.process_time() - start) / len(images))
                for which, each in groups.items():
                    found = figures(each, images).items()
                    more |= {f"{which} {key}".strip(): value for key, value in found}
        case, unit = f"{Path(name).stem} {side or ''}".strip(), "CPU ms an image"
        alone = Row(case, cost[0], unit, more=more)
        pair, other = (cost[:1], cost[1:2]), next(iter(there), "")
        yield compared(case, *pair, against=other, unit=unit, **more) if there else alone
