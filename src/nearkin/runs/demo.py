"""`nearkin demo`: the whole way on real handwritten digits that come with scikit-learn."""

from pathlib import Path

from nearkin.config import TrainConfig
from nearkin.runs.reporter import Reporter
from nearkin.runs.train import Run, train


def demo(
    *,
    out: str | Path = Path("runs/demo"),
    overwrite: bool = True,
    reporter: Reporter | None = None,
) -> Run:
    """Train on digits, evaluate beside the floors, and leave a run folder.

    Args:
        out: The run folder.
        overwrite: Replace an earlier demo.
        reporter: Who is told how it goes.
    """
    config = TrainConfig(method="simclr", epochs=90, val=0.2, options={"temperature": 0.2})
    return train("digits", config, out=out, overwrite=overwrite, reporter=reporter)
