"""The networks of a method: any backbone, a projector on top, momentum encoders."""

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import groupby, pairwise
from threading import get_ident
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from nearkin.distributed import gather, rows_of_rank, world_size
from nearkin.errors import UsageError
from nearkin.networks.batch_norm import (
    accumulate_statistics,
    normalize_by_chunk,
    normalize_in_groups,
)
from nearkin.networks.blocks import network_parts
from nearkin.networks.drop_path import DropPath, chunk_seeds

Module = TypeVar("Module", bound=nn.Module)

TRIED_SIZES: Final = (32, 224)  # of images that a network is tried with if no size is given
MIN_STEPS: Final = 5000  # of a training that repay a minute or two of compiling
MUON_SIDE: Final = 64
"""Side of views, in pixels, below which nothing is compiled beside Muon. There, launching kernels
is the limit, to which Muon adds, and those of a compiled network take longer to launch: measured
at 32 px, where larger views have more to compute for as many launches."""


class Backbone(nn.Module):
    """A network from images to features, their number, and its name in messages."""

    scale: Tensor | None
    shift: Tensor | None
    keeps_gradients: bool = True  # whether anything is kept for the gradients of its weights
    fixed: tuple[str, ...] = ()  # parts of the body that are not trained; see `train_only`
    keeps_statistics: bool = False  # whether batch norms train by the statistics they came with

    def __init__(self, body: nn.Module, feature_dim: int, name: str = "") -> None:
        super().__init__()
        self.body = body
        self.num_channels = input_channels(body)
        self.feature_dim = feature_dim
        self.name = name or type(body).__name__
        # Constants of the architecture, not memory: they are in no checkpoint.
        self.register_buffer("scale", None, persistent=False)
        self.register_buffer("shift", None, persistent=False)

    def rescale_input(self, scale: Tensor, shift: Tensor) -> None:
        """Let images be multiplied and shifted, channel by channel, before the network sees them.

        So a network of other means and deviations takes the input of all others.
        """
        device = next(self.body.parameters(), torch.zeros(())).device
        self.scale = scale.to(device)[:, None, None]
        self.shift = shift.to(device)[:, None, None]

    def train_only(self, parts: Sequence[str]) -> None:
        """Fix all parts of the body but these (see `network_parts`), and parameters in no part.

        Batch norms of parts that are fixed keep the statistics of their pretraining.
        """
        every = [part.name for part in network_parts(self.body)]
        self.fixed = tuple(name for name in every if name not in parts)
        for name, parameter in self.body.named_parameters():
            parameter.requires_grad_(name.startswith(tuple(f"{part}." for part in parts)))
        self.train(self.training)

    @override
    def train(self, mode: bool = True) -> "Backbone":
        super().train(mode)
        frozen = [self.body.get_submodule(name) for name in self.fixed]
        if self.keeps_statistics:
            frozen += [part for part in self.body.modules() if isinstance(part, _BatchNorm)]
        for module in frozen:
            module.eval()
        return self

    @override
    def forward(self, images: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch features"]:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.keeps_gradients):
            features: Tensor = self.body(self.scaled(images))
        return features.flatten(1)

    def scaled(self, images: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch ..."]:
        """Return what the network itself sees of images: rescaled, where it has a scale."""
        if self.scale is not None and self.shift is not None:
            return torch.addcmul(self.shift, images, self.scale)
        return images


def as_backbone(
    body: nn.Module, image_size: int | None = None, feature_dim: int | None = None, name: str = ""
) -> Backbone:
    """Return any network from images to features as a backbone; a `Backbone` unchanged.

    The number of features, unless it is given, is found by running the network once, on images of
    that size in pixels. Messages call it by its name, or by that of its class.

    Raises:
        UsageError: If it cannot take such images, or does not give a row of numbers for each.
    """
    if isinstance(body, Backbone):
        return body
    if feature_dim is None:
        features = _try_sizes(body, image_size, name or type(body).__name__)
        feature_dim = features.flatten(1).shape[1]
    return Backbone(body, feature_dim, name)


def input_channels(body: nn.Module) -> int:
    """Return the channels of the images of a network: of its first convolution, if it has one."""
    convolution = first_convolution(body)
    return convolution.in_channels if convolution else 3


def first_convolution(body: nn.Module) -> nn.Conv2d | None:
    """Return the convolution that sees the images: of a vision transformer, that of patches."""
    return next((module for module in body.modules() if isinstance(module, nn.Conv2d)), None)


class Branch(nn.Module):
    """A backbone, which is any network, and an `mlp` on top of it: the projector.

    `sizes` are the outputs of the projector's layers, where 0 is as many as there are features;
    without any there is no projector. `layers` are the options of `mlp`.
    Embeddings are in full precision. If `bn_groups`, batch norms take their statistics over that
    many equal parts of the batch.
    """

    chunk_size: int = 0  # rows that training computes at a time, see `set_chunk_size`; 0: all
    share: int = 0  # rows of a view on this process, see `set_share`
    copies: bool = False  # whether results are copied: CUDA graphs overwrite them when run again

    def __init__(
        self, backbone: nn.Module, *sizes: int, bn_groups: int = 0, **layers: Any
    ) -> None:
        super().__init__()
        self.backbone = as_backbone(backbone)
        features = self.backbone.feature_dim
        self.projector: nn.Module = nn.Identity()
        if sizes:
            self.projector = mlp(features, *(size or features for size in sizes), **layers)
        elif layers:
            raise TypeError(f"{', '.join(layers)} is of layers, and there are none")
        if bn_groups:
            normalize_in_groups(self, bn_groups)

    @override
    def forward(self, images: Float[Tensor, "batch _ _ _"]) -> Float[Tensor, "batch dim"]:
        return _full(_run_chunks(self, lambda rows: self.projector(self.backbone(rows)), images))

    def by_size(self, views: Sequence[Tensor]) -> tuple[Float[Tensor, "batch dim"], ...]:
        """Return the embeddings of views of one size or several, with batch statistics in common.

        Consecutive views of one size go through the backbone together, and all of them at once
        through the projector, as in the official code of SwAV and DINO.
        """
        features = torch.cat(self.features_by_size(views))
        return _full(_run_chunks(self, self.projector, features)).chunk(len(views))

    def features_by_size(
        self, views: Sequence[Tensor]
    ) -> tuple[Float[Tensor, "batch features"], ...]:
        """Return the features of views; consecutive ones of one size go through together."""
        features: list[Tensor] = []
        for _, group in groupby(views, key=lambda view: view.shape[-2:]):
            alike = list(group)
            features += _run_chunks(self, self.backbone, torch.cat(alike)).chunk(len(alike))
        return tuple(features)


def _full(embedding: Tensor) -> Tensor:
    """Return embeddings in single precision at least."""
    return embedding.to(torch.promote_types(embedding.dtype, torch.float32))


def _run_chunks(branch: Branch, network: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Run a network of a branch in its chunks, if it has a size of chunks and is being trained."""
    size = branch.chunk_size
    if not size or not branch.training:
        return network(images).clone() if branch.copies else network(images)
    if len(images) % size:
        raise UsageError(f"{len(images)} rows are not chunks of {size} each")
    chunks, devices = images.split(size), [images.device] if images.is_cuda else []

    def run(rows: Tensor, seed: int | None) -> Tensor:
        with torch.random.fork_rng(devices, enabled=seed is not None):
            if seed is not None:
                # On a CPU it would seed the generators of GPUs, which are not restored.
                (torch.manual_seed if devices else torch.default_generator.manual_seed)(seed)
            return network(rows)

    with accumulate_statistics(branch):
        seeds = chunk_seeds(branch, len(chunks), branch.share // size)
        parts = zip(chunks, seeds, strict=True)
        return torch.cat([checkpoint(run, *part, use_reentrant=False) for part in parts])


def mlp(
    *sizes: int,
    norm: bool = True,
    last_norm: bool = False,
    affine: bool = False,
    activation: type[nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Return linear layers with an activation between them, batch-normalized if `norm`.

    `last_norm` ends on a batch norm, without scale or shift (Chen & He 2021) unless `affine`.
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes[:-1]):
        layers += [nn.Linear(fan_in, fan_out, bias=not norm)]
        layers += [nn.BatchNorm1d(fan_out)] if norm else []
        layers += [activation()]
    layers += [nn.Linear(sizes[-2], sizes[-1], bias=not last_norm)]
    layers += [nn.BatchNorm1d(sizes[-1], affine=affine)] if last_norm else []
    return nn.Sequential(*layers)


def frozen_copy(module: Module) -> Module:
    """Return a copy that no gradient reaches: the start of a momentum encoder.

    It drops no paths, as the teacher of DINO's official code.
    """
    copied = copy.deepcopy(module).requires_grad_(False)
    for part in copied.modules():
        if isinstance(part, DropPath):
            part.rate = 0.0
    return copied


def freeze_backbones(network: nn.Module, frozen: bool) -> None:
    """Let the backbones inside compute just as evaluation will run them, or train them again.

    Frozen ones, those of momentum encoders too, normalize by their running statistics, which
    do not move: heads learn on the very features that the backbone started with, and a backbone
    whose weights stay is the same afterwards, bit for bit. Nothing is kept for gradients, but
    with several processes, which wait for those of all weights.
    """
    for module in network.modules():
        if isinstance(module, Backbone):
            module.train(not frozen)
            module.keeps_gradients = not frozen or world_size() > 1


def trained_backbones(network: nn.Module) -> list[Backbone]:
    """Return the backbones inside that are trained: not those of momentum encoders."""
    inside = (module for module in network.modules() if isinstance(module, Backbone))
    return [each for each in inside if any(p.requires_grad for p in each.parameters())]


def freeze_first_convolution(backbone: Backbone) -> None:
    """Let the first convolution of a backbone keep its weights; refuse one without any."""
    convolution = first_convolution(backbone)
    if convolution is None:
        raise UsageError(f"backbone {backbone.name} has no convolution, whose weights would stay")
    convolution.requires_grad_(False)


@torch.no_grad()
def ema_update(target: nn.Module, online: nn.Module, momentum: float) -> None:
    """Move parameters, `t <- m t + (1 - m) o`; batch-norm statistics remain the target's own."""
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 1 - momentum)


def shuffle_bn(network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a network on the rows of all processes in a random order (He et al. 2020, section 3.3).

    So keys do not share batch statistics with their queries. The result is in the order of `x`.
    """
    order = torch.randperm(len(x) * world_size(), device=x.device)
    own = rows_of_rank(len(order))
    with torch.no_grad():
        shuffled = gather(x)[order[own]]
    return gather(network(shuffled))[order.argsort()[own]]


def set_chunk_size(network: nn.Module, size: int, batch_size: int) -> None:
    """Let every branch inside compute `size` images at a time: the memory of a small batch.

    The loss sees the embeddings of all chunks at once, and activations are computed again chunk by
    chunk for the gradients. Gradients are those of the whole batch, with batch statistics over
    each chunk (Gao et al. 2021, arXiv:2101.06983). Momentum encoders run in chunks too; predictors
    and heads do not. A chunk holds one view, of one process; `batch_size` is that of all. State
    and names stay as they are.

    Raises:
        UsageError: If a process's share of the batch does not consist of whole chunks, or batch
            statistics are over other groups already.
    """
    if size < 2 or batch_size % (size * world_size()):
        raise UsageError(
            f"chunks of {size} images do not divide a batch of {batch_size} over {world_size()} "
            "processes evenly; choose a size that does, of 2 or more"
        )
    for branch in network.modules():
        if isinstance(branch, Branch):
            normalize_by_chunk(branch, batch_size // size)
            branch.chunk_size = size
            for part in branch.modules():
                if isinstance(part, DropPath):
                    part.in_chunks = True


def set_share(network: nn.Module, rows: int) -> None:
    """Say how many rows of each view this process has: networks draw for all processes by it."""
    for module in network.modules() if world_size() > 1 else ():
        if isinstance(module, Branch | DropPath):
            module.share = rows


@contextmanager
def eval_mode(network: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode for a `with` block, then each back as it was."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:  # not `network.train()`: some modules may have been frozen
        for module, training in modes:
            module.training = training


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable[..., None]) -> Iterator[None]:
    """Call a function with the inputs and output of each of these modules in a `with` block.

    Other threads may run the same network meanwhile; what they compute is not passed.
    """
    caller = get_ident()

    def own(*passed: Any) -> None:
        if torch.compiler.is_compiling() or get_ident() == caller:
            hook(*passed)

    handles = [module.register_forward_hook(own) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def trial(network: nn.Module, size: int) -> Iterator[Tensor]:
    """Give two images of zeros that a network can be tried with, and leave it as it is."""
    device = next(network.parameters(), torch.zeros(())).device
    with torch.no_grad(), eval_mode(network):
        yield torch.zeros(2, input_channels(network), size, size, device=device)


def _try_sizes(body: nn.Module, image_size: int | None, name: str) -> Tensor:
    """Return the features of two images, of the size given or of the first that fits."""
    sizes = TRIED_SIZES if image_size is None else (image_size,)
    for size in sizes:
        try:
            with trial(body, size) as images:
                features = body(images)
        except Exception as error:  # a network of the user's may raise anything
            if size == sizes[-1]:
                raise size_error(name, size, error) from error
        else:
            if isinstance(features, Tensor) and features.ndim > 1 and len(features) == 2:
                return features
    actual = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
    raise UsageError(
        f"backbone {name} gives {actual} for two images; give a network whose result is a "
        "tensor with a row of features per image"
    )


def size_error(name: str, image_size: int, error: Exception) -> UsageError:
    """Say that a network cannot take images of a size."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UsageError(
        f"backbone {name} cannot take images of {image_size} px ({reason}); "
        "choose another --image-size, mostly a larger one, or another --backbone"
    )


def should_compile(device: torch.device, steps: int, *, optimizer: str, side: int) -> bool:
    """Return whether compiling is possible here and saves time over that many steps.

    On CPUs, and of small views beside Muon, it was measured not to (docs/benchmarks.md). `side` is
    that of the largest views, in pixels.
    """
    able = find_spec("triton") and any(map(shutil.which, ("cc", "gcc", "clang")))
    pays = steps >= MIN_STEPS and (optimizer != "muon" or side >= MUON_SIDE)
    return device.type == "cuda" and pays and bool(able)


def compile_branches(method: nn.Module, *, graphs: bool = False) -> None:
    """Let torch compile backbones and projectors when they are first run, as CUDA `graphs` or not.

    Names and state stay as they are, and copies of the method are not compiled. Results are
    close to those of the same networks uncompiled, not equal.
    """
    branches = [module for module in method.modules() if isinstance(module, Branch)]
    for branch in branches:
        branch.copies = graphs
    for network in dict.fromkeys(part for branch in branches for part in branch.children()):
        # A graph for each size of views: one for sizes in general would be slower for all.
        network.compile(mode="reduce-overhead" if graphs else "default", dynamic=False)
