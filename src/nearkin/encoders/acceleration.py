"""The same features in less time on a CPU: by batch norms in convolutions, or by OpenVINO."""

import copy
import warnings
from collections import Counter
from importlib.util import find_spec
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from typing_extensions import override

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
        return folded if _are_close(folded(images), features) else network


def _are_close(features: Tensor, expected: Tensor) -> bool:
    return bool((features - expected).abs().max() <= TOLERANCE * expected.abs().max())


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

    # Without running statistics, a norm is no constant factor.
    norms = [m for m in names if isinstance(m, nn.BatchNorm2d) and m.running_mean is not None]
    with hooked([*norms, *(m for m in names if isinstance(m, nn.Conv2d))], note):
        features = network(images)
    once = {conv: norm for conv, norm in pairs.items() if uses[conv] == uses[norm] == 1}
    return once, features


def _fold(network: nn.Module, conv_name: str, norm_name: str) -> None:
    """Fold one norm of a network, in place; the activation of timm's norms stays."""
    conv: Any = network.get_submodule(conv_name)
    norm: Any = network.get_submodule(norm_name)
    statistics = norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    conv.weight, conv.bias = fuse_conv_bn_weights(conv.weight, conv.bias, *statistics)
    rest = [getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)]
    network.set_submodule(norm_name, nn.Sequential(*rest) if rest else nn.Identity())


def has_openvino() -> bool:
    """Whether `pip install 'nearkin[openvino]'` has been done."""
    return find_spec("openvino") is not None


class OpenVINONetwork(nn.Module):
    """A network that OpenVINO has compiled, with a torch module's interface."""

    def __init__(self, compiled: Any) -> None:
        super().__init__()
        self.compiled = compiled

    @override
    def forward(self, images: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch features"]:
        return torch.from_numpy(self.compiled(images.contiguous().numpy())[0])


def by_openvino(network: nn.Module, images: Float[Tensor, "batch _ _ _"]) -> nn.Module | None:
    """Return a network as OpenVINO computes it in float32, with as many threads as torch has.

    Args:
        network: Any, on the CPU. It is left as it is.
        images: At least three that differ, which both compute; later ones are of the same size.

    Returns:
        None if OpenVINO cannot compute the network, or its features are not those of torch.
    """
    import openvino

    with torch.no_grad(), eval_mode(network), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on how OpenVINO traces
        expected = network(images)
        try:
            # Traced with others: what the trace has kept of them shows in the difference below.
            model = openvino.convert_model(
                network, example_input=images[:2].flip(0), input=[-1, *images.shape[1:]]
            )
            settings = {
                "INFERENCE_PRECISION_HINT": "f32",  # by default bfloat16, where it is native
                "INFERENCE_NUM_THREADS": torch.get_num_threads(),
                "NUM_STREAMS": 1,
            }
            compiled = OpenVINONetwork(openvino.Core().compile_model(model, "CPU", settings))
            return compiled if _are_close(compiled(images), expected) else None
        except Exception:  # of many kinds: an operation that it does not have
            return None
