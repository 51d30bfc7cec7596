"""MoCo over any `nn.Module`, in a loop of plain PyTorch."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nearkin.methods import MoCo
from nearkin.types import UNLABELED, Batch


def augment(images: Tensor) -> Tensor:
    """Your own augmentation; this one flips at random and adds noise."""
    return images.flip(3) if torch.rand(()) < 0.5 else images + 0.1 * torch.randn_like(images)


def train(backbone: nn.Module, images: Tensor, epochs: int = 5) -> list[float]:
    """Pretrain a network in place; return the loss of every step."""
    method = MoCo(backbone, queue_size=256, bn_groups=1)
    optimizer = torch.optim.SGD(method.parameters(), lr=0.03, momentum=0.9)
    data = TensorDataset(images, torch.arange(len(images)))
    loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
    losses = []
    for epoch in range(epochs):
        progress = epoch / epochs  # from 0 to 1 over the training
        for x, index in loader:
            batch = Batch((augment(x), augment(x)), index, torch.full_like(index, UNLABELED))
            step = method(batch, progress)
            optimizer.zero_grad()
            step.loss.backward()
            optimizer.step()
            method.commit(step.memo, progress)
            losses.append(step.loss.item())
    return losses


if __name__ == "__main__":
    network = nn.Sequential(nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    print(train(network, torch.randn(512, 3, 32, 32))[::16])
