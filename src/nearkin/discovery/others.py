"""All processes of a discovery but the first: they take part in the trainings of whole networks.

Everything else is the first one's to do: what counts classes and reads them off, and what learns
on top of a frozen encoder, where a step takes less time than to tell others of it.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from nearkin.commands.train import follow as follow_training
from nearkin.config import DiscoverConfig, TrainConfig
from nearkin.data.order import Streams
from nearkin.discovery.data import DiscoveryTask, open_discovery_data, without
from nearkin.discovery.stages import Stage, stage_of
from nearkin.discovery.trunk import finetuned_encoder
from nearkin.distributed import called, choose_device, company, num_processes, together
from nearkin.evaluation.encoder import Encoder
from nearkin.run.settings.build import named_backbone
from nearkin.training.fit import accompany, same


def follow(data: Any) -> None:
    """What all processes but the first do: one training after another, as they are called."""
    with company(1, follow):
        while training := called(follow_training, follow_stage):
            training(data)


@contextmanager
def beside(stage: Stage, config: DiscoverConfig, bad: Iterable[int]) -> Iterator[None]:
    """Have the others train a stage as well within a `with` block, where they can share it.

    The result does not depend on it: a stage whose images are too few for a batch of all
    processes is trained by the first alone, as it would be without the others.

    Args:
        stage: Of which the first has all.
        config: Settings of the discovery.
        bad: Rows of images that turned out unreadable.
    """
    shared = config.trained != "top"
    if not shared or stage.order.batch_size % num_processes(config.devices):
        yield
        return
    task, order = stage.task, stage.order
    rows = {"label": task.label, "rows": task.rows}
    rows |= {"labeled": order.labeled, "unlabeled": order.unlabeled}
    with together(config.devices, follow_stage):
        same(
            {name: torch.from_numpy(each) for name, each in rows.items()}
            | {"bad": list(bad), "classes": [task.num_known, task.num_novel]}
            | {"settings": json.dumps([asdict(config), asdict(stage.config)])}
        )
        yield


def follow_stage(data: Any) -> None:
    """What all processes but the first do in a stage: its steps, with their part of each batch."""
    with together(1, follow_stage):
        log = same({})
        rows = {name: each.numpy() for name, each in log.items() if torch.is_tensor(each)}
        asked, settings = json.loads(log["settings"])
        config, training = DiscoverConfig(**asked), TrainConfig(**settings)
        images = without(open_discovery_data(data, config), set(log["bad"])).images
        task = DiscoveryTask(rows["label"], rows["rows"], *log["classes"])
        batch, seed = int(training.batch_size), training.seed
        order = Streams(rows["labeled"], rows["unlabeled"], batch, seed)
        encoder = Encoder(named_backbone(training, None), int(training.image_size), {})
        trunk = finetuned_encoder(encoder, images, config, training, choose_device(config.device))
        stage = stage_of(trunk, task, order, training)
        accompany(stage.config, stage.method, stage.feed)
