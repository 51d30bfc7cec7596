"""lightly's methods with the settings of its own CIFAR-10 benchmark, in a plain loop.

Heads, losses, views, temperatures, momenta and optimizers are those of `cifar10_benchmark.py` in
lightly's documentation, at its batch of 128; batch norms of MoCo are split eightfold and its keys
shuffled, as there. With our small network only the width of its features differs. Two things are
not as there: the cosine falls with every step instead of every epoch, as a run here may have less
than two epochs; and images are in memory, so none is decoded from a file. The width of banks and
the largest crop of SwAV, which lightly 1.6 wants to be told, are those it had before.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from peers import (
    Images,
    Wired,
    byol_loss,
    byol_transform,
    momentum_copy,
    nnclr_loss,
    simclr_loss,
    simsiam_loss,
    swav_loss,
    update,
)
from torch import Tensor, nn

from nearkin.data.order import Order
from nearkin.networks.backbone import SMALL

BATCH: Final = 128
LR, MOMENTUM, DECAY = 0.06, 0.9, 5e-4  # of SGD; also of SimSiam, whose rate it does not scale
ADAM_LR, ADAM_DECAY = 1e-3, 1e-6
BANK: Final = 4096
SPLITS: Final = 8  # of MoCo's batch norms
WIDTH: Final = {"small": 256, "resnet18": 512}  # features


def backbone(network: str, splits: int = 0) -> nn.Module:
    """Return an untrained network: lightly's own ResNet-18, or nearkin's small one."""
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


def simclr(network: str, size: int) -> Wired:
    """SimCLR."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    branch = nn.Sequential(backbone(network), SimCLRProjectionHead(WIDTH[network], 512, 128))
    return Wired([branch], simclr_transform(size), simclr_loss(branch, NTXentLoss()))


def simclr_transform(size: int) -> Any:
    """SimCLR's views with half of its jitter and without blur; also MoCo's and NNCLR's."""
    from lightly.transforms import SimCLRTransform

    return SimCLRTransform(input_size=size, cj_strength=0.5, gaussian_blur=0.0)


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
    """BYOL."""
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead

    branch = nn.Sequential(backbone(network), BYOLProjectionHead(WIDTH[network], 1024, 256))
    predictor, target = BYOLPredictionHead(256, 1024, 256), momentum_copy(branch)
    loss = byol_loss(branch, predictor, target, momentum=0.99)
    return Wired([branch, predictor], byol_transform(size), loss, [target])


def simsiam(network: str, size: int) -> Wired:
    """SimSiam."""
    from lightly.models.modules import SimSiamPredictionHead
    from lightly.transforms import SimSiamTransform

    branch = nn.Sequential(backbone(network), two_layers(WIDTH[network], 2048, 2048))
    predictor = SimSiamPredictionHead(2048, 512, 2048)
    transform = SimSiamTransform(input_size=size, gaussian_blur=0.0)
    return Wired([branch, predictor], transform, simsiam_loss(branch, predictor))


def nnclr(network: str, size: int) -> Wired:
    """NNCLR."""
    from lightly.models.modules import NNCLRPredictionHead, NNMemoryBankModule

    branch = nn.Sequential(backbone(network), two_layers(WIDTH[network], 2048, 256))
    predictor, bank = NNCLRPredictionHead(256, 4096, 256), NNMemoryBankModule(size=(BANK, 256))
    loss = nnclr_loss(branch, predictor, bank)
    return Wired([branch, predictor], simclr_transform(size), loss, [bank])


def two_layers(features: int, hidden: int, dim: int) -> nn.Module:
    """Return the shorter projector of SimSiam and NNCLR for CIFAR-10, with a norm at its end."""
    from lightly.models.modules.heads import ProjectionHead

    first = (features, hidden, nn.BatchNorm1d(hidden), nn.ReLU(inplace=True))
    head: nn.Module = ProjectionHead([first, (hidden, dim, nn.BatchNorm1d(dim), None)])
    return head


def swav(network: str, size: int) -> Wired:
    """SwAV with two large views, by Adam."""
    from lightly.models.modules import SwaVProjectionHead, SwaVPrototypes
    from lightly.transforms import SwaVTransform

    branch = nn.Sequential(backbone(network), SwaVProjectionHead(WIDTH[network], 512, 128))
    prototypes = SwaVPrototypes(128, n_prototypes=512)
    transform = SwaVTransform(
        crop_sizes=(size,),
        crop_counts=(2,),
        crop_min_scales=(0.14,),
        crop_max_scales=(1.0,),
        cj_strength=0.5,
        gaussian_blur=0.0,
    )
    return Wired([branch, prototypes], transform, swav_loss(branch, prototypes))


WIRES: Final[dict[str, Callable[[str, int], Wired]]] = {
    wire.__name__: wire for wire in (simclr, moco, byol, simsiam, nnclr, swav)
}


def optimizer_of(method: str, wired: Wired) -> torch.optim.Optimizer:
    """Return the benchmark's optimizer of a method."""
    parameters = [p for module in wired.trained for p in module.parameters()]
    if method == "swav":
        return torch.optim.Adam(parameters, lr=ADAM_LR, weight_decay=ADAM_DECAY)
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


@dataclass(eq=False)
class Theirs:
    """A training of lightly's parts; see `side.Trainer`.

    Views are drawn in this process: on one core a loader's worker only adds the transport. Steps
    are taken in an order that is a function of the seed. What is drawn within a step is not
    continued after a pause but drawn anew.
    """

    method: str
    network: str
    pixels: np.ndarray  # of shape (n, side, side, 3)
    seed: int

    phases = 1  # all steps are alike

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.wired = WIRES[self.method](self.network, self.pixels.shape[1])
        self.optimizer = optimizer_of(self.method, self.wired)
        self.peak = float(self.optimizer.param_groups[0]["lr"])
        self.order = Order(len(self.pixels), min(BATCH, len(self.pixels)), self.seed)

    @property
    def settings(self) -> dict[str, Any]:
        """What was chosen, for the row."""
        group = self.optimizer.param_groups[0]
        return {
            "optimizer": type(self.optimizer).__name__,
            "lr": self.peak,
            "weight_decay": group["weight_decay"],
            "batch_size": self.order.batch_size,
            "image_size": self.pixels.shape[1],
            "precision": "fp32",
        }

    def steps(self, start: int, total: int) -> Iterator[float]:
        """Train from one step to another; yield the loss of each."""
        for draw in (torch.manual_seed, random.seed, np.random.seed):
            draw(1_000_003 * self.seed + start)
        batches = (self.order.rows(step).tolist() for step in range(start, total))
        loader = torch.utils.data.DataLoader(
            Images(self.pixels, self.wired.transform), batch_sampler=batches
        )
        for step, views in enumerate(loader, start):
            rate = self.peak * (1 + math.cos(math.pi * step / total)) / 2
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            loss = self.wired.loss(views)
            update(self.optimizer, loss)
            yield loss.item()

    def _tensors(self) -> dict[str, Tensor]:
        """All that a step changes but the optimizer; lightly's banks are in no state_dict."""
        modules = nn.ModuleList([*self.wired.trained, *self.wired.memory])
        return {**dict(modules.named_parameters()), **dict(modules.named_buffers())}

    def state(self) -> dict[str, Any]:
        """What `restore` continues from."""
        return {"tensors": self._tensors(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        stored = state["tensors"]
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(stored[name])
        self.optimizer.load_state_dict(state["optimizer"])

    def encoder(self) -> nn.Module:
        """Return the network that training is for, as the benchmark measures it."""
        branch = self.wired.trained[0]
        assert isinstance(branch, nn.Sequential)
        return branch[0]
