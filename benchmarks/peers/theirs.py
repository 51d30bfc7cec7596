"""A training by lightly with the optimizer and the batch of its own CIFAR-10 benchmark.

Two things are not as there: the cosine falls with every step instead of every epoch, as a run here
may have less than two epochs; and images are in memory, so none is decoded from a file.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from benchmarks.shared.lightly import WIRES, Images, Wired, update
from nearkin.data.samplers import RandomBatchSampler

BATCH: Final = 128
LR, MOMENTUM, DECAY = 0.06, 0.9, 5e-4  # of SGD; also of SimSiam, whose rate it does not scale
ADAM_LR, ADAM_DECAY = 1e-3, 1e-6


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
    are taken in an order that is a function of the seed.
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
        self.sampler = RandomBatchSampler(
            len(self.pixels), min(BATCH, len(self.pixels)), self.seed
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What was chosen, for the row."""
        group = self.optimizer.param_groups[0]
        return {
            "optimizer": type(self.optimizer).__name__,
            "lr": self.peak,
            "weight_decay": group["weight_decay"],
            "batch_size": self.sampler.batch_size,
            "image_size": self.pixels.shape[1],
            "precision": "fp32",
        }

    def steps(self, start: int, total: int) -> Iterator[float]:
        """Train from one step to another; yield the loss of each."""
        for draw in (torch.manual_seed, random.seed, np.random.seed):
            draw(1_000_003 * self.seed + start)
        batches = (self.sampler.rows(step).tolist() for step in range(start, total))
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

    def encoder(self) -> nn.Module:
        """Return the network that training is for, as the benchmark measures it."""
        branch = self.wired.trained[0]
        assert isinstance(branch, nn.Sequential)
        return branch[0]
