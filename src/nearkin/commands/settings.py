"""What Python gives, as files hold it: objects become names, keywords a data class."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nearkin.config import Settings, settings_from
from nearkin.data.augmentations import stored_views
from nearkin.encoders.encoder import Encoder, object_name
from nearkin.errors import UsageError
from nearkin.evaluation.embeddings import Embeddings
from nearkin.methods import method_name
from nearkin.places import user_path
from nearkin.run.opening import TAKEN

PathLike = str | os.PathLike[str]
"""A path; a `Run` is that of its folder."""
EncoderLike = PathLike | Encoder
"""An encoder: a run, a name, a file, or one that `nearkin.load` has returned."""


def given(
    kind: type[Settings], config: Settings | None, settings: Mapping[str, Any]
) -> tuple[Settings, nn.Module | None]:
    """Return settings as a run stores them, and a network of one's own if `backbone` is one.

    Paths, devices, encoders and runs become text, methods and views what names them. A leading `~`
    of a path is the home folder. What is no setting is an option of the method.

    Args:
        kind: The class of the settings.
        config: The settings that the keywords do not name.
        settings: The keywords.

    Raises:
        UsageError: If there is no such setting, or it has another type.
    """
    values = {name: stored(name, value) for name, value in settings.items()}
    takes_one = "backbone" in kind.__dataclass_fields__
    network = None
    if takes_one and isinstance(values.get("backbone"), nn.Module):
        network = values.pop("backbone")
    found = settings_from(kind, vars(config) if config else {}, values)
    named = {name: getattr(found, name, "") for name in (*TAKEN, "copy_to")}
    paths: dict[str, Any] = {
        name: str(user_path(path)) for name, path in named.items() if path.startswith("~")
    }
    return replace(found, **paths), network


def name_of(encoder: EncoderLike | Embeddings) -> str:
    """The text that stands for an encoder in settings and files; `nearkin.load` takes it.

    An encoder has a name as long as it is in memory, so the caller keeps it.

    Raises:
        UsageError: If these are features.
    """
    if isinstance(encoder, Embeddings):
        raise UsageError("these are features; give an encoder")
    return object_name(encoder) if isinstance(encoder, Encoder) else os.fspath(encoder)


def stored(name: str, value: Any) -> Any:
    """A setting as files hold it.

    >>> from pathlib import Path
    >>> stored("out", Path("a/b")), stored("known", ["cat"])
    ('a/b', ['cat'])
    """
    if isinstance(value, os.PathLike | Encoder):
        return name_of(value)
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, type):
        return method_name(value)
    return stored_views(value) if name == "augment" and not isinstance(value, str) else value
