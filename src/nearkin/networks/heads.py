"""From features to classes: heads over known and novel classes, the known ones first."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override


class Heads(nn.Module):
    """A linear head for the known classes and one for the novel ones (Zhong et al. 2021).

    Args:
        features: Numbers in a feature vector.
        num_known: Classes that have labels.
        num_novel: Classes to find.
    """

    def __init__(self, features: int, num_known: int, num_novel: int) -> None:
        super().__init__()
        self.known = nn.Linear(features, num_known)
        self.novel = nn.Linear(features, num_novel)

    @override
    def forward(self, features: Float[Tensor, "n f"]) -> Float[Tensor, "n classes"]:
        """Logits of all classes."""
        return torch.cat([self.known(features), self.novel(features)], dim=1)


class CosineHead(nn.Module):
    """Cosine similarities to one unit prototype per class, divided by a temperature.

    Args:
        features: Numbers in a feature vector.
        num_classes: Known and novel classes together.
        temperature: Above 0.
    """

    def __init__(self, features: int, num_classes: int, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.weight = nn.Parameter(torch.randn(num_classes, features))

    @override
    def forward(self, features: Float[Tensor, "n f"]) -> Float[Tensor, "n classes"]:
        """Logits of all classes."""
        cosines = F.normalize(features, dim=1) @ F.normalize(self.weight, dim=1).T
        return cosines / self.temperature
