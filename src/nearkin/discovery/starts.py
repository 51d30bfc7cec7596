"""Where the heads over classes start: at clusters, so that no class starts without pictures."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nearkin.discovery.arms import clustered_arm
from nearkin.discovery.classifier import heads_of, on_top, still
from nearkin.discovery.task import Task
from nearkin.discovery.trunk import Trunk
from nearkin.method import Method
from nearkin.networks.heads import Heads
from nearkin.objectives import unit
from nearkin.types import UNKNOWN


@dataclass(frozen=True, eq=False)
class Start:
    """K-means on the features of a network that has learned the known classes.

    Many classes of few pictures are otherwise found late or never: a random head gives most of
    them no picture, and what has no picture has no gradient (Han et al. 2019, section 3.1, begin
    at clusters too; measured in docs/discovery.md).
    """

    features: Float[Tensor, "learned dim"]
    """Of the pictures to learn from."""
    novel: Int64[Tensor, " learned"]
    """Their clusters among the novel classes, from 0; `UNKNOWN` for labeled pictures."""
    joint: Int64[Tensor, " learned"]
    """Their clusters among all classes."""

    @torch.no_grad()
    def aim(self, method: Method[Any]) -> None:
        """Let a method's heads start at the clusters."""
        heads = heads_of(method)
        device = next(heads.parameters()).device
        if isinstance(heads, Heads):
            rest = self.novel != UNKNOWN
            middle = self.features[rest].mean(dim=0)
            count = heads.novel.out_features
            weight = unit(means(self.features[rest], self.novel[rest], count) - middle)
            heads.novel.weight.copy_(weight.to(device))
            heads.novel.bias.copy_(-(weight @ middle).to(device))
        else:
            prototypes = heads.get_parameter("weight")
            prototypes.copy_(means(unit(self.features), self.joint, len(prototypes)).to(device))


Begun = tuple[Method[Any], Start | None]
"""What the last stage starts from: a network that knows the known classes, and clusters."""


def begun(trunk: Trunk, known: Method[Any], task: Task, seed: int, start: str) -> Begun:
    """What the last stage starts from, where its classes start at `clusters` or at `random`."""
    return known, start_of(trunk, known, task, seed) if start == "clusters" else None


def start_of(trunk: Trunk, known: Method[Any], task: Task, seed: int) -> Start:
    """The clusters of the pictures to learn from.

    Args:
        trunk: What the network stands on.
        known: The known stage's method, trained.
        task: The pictures.
        seed: Of k-means.
    """
    looks, layer = trunk.seen(known)
    with torch.no_grad():
        features = on_top(still(layer), looks.center[torch.from_numpy(task.rows)])
    learned = replace(task, label=task.label[task.rows], rows=np.arange(len(task.rows)))
    arm = clustered_arm(features, learned, seed)
    novel = np.where(learned.label == UNKNOWN, arm.novel - task.num_known, UNKNOWN)
    return Start(features, torch.from_numpy(novel), torch.from_numpy(arm.joint))


def means(
    features: Float[Tensor, "n dim"], cluster: Int64[Tensor, " n"], count: int
) -> Float[Tensor, "clusters dim"]:
    """The mean of each cluster; zero for one without rows.

    >>> means(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 2]), 3)
    tensor([[2.],
            [0.],
            [5.]])
    """
    member = torch.nn.functional.one_hot(cluster, count).to(features.dtype)
    return member.T @ features / member.sum(dim=0).clamp(min=1)[:, None]
