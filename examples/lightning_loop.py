"""MoCo in Lightning: its trainer takes the steps, and the method writes its memory after each.

Needs `pip install lightning`. Views come from `nearkin.transforms`, in the loader's workers.
"""

from collections.abc import Sequence
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nearkin.methods import MoCo
from nearkin.transforms import ViewTransform
from nearkin.types import UNLABELED, Batch


class Pretraining(lightning.LightningModule):
    """Any method of nearkin as a Lightning module."""

    def __init__(self, method: nn.Module, lr: float = 0.03) -> None:
        super().__init__()
        self.method = method
        self.lr = lr

    def training_step(self, batch: tuple[tuple[Tensor, ...], Tensor], number: int) -> Tensor:
        views, index = batch
        progress = self.global_step / self.trainer.estimated_stepping_batches  # from 0 to 1
        step = self.method(Batch(views, index, torch.full_like(index, UNLABELED)), progress)
        self.memo = step.memo, progress
        self.log("loss", step.loss, prog_bar=True)
        return step.loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.method.commit(*self.memo)  # after the optimizer's step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.method.parameters(), lr=self.lr, momentum=0.9)


def train(backbone: nn.Module, images: Sequence[Any], **trainer: Any) -> float:
    """Pretrain a network in place on images of any kind; return the last loss."""
    transform = ViewTransform("moco_v2", size=32)
    loader = DataLoader(
        [(image, index) for index, image in enumerate(images)],
        batch_size=16,
        shuffle=True,
        drop_last=True,
        collate_fn=transform.collate,
    )
    pretraining = Pretraining(MoCo(backbone, queue_size=64, bn_groups=1))
    run = lightning.Trainer(**trainer)
    run.fit(pretraining, loader)
    return float(run.callback_metrics["loss"])


if __name__ == "__main__":
    network = nn.Sequential(nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    print(train(network, torch.rand(512, 3, 32, 32), max_epochs=2))
