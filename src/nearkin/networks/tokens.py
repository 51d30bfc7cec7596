"""What a network computes before it pools: the tokens of a transformer, the map of a ConvNet."""

import math
from typing import Any, Final

from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from nearkin.errors import UsageError
from nearkin.networks.branch import Backbone, hooked, trial

PREFIXES: Final = ("cls_token", "class_token", "class_embedding", "register_tokens")
"""What libraries call the parameters of class and register tokens."""
FORWARD_FEATURES: Final = "forward_features"  # timm's method that stops before the pooling


class TokenFeatures(nn.Module):
    """A backbone up to its tokens, one row per position: all that its pooling has to choose from.

    Class and register tokens are among those of a transformer. The tokens of other networks are
    the positions of their last feature map. The weights are those of the backbone, not copies. It
    is tried with images of `image_size` pixels.

    Raises:
        UsageError: If the network has no such place.
    """

    def __init__(self, backbone: Backbone, image_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self._place = _token_place(backbone, image_size)
        with trial(backbone, image_size) as images:
            tokens: Tensor = self(images)
        _, self.num_tokens, self.dim = tokens.shape

    @override
    def forward(self, images: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch tokens dim"]:
        outputs, body = list[Tensor](), self.backbone.body
        if self._place == FORWARD_FEATURES:
            output: Tensor = getattr(body, FORWARD_FEATURES)(self.backbone.scaled(images))
            return as_tokens(output, self.backbone.feature_dim)
        with hooked([body.get_submodule(self._place)], lambda *passed: outputs.append(passed[-1])):
            self.backbone(images)
        return as_tokens(outputs[-1], self.backbone.feature_dim)


def _token_place(backbone: Backbone, image_size: int) -> str:
    """Return the name of the last module that gives several positions for each image."""
    body, places = backbone.body, list[str]()
    names = {module: name for name, module in body.named_modules()}

    def note(module: nn.Module, _inputs: Any, output: Any) -> None:
        if _has_positions(output):
            places.append(names[module])

    with trial(backbone, image_size) as images:
        up_to_pooling = getattr(body, FORWARD_FEATURES, None)
        if up_to_pooling and _has_positions(up_to_pooling(backbone.scaled(images))):
            return FORWARD_FEATURES
        with hooked(names, note):
            backbone(images)
    if not places:
        raise UsageError(
            f"backbone {backbone.name} has neither tokens nor a feature map; take its features "
            "as they are"
        )
    return places[-1]


def _has_positions(output: Any) -> bool:
    """Return whether these are features at several positions of two images."""
    if not isinstance(output, Tensor) or output.ndim not in (3, 4) or len(output) != 2:
        return False
    positions = output.shape[1:2] if output.ndim == 3 else output.shape[2:]
    return math.prod(positions) > 1


def prefix_tokens(body: nn.Module) -> int:
    """Return how many tokens of a network stand for no position: class and register tokens.

    Networks of timm tell; of torchvision's, only the ViT has such a token; of transformers', those
    that embed a class token, with the registers that their configuration names.
    """
    count = getattr(body, "num_prefix_tokens", None)
    if isinstance(count, int):
        return count
    parameters = {name.rpartition(".")[2]: t for name, t in body.named_parameters()}
    own = [t for name, t in parameters.items() if name in PREFIXES]
    return sum(1 if t.ndim < 2 else t.shape[-2] for t in own)


def as_tokens(output: Tensor, feature_dim: int) -> Float[Tensor, "batch tokens dim"]:
    """Return a feature map, channels first or (as in Swin) last, as tokens; tokens unchanged."""
    if output.ndim == 3:
        return output.float()
    channels_last = output.shape[-1] == feature_dim != output.shape[1]
    tokens = output.flatten(1, 2) if channels_last else output.flatten(2).transpose(1, 2)
    return tokens.float()


class AttentivePooling(nn.Module):
    """Mean tokens, weighted by what a learned query of each head attends to.

        pooled_h = sum_t softmax_t(a_h . x_t) x_t

    with standardized tokens x. A linear layer on top of it is multi-head cross-attention of one
    learned query: a_h = W_h^K^T q_h, the value projection is part of the layer, and the bias of
    the keys falls out of the softmax. Lee et al. Set transformer. ICML 2019, arXiv:1810.00825,
    section 3.2; as a probe in V-JEPA (arXiv:2404.08471) and CAPI (arXiv:2502.08769), and in this
    short form in Psomas et al. Attention, please! 2025, arXiv:2506.10178. `attention` has a column
    a_h for each head; zeros weight all tokens alike.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: Float[Tensor, " dim"],
        std: Float[Tensor, " dim"],
        attention: Float[Tensor, "dim heads"],
    ) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.attention = nn.Parameter(attention)

    @override
    def forward(self, tokens: Float[Tensor, "batch _ dim"]) -> Float[Tensor, "batch pooled"]:
        return pool_tokens((tokens - self.mean) / self.std, self.attention)


def pool_tokens(
    tokens: Float[Tensor, "batch _ dim"], attention: Float[Tensor, "dim heads"]
) -> Float[Tensor, "batch pooled"]:
    """Pool standardized tokens: the mean of each head after the other."""
    weights = (tokens @ attention).softmax(dim=1)
    return (weights.transpose(1, 2) @ tokens).flatten(1)
