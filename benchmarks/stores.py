"""Images from shards on an S3 server of this machine, against the same local files.

    python -m benchmarks stores [--count 1000] [--size 64] [--workers 1] [--network]

Needs `pip install 'nearkin[remote]' 'moto[server]'`. JPEGs of 320 x 240 px in tar shards of 200.
The ways take turns, each an epoch of batches of 64 with two views:

- files: the shards on disk.
- kept: the shards on the server, whose blocks are in the cache; every epoch but the first.
- first: the same with an empty cache, so that all bytes come from the server, once.

With `--network`, SimCLR trains a ResNet-18 on each batch. The server is Python and runs on the
same CPUs, so `first` also pays for it.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import torch

from benchmarks.shared.datasets import save_photographs
from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row, compared
from benchmarks.shared.turns import turns
from nearkin.config import TrainConfig
from nearkin.data.images import Images
from nearkin.data.opening import open_images
from nearkin.run.auto import resolve
from nearkin.training.session import build

SHARD, BATCH, PORT = 200, 64, 5931
CPU = torch.device("cpu")
OPTIONS: Final = (
    Option("count", 1000, "images", quick=128),
    Option("size", 64, "side of the views", quick=32),
    Option("workers", 1, "loader processes"),
    Option("network", False, "train on the batches"),
)


def write_shards(folder: Path, count: int) -> None:
    """Write photographs in tar shards."""
    with tempfile.TemporaryDirectory() as loose:
        files = save_photographs(Path(loose), count)
        for start in range(0, count, SHARD):
            with tarfile.open(folder / f"{start // SHARD:06}.tar", "w") as tar:
                for file in files[start : start + SHARD]:
                    tar.add(file, file.name)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the shards of a folder; yield their address."""
    import s3fs

    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{PORT}",
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [sys.executable, "-m", "moto.server", "-p", str(PORT)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = s3fs.S3FileSystem(skip_instance_cache=True)
        for _ in range(60):
            with suppress(Exception):
                client.mkdir("bench")
                break
            time.sleep(1)
        client.put([str(path) for path in folder.glob("*.tar")], "bench/shards/")
        yield "s3://bench/shards"
    finally:
        server.terminate()
        server.wait()


def epoch(images: Images, options: Namespace) -> Callable[[], None]:
    """Return a function that loads, and with a network learns from, one epoch."""
    config = TrainConfig(
        backbone="resnet18",
        image_size=options.size,
        batch_size=BATCH,
        epochs=1,
        workers=options.workers,
        cache="off",
        device="cpu",
        shuffle_window=0,
    )
    method, batches = build(resolve(config, images, CPU), images, CPU)
    optimizer = torch.optim.SGD(method.parameters(), lr=0.01)

    def learn() -> None:
        for batch in batches.load(0, batches.sampler.steps_per_epoch):
            if options.network:
                step = method(batch, 0.0)
                optimizer.zero_grad()
                step.loss.backward()
                optimizer.step()

    return learn


def run(options: Namespace) -> Iterator[Row]:
    """Measure all ways in turns."""
    with tempfile.TemporaryDirectory() as place:
        folder, cache = Path(place) / "shards", Path(place) / "cache"
        folder.mkdir()
        write_shards(folder, options.count)
        os.environ["XDG_CACHE_HOME"] = str(cache)
        with served(folder) as address:
            start = time.perf_counter()
            remote = open_images(address)
            yield Row("list", time.perf_counter() - start, more={"images": len(remote)})
            kept = epoch(remote, options)

            def first() -> None:
                shutil.rmtree(cache / "nearkin" / "remote", ignore_errors=True)
                kept()

            ways = {"files": epoch(open_images(folder), options), "kept": kept, "first": first}
            laps = turns(ways, options.rounds)
        for way in ("kept", "first"):
            yield compared(way, laps[way], laps["files"], against="files", images=len(remote))
