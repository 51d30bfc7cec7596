"""What a training would take on this machine, by timing a few steps."""

from dataclasses import dataclass, replace
from typing import Final

import torch

from nearkin.config import TrainConfig
from nearkin.data.images import Images
from nearkin.run.auto import view_sides
from nearkin.training.length import planned_epochs, time_epoch
from nearkin.training.session import build

TIMED_BATCH: Final = 32  # Of large images, where measuring a full batch takes minutes


@dataclass(frozen=True)
class Cost:
    """What a training takes on this machine, about."""

    epochs: int  # That are planned at the speed that was measured
    hours: float  # At that speed
    megabytes: float  # Of disk

    def __str__(self) -> str:
        """Return it in words."""
        minutes = max(1, round(self.hours * 60))
        time = f"{self.hours:.1f} hours" if self.hours >= 1 else f"{minutes} min"
        return f"about {time}, {self.megabytes:.0f} MB of disk"


def cost(config: TrainConfig, images: Images, device: torch.device) -> Cost:
    """Estimate what a run takes on this machine, by timing a few steps."""
    batch = int(config.batch_size)
    batch = batch if images.is_small else min(TIMED_BATCH, batch)
    timed = replace(config, batch_size=batch, workers=0, cache="off")
    method, batches = build(timed, images, device)
    epoch = time_epoch(timed, method, [batches.resized(side) for side in view_sides(timed)])
    epochs = planned_epochs(config, epoch)
    weights = sum(tensor.nbytes for tensor in method.state_dict().values())
    features = 4 * method.backbone.feature_dim * len(images)
    copies = 3 * 3  # the newest three checkpoints, each with the optimizer's two moments
    return Cost(epochs, epoch * epochs / 3600, (copies * weights + features) / 1e6)
