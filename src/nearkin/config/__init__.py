"""What nearkin can be told: settings with their defaults, and the files that hold them."""

from nearkin.config.files import Config, continued, read_toml, to_toml
from nearkin.config.settings import DiscoverConfig, TrainConfig
from nearkin.config.values import (
    Auto,
    Value,
    fits,
    option,
    seconds,
    spelled,
    suggestion,
    toml_value,
)

__all__ = [
    "Auto",
    "Config",
    "DiscoverConfig",
    "TrainConfig",
    "Value",
    "continued",
    "fits",
    "option",
    "read_toml",
    "seconds",
    "spelled",
    "suggestion",
    "to_toml",
    "toml_value",
]
