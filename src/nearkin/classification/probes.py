"""Probes on a frozen encoder: linear on its features, attentive on its tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nearkin.classification.data import LabeledData
from nearkin.classifier.reference import evenly
from nearkin.encoders.encoder import Encoder
from nearkin.evaluation.attentive import tokens_of
from nearkin.metrics.attentive import train_attentive_probe
from nearkin.metrics.probe import LinearProbe, Validated, held_out_logits, train_probe
from nearkin.networks.tokens import AttentivePooling, TokenFeatures
from nearkin.pace import ProgressCallback

MAX_NUMBERS: Final = 2**28  # In the tokens that an attentive probe is trained on: 1 GiB


@dataclass(frozen=True, eq=False)
class Trained:
    """What a training leaves: a network, a layer from its features to classes, and the choice."""

    encoder: Encoder  # Frozen, or fine-tuned
    pooling: AttentivePooling | None  # Of the encoder's tokens, if these are what is classified
    head: nn.Linear
    validated: Validated  # Predictions of training images while held out; rows among all images
    chosen: Mapping[str, float]  # The values that were chosen, by name
    protocol: str  # What was chosen on what, in a sentence


def linear_layer(
    weight: Float[Tensor, "classes dim"], bias: Float[Tensor, " classes"]
) -> nn.Linear:
    """Return a layer with these weights and biases, copied."""
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer


def head_of(probe: LinearProbe) -> nn.Linear:
    """Return a linear probe as a layer that takes features as they are."""
    return linear_layer(*probe.layer())


def choice(validated: Validated, name: str, value: float) -> str:
    """Say what was chosen on which images."""
    if not validated.choice.images:
        return (
            f"{name} is {value:g}, the default: with one training image of each class none can "
            "be held out to choose it on."
        )
    return (
        f"{name} {value:g} was chosen on {validated.choice.images} training images, "
        "each predicted by a fit without it."
    )


def train_linear(
    encoder: Encoder, features: Float[Tensor, "images dim"], data: LabeledData, seed: int
) -> Trained:
    """Train a linear probe on the features of the training images."""
    groups = data.images.groups
    labels = data.train_labels
    probe = train_probe(features, labels, seed=seed, groups=groups)
    validated = held_out_logits(features, labels, probe.choice, seed=seed, groups=groups)
    return Trained(
        encoder,
        None,
        head_of(probe),
        validated,
        {"C": probe.choice.strength},
        f"Logistic regression on standardized features of the frozen encoder. "
        f"{choice(validated, 'C', probe.choice.strength)}",
    )


def train_attentive(
    encoder: Encoder,
    data: LabeledData,
    seed: int,
    device: torch.device,
    workers: int,
    on_progress: ProgressCallback,
) -> Trained:
    """Train an attentive probe on the tokens of the training images.

    Of more images than fit into memory, as many of each class are taken as possible.
    """
    network = TokenFeatures(encoder.backbone, encoder.image_size)
    most = max(2, data.num_classes, MAX_NUMBERS // (network.num_tokens * network.dim))
    rows = evenly(data.train_labels, data.train_rows, most)
    images = data.images.subset(rows)
    network.to(device).to(memory_format=torch.channels_last)
    tokens = tokens_of(
        network, encoder, images, device=device, workers=workers, on_progress=on_progress
    )
    probe, validated = train_attentive_probe(
        tokens, data.train_labels[rows], seed=seed, groups=images.groups
    )
    some = f" of {len(data.train_rows)}" if len(rows) < len(data.train_rows) else ""
    return Trained(
        encoder,
        probe.pooling,
        linear_layer(probe.weight.T, probe.bias),
        validated.at(rows),
        {"C": validated.choice.strength},
        f"Attentive pooling of {network.num_tokens} tokens of the frozen encoder by "
        f"{probe.pooling.attention.shape[1]} learned queries, and logistic regression, on "
        f"{len(rows)}{some} training images. "
        f"{choice(validated, 'C', validated.choice.strength)}",
    )
