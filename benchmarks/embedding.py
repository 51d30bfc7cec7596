"""Images embedded per second from files, beside the bare forward pass; and the memory it takes.

    python benchmarks/embedding.py IMAGES [--encoder vit_small_patch14_dinov2.lvd142m] [--size 224]
        [--count 192] [--rounds 5] [--threads 2]

IMAGES is what `nearkin train` takes. The network is timm's with random weights, which take as long
as any others. The two take turns, so that a busy machine slows both alike; what counts is the
median of the shares, one per round.

- forward: the network alone, on pixels that are in memory, in batches of the same size.
- embed: `encode_images`, as `nearkin embed` computes features: files read, decoded, resized,
  cropped, normalized, and sent through the network, with as many workers as threads.

The memory is the largest of this process and of its workers together, over what it had before.
"""

import argparse
import os
import resource
import statistics
import threading
import time
from pathlib import Path

import timm
import torch

from nearkin.data.batches import CenterCrops, to_input
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.data.preprocessing import Preprocessing
from nearkin.encoders.encoder import Encoder
from nearkin.evaluation.embeddings import encode_images, images_at_once
from nearkin.networks.branch import as_backbone

CPU = torch.device("cpu")


def build(name: str, size: int) -> Encoder:
    """The network with random weights, and the preprocessing of DINOv2."""
    options = {"img_size": size} if timm.get_pretrained_cfg(name).fixed_input_size else {}
    body = timm.create_model(name, num_classes=0, **options)
    view = Preprocessing(size, crop="center", resize_to=round(size / 0.875))
    return Encoder(as_backbone(body, size), view, {"backbone": f"timm:{name}"})


def forward(encoder: Encoder, images: Images, workers: int) -> float:
    """Seconds for the bare network, on pixels that are decoded before."""
    size = images_at_once(encoder.image_size, CPU)
    pixels = list(CenterCrops(images, encoder.preprocessing, batch_size=size, workers=workers))
    start = time.perf_counter()
    with torch.inference_mode():
        for batch in pixels:
            encoder(to_input(batch))
    return time.perf_counter() - start


def embed(encoder: Encoder, images: Images, workers: int) -> float:
    """Seconds from files to features."""
    start = time.perf_counter()
    encode_images(encoder, images, device=CPU, workers=workers)
    return time.perf_counter() - start


class Memory:
    """The largest proportional memory of this process and its children while a block runs."""

    def __enter__(self) -> "Memory":
        self.peak, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        own = Path(f"/proc/{os.getpid()}")
        while not self._stop.wait(0.1):
            children = (own / "task" / str(os.getpid()) / "children").read_text().split()
            total = sum(map(proportional, [str(os.getpid()), *children]))
            self.peak = max(self.peak, total)


def proportional(process: str) -> int:
    """Bytes of memory of a process; pages that several share count in parts."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:  # it has just ended
        return 0
    return 1024 * int(text.split("\nPss:")[1].split()[0])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images")
    parser.add_argument("--encoder", default="vit_small_patch14_dinov2.lvd142m")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--count", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    images = open_images(options.images, labels="none").spread(options.count)
    encoder, workers = build(options.encoder, options.size), options.threads
    before = proportional(str(os.getpid()))
    print(
        f"{options.encoder}, {options.size} px, {len(images)} images, {options.threads} threads, "
        f"{images_at_once(options.size, CPU)} at once"
    )
    forward(encoder, images.spread(32), workers)  # to warm up
    shares = []
    for number in range(options.rounds):
        bare, whole = forward(encoder, images, workers), embed(encoder, images, workers)
        shares.append(bare / whole)
        print(
            f"round {number + 1}: forward {len(images) / bare:.1f} images/s, embed "
            f"{len(images) / whole:.1f} images/s, share {shares[-1]:.3f}",
            flush=True,
        )
    with Memory() as memory:
        embed(encoder, images, workers)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"median share {statistics.median(shares):.3f} of {options.rounds} rounds")
    print(
        f"memory: {memory.peak / 1e6:.0f} MB at most with workers, {before / 1e6:.0f} MB before, "
        f"with the network loaded; peak RSS of the process {largest / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
