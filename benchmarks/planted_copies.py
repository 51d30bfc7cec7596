"""Copies that are planted among photographs: how many `nearkin duplicates` finds, of each kind.

    python benchmarks/planted_copies.py RUN caltech99.tar [--num 600] [--thresholds auto .985]

RUN is a training on these photographs. Of the tar's train/CLASS/FILE, so many are drawn, and ten
of them are copied in each of six ways: the same bytes, the same pixels as PNG, JPEG of quality 50,
.7 of the sides, cropped by 4 to 8 pixels at each edge, and 1.15 times as bright.
"""

import argparse
import io
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image, ImageEnhance

import nearkin

COPIES: Final = 10  # Of each kind
EDITS: Final[Mapping[str, Callable[[Image.Image], Image.Image]]] = {
    "bytes": lambda image: image,
    "pixels": lambda image: image,
    "jpeg": lambda image: image,
    "smaller": lambda image: image.resize((image.width * 7 // 10, image.height * 7 // 10)),
    "cropped": lambda image: image.crop((8, 6, image.width - 5, image.height - 4)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.15),
}


def plant(archive: Path, folder: Path, num: int) -> dict[frozenset[str], str]:
    """Write photographs and copies of some; return the kind of each pair."""
    pairs = dict[frozenset[str], str]()
    with tarfile.open(archive) as tar:
        members = [m for m in tar if m.isfile() and m.name.startswith("train/")]
        for place, row in enumerate(np.random.default_rng(0).permutation(len(members))[:num]):
            name = Path(members[row].name.removeprefix("train/"))
            opened: Any = tar.extractfile(members[row])
            content = opened.read()
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
            if place >= COPIES * len(EDITS):
                continue
            kind = list(EDITS)[place // COPIES]
            copy = name.with_name(f"{name.stem}-{kind}.{'png' if kind == 'pixels' else 'jpg'}")
            if kind == "bytes":
                (folder / copy).write_bytes(content)
            else:
                image = Image.open(io.BytesIO(content))
                color = image if kind == "pixels" else image.convert("RGB")
                EDITS[kind](color).save(folder / copy, quality=50 if kind == "jpeg" else 90)
            pairs[frozenset((str(name), str(copy)))] = kind
    return pairs


def main() -> None:
    """Plant, search at each threshold, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--num", type=int, default=600)
    parser.add_argument("--thresholds", nargs="+", default=["auto", ".985"])
    typed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pairs = plant(typed.archive, Path(folder), typed.num)
        for threshold in typed.thresholds:
            given = None if threshold == "auto" else float(threshold)
            encoder = typed.run / "encoder.safetensors"
            found = nearkin.duplicates(encoder, folder, threshold=given)
            told = {frozenset((copy.path, copy.of)) for copy in found.dropped}
            kinds = Counter(kind for pair, kind in pairs.items() if pair in told)
            print("\n".join(found.lines()))
            print(f"planted: {dict(kinds)}, others: {len(told - pairs.keys())}", flush=True)


if __name__ == "__main__":
    main()
