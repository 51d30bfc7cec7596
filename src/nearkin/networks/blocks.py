"""The parts of a network in the order in which images pass them: stem, blocks, what comes last."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from torch import nn

INNER: Final = frozenset({"blocks", "layer", "layers", "stages", "encoder"})
"""Names under which libraries keep the blocks of a stage."""


class Part(NamedTuple):
    """A part of a network that has parameters."""

    name: str  # The prefix of their names
    is_block: bool  # One of a row of blocks; not a single layer, such as the stem or the last norm


def network_parts(network: nn.Module) -> list[Part]:
    """Return the parts of a network, in the order in which its constructor makes them.

    That is the order in which images pass them in all networks of timm, torchvision and
    transformers. Parameters of the network itself, such as a class token, are in none.

    >>> block = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    >>> for part in network_parts(nn.Sequential(nn.Linear(2, 2), block, nn.Sequential(block))):
    ...     print(*part)
    0 False
    1 True
    2.0 True
    """
    return list(_parts(network, ""))


def _parts(module: nn.Module, prefix: str) -> Iterator[Part]:
    in_row = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    for name, child in module.named_children():
        place, inner = f"{prefix}{name}", dict(child.named_children())
        is_wrapper = len(inner) == 1 and not in_row
        if _is_row(child) or is_wrapper or INNER & inner.keys():
            yield from _parts(child, f"{place}.")
        elif next(child.parameters(), None) is not None:
            yield Part(place, in_row and _is_nested(child))


def _is_row(module: nn.Module) -> bool:
    """Return whether a module is a row of blocks, and not of the layers of one."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    return isinstance(module, nn.Sequential) and all(map(_is_nested, module.children()))


def _is_nested(module: nn.Module) -> bool:
    """Return whether a module consists of others."""
    return next(module.children(), None) is not None
