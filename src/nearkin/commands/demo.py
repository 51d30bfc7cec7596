"""`nearkin demo`: train, evaluate and discover on the handwritten digits of scikit-learn."""

from pathlib import Path
from typing import Any

from nearkin.commands.arguments import PathLike, command
from nearkin.commands.discover import discover
from nearkin.commands.run import Run
from nearkin.commands.train import train
from nearkin.run.reporter import Reporter, reporter_of


@command
def demo(
    *,
    output: PathLike = "runs/demo",
    resume: bool = False,
    overwrite: bool = False,
    verbose: bool | Reporter = True,
) -> list[Run]:
    """Train, evaluate and discover on real handwritten digits of scikit-learn; no download.

    The digits 5 to 9 are discovered as novel classes, with 0 to 4 labeled.

    The number of novel classes is given: `--classes auto` would find 4 of these 5.

    Args:
        output: The folder of the two run folders, `train` and `discover`.
        resume: Go on with a demo that was interrupted.
        overwrite: Replace an earlier demo in it.
        verbose: Whether to show progress, or what receives it.

    Returns:
        The training, and the discovery with its encoder.
    """
    log, folder = reporter_of(verbose), Path(output)
    how: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "verbose": log}
    log.info("1/2 train: digits, without labels")
    trained = train("digits", output=folder / "train", epochs=90, val=0.2, temperature=0.2, **how)
    log.info("2/2 discover: labels for 0 to 4 only")
    how |= {"known": tuple("01234"), "truth": "data", "classes": 5, "epochs": 30}
    discovered = discover("digits", encoder=trained, output=folder / "discover", **how)
    log.info("next   nearkin train YOUR_IMAGES")
    return [trained, discovered]
