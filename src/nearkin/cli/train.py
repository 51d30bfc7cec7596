"""Commands that train: an encoder, the classes of a discovery, or a classifier."""

import os
from argparse import ArgumentParser
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from inspect import Parameter as Argument
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

from cyclopts import Parameter

from nearkin.cli.app import GROUPS, Flag, Images, app, show
from nearkin.cli.terminal import Terminal
from nearkin.config import (
    MODE_METHODS,
    ClassifyConfig,
    Config,
    DiscoverConfig,
    Range,
    TrainConfig,
    field_docs,
    metadata,
    option,
    read_toml,
    suggestion,
)
from nearkin.errors import UsageError

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel

VERBS: Final[dict[type[Config], str]] = {
    TrainConfig: "train",
    DiscoverConfig: "discover",
    ClassifyConfig: "classify",
}
OTHER_VARIABLES: Final = ("NEARKIN_TORCHVISION", "NEARKIN_TRACEBACK")  # they are no settings


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What is typed beside the settings: files, and what is printed."""

    config_file: Annotated[Path | None, Parameter(name="--config", group=GROUPS["Data"])] = None
    """A TOML file of settings, such as the config.toml of a run. The command line and the
    environment take precedence."""
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


def _add_command(verb: str, kind: type[Config], text: str) -> None:
    """Add a command that has the fields of a settings class as parameters."""
    command = partial(_run, kind)
    data, *others = signature(command).parameters.values()
    parameters = [data, *_settings(kind), *others]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    app.command(command, name=verb, help=text)


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
    settings = read_toml(run.config_file, kind) if run.config_file else {}
    stored = settings.pop("data", None)
    data = data or stored
    if data is None:
        verb = VERBS[kind]
        raise UsageError(f"no images given; say nearkin {verb} DATA, or --config with a data key")
    for variable in OTHER_VARIABLES:  # cyclopts takes every NEARKIN_ variable for an option
        if variable in os.environ:
            typed.pop(variable.removeprefix("NEARKIN_").lower(), None)
    names = {entry.name for entry in fields(kind)}
    settings |= {name: value for name, value in typed.items() if name in names}
    options = {k.replace("-", "_"): value for k, value in typed.items() if k not in names}
    if "options" in names:
        settings["options"] = settings.get("options", {}) | options
    elif options:
        near = suggestion(next(iter(options)), names)
        raise UsageError(f"unknown option {option(next(iter(options)))}.{near}")
    from nearkin.distributed import is_main_process

    verb = VERBS[kind]
    command = getattr(import_module(f"nearkin.commands.{verb}"), verb)
    config: Any = kind(**settings)
    files: dict[str, Any] = {"out": run.out, "resume": run.resume, "overwrite": run.overwrite}
    with Terminal(run.quiet or run.json or not is_main_process()) as terminal:
        finished = command(data, config, **files, reporter=terminal)
    if is_main_process():
        show(finished.summary, run.json, finished.lines())


_add_command(
    "train",
    TrainConfig,
    "Train an encoder on images without labels, and measure it.\n\n"
    "Options of the method are typed by their names, such as --temperature 0.2; "
    "--method NAME --help lists them.",
)
_add_command(
    "discover",
    DiscoverConfig,
    "Find novel classes among images of which some are labeled.\n\n"
    "Options of the last stage's method, ncl or simgcd, are typed by their names; "
    "--mode MODE --help lists them.",
)
_add_command(
    "classify",
    ClassifyConfig,
    "Learn classes from labels of some images or of all, on top of any encoder.\n\n"
    "Leaves a calibrated classifier, which nearkin assign applies to new images.",
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
    parser.add_argument("--mode", nargs="?")
    typed, _ = parser.parse_known_args(arguments)
    methods = {"train": typed.method, "discover": MODE_METHODS.get(typed.mode)}
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
