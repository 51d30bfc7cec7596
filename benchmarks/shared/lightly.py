"""lightly's methods as its own CIFAR-10 benchmark wires them, for speed and for accuracy.

Heads, losses, views, temperatures and momenta are those of `cifar10_benchmark.py` in lightly's
documentation; batch norms of MoCo are split eightfold, its keys shuffled, its loss has both
directions. With nearkin's small network only the width of its features differs. The width of banks
and the largest crop of SwAV, which lightly 1.6 wants to be told, are those it had before.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from nearkin.distributed import available_cpus
from nearkin.networks.backbone import SMALL

Loss = Callable[[list[Tensor]], Tensor]
BANK: Final = 4096
SPLITS: Final = 8  # of MoCo's batch norms
WIDTH: Final = {"small": 256, "resnet18": 512}  # features


@dataclass(frozen=True, eq=False)
class Wired:
    """A method made of lightly's parts."""

    trained: Sequence[nn.Module]  # The first of them is a backbone with its projector
    transform: Any  # From an image to its views
    loss: Loss  # Of a list of batches of views
    memory: Sequence[nn.Module] = ()  # Momentum branch and banks: what no gradient changes


class Images(torch.utils.data.Dataset[Any]):
    """Apply a transform to images one by one."""

    def __init__(self, images: np.ndarray, transform: Any) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> Any:
        return self.transform(Image.fromarray(self.images[row]))


def backbone(network: str, splits: int = 0) -> nn.Module:
    """Return an untrained network: lightly's own ResNet, or nearkin's small one."""
    from lightly.models import ResNetGenerator
    from lightly.models.batchnorm import get_norm_layer

    if network == "resnet18":
        layers = list(ResNetGenerator("resnet-18", num_splits=splits).children())
        return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten())
    body = SMALL[network]()
    for module in [*body.modules()] if splits else ():
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, get_norm_layer(child.num_features, splits))
    return body


def momentum_copy(branch: nn.Module) -> nn.Module:
    """Return a copy without gradients, for `update_momentum`."""
    from lightly.models.utils import deactivate_requires_grad

    target = copy.deepcopy(branch)
    deactivate_requires_grad(target)
    return target


def two_layers(features: int, hidden: int, dim: int) -> nn.Module:
    """Return the shorter projector of SimSiam and NNCLR for CIFAR-10, with a norm at its end."""
    from lightly.models.modules.heads import ProjectionHead

    first = (features, hidden, nn.BatchNorm1d(hidden), nn.ReLU(inplace=True))
    head: nn.Module = ProjectionHead([first, (hidden, dim, nn.BatchNorm1d(dim), None)])
    return head


def simclr_transform(size: int) -> Any:
    """SimCLR's views with half of its jitter and without blur; also MoCo's and NNCLR's."""
    from lightly.transforms import SimCLRTransform

    return SimCLRTransform(input_size=size, cj_strength=0.5, gaussian_blur=0.0)


def simclr(network: str, size: int) -> Wired:
    """SimCLR: all views through one network."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    branch = nn.Sequential(backbone(network), SimCLRProjectionHead(WIDTH[network], 512, 128))
    criterion = NTXentLoss()

    def loss(views: list[Tensor]) -> Tensor:
        found: Tensor = criterion(branch(views[0]), branch(views[1]))
        return found

    return Wired([branch], simclr_transform(size), loss)


def moco(network: str, size: int) -> Wired:
    """MoCo, with a loss of both directions."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import MoCoProjectionHead
    from lightly.models.utils import batch_shuffle, batch_unshuffle, update_momentum

    head = MoCoProjectionHead(WIDTH[network], 512, 128)
    branch = nn.Sequential(backbone(network, SPLITS), head)
    target = momentum_copy(branch)
    criterion = NTXentLoss(temperature=0.1, memory_bank_size=(BANK, 128))

    def one_way(query: Tensor, key: Tensor) -> Tensor:
        with torch.no_grad():
            key, order = batch_shuffle(key)
            key = batch_unshuffle(target(key), order)
        found: Tensor = criterion(branch(query), key)
        return found

    def loss(views: list[Tensor]) -> Tensor:
        update_momentum(branch, target, m=0.99)
        return (one_way(views[0], views[1]) + one_way(views[1], views[0])) / 2

    return Wired([branch], simclr_transform(size), loss, [target, criterion])


def byol(network: str, size: int) -> Wired:
    """BYOL: predict the momentum branch's embedding of the other view; views without blur."""
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import update_momentum
    from lightly.transforms import BYOLTransform, BYOLView1Transform, BYOLView2Transform

    branch = nn.Sequential(backbone(network), BYOLProjectionHead(WIDTH[network], 1024, 256))
    predictor, target = BYOLPredictionHead(256, 1024, 256), momentum_copy(branch)
    criterion = NegativeCosineSimilarity()

    def loss(views: list[Tensor]) -> Tensor:
        update_momentum(branch, target, m=0.99)
        p0, p1 = (predictor(branch(view)) for view in views)
        z0, z1 = (target(view).detach() for view in views)
        return torch.add(criterion(p0, z1), criterion(p1, z0)) / 2

    transform = BYOLTransform(
        view_1_transform=BYOLView1Transform(input_size=size, gaussian_blur=0.0),
        view_2_transform=BYOLView2Transform(input_size=size, gaussian_blur=0.0),
    )
    return Wired([branch, predictor], transform, loss, [target])


def simsiam(network: str, size: int) -> Wired:
    """SimSiam: predict the embedding of the other view, which gets no gradient."""
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import SimSiamPredictionHead
    from lightly.transforms import SimSiamTransform

    branch = nn.Sequential(backbone(network), two_layers(WIDTH[network], 2048, 2048))
    predictor = SimSiamPredictionHead(2048, 512, 2048)
    criterion = NegativeCosineSimilarity()

    def loss(views: list[Tensor]) -> Tensor:
        z0, z1 = map(branch, views)
        p0, p1 = predictor(z0), predictor(z1)
        return torch.add(criterion(p0, z1.detach()), criterion(p1, z0.detach())) / 2

    transform = SimSiamTransform(input_size=size, gaussian_blur=0.0)
    return Wired([branch, predictor], transform, loss)


def nnclr(network: str, size: int) -> Wired:
    """NNCLR: predict the nearest neighbor of the other view's embedding in a bank."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import NNCLRPredictionHead, NNMemoryBankModule

    branch = nn.Sequential(backbone(network), two_layers(WIDTH[network], 2048, 256))
    predictor, bank = NNCLRPredictionHead(256, 4096, 256), NNMemoryBankModule(size=(BANK, 256))
    criterion = NTXentLoss()

    def loss(views: list[Tensor]) -> Tensor:
        z0, z1 = map(branch, views)
        p0, p1 = predictor(z0), predictor(z1)
        z0, z1 = bank(z0.detach(), update=False), bank(z1.detach(), update=True)
        return torch.add(criterion(z0, p1), criterion(z1, p0)) / 2

    return Wired([branch, predictor], simclr_transform(size), loss, [bank])


def swav(network: str, size: int) -> Wired:
    """SwAV: predict the prototypes of the other view; two large views."""
    from lightly.loss import SwaVLoss
    from lightly.models.modules import SwaVProjectionHead, SwaVPrototypes
    from lightly.transforms import SwaVTransform

    branch = nn.Sequential(backbone(network), SwaVProjectionHead(WIDTH[network], 512, 128))
    prototypes: Any = SwaVPrototypes(128, n_prototypes=512)
    criterion = SwaVLoss()

    def loss(views: list[Tensor]) -> Tensor:
        prototypes.normalize()
        scores = [prototypes(nn.functional.normalize(branch(view))) for view in views]
        found: Tensor = criterion(scores, [])
        return found

    transform = SwaVTransform(
        crop_sizes=(size,),
        crop_counts=(2,),
        crop_min_scales=(0.14,),
        crop_max_scales=(1.0,),
        cj_strength=0.5,
        gaussian_blur=0.0,
    )
    return Wired([branch, prototypes], transform, loss)


Wire = Callable[[str, int], Wired]
WIRES: Final[dict[str, Wire]] = {
    wire.__name__: wire for wire in (simclr, moco, byol, simsiam, nnclr, swav)
}


def training(
    wire: Wire,
    images: Any,
    *,
    network: str,
    batch_size: int,
    size: int,
    lr: float,
    weight_decay: float,
    device: str = "cpu",
) -> Iterator[None]:
    """Yield steps, epoch after epoch, with a loader worker per CPU core."""
    with torch.device(device):
        wired = wire(network, size)
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
