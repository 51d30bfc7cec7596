"""Batch norms folded into the convolutions before them: fewer passes over memory at inference."""

import copy
from collections import Counter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from nearkin.networks.branch import Module, eval_mode, hooked

TOLERANCE: Final = 1e-4
"""Largest difference of a feature by another rounding, relative to the largest feature."""


def fold_batch_norms(network: Module, images: Tensor) -> Module:
    """Return a copy of a network whose batch norms are part of the convolutions before them.

        norm(conv(x)) = g / s * (W x - m) + b = (g / s * W) x + (b - g m / s),  s = sqrt(v + eps)

    with running mean m and variance v. Which convolution a norm follows is found by running the
    network once. The features differ by rounding alone, which is verified on these images.

    Args:
        network: Any network. It is left as it is.
        images: At least one, as the network takes them.

    Returns:
        The network itself, if it has no such pair, or one does more with a convolution's output.
    """
    with torch.inference_mode(), eval_mode(network):
        pairs, features = _pairs(network, images)
        if not pairs:
            return network
        folded = copy.deepcopy(network)
        for conv, norm in pairs.items():
            _fold(folded, conv, norm)
        difference = (folded(images) - features).abs().max()
    return folded if difference <= TOLERANCE * features.abs().max() else network


def _pairs(network: nn.Module, images: Tensor) -> tuple[dict[str, str], Tensor]:
    """Return the names of convolutions, each with that of the norm that follows, and features."""
    outputs = dict[int, tuple[str, Tensor]]()  # kept, so that no number is given twice
    pairs, uses = dict[str, str](), Counter[str]()
    names = {module: name for name, module in network.named_modules()}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        uses[names[module]] += 1
        if isinstance(module, nn.Conv2d):
            outputs[id(output)] = names[module], output
        elif id(inputs[0]) in outputs:
            pairs[outputs[id(inputs[0])][0]] = names[module]

    with hooked([m for m in names if isinstance(m, nn.Conv2d) or _is_norm(m)], note):
        features = network(images)
    once = {conv: norm for conv, norm in pairs.items() if uses[conv] == uses[norm] == 1}
    return once, features


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm with running statistics, of torch or timm."""
    return isinstance(module, nn.BatchNorm2d) and module.running_mean is not None


def _fold(network: nn.Module, conv_name: str, norm_name: str) -> None:
    """Fold one norm of a network, in place; the activation of timm's norms stays."""
    conv: Any = network.get_submodule(conv_name)
    norm: Any = network.get_submodule(norm_name)
    statistics = norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    conv.weight, conv.bias = fuse_conv_bn_weights(conv.weight, conv.bias, *statistics)
    rest = [getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)]
    parent, _, own = norm_name.rpartition(".")
    setattr(network.get_submodule(parent), own, nn.Sequential(*rest) if rest else nn.Identity())
