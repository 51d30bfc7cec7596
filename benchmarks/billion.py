"""What a billion images would take: predicted from what was measured on one core of this machine.

    python benchmarks/billion.py measure docs/results/scale.json
    python benchmarks/billion.py predict docs/results/scale.json [--images 1e9]
    python benchmarks/billion.py simulate [--images 1000000]

`measure` times the parts that verbs are made of, in seconds of CPU time of one thread, and counts
bytes. `predict` multiplies them; docs/scale.md says what is assumed. `simulate` draws the order of
an epoch as a training does, and counts the bytes that a machine fetches from a store for it.
"""

import argparse
import io
import itertools
import json
import math
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

DIM: Final = 384
BYTES: Final = 110_000  # Of a JPEG
VIEW: Final = 224
REPEATS: Final = 5
BLOCK: Final = 2**20  # Bytes that are fetched from a store at once
ROUNDS: Final = 10  # Iterations of k-means
CLUSTERS: Final = 500  # Of `select`, at most


# Measure


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the median CPU time of a few calls, after one that is not counted."""
    work()
    laps = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        laps.append(time.process_time() - start)
    return sorted(laps)[REPEATS // 2]


def jpeg(side: tuple[int, int]) -> bytes:
    """Return a JPEG of about `BYTES` at 500 x 375 px: smooth noise."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (side[1] // 3, side[0] // 3, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize(side, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def measure_images(count: int = 128) -> dict[str, float]:
    """Time photographs: two views of SimCLR, and the crop that is encoded."""
    import torch

    from nearkin.data.augmentations import views_of
    from nearkin.data.batches import Batches, CenterCrops
    from nearkin.data.opening import open_images
    from nearkin.data.order import Order

    with tempfile.TemporaryDirectory() as folder:
        encoded = jpeg((500, 375))
        for number in range(count):
            (Path(folder) / f"{number:04}.jpg").write_bytes(encoded + bytes([number]))
        images = open_images(folder)
        order, cpu = Order(count, count, seed=0), torch.device("cpu")
        batches = Batches(
            images, views_of("simclr"), image_size=VIEW, order=order, device=cpu, workers=0
        )
        crops = CenterCrops(images, VIEW)
        return {
            "bytes of a photograph": len(encoded),
            "two views": cpu_seconds(lambda: next(batches.between(0, 1))) / count,
            "one crop": cpu_seconds(lambda: list(crops)) / count,
        }


def measure_networks() -> dict[str, float]:
    """Time a forward pass of one image."""
    import timm
    import torch

    found = {}
    for name in ("resnet50", "vit_small_patch16_224"):
        network, x = timm.create_model(name).eval(), torch.randn(8, 3, VIEW, VIEW)
        with torch.inference_mode():
            found[f"forward of {name}"] = cpu_seconds(partial(network, x)) / len(x)
    return found


def measure_order(count: int = 2_000_000) -> dict[str, float]:
    """Time the order of an epoch."""
    from nearkin.data.order import Order

    seeds = itertools.count()  # The order of an epoch is kept: none is asked for twice
    return {
        "order": cpu_seconds(lambda: Order(count, 1, next(seeds)).rows(0)) / count,
        "order with a window": cpu_seconds(lambda: Order(count, 1, next(seeds), 1 << 14).rows(0))
        / count,
    }


def measure_table(count: int = 131_072) -> dict[str, float]:
    """Time a table in parts: to write it, and to read and compare it with queries."""
    import torch

    from nearkin.evaluation.embeddings import Embeddings
    from nearkin.evaluation.table import SHARD, Note, PartFolder, open_table

    x = np.random.default_rng(0).standard_normal((count, DIM), np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)

    def write(folder: Path) -> None:
        parts = PartFolder.claim(folder, Note("", "synthetic", count, SHARD))
        for number, start in enumerate(range(0, count, SHARD)):
            rows = range(start, min(start + SHARD, count))
            names = tuple(f"shard-{row // 10_000:06}/{row:09}.jpg" for row in rows)
            unknown, splits = np.full(len(rows), -1), np.full(len(rows), "")
            parts.write(number, Embeddings(x[rows], unknown, paths=names, splits=splits))

    with tempfile.TemporaryDirectory() as place:
        folders = (Path(place) / str(number) for number in range(REPEATS + 1))
        writing = cpu_seconds(lambda: write(next(folders)))
        one = Path(place) / "0"
        table = open_table(one)
        read = cpu_seconds(lambda: table.nearest(torch.from_numpy(x[:1]), 10))
        many = cpu_seconds(lambda: table.nearest(torch.from_numpy(x[:1001]), 10))
        return {
            "bytes of a row": sum(part.stat().st_size for part in one.iterdir()) / count,
            "row written": writing / count,
            "row read and compared with one query": read / count,
            "row compared with each further query": max(0.0, many - read) / 1000 / count,
        }


def measure_index(count: int = 100_000, lists: int = 512, probes: int = 8) -> dict[str, float]:
    """Time what an index is made of: a product of matrices, a code, a code that is scanned."""
    import faiss

    faiss.omp_set_num_threads(1)
    x = np.random.default_rng(0).standard_normal((count, DIM), np.float32)
    a, b = x[:4096], np.ascontiguousarray(x[4096:8192].T)
    flops = 2 * DIM * len(a) ** 2 / cpu_seconds(lambda: a @ b)
    index: Any = faiss.index_factory(DIM, f"IVF{lists},PQ64np", faiss.METRIC_INNER_PRODUCT)
    index.train(x[: 50 * lists])
    start = time.process_time()
    index.add(x)
    coded = (time.process_time() - start) / count - 2 * DIM * lists / flops
    spent = {}
    for number in (probes, 8 * probes):
        index.nprobe = number
        spent[number] = cpu_seconds(lambda: index.search(x[:1000], 10)) / 1000
    scanned = (spent[8 * probes] - spent[probes]) / (7 * probes * count / lists)
    fixed = spent[probes] - 2 * DIM * lists / flops - scanned * probes * count / lists
    return {
        "operations per second": flops,
        "row coded": max(0.0, coded),
        "code scanned": scanned,
        "query prepared": max(0.0, fixed),
    }


def measure_list(count: int = 200_000, shard: int = 10_000) -> dict[str, float]:
    """Time to open shards of tiny images, and count the memory that their list takes."""
    with tempfile.TemporaryDirectory() as folder:
        content = jpeg((12, 9))
        for start in range(0, count, shard):
            with tarfile.open(Path(folder) / f"{start // shard:06}.tar", "w") as tar:
                for number in range(start, start + shard):
                    member = tarfile.TarInfo(f"{number:09}.jpg")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        command = [sys.executable, __file__, "list", folder]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return {name: value / count for name, value in found.items()}


def opened(folder: str) -> dict[str, float]:
    """Open images in this process, of which nothing is kept on disk yet."""
    from nearkin.data.opening import open_images

    def memory() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    open_images(str(Path(folder) / "000000.tar"))  # what the first image imports
    start, before = time.process_time(), memory()
    images = open_images(folder)
    found = {"image listed": time.process_time() - start, "bytes to list an image": 0.0}
    found["bytes to list an image"] = memory() - before if len(images) else 0.0
    return found


PARTS: Final = (
    measure_list,
    measure_order,
    measure_images,
    measure_networks,
    measure_table,
    measure_index,
)


# Predict


@dataclass(frozen=True)
class Node:
    """A machine that is rented; assumed, not measured."""

    cores: int = 96  # Each as fast as the one that was measured
    memory: float = 1e12  # Bytes
    gpus: int = 8
    encoded: float = 3_000.0  # Images per second of a GPU, ResNet-50 at 224 px, forward
    trained: float = 2_500.0  # Views per second of a GPU, forward and backward
    network: float = 12.5e9  # Bytes per second from the store
    price: float = 40.0  # Per hour


@dataclass(frozen=True)
class Work:
    """What a verb takes, over all machines."""

    what: str
    cpu: float = 0.0  # Seconds of one core
    gpu: float = 0.0  # Seconds of one GPU
    fetched: float = 0.0  # Bytes
    stored: float = 0.0  # Bytes that are written
    memory: float = 0.0  # Bytes in one process
    nodes: int = 1
    threads: bool = True  # Whether one process uses all cores of a node
    processes: int = 1  # Of a node, each with that memory

    def fits(self, node: Node) -> bool:
        """Whether a node has the memory."""
        return self.memory * self.processes <= node.memory

    def hours(self, node: Node) -> dict[str, float]:
        """Return the hours that each resource takes, if the others did not."""
        cores = node.cores if self.threads else 1
        return {
            "CPU": self.cpu / self.nodes / cores / 3600,
            "GPU": self.gpu / self.nodes / node.gpus / 3600,
            "network": self.fetched / self.nodes / node.network / 3600,
        }


def works(c: Mapping[str, float], n: float, node: Node) -> list[Work]:
    """Return what each verb takes for so many images of `BYTES`, with `DIM` features."""
    from nearkin.commands.index import CODES, COPY_PROBES, MOST_LISTS, PROBES, TRAINED

    nodes, table = 16, c["bytes of a row"] * n
    listed = c["bytes to list an image"] * n
    # A block holds several images, and a machine fetches it if it needs one of them.
    share = 1 - (1 - 1 / nodes) ** (BLOCK / BYTES)
    cosine = 2 * DIM / c["operations per second"]
    lists = min(MOST_LISTS, 4 * math.isqrt(int(n)))
    nearest_lists, in_list = cosine * lists, n / lists
    index = (CODES + 8) * n + 4 * DIM * lists

    def by_index(probes: int) -> float:
        return c["query prepared"] + nearest_lists + c["code scanned"] * probes * in_list

    first, further = "row read and compared with one query", "row compared with each further query"
    return [
        Work(
            "the list of images, in every process",
            cpu=c["image listed"] * n,
            memory=listed,
            nodes=1,
            threads=False,
            processes=node.gpus,
        ),
        Work(
            "the order of an epoch, in every process",
            cpu=c["order with a window"] * n,
            memory=24 * n,
            nodes=1,
            threads=False,
            processes=node.gpus,
        ),
        Work(
            "train, an epoch of two views",
            cpu=c["two views"] * n,
            gpu=2 * n / node.trained,
            fetched=share * BYTES * n * nodes,
            memory=listed + 24 * n,
            nodes=nodes,
            processes=node.gpus,
        ),
        Work(
            "embed",
            cpu=(c["one crop"] + c["row written"]) * n,
            gpu=n / node.encoded,
            fetched=BYTES * n,
            stored=table,
            memory=listed,
            nodes=nodes,
            processes=node.gpus,
        ),
        Work(
            "neighbors, 1,000 queries, exactly",
            cpu=(c[first] + 999 * c[further]) * n,
            fetched=table,
        ),
        Work(
            "index",
            cpu=nearest_lists * TRAINED * lists * ROUNDS + (nearest_lists + c["row coded"]) * n,
            fetched=table,
            stored=index,
            memory=index + 4 * DIM * TRAINED * lists,
        ),
        Work(
            "neighbors, 1,000 queries, by the index",
            cpu=1000 * by_index(PROBES),
            fetched=index,
            memory=index,
        ),
        Work(
            "duplicates, by the index",
            cpu=by_index(COPY_PROBES) * n,
            fetched=2 * table,
            memory=index + 48 * n,
        ),
        Work("duplicates, all pairs", cpu=cosine * n * n / 2, fetched=table, memory=4 * DIM * n),
        Work(
            "select, typical",
            cpu=cosine * CLUSTERS * ROUNDS * n,
            fetched=table,
            memory=2 * 4 * DIM * n,
        ),
    ]


def predict(c: Mapping[str, float], n: float) -> None:
    """Print what each verb takes, and how far one machine goes."""
    node = Node()
    print(f"Assumed: {node}\n")
    print("| | CPU time | GPU time | fetched | written | memory of a process | takes | cost |")
    print("|---|---|---|---|---|---|---|---|")
    for work in works(c, n, node):
        hours = work.hours(node)
        slowest = max(hours, key=hours.__getitem__)
        fits = work.fits(node)
        price = hours[slowest] * work.nodes * node.price
        cells = [
            work.what, duration(work.cpu / 3600), duration(work.gpu / 3600),
            size(work.fetched), size(work.stored), size(work.memory),
            f"{duration(hours[slowest])} ({slowest})" if fits else "does not fit",
            f"{price:,.2f}" if fits else "",
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |")
    print("\n| | images until the memory of a node is full | images until it takes a day |")
    print("|---|---|---|")
    for work in works(c, n, node):
        room = largest(c, node, work.what, lambda w: w.fits(node))
        day = largest(c, node, work.what, lambda w: max(w.hours(node).values()) <= 24)
        print(f"| {work.what} | {room} | {day} |")


def largest(c: Mapping[str, float], node: Node, what: str, fits: Callable[[Work], bool]) -> str:
    """Return the largest number of images, to one digit, for which the work on them fits."""
    best = 0.0
    for power in range(5, 13):
        for digit in range(1, 10):
            n = digit * 10.0**power
            if fits(next(work for work in works(c, n, node) if work.what == what)):
                best = n
    return (
        "more than 10^12"
        if best == 9e12
        else f"{best:.0e}".replace("e+", " x 10^").replace("^0", "^")
    )


def duration(hours: float) -> str:
    """Return a time for people."""
    if hours < 1 / 60:
        return f"{3600 * hours:.0f} s" if hours else ""
    return f"{60 * hours:.0f} min" if hours < 1 else f"{hours:,.1f} h"


def size(count: float) -> str:
    """Return a number of bytes for people."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return ""


# Simulate


def simulate(n: int) -> None:
    """Print the bytes that a machine fetches for an epoch, by window, cache and machines."""
    from nearkin.data.order import Order

    print("| window | machines | cache, of the data | fetched by each machine, of the data |")
    print("|---|---|---|---|")
    for window in (0, n // 64):
        for machines in (1, 16):
            for share in (0.02, 0.1, 0.5):
                order = Order(n, n // 1024 * 1024, seed=0, window=window)
                rows = order.rows(0)[::machines]
                fetched = misses(rows * BYTES // BLOCK, int(share * n * BYTES / BLOCK))
                name = "none" if window == 0 else "1/64 of the images"
                print(f"| {name} | {machines} | {share:.0%} | {fetched * BLOCK / n / BYTES:.2f} |")


def misses(numbers: np.ndarray, room: int) -> int:
    """Count the blocks that are not in a cache which forgets what it has fetched first."""
    cache, count = OrderedDict[int, None](), 0
    for number in numbers.tolist():
        if number not in cache:
            count += 1
            cache[number] = None
            if len(cache) > room:
                cache.popitem(last=False)
    return count


def main() -> None:
    """Measure, predict or simulate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", choices=("measure", "predict", "simulate", "list"))
    parser.add_argument("place", nargs="?")
    parser.add_argument("--images", type=float)
    options = parser.parse_args()
    if options.what == "list":
        print(json.dumps(opened(options.place)))
    elif options.what == "simulate":
        simulate(int(options.images or 1e6))
    elif options.what == "predict":
        predict(json.loads(Path(options.place).read_text(encoding="utf-8")), options.images or 1e9)
    else:
        import torch

        torch.set_num_threads(1)
        found: dict[str, Any] = {}
        for part in PARTS:
            found |= part()
            print(json.dumps(found, indent=2), flush=True)
        Path(options.place).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
