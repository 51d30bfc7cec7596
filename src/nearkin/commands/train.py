"""`nearkin train`: from a folder of images to a measured encoder."""

from dataclasses import replace
from typing import Any

from torch import nn

from nearkin.commands.arguments import PathLike, command, given
from nearkin.commands.run import Run
from nearkin.config import TrainConfig
from nearkin.distributed import is_main_process
from nearkin.encoders.encoder import CUSTOM
from nearkin.errors import UsageError
from nearkin.evaluation.layout import EarlyMap
from nearkin.extensions import label
from nearkin.report.pages import write_page
from nearkin.run.auto import resolve
from nearkin.run.data import ignored_values, learnable, open_logged
from nearkin.run.failures import resource_errors
from nearkin.run.folder import clear, run_folder
from nearkin.run.opening import open_run, self_contained
from nearkin.run.options import check_teacher, checked_options, known_classes
from nearkin.run.reporter import Reporter
from nearkin.run.tracking import Tracking, check_trackers
from nearkin.training.session import check_networks, run_worker, train_encoder
from nearkin.training.start import read_start, with_start


@command
def train(
    data: Any,
    config: TrainConfig | None = None,
    *,
    output: PathLike | None = None,
    resume: bool = False,
    overwrite: bool = False,
    verbose: bool | Reporter = True,
    **settings: Any,
) -> Run:
    """Train an encoder on images without labels, and measure it.

    Options of the method are given by their names, such as `temperature`; `nearkin list
    methods NAME` lists them.

    Args:
        data: A folder, a table, an archive, shards or an .npz, by path or address (`s3://...`); a
            name such as `digits`; or, from Python, arrays or a data set (docs/data.md).
        config: The settings, of which `settings` replaces some.
        output: The run folder; runs/DATA-METHOD if not given.
        resume: Continue the run that is in the folder.
        overwrite: Replace the run that is in the folder.
        verbose: Whether to show progress, or what receives it.
        settings: Fields of `nearkin.TrainConfig`, and options of the method. `backbone` may be a
            network of your own, from images to features; `method` a class. As the network is
            passed, it is also the baseline "untrained encoder": pass an untrained one.

    Returns:
        The finished run: its metrics, encoder and report.

    Raises:
        NearkinError: One line on what cannot be done; see `nearkin.errors`.
    """
    config, network = given(TrainConfig, config, settings)
    if not is_main_process():
        return Run(run_worker(data, network))
    config = _checked(config, network)
    folder = run_folder(output, data, label(config.method), again=resume or overwrite)
    with open_run(folder, config, data, verbose, resume=resume, overwrite=overwrite) as run:
        config, device, log = run.config, run.device, run.log
        start = read_start(folder, config, network, device, log, resume=resume)
        split = learnable(open_logged(folder, data, config, log, resume=resume))
        # Settings that do not fit are refused before anything is overwritten.
        config = resolve(with_start(config, start), split.train, device)
        ignored = ignored_values(data, config, split)
        if overwrite:
            check_networks(config, split.train, network)
            clear(folder)
        batch_size = int(config.batch_size)
        with (
            resource_errors(batch_size, resumes=True),
            EarlyMap(folder, split.images) as early,
            Tracking(config.track, folder, log) as tracking,
        ):
            worked = train_encoder(
                folder,
                config,
                split,
                data=data,
                device=device,
                log=log,
                network=network,
                start=start,
                ignored=ignored,
                on_embeddings=early.start if config.report else lambda: None,
                on_row=tracking.row,
            )
            if worked:
                tracking.summary()
            if config.report and (worked or not folder.report.exists()):
                write_page(folder, split.images, log.progress, early)
                log.info(f"report {folder.report.resolve()}")
            elif not worked:
                log.info("already complete")
    return Run(folder)


def _checked(config: TrainConfig, network: nn.Module | None) -> TrainConfig:
    """Check the settings as far as that takes no data; raise UsageError."""
    if config.max_time and config.epochs != "auto":
        raise UsageError("--epochs and --max-time both set the length; give one")
    if config.on_collapse == "stop" and config.evaluate_every == 0:
        raise UsageError(
            "--on-collapse stop needs evaluations on the way, and --evaluate-every 0 leaves them "
            "out; give one of the two"
        )
    config = self_contained(config)
    options = checked_options(config.method, config.options)
    known_classes(config)
    check_teacher(config)
    check_trackers(config.track)
    backbone = CUSTOM if network is not None else config.backbone
    return replace(config, options=options, backbone=backbone)
