"""The layers of a network by number, for learning rates that decay from the top down."""

from typing import Any, cast

from torch import nn

from nearkin.networks.blocks import network_parts


def layer_depths(body: nn.Module) -> dict[str, int]:
    """Number the layers of a network from 0, the input, upwards; return that of each parameter.

    The networks of timm name their layers: a transformer's are its blocks, and so are a residual
    network's. In others, what comes before the first block is layer 0, what stands between two
    blocks belongs to the one before, and what comes after the last one is a layer of its own. A
    network without blocks has its parts as layers.
    """
    if hasattr(body, "group_matcher"):
        from timm.models import group_parameters

        numbered: dict[str, int] = group_parameters(
            body, cast(Any, body).group_matcher(coarse=False), reverse=True
        )
        return numbered
    prefixes = _prefixes(body)
    # Parameters of the network itself are its tokens and position embeddings.
    return {
        name: next((n for prefix, n in prefixes.items() if name.startswith(prefix)), 0)
        for name, _ in body.named_parameters()
    }


def _prefixes(body: nn.Module) -> dict[str, int]:
    """Return the number of the layer of each part, by the prefix of its parameters."""
    parts = network_parts(body)
    blocks = [place for place, part in enumerate(parts) if part.is_block]
    blocks = blocks or list(range(len(parts)))
    starts = {*blocks, blocks[-1] + 1} if blocks else set()
    numbers, number = dict[str, int](), 0
    for place, part in enumerate(parts):
        number += place in starts and place > 0
        numbers[f"{part.name}."] = number
    return numbers
