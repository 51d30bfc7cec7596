"""`nearkin compare`: finished runs side by side."""

from collections.abc import Sequence
from pathlib import Path

from nearkin.errors import UsageError
from nearkin.report.comparison import KINDS, Comparison, read_finished, side_by_side
from nearkin.tables import replace_text, writing


def compare(runs: Sequence[str | Path], *, output: str | Path | None = None) -> Comparison:
    """Compare finished runs of one kind.

    Args:
        runs: Run folders, all trainings, all discoveries or all classifications.
        output: Also write a page to this file.

    Raises:
        UsageError: If these are not two or more different finished runs of one kind. A frozen
            encoder's run is of the kind of trainings: it says whether training helped.
        OutputError: If the page cannot be written.
    """
    if len({Path(run).resolve() for run in runs}) < max(2, len(runs)):
        raise UsageError("nothing to compare; give two or more different runs")
    finished = [read_finished(run) for run in runs]
    kinds = {run.kind: run.folder for run in finished}
    if len(kinds) > 1:
        one, other, *_ = sorted(kinds.values(), key=lambda folder: [*KINDS].index(folder.kind))
        raise UsageError(
            f"{one.path} is a {one.kind} and {other.path} a {other.kind}; give runs of one kind"
        )
    comparison = side_by_side(finished)
    if output is not None:
        with writing(Path(output)):
            replace_text(Path(output), comparison.page())
    return comparison
