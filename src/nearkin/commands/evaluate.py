"""`nearkin evaluate`: measure an encoder beside its start, the untrained network and pixels."""

from pathlib import Path
from typing import Any, Literal

from torch import nn

from nearkin.config import protocol_names
from nearkin.data.split import open_split
from nearkin.distributed import available_cpus, choose_device
from nearkin.encoders.encoder import load
from nearkin.errors import OutputError, UsageError
from nearkin.evaluation.evaluate import Evaluation, evaluate_split
from nearkin.run.failures import resource_errors
from nearkin.run.folder import RunFolder, data_name, locked
from nearkin.run.reporter import Reporter, Silent
from nearkin.training.session import floors


def evaluate(
    run: str | Path,
    data: Any = None,
    *,
    protocol: str = "quick",
    backbone: nn.Module | None = None,
    device: str = "auto",
    workers: int | Literal["auto"] = "auto",
    reporter: Reporter | None = None,
) -> Evaluation:
    """Measure a run's encoder.

    Args:
        run: A run folder.
        data: Other images than those of the run; they are split like those.
        protocol: What is measured, names of `nearkin.config.PROTOCOLS` separated by commas, or
            `full`. Other than `quick`, the measures of a run's own images are also stored in its
            evaluation.json and shown by its page.
        backbone: The run's network, if it was given one from Python; untrained.
        device: Where to compute.
        workers: Processes that decode photographs; `auto`: one per CPU.
        reporter: Receives log lines and progress.

    Returns:
        The measures, by default kNN, linear probe, clusters and geometry, of the encoder, of the
        frozen start of its training if it had one, of the untrained network and of raw pixels,
        each with its protocol and interval; with a start, also the verdict on the training.
        Without labels, only view retrieval and geometry.

    Raises:
        UsageError: If this is no run, or one on arrays and `data` is None.
    """
    names = protocol_names(protocol)  # refused before anything is opened
    folder = RunFolder(Path(run))
    config, stored = folder.settings()
    if data is None and stored == data_name(None) and not Path(stored).exists():
        raise UsageError(f"{run} was trained on arrays, which it does not keep; pass them as data")
    encoder = load(folder.path, backbone=backbone)
    on_progress = (reporter or Silent()).progress
    split = open_split(stored if data is None else data, config, on_progress=on_progress)
    with resource_errors():
        evaluation, _ = evaluate_split(
            encoder,
            split,
            floors=floors(folder, config, backbone),
            seed=config.seed,
            workers=available_cpus() if workers == "auto" else workers,
            augment=config.augment,
            device=choose_device(device),
            protocol=protocol,
            on_progress=on_progress,
        )
    if data is None and names != ["quick"]:
        _store(folder, evaluation, reporter or Silent())
    return evaluation


def _store(folder: RunFolder, evaluation: Evaluation, log: Reporter) -> None:
    """Add the measures to the run; where that is impossible, they are still shown."""
    try:
        with locked(folder):
            folder.add_measures(evaluation.to_dict())
    except (OSError, OutputError) as error:
        log.info(f"warning: the measures are not stored in {folder.evaluation}: {error}")
