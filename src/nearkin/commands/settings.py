"""The settings of a run that Python gives: a data class, or keywords in its place or beside it."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nearkin.config import DiscoverConfig, Settings, TrainConfig
from nearkin.data.augmentations import stored_views
from nearkin.errors import UsageError
from nearkin.methods import method_name
from nearkin.schema import suggestion


def given(
    kind: type[Settings], config: Settings | None, settings: Mapping[str, Any]
) -> tuple[Settings, nn.Module | None]:
    """Return settings as a run stores them, and a network of one's own if `backbone` is one.

    Paths and devices become text, methods and views what names them. What is no setting is an
    option of the method.

    Args:
        kind: The class of the settings.
        config: The settings that the keywords do not name.
        settings: The keywords.

    Raises:
        UsageError: If there is no such setting, or it has another type.
    """
    own = {entry.name for entry in fields(kind)}
    values = {name: stored(name, value) for name, value in settings.items() if name in own}
    options = {name: value for name, value in settings.items() if name not in own}
    if options and "options" not in own:
        name = min(options)
        raise UsageError(f"{kind.__name__} has no {name}.{suggestion(name, own)}")
    if "options" in own:
        before = config.options if isinstance(config, TrainConfig | DiscoverConfig) else {}
        values["options"] = {**before, **(values.get("options") or {}), **options}
    network = values.pop("backbone") if isinstance(values.get("backbone"), nn.Module) else None
    return replace(config, **values) if config else kind(**values), network


def stored(name: str, value: Any) -> Any:
    """A setting as files hold it.

    >>> stored("out", Path("a/b")), stored("known", ["cat"])
    ('a/b', ['cat'])
    """
    if isinstance(value, Path | torch.device):
        return str(value)
    if isinstance(value, type):
        return method_name(value)
    return stored_views(value) if name == "augment" and not isinstance(value, str) else value
