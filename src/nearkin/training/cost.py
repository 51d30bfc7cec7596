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
    hours_alone: float  # Without other processes
    busy: str  # What these do, if that makes a difference
    megabytes: float  # Of disk

    def lines(self) -> list[str]:
        """Return lines of text, for people."""
        lines = [f"about {_time(self.hours)}, {self.megabytes:.0f} MB of disk"]
        if self.busy:
            lines.append(f"busy: {self.busy}; alone about {_time(self.hours_alone)}")
        return lines


def _time(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{max(1, round(hours * 60))} min"


def cost(config: TrainConfig, images: Images, device: torch.device) -> Cost:
    """Estimate what a run takes on this machine, by timing a few steps."""
    batch = int(config.batch_size)
    batch = batch if images.is_small else min(TIMED_BATCH, batch)
    timed = replace(config, batch_size=batch, workers=0, cache="off")
    method, batches = build(timed, images, device)
    epoch = time_epoch(timed, method, [batches.resized(side) for side in view_sides(timed)])
    epochs = planned_epochs(config, epoch.seconds)
    hours, alone = (each * epochs / 3600 for each in (epoch.seconds, epoch.alone))
    weights = sum(tensor.nbytes for tensor in method.state_dict().values())
    features = 4 * method.backbone.feature_dim * len(images)
    copies = 3 * 3  # the newest three checkpoints, each with the optimizer's two moments
    return Cost(epochs, hours, alone, epoch.busy, (copies * weights + features) / 1e6)
