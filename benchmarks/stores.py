"""Images per second from shards on an S3 server of this machine, against the same local files.

    python benchmarks/stores.py [--images 1000] [--size 64] [--rounds 5] [--workers 1] [--network]

Needs `pip install 'nearkin[remote]' 'moto[server]'`. JPEGs of 320 x 240 px in tar shards of 200.
The ways take turns, each an epoch of batches of 64 with two views, so that other work slows all of
them alike:

- files: the shards on disk.
- kept: the shards on the server, whose blocks are in the cache; every epoch but the first.
- first: the same with an empty cache, so that all bytes come from the server, once.

With `--network`, SimCLR trains a ResNet-18 on each batch. The server is Python and runs on the
same CPUs, so `first` also pays for it.
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from turns import show, turns

from nearkin.config import TrainConfig
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.run.settings import resolve
from nearkin.training.session import build

SHARD, BATCH, PORT = 200, 64, 5931


def write_shards(folder: Path, count: int) -> None:
    """Write noise that JPEG compresses like photos, in tar shards."""
    rng = np.random.default_rng(0)
    for shard in range(-(-count // SHARD)):
        with tarfile.open(folder / f"{shard:06}.tar", "w") as tar:
            for number in range(SHARD):
                noise = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
                file = io.BytesIO()
                Image.fromarray(noise).resize((320, 240), Image.Resampling.BICUBIC).save(
                    file, "JPEG"
                )
                info = tarfile.TarInfo(f"{shard * SHARD + number:08}.jpg")
                info.size = len(file.getvalue())
                tar.addfile(info, io.BytesIO(file.getvalue()))


def upload(folder: Path) -> None:
    """Copy the shards into the bucket `bench`, once the server answers."""
    import s3fs

    client = s3fs.S3FileSystem(skip_instance_cache=True)
    for _ in range(60):
        with suppress(Exception):
            client.mkdir("bench")
            break
        time.sleep(1)
    client.put([str(path) for path in folder.glob("*.tar")], "bench/shards/")


def epoch(images: Images, args: argparse.Namespace) -> Callable[[], None]:
    """Return a function that loads, and with a network learns from, one epoch."""
    config = TrainConfig(
        backbone="resnet18",
        image_size=args.size,
        batch_size=BATCH,
        epochs=1,
        workers=args.workers,
        cache="off",
        device="cpu",
        shuffle_window=0,
    )
    config = resolve(config, images, torch.device("cpu"))
    method, batches = build(config, images, torch.device("cpu"))
    optimizer = torch.optim.SGD(method.parameters(), lr=0.01)

    def run() -> None:
        for batch in batches.between(0, batches.order.steps_per_epoch):
            if args.network:
                step = method(batch, 0.0)
                optimizer.zero_grad()
                step.loss.backward()
                optimizer.step()

    return run


def main() -> None:
    """Measure all ways in turns, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--network", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, cache = Path(place) / "shards", Path(place) / "cache"
        folder.mkdir()
        write_shards(folder, args.images)
        os.environ |= {
            "XDG_CACHE_HOME": str(cache),
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{PORT}",
            "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "benchmark",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        command = [sys.executable, "-m", "moto.server", "-p", str(PORT)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            upload(folder)
            start = time.perf_counter()
            remote = open_images("s3://bench/shards")
            print(f"{len(remote)} images listed in {time.perf_counter() - start:.1f} s")
            kept = epoch(remote, args)

            def first() -> None:
                shutil.rmtree(cache / "nearkin" / "remote", ignore_errors=True)
                kept()

            ways = {"files": epoch(open_images(folder), args), "kept": kept, "first": first}
            show(turns(ways, args.rounds), "files")
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
