"""Objectives at the size of real training, beside their plain forms and other libraries.

    python -m benchmarks objectives [--threads 2] [--only info_nce]

Value and gradient in float32 on the same inputs, in turns in one process, and the memory that a
call allocates beyond its inputs, by torch's profiler. On a GPU a turn is `AT_ONCE` calls: one
takes less time than waiting for it. `--scale` divides the numbers of images, keys and rows.

- info_nce: 256 queries, a queue of 65,536 keys, 128 dimensions. Plain: all logits and
  `cross_entropy`, as MoCo's official code has it. lightly: `NTXentLoss` with its memory bank.
- nt_xent, in_batch: 4,096 images, 128 dimensions. Plain: the matrix of all pairs.
- neighbors: 20 nearest of 100,000 rows for 10,000 queries, 512 dimensions. faiss: `IndexFlatIP`,
  built and searched. scikit-learn: `NearestNeighbors`, brute force.

Libraries that are not installed are left out.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Final
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.shared.options import Option
from benchmarks.shared.rows import Row
from benchmarks.shared.turns import against_all, repeated, turns
from nearkin.metrics.neighbors import nearest
from nearkin.objectives import in_batch, info_nce, nt_xent, unit

TEMPERATURE = 0.2
AT_ONCE = 50
Way = Callable[[], object]


def rows(count: int, dim: int) -> Tensor:
    """Return random unit vectors."""
    return unit(torch.randn(count, dim))


def both(loss: Callable[..., Tensor], *inputs: Tensor) -> Way:
    """Return a function that computes a loss and its gradient."""

    def step() -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]
        loss(*leaves).backward()

    return step


def plainly(way: Way) -> Way:
    """Return the same without any fused form."""

    def step() -> None:
        with patch("nearkin.objectives.fused.should_fuse", return_value=False):
            way()

    return step


def against_a_queue(scale: int) -> dict[str, Way]:
    """Measure InfoNCE against a queue."""
    n, keys = 256 // scale, 65_536 // scale
    query, key, queue = rows(n, 128), rows(n, 128), rows(keys, 128)

    def official(query: Tensor) -> Tensor:
        own = torch.einsum("nc,nc->n", [query, key]).unsqueeze(-1)
        logits = torch.cat([own, torch.einsum("nc,kc->nk", [query, queue])], dim=1) / TEMPERATURE
        return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long))

    same = torch.zeros(n, keys, dtype=torch.bool)
    same[torch.arange(n), torch.randint(keys, (n,))] = True
    ways = {
        "nearkin": both(lambda q: info_nce(q, key, queue, TEMPERATURE), query),
        "nearkin, own left out": both(lambda q: info_nce(q, key, queue, TEMPERATURE, same), query),
        "logits and cross_entropy": both(official, query),
    }
    if find_spec("lightly"):
        from lightly.loss import NTXentLoss

        criterion = NTXentLoss(TEMPERATURE, memory_bank_size=(keys, 128))
        criterion(query.clone().requires_grad_(), key)  # this creates the bank
        ways["lightly"] = both(lambda q: criterion(q, key), query)
    return ways


def against_the_batch(scale: int) -> dict[str, Way]:
    """Measure NT-Xent over all views of a batch."""
    a, b = rows(4096 // scale, 128), rows(4096 // scale, 128)
    step = both(lambda a, b: nt_xent(a, b, TEMPERATURE), a, b)
    ways = {"nearkin": step, "plainly": plainly(step)}
    if find_spec("lightly"):
        from lightly.loss import NTXentLoss

        ways["lightly"] = both(NTXentLoss(TEMPERATURE), a, b)
    return ways


def across_views(scale: int) -> dict[str, Way]:
    """Measure InfoNCE between the two views of a batch."""
    a, b = rows(4096 // scale, 128), rows(4096 // scale, 128)
    step = both(lambda a, b: in_batch(a, b, TEMPERATURE), a, b)
    return {"nearkin": step, "plainly": plainly(step)}


def among_neighbors(scale: int) -> dict[str, Way]:
    """Measure the search for nearest neighbors."""
    bank, queries = rows(100_000 // scale, 512), rows(10_000 // scale, 512)
    ways: dict[str, Way] = {"nearkin": lambda: nearest(bank, queries, 20)}
    if find_spec("faiss"):
        import faiss  # type: ignore[import-untyped, import-not-found, unused-ignore]

        faiss.omp_set_num_threads(torch.get_num_threads())

        def flat() -> object:
            index = faiss.IndexFlatIP(512)
            index.add(bank.numpy())
            return index.search(queries.numpy(), 20)

        ways["faiss"] = flat
    from sklearn.neighbors import NearestNeighbors

    search = NearestNeighbors(n_neighbors=20, algorithm="brute")
    ways["scikit-learn"] = lambda: search.fit(bank.numpy()).kneighbors(queries.numpy())
    return ways


def most_memory(way: Way) -> float:
    """Return the peak megabytes of a call, beyond those before it."""
    if torch.get_default_device().type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        way()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        way()
    held = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / 1e6


MEASURED = {
    "info_nce": against_a_queue,
    "nt_xent": against_the_batch,
    "in_batch": across_views,
    "neighbors": among_neighbors,
}


OPTIONS: Final = (
    Option("only", [*MEASURED], "what to measure", choices=[*MEASURED]),
    Option("scale", 1, "divisor of all sizes", quick=16),
    Option("device", "cpu", "of the objectives"),
)


def run(options: Namespace) -> Iterator[Row]:
    """Measure each objective, then the memory of it."""
    torch.manual_seed(0)
    at_once = 1 if options.device == "cpu" else AT_ONCE
    with torch.device(options.device):
        for name in options.only:
            if name == "neighbors" and at_once > 1:
                continue
            ways = MEASURED[name](options.scale)
            laps = turns({w: repeated(step, at_once) for w, step in ways.items()}, options.rounds)
            yield from against_all(name, laps, calls=at_once)
            if name != "neighbors":
                held = {way: [most_memory(step)] for way, step in ways.items()}
                yield from against_all(f"{name}, memory", held, unit="MB")
