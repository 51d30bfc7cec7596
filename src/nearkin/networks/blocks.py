"""The parts of a network in the order in which images pass them: stem, blocks, what comes last.

By that order the learning rates of layers decay from the top down.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nearkin.errors import UsageError

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
    learned = [
        at for at, part in module.named_children() if next(part.parameters(), None) is not None
    ]
    for name, child in module.named_children():
        place, inner = f"{prefix}{name}", dict(child.named_children())
        # Such as the features of a DenseNet, whose layers and blocks stand in one row.
        is_all = [name] == learned and isinstance(child, nn.Sequential)
        is_wrapper = (len(inner) == 1 or is_all) and not in_row
        if _is_row(child) or is_wrapper or INNER & inner.keys():
            yield from _parts(child, f"{place}.")
        elif name in learned:
            yield Part(place, in_row and _is_nested(child))


def _is_row(module: nn.Module) -> bool:
    """Return whether a module is a row of blocks, and not of the layers of one."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    return isinstance(module, nn.Sequential) and all(map(_is_nested, module.children()))


def _is_nested(module: nn.Module) -> bool:
    """Return whether a module consists of others."""
    return next(module.children(), None) is not None


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
    parts = network_parts(body)
    blocks = [place for place, part in enumerate(parts) if part.is_block]
    blocks = blocks or list(range(len(parts)))
    starts = {*blocks, blocks[-1] + 1} if blocks else set()
    prefixes, number = dict[str, int](), 0
    for place, part in enumerate(parts):
        number += place in starts and place > 0
        prefixes[f"{part.name}."] = number
    # Parameters of the network itself are its tokens and position embeddings.
    return {
        name: next((n for prefix, n in prefixes.items() if name.startswith(prefix)), 0)
        for name, _ in body.named_parameters()
    }


def checkpoint_blocks(body: Any, name: str) -> None:
    """Let blocks keep their input alone and run again for their gradients, by timm's own means.

    The memory of activations shrinks to that of one block (Chen et al. 2016, Training deep nets
    with sublinear memory cost, arXiv:1604.06174).

    Raises:
        UsageError: If timm cannot, or statistics of batch norms would move in the second run too.
    """
    try:
        if not any(isinstance(module, _BatchNorm) for module in body.modules()):
            body.set_grad_checkpointing()
            return
    except (AttributeError, AssertionError):
        pass
    raise UsageError(
        f"timm cannot compute blocks of the backbone {name} again, at all or without moving its "
        "batch norms; give a --chunk-size that divides the batch instead of --grad-checkpointing"
    )
