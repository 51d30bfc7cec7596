"""Images embedded from files, beside the bare forward pass; and the memory it takes.

    python -m benchmarks embedding [--data IMAGES] [--encoder vit_small_patch14_dinov2.lvd142m]
        [--size 224] [--count 192]

IMAGES is what `nearkin train` takes. The network is timm's with random weights, which take as long
as any others. The two take turns.

- forward: the network alone, on pixels that are in memory, in batches of the same size.
- nearkin: `encode_images`, as `nearkin embed` computes features: files read, decoded, resized,
  cropped, normalized, and sent through the network, with as many workers as threads.

The memory is the largest of this process and of its workers together, beside what it had before,
with the network loaded.
"""

import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Final

import timm
import torch

from benchmarks.shared.datasets import photographs
from benchmarks.shared.memory import Watch
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from benchmarks.shared.turns import against_all, alternate
from nearkin.data.batches import CenterCrops
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.data.preprocessing import Preprocessing
from nearkin.data.views import normalize
from nearkin.distributed.allocation import keep_freed_memory
from nearkin.encoders.encoder import Encoder
from nearkin.encoders.inference import images_at_once, inference
from nearkin.evaluation.embeddings import encode_images
from nearkin.networks.branch import as_backbone

CPU = torch.device("cpu")
OPTIONS: Final = (
    Option("encoder", "vit_small_patch14_dinov2.lvd142m", "of timm", quick="resnet18"),
    Option("size", 224, "side of the images", quick=64),
    Option("count", 192, "images", quick=8),
)


def build(name: str, size: int) -> Encoder:
    """Build the network with random weights, and the preprocessing of DINOv2."""
    options = {"img_size": size} if timm.get_pretrained_cfg(name).fixed_input_size else {}
    body = timm.create_model(name, num_classes=0, **options)
    view = Preprocessing(size, crop="center", resize_to=round(size / 0.875))
    return Encoder(as_backbone(body, size), view, {"backbone": f"timm:{name}"})


def forward(encoder: Encoder, images: Images, workers: int) -> float:
    """Return the seconds of the network that computes features, on pixels decoded before."""
    size, network = images_at_once(encoder.image_size, CPU), inference(encoder, CPU).network
    pixels = list(CenterCrops(images, encoder.preprocessing, batch_size=size, workers=workers))
    with torch.inference_mode(), keep_freed_memory():
        start = time.perf_counter()
        for batch in pixels:
            network(normalize(batch))
        return time.perf_counter() - start


def embed(encoder: Encoder, images: Images, workers: int) -> float:
    """Return the seconds from files to features."""
    start = time.perf_counter()
    encode_images(inference(encoder, CPU), images, workers=workers)
    return time.perf_counter() - start


def run(options: Namespace) -> Iterator[Row]:
    """Measure both in turns, then the memory."""
    encoder, workers = build(options.encoder, options.size), options.threads
    with photographs(options.data, options.count) as data:
        images = open_images(data, labels="none").spread(options.count)
        with Watch() as memory:
            embed(encoder, images, workers)
        laps = alternate(
            {
                "nearkin": lambda: embed(encoder, images, workers),
                "forward": lambda: forward(encoder, images, workers),
            },
            options.rounds,
        )
    yield from against_all(options.encoder, laps, images=len(images))
    yield Row("memory with workers", memory.megabytes, "MB", more={"MB before": memory.before})
