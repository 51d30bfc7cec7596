"""What `nearkin train` does between the settings and the encoder's file, step by step.

Settings are those of `auto`, but for the method, the network and the seed. Evaluations on the
way, checkpoints and logs are left out, and steps may end within an epoch.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nearkin.config import TrainConfig
from nearkin.data.batches import growing
from nearkin.data.images import Images
from nearkin.encoders.encoder import load, write_encoder
from nearkin.run.auto import backbone_for, resolve, view_sides, with_length
from nearkin.training.fit import optimizer_for, training_steps
from nearkin.training.session import build

CPU = torch.device("cpu")
SHOWN = (
    "optimizer",
    "lr",
    "weight_decay",
    "batch_size",
    "image_size",
    "view_sizes",
    "precision",
    "augment",
)


@dataclass(eq=False)
class Ours:
    """A training by nearkin; see `side.Trainer`."""

    method: str
    network: str
    images: Images
    seed: int
    folder: Path  # for the encoder's file

    def __post_init__(self) -> None:
        wanted = TrainConfig(
            method=self.method, backbone=self.network, seed=self.seed, device="cpu"
        )
        self.config = resolve(wanted, self.images, CPU)
        self.trained, batches = build(self.config, self.images, CPU)
        self.parts = [batches.resized(side) for side in view_sides(self.config)]
        self.phases = len(self.parts)
        self.optimizer = optimizer_for(self.trained, self.config)
        self.sampler = batches.sampler

    @property
    def settings(self) -> dict[str, Any]:
        """What was chosen, for the row."""
        resolved = asdict(self.config)
        return {
            **{name: resolved[name] for name in SHOWN},
            "options": self.config.options,
            "auto_backbone": backbone_for(int(self.config.image_size), CPU),
        }

    def steps(self, start: int, total: int) -> Iterator[float]:
        """Train from one step to another; yield the loss of each."""
        fed = growing(self.parts, start, total, total)
        per_epoch = self.sampler.steps_per_epoch
        config = with_length(self.config, math.ceil(total / per_epoch), per_epoch, CPU)
        for _, step in training_steps(
            config, self.trained, self.optimizer, fed, start=start, total=total
        ):
            yield step.loss.item()

    def encoder(self) -> nn.Module:
        """Write the encoder as `nearkin train` does, and return what the file holds."""
        details = {
            "method": self.method,
            "backbone": self.network,
            "image_size": int(self.config.image_size),
            "seed": self.seed,
        }
        file = self.folder / "encoder.safetensors"
        write_encoder(file, self.trained.backbone, details)
        return load(file)
