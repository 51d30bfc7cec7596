"""Samples of an archive, as WebDataset has them: what belongs together, and which image counts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from posixpath import splitext
from typing import Final

from nearkin.data.images import in_bytes
from nearkin.data.labels import Row
from nearkin.data.notes import Note, note_on, noted
from nearkin.pace import count

MASKS: Final = frozenset(
    {
        *("mask", "masks", "annotation", "annotations", "segmentation", "segmentations", "seg"),
        *("gt", "groundtruth", "ground_truth", "trimap", "trimaps", "depth", "depths"),
        *("label", "labels"),
    }
)
"""What folders and fields are called that mostly hold no photographs."""
PHOTOGRAPHS: Final = ("jpg", "jpeg", "jpe", "jfif", "webp", "avif", "heic", "heif")


def sample_key(name: str) -> str:
    """What the files of one sample have in common, as in WebDataset: all up to the first dot.

    >>> sample_key("shard.tar/0001.left.jpg")
    'shard.tar/0001'
    """
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def companions(names: Sequence[str]) -> list[str]:
    """Return the images that belong to another one of their sample: masks, depth maps.

    That are `0.mask.png` beside `0.jpg` or `0.rgb.jpg` and, where most samples have two, `0.png`.
    """
    samples = dict[str, list[str]]()
    for name in names:
        samples.setdefault(sample_key(name), []).append(name)
    found, plain = list[str](), list[list[str]]()
    for group in samples.values():
        simple = [name for name in group if "." not in _field(name)]
        others = [name for name in group if name not in simple]
        if not simple:
            others = [name for name in group if not MASKS.isdisjoint(_field(name).split("."))]
        found += others if len(others) < len(group) else []
        if len({_field(name) for name in simple}) > 1:
            plain.append(simple)
    if 2 * len(plain) >= len(samples):
        for group in plain:
            first = min(map(_field, group), key=lambda field: (field not in PHOTOGRAPHS, field))
            found += [name for name in group if _field(name) != first]
    return found


def _field(name: str) -> str:
    """What WebDataset calls the field of a sample: all behind the key.

    >>> _field("shard.tar/0001.Mask.png")
    'mask.png'
    """
    return name[len(sample_key(name)) + 1 :].lower()


def beside(names: Sequence[str]) -> list[Note]:
    """Note images that are left out for another one of their sample."""
    counts = Counter(map(_field, names)).most_common(5)
    fields = ", ".join(f"{number} .{field}" for field, number in counts)
    return noted("left out", names, f"images ({fields}) beside the one of their sample")


def labels_beside(labels: Mapping[str, Row], names: Iterable[str]) -> dict[str, Row]:
    """Return the label of each image, from members that hold labels of any of them; else nothing.

    A member of an image's whole name but for the ending counts before others of its sample, and
    for no image of another name: `scan.001.json` is not the label of `scan.002.jpg`.
    """
    images = {name: splitext(name)[0] for name in names}
    own = set(images.values())
    telling = [name for name, row in labels.items() if row.label or row.unusable]
    in_turn = sorted(telling, key=lambda name: (labels[name].label != "", in_bytes(name)))
    shared = [name for name in in_turn if splitext(name)[0] not in own]
    rows = {sample_key(name): labels[name] for name in shared}  # the last one counts
    rows |= {splitext(name)[0]: labels[name] for name in in_turn}
    found = {name: rows.get(stem, rows.get(sample_key(name))) for name, stem in images.items()}
    return {name: row or Row() for name, row in found.items()} if any(found.values()) else {}


def masks(names: Sequence[str]) -> list[Note]:
    """Note images in folders called masks or the like, if there are others."""
    alike = [name for name in names if MASKS.intersection(name.casefold().split("/")[:-1])]
    text = f"{count(len(alike), 'file')} in folders of masks are images like all others; "
    text += "if they are masks, give the folder of the photographs alone"
    return note_on("guessed", alike if len(alike) < len(names) else [], text)
