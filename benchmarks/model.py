"""A cost model of a training step on many processes, checked against measured steps.

    python benchmarks/model.py [MEASURED.json]

MEASURED is the output of `benchmarks/processes.py --json FILE`: the model is checked against its
steps, with the parts measured beside them. Predictions for clusters of GPUs follow, with their
assumptions. docs/scale.md explains each term.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

NODE = 8
"""GPUs that share a fast network."""


@dataclass(frozen=True)
class Machine:
    """Speed of a process, and of the links between processes."""

    views_per_second: float
    """Views per second of one process, forward and backward."""
    flops: float
    """Floating-point operations per second of the objective, in single precision."""
    near: float
    """Bytes per second from one process to the next within a node."""
    far: float
    """The same between nodes."""
    message: float
    """Seconds of a small collective, per logarithm of the number of processes."""


@dataclass(frozen=True)
class Job:
    """A training."""

    weights: int
    batch: int
    """Images per step, over all processes."""
    dim: int
    """Embedding dimension."""
    norms: int
    """Synchronized batch norms; each sends a message forward and one backward."""
    views: int = 2
    overlap: float = 0.5
    """Share of the network's time that can overlap with the reduction of gradients."""


def parts(job: Job, machine: Machine, processes: int) -> dict[str, float]:
    """Return the seconds of each part of a step."""
    views = job.views * job.batch
    network = views / processes / machine.views_per_second
    if processes == 1:
        return {"network": network, "objective": objective(job, machine)}
    speed = machine.near if processes <= NODE else machine.far
    hop = machine.message * (processes - 1).bit_length()
    gradients = 2 * 4 * job.weights * (processes - 1) / processes / speed + hop
    return {
        "network": network,
        "gradients, not hidden": max(0.0, gradients - job.overlap * network),
        "batch norm": 2 * job.norms * hop,
        # two views forward, their gradients back, and the mean of the losses
        "gather": 2 * 4 * views * job.dim / speed + 5 * hop,
        "objective": objective(job, machine) / processes,
    }


def objective(job: Job, machine: Machine) -> float:
    """Return the operations of all pairs of views: a product forward, two backward."""
    return 6 * (job.views * job.batch) ** 2 * job.dim / machine.flops


def efficiency(job: Job, machine: Machine, processes: int) -> float:
    """Return the speed of several processes, relative to that of one times their number."""
    alone = sum(parts(job, machine, 1).values())
    return alone / processes / sum(parts(job, machine, processes).values())


H100 = Machine(views_per_second=2_500, flops=50e12, near=200e9, far=25e9, message=10e-6)
"""Assumed: ResNet-50 at 224 px in bfloat16, NVLink within a node, 200 Gbit/s per GPU between."""
RESNET50 = {"weights": 28_000_000, "dim": 128, "norms": 54}


def predict() -> None:
    """Predict SimCLR with ResNet-50 on GPUs, with the batch of the paper and a growing one."""
    print(f"assumed of a GPU: {H100}")
    print("| GPUs | batch | step | of ideal | " + "largest part beside the network |")
    for processes in (8, 64, 512):
        for batch in (4096, 64 * processes):
            job = Job(batch=batch, **RESNET50)
            found = parts(job, H100, processes)
            rest = {name: value for name, value in found.items() if name != "network"}
            most = max(rest, key=rest.__getitem__)
            print(
                f"| {processes} | {batch:,} | {sum(found.values()) * 1e3:.0f} ms "
                f"| {efficiency(job, H100, processes):.0%} "
                f"| {most}, {rest[most] * 1e3:.1f} ms |"
            )


def check(path: Path) -> None:
    """Print measured steps beside the sums of their measured parts."""
    measured = json.loads(path.read_text(encoding="utf-8"))
    print("| processes | measured | network + sum of gradients + messages | ratio |")
    for number, found in measured.items():
        messages = 2 * found["norms"] * found["message"] + 2 * found["gather of embeddings"]
        log = found["bare"] + found["sum of gradients"] + messages
        print(f"| {number} | {found['step']:.3f} s | {log:.3f} s | {found['step'] / log:.2f} |")


def main() -> None:
    """Check the model against measurements, and predict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("measured", type=Path, nargs="?")
    options = parser.parse_args()
    if options.measured:
        check(options.measured)
    predict()


if __name__ == "__main__":
    main()
