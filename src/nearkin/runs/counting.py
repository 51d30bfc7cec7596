"""How many classes to look for: as asked, or estimated once and kept."""

import json
from dataclasses import asdict
from pathlib import Path

from nearkin.config import DiscoverConfig
from nearkin.discovery.number import NumberOfClasses, number_of_novel_classes
from nearkin.measures.kmeans import compact
from nearkin.runs.material import Material
from nearkin.runs.trunk import Looks
from nearkin.tables import replace_text


def count_classes(
    path: Path, kept: Looks, material: Material, config: DiscoverConfig
) -> NumberOfClasses | None:
    """The estimate in a file, or a new one; None where the number is given.

    Only pictures that are learned from are looked at, by features that no label has touched.
    """
    if config.classes != "auto":
        return None
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        curves = {name: [(k, v) for k, v in points] for name, points in stored["curves"].items()}
        return NumberOfClasses(**{**stored, "curves": curves})
    rows = material.parts.train_rows
    counted = number_of_novel_classes(
        compact(kept.center)[rows],
        material.label[rows],
        disjoint=config.mode == "ncd",
        seed=config.seed,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(asdict(counted)) + "\n")
    return counted
