"""Folders, archives and tables as people have them, each with what is rightly read of it."""

import io
import os
import unicodedata
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from builders import as_bytes, encoded, soft, tar, write_files
from PIL import Image
from PIL.PngImagePlugin import PngInfo

CATS_AND_DOGS = ("cat", "dog")


@dataclass(frozen=True)
class Read:
    """What is read of some data."""

    images: int
    classes: tuple[str, ...] = ()
    test: int = 0  # Images of the test part that the data bring
    labeled: int | None = None  # All, if there are classes
    decisions: frozenset[str] = frozenset()  # Of the notes on the data


Build = Callable[[Path], Path]
FOLDERS: dict[str, tuple[Build, Read]] = {}
"""By name: writes the data below an empty folder and returns their path; and what is read."""


def ordinary(
    images: int,
    classes: Iterable[str] = (),
    test: int = 0,
    labeled: int | None = None,
    notes: Iterable[str] = (),
) -> Callable[[Build], Build]:
    """Enter a function that builds data into `FOLDERS`, under its name."""

    def enter(build: Build) -> Build:
        read = Read(images, tuple(classes), test, labeled, frozenset(notes))
        FOLDERS[build.__name__] = build, read
        return build

    return enter


def photograph(
    seed: int, kind: str = "JPEG", size: tuple[int, int] = (80, 70), **options
) -> bytes:
    """A file that no other of another seed looks like."""
    return as_bytes(soft(seed, size), kind, **options)


def write(root: Path, names: Iterable[str], kind: str = "JPEG") -> Path:
    """Write another photograph under each of these names."""
    return write_files(root, {name: photograph(k, kind) for k, name in enumerate(names)})


def classed(*folders: str, count: int = 10) -> list[str]:
    """Names of so many files in each of these folders."""
    return [f"{folder}/{k}.jpg" for folder in folders for k in range(count)]


def parts(*sides: str, count: int = 10) -> list[str]:
    return classed(*(f"{side}/{name}" for side in sides for name in CATS_AND_DOGS), count=count)


# Names of parts


@ordinary(40, CATS_AND_DOGS, test=20)
def training_and_testing(root: Path) -> Path:
    return write(root, parts("Training", "Testing"))


@ordinary(40, CATS_AND_DOGS, test=20, notes=["substituted"])
def train_and_dev(root: Path) -> Path:
    return write(root, parts("train", "dev"))


@ordinary(40, CATS_AND_DOGS, test=20)
def train_and_eval(root: Path) -> Path:
    return write(root, parts("train", "eval"))


@ordinary(40, CATS_AND_DOGS, test=20)
def kaggles_sets(root: Path) -> Path:
    return write(root, parts("training_set", "test_set"))


@ordinary(20, test=10)
def cocos_years(root: Path) -> Path:
    return write(root, classed("train2017", "val2017"))


@ordinary(20, CATS_AND_DOGS)
def only_a_validation_part(root: Path) -> Path:
    return write(root, parts("val"))


# What is no image


@ordinary(20, CATS_AND_DOGS, notes=["left out"])
def shadows_of_a_nas(root: Path) -> Path:
    thumbnails = [f"cat/@eaDir/{k}.jpg/SYNOPHOTO_THUMB_M.jpg" for k in range(10)]
    bins = ["#recycle/a.jpg", "$RECYCLE.BIN/b.jpg", "lost+found/c.jpg"]
    return write(root, [*classed(*CATS_AND_DOGS), *thumbnails, *bins])


@ordinary(20, CATS_AND_DOGS)
def what_systems_leave(root: Path) -> Path:
    write(root, classed(*CATS_AND_DOGS))
    litter = ("cat/._0.jpg", "cat/.DS_Store", "dog/Thumbs.db", "desktop.ini")
    return write_files(root, dict.fromkeys(litter, b"\0" * 80))


@ordinary(60, notes=["guessed"])
def shards_and_a_preview(root: Path) -> Path:
    for shard in range(3):
        members = [(f"{shard}{k:03}.jpg", photograph(100 * shard + k)) for k in range(20)]
        write_files(root, {f"{shard}.tar": tar(members)})
    return write(root, ["preview.png"], "PNG")


@ordinary(20, ("0", "1"), notes=["left out"])
def masks_in_a_shard(root: Path) -> Path:
    members = []
    for k in range(20):
        members.append((f"{k:03}.jpg", photograph(k)))
        members.append((f"{k:03}.mask.png", encoded(k, (80, 70))))
        members.append((f"{k:03}.cls", str(k % 2).encode()))
    return write_files(root, {"shard.tar": tar(members)}) / "shard.tar"


# Formats and suffixes


@ordinary(24)
def jpegs_by_other_names(root: Path) -> Path:
    suffixes = ("jfif", "jpe", "JPG", "HEIC")
    return write(root, [f"{k}.{suffix}" for suffix in suffixes for k in range(6)])


@ordinary(12)
def avifs(root: Path) -> Path:
    return write(root, [f"{k}.avif" for k in range(12)], "AVIF")


@ordinary(12)
def formats_by_wrong_names(root: Path) -> Path:
    kinds = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP")
    return write_files(root, {f"{k}.jpg": photograph(k, kinds[k % 6]) for k in range(12)})


@ordinary(12)
def pngs_with_texts_and_profiles(root: Path) -> Path:
    text = PngInfo()
    text.add_text("prompt", "x" * 2_000_000, zip=True)
    write(root, [f"{k}.png" for k in range(10)], "PNG")
    profile = np.random.default_rng(0).bytes(2_000_000)
    described = {"pnginfo": text}, {"icc_profile": profile}
    files = {f"b{k}.png": photograph(20 + k, "PNG", **each) for k, each in enumerate(described)}
    return write_files(root, files)


@ordinary(4)
def a_photograph_of_61_megapixels(root: Path) -> Path:
    write_files(root, {"large.jpg": photograph(9, size=(9600, 6400))})
    return write(root, [f"{k}.jpg" for k in range(3)])


@ordinary(12)
def modes(root: Path) -> Path:
    modes = ("RGB", "L", "CMYK", "P", "RGBA", "1")
    files = {}
    for k in range(12):
        kind = "JPEG" if modes[k % 6] == "CMYK" else "PNG"
        files[f"{k}.{kind.lower()}"] = as_bytes(soft(k, (80, 70)).convert(modes[k % 6]), kind)
    return write_files(root, files)


@ordinary(12)
def words(root: Path) -> Path:
    files = {f"{k}.png": photograph(k, "PNG", (60, 20)) for k in range(12)}
    return write_files(root, files)


# Links


@ordinary(12)
def links_that_lead_nowhere(root: Path) -> Path:
    write(root, [f"{k}.jpg" for k in range(12)])
    for name in ("latest", "notes.txt"):
        (root / name).symlink_to("/gone")
    (root / "loop").symlink_to(root)
    return root


# Names


@ordinary(20, ("caf\u00e9", "the"), notes=["merged"])
def a_class_in_two_unicode_forms(root: Path) -> Path:
    forms = [unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD")]
    return write(root, [*classed(*forms, count=5), *classed("the")])


@ordinary(8)
def odd_names(root: Path) -> Path:
    names = (" a.jpg", "b c.jpg", "-d.jpg", "e'\"f.jpg", "\u732b.jpg", "\U0001f408.jpg", "%41.jpg")
    return write(root, [*names, "line\nbreak.jpg"])


@ordinary(6)
def names_that_are_not_utf_8(root: Path) -> Path:
    return write(root, [os.fsdecode(b"\xff%d.jpg" % k) for k in range(6)])


@ordinary(6)
def times_as_names_in_a_tar(root: Path) -> Path:
    members = [(f"12:30:0{k}.jpg", photograph(k)) for k in range(6)]
    return write_files(root, {"clock.tar": tar(members)}) / "clock.tar"


# Labels


@ordinary(21, CATS_AND_DOGS, labeled=20, notes=["guessed"])
def a_stray_picture_beside_class_folders(root: Path) -> Path:
    return write(root, [*classed(*CATS_AND_DOGS), "preview.jpg"])


@ordinary(
    30, ("Fruit/Apple/Golden", "Fruit/Apple/Pink", "Vegetables/Asparagus"), notes=["guessed"]
)
def class_folders_at_unequal_depth(root: Path) -> Path:
    return write(root, classed("Fruit/Apple/Golden", "Fruit/Apple/Pink", "Vegetables/Asparagus"))


@ordinary(21, ("0", "1"), labeled=14)
def labels_that_are_missing_in_a_table(root: Path) -> Path:
    names = [f"{k}.jpg" for k in range(21)]
    write(root, names)
    rows = [f"{name},{('0', '1.0', '-1')[k % 3]}" for k, name in enumerate(names)]
    (root / "labels.csv").write_text("\ufeffPath,Label\n" + "\n".join(rows))
    return root / "labels.csv"


@ordinary(12, CATS_AND_DOGS)
def a_table_of_absolute_paths(root: Path) -> Path:
    images = write(root / "elsewhere", [f"{k}.jpg" for k in range(12)])
    rows = [f"{images / f'{k}.jpg'},{CATS_AND_DOGS[k % 2]}" for k in range(12)]
    return write_files(root, {"table/a.csv": "\n".join(["path,label", *rows]).encode()}) / (
        "table/a.csv"
    )


@ordinary(30, ("0", "1"), test=10, notes=["left out"])
def an_npz_of_medmnist(root: Path) -> Path:
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 20), ("val", 6), ("test", 10)):
        arrays[f"{part}_images"] = rng.integers(0, 256, (count, 28, 28, 3), dtype=np.uint8)
        arrays[f"{part}_labels"] = (np.arange(count) % 2)[:, None]
    root.mkdir()
    np.savez(root / "pathmnist.npz", **arrays)
    return root / "pathmnist.npz"


# Archives


@ordinary(20, CATS_AND_DOGS)
def a_zip_of_a_mac(root: Path) -> Path:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for k, name in enumerate(classed(*CATS_AND_DOGS)):
            file.writestr(f"pets/{name}", photograph(k))
            file.writestr(f"__MACOSX/pets/{Path(name).parent}/._{Path(name).name}", b"\0" * 80)
    return write_files(root, {"pets.zip": packed.getvalue()}) / "pets.zip"


@ordinary(3)
def as_few_as_make_a_batch_and_one_held_out(root: Path) -> Path:
    return write(root, ["a.jpg", "b.jpg", "c.jpg"])


@ordinary(12)
def photographs_turned_by_exif(root: Path) -> Path:
    files = {}
    for k in range(12):
        exif = Image.Exif()
        exif[0x0112] = 1 + k % 8
        files[f"{k}.jpg"] = photograph(k, exif=exif)
    return write_files(root, files)
