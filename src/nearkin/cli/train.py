"""Commands that make a run folder: trainings, discoveries, classifiers, encoders as they are."""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from inspect import Parameter as Argument
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

from cyclopts import Parameter

from nearkin.cli.app import ENCODER, GROUPS, Flag, Images, app, is_only_process, show
from nearkin.cli.terminal import Terminal
from nearkin.config import (
    OBJECTIVE_METHODS,
    TRUST,
    VARIABLES,
    ClassifyConfig,
    Config,
    DiscoverConfig,
    EmbedConfig,
    Engine,
    Range,
    TrainConfig,
    as_given,
    field_docs,
    metadata,
    option,
    read_toml,
    settings_file,
    suggestion,
)
from nearkin.errors import UsageError
from nearkin.extensions import check_trusted

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel

OTHER_VARIABLES: Final = (
    "NEARKIN_LINKS",
    "NEARKIN_MAX_PIXELS",
    "NEARKIN_REMOTE_CACHE",
    "NEARKIN_TORCHVISION",
    "NEARKIN_TRACEBACK",
)
"""They are no settings."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What is typed beside the settings: files, and what is printed."""

    config_file: Annotated[Path | None, Parameter(name="--config", group=GROUPS["Data"])] = None
    """A TOML file of settings, such as the config.toml of a run, or recipe:NAME, as
    recipe:cifar10/moco. The command line and the environment take precedence."""
    out: Annotated[Path | None, Parameter(name=["--out", "-o"], group=GROUPS["Output"])] = None
    """The run folder; runs/DATA-METHOD, runs/DATA-MODE or runs/DATA-classify if not given."""
    resume: Flag = False
    """Continue the run that is in the folder."""
    overwrite: Flag = False
    """Replace the run that is in the folder."""
    json: Flag = False
    """Print the measures as JSON."""
    quiet: Annotated[Flag, Parameter(name=["--quiet", "-q"])] = False
    """Show no progress."""


@dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """What is typed beside the settings of `nearkin embed`."""

    config_file: Annotated[Path | None, Parameter(name="--config", group=GROUPS["Data"])] = None
    """A TOML file of settings, such as the config.toml of a run, or recipe:NAME, as
    recipe:cifar10/moco. The command line and the environment take precedence."""
    out: Annotated[Path | None, Parameter(group=GROUPS["Output"])] = None
    """The run folder; runs/DATA-ENCODER if not given."""
    output: Annotated[str | None, Parameter(name=["--output", "-o"], group=GROUPS["Output"])] = (
        None
    )
    """Only a table of features instead: a .parquet, .npz or .npy, or a folder of parts, whose name
    ends in /."""
    shard: Annotated[int | None, Parameter(group=GROUPS["Output"])] = None
    """Images of a part; 65,536 if not given."""
    part: Annotated[str, Parameter(group=GROUPS["Output"])] = ""
    """I/N, such as 1/8: make the I-th of N shares of the parts, as a job of an array."""
    engine: Annotated[Engine, Parameter(group=GROUPS["Machine"])] = "local"
    """ray: let the actors of a Ray cluster make the parts."""
    resume: Flag = False
    """Continue the run that is in the folder."""
    overwrite: Flag = False
    """Replace the run that is in the folder, or the file."""
    json: Flag = False
    """Print the measures as JSON."""
    quiet: Annotated[Flag, Parameter(name=["--quiet", "-q"])] = False
    """Show no progress."""

    @property
    def has_parts(self) -> bool:
        """Whether there is an option that only a folder of parts takes."""
        return bool(self.part) or self.shard is not None or self.engine != "local"


def _add_command(kind: type[Config], text: str, run: Callable[..., None] | None = None) -> None:
    """Add a command that has the fields of a settings class as parameters."""
    command = run or partial(_run, kind)
    own = signature(command).parameters
    first = [each for each in own.values() if each.kind is Argument.POSITIONAL_ONLY]
    settings = [each for each in _settings(kind) if each.name not in own]
    parameters = [*first, *settings, *list(own.values())[len(first) :]]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    app.command(command, name=kind.verb, help=text)


def _settings(kind: type[Config]) -> list[Argument]:
    """The fields of a settings class, with their groups, help texts and ranges."""
    hints, docs = get_type_hints(kind, include_extras=True), field_docs(kind)
    title, settings = "", []
    for entry in fields(kind):
        if entry.name == "options":  # they are typed by their own names
            continue
        title = kind.groups.get(entry.name, title)
        limits = metadata(hints[entry.name], Range)
        typed = Parameter(
            name=option(entry.name),
            group=GROUPS[title],
            help=docs[entry.name] + (f" [{limits}]" if limits else ""),
            show_default=entry.default != "",
            show_choices=limits is None,
        )
        annotation = str if entry.name == "augment" else hints[entry.name]  # tables are in files
        settings.append(
            Argument(
                entry.name,
                Argument.KEYWORD_ONLY,
                default=entry.default,
                annotation=Annotated[annotation, typed],
            )
        )
    return settings


def _run(
    kind: type[Config],
    data: Images | None = None,
    /,
    *,
    run: Annotated[RunOptions, Parameter(name="*")] | None = None,
    **typed: Annotated[Any, Parameter(show=False)],
) -> None:
    """Train, discover or classify with the settings that were typed, and print the result."""
    run = run or RunOptions()
    settings = read_toml(settings_file(run.config_file), kind) if run.config_file else {}
    stored, given = settings.pop("data", None), {"data": data} if data else {}
    data = data or stored
    if data is None:
        raise UsageError(
            f"no images given; say nearkin {kind.verb} DATA, or --config with a data key"
        )
    own, options = _divided(kind, typed)
    _check_file({**settings, "data": stored}, {**own, **given}, run.config_file)
    settings |= own
    if options:
        settings["options"] = settings.get("options", {}) | options
    from nearkin.distributed import is_main_process

    command = getattr(import_module(f"nearkin.commands.{kind.verb}"), kind.verb)
    config: Any = kind(**settings)
    files: dict[str, Any] = {"out": run.out, "resume": run.resume, "overwrite": run.overwrite}
    with Terminal(run.quiet or run.json or not is_main_process()) as terminal:
        finished = command(data, config, **files, reporter=terminal)
    if is_main_process():
        show(finished.summary, run.json, finished.lines())


def _check_file(settings: Mapping[str, Any], typed: Mapping[str, Any], file: Path | None) -> None:
    """Refuse code that only a file of settings names, unless it is trusted."""
    named = {name: value for name, value in settings.items() if name not in typed}
    check_trusted(named, file or Path(), typed.get(TRUST, False))


def _divided(kind: type[Config], typed: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings among what was typed, and the options of the method, if it has one."""
    for variable in OTHER_VARIABLES:  # cyclopts takes every NEARKIN_ variable for an option
        if variable in os.environ:
            typed.pop(variable.removeprefix(VARIABLES).lower(), None)
    names = {entry.name for entry in fields(kind)}
    settings = {name: value for name, value in typed.items() if name in names}
    options = {k.replace("-", "_"): value for k, value in typed.items() if k not in names}
    if options and "options" not in names:
        name = min(options)
        raise UsageError(f"unknown option {as_given(name)}.{suggestion(name, names)}")
    return settings, options


def _embed(
    encoder: Annotated[str | None, Parameter(help=ENCODER)] = None,
    data: Images | None = None,
    /,
    *,
    run: Annotated[EmbedOptions, Parameter(name="*")] | None = None,
    **typed: Annotated[Any, Parameter(show=False)],
) -> None:
    """Make the run folder of an encoder as it is, or only write its features."""
    run = run or EmbedOptions()
    settings = read_toml(settings_file(run.config_file), EmbedConfig) if run.config_file else {}
    stored = settings.pop("data", None)
    given = {name: each for name, each in (("encoder", encoder), ("data", data)) if each}
    encoder, data = encoder or settings.get("encoder"), data or stored
    if not encoder or data is None:
        what = "no images" if encoder else "no encoder"
        raise UsageError(f"{what} given; say nearkin embed ENCODER DATA, or --config FILE")
    own, _ = _divided(EmbedConfig, typed)
    _check_file({**settings, "data": stored}, {**own, **given}, run.config_file)
    config = EmbedConfig(**{**settings, **own, "encoder": encoder})
    if run.output is not None:
        _embed_table(config, data, run)
        return
    if run.has_parts:
        raise UsageError(
            "--shard, --part and --engine are of a folder of parts; give one with -o FOLDER/"
        )
    if not is_only_process():
        return
    from nearkin.commands.frozen import embed_folder

    with Terminal(run.quiet or run.json) as terminal:
        finished = embed_folder(
            data,
            config,
            out=run.out,
            resume=run.resume,
            overwrite=run.overwrite,
            reporter=terminal,
        )
    show(finished.summary, run.json, finished.lines())


def _embed_table(config: EmbedConfig, data: str, run: EmbedOptions) -> None:
    """Write only the features: as a file, or in parts into a folder."""
    from nearkin.commands.embed import embed, embed_parts, is_folder
    from nearkin.commands.frozen import only_of_folders
    from nearkin.distributed import is_main_process
    from nearkin.evaluation.table import SHARD

    if run.out is not None:
        raise UsageError("--out makes a run folder and -o only a table; give one")
    output = str(run.output)
    only_of_folders(config, resume=run.resume, overwrite=run.overwrite and is_folder(output))
    names = ("labels", "image_size", "allow_partial", TRUST, "device", "workers")
    settings: dict[str, Any] = {name: getattr(config, name) for name in names}
    quiet = run.quiet or run.json
    if is_folder(output):
        shard = SHARD if run.shard is None else run.shard
        settings |= {"part": run.part, "engine": run.engine}
        with Terminal(quiet or not is_main_process()) as terminal:
            written = embed_parts(
                config.encoder, data, output, shard=shard, reporter=terminal, **settings
            )
        if is_main_process():
            show(vars(written), run.json, written.lines(Path(output)))
        return
    if not is_only_process():
        return
    if run.has_parts:
        raise UsageError(f"{output} is one file, without parts; give a folder, {output}/")
    with Terminal(quiet) as terminal:
        settings |= {"output": output, "overwrite": run.overwrite, "reporter": terminal}
        embeddings = embed(config.encoder, data, **settings)
    count, dim = embeddings.vectors.shape
    path = str(Path(output).resolve())
    table = {"images": count, "features": dim, "output": path, "bad": dict(embeddings.bad)}
    show(table, run.json, [f"{count} images, {dim} features each: {path}"])
    for name, reason in embeddings.bad.items():
        print(f"left out {name!r}: {reason}", file=sys.stderr)


_add_command(
    TrainConfig,
    "Train an encoder on images without labels, and measure it.\n\n"
    "Options of the method are typed by their names, such as --temperature 0.2; "
    "--method NAME --help lists them.",
)
_add_command(
    DiscoverConfig,
    "Find novel classes among images of which some are labeled.\n\n"
    "Options of the objective's method, uno, ncl or simgcd, are typed by their names; "
    "--objective NAME --help lists them.",
)
_add_command(
    ClassifyConfig,
    "Learn classes from labels of some images or of all, on top of any encoder.\n\n"
    "Leaves a calibrated classifier, which nearkin assign applies to new images.",
)


_add_command(
    EmbedConfig,
    "Embed images by an encoder as it is, without training, and measure it.\n\n"
    "Makes a run folder, which other commands take like that of a training. With -o, only the "
    "features are written. Into a folder, they are written in parts, with only one part in "
    "memory: what is there is not made again, and processes that torchrun or srun has started "
    "divide the parts.",
    _embed,
)


def method_options(arguments: list[str]) -> "HelpPanel | None":
    """The options of the method that a command for help names; none if it names no method.

    Only then is torch imported, or a file of the user's own.
    """
    if not {"--help", "-h"} & {*arguments}:
        return None
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("verb", nargs="?")
    parser.add_argument("--method", nargs="?")
    parser.add_argument("--objective", nargs="?")
    typed, _ = parser.parse_known_args(arguments)
    methods = {"train": typed.method, "discover": OBJECTIVE_METHODS.get(typed.objective)}
    if not (method := methods.get(typed.verb)):
        return None
    from cyclopts.help import HelpEntry, HelpPanel

    from nearkin.commands.info import options
    from nearkin.extensions import label
    from nearkin.methods import method_class

    # A discovery has --classes instead of the method's own number.
    settings = {option(entry.name) for entry in fields(DiscoverConfig)} | {"--num-novel-classes"}
    entries = [
        HelpEntry(
            positive_names=(each.name,), description=f"{each.meaning} [default: {each.here}]"
        )
        for each in options(method_class(method)).values()
        if typed.verb == "train" or each.name not in settings
    ]
    return HelpPanel("parameter", f"Options of {label(method)}", entries=entries)
