"""Heads from features to classes, the known classes first."""

from collections import OrderedDict

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from nearkin.networks.branch import Backbone, mlp
from nearkin.objectives import look_up, unit


def linear_layer(features: int, dim: int) -> Backbone:
    """Return a linear layer to train on the features of a frozen network."""
    return Backbone(nn.Sequential(nn.Flatten(), nn.Linear(features, dim)), dim)


def rectified_layer(features: int, dim: int) -> Backbone:
    """Return a layer to train on the features of a frozen network: linear, batch norm, ReLU.

    Its features are not negative, as those of a ResNet are: pseudo-labels by the similarity or the
    ranks of features rely on that (NCL, AutoNovel).
    """
    linear = nn.Linear(features, dim, bias=False)
    return Backbone(nn.Sequential(nn.Flatten(), linear, nn.BatchNorm1d(dim), nn.ReLU()), dim)


class Heads(nn.Module):
    """A linear head for the known classes and one for the novel ones (Zhong et al. 2021)."""

    def __init__(self, features: int, num_known: int, num_novel: int) -> None:
        super().__init__()
        self.known = nn.Linear(features, num_known)
        self.novel = nn.Linear(features, num_novel)

    @override
    def forward(self, features: Float[Tensor, "n f"]) -> Float[Tensor, "n classes"]:
        """Logits of all classes."""
        return torch.cat([self.known(features), self.novel(features)], dim=1)


class CosineHead(nn.Module):
    """Cosine similarities to one unit prototype per class, divided by a temperature above 0."""

    def __init__(self, features: int, num_classes: int, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        # Only directions count, and a step of SGD turns them by lr / length^2: prototypes start
        # as rows of a linear layer, as the weight-normalized ones of DINO and SimGCD do.
        self.weight = nn.Linear(features, num_classes, bias=False).weight

    @override
    def forward(self, features: Float[Tensor, "n f"]) -> Float[Tensor, "n classes"]:
        """Logits of all classes."""
        return look_up(unit(features), unit(self.weight), self.temperature)


class Prototypes(nn.Module):
    """Cosine similarities to one prototype per class, which training keeps at length one."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(unit(torch.randn(num_classes, dim)))

    @override
    def forward(self, x: Float[Tensor, "n dim"]) -> Float[Tensor, "n classes"]:
        return look_up(unit(x), self.weight, temperature=1.0)


def projected_prototypes(features: int, hidden: int, dim: int, num_classes: int) -> nn.Module:
    """Return prototypes on top of a projector (Fini et al. 2021, section 3.2)."""
    parts = {"projector": mlp(features, hidden, dim), "prototypes": Prototypes(dim, num_classes)}
    return nn.Sequential(OrderedDict(parts))


class MultiHead(nn.Module):
    """Prototypes of known classes, and several heads for novel ones; that of least loss is used.

    `losses` holds the average loss of each head.
    """

    losses: Tensor

    def __init__(
        self,
        features: int,
        hidden: int,
        dim: int,
        num_known: int,
        num_novel: int,
        num_heads: int,
        temperature: float,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.known = Prototypes(features, num_known)
        self.novel = nn.ModuleList(
            projected_prototypes(features, hidden, dim, num_novel) for _ in range(num_heads)
        )
        self.register_buffer("losses", torch.zeros(num_heads))

    @override
    def forward(self, features: Float[Tensor, "n f"]) -> Float[Tensor, "n classes"]:
        """Logits of all classes."""
        novel: Tensor = self.novel[int(self.losses.argmin())](features)
        return torch.cat([self.known(features), novel], dim=1) / self.temperature
