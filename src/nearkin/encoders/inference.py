"""An encoder as it is run where only its features are wanted: as fast as a device computes them.

On a CPU batch norms are folded into convolutions; many images are computed by OpenVINO, if it is
installed. A lower precision is taken where the user asks for it, or where it hardly changes which
images are neighbors, which is measured.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from typing_extensions import override

from nearkin.data.preprocessing import Preprocessing
from nearkin.data.views import normalize
from nearkin.distributed.allocation import keep_freed_memory
from nearkin.encoders.encoder import Encoder
from nearkin.errors import DataError
from nearkin.networks.backbone import SMALL_IMAGE
from nearkin.networks.branch import Module, eval_mode, hooked
from nearkin.objectives import unit
from nearkin.schema import Auto

Precision = Literal["fp32", "bf16"]
WORTH: Final = 1024 * 224**2
"""Pixels from which on a network is compiled, which takes about as long as it then saves."""
TOLERANCE: Final = 1e-4
"""Largest difference of a feature by another rounding, relative to the largest feature."""
TIE: Final = 1e-6  # Between cosines of equal images, by the order of summation


class Bfloat16(nn.Module):
    """A network whose products are computed in bfloat16, and whose weights stay float32."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @override
    def forward(self, images: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch features"]:
        with torch.autocast(images.device.type, torch.bfloat16):
            features: Tensor = self.network(images)
        return features


@dataclass(frozen=True, eq=False)
class Inference:
    """An encoder as it is run on a device."""

    network: nn.Module
    preprocessing: Preprocessing
    device: torch.device
    batch_size: int  # Images per pass

    @property
    def lines(self) -> list[str]:
        """Lines of the log, where the program that computes is not torch."""
        compiled = isinstance(self.network, OpenVINONetwork)
        return ["features are computed by OpenVINO"] if compiled else []


def inference(
    encoder: Encoder,
    device: torch.device,
    precision: Precision | Auto = "fp32",
    batch_size: int | Auto = "auto",
    *,
    count: int = 0,
) -> Inference:
    """Prepare an encoder to compute features; it moves to the device.

    On a CPU its batch norms are folded: features differ by rounding, 2e-6 of the largest. Features
    are float32; `precision` is that of the products, where `auto` is fp32. A pass takes
    `batch_size` images, `auto` as `images_at_once` says. If `count` images have `WORTH` pixels, a
    CPU computes their features by OpenVINO, where it is installed and they equal torch's.
    """
    size = images_at_once(encoder.image_size, device) if batch_size == "auto" else batch_size
    is_cpu = device.type == "cpu"
    network: nn.Module | None = None
    many = count * encoder.image_size**2 >= WORTH
    encoder.to(device)
    if is_cpu and precision != "bf16" and many and has_openvino():
        network = by_openvino(encoder.backbone, _noise(encoder, 3))
    if network is None:
        network = encoder.to(memory_format=torch.channels_last).backbone
        if is_cpu:
            images = _noise(encoder, 1).contiguous(memory_format=torch.channels_last)
            network = fold_batch_norms(network, images)
    if precision == "bf16":
        network = Bfloat16(network)
    return Inference(network, encoder.preprocessing, device, size)


def neighbors_kept(
    features: Float[Tensor, "images _"], others: Float[Tensor, "images _"]
) -> float:
    """Return the share of images whose nearest neighbor by other features is the same.

    One of equally similar images is as good as another.
    """
    if len(features) < 2:
        return 1.0
    own, theirs = ((unit(of) @ unit(of).T).fill_diagonal_(-torch.inf) for of in (features, others))
    found = own.gather(1, theirs.argmax(dim=1, keepdim=True)).squeeze(1)
    return (found >= own.amax(dim=1) - TIE).double().mean().item()


def _noise(encoder: Encoder, count: int) -> Tensor:
    """Return images of noise, the same at each call."""
    side = encoder.image_size
    shape = count, encoder.backbone.num_channels, side, side
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def images_at_once(image_size: int, device: torch.device) -> int:
    """Return how many images one pass of an encoder takes: 256, or of larger ones fewer on a CPU.

    There, activations that stay in its cache are worth more than large products: of a ViT-S/14 at
    224 px, 16 images take an eighth less time per image than 64, and a fifth of their memory.
    """
    fitting = 256 * SMALL_IMAGE**2 // image_size**2 if device.type == "cpu" else 256
    return min(256, 1 << max(2, fitting.bit_length() - 1))


def encode(encoder: nn.Module, batches: Iterable[Float[Tensor, "_ ..."]]) -> Float[Tensor, "n d"]:
    """Compute the features of all images, in float32 on the CPU; the encoder's state stays.

    Batch norm uses its running statistics, so no image's features depend on another image.
    """
    features = []
    with keep_freed_memory(), eval_mode(encoder):
        for batch in batches:
            with torch.inference_mode():
                # A copy: a class token is a view, and would keep all tokens of its batch.
                features.append(encoder(batch).flatten(1).to("cpu", torch.float32, copy=True))
    if not features:
        raise DataError("no image to encode; name a folder or a split that has some")
    return torch.cat(features)  # outside of inference mode, so that a probe can learn from it


def encode_pixels(
    network: nn.Module, batches: Iterable[Shaped[Tensor, "_ _ _ _"]], device: torch.device
) -> Float[Tensor, "n d"]:
    """Compute the features of decoded images, by a network on that device."""
    return encode(network, (normalize(batch.to(device)) for batch in batches))


# ---------------------------------------------------------------- other programs for the same


def fold_batch_norms(network: Module, images: Tensor) -> Module:
    """Return a copy of a network whose batch norms are part of the convolutions before them.

        norm(conv(x)) = g / s * (W x - m) + b = (g / s * W) x + (b - g m / s),  s = sqrt(v + eps)

    with running mean m and variance v. Which convolution a norm follows is found by running the
    network, which is left as it is, on these images, at least one. The features differ by rounding
    alone, which is verified on them. Without such a pair, or where more is done with the output of
    a convolution, the network itself is returned.
    """
    if not any(isinstance(module, nn.BatchNorm2d) for module in network.modules()):
        return network
    with torch.inference_mode(), eval_mode(network):
        folded = copy.deepcopy(network)  # other threads may be copying the network itself
        pairs, features = _pairs(folded, images)
        for conv, norm in pairs.items():
            _fold(folded, conv, norm)
        return folded if pairs and _are_close(folded(images), features) else network


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

    The network, on the CPU, is left as it is. Both compute these images, at least three that
    differ; later ones are of the same size. None if OpenVINO cannot compute the network, or its
    features are not those of torch.
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
