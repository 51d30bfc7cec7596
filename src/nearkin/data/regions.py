"""Regions of images as images: boxes that a table lists, or a COCO file."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from jaxtyping import Int64, UInt8

from nearkin.data.boxes import Box, region
from nearkin.data.decode import MIN_SIDE, decode
from nearkin.data.folders import list_files
from nearkin.data.images import BadFile, Folder, Images, Region, Rows, Source, in_bytes
from nearkin.data.labels import Row, split_of
from nearkin.data.listing import Listing
from nearkin.data.notes import Note
from nearkin.data.tables import by_name, folder_of, places_of
from nearkin.errors import DataError
from nearkin.pace import count
from nearkin.types import UNLABELED

OUTSIDE: Final = "box outside of the image"
TOO_SMALL: Final = f"box of less than {MIN_SIDE} pixels"


@dataclass(frozen=True, eq=False)
class Regions(Source):
    """Reads boxes of images: each image is decoded, upright and RGB, and cropped."""

    images: Source
    sizes: Int64[np.ndarray, "files 2"]  # Width and height of each image in pixels, upright
    rows: Rows  # The image of each box
    boxes: Int64[np.ndarray, "boxes 4"]  # Left, top, right and bottom in pixels

    def read(self, row: int, limit: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """The pixels in a box."""
        del limit
        _, at, corners = self.region(row)
        encoded = self.images.read(at)
        assert isinstance(encoded, bytes), at
        image = decode(encoded)  # smaller than its size says, if it is a JPEG that is too large
        left, top, right, bottom = np.rint(corners * np.tile(image.size, 2)).astype(int)
        return np.asarray(image)[top:bottom, left:right].copy()

    def region(self, row: int) -> Region:
        """The box in its image."""
        at = int(self.rows[row])
        return Region(self.images, at, self.boxes[row] / np.tile(self.sizes[at], 2))

    def only(self, rows: Rows) -> "Regions":
        """The source of these boxes alone, and of their images."""
        files, own = np.unique(self.rows[rows], return_inverse=True)
        return Regions(self.images.only(files), self.sizes[files], own, self.boxes[rows])


def list_regions(table: Path, rows: Iterable[tuple[str, Row]]) -> Listing:
    """The images whose boxes a table lists, by absolute paths or relative to the table's folder.

    Raises:
        DataError: If images do not exist, or two rows say different things of one box.
    """
    rows = list(rows)
    boxed = [(path, row.box, row) for path, row in rows if row.box]
    root, places = places_of(table, (path for path, _, _ in boxed), [folder_of(table)])
    name = {region(path, box): region(places[path], box) for path, box, _ in boxed}
    said = [(region(path, box), row) for path, box, row in boxed]
    found, _ = by_name(table, said, name.get)
    notes = list[Note]()
    if without := len(rows) - len(boxed):
        text = f"{count(without, 'row')} of {table} without a box"
        notes.append(Note("left out", text, without))
    if again := len(boxed) - len(found):
        text = f"{count(again, 'row')} of {table} with the boxes of others"
        notes.append(Note("merged", text, again))
    return _of_files(table, root, found, notes)


def rows_of_boxes(table: Path, rows: Iterable[tuple[str, Row]]) -> dict[str, Row]:
    """What a table says of its boxes, by their names as images; nothing if it lists none.

    Raises:
        DataError: As `list_regions`.
    """
    boxed = [(path, row) for path, row in rows if row.box]
    if not boxed:
        return {}
    listing = list_regions(table, boxed)
    named = dict(zip(listing.written, listing.names, strict=True))
    return {name: row for name, _, _, row in _in_order(listing.regions, named)}


class _Image(msgspec.Struct):
    id: int | str
    file_name: str


class _Category(msgspec.Struct):
    id: int | str
    name: str


class _Annotation(msgspec.Struct):
    image_id: int | str
    category_id: int | str
    bbox: list[float] = []  # Left, top, width and height
    iscrowd: int = 0


class _Coco(msgspec.Struct):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


def list_coco(path: Path) -> Listing:
    """The images whose boxes a COCO file lists; a box's class is its category.

    Images lie relative to the file's folder, the one above, or one that lies in either.

    Raises:
        DataError: If the file is none of COCO's, or images do not exist.
    """
    boxed, left = _boxes(path)
    if not boxed:
        raise DataError(f"{path}: no annotation has a box; give a file with boxes")
    root, places = places_of(path, (file for file, _, _ in boxed), _around(path, boxed[0][0]))
    found, again = dict[str, Row](), 0
    for file, box, label in boxed:
        name = region(places[file], box)
        if name not in found:
            found[name] = Row(label, box=box)
        elif found[name].label == label:
            again += 1
        else:
            found[name] = Row(unusable="two classes", box=box)
    notes = list[Note]()
    if left:
        text = f"{count(left, 'annotation')} of {path} of a crowd, or without pixels"
        notes.append(Note("left out", text, left))
    if again:
        text = f"{count(again, 'annotation')} of {path} with the boxes of others"
        notes.append(Note("merged", text, again))
    return _of_files(path, root, found, notes)


def _boxes(path: Path) -> tuple[list[tuple[str, Box, str]], int]:
    """The image, the box and the class of annotations, and how many are left out."""
    try:
        coco = msgspec.json.decode(path.read_bytes(), type=_Coco)
        files = {image.id: image.file_name for image in coco.images}
        classes = {category.id: category.name for category in coco.categories}
        used = [each for each in coco.annotations if _has_pixels(each) and not each.iscrowd]
        boxed = [
            (files[each.image_id], _of_coco(each.bbox), classes[each.category_id]) for each in used
        ]
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give another file") from error
    except KeyError as error:
        raise DataError(f"{path}: an annotation names {error}, which is not listed") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise DataError(
            f"{path} is no COCO file ({error}); give one with images, annotations, categories"
        ) from error
    return boxed, len(coco.annotations) - len(used)


def _has_pixels(annotation: _Annotation) -> bool:
    """Whether there is a box, which in COCO's own files may have no height."""
    return len(annotation.bbox) == 4 and min(annotation.bbox[2:]) > 0


def _of_coco(box: list[float]) -> Box:
    left, top, width, height = box
    return Box.around(left, top, left + width, top + height)


def _around(path: Path, first: str) -> list[str]:
    """Folders that images may lie in, that of the first image before the others.

    Where folders of several parts have it, the name of the file says which one is meant, or that
    is the file's own folder.

    Raises:
        DataError: If it is neither.
    """
    above = path.resolve().parent
    folders = [above, above.parent]
    for folder in (above, above.parent):
        with suppress(OSError):
            folders += sorted(each for each in folder.iterdir() if each.is_dir())
    part = {split_of(word) for word in re.split(r"[\W_]+", path.stem)} - {""}
    having = [folder for folder in folders if (folder / first).is_file()]
    meant = [folder for folder in having if split_of(folder.name) in part]
    files = {(folder / first).resolve(): folder for folder in having if split_of(folder.name)}
    if len(files) > 1 and above not in having and not meant:
        one, other = [*files.values()][:2]
        raise DataError(
            f"{path}: {first!r} is in {one} and in {other}; write the folder in file_name"
        )
    return list(dict.fromkeys(map(str, [*meant, *having, *folders])))


def _of_files(path: Path, root: Path, found: Mapping[str, Row], notes: list[Note]) -> Listing:
    listing = list_files(root, dict.fromkeys(name.rpartition("#")[0] for name in found))
    key = str(path.resolve())
    return replace(listing, key=key, regions=found, notes=notes)


def cut(images: Images, files: Listing) -> tuple[Images, dict[str, Row]]:
    """The regions of images, and what is said of each. Those of one image are a group.

    A box that reaches beyond its image ends at the edge. A box without pixels, or of an image that
    cannot be used, is bad.

    Raises:
        DataError: If the images are not RGB or gray of 8 bits.
    """
    if images.pixel_type is not None:
        raise DataError(f"boxes of images of {images.pixel_type}; boxes are of RGB images")
    assert isinstance(images.source, Folder)
    named = dict(zip(files.written, files.names, strict=True))
    row_of = {name: row for row, name in enumerate(images.names)}
    reasons = images.reasons
    bad, said = list[BadFile](), dict[str, Row]()
    rows, boxes = list[int](), list[Box]()
    for name, file, box, row in _in_order(files.regions, named):
        at = row_of.get(file)
        if at is None:
            bad.append(BadFile(name, reasons[file]))
            continue
        inside = box.within(*images.sizes[at].tolist())
        if inside is None or min(inside.size) < MIN_SIDE:
            bad.append(BadFile(name, OUTSIDE if inside is None else TOO_SMALL))
            continue
        rows.append(at)
        boxes.append(inside)
        said[name] = row._replace(group=row.group or images.source.path(at))
    of, corners = np.array(rows, np.int64), np.array(boxes, np.int64).reshape(-1, 4)
    sizes = corners[:, 2:] - corners[:, :2]
    pairs = zip(images.contents[of].tolist(), corners, strict=True)
    return replace(
        images,
        names=tuple(said),
        labels=np.full(len(of), UNLABELED, np.int64),
        groups=np.arange(len(of)),
        group_names=("",) * len(of),
        splits=np.full(len(of), ""),
        sizes=sizes.astype(np.int32),
        num_bytes=3 * sizes.prod(axis=1),
        formats=images.formats[of],
        modified=images.modified[of],
        contents=np.array([_content(*pair) for pair in pairs], np.uint64),
        source=Regions(images.source, images.sizes.astype(np.int64), of, corners),
        bad=tuple(bad),
    ), said


def _in_order(
    regions: Mapping[str, Row], named: Mapping[str, str]
) -> Iterator[tuple[str, str, Box, Row]]:
    """Each region's name, image, box and row, in the order of the bytes of names."""
    found = list[tuple[str, str, Box, Row]]()
    for name, row in regions.items():
        written = name.rpartition("#")[0]
        file = named.get(written, written)
        assert row.box is not None, name
        found.append((region(file, row.box), file, row.box, row))
    yield from sorted(found, key=lambda each: in_bytes(each[0]))


def _content(image: int, box: Int64[np.ndarray, "4"]) -> int:
    """64 bits that tell a box of an image from others."""
    return int.from_bytes(hashlib.sha256(b"%d" % image + box.tobytes()).digest()[:8])
