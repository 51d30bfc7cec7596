"""Probes on a frozen encoder: linear on its features, attentive on its tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from nearkin.classification.data import LabeledData
from nearkin.classifier.calibration import fit_calibration
from nearkin.classifier.classifier import Classifier
from nearkin.classifier.features import UNTOUCHED
from nearkin.classifier.reference import reference_of
from nearkin.config import ClassifyConfig
from nearkin.encoders.encoder import Encoder
from nearkin.evaluation.attentive import tokens_of
from nearkin.metrics.attentive import train_attentive_probe
from nearkin.metrics.probe import Choice, Validated, held_out_logits, train_probe
from nearkin.metrics.selection import balanced
from nearkin.networks.tokens import AttentivePooling, TokenFeatures
from nearkin.run.opening import OpenRun

MAX_NUMBERS: Final = 2**28  # In the tokens that an attentive probe is trained on: 1 GiB


@dataclass(frozen=True, eq=False)
class Trained:
    """What a training leaves: a network, a layer from its features to classes, and the choice."""

    encoder: Encoder  # Frozen, or fine-tuned
    head: nn.Linear
    validated: Validated  # Predictions of training images while held out; rows among all images
    chosen: Mapping[str, float]  # The values that were chosen, by name
    protocol: str  # What was chosen on what, in a sentence
    layers: str  # As in the settings; `linear` where fine-tuning was not better
    pooling: AttentivePooling | None = None
    """Of the encoder's tokens, if these are what is classified."""

    @cached_property
    def probability(self) -> Float[np.ndarray, "held_out classes"]:
        """Of each class, of training images while held out."""
        from scipy.special import softmax

        return np.asarray(softmax(self.validated.logits, axis=1))

    def classifier(self, data: LabeledData, features: Float[Tensor, "images dim"]) -> Classifier:
        """Return the classifier, calibrated on training images while they were held out.

        `features` are those that it takes, of all images.
        """
        validated, calibration = self.validated, None
        if len(validated.rows):
            groups = data.images.groups[validated.rows]
            calibration = fit_calibration(self.probability, validated.target, groups)
        rows = data.train_rows
        learned, labels = features[torch.from_numpy(rows)], data.train_labels[rows]
        return Classifier(
            layer=nn.Identity(),
            heads=self.head.eval().requires_grad_(False),
            classes=data.classes,
            num_known=data.num_classes,
            calibration=calibration,
            drawn=UNTOUCHED,
            reference=reference_of(learned, labels, np.ones(len(rows), bool), data.num_classes),
            kind="classification",
            pooling=self.pooling,
            digest=self.encoder.digest,
        )


def linear_layer(
    weight: Float[Tensor, "classes dim"], bias: Float[Tensor, " classes"]
) -> nn.Linear:
    """Return a layer with these weights and biases, copied."""
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def _chosen(choice: Choice) -> str:
    """Say which regularization was chosen on which images."""
    if not choice.images:
        return (
            f"C is {choice.strength:g}, the default: with one training image, or one group, of "
            "each class none can be held out to choose it on."
        )
    return (
        f"C {choice.strength:g} was chosen on {choice.images} training images, each predicted by "
        "a fit without it."
    )


def train_linear(
    encoder: Encoder, features: Float[Tensor, "images dim"], data: LabeledData, seed: int
) -> Trained:
    """Train a linear probe on the features of the training images."""
    of: Any = {"seed": seed, "groups": data.images.groups}
    labels = data.train_labels
    probe = train_probe(features, labels, **of)
    return Trained(
        encoder,
        linear_layer(*probe.layer()),
        held_out_logits(features, labels, probe.choice, **of),
        {"C": probe.choice.strength},
        f"Logistic regression on standardized features of the frozen encoder. "
        f"{_chosen(probe.choice)}",
        "linear",
    )


def train_attentive(run: OpenRun[ClassifyConfig], encoder: Encoder, data: LabeledData) -> Trained:
    """Train an attentive probe on the tokens of the training images.

    Of more images than fit into memory, as many of each class are taken as possible.
    """
    network = TokenFeatures(encoder.backbone, encoder.image_size)
    most = max(2, data.num_classes, MAX_NUMBERS // (network.num_tokens * network.dim))
    rows = data.train_rows[balanced(data.train_labels[data.train_rows], most)]
    images = data.images.subset(rows)
    network.to(run.device).to(memory_format=torch.channels_last)
    tokens = tokens_of(
        network,
        encoder,
        images,
        device=run.device,
        workers=int(run.config.workers),
        on_progress=run.log.progress,
    )
    probe, validated = train_attentive_probe(
        tokens, images.labels, seed=run.config.seed, groups=images.groups
    )
    some = f" of {len(data.train_rows)}" if len(rows) < len(data.train_rows) else ""
    return Trained(
        encoder,
        linear_layer(probe.weight.T, probe.bias),
        validated.at(rows),
        {"C": validated.choice.strength},
        f"Attentive pooling of {network.num_tokens} tokens of the frozen encoder by "
        f"{probe.pooling.attention.shape[1]} heads of one learned query, and logistic regression, "
        f"on {len(rows)}{some} training images. {_chosen(validated.choice)}",
        "attentive",
        probe.pooling,
    )
