"""What a run is about to do, in lines for people."""

import shlex
from collections.abc import Mapping
from typing import Any

from nearkin.config import Config, MemorySize, TrainConfig, metadata, option
from nearkin.extensions import label
from nearkin.methods import method_class, option_types
from nearkin.run.settings.build import USUAL_BATCH
from nearkin.run.settings.options import USUAL_GROUP, default_options, fitted_options


def describe(config: TrainConfig) -> str:
    """The recipe in one line."""
    options = ", ".join(f"{name} {value}" for name, value in config.options.items())
    views = config.augment
    augmentation = views if isinstance(views, str) else f"of {len(views)} views of your own"
    return (
        f"recipe {label(config.method)} ({options}), {config.backbone}, {config.image_size} px, "
        f"augmentation {augmentation}, batch {config.batch_size} (global), {config.optimizer} "
        f"lr {config.lr:.4g}, weight decay {config.weight_decay:g}, {config.epochs} epochs, "
        f"{config.precision}; all of it in config.toml"
    )


def shrunk(config: TrainConfig, num_images: int) -> list[str]:
    """A line for each size that `auto` has reduced, or that is large for so few images."""
    lines = []
    if config.batch_size == num_images < USUAL_BATCH:
        lines.append(f"note   --batch-size {config.batch_size}: there are no more images")
    cls = method_class(config.method)
    usual = default_options(cls)
    kinds = option_types(cls)
    for key in fitted_options(cls):
        if metadata(kinds[key], MemorySize) and int(config.options[key]) > num_images // 2:
            # The papers' sizes are allowed, but hold old entries of most images.
            lines.append(
                f"warning: {option(key)} {config.options[key]} is more than half of the "
                f"{num_images} images"
            )
        if config.options[key] < usual[key]:
            why = "at most half of the images"
            if key == "bn_groups" and config.chunk_size:
                why = "one for each chunk of the batch"
            elif key == "bn_groups":
                why = f"equal parts of the batch, of {USUAL_GROUP} images or more"
            lines.append(f"note   {option(key)} {config.options[key]} for {usual[key]}: {why}")
    return lines


def command(verb: str, data: str, config: Config, usual: Mapping[str, Any]) -> str:
    """Return the command that repeats a run: every setting that is not the `usual` one."""
    words = ["nearkin", verb, data]
    for name, default in usual.items():
        value = getattr(config, name)
        if name != "options" and value != default:
            words += [f"--no-{name}"] if value is False else [option(name), str(value)]
    for name, value in config.options.items():
        words += [option(name), str(value)]
    return shlex.join(words)
