"""Rows per second of `nearkin embed -o FOLDER/`, alone and through Ray, beside a bare loop.

    python benchmarks/engines.py FOLDER [--count 256] [--shard 32] [--rounds 5] [--size 224]

FOLDER holds JPEG files; the network is a ResNet-18 with random weights. The three take turns, each
in all CPUs that this process may use. What counts is the median of the shares of the bare loop,
one per round.

- bare: what one writes by hand: a DataLoader that opens, resizes and crops files by Pillow and
  torchvision, with a worker per CPU, and the network on batches of the same size.
- local, ray: `embed_parts`, which also checks headers and names, and writes Parquet. Ray has a
  cluster of this machine, whose processes it does not slow down here (RAY_worker_niceness=0).

Rows count from the end of the first part to that of the last, and of the loop likewise: without
the start of processes, the search for files and the loading of encoders, which are seconds and do
not grow with the rows. Each is also given by second of CPU time, of all processes that take part,
Ray's own included: that is what a core of its own would give, if others have the machine.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from nearkin.commands.embed import embed_parts
from nearkin.distributed import available_cpus
from nearkin.encoders.encoder import load, write_encoder
from nearkin.evaluation.embeddings import images_at_once
from nearkin.networks.backbone import build_backbone
from nearkin.run.reporter import Silent

CPU = torch.device("cpu")


class Files(Dataset[Tensor]):
    """Images as a network takes them."""

    def __init__(self, paths: list[Path], size: int) -> None:
        self.paths = paths
        self.transform = v2.Compose(
            [
                v2.Resize(size, interpolation=v2.InterpolationMode.BICUBIC),
                v2.CenterCrop(size),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Tensor:
        """One image."""
        tensor: Tensor = self.transform(Image.open(self.paths[number]).convert("RGB"))
        return tensor


class Marks(Silent):
    """The time, and the CPU time, at which each part was there."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        """Note both."""
        self.marks.append((time.perf_counter(), cpu_seconds()))

    def info(self, text: str) -> None:
        """Note the end of a part."""
        if text.startswith("part "):
            self.mark()

    def rows_per_second(self, shard: int) -> tuple[float, float]:
        """Rows per second and per second of CPU time, after the first part."""
        first, last = self.marks[0], self.marks[-1]
        rows = shard * (len(self.marks) - 1)
        return rows / (last[0] - first[0]), rows / (last[1] - first[1])


def cpu_seconds() -> float:
    """CPU time of this process and all that descend from it, those that have ended included."""
    parents, ticks = dict[str, str](), dict[str, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(") ")[2].split()
        except OSError:  # it has just ended
            continue
        parents[path.parent.name] = fields[1]
        ticks[path.parent.name] = sum(map(int, fields[11:15]))
    ours, grown = set[str](), {str(os.getpid())}
    while grown != ours:
        ours, grown = grown, grown | {pid for pid in parents if parents[pid] in grown}
    return sum(ticks[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


def bare(encoder: Path, folder: Path, shard: int, size: int) -> Marks:
    """A loop by hand."""
    network, marks = load(encoder), Marks()
    batch, rows = images_at_once(size, CPU), 0
    files = Files(sorted(folder.iterdir()), size)
    vectors = []
    with torch.inference_mode():
        for images in DataLoader(files, batch, num_workers=available_cpus()):
            vectors.append(network(images))
            rows += len(images)
            if rows % shard == 0:
                marks.mark()
    return marks


def embed(
    encoder: Path, folder: Path, shard: int, engine: Literal["local", "ray"], output: Path
) -> Marks:
    """Parts of a new folder."""
    marks = Marks()
    shutil.rmtree(output, ignore_errors=True)
    embed_parts(encoder, folder, output, shard=shard, engine=engine, reporter=marks)
    return marks


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--shard", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=224)
    options = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")
    torch.set_num_threads(available_cpus())
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder, encoder, output = root / "images", root / "encoder.safetensors", root / "vectors"
        folder.mkdir()
        for path in sorted(options.images.rglob("*.jpg"))[: options.count]:
            shutil.copy(path, folder / f"{path.parent.name}-{path.name}")
        details = {"backbone": "resnet18", "image_size": options.size}
        write_encoder(encoder, build_backbone("resnet18", options.size), details)
        shares: dict[Literal["local", "ray"], list[tuple[float, float]]] = {"local": [], "ray": []}
        for number in range(options.rounds):
            alone = bare(encoder, folder, options.shard, options.size)
            wall, cpu = alone.rows_per_second(options.shard)
            print(f"round {number + 1}: bare {wall:.1f} rows/s, {cpu:.1f} of CPU", flush=True)
            for engine, each in shares.items():
                marks = embed(encoder, folder, options.shard, engine, output)
                own, used = marks.rows_per_second(options.shard)
                each.append((own / wall, used / cpu))
                print(
                    f"         {engine} {own:.1f} rows/s ({own / wall:.3f}), {used:.1f} of CPU "
                    f"({used / cpu:.3f})",
                    flush=True,
                )
    for engine, each in shares.items():
        walls, cpus = map(statistics.median, zip(*each, strict=True))
        print(f"{engine}: median {walls:.3f} by time, {cpus:.3f} by CPU time")


if __name__ == "__main__":
    main()
