"""Batch norm over groups of the batch: over several processes, parts of one, or chunks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from nearkin.distributed import gather, group_of_rank, world_size
from nearkin.errors import UsageError


class Moments(torch.autograd.Function):
    """Means and variances of channels, by one of torch's own kernels, in float32 at least."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        running = torch.zeros(2, x.shape[1], dtype=wide, device=x.device)  # sets the precision
        moments = torch.stack(torch.batch_norm_update_stats(x, running[0], running[1], 0.0))
        # A copy: a view of what it returns would keep all of it alive if no gradient is asked for.
        ctx.save_for_backward(x, moments[0].clone())
        return moments

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        for_mean, for_variance = grads[0] * (x.shape[1] / x.numel())
        return _scaled(x, mean, 2 * for_variance, for_mean)


def _scaled(x: Tensor, mean: Tensor, by: Tensor, shift: Tensor) -> Tensor:
    """`(x - mean) * by + shift`, channel by channel, in one pass in the precision of `x`."""
    half = torch.full_like(by, 0.5)  # torch 2.11 wants an eps
    return F.batch_norm(x, mean, half, by, shift, training=False, eps=0.5)


def normalize_in_groups(network: nn.Module, groups: int) -> None:
    """Let every batch norm inside take its statistics over `groups` equal parts of the batch.

    The parts are consecutive rows of the batch of all processes. The network is changed in place;
    parameters, statistics and their names stay. Batch norms that are in groups already stay, and
    so do all where one process has one group.
    """
    if groups > 1 or world_size() > 1:
        _grouped(network, groups)


def normalize_by_chunk(network: nn.Module, groups: int) -> None:
    """Let every batch norm inside take its statistics over one of `groups` chunks at a time.

    The network is changed in place, to be run within `accumulate_statistics`.

    Raises:
        UsageError: If a batch norm has other groups.
    """
    for norm in _grouped(network, groups):
        if norm.groups != groups:
            raise UsageError(
                f"a batch of {groups} chunks cannot have {norm.groups} groups of batch "
                "statistics; make them as many"
            )
        norm.sees_chunks = True


def _grouped(network: nn.Module, groups: int) -> list["GroupedBatchNorm"]:
    """Put the batch norms inside in groups, unless they are; return all of them."""
    for module in network.modules():
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, GroupedBatchNorm):
                setattr(module, name, GroupedBatchNorm(child, groups))
    return [module for module in network.modules() if isinstance(module, GroupedBatchNorm)]


@contextmanager
def accumulate_statistics(network: nn.Module) -> Iterator[None]:
    """Run a network chunk by chunk in a `with` block; running statistics are updated once, after.

    They are means over the chunks of all processes. The second run of a chunk, for the gradients,
    is outside of the block and does not count.
    """
    norms = [norm for norm in network.modules() if isinstance(norm, GroupedBatchNorm)]
    for norm in norms:
        norm.chunks = []
    try:
        yield
        own = {norm: torch.stack(norm.chunks).mean(dim=0) for norm in norms if norm.chunks}
        if own:
            whole = gather(torch.cat([*own.values()], dim=1)[None])  # one message for all norms
            parts = whole.mean(dim=0).split([norm.num_features for norm in own], dim=1)
            for norm, mean_var in zip(own, parts, strict=True):
                norm.update_running(mean_var)
    finally:
        for norm in norms:
            norm.chunks = None


class GroupedBatchNorm(_BatchNorm):
    """A batch norm that takes its statistics over `groups` parts of the batch of all processes.

    Running statistics, which evaluation uses, are means over the groups.

    Args:
        norm: The batch norm that it replaces and shares parameters and statistics with.
        groups: A multiple or a divisor of the number of processes.
    """

    momentum: float
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    sees_chunks: bool = False  # whether it sees one of its groups at a time
    chunks: list[Tensor] | None = None
    """What each so far made of the running statistics, within `accumulate_statistics`."""

    def __init__(self, norm: _BatchNorm, groups: int) -> None:
        if norm.momentum is None or not norm.track_running_stats:
            raise UsageError("batch norms need a momentum and running statistics to be grouped")
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine)
        self.groups = groups
        self.weight, self.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            setattr(self, name, buffer)
        # timm's batch norms apply these afterwards
        self.drop, self.act = (getattr(norm, name, nn.Identity()) for name in ("drop", "act"))
        self.train(norm.training)

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dimensions."""

    @override
    def forward(self, x: Float[Tensor, "batch channel *_"]) -> Float[Tensor, "batch channel *_"]:
        normal = self._normalize(x) if self.training else super().forward(x)
        result: Tensor = self.act(self.drop(normal))
        return result

    def _normalize(self, x: Tensor) -> Tensor:
        """Normalize this process's rows, and update the running statistics."""
        if self.sees_chunks:
            normal, running = self._one_group(x)
            if self.chunks is not None:
                self.chunks.append(running)
            return normal
        ranks = world_size()
        if self.groups % ranks == 0:
            return self._own_groups(x, self.groups // ranks)
        if ranks % self.groups == 0:
            return self._shared_group(x)
        raise UsageError(
            f"{ranks} processes cannot share {self.groups} groups of batch statistics evenly; "
            "let one number divide the other"
        )

    def _own_groups(self, x: Tensor, groups: int) -> Tensor:
        """Normalize `groups` groups, each of which is on this process alone."""
        if len(x) % groups:
            raise UsageError(f"{len(x)} rows cannot be divided evenly into {groups} groups")
        # A CPU has a fast kernel for each group. On a GPU launches count: one kernel takes all.
        if x.device.type == "cpu":
            normalized, each = zip(*map(self._one_group, x.chunk(groups)), strict=True)
            normal, running = torch.cat(normalized), torch.stack(each)
        else:
            normal, running = self._all_groups(x, groups)
        self.update_running(gather(running).mean(dim=0))
        return normal

    @torch.no_grad()
    def update_running(self, mean_var: Float[Tensor, "2 channel"]) -> None:
        """Set the running statistics to those after one more batch."""
        self.num_batches_tracked.add_(1)
        for running, value in zip((self.running_mean, self.running_var), mean_var, strict=True):
            running.copy_(value)

    def _one_group(self, rows: Tensor, beside: int = 1) -> tuple[Tensor, Tensor]:
        """Normalize a group, or several beside each other as further channels.

        Also return what they make of the running statistics.
        """
        mean, var = self.running_mean.repeat(beside), self.running_var.repeat(beside)
        affine = self.weight, self.bias
        weight, bias = (x.repeat(beside) if self.affine else None for x in affine)
        normal = F.batch_norm(rows, mean, var, weight, bias, True, self.momentum, self.eps)
        return normal, torch.stack([mean, var])

    def _all_groups(self, x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Do what `_one_group` does with each, in one kernel.

        From (group x row, channel, ...) to (row, group x channel, ...) and back, in channels_last
        memory.
        """
        parts: Tensor = x.movedim(1, -1).unflatten(0, (groups, -1))
        wide, running = self._one_group(parts.movedim(0, -2).flatten(-2).movedim(-1, 1), groups)
        apart: Tensor = wide.movedim(1, -1).unflatten(-1, (groups, -1))
        normal = apart.movedim(-2, 0).flatten(0, 1).movedim(-1, 1)
        return normal, running.unflatten(1, (groups, -1)).movedim(1, 0)

    def _shared_group(self, x: Tensor) -> Tensor:
        """Normalize rows whose group several processes share: `nn.SyncBatchNorm` is for GPUs only.

        Gradients through the statistics reach the rows of all these processes by `gather`.
        """
        gathered = gather(Moments.apply(x)[None]).unflatten(0, (self.groups, -1))
        means, variances = gathered.unbind(dim=2)  # (groups, processes, channels)
        every_mean = means.mean(dim=1)
        every_var = variances.mean(dim=1) + means.var(dim=1, correction=0)
        size = x.numel() // x.shape[1] * means.shape[1]
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(every_mean.mean(dim=0), self.momentum)
            self.running_var.lerp_(every_var.mean(dim=0) * size / (size - 1), self.momentum)
        group = group_of_rank(self.groups)
        mean, by = every_mean[group], torch.rsqrt(every_var[group] + self.eps)
        if self.affine:
            by = by * self.weight
        center = mean.detach()  # so that sums for the gradients are those of small numbers
        shift = (center - mean) * by
        return _scaled(x, center, by, shift + self.bias if self.affine else shift)
