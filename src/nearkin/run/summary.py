"""The result of a discovery in short, read from its summary.json."""

from collections.abc import Mapping
from typing import Any


def lines(summary: Mapping[str, Any]) -> list[str]:
    """What was found, how good it is beside the baselines, and what to beware of."""
    sizes = [cluster["size"] for cluster in summary["clusters"] if cluster["kind"] == "novel"]
    named = [cluster["size"] for cluster in summary["clusters"] if cluster["kind"] == "known"]
    found = f"{len(sizes)} novel classes of {min(sizes)} to {max(sizes)} pictures"
    into = f", and {sum(named)} pictures of known classes" if named else ""
    return [
        f"found  {found}{into}",
        *_table(summary["scores"]),
        *(f"warning: {finding['text']}" for finding in summary["findings"]),
    ]


def _table(scores: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """A row per score, a column per way of finding classes; ours comes first."""
    rows = [["", *scores]]
    for position, score in enumerate(next(iter(scores.values()))):
        cells = [found[position] for found in scores.values()]
        rows.append([score["name"], *(f"{cell['value']:.3f}" for cell in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
