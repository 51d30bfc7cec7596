"""The application: which functions are commands, and what `--help` says of them."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Final, Literal

from cyclopts import App, Group
from cyclopts.completion.detect import ShellDetectionError
from cyclopts.help import HelpEntry, HelpPanel

from nearkin.choices import MODE_METHODS
from nearkin.cli.command import command_of
from nearkin.cli.declared import summary
from nearkin.config import DiscoverConfig
from nearkin.errors import OutputError, UsageError
from nearkin.schema import option
from nearkin.version import __version__

HELP: Final = """Self-supervised contrastive learning of images, and novel class discovery.

nearkin demo

nearkin train IMAGES --epochs 100

nearkin discover IMAGES --labeled SOME_CLASSES

`nearkin COMMAND --help` lists the common options of a command, `--help-all` all of them.
"""
COMMANDS: Final[Mapping[str, Mapping[str, str]]] = {
    "Start": {
        "demo": "demo:demo",
        "check": "check:check",
        "list": "lists:list_names",
        "doctor": "doctor:doctor",
    },
    "Encoders": {
        "train": "train:train",
        "embed": "embed:embed_files",
        "evaluate": "evaluate:evaluate",
        "audit": "audit:audit",
        "export": "export:export",
    },
    "Classes": {
        "discover": "discover:discover",
        "classify": "classify:classify",
        "predict": "predict:predict",
        "select": "select:select",
    },
    "Exploration": {
        "explore": "explore:explore",
        "neighbors": "neighbors:neighbors",
        "duplicates": "duplicates:duplicates",
    },
    "Comparison": {"compare": "compare:compare", "rank": "compare:rank"},
}
"""The function of `nearkin.commands` that each command calls, by group."""
COMPLETION: Final = "--install-completion"


def application(verb: str = "", *, everything: bool = False) -> App:
    """Return the application with one command that can be run, and the names of the others.

    Args:
        verb: The command; none for the list of all.
        everything: Whether help lists all options, rather than the common ones.
    """
    complete = verb == COMPLETION  # which offers the options of all
    app = App(name="nearkin", version=__version__, help=HELP)
    for place, (title, commands) in enumerate(COMMANDS.items()):
        group = Group(title, sort_key=place)
        for name, target in commands.items():
            if name == verb or complete:
                command, text = command_of(target, name, everything=everything or complete)
            else:
                command, text = _not_called, "" if verb else summary(target)
            app.command(command, name=name, help=text, group=group)
    if complete:
        app.command(_installer(app), name=COMPLETION)
    return app


def method_options(verb: str, arguments: list[str]) -> HelpPanel | None:
    """The options of the method that `--method`, or `--mode` of a discovery, names, if one does.

    Only then is the method imported, which may be a file of the user's own.
    """
    words = [part for word in arguments for part in word.split("=", 1)]
    named = dict(pairwise(words))
    last_stage = MODE_METHODS.get(named.get("--mode", ""))
    method = {"train": named.get("--method"), "discover": last_stage}.get(verb)
    if not method:
        return None
    from nearkin.commands.lists import options
    from nearkin.extensions import label
    from nearkin.methods import method_class

    # A discovery has --classes instead of the method's own number.
    settings = {option(name) for name in DiscoverConfig.__dataclass_fields__}
    settings |= {"--num-novel-classes"}
    entries = [
        HelpEntry(
            positive_names=(each.name,), description=f"{each.meaning} [default: {each.here}]"
        )
        for each in options(method_class(method)).values()
        if verb == "train" or each.name not in settings
    ]
    return HelpPanel("parameter", f"Options of {label(method)}", entries=entries)


def _not_called() -> None:
    raise AssertionError("another command is called")


def _installer(app: App) -> Callable[..., None]:
    def install(*, shell: Literal["bash", "zsh", "fish", "powershell"] | None = None) -> None:
        """Install completion of commands and options by Tab.

        Args:
            shell: For which shell; for the one that runs if not given.
        """
        try:
            path = app.install_completion(shell=shell)
        except ShellDetectionError as error:
            raise UsageError(f"cannot tell which shell runs; give --shell ({error})") from error
        except OSError as error:
            raise OutputError(f"cannot install completion: {error}; give another HOME") from error
        print(f"{path}; shells that are started from now on have it")

    return install
