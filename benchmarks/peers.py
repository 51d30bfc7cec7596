"""Training as in lightly's own examples: its transforms, heads and losses, in a plain loop."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.distributed import available_cpus

Loss = Callable[[list[Tensor]], Tensor]
Wired = tuple[list[nn.Module], Any, Loss]
"""The module to train, the transform of an image, and the loss of a list of views."""


class Images(torch.utils.data.Dataset[Any]):
    """Apply a transform to images, or to the files of paths, one by one."""

    def __init__(self, images: Sequence[Any], transform: Any) -> None:
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


def large_simclr(size: int) -> Wired:
    """SimCLR with an ordinary ResNet-50, for photos."""
    import torchvision
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.transforms import SimCLRTransform

    backbone: Any = torchvision.models.resnet50()
    backbone.fc = nn.Identity()
    branch = nn.Sequential(backbone, SimCLRProjectionHead(2048, 2048, 128))
    criterion = NTXentLoss()
    transform = SimCLRTransform(input_size=size)
    return [branch], transform, lambda views: criterion(branch(views[0]), branch(views[1]))


def simclr(size: int) -> Wired:
    """SimCLR: all views through one network."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.transforms import SimCLRTransform

    branch = nn.Sequential(network(), SimCLRProjectionHead(512, 512, 128))
    criterion = NTXentLoss()
    transform = SimCLRTransform(input_size=size, gaussian_blur=0.0)
    return [branch], transform, lambda views: criterion(branch(views[0]), branch(views[1]))


def moco(size: int) -> Wired:
    """MoCo: a momentum branch and a queue of 4096 keys."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import MoCoProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.transforms import MoCoV2Transform

    branch = nn.Sequential(network(), MoCoProjectionHead(512, 512, 128))
    target = copy.deepcopy(branch)
    deactivate_requires_grad(target)
    criterion = NTXentLoss(memory_bank_size=(4096, 128))

    def loss(views: list[Tensor]) -> Tensor:
        update_momentum(branch, target, m=0.996)
        query, key = branch(views[0]), target(views[1]).detach()
        found: Tensor = criterion(query, key)
        return found

    return [branch], MoCoV2Transform(input_size=size, gaussian_blur=0.0), loss


def byol(size: int) -> Wired:
    """BYOL: a momentum branch and a predictor."""
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.transforms import BYOLTransform, BYOLView1Transform, BYOLView2Transform

    branch = nn.Sequential(network(), BYOLProjectionHead(512, 1024, 256))
    predictor, target = BYOLPredictionHead(256, 1024, 256), copy.deepcopy(branch)
    deactivate_requires_grad(target)
    criterion = NegativeCosineSimilarity()

    def loss(views: list[Tensor]) -> Tensor:
        update_momentum(branch, target, m=0.996)
        p0, p1 = (predictor(branch(view)) for view in views)
        z0, z1 = (target(view).detach() for view in views)
        return torch.add(criterion(p0, z1), criterion(p1, z0)) / 2

    transform = BYOLTransform(
        view_1_transform=BYOLView1Transform(input_size=size, gaussian_blur=0.0),
        view_2_transform=BYOLView2Transform(input_size=size, gaussian_blur=0.0),
    )
    return [branch, predictor], transform, loss


def simsiam(size: int) -> Wired:
    """SimSiam: a predictor alone."""
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import SimSiamPredictionHead, SimSiamProjectionHead
    from lightly.transforms import SimSiamTransform

    branch = nn.Sequential(network(), SimSiamProjectionHead(512, 512, 512))
    predictor, criterion = SimSiamPredictionHead(512, 64, 512), NegativeCosineSimilarity()

    def loss(views: list[Tensor]) -> Tensor:
        z0, z1 = map(branch, views)
        p0, p1 = predictor(z0), predictor(z1)
        return torch.add(criterion(p0, z1.detach()), criterion(p1, z0.detach())) / 2

    return [branch, predictor], SimSiamTransform(input_size=size, gaussian_blur=0.0), loss


def nnclr(size: int) -> Wired:
    """NNCLR: a predictor and a support set of 4096 embeddings."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import (
        NNCLRPredictionHead,
        NNCLRProjectionHead,
        NNMemoryBankModule,
    )
    from lightly.transforms import SimCLRTransform

    branch = nn.Sequential(network(), NNCLRProjectionHead(512, 512, 128))
    predictor, bank = NNCLRPredictionHead(128, 512, 128), NNMemoryBankModule(size=(4096, 128))
    criterion = NTXentLoss()

    def loss(views: list[Tensor]) -> Tensor:
        z0, z1 = map(branch, views)
        p0, p1 = predictor(z0), predictor(z1)
        z0, z1 = bank(z0.detach(), update=False), bank(z1.detach(), update=True)
        return torch.add(criterion(z0, p1), criterion(z1, p0)) / 2

    return [branch, predictor], SimCLRTransform(input_size=size, gaussian_blur=0.0), loss


def swav(size: int) -> Wired:
    """SwAV: prototypes, with two views, as for small images."""
    from lightly.loss import SwaVLoss
    from lightly.models.modules import SwaVProjectionHead, SwaVPrototypes
    from lightly.transforms import SwaVTransform

    branch = nn.Sequential(network(), SwaVProjectionHead(512, 512, 128))
    prototypes, criterion = SwaVPrototypes(128, n_prototypes=512), SwaVLoss()

    def loss(views: list[Tensor]) -> Tensor:
        prototypes.normalize()
        scores = [prototypes(nn.functional.normalize(branch(view))) for view in views]
        found: Tensor = criterion(scores, [])
        return found

    transform = SwaVTransform(crop_sizes=(size, size), crop_counts=(2, 0), gaussian_blur=0.0)
    return [branch, prototypes], transform, loss


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
        trained, transform, loss_of = wire(size)
    parameters = [p for module in trained for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=weight_decay)
    loader: Iterable[list[Tensor]] = torch.utils.data.DataLoader(
        Images(images, transform),
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
                loss = loss_of([view.to(device, non_blocking=True) for view in views])
            there = nullcontext()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield


LIGHTLY = {wire.__name__: wire for wire in (simclr, moco, byol, simsiam, nnclr, swav)}
