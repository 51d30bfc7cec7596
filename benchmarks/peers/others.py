"""One training by lightly-train, by stable-pretraining or by nearkin, in seconds of one core.

    taskset -c 0 python -m benchmarks.peers.others lightly-train DATA OUT --seconds 600

DATA is cifar10.npz. Each is called as its users call it: lightly-train's `pretrain` with the
method `simclr`, and the module of stable-pretraining's own CIFAR-10 benchmark. Two things are not
theirs: the network, which is nearkin's `small` for all, and the rate of stable-pretraining, which
falls by the step instead of the epoch, of which there are fewer than two. Views are drawn in the
training's process. Seconds are of the CPU, from the first step to the last; the length is planned
from a trial. Prints the row.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.peers import evaluator, side
from benchmarks.peers.plan import Run
from nearkin.config import TrainConfig
from nearkin.data.rng import seeded
from nearkin.data.views import MEAN, STD
from nearkin.networks.backbone import SMALL
from nearkin.run.data import open_split

SEED: Final = 0
TRIAL_STEPS: Final = 30
FEATURES: Final = 256


@dataclass
class Clock:
    """When each step began, in seconds of the CPU."""

    begun: list[float] = field(default_factory=list)

    def tick(self) -> None:
        """A step begins."""
        self.begun.append(time.process_time())

    @property
    def pace(self) -> float:
        """Seconds of a step, without those of the first ones."""
        return (self.begun[-1] - self.begun[5]) / (len(self.begun) - 6)


class Wrapped(nn.Module):
    """A network as lightly-train takes one of its user's."""

    def __init__(self, network: nn.Module, clock: Clock) -> None:
        super().__init__()
        self.network, self.clock = network, clock

    def forward_features(self, x: Tensor) -> dict[str, Tensor]:
        """Features of images, of one place each."""
        self.clock.tick()
        return {"features": self.network(x)[:, :, None, None]}

    def forward_pool(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same features."""
        return {"pooled_features": x["features"]}

    def feature_dim(self) -> int:
        """Numbers of a feature."""
        return FEATURES

    def get_model(self) -> nn.Module:
        """The network."""
        return self.network


def network() -> nn.Module:
    """Return nearkin's small network as it starts."""
    with seeded(SEED, torch.device("cpu")):
        return SMALL["small"]()


def lightly_train(pixels: np.ndarray, folder: Path, steps: int) -> tuple[nn.Module, Clock, int]:
    """Train by lightly-train's command; return the network, its clock and the batch size."""
    import lightly_train

    batch, clock = 128, Clock()
    images = folder / "images"
    if not images.exists():
        images.mkdir(parents=True)
        for row, image in enumerate(pixels):
            Image.fromarray(image).save(images / f"{row:05d}.png")
    wrapped = Wrapped(network(), clock)
    lightly_train.pretrain(
        out=folder / f"run{steps}",
        data=images,
        model=wrapped,
        method="simclr",
        epochs=math.ceil(steps / (len(pixels) // batch)),
        batch_size=batch,
        num_workers=0,
        devices=1,
        accelerator="cpu",
        seed=SEED,
        transform_args={"image_size": (32, 32)},
        trainer_args={"max_steps": steps},
        overwrite=True,
    )
    return wrapped.network, clock, batch


class Normalized(nn.Module):
    """A network that is shown images as it was trained, of such as the evaluator normalizes."""

    def __init__(self, network: nn.Module, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.network, self.mean, self.std = network, torch.tensor(mean), torch.tensor(std)

    def forward(self, images: Tensor) -> Tensor:
        """Features."""
        rows = slice(None), None, None
        pixels = images * torch.tensor(STD)[rows] + torch.tensor(MEAN)[rows]
        features: Tensor = self.network((pixels - self.mean[rows]) / self.std[rows])
        return features


class Pairs(torch.utils.data.Dataset[dict[str, Any]]):
    """Images for stable-pretraining's transforms."""

    def __init__(self, pixels: np.ndarray, transform: Callable[[dict[str, Any]], Any]) -> None:
        self.pixels, self.transform = pixels, transform

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, row: int) -> Any:
        return self.transform({"image": Image.fromarray(self.pixels[row]), "label": 0})


def stable_pretraining(
    pixels: np.ndarray, folder: Path, steps: int
) -> tuple[nn.Module, Clock, int]:
    """Train as in stable-pretraining's benchmark; return network, clock and batch size."""
    import lightning
    import stable_pretraining as spt
    from stable_pretraining import forward
    from stable_pretraining.data import transforms

    batch, clock = 256, Clock()
    view = partial(
        transforms.Compose,
        transforms.RGB(),
        transforms.RandomResizedCrop((32, 32)),
        transforms.RandomHorizontalFlip(p=0.5),
        transforms.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, p=0.8),
        transforms.RandomGrayscale(p=0.2),
        transforms.ToImage(**spt.data.static.CIFAR10),
    )
    data = Pairs(pixels, transforms.MultiViewTransform([view(), view()]))
    torch.manual_seed(SEED)
    projector = nn.Sequential(
        *(nn.Linear(FEATURES, 2048), nn.BatchNorm1d(2048), nn.ReLU(inplace=True)),
        *(nn.Linear(2048, 2048), nn.BatchNorm1d(2048), nn.ReLU(inplace=True)),
        nn.Linear(2048, 256),
    )
    module = spt.Module(
        backbone=network(),
        projector=projector,
        forward=forward.simclr,
        simclr_loss=spt.losses.NTXEntLoss(temperature=0.5),
        optim={
            "optimizer": {"type": "LARS", "lr": 5, "weight_decay": 1e-6},
            "scheduler": {"type": "LinearWarmupCosineAnnealing"},
            "interval": "step",
        },
    )
    loader = torch.utils.data.DataLoader(data, batch, shuffle=True, drop_last=True)

    class Ticks(lightning.Callback):
        """Tells the clock of each step."""

        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

    trainer = lightning.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        callbacks=[Ticks()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    spt.Manager(
        trainer=trainer, module=module, data=spt.data.DataModule(train=loader), seed=SEED
    )()
    return Normalized(module.backbone, **spt.data.static.CIFAR10), clock, batch


SIDES: Final = {"lightly-train": lightly_train, "stable-pretraining": stable_pretraining}


def main() -> None:
    """Make one run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("side", choices=[*SIDES, "nearkin"])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    split = open_split(options.data, TrainConfig())
    run = Run(options.side, "small", "simclr", "cifar10", SEED, options.seconds)
    if options.side == "nearkin":
        side.work(run, split, options.out, "cpu")
        print((options.out / "row.json").read_text())
        return
    train, pixels = SIDES[options.side], side.pixels(split)
    _, clock, _ = train(pixels, options.out, TRIAL_STEPS)
    steps = round(options.seconds / clock.pace)
    trained, clock, batch = train(pixels, options.out, steps)
    taken = clock.begun[-1] - clock.begun[0] + clock.pace
    found = side.row(
        run,
        evaluator.of_network(trained.eval(), split, side.side(split)),
        steps=len(clock.begun),
        epochs=round(len(clock.begun) * batch / len(pixels), 3),
        images_per_second=round(len(clock.begun) * batch / taken, 1),
        cpu_seconds=round(taken, 1),
        clock="cpu",
        package=side.installed(options.side),
    )
    (options.out / "row.json").write_text(json.dumps(found) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
