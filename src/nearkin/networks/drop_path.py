"""Drop path: residual branches that are left out at random, image by image."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from nearkin.distributed import rows_of_rank, world_size
from nearkin.errors import UsageError

SITE: Final = re.compile(r"drop_path\d*|stochastic_depth")
"""Attributes of blocks through which timm, torchvision, transformers and nearkin run a branch."""

# How the rows of a batch are arranged: as so many views, each of all processes; 0: they are part
# of one view of one process. A variable of the context, which recomputing for gradients restores.
_num_views: ContextVar[int] = ContextVar("num_views", default=1)


class DropPath(nn.Module):
    """Leave a branch out for some images: stochastic depth (Huang et al. 2016, section 3).

    Huang, Sun, Liu, Sedra, Weinberger. Deep networks with stochastic depth. arXiv:1603.09382. In
    training, the branch of an image is 0 with probability `rate`, and divided by `1 - rate`
    otherwise, so that its mean stays. Several processes draw together for the whole batch, and
    each uses its own rows: an image's draw does not depend on how many processes there are.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    @override
    def forward(self, branch: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch ..."]:
        if not self.training or not self.rate:
            return branch
        stays = _draw(len(branch), branch.device) >= self.rate
        factor = (stays / (1 - self.rate)).to(branch.dtype)
        return branch * factor.view(-1, *[1] * (branch.ndim - 1))


def _draw(rows: int, device: torch.device) -> Float[Tensor, " {rows}"]:
    """Draw a number from 0 to 1 for each row of this process."""
    if world_size() == 1 or not _num_views.get():
        return torch.rand(rows, device=device)
    batch = rows // _num_views.get() * world_size()
    whole = torch.rand(_num_views.get(), batch, device=device)
    return whole[:, rows_of_rank(batch)].flatten()


@contextmanager
def views_of_batch(count: int) -> Iterator[None]:
    """Say within a `with` block that batches consist of so many views, one after the other.

    Without it, several processes would draw other rows for joined views than one process.
    """
    token = _num_views.set(count)
    try:
        yield
    finally:
        _num_views.reset(token)


def chunk_seeds(network: nn.Module, chunks: int, device: torch.device) -> list[int | None]:
    """Return a seed for each of this process's chunks, or None where nothing is drawn.

    A chunk of the batch has the same seed on whichever process it is.
    """
    if not any(isinstance(module, DropPath) and module.rate for module in network.modules()):
        return [None] * chunks
    whole = chunks // _num_views.get() * world_size()
    seeds = torch.randint(2**62, (_num_views.get(), whole), device=device)
    return list(seeds[:, rows_of_rank(whole)].flatten().tolist())


@contextmanager
def drawing_chunk(seed: int | None, device: torch.device) -> Iterator[None]:
    """Let networks draw for one chunk of the batch, by its seed, within a `with` block."""
    if seed is None:
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), views_of_batch(0):
        torch.manual_seed(seed)
        yield


def set_drop_path(body: nn.Module, rate: float | None, name: str) -> None:
    """Give a network's residual branches probabilities of being dropped, in place.

    They rise in a line from 0 in the first block to `rate` in the last (Huang et al. 2016, eq. 4;
    as timm has them for vision transformers); None keeps those that the network was built with.
    State and names stay as they are.

    Raises:
        UsageError: If `rate` is above 0 and the network has no branches to drop.
    """
    blocks = [(block, sites) for block in body.modules() if (sites := _sites(block))]
    if rate and not blocks:
        raise UsageError(
            f"backbone {name} has no drop path; leave --drop-path out, or take the same "
            "architecture of timm"
        )
    for position, (block, sites) in enumerate(blocks):
        for site in sites:
            risen = (rate or 0.0) * position / max(1, len(blocks) - 1)
            own = _rate(getattr(block, site)) if rate is None else risen
            if own or getattr(block, site) is not None:
                drop = DropPath(own) if own else nn.Identity()
                setattr(block, site, drop.train(block.training))


def _sites(block: nn.Module) -> Sequence[str]:
    """Return the names of a block's attributes that branches run through."""
    named = {**vars(block), **block._modules}
    return [
        name
        for name, value in named.items()
        if SITE.fullmatch(name) and (value is None or isinstance(value, nn.Module))
    ]


def _rate(site: nn.Module | None) -> float:
    """Return the probability that a library has given a branch."""
    for name in ("rate", "drop_prob", "p"):  # nearkin's, timm's and transformers', torchvision's
        if isinstance(rate := getattr(site, name, None), float | int):
            return float(rate)
    return 0.0
