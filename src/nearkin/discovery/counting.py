"""How many classes to look for: as asked, or estimated once and kept."""

import json
from dataclasses import asdict
from pathlib import Path

from nearkin.config import DiscoverConfig
from nearkin.discovery.material import Material
from nearkin.discovery.number import NumberOfClasses, number_of_novel_classes
from nearkin.discovery.trunk import Looks
from nearkin.measures.kmeans import compact
from nearkin.tables import replace_text, usable


def count_classes(
    path: Path, kept: Looks, material: Material, config: DiscoverConfig
) -> NumberOfClasses | None:
    """The estimate in a file, or a new one; None where the number is given.

    Only pictures that are learned from are looked at, by features that no label has touched.
    """
    if config.classes != "auto":
        return None
    rows = material.parts.train_rows
    if path.exists():
        return _read(path, len(rows))
    counted = number_of_novel_classes(
        compact(kept.center)[rows],
        material.label[rows],
        disjoint=config.mode == "ncd",
        seed=config.seed,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(asdict(counted)) + "\n")
    return counted


def _read(path: Path, most: int) -> NumberOfClasses:
    with usable(path, "remove it, it will be made again"):
        stored = json.loads(path.read_text(encoding="utf-8"))
        curves = stored["curves"].items()
        found = NumberOfClasses(
            chosen=int(stored["chosen"]),
            low=int(stored["low"]),
            high=int(stored["high"]),
            estimates={name: int(number) for name, number in stored["estimates"].items()},
            curves={name: [(int(k), float(v)) for k, v in points] for name, points in curves},
        )
        if not 1 <= found.chosen <= most:
            raise ValueError(f"{found.chosen} classes of {most} pictures")
    return found
