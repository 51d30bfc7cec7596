"""MoCo in Accelerate: it places the parts and scales the gradients; the loop stays plain PyTorch.

Needs `pip install accelerate`.
"""

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nearkin.methods import MoCo
from nearkin.transforms import ViewTransform
from nearkin.types import UNLABELED, Batch


def train(accelerator: Accelerator, backbone: nn.Module, images: Tensor, epochs: int) -> float:
    """Pretrain a network in place on uint8 images (n, 3, height, width); return the last loss."""
    transform = ViewTransform("moco_v2", size=32)
    method = MoCo(backbone, queue_size=64, bn_groups=1)
    optimizer = torch.optim.SGD(method.parameters(), lr=0.03, momentum=0.9)
    data = TensorDataset(images, torch.arange(len(images)))
    loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    prepared, optimizer, loader = accelerator.prepare(method, optimizer, loader)
    loss = torch.tensor(0.0)
    for epoch in range(epochs):
        progress = epoch / epochs  # from 0 to 1 over the training
        for x, index in loader:
            views = transform(x)  # on the device of the images
            step = prepared(Batch(views, index, torch.full_like(index, UNLABELED)), progress)
            optimizer.zero_grad()
            accelerator.backward(step.loss)
            optimizer.step()
            method.commit(step.memo, progress)  # after the optimizer's step
            loss = step.loss.detach()
    return loss.item()


if __name__ == "__main__":
    network = nn.Sequential(nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    pixels = torch.randint(0, 256, (512, 3, 32, 32), dtype=torch.uint8)
    print(train(Accelerator(), network, pixels, epochs=2))
