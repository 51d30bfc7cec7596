"""A network as OpenVINO computes it on a CPU: the features of torch, in less time."""

import warnings
from importlib.util import find_spec
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from nearkin.networks.branch import eval_mode

EQUAL: Final = 1e-4
"""Largest difference of a feature from torch's, relative to the largest feature."""


def is_installed() -> bool:
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
            difference = (compiled(images) - expected).abs().max()
        except Exception:  # of many kinds: an operation that it does not have
            return None
    return compiled if difference <= EQUAL * expected.abs().max() else None
