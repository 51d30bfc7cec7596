"""The options of a method, below the help of a command that names it."""

from itertools import pairwise
from typing import TYPE_CHECKING

from nearkin.choices import MODE_METHODS
from nearkin.config import DiscoverConfig
from nearkin.schema import option

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel


def method_options(verb: str, arguments: list[str]) -> "HelpPanel | None":
    """The options of the method that `--method`, or `--mode` of a discovery, names, if one does.

    Only then is the method imported, which may be a file of the user's own.
    """
    words = [part for word in arguments for part in word.split("=", 1)]
    named = dict(pairwise(words))
    last_stage = MODE_METHODS.get(named.get("--mode", ""))
    method = {"train": named.get("--method"), "discover": last_stage}.get(verb)
    if not method:
        return None
    from cyclopts.help import HelpEntry, HelpPanel

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
