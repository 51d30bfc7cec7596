"""Contrastive views in a plain torch DataLoader, made by the batch in the loader's workers.

python examples/dataloader.py FOLDER, which holds a folder of images per class.
"""

import sys

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18

import nearkin.objectives
import nearkin.transforms


def main(folder: str, workers: int = 2) -> float:
    """Train an encoder for one epoch with SimCLR's loss; return the last loss."""
    transform = nearkin.transforms.ViewTransform("simclr", size=64)
    loader = DataLoader(
        ImageFolder(folder),
        batch_size=8,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        collate_fn=transform.collate,
    )
    network = resnet18(num_classes=128)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    loss = torch.tensor(0.0)
    for views, _ in loader:
        z1, z2 = (torch.nn.functional.normalize(network(view), dim=1) for view in views)
        loss = nearkin.objectives.nt_xent(z1, z2, 0.2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main(sys.argv[1])
