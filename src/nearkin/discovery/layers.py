"""What learns from labels: the last block of the network where the time given lets it.

Else a layer on top of frozen features, which takes seconds (see `features`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from nearkin.config import DiscoverConfig, Duration, seconds
from nearkin.data.batches import CenterCrops, to_input
from nearkin.discovery.features import FinetunedEncoder
from nearkin.discovery.stages import Stage
from nearkin.encoders.inference import encode
from nearkin.networks.blocks import network_parts
from nearkin.networks.branch import Backbone
from nearkin.run.auto import AUTO_TIME
from nearkin.training.length import LEFT, time_epoch

ENCODED: Final = 16  # Images whose encoding is timed
OBVIOUS: Final = 4  # Times as long as there is, from which on a rough estimate will do
PRETRAINING: Final = 0.5  # Share of the time given that the first stage takes, where it trains


def last_block(network: Backbone) -> str:
    """Return the name of the last of a network's blocks; "" if it has none.

    >>> from nearkin.networks.backbone import build_backbone
    >>> last_block(build_backbone("small", 32)), last_block(build_backbone("resnet18", 32))
    ('8', 'layer4.1')
    """
    blocks = [part.name for part in network_parts(network.body) if part.is_block]
    return blocks[-1] if blocks else ""


def planned_time(config: DiscoverConfig, device: torch.device) -> Duration:
    """Return how long a whole discovery may take: `--max-time`, or half an hour without a GPU.

    It is "" where there is no limit, and where there is nothing to plan.
    """
    if config.from_run and config.train_layers != "auto":
        return ""
    return config.max_time or ("" if device.type == "cuda" else AUTO_TIME)


def pretraining_time(planned: Duration) -> str:
    """Return the part of the time for a whole discovery that trains its encoder.

    >>> pretraining_time("30m"), pretraining_time("")
    ('900s', '')
    """
    return f"{max(1, round(PRETRAINING * seconds(planned)))}s" if planned else ""


def time_left(planned: Duration, spent: float) -> float:
    """Return the seconds left for training: a fifteenth of the whole is for tables and page.

    >>> time_left("30m", spent=180.0)
    1500.0
    """
    return (1 - LEFT) * seconds(planned) - spent


@dataclass(frozen=True)
class PlannedStage:
    """A training, and how many like it a discovery has."""

    stage: Stage
    number: int

    @property
    def epochs(self) -> int:
        """Of all of these trainings."""
        return self.number * int(self.stage.config.epochs)

    @property
    def num_views(self) -> int:
        """That all of these trainings pass through the network."""
        sampler, views = self.stage.feed.sampler, self.stage.method.views
        return self.epochs * sampler.steps_per_epoch * sampler.batch_size * len(views)


class NetworkTime(NamedTuple):
    """How long the trainings of a network take, beside whatever else the machine does."""

    seconds: float
    busy: str = ""  # What other processes do to it; see `EpochTime`


def time_network(
    encoder: FinetunedEncoder, stages: Sequence[PlannedStage], limit: float
) -> NetworkTime:
    """Estimate how long it takes here to train a network, and to encode all images by it.

    A few steps of each stage are timed; where it is obvious that all of them would take longer
    than `limit`, only passes through the network are.
    """
    each_image = seconds_per_image(encoder)
    views = sum(each.num_views for each in stages)
    if each_image * views > OBVIOUS * limit:
        return NetworkTime(each_image * views)
    # Each network encodes all images, the one of the result their views as well.
    passes = encoder.config.num_views + sum(each.number for each in stages)
    trainings = [each.stage for each in stages]
    epochs = [time_epoch(one.config, one.method, [one.feed]) for one in trainings]
    trained = sum(each.epochs * epoch.seconds for each, epoch in zip(stages, epochs, strict=True))
    busiest = max(epochs, key=lambda epoch: epoch.slowdown)
    return NetworkTime(trained + each_image * passes * len(encoder.images), busiest.busy)


def seconds_per_image(encoder: FinetunedEncoder) -> float:
    """Time how long it takes to encode an image."""
    pretrained, images = encoder.pretrained, encoder.images.spread(ENCODED)
    network = pretrained.backbone.to(encoder.device).to(memory_format=torch.channels_last)
    crops = CenterCrops(images, pretrained.preprocessing, batch_size=len(images))
    batches = [to_input(crop.to(encoder.device)) for crop in crops]
    encode(network, batches)  # the first time, kernels are chosen
    before = time.perf_counter()
    encode(network, batches)
    return (time.perf_counter() - before) / len(images)
