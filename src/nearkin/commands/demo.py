"""`nearkin demo`: train, evaluate and discover on the handwritten digits of scikit-learn."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearkin.commands.discover import discover
from nearkin.commands.train import Run, train
from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.run.reporter import Reporter, Silent


@dataclass(frozen=True)
class Demo:
    """Two finished runs: a training, and a discovery with its encoder."""

    trained: Run
    discovered: Run

    @property
    def summary(self) -> dict[str, Any]:
        """The summaries of both runs."""
        return {"train": dict(self.trained.summary), "discover": dict(self.discovered.summary)}

    def to_dict(self) -> dict[str, Any]:
        """The summaries of both runs."""
        return self.summary

    def lines(self) -> list[str]:
        """Return the summaries of both runs as text."""
        page = self.discovered.folder.report.resolve()
        return [
            *self.trained.lines(),
            "",
            *self.discovered.lines(),
            "",
            f"report {page}",
            "next   nearkin train YOUR_IMAGES",
        ]


def demo(
    *,
    out: str | Path = "runs/demo",
    reporter: Reporter | None = None,
) -> Demo:
    """Train, evaluate and discover on real handwritten digits of scikit-learn; no download.

    The digits 5 to 9 are discovered as novel classes, with 0 to 4 labeled.

    The number of novel classes is given: `--classes auto` would find 4 of these 5.

    Args:
        out: The folder of the two run folders, `train` and `discover`; an earlier demo in it is
            replaced.
        reporter: Receives log lines and progress; None is silent.
    """
    log, folder = reporter or Silent(), Path(out)
    settings = TrainConfig(method="simclr", epochs=90, val=0.2, options={"temperature": 0.2})
    log.info("1/2 train: digits, without labels")
    trained = train("digits", settings, out=folder / "train", overwrite=True, reporter=log)
    log.info("2/2 discover: labels for 0 to 4 only")
    config = DiscoverConfig(
        known=tuple("01234"),
        truth="data",
        classes=5,
        from_run=str(trained.path),
        epochs=30,
    )
    discovered = discover("digits", config, out=folder / "discover", overwrite=True, reporter=log)
    return Demo(trained, discovered)
