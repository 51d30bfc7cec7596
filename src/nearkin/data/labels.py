"""Classes, groups and splits of images: what folders, tables and arrays say, and what it means."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from math import isnan
from typing import Any, Final, NamedTuple
from unicodedata import normalize

import numpy as np
from jaxtyping import Int64, Shaped

from nearkin.data.boxes import Box
from nearkin.data.images import Images, in_bytes
from nearkin.data.notes import Note, note_on, noted
from nearkin.errors import DataError
from nearkin.pace import count
from nearkin.types import UNLABELED

SPLIT_WORDS: Final = {
    **dict.fromkeys(("train", "training", "trainset"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "valset", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "testset", "eval", "evaluation"), "test"),
}
"""Words for the splits, as folders, shards, columns and arrays are called: those of `datasets`,
of torchvision, COCO (train2017), Kaggle (training_set, seg_train) and MedMNIST (train_images)."""
FILLERS: Final = frozenset({"set", "split", "data", "dataset", "seg"}) | {
    *("x", "y", "image", "images", "img", "imgs", "label", "labels", "of")
}
SHARDS: Final = (".tar", ".parquet", ".arrow")
"""Files that hold a part of a data set: folders of their name to the images, but no classes."""
NUMBER: Final = re.compile(r"[+-]?\d+(\.\d*)?|nan", re.IGNORECASE | re.ASCII)
WHOLE: Final = re.compile(r"[+-]?\d+(\.0*)?", re.ASCII)
NO_CLASS: Final = "-1"  # The number of no class, where those of classes stand for names
MISSING: Final = frozenset({"nan", "na", "n/a", "none", "null", "-1", "-1.0"})
"""What other programs write where there is no label; among names, it may be one."""
STRAY: Final = 0.1  # The largest share of images in no folder, for the folders to be classes


@lru_cache(maxsize=2**16)
def split_of(name: str) -> str:
    """Train, val or test, if a name says one of them and little else; '' if not.

    Numbers and punctuation do not count. A shard may say more, such as whose part it is.

    >>> [split_of(name) for name in ("train2017", "Test_set", "train-00-of-02.parquet", "bus")]
    ['train', 'test', 'train', '']
    """
    words = re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name))
    said = {word.lower() for word in words} - FILLERS
    if name.lower().endswith(SHARDS):
        said &= SPLIT_WORDS.keys()
    splits = {SPLIT_WORDS.get(word, "") for word in said}
    return splits.pop() if len(splits) == 1 else ""


def splits_of(names: Sequence[str], where: str) -> Shaped[np.ndarray, " names"]:
    """What `split_of` says of each name, '' of none; a word that is no split is refused."""
    splits = [split_of(name) for name in names]
    if unknown := {name for name, split in zip(names, splits, strict=True) if name and not split}:
        raise DataError(f"{where}: split {min(unknown)!r}; say train, val or test")
    return np.array(splits, np.str_)


def composed(name: str) -> str:
    """The form that all spellings of a class share: composed letters, without outer spaces."""
    return normalize("NFC", name.strip())


class Row(NamedTuple):
    """What is said of an image; '' where nothing is."""

    label: str = ""
    group: str = ""
    split: str = ""
    line: int = 0  # In a CSV the line, in Parquet the row, from 1
    unusable: str = ""  # Where the label is none of one class
    box: Box | None = None  # Of which region of an image

    @classmethod
    def of(cls, label: Any = None, group: Any = None, split: Any = None, line: int = 0) -> "Row":
        """What cells of any type say."""
        try:
            text, unusable = text_of(label), ""
        except TypeError:
            text, unusable = "", " ".join(repr(label).split())[:40]
        return cls(text, shared_form(_written(group)), _written(split), line, unusable)

    def named(self, classes: Sequence[str]) -> "Row":
        """The same with the name of the class whose number the label is; of others, with none."""
        if not WHOLE.fullmatch(self.label):
            return self
        number, last = float(self.label), len(classes) - 1
        if 0 <= number <= last:
            return self._replace(label=text_of(classes[int(number)]))
        beyond = f"{number:.0f} of {count(len(classes), 'class')}"
        return self._replace(label="", unusable=NO_CLASS if number == UNLABELED else beyond)


def whole_number(text: str) -> str:
    """A whole number without the fraction that floats have; other text as it is.

    >>> [whole_number(text) for text in ("3.0", "-1", "3.5", "cat")]
    ['3', '-1', '3.5', 'cat']
    """
    return text.partition(".")[0].removeprefix("+") if WHOLE.fullmatch(text) else text


def shared_form(name: str) -> str:
    """The form that a group, a camera or the like has in all tables, which may hold floats."""
    return composed(whole_number(name))


def _written(cell: Any) -> str:
    try:
        return text_of(cell)
    except TypeError:
        return repr(cell)


def text_of(cell: Any) -> str:
    """The text of a cell, '' for None, NaN and the like of pandas; a TypeError of several."""
    if isinstance(cell, np.ndarray | np.generic) or hasattr(cell, "detach"):
        cell = cell.tolist()
    if isinstance(cell, list | tuple) and len(cell) == 1:
        return text_of(cell[0])
    if isinstance(cell, list | tuple | set | Mapping):
        raise TypeError("several values")
    is_nan = isinstance(cell, float) and isnan(cell)
    if cell is None or is_nan or type(cell).__name__ in ("NAType", "NaTType"):
        return ""
    text = cell.decode("utf-8", "surrogateescape") if isinstance(cell, bytes) else str(cell)
    return text.strip()


def class_of(rows: Mapping[str, Row]) -> tuple[dict[str, str], list[Note]]:
    """The class of each row, '' for none, and what was decided about their labels.

    Where all labels are numbers, NaN is no label and -1 means that there is none, as in arrays and
    in `datasets`; and whole numbers are written as such, since programs make floats of them where
    one is missing. Among names, these are names.
    """
    labels = {name: row.label for name, row in rows.items()}
    counts = Counter(filter(None, labels.values()))
    if all(map(NUMBER.fullmatch, counts)):
        meaning, notes = _numbers(counts)
    else:
        meaning, notes = {}, list[Note]()
        if names := sorted(label for label in counts if label.casefold() in MISSING):
            total = sum(counts[label] for label in names)
            text = f"{total} labels are taken for the name of a class; leave the cell empty where"
            notes.append(Note("guessed", f"{text} there is no label", total, tuple(names)))
    unusable = [row.unusable for row in rows.values() if row.unusable]
    others = [label for label in unusable if label != NO_CLASS]
    notes += _no_labels(len(unusable) - len(others), NO_CLASS)
    notes += noted("left out", others, "labels that are not one class")
    return {name: meaning.get(label, label) for name, label in labels.items()}, notes


def _numbers(counts: Mapping[str, int]) -> tuple[dict[str, str], list[Note]]:
    """The classes that numbers mean, and what was decided about them."""
    negative = any(float(label) < 0 and float(label) != -1 for label in counts)
    none = [x for x in counts if isnan(float(x)) or (float(x) == -1 and not negative)]
    meaning = dict.fromkeys(none, "")
    rest = counts.keys() - meaning.keys()
    if all(map(WHOLE.fullmatch, rest)):
        meaning |= {x: whole_number(x) for x in rest}
    renamed = sorted(x for x in rest if meaning.get(x, x) != x)
    notes = _no_labels(sum(counts[label] for label in none), " or ".join(sorted(none)))
    text = "whole numbers as labels, now without a fraction"
    return meaning, notes + noted("renamed", renamed, text)


def _no_labels(number: int, written: str) -> list[Note]:
    text = f"{count(number, 'label')} {written}, which means no label"
    return note_on("left out", number, text)


def spellings(labels: Iterable[str]) -> list[Note]:
    """Note names of classes that look the same, which are one, and those that nearly do."""
    written = sorted(set(labels) - {""})
    forms = Counter(map(composed, written))
    same = [ascii(name) for name in written if forms[composed(name)] > 1]
    ordered = sorted(forms, key=lambda name: (name.casefold(), name))
    groups = [list(names) for _, names in groupby(ordered, key=str.casefold)]
    alike = [name for names in groups if len(names) > 1 for name in names]
    one = "names of classes that look like another's, with which they are one"
    two = "names of classes that differ by case alone are classes of their own"
    return noted("merged", same, one) + noted("guessed", alike, two)


def numbered(
    labels: Sequence[str], first: Sequence[str] = ()
) -> tuple[tuple[str, ...], Int64[np.ndarray, " labels"]]:
    """The classes in order, and the number of each label, `UNLABELED` for ''.

    Names that look alike are one class; see `spellings`. The order is that of whole numbers by
    value, or of the bytes of names. Classes that are to come `first` keep their places.

    >>> numbered(["b", "", "a", "b", "c"], first=["c"])
    (('c', 'a', 'b'), array([ 2, -1,  1,  2,  0]))
    """
    form = {label: composed(label) for label in set(labels)}
    names = set(form.values()) - {"", *first}
    if all(name.isascii() and name.isdecimal() for name in names):
        value = {name: name.lstrip("0") for name in names}  # Python converts 4,300 digits at most
        classes = (*first, *sorted(names, key=lambda name: (len(value[name]), value[name], name)))
    else:
        classes = (*first, *sorted(names, key=in_bytes))
    position = {name: i for i, name in enumerate(classes)} | {"": UNLABELED}
    number = {label: position[name] for label, name in form.items()}
    return classes, np.array([number[label] for label in labels], np.int64)


def grouped(names: Sequence[str | bytes]) -> Int64[np.ndarray, " images"]:
    """Each image's group by name: the row of the group's first image, its own where it has none.

    >>> grouped(["ann", "", "bob", "ann"])
    array([0, 1, 2, 0])
    """
    first, rows = dict[str | bytes, int](), enumerate(names)
    return np.array([first.setdefault(name, i) if name else i for i, name in rows], np.int64)


def class_names(images: Images) -> list[str]:
    """Each image's class, '' where it has none."""
    names = (*images.classes, "")
    return [names[label] for label in images.labels.tolist()]


class Annotations(NamedTuple):
    """Label, group and split of each image, '' where there is none."""

    labels: Sequence[str]
    groups: Sequence[str]
    splits: Sequence[str]

    def or_else(self, other: "Annotations") -> "Annotations":
        """This, with the values of the other where this has none."""
        columns = zip(self, other, strict=True)
        return Annotations(*([a or b for a, b in zip(*each, strict=True)] for each in columns))


def annotations_from_rows(
    rows: Mapping[str, Row], names: Sequence[str]
) -> tuple[Annotations, list[Note]]:
    """The annotations of these images in a table."""
    classes, notes = class_of(rows)
    absent = Row()
    own = [rows.get(name, absent) for name in names]
    unknown = [row.split for row in own if row.split and not split_of(row.split)]
    if unknown:
        text = f"the splits of {len(unknown)} images, which are not train, val or test"
        notes.append(Note("left out", text, len(unknown), tuple(dict.fromkeys(unknown))[:3]))
    labels, groups = [classes.get(name, "") for name in names], [row.group for row in own]
    return Annotations(labels, groups, [split_of(row.split) for row in own]), notes


def annotations_from_folders(names: Sequence[str], labels: str) -> tuple[Annotations, list[Note]]:
    """Labels and splits from the folders that images lie in, and what was guessed.

    Folders, or shards, at one depth that are called train and val or test, or all by such words,
    are the splits; what lies beside them has neither split nor label. Of what remains, without a
    single folder around everything, an image's folder is its label, if the folders look like
    classes: at least two of them, with two images or more on average, and nearly all images in
    one. A folder inside of a class folder is of that class. `labels` are "auto", "folders" to
    insist on classes, each folder its own, or "none".
    """
    of_image = [name.rpartition("/")[0] for name in names]
    counts = Counter(of_image)
    paths: Paths = {folder: [part for part in folder.split("/") if part] for folder in counts}
    splits, paths = _splits(paths)
    classes = _class_paths(paths, splits)
    label, notes = dict[str, str](), list[Note]()
    if any(splits.values()) and (beside := [f for f, split in splits.items() if not split]):
        total = sum(counts[folder] for folder in beside)
        text = f"{count(total, 'image')} to train on beside the folders train and test"
        text += "" if labels == "none" else ", without a label"
        notes.append(Note("guessed", text, total, tuple(beside[:3])))
    if labels == "folders":
        if stray := [folder for folder in counts if not classes.get(folder)]:
            image = names[of_image.index(stray[0])]
            raise DataError(
                f"{image}: lies in no class folder; move it, or do not ask for folders"
            )
        label = {folder: "/".join(path) for folder, path in classes.items()}
    elif labels == "auto":
        label, more = _guessed(classes, counts)
        notes += more
    of_images = [label.get(folder, "") for folder in of_image]
    found = [splits[folder] for folder in of_image]
    return Annotations(of_images, [""] * len(names), found), notes


Paths = Mapping[str, Sequence[str]]  # The parts of folders, by folder


def _splits(paths: Paths) -> tuple[dict[str, str], Paths]:
    """The split of each folder, and its path without the folder that is called so.

    A folder around all, such as training_data, counts only where none below has several parts.
    """
    found = dict.fromkeys(paths, ""), paths
    for level in range(max(map(len, paths.values()))):
        deep = {folder: path[level] for folder, path in paths.items() if level < len(path)}
        named = {folder: split_of(deep.get(folder, "")) for folder in paths}
        parts = set(named.values())
        several = parts >= {"train", "test"} or parts >= {"train", "val"}
        if several or ("" not in parts and not any(found[0].values())):
            found = named, {f: [*path[:level], *path[level + 1 :]] for f, path in paths.items()}
        if several:
            break
    return found


def _class_paths(paths: Paths, splits: Mapping[str, str]) -> Paths:
    """What may be the class of each folder: its path less shards and wrappers."""
    used = [folder for folder in paths if splits[folder]] or paths
    classes = {
        folder: [x for x in paths[folder] if not x.lower().endswith(SHARDS)] for folder in used
    }
    while all(len(path) > 1 for path in classes.values()) and (
        len({path[0] for path in classes.values()}) == 1  # or of a split inside of the split
        or all(split_of(path[0]) == splits[folder] != "" for folder, path in classes.items())
    ):
        classes = {folder: path[1:] for folder, path in classes.items()}
    return classes


def _guessed(classes: Paths, counts: Mapping[str, int]) -> tuple[dict[str, str], list[Note]]:
    """The class of each folder if they look like classes, and what was not obvious."""
    paths = {folder: tuple(path) for folder, path in classes.items() if path}
    own = set(paths.values())

    def outermost(path: Sequence[str]) -> Sequence[str]:
        return next((path[:end] for end in range(1, len(path)) if path[:end] in own), path)

    label = {folder: "/".join(outermost(path)) for folder, path in paths.items()}
    distinct = sorted(set(label.values()), key=in_bytes)
    stray = sum(counts[folder] for folder in classes.keys() - paths.keys())
    total = stray + sum(counts[folder] for folder in paths)
    if len(distinct) < 2:
        return {}, []
    if stray > STRAY * total or total - stray < 2 * len(distinct):
        why, remedy = f"{total} images are too few", "--labels folders makes them so"
        if stray:
            why = f"{stray} of {total} images lie in none"
            remedy = "move these, or give a table of labels"
        text = f"folders are no classes, as {why}; {remedy}"
        return {}, noted("guessed", distinct, text)
    unequal = distinct if len(set(map(len, own))) > 1 else []
    text = "classes are folders at unequal depth; --labels none leaves them out"
    beside = f"{count(stray, 'image')} without a label beside {len(distinct)} class folders"
    notes = noted("guessed", unequal, text) + note_on("guessed", stray, beside)
    to_score = [name for name in distinct if split_of(name) in ("val", "test")]
    text = "folders are classes, and not held out, as none is called train"
    return label, notes + noted("guessed", to_score, text)
