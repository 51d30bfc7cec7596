"""A finished run as far as its files tell, for comparing it with others."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from nearkin.errors import UsageError
from nearkin.evaluation.evaluate import TITLES
from nearkin.evaluation.measure import Measure
from nearkin.run.folder import RunFolder
from nearkin.tables import usable

TRAININGS: Final = "trainings"
DISCOVERIES: Final = "discoveries"
SUMMED_UP: Final = ("novel", "nearkin", "torch", "python", "threads")
"""What a summary tells beside settings and measures."""
FLOORS: Final = ("kNN top-1", "linear probe")
"""Measures whose floors are compared, too."""


@dataclass(frozen=True)
class Finished:
    """A run that came to its end."""

    folder: RunFolder
    kind: str
    settings: Mapping[str, str]
    measures: Mapping[str, Measure]
    images: str
    """A fingerprint of its images."""
    division: str
    """And of which of them were held out."""
    seconds: float | None
    """How long it took, if it went through without a stop."""

    @property
    def time(self) -> str:
        """How long it took, in words; '' if that is not known."""
        if self.seconds is None:
            return ""
        minutes, seconds = divmod(round(self.seconds), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def finished(run: str | Path) -> Finished:
    """A run from its files.

    Raises:
        UsageError: If it is no run, or one that did not come to its end.
        CheckpointError: If its files are damaged.
    """
    folder = RunFolder(Path(run))
    trained = not folder.classifier.exists()
    config, data = folder.settings() if trained else folder.discovery_settings()
    with usable(folder.summary, "finish the run anew"):
        summary = folder.read_summary()
    if not summary:
        raise UsageError(
            f"{folder.path} is not finished; finish it with --resume, or leave it out"
        )
    settings = {"data": data, **vars(config), **config.options}
    settings |= {name: summary[name] for name in SUMMED_UP if name in summary}
    with usable(folder.summary, "finish the run anew"):
        measures = dict(_of_training(summary) if trained else _of_discovery(summary))
    with usable(folder.data, "finish the run anew"):
        noted = json.loads(folder.data.read_text(encoding="utf-8"))
        images, _, division = str(noted["fingerprint"]).partition("-")
    return Finished(
        folder=folder,
        kind=TRAININGS if trained else DISCOVERIES,
        settings={name: str(value) for name, value in settings.items() if name != "options"},
        measures=measures,
        images=images,
        division=division,
        seconds=_seconds(folder.log),
    )


def _of_training(summary: Mapping[str, Any]) -> Iterator[tuple[str, Measure]]:
    for name, entry in summary["measures"]["encoder"].items():
        yield name, Measure(**entry)
    for table, title in TITLES.items():
        for name in FLOORS:
            if name in (floors := summary["measures"].get(table, {})):
                yield f"{title}: {name}", Measure(**floors[name])


def _of_discovery(summary: Mapping[str, Any]) -> Iterator[tuple[str, Measure]]:
    for arm, scores in summary["scores"].items():
        for entry in scores:
            name = entry["name"] if arm == "nearkin" else f"{arm}: {entry['name']}"
            yield name, Measure(**{**entry, "name": name})


def _seconds(log: Path) -> float | None:
    """From the first to the last line of the go that made the run, if it was made in one go."""
    goes: list[list[str]] = []
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
        if " | writing " in line:
            goes.append([])
        if goes and line[:4].isdigit():
            goes[-1].append(line)
    made = [go for go in goes if not any("already complete" in line for line in go)]
    if not made or any("resuming after" in line for line in made[-1]):
        return None
    first, last = (datetime.fromisoformat(line[:19]) for line in (made[-1][0], made[-1][-1]))
    return (last - first).total_seconds()
