"""The layers of a network in their order, for learning rates that decay from the top down."""

from collections.abc import Iterator

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def layer_depths(body: nn.Module) -> dict[str, int]:
    """Number the layers of a network from 0, the input, upwards; return that of each parameter.

    The networks of timm name their layers: a transformer's are its blocks, and so are a residual
    network's. In others, a block is a member of a list that has children of its own. What comes
    before the first block is layer 0, what stands between two blocks belongs to the one before,
    and what comes after the last one is a layer of its own. A network without such lists has its
    children as layers.
    """
    if hasattr(body, "group_matcher"):
        from timm.models import group_parameters

        numbered: dict[str, int] = group_parameters(
            body, body.group_matcher(coarse=False), reverse=True
        )
        return numbered
    blocks = [f"{name}." for name, _ in named_blocks(body)] or _children(body)
    names = [name for name, _ in body.named_parameters()]
    within = [next((b for b in blocks if f"{name}.".startswith(b)), "") for name in names]
    # A block is a layer from its first parameter on; so is what comes after the last one.
    last = max((place for place, block in enumerate(within) if block), default=-1)
    depths, depth, layer = dict[str, int](), 0, ""
    for place, (name, block) in enumerate(zip(names, within, strict=True)):
        begun = block if block or place <= last else "rest"
        if begun and begun != layer:
            depth, layer = depth + bool(depths), begun
        depths[name] = depth
    return depths


def named_blocks(network: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost members of lists that have children with parameters, in their order."""
    listed = isinstance(network, CONTAINERS)
    for name, child in network.named_children():
        place = f"{prefix}{name}"
        if listed and not isinstance(child, CONTAINERS) and _is_composite(child):
            yield place, child
        else:
            yield from named_blocks(child, f"{place}.")


def _is_composite(network: nn.Module) -> bool:
    return any(True for child in network.children() for _ in child.parameters())


def _children(network: nn.Module) -> list[str]:
    """Prefixes of the children that have parameters, below modules that have only one."""
    named = [(name, child) for name, child in network.named_children() if any(child.parameters())]
    if len(named) == 1 and not any(True for _ in network.parameters(recurse=False)):
        name, child = named[0]
        return [f"{name}.{below}" for below in _children(child)] or [f"{name}."]
    return [f"{name}." for name, _ in named]

