"""Training as in lightly's own examples: its transforms, heads and losses, in a plain loop.

How lightly's parts make a method is one function per method, such as `byol_loss`; the sizes of
heads and the transforms are those of the examples here, and those of its CIFAR-10 benchmark in
reproduce/theirs.py.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nearkin.distributed import available_cpus

Loss = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, eq=False)
class Wired:
    """A method made of lightly's parts."""

    trained: Sequence[nn.Module]  # The first of them is a backbone with its projector
    transform: Any  # From an image to its views
    loss: Loss  # Of a list of batches of views
    memory: Sequence[nn.Module] = ()  # Momentum branch and banks: what no gradient changes


class Images(torch.utils.data.Dataset[Any]):
    """Apply a transform to images, or to the files of paths, one by one."""

    def __init__(self, images: Sequence[Any] | np.ndarray, transform: Any) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> Any:
        from PIL import Image

        held = self.images[row]
        opened = Image.open(held).convert("RGB") if isinstance(held, Path) else None
        return self.transform(opened or Image.fromarray(held))


def network() -> Any:
    """Return a ResNet-18 with the stem for small images, without classifier."""
    import torchvision

    found: Any = torchvision.models.resnet18()
    found.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    found.maxpool, found.fc = nn.Identity(), nn.Identity()
    return found


def momentum_copy(branch: nn.Module) -> nn.Module:
    """Return a copy without gradients, for `update_momentum`."""
    from lightly.models.utils import deactivate_requires_grad

    target = copy.deepcopy(branch)
    deactivate_requires_grad(target)
    return target


def simclr_loss(branch: nn.Module, criterion: nn.Module) -> Loss:
    """SimCLR: all views through one network."""
    return lambda views: criterion(branch(views[0]), branch(views[1]))


def byol_loss(branch: nn.Module, predictor: nn.Module, target: nn.Module, momentum: float) -> Loss:
    """BYOL: predict the momentum branch's embedding of the other view."""
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.utils import update_momentum

    criterion = NegativeCosineSimilarity()

    def loss(views: list[Tensor]) -> Tensor:
        update_momentum(branch, target, m=momentum)
        p0, p1 = (predictor(branch(view)) for view in views)
        z0, z1 = (target(view).detach() for view in views)
        return torch.add(criterion(p0, z1), criterion(p1, z0)) / 2

    return loss


def simsiam_loss(branch: nn.Module, predictor: nn.Module) -> Loss:
    """SimSiam: predict the embedding of the other view, which gets no gradient."""
    from lightly.loss import NegativeCosineSimilarity

    criterion = NegativeCosineSimilarity()

    def loss(views: list[Tensor]) -> Tensor:
        z0, z1 = map(branch, views)
        p0, p1 = predictor(z0), predictor(z1)
        return torch.add(criterion(p0, z1.detach()), criterion(p1, z0.detach())) / 2

    return loss


def nnclr_loss(branch: nn.Module, predictor: nn.Module, bank: nn.Module) -> Loss:
    """NNCLR: predict the nearest neighbor of the other view's embedding in a bank."""
    from lightly.loss import NTXentLoss

    criterion = NTXentLoss()

    def loss(views: list[Tensor]) -> Tensor:
        z0, z1 = map(branch, views)
        p0, p1 = predictor(z0), predictor(z1)
        z0, z1 = bank(z0.detach(), update=False), bank(z1.detach(), update=True)
        return torch.add(criterion(z0, p1), criterion(z1, p0)) / 2

    return loss


def swav_loss(branch: nn.Module, prototypes: Any) -> Loss:
    """SwAV: predict the prototypes of the other view; two views, as for small images."""
    from lightly.loss import SwaVLoss

    criterion = SwaVLoss()

    def loss(views: list[Tensor]) -> Tensor:
        prototypes.normalize()
        scores = [prototypes(nn.functional.normalize(branch(view))) for view in views]
        found: Tensor = criterion(scores, [])
        return found

    return loss


def large_simclr(size: int) -> Wired:
    """SimCLR with an ordinary ResNet-50, for photos."""
    import torchvision
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.transforms import SimCLRTransform

    backbone: Any = torchvision.models.resnet50()
    backbone.fc = nn.Identity()
    branch = nn.Sequential(backbone, SimCLRProjectionHead(2048, 2048, 128))
    return Wired([branch], SimCLRTransform(input_size=size), simclr_loss(branch, NTXentLoss()))


def simclr(size: int) -> Wired:
    """SimCLR."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.transforms import SimCLRTransform

    branch = nn.Sequential(network(), SimCLRProjectionHead(512, 512, 128))
    transform = SimCLRTransform(input_size=size, gaussian_blur=0.0)
    return Wired([branch], transform, simclr_loss(branch, NTXentLoss()))


def moco(size: int) -> Wired:
    """MoCo: a momentum branch and a queue of 4096 keys."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import MoCoProjectionHead
    from lightly.models.utils import update_momentum
    from lightly.transforms import MoCoV2Transform

    branch = nn.Sequential(network(), MoCoProjectionHead(512, 512, 128))
    target, criterion = momentum_copy(branch), NTXentLoss(memory_bank_size=(4096, 128))

    def loss(views: list[Tensor]) -> Tensor:
        update_momentum(branch, target, m=0.996)
        query, key = branch(views[0]), target(views[1]).detach()
        found: Tensor = criterion(query, key)
        return found

    transform = MoCoV2Transform(input_size=size, gaussian_blur=0.0)
    return Wired([branch], transform, loss, [target, criterion])


def byol(size: int) -> Wired:
    """BYOL."""
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead

    branch = nn.Sequential(network(), BYOLProjectionHead(512, 1024, 256))
    predictor, target = BYOLPredictionHead(256, 1024, 256), momentum_copy(branch)
    loss = byol_loss(branch, predictor, target, momentum=0.996)
    return Wired([branch, predictor], byol_transform(size), loss, [target])


def byol_transform(size: int) -> Any:
    """BYOL's two different views, without blur, as for small images."""
    from lightly.transforms import BYOLTransform, BYOLView1Transform, BYOLView2Transform

    return BYOLTransform(
        view_1_transform=BYOLView1Transform(input_size=size, gaussian_blur=0.0),
        view_2_transform=BYOLView2Transform(input_size=size, gaussian_blur=0.0),
    )


def simsiam(size: int) -> Wired:
    """SimSiam."""
    from lightly.models.modules import SimSiamPredictionHead, SimSiamProjectionHead
    from lightly.transforms import SimSiamTransform

    branch = nn.Sequential(network(), SimSiamProjectionHead(512, 512, 512))
    predictor = SimSiamPredictionHead(512, 64, 512)
    transform = SimSiamTransform(input_size=size, gaussian_blur=0.0)
    return Wired([branch, predictor], transform, simsiam_loss(branch, predictor))


def nnclr(size: int) -> Wired:
    """NNCLR: a support set of 4096 embeddings."""
    from lightly.models.modules import (
        NNCLRPredictionHead,
        NNCLRProjectionHead,
        NNMemoryBankModule,
    )
    from lightly.transforms import SimCLRTransform

    branch = nn.Sequential(network(), NNCLRProjectionHead(512, 512, 128))
    predictor, bank = NNCLRPredictionHead(128, 512, 128), NNMemoryBankModule(size=(4096, 128))
    transform = SimCLRTransform(input_size=size, gaussian_blur=0.0)
    return Wired([branch, predictor], transform, nnclr_loss(branch, predictor, bank), [bank])


def swav(size: int) -> Wired:
    """SwAV."""
    from lightly.models.modules import SwaVProjectionHead, SwaVPrototypes
    from lightly.transforms import SwaVTransform

    branch = nn.Sequential(network(), SwaVProjectionHead(512, 512, 128))
    prototypes = SwaVPrototypes(128, n_prototypes=512)
    transform = SwaVTransform(crop_sizes=(size, size), crop_counts=(2, 0), gaussian_blur=0.0)
    return Wired([branch, prototypes], transform, swav_loss(branch, prototypes))


def training(
    wire: Callable[[int], Wired],
    images: Any,
    *,
    batch_size: int,
    size: int,
    lr: float,
    weight_decay: float,
    device: str = "cpu",
) -> Iterator[None]:
    """Yield steps, epoch after epoch, with a loader worker per CPU core."""
    with torch.device(device):
        wired = wire(size)
    parameters = [p for module in wired.trained for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=weight_decay)
    loader: Iterable[list[Tensor]] = torch.utils.data.DataLoader(
        Images(images, wired.transform),
        batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=available_cpus(),
        pin_memory=device != "cpu",
    )
    there: Any = torch.device(device)  # for the first loss, which creates the banks
    while True:
        for views in loader:
            with there:
                loss = wired.loss([view.to(device, non_blocking=True) for view in views])
            there = nullcontext()
            update(optimizer, loss)
            yield


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take a step down the gradient of a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


LIGHTLY = {wire.__name__: wire for wire in (simclr, moco, byol, simsiam, nnclr, swav)}
