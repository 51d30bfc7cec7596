"""Regions of images as images: boxes that a table lists, or a COCO file."""

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from posixpath import normpath
from typing import Final

import msgspec
import numpy as np
from jaxtyping import Float64, UInt8

from nearkin.data.boxes import Box
from nearkin.data.decode import MIN_SIDE, decode
from nearkin.data.folders import list_table
from nearkin.data.images import BadFile, Folder, Images, Region, Rows, Source, in_bytes
from nearkin.data.labels import Row, split_of
from nearkin.data.listing import Listing
from nearkin.data.notes import note_on
from nearkin.errors import DataError
from nearkin.pace import count
from nearkin.places import is_file

OUTSIDE: Final = "box outside of the image"
TOO_SMALL: Final = f"box of less than {MIN_SIDE} pixels"


@dataclass(frozen=True, eq=False)
class Regions(Source):
    """Reads boxes of images: each image is decoded, upright and RGB, and cropped."""

    images: Folder
    rows: Rows  # The image of each box
    corners: Float64[np.ndarray, "boxes 4"]  # See `Region`

    def read(self, row: int, limit: int | None = None) -> UInt8[np.ndarray, "height width 3"]:
        """The pixels in a box."""
        del limit
        _, at, corners = self.region(row)
        image = decode(self.images.read(at))  # a JPEG that is too large is smaller than its size
        left, top, right, bottom = np.rint(corners * np.tile(image.size, 2)).astype(int)
        return np.asarray(image)[top:bottom, left:right].copy()

    def region(self, row: int) -> Region:
        """The box in its image."""
        return Region(self.images, int(self.rows[row]), self.corners[row])

    def only(self, rows: Rows) -> "Regions":
        """The source of these boxes alone, and of their images."""
        files, own = np.unique(self.rows[rows], return_inverse=True)
        return Regions(self.images.only(files), own, self.corners[rows])


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

    @property
    def box(self) -> Box | None:
        """Its box, which in COCO's own files may have no height: then it is None."""
        if not (len(self.bbox) == 4 and min(self.bbox[2:]) > 0):
            return None
        left, top, width, height = self.bbox
        return Box.around(left, top, left + width, top + height)


class _Coco(msgspec.Struct):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


def list_coco(path: Path) -> Listing:
    """The images whose boxes a COCO file lists; a box's class is its category.

    Images lie relative to the file's folder, the one above, or one that lies in either.
    """
    boxed, left = _boxes(path)
    if not boxed:
        raise DataError(f"{path}: no annotation has a box; give a file with boxes")
    written, found, again = dict[str, str](), dict[tuple[str, Box], Row](), 0
    for name, box, label in boxed:
        file = written.setdefault(normpath(name), name)  # ./a.jpg is a.jpg
        first = found.get((file, box))
        if first is None:
            found[file, box] = Row(label, box=box)
        elif first.label == label:
            again += 1
        else:
            found[file, box] = Row(unusable="two classes", box=box)
    rows = [(file, row) for (file, _), row in found.items()]
    listing = list_table(path, rows, _around(path, boxed[0][0]))
    without = f"{count(left, 'annotation')} of {path} of a crowd, or without pixels"
    others = f"{count(again, 'annotation')} of {path} with the boxes of others"
    notes = note_on("left out", left, without) + note_on("merged", again, others)
    return replace(listing, notes=[*notes, *listing.notes])


def _boxes(path: Path) -> tuple[list[tuple[str, Box, str]], int]:
    """The image, the box and the class of annotations, and how many are left out."""
    try:
        coco = msgspec.json.decode(path.read_bytes(), type=_Coco)
        files = {image.id: image.file_name for image in coco.images}
        classes = {category.id: category.name for category in coco.categories}
        boxed = [
            (files[each.image_id], box, classes[each.category_id])
            for each in coco.annotations
            if not each.iscrowd and (box := each.box)
        ]
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give another file") from error
    except KeyError as error:
        raise DataError(f"{path}: an annotation names {error}, which is not listed") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise DataError(
            f"{path} is no COCO file ({error}); give one with images, annotations, categories"
        ) from error
    return boxed, len(coco.annotations) - len(boxed)


def _around(path: Path, first: str) -> list[str]:
    """Folders that images may lie in, that of the first image before the others.

    Where folders of several parts have it, the name of the file says which one is meant, or that
    is the file's own folder; a DataError if it is neither.
    """
    above = path.resolve().parent
    folders = [above, above.parent]
    for folder in (above, above.parent):
        with suppress(OSError):
            folders += sorted(each for each in folder.iterdir() if each.is_dir())
    part = {split_of(word) for word in re.split(r"[\W_]+", path.stem)} - {""}
    having = [folder for folder in folders if is_file(folder / first)]
    meant = [folder for folder in having if split_of(folder.name) in part]
    files = {(folder / first).resolve(): folder for folder in having if split_of(folder.name)}
    if len(files) > 1 and above not in having and not meant:
        one, other = [*files.values()][:2]
        raise DataError(
            f"{path}: {first!r} is in {one} and in {other}; write the folder in file_name"
        )
    return list(dict.fromkeys(map(str, [*meant, *having, *folders])))


def cut(images: Images, files: Listing) -> tuple[Images, dict[str, Row]]:
    """The regions of images, and what is said of each. Those of one image are a group.

    A box that reaches beyond its image ends at the edge. A box without pixels, or of an image that
    cannot be used, is bad.
    """
    if images.pixel_type is not None:
        raise DataError(f"boxes of images of {images.pixel_type}; boxes are of RGB images")
    assert isinstance(images.source, Folder)
    row_of = {name: row for row, name in enumerate(images.names)}
    bad, reasons, said = list[BadFile](), images.reasons, dict[str, Row]()
    rows, boxes = list[int](), list[Box]()
    for name in sorted(files.rows, key=in_bytes):
        row, file = files.rows[name], name.rpartition("#")[0]
        if file not in row_of:
            bad.append(BadFile(name, reasons[file]))
            continue
        assert row.box is not None, name
        at = row_of[file]
        inside = row.box.within(*images.sizes[at].tolist())
        if inside is None or min(inside.size) < MIN_SIDE:
            bad.append(BadFile(name, OUTSIDE if inside is None else TOO_SMALL))
            continue
        rows.append(at)
        boxes.append(inside)
        said[name] = row._replace(group=row.group or images.source.path(at))
    of, corners = np.array(rows, np.int64), np.array(boxes, np.int64).reshape(-1, 4)
    sizes = corners[:, 2:] - corners[:, :2]
    told = zip(images.contents[of].tolist(), corners, strict=True)
    ids = [hashlib.sha256(b"%d" % image + box.tobytes()).digest()[:8] for image, box in told]
    return replace(
        images.at(of),
        names=tuple(said),
        sizes=sizes.astype(np.int32),
        num_bytes=3 * sizes.prod(axis=1),
        contents=np.array([int.from_bytes(each) for each in ids], np.uint64),
        source=Regions(images.source, of, corners / np.tile(images.sizes[of], 2)),
        bad=tuple(bad),
    ), said
