"""The part of a network that learns from labels: its last blocks, or all of it."""

import copy

from nearkin.errors import UsageError
from nearkin.networks.blocks import network_parts
from nearkin.networks.branch import Backbone


def trained_parts(backbone: Backbone, layers: str) -> list[str]:
    """Return the names of the parts that `all` or `last:N` trains, or refuse what is not there."""
    parts = network_parts(backbone.body)
    if layers == "all":
        return [part.name for part in parts]
    number, blocks = int(layers.removeprefix("last:")), [p for p in parts if p.is_block]
    if number > len(blocks):
        most = f"give at most last:{len(blocks)}" if blocks else "give all"
        raise UsageError(
            f"--train-layers {layers}, but {backbone.name} has {len(blocks)} blocks; {most}"
        )
    return [part.name for part in parts[parts.index(blocks[-number]) :]]


def trainable_copy(backbone: Backbone, layers: str) -> Backbone:
    """Return a copy of a network of which `all` or `last:N` learns, and nothing else changes."""
    network = copy.deepcopy(backbone)
    if layers != "all":
        network.train_only(trained_parts(network, layers))
    return network
