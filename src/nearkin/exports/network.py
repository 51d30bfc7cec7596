"""The network of a graph: from images as files hold them to features or probabilities."""

from jaxtyping import Float, Shaped
from torch import Tensor, nn
from typing_extensions import override

from nearkin.classifier.classifier import Classifier, apply_layer, class_probability
from nearkin.encoders.encoder import Encoder


class PixelNetwork(nn.Module):
    """From images of 8 bits to features or, with a classifier, to calibrated probabilities.

    They are those of `Encoder` and of `nearkin predict`.
    """

    def __init__(self, encoder: Encoder, classifier: Classifier | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.top = Probabilities(classifier) if classifier else nn.Identity()
        self.output = "probabilities" if classifier else "features"
        self.eval().requires_grad_(False)

    @override
    def forward(self, images: Shaped[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch _"]:
        outputs: Tensor = self.top(self.encoder(self.encoder.preprocessing.to_input(images)))
        return outputs


class Probabilities(nn.Module):
    """From an encoder's features to the calibrated probabilities of a classifier's classes."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.layer = classifier.layer
        self.heads = classifier.heads
        self.temperature = classifier.calibration.temperature if classifier.calibration else 1.0

    @override
    def forward(self, features: Float[Tensor, "batch _"]) -> Float[Tensor, "batch classes"]:
        top = apply_layer(self.layer, features)
        probability = class_probability(self.heads, top)
        power = probability ** (1 / self.temperature)  # as `Calibration.apply`
        return (power / power.sum(dim=1, keepdim=True)).float()
