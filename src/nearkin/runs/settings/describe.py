"""What a run is about to do, in lines for people."""

from nearkin.config import TrainConfig, option
from nearkin.runs.settings.build import USUAL_BATCH
from nearkin.runs.settings.options import USUAL_GROUP, default_options, method_class, shrink


def describe(config: TrainConfig) -> str:
    """The recipe in one line."""
    options = ", ".join(f"{name} {value}" for name, value in config.options.items())
    return (
        f"recipe {config.method} ({options}), {config.backbone}, {config.image_size} px, "
        f"augmentation {config.augment}, batch {config.batch_size} (global), {config.optimizer} "
        f"lr {config.lr:.4g}, weight decay {config.weight_decay:g}, {config.epochs} epochs, "
        f"{config.precision}; all of it in config.toml"
    )


def shrunk(config: TrainConfig, num_images: int) -> list[str]:
    """A line for each size left to `auto` that is smaller than usual for want of pictures."""
    lines = []
    if config.batch_size == num_images < USUAL_BATCH:
        lines.append(f"note   --batch-size {config.batch_size}: there are no more pictures")
    usual = default_options(config.method)
    for key in shrink(method_class(config.method)):
        if config.options[key] < usual[key]:
            value = f"{option(key)} {config.options[key]}"
            lines.append(f"note   {value} for {usual[key]}: {_why(key)}")
    return lines


def _why(key: str) -> str:
    if key == "bn_groups":
        return f"equal parts of the batch, of {USUAL_GROUP} pictures or more"
    return "at most half of the pictures"
