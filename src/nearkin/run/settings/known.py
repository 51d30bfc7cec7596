"""The classes that a run learns from, if its method uses labels. All other labels stay hidden."""

import numpy as np
from jaxtyping import Int64

from nearkin.config import TrainConfig, suggestion
from nearkin.data.images import Images
from nearkin.errors import UsageError
from nearkin.run.settings.options import method_class
from nearkin.types import UNKNOWN


def known_classes(config: TrainConfig) -> list[str]:
    """The names given with `--known`, in their order.

    Raises:
        UsageError: If the method uses labels and none are named, or the other way around, or if
            a class is named twice.
    """
    names = [name.strip() for name in config.known.split(",") if name.strip()]
    if len(set(names)) < len(names):
        raise UsageError(f"--known {config.known} names a class twice; name each once")
    uses = method_class(config.method).uses_labels
    if uses and not names:
        raise UsageError(f"{config.method} learns from known classes; name them with --known A,B")
    if names and not uses:
        raise UsageError(f"{config.method} uses no labels; leave --known out")
    return names


def known_labels(config: TrainConfig, images: Images) -> Int64[np.ndarray, " images"] | None:
    """Labels of the known classes, numbered in their order; `UNKNOWN` for all other pictures.

    Returns:
        None for a method that does not use labels: it never meets one.

    Raises:
        UsageError: If a name is not that of a class.
    """
    names = known_classes(config)
    if not names:
        return None
    numbers = {name: number for number, name in enumerate(images.classes)}
    labels = np.full(len(images), UNKNOWN)
    for position, name in enumerate(names):
        if name not in numbers:
            raise UsageError(f"--known {name} is no class of the data.{suggestion(name, numbers)}")
        labels[images.labels == numbers[name]] = position
    return labels
