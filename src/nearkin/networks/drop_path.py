"""Drop path: residual branches that are left out at random, image by image."""

import re
from collections.abc import Callable, Sequence
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from nearkin.distributed import rows_of_rank, world_size
from nearkin.errors import UsageError

SITE: Final = re.compile(r"drop_path\d*|stochastic_depth")
"""Attributes of blocks through which timm, torchvision, transformers and nearkin run a branch."""


class DropPath(nn.Module):
    """Leave a branch out for some images: stochastic depth (Huang et al. 2016, section 3).

    Huang, Sun, Liu, Sedra, Weinberger. Deep networks with stochastic depth. arXiv:1603.09382. In
    training, the branch of an image is 0 with probability `rate`, and divided by `1 - rate`
    otherwise, so that its mean stays. Several processes draw together for the whole batch, and
    each uses its own rows: an image's draw does not depend on how many processes there are.
    """

    share: int = 0  # rows of a view on this process, see `own_draws`
    in_chunks: bool = False  # whether it sees chunks, each of which has a seed

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    @override
    def forward(self, branch: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch ..."]:
        if not self.training or not self.rate:
            return branch
        share = 0 if self.in_chunks else self.share
        drawn = own_draws(len(branch), share, lambda *size: torch.rand(size, device=branch.device))
        factor = ((drawn >= self.rate) / (1 - self.rate)).to(branch.dtype)
        return branch * factor.view(-1, *[1] * (branch.ndim - 1))


def own_draws(count: int, share: int, draw: Callable[[int, int], Tensor]) -> Tensor:
    """Draw numbers for the rows of all processes, and return the `count` of this one.

    Rows are those of one view or of several, one after the other, with `share` of each on this
    process. If that is 0, or rows are no such views, those of this process are all.
    """
    if world_size() == 1 or not share or count % share:
        return draw(1, count).flatten()
    whole = share * world_size()
    return draw(count // share, whole)[:, rows_of_rank(whole)].flatten()


def chunk_seeds(network: nn.Module, chunks: int, share: int) -> list[int | None]:
    """Return a seed for each of this process's chunks, or None where nothing is drawn.

    A chunk of the batch has the same seed on whichever process it is; see `own_draws`.
    """
    if not any(isinstance(module, DropPath) and module.rate for module in network.modules()):
        return [None] * chunks
    device = next(network.parameters()).device
    seeds = own_draws(chunks, share, lambda *size: torch.randint(2**62, size, device=device))
    return list(seeds.tolist())


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
