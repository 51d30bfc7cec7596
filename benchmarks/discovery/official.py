"""SimGCD by its authors' losses and head, on the layer, the start and the batches of ours.

They come from model.py of a checkout of CVMI-Lab/SimGCD, of which nothing is copied here; what
their train.py has between them is restated.
"""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from nearkin.classifier.classifier import heads_of
from nearkin.discovery.stages import Stage
from nearkin.discovery.task import DiscoveryTask
from nearkin.method import Method
from nearkin.networks.branch import Branch
from nearkin.networks.heads import CosineHead
from nearkin.types import UNLABELED, Batch, Encoded, Step


class Heads(nn.Module):
    """The classifier of the authors' head."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head

    @override
    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)[1] / 0.1
        return logits

    def __deepcopy__(self, memo: dict[int, Any]) -> CosineHead:
        """Return the same classifier: what `weight_norm` keeps cannot be copied."""
        layer = self.head.last_layer
        copied = CosineHead(layer.in_features, layer.out_features, temperature=0.1)
        copied.weight.data.copy_(layer.weight_v)
        return copied


class OfficialSimGCD(Method[None]):
    """`train.py`, with the entropy weight of a script."""

    def __init__(
        self, official: Any, online: Branch, head: Any, *, epochs: int, entropy_weight: float
    ) -> None:
        super().__init__()
        self.official, self.online, self.heads = official, online, Heads(head)
        self.epochs, self.entropy_weight = epochs, entropy_weight
        falls = max(1, round(30 / 200 * epochs))
        self.distill = official.DistillLoss(falls, epochs, 2, 0.07, 0.04)

    @override
    def encode(self, batch: Batch) -> Encoded:
        return self.online.features(torch.cat(batch.views)).chunk(2)

    @override
    def compute_loss(self, encoded: Encoded, batch: Batch, progress: float) -> Step[None]:
        known, label = batch.label != UNLABELED, batch.label
        z, out = self.heads.head(torch.cat(encoded))
        epoch = min(int(progress * self.epochs), self.epochs - 1)
        cluster = self.distill(out, out.detach(), epoch)
        mean = (out / 0.1).softmax(1).mean(0)
        cluster = cluster + self.entropy_weight * (math.log(len(mean)) + (mean * mean.log()).sum())
        logits, zeros = self.official.info_nce_logits(features=z, device="cpu")
        contrast = F.cross_entropy(logits, zeros)
        views = torch.stack([F.normalize(part[known], dim=-1) for part in z.chunk(2)], dim=1)
        same = self.official.SupConLoss()(views, labels=label[known])
        taught = F.cross_entropy((out / 0.1)[known.repeat(2)], label[known].repeat(2))
        return Step(0.65 * (cluster + contrast) + 0.35 * (taught + same), None)


def by_authors(stage: Stage, task: DiscoveryTask, checkout: Path) -> Stage:
    """Put the authors' loss and head in the place of ours, which has not been trained yet."""
    spec = importlib.util.spec_from_file_location("simgcd_model", checkout / "model.py")
    assert spec is not None
    assert spec.loader is not None
    official = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(official)
    options, epochs = stage.config.options, int(stage.config.epochs)
    torch.manual_seed(stage.config.seed)
    head = official.DINOHead(
        stage.method.backbone.feature_dim, task.num_known + task.num_novel, nlayers=3,
        hidden_dim=options["hidden_dim"], bottleneck_dim=options["dim"],
    )  # fmt: skip
    head.last_layer.weight_v.data.copy_(heads_of(stage.method).get_parameter("weight"))
    weight = float(options["entropy_weight"])
    method = OfficialSimGCD(
        official, stage.method.online, head, epochs=epochs, entropy_weight=weight
    )
    return replace(stage, method=method)
